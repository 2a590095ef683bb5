"""docs/performance.md says what the CSVs of the benchmarks say, and the scripts run at tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import performance, works
from benchmarks.schedule import Cluster, expect, simulate
from benchmarks.works import Work, cell
from tests.docs.pages import ROOT
from vse.features.settings import load_feature_preset
from vse.features.settings.base import FeatureSettings
from vse.training.experiment import ExperimentConfig, load_experiment

RESULTS = ROOT / "docs" / "results"
WORKS_THAT_GROW = ("evaluation", "extraction", "Fisher vectors", "training", "search", "workflow", "dataset.json")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of benchmarks/results/."""
    monkeypatch.setattr(works, "RESULTS", tmp_path)
    works.table_of.cache_clear()
    yield tmp_path
    works.table_of.cache_clear()


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.csv").write_text(text)


def test_the_page_has_the_numbers_of_the_csvs() -> None:
    page = performance.PAGE.read_text(encoding="utf-8")
    assert performance.filled(page, performance.blocks()) == page, "python -m benchmarks.performance writes it"
    tables = [works.measured(avx2=avx2).dropna(subset="now") for avx2 in (False, True)]
    assert performance.as_csv(pd.concat(tables)) == (RESULTS / "performance.csv").read_text(encoding="utf-8")


MEASURING = ("extraction", "hglmm", "scan", "steps", "text", "tfidf", "training", "waiting")
WITHOUT_SETTINGS = ("dataset", "ranks", "ranks_memory", "evaluation", "index", "large_data", "planning", "reading")
# of the demo, of made-up vectors, or of Flickr8k
ON_OTHER_RUNS = ("demo", "seeds", "startup", "searching", "clients", "shortlist")


def facts_of(settings: ExperimentConfig | FeatureSettings) -> dict[str, object]:
    """The settings that decide how long a training step, or the vector of an image or a caption, takes."""
    if isinstance(settings, ExperimentConfig):
        train = settings.train.model_dump(include={"batch_size", "clip", "optimizer"})
        return {**settings.model_dump(include={"model", "loss"}), **train}
    return settings.model_dump(exclude={"name", "weights", "dtype", "workers"})


def settings_of(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, ExperimentConfig | FeatureSettings]:
    """The settings that a benchmark measures, by the name of their preset."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    content = run_path(str(ROOT / "benchmarks" / f"{script}.py"))
    if script == "waiting":  # loads its settings in new processes
        return {"vsepp": load_experiment("vsepp", dataset="demo", sets=content["SETS"])}
    measured: dict[str, ExperimentConfig | FeatureSettings] = content["MEASURED"]
    return measured


@pytest.mark.parametrize("script", MEASURING)
def test_a_benchmark_measures_the_settings_of_a_preset(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, settings in settings_of(script, monkeypatch).items():
        if isinstance(settings, ExperimentConfig):
            presets = [load_experiment(settings.name, dataset=dataset) for dataset in (None, "demo")]
            assert facts_of(settings) in [facts_of(preset) for preset in presets], name
        else:
            assert facts_of(settings) == facts_of(load_feature_preset(name))


def test_the_shortlist_is_measured_with_a_model_of_a_preset() -> None:
    cards = pd.read_csv(RESULTS / "flickr8k" / "cards.csv", index_col="experiment")
    assert "model." not in cards.loc["todnet_minilm", "changes"]


def test_every_program_of_the_page_is_one_of_these() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    measured = {max((s for s in scripts if work.now.csv.startswith(s)), key=len) for work in works.WORKS}
    assert measured == {*MEASURING, *WITHOUT_SETTINGS, *ON_OTHER_RUNS}


def test_a_csv_of_the_first_machine_and_the_newest_torch_counts(results: Path) -> None:
    write(results, "x_intel-xeon-processor_2-cores_torch-3.0.0", "s\n1\n")
    write(results, "x_amd-epyc_2-cores_torch-2.9.0", "s\n2\n")
    write(results, "x_amd-epyc_2-cores_torch-2.15.0", "s\n3\n")
    write(results, "x_more_amd-epyc_2-cores_torch-9.0.0", "s\n4\n")
    assert works.value_of(cell("x", "s")) == 3
    assert works.machine_of("x") == "AMD EPYC, 2 cores, torch 2.15.0"


def test_a_number_is_that_of_the_only_row_that_fits(results: Path) -> None:
    write(results, "x_amd-epyc_2-cores_torch-2.15.0", "who,n,s\nours,1,5\nours,2,6\ntheirs,1,7\n")
    assert works.value_of(cell("x", "s", who="ours", n=2)) == 6
    assert np.isnan(works.value_of(cell("x", "s", who="nobody")))
    assert np.isnan(works.value_of(cell("x", "missing")))
    assert np.isnan(works.value_of(cell("y", "s")))
    with pytest.raises(ValueError, match="2 rows"):
        works.value_of(cell("x", "s", who="ours"))


@pytest.mark.parametrize(
    ("unit", "goal", "times_limit", "to_reach", "verdict"),
    [
        ("s", (3, "limit"), 2.5, 6, "reached"),
        ("s", (1.5, ""), 2.5, 1.5, "not reached"),
        ("pairs/s", (1.5, "limit"), 0.4, 4 / 3, "reached"),  # of a rate more is better
        ("pairs/s", (1.5, "peer"), 0.4, np.nan, ""),
    ],
)
def test_a_row_is_compared_with_its_limit_and_its_goal(
    results: Path, unit: str, goal: tuple[float, str], times_limit: float, to_reach: float, verdict: str
) -> None:
    write(results, "x_amd-epyc_2-cores_torch-2.15.0", "ours,best\n5,2\n")
    table = works.measured([Work("a work", unit, cell("x", "ours"), limit=("best", cell("x", "best")), to_reach=goal)])
    assert table["times_limit"].item() == pytest.approx(times_limit)
    assert table["to_reach"].item() == pytest.approx(to_reach, nan_ok=True)
    row = performance.work_block(table).splitlines()[2]
    assert row.removesuffix(" |").rpartition(" | ")[2].partition(": ")[2] == verdict
    assert "2 (best)" in row


@given(st.floats(0.8, 3), st.floats(1e-3, 1e3), st.floats(0, 100))
def test_the_exponent_of_a_power_is_that_power_whatever_it_takes_to_start(power: float, factor: float, start: float) -> None:
    sizes = np.logspace(1, 4, 7)
    assert performance.exponent(sizes, start + factor * sizes**power) == pytest.approx(power, rel=0.1)
    assert performance.exponent(sizes, start + factor * sizes) == pytest.approx(1)
    assert np.isnan([performance.exponent([1, 10, 100], seconds) for seconds in ([2, 2, 2], [2, 1, 1])]).all(), "no growth"


def run_script(name: str, out: Path, *options: str) -> pd.DataFrame:
    """Run a script of benchmarks/ and read the CSV that it writes."""
    command = [sys.executable, f"benchmarks/{name}.py", "--out", str(out), *options]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (written,) = out.glob(f"{name}_*.csv")
    return pd.read_csv(written)


@pytest.mark.nightly
def test_the_benchmark_of_gpus_runs_on_a_processor_at_a_tiny_size(tmp_path: Path) -> None:
    table = run_script("gpu", tmp_path, "--device", "cpu", "--tiny")
    for work in ("exact ranks", "FAISS", "training", "gloo", "SCAN t2i", "SCAN i2t", "TOD-Net", "extraction"):
        rows = table[table["work"].str.startswith(work)]
        assert len(rows) == (1 if work in ("exact ranks", "FAISS", "gloo") else 2), "of products fp32 and bf16"
        assert (rows[["s", "limit_s", "times_limit"]] > 0).all(axis=None)
    assert set(table["device"]) == {"cpu"}
    assert table["busy"].between(0, 1.5).all()


@pytest.mark.nightly
def test_the_benchmark_of_growth_runs_at_a_tiny_size(tmp_path: Path) -> None:
    table = run_script("growth", tmp_path, "--largest", "0.005", "--points", "2")
    assert table["work"].value_counts().to_dict() == dict.fromkeys(WORKS_THAT_GROW, 2)
    assert all(points["size"].is_monotonic_increasing for _, points in table.groupby("work"))
    assert (table["cpu_s"] >= 0).all()
    assert (table["peak_gb"] >= table["start_gb"]).all()


@pytest.mark.nightly
def test_the_server_answers_correctly_under_a_short_load(tmp_path: Path) -> None:
    (row,) = run_script("load", tmp_path, "--clients", "8", "--seconds", "2", "--bad", "0.3").to_dict("records")
    assert row["requests"] > row["bad"] > 0
    assert row["wrong"] == 0


@pytest.mark.nightly
def test_all_steps_run_on_data_of_another_program(tmp_path: Path) -> None:
    table = run_script("large_data", tmp_path, "--pairs", "2000")
    assert table["step"].nunique() == 10
    assert (table[["cpu_s", "peak_gb"]] > 0).all(axis=None)


@pytest.mark.nightly
def test_many_clients_get_the_answers_that_a_single_client_gets(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/clients.py", "--out", str(tmp_path), "--images", "1000"]
    subprocess.run([*command, "--demo-images", "66", "--rounds", "1"], check=True, capture_output=True, cwd=ROOT)
    tables = [pd.read_csv(path) for path in sorted(tmp_path.glob("clients_*.csv"))]
    assert sorted(map(len, tables)) == [4, 7]
    assert all((table.filter(like="cpu_ms") >= 0).all(axis=None) for table in tables)


@pytest.mark.nightly
def test_two_processes_exchange_little_more_than_they_must(tmp_path: Path) -> None:
    table = run_script("processes", tmp_path, "--rounds", "1")
    two = table[table["processes"] == 2]
    assert (two["loss_difference"] < 1e-6).all()
    assert (two["mb_per_step"] < 1.15 * two["least_mb_per_step"]).all()


@pytest.mark.nightly
def test_a_plan_opens_only_photographs_that_are_newer_than_their_shard(tmp_path: Path) -> None:
    table = run_script("planning", tmp_path, "--sizes", "110")
    assert dict(zip(table["state"], table["photos_opened"], strict=True)) == {
        "new": 0, "extracted": 0, "touched": 110, "touched, again": 0
    }  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 100))
def test_jobs_without_faults_take_as_many_rounds_as_they_need_places(jobs: int, places: int, seconds: int) -> None:
    cluster = Cluster(places, failing=0, slow=0, overhead_s=1)
    assert simulate(jobs, seconds, cluster, np.random.default_rng(0)) == pytest.approx(-(-jobs // places) * (1 + seconds))


def test_faults_take_time_and_short_jobs_lose_less() -> None:
    sound, faulty = Cluster(10, failing=0, slow=0), Cluster(10)
    assert expect(20, 3600, faulty)[0] > expect(20, 3600, sound)[0]
    assert expect(120, 600, faulty)[0] < expect(20, 3600, faulty)[0]
    one_place = Cluster(1, failing=0.5, slow=0, overhead_s=0)
    mean = np.mean([simulate(50, 1.0, one_place, np.random.default_rng(seed)) for seed in range(100)])
    assert mean == pytest.approx(75, rel=0.05), "each job fails once on average, after half of its time"
