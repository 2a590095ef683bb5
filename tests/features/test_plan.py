"""What a target takes: the jobs that Snakemake would run, by sizes of presets and by measured rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.features.conftest import Fails
from vse.features.data_cli import main
from vse.features.plan import DEFAULT_EPOCHS, estimate_plan, load_rates, read_training_rates
from vse.pipeline.workflow import PlannedFile
from vse.training.settings import TrainConfig

ROOT = Path(__file__).parents[2]
RATES = load_rates()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shards(dataset: str, feature: str, numbers: range, n: int) -> list[PlannedFile]:
    stem = f"features/{dataset}_{feature}.shards/shard"
    return [PlannedFile("extract", Path(f"{stem}-{k:05d}-of-{n:05d}.{end}")) for k in numbers for end in ("h5", "json")]


def test_a_cache_is_its_rows_by_its_numbers_and_the_shards_that_lack() -> None:
    plan = estimate_plan(shards("coco", "fc7", range(16), 64), RATES, {})
    rows = 123_287 / 4
    assert plan.job_counts == {"extract": 16}
    assert [size for size, _ in plan.cache_sizes] == [pytest.approx(rows * 4096 * 2)]
    assert [seconds for seconds, _ in plan.durations] == [pytest.approx(rows / 7.8)]
    assert plan.download_sizes[0][1].startswith("weights of vgg19, unless")


@pytest.mark.parametrize(
    ("feature", "size", "seconds"),
    [
        ("fc7_10c", 31_014 * 4096 * 2, 31_014 * 10 / 7.8),
        ("effnet_rc", 31_014 * 10 * 1280 * 2, 31_014 * 10 / 87.6),
        ("resnet_grid", 31_014 * 49 * 2048 * 2, 31_014 / 11.3),
        ("resnet_map_400", 31_014 * 13**2 * 2048 * 2, 31_014 / 11.3 * (400 / 224) ** 2),
        ("regions", 31_014 * 36 * 1024 * 2, None),
        ("hglmm", 155_070 * 6000 * 2, 155_070 / 1429),
        ("minilm", 155_070 * 384 * 2, 155_070 / 430),
        ("tfidf", None, 155_070 / 4444),
        ("minilm_tokens", None, 155_070 / 430),
        ("minilm_phrases", None, None),
    ],
)
def test_what_is_not_known_of_a_feature_is_said(feature: str, size: float | None, seconds: float | None) -> None:
    plan = estimate_plan(shards("f30k", feature, range(4), 4), RATES, {})
    assert [amount for amount, _ in plan.cache_sizes] == ([] if size is None else [pytest.approx(size)])
    assert [amount for amount, _ in plan.durations] == ([] if seconds is None else [pytest.approx(seconds)])
    unknown = " ".join(text for text in plan.unknown_amounts if f"f30k_{feature}" in text)
    assert ("size" in unknown, "time" in unknown) == (size is None, seconds is None)


def run_of(dataset: str, experiment: str) -> list[PlannedFile]:
    return [PlannedFile("train", Path(f"runs/{dataset}_{experiment}/seed-0/run.json"))]


def test_a_training_is_its_pairs_and_epochs_by_the_rate_of_earlier_ones(folder: Path) -> None:
    assert TrainConfig().epochs == DEFAULT_EPOCHS
    assert [s for s, _ in estimate_plan(run_of("f30k", "vsepp"), RATES, {}).durations] == [pytest.approx(145_000 * 30 / 538)]
    on_restval = estimate_plan(run_of("coco", "scan_t2i_avg"), RATES, {}).durations
    assert on_restval[0][0] == pytest.approx((414_113 + 152_634) * 20 / 48)
    assert "no rate of twobranch" in estimate_plan(run_of("f30k", "twobranch"), RATES, {}).unknown_amounts[0]
    (folder / "runs/f8k_twobranch/seed-0").mkdir(parents=True)
    record = {"experiment": "twobranch", "state": "finished", "n_train_pairs": 300, "epochs": 2, "train_seconds": 6.0}
    (folder / "runs/f8k_twobranch/seed-0/run.json").write_text(json.dumps(record))
    (folder / "runs/f8k_other/seed-0").mkdir(parents=True)
    (folder / "runs/f8k_other/seed-0/run.json").write_text('{"experiment": "other", "state": "running"}')
    assert read_training_rates() == {"twobranch": 100.0}
    assert "as measured in runs/" in estimate_plan(run_of("f30k", "twobranch"), RATES, read_training_rates()).durations[0][1]


def test_downloads_are_the_files_that_are_not_there(folder: Path) -> None:
    prepare = [PlannedFile("prepare", Path("data/coco/dataset.json"))]
    assert (
        sum(size for size, _ in estimate_plan(prepare, RATES, {}).download_sizes)
        == 36_745_453 + 13_510_573_713 + 6_645_013_297
    )
    (folder / "data/coco/images/train2014").mkdir(parents=True)
    left = [text for _, text in estimate_plan(prepare, RATES, {}).download_sizes]
    assert [text.partition(",")[0] for text in left] == ["caption_datasets.zip", "val2014.zip"]
    asked = estimate_plan([PlannedFile("prepare", Path("data/f30k/dataset.json"))], RATES, {})
    assert "size of the images of f30k" in asked.unknown_amounts[0]


def test_rates_of_another_machine_count_before_those_that_ship(folder: Path, fails: Fails) -> None:
    mine = folder / "mine.yaml"
    mine.write_text("machine: a GPU\nnetworks: { vgg19: { per_s: { fp32: 900 } } }\n")
    rates = load_rates(mine)
    assert rates.machine.startswith("a GPU; where mine.yaml has none: two cores")
    vgg = rates.networks["vgg19"]
    assert (vgg.per_s, vgg.numbers["penultimate"]) == ({"fp32": 900, "bf16": 29.4}, 4096)
    mine.write_text("netwroks: {}\n")
    assert "unknown setting 'netwroks' (did you mean 'networks.per_s'" in fails(
        main, "plan", "results/x.json", "--rates", mine
    )


def test_without_the_workflow_there_is_no_plan(fails: Fails) -> None:
    assert "Snakefile: no such file; run this in the folder of the workflow" in fails(main, "plan", "results/demo_vsepp.json")


@pytest.mark.slow
def test_snakemake_knows_the_jobs(folder: Path, capsys: pytest.CaptureFixture[str], fails: Fails) -> None:
    (folder / "Snakefile").write_text(f'include: "{ROOT}/Snakefile"\n')
    with pytest.raises(SystemExit) as stop:
        main(["plan", "results/coco_vsepp.json"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("69 jobs to run (1 embed, 1 evaluate, 64 extract, 1 merge, 1 prepare, 1 train)")
    assert [line for line in lines if line.startswith(("caches:", "time:"))] == ["caches: 1.01 GB", "time: 10.8 h"]
    assert "the workflow refuses: " in fails(main, "plan", "results/nothing.json")
    assert "did you mean 'vsepp'" in fails(main, "plan", "results/coco_vsep.json")
