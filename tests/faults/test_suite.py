"""The page of faults prints the committed counts."""

from __future__ import annotations

import pandas as pd

from tests.faults.suite import COUNTS, PAGE, page_with_counts


def test_the_page_prints_the_committed_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_counts(page, pd.read_csv(COUNTS)) == page, "python -m tests.faults.suite writes the table"


def test_the_committed_counts_are_zeros_or_explained() -> None:
    table, page = pd.read_csv(COUNTS), PAGE.read_text(encoding="utf-8")
    explanations = page.partition("## Exceptions and limits")[2]
    for row in table[(table["wrong"] > 0) | (table["silent"] > 0)].to_dict("records"):
        assert f"**{row['suite']}**" in explanations, f"{row['suite']} needs a sentence on the page"
