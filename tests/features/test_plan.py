"""What a target takes: the jobs that Snakemake would run, by sizes of presets and by measured rates."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.features.conftest import Fails
from vse.cli import data_main as main
from vse.features import up_to_date
from vse.features.plan import DEFAULT_EPOCHS, estimate_plan, load_rates
from vse.features.settings import load_feature_preset
from vse.features.up_to_date import read_local_rates
from vse.pipeline.workflow import PlannedFile
from vse.training.experiment import load_experiment
from vse.training.settings import TrainConfig

ROOT = Path(__file__).parents[2]
RATES = load_rates()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def forked_snakemake(commands: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m snakemake`` is a fork of a process that has imported it, which spares seconds."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nshift 2\nexec {commands}/snakemake "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def shards(dataset: str, feature: str, numbers: range, n: int) -> list[PlannedFile]:
    stem = f"features/{dataset}_{feature}.shards/shard"
    return [PlannedFile("extract", Path(f"{stem}-{k:05d}-of-{n:05d}.{end}")) for k in numbers for end in ("h5", "json")]


def test_a_cache_is_its_rows_by_its_numbers_and_the_shards_that_lack() -> None:
    plan = estimate_plan(shards("coco", "fc7", range(16), 64), RATES)
    rows = 123_287 / 4
    assert plan.job_counts == {"extract": 16}
    assert [size for size, _ in plan.cache_sizes] == [pytest.approx(rows * 4096 * 2)]
    assert [one.seconds for one in plan.durations] == [pytest.approx(rows / 7.8)]
    assert plan.download_sizes[0][1].startswith("weights of vgg19, unless")


@pytest.mark.parametrize(
    ("feature", "size", "seconds"),
    [
        ("fc7_10c", 31_014 * 4096 * 2, 31_014 * 10 / 7.8),
        ("effnet_rc", 31_014 * 10 * 1280 * 2, 31_014 * 10 / 87.6),
        ("resnet_grid", 31_014 * 49 * 2048 * 2, 31_014 / 11.3),
        ("resnet_map_400", 31_014 * 13**2 * 2048 * 2, 31_014 / 11.3 * (400 / 224) ** 2),
        ("resnet_map_400_eval", 2_014 * 13**2 * 2048 * 2, 2_014 / 11.3 * (400 / 224) ** 2),
        ("regions", 31_014 * 36 * 1024 * 2, None),
        ("hglmm", 155_070 * 6000 * 2, 155_070 / 1429),
        ("minilm", 155_070 * 384 * 2, 155_070 / 430),
        ("tfidf", None, 155_070 / 4444),
        ("minilm_tokens", None, 155_070 / 430),
        ("minilm_phrases", None, None),
    ],
)
def test_what_is_not_known_of_a_feature_is_said(feature: str, size: float | None, seconds: float | None) -> None:
    plan = estimate_plan(shards("f30k", feature, range(4), 4), RATES)
    assert [amount for amount, _ in plan.cache_sizes] == ([] if size is None else [pytest.approx(size)])
    assert [one.seconds for one in plan.durations] == ([] if seconds is None else [pytest.approx(seconds)])
    unknown = " ".join(text for text in plan.unknown_amounts if f"f30k_{feature}" in text)
    assert ("size" in unknown, "time" in unknown) == (size is None, seconds is None)


def run_of(dataset: str, experiment: str) -> list[PlannedFile]:
    return [PlannedFile("train", Path(f"runs/{dataset}_{experiment}/seed-0/run.json"))]


def test_a_training_is_its_pairs_and_epochs_by_the_rate_of_earlier_ones(folder: Path) -> None:
    assert TrainConfig().epochs == DEFAULT_EPOCHS
    assert [one.seconds for one in estimate_plan(run_of("f30k", "vsepp"), RATES).durations] == [
        pytest.approx(145_000 * 30 / 538)
    ]
    on_restval = estimate_plan(run_of("coco", "scan_t2i_avg"), RATES).durations
    assert on_restval[0].seconds == pytest.approx((414_113 + 152_634) * 20 / 48)
    assert "no rate of twobranch" in estimate_plan(run_of("f30k", "twobranch"), RATES).unknown_amounts[0]


def write_run(
    folder: Path, dataset: str, experiment: str, seconds: float, state: str = "finished", command: str = "vse-train"
) -> Path:
    run = folder / f"runs/{dataset}_{experiment}/seed-0"
    run.mkdir(parents=True)
    record = {"dataset": dataset, "experiment": experiment, "state": state, "n_train_pairs": 300, "epochs": 2}
    record |= {"train_seconds": seconds, "device": "cpu", "made": {"command": command}}
    (run / "run.json").write_text(json.dumps(record))
    settings = load_experiment(experiment, dataset).model_dump(mode="json")
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return run


def test_a_run_of_this_machine_gives_the_rate_of_the_same_model_and_feature(folder: Path) -> None:
    write_run(folder, "f8k", "twobranch", 6.0)
    (duration,) = estimate_plan(run_of("f30k", "twobranch"), RATES, read_local_rates(folder)).durations
    assert duration.is_measured_here
    assert duration.seconds == pytest.approx(145_000 * 20 / 100)
    assert duration.description.endswith("100.0 per second, measured here on cpu")


def test_a_run_that_is_not_finished_or_has_other_settings_gives_no_rate(folder: Path) -> None:
    write_run(folder, "f8k", "vse0", 6.0, state="running")
    write_run(folder, "f8k", "vsepp", 6.0, command="vse-train --features x.h5 --set model.dim=64")
    edited = write_run(folder, "f8k", "order0", 6.0) / "config.yaml"  # the preset has been edited since
    edited.write_text(edited.read_text().replace("name: order", "name: cosine"))
    write_run(folder, "f8k", "orderpp", 6.0)
    rates = read_local_rates(folder)
    known = {name: rates.find_training_rate("f8k", name) for name in ("vse0", "vsepp", "order0", "orderpp")}
    assert [name for name, rate in known.items() if rate is not None] == ["orderpp"]


def test_the_demo_whose_network_and_model_are_smaller_gives_no_rate_of_coco(folder: Path) -> None:
    write_run(folder, "demo", "vsepp", 0.001)
    own = read_local_rates(folder)
    assert estimate_plan(run_of("demo", "vsepp"), RATES, own).durations[0].is_measured_here
    (duration,) = estimate_plan(run_of("coco", "vsepp"), RATES, own).durations
    assert not duration.is_measured_here
    assert duration.description.endswith("538.0 per second, measured on another machine")


def test_a_cache_of_this_machine_gives_the_rate_of_the_same_settings(folder: Path) -> None:
    settings = {**load_feature_preset("fc7", "coco").list_cache_key_settings(), "precision": "fp32"}
    (folder / "features/f8k_fc7.shards").mkdir(parents=True)
    for k, seconds in enumerate((10.0, 30.0)):
        record = {"rows": 400, "seconds": seconds, "identity": {"content": {"config": settings}}}
        (folder / f"features/f8k_fc7.shards/shard-{k:05d}-of-00002.json").write_text(json.dumps(record))
    own = read_local_rates(folder)
    (same,) = estimate_plan(shards("coco", "fc7", range(64), 64), RATES, own).durations
    assert (same.seconds, same.is_measured_here) == (pytest.approx(123_287 / 20), True)
    (other,) = estimate_plan(shards("demo", "fc7", range(4), 4), RATES, own).durations or [None]
    assert other is None or not other.is_measured_here


def test_a_calibration_scales_the_rates_of_another_machine_alone(folder: Path) -> None:
    write_run(folder, "f8k", "twobranch", 6.0)
    own = read_local_rates(folder)
    planned = [*run_of("f30k", "vsepp"), *run_of("f30k", "twobranch")]
    plain = estimate_plan(planned, RATES, own).durations
    calibrated = estimate_plan(planned, RATES, replace(own, relative_speed=2.0)).durations
    assert [one.seconds for one in calibrated] == pytest.approx([plain[0].seconds / 2, plain[1].seconds])


def test_a_calibration_measures_a_positive_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_to_date, "CALIBRATION_SECONDS", 0.05)
    assert up_to_date.measure_calibration() > 0
    assert RATES.calibration_per_s is not None


def test_downloads_are_the_files_that_are_not_there(folder: Path) -> None:
    prepare = [PlannedFile("prepare", Path("data/coco/dataset.json"))]
    assert sum(size for size, _ in estimate_plan(prepare, RATES).download_sizes) == 36_745_453 + 13_510_573_713 + 6_645_013_297
    (folder / "data/coco/images/train2014").mkdir(parents=True)
    left = [text for _, text in estimate_plan(prepare, RATES).download_sizes]
    assert [text.partition(",")[0] for text in left] == ["caption_datasets.zip", "val2014.zip"]
    asked = estimate_plan([PlannedFile("prepare", Path("data/f30k/dataset.json"))], RATES)
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


@pytest.mark.slow
@pytest.mark.usefixtures("forked_snakemake")
def test_a_calibration_names_the_speed_of_this_machine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_to_date, "CALIBRATION_SECONDS", 0.05)
    (folder / "Snakefile").write_text(f'include: "{ROOT}/Snakefile"\n')
    with pytest.raises(SystemExit) as stop:
        main(["plan", "results/coco_vsepp.json", "--calibrate"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "scaled from another machine" in out
    assert "This machine has " in out


def test_without_the_workflow_there_is_no_plan(fails: Fails) -> None:
    assert "Snakefile: no such file; run this in the folder of the workflow" in fails(main, "plan", "results/demo_vsepp.json")


@pytest.mark.slow
def test_snakemake_knows_the_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "Snakefile").write_text(f'include: "{ROOT}/Snakefile"\n')
    with pytest.raises(SystemExit) as stop:
        main(["plan", "results/coco_vsepp.json"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("69 jobs to run (1 embed, 1 evaluate, 64 extract, 1 merge, 1 prepare, 1 train)")
    assert [line for line in lines if line.startswith(("caches:", "time:"))] == ["caches: 1.01 GB", "time: 3.6 h to 32.4 h"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_snakemake")
def test_a_target_that_no_rule_makes_is_refused(folder: Path, fails: Fails) -> None:
    (folder / "Snakefile").write_text(f'include: "{ROOT}/Snakefile"\n')
    assert "the workflow refuses: " in fails(main, "plan", "results/nothing.json")
    assert "did you mean 'vsepp'" in fails(main, "plan", "results/coco_vsep.json")
