from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.conftest import Patch
from vse.pipeline.errors import UserError
from vse.pipeline.workflow import check_targets


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("results/demo_vspp.json", "unknown experiment 'vspp' (did you mean 'vsepp'?"),
        ("results/f8j_vsepp.json", "unknown dataset 'f8j' (did you mean 'f8k'?"),
        ("features/demo_fc8.h5", "unknown feature 'fc8' (did you mean 'fc7'?"),
        ("runs/demo_vsep/seed-0/run.json", "unknown experiment 'vsep' (did you mean 'vsepp'?"),
        ("features/demo_vsep-0_images.h5", "unknown experiment 'vsep' (did you mean 'vsepp'?"),
        ("data/dem/dataset.json", "unknown dataset 'dem' (did you mean 'demo'?"),
        ("results/demo_vspp+words+fc7.json", "unknown experiment 'vspp' (did you mean 'vsepp'?"),
        ("results/demo_vsepp+words+fc8.json", "unknown feature 'fc8' (did you mean 'fc7'?"),
        ("results/demo_vsepp+tfdif+fc7.json", "unknown feature 'tfdif' (did you mean 'tfidf'?"),
        ("runs/demo_vsepp@dem+words+fc7/seed-0/run.json", "unknown ladder 'dem' (did you mean 'demo'?"),
        ("resluts/demo_vsepp.json", "did you mean results/demo_vsepp.json?"),
    ],
)
@pytest.mark.parametrize("before", [["4"], ["all", "-n"], ["4", "--"], ["4", "-c8"]])
def test_a_mistyped_target_is_answered_with_the_nearest(before: list[str], target: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_targets(["snakemake", "--cores", *before, target])
    assert message in str(error.value)
    assert len(str(error.value)) < 1200


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["all"], ["results/demo_vsepp.json", "features/demo_fc7.h5", "data/demo/dataset.json"],
        ["features/demo_vsepp-0_images.h5", "features/demo_vsepp-12_captions.h5"],
        ["results/tables/vsepp_4.csv", "results/tables/summary_demo.csv", "results/tables/ladder_demo.csv"],
        ["results/corrected/demo_vsepp_csls.json"],
        ["results/demo_vsepp+words+fc7.json", "runs/demo_vsepp@demo+tfidf+effnet/seed-0/test.h5"],
        ["--report", "reports/x.html"], ["--config", "weights_dir=/data/x.h5"],
        ["--target-jobs", "evaluate:dataset=demo,experiment=vsepp"],
        ["elsewhere/x.json", "/absolute/results/x.json", "x" * 5000],
    ],
)  # fmt: skip
def test_what_may_be_right_is_left_to_snakemake(arguments: list[str]) -> None:
    check_targets(["snakemake", *arguments])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("features/demo_duo-0_images.h5", "^duo is an ensemble and has no run but .*_vse0; .* results/demo_duo.json"),
        ("runs/demo_duo/seed-0/test.h5", "^duo is an ensemble and has no run but .*_vse0; .* results/demo_duo.json"),
        ("results/demo_duet.html", "^experiment 'duet': ensemble_of: unknown experiment 'vsep' .did you mean 'vsepp'"),
    ],
)
def test_an_ensemble_has_results_and_known_members(target: str, message: str, tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "duo.yaml").write_text("ensemble_of: [vsepp, vse0]")
    (tmp_path / "experiments" / "duet.yaml").write_text("ensemble_of: [vsep, vse0]")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    check_targets(["snakemake", "results/demo_duo.json", "results/demo_duo.html", "runs/demo_vse0/seed-0/test.h5"])
    with pytest.raises(UserError, match=message):
        check_targets(["snakemake", target])


def test_what_is_there_is_no_mistake(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    Path("results/demo_mine.json").touch()
    check_targets(["snakemake", "results/demo_mine.json"])
