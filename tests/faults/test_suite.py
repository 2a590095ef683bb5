"""The counting of faults itself: a suite fails for each try that went wrong, and the page prints the committed counts."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.faults.suite import COUNTS, PAGE, Suite, page_with_counts


def suite_of(*outcomes: str) -> Suite:
    suite = Suite("flips", n_tries=len(outcomes), command="pytest x")
    for number, outcome in enumerate(outcomes):
        suite.record(outcome, f"byte {number}")  # type: ignore[arg-type]
    return suite


def test_a_suite_without_faults_passes() -> None:
    suite_of("refused", "harmless").check()


@pytest.mark.parametrize("outcome", ["wrong", "silent"])
def test_a_suite_names_the_try_that_went_wrong(outcome: str) -> None:
    with pytest.raises(AssertionError, match=f"1 of 2 tries\n{outcome}: byte 1"):
        suite_of("refused", outcome).check()


def test_a_suite_without_tries_fails() -> None:
    with pytest.raises(AssertionError, match="no try"):
        suite_of().check()


def test_saving_replaces_the_row_of_the_same_suite(tmp_path: Path) -> None:
    counts = tmp_path / "faults.csv"
    suite_of("silent").save(counts)
    Suite("others", 0, "pytest y").save(counts)
    suite_of("refused", "refused").save(counts)
    table = pd.read_csv(counts).set_index("suite")
    assert table.loc["flips", ["tries", "refused", "silent"]].tolist() == [2, 2, 0]
    assert list(table.index) == ["flips", "others"]


def test_the_page_prints_the_committed_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_counts(page, pd.read_csv(COUNTS)) == page, "python -m tests.faults.suite writes the table"


def test_the_committed_counts_are_zeros_or_explained() -> None:
    table, page = pd.read_csv(COUNTS), PAGE.read_text(encoding="utf-8")
    explanations = page.partition("## Exceptions and limits")[2]
    for row in table[(table["wrong"] > 0) | (table["silent"] > 0)].to_dict("records"):
        assert f"**{row['suite']}**" in explanations, f"{row['suite']} needs a sentence on the page"
