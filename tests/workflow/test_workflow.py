"""Test the workflow as a user runs it, on a demo of 33 images in a new folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
import torch

from tests.training.conftest import done
from vse.cli import data_main
from vse.features.backbones.device import has_bf16
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cli import extract_main
from vse.features.extractors.proposals import check_truth_cache

ROOT = Path(__file__).parents[2]
DEMO = """
n_images: 33
shards: 2
features:
  fc7: { model: squeezenet1_1, layer: features.2, grid: 2, weights: random, resize: 32, crop: 32 }
  tfidf: { min_count: 1 }
experiment:
  model: { dim: 16, word_dim: 8 }
  train: { epochs: 2, min_count: 1 }
"""


class Work:
    """A folder outside of the repository, in which the workflow runs with the tiny demo's preset."""

    def __init__(self, folder: Path, commands: Path) -> None:
        self.folder, self.commands = folder, commands
        self.preset("datasets/demo", DEMO)

    def preset(self, name: str, text: str) -> None:
        path = self.folder / "presets" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.commands}:{os.environ['PATH']}"
        environment = {**os.environ, "VSE_PRESETS": str(self.folder / "presets"), "PATH": path}
        command = [str(self.commands / "snakemake"), "--snakefile", str(ROOT / "Snakefile"), "--cores", "8", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def make(self, *arguments: str, expected: int = 0) -> str:
        """Return the output of a run that must end with the exit code ``expected``."""
        done = self.run(*arguments)
        assert done.returncode == expected, done.stderr
        return done.stdout + done.stderr

    def make_twice(self, *targets: str) -> str:
        """Return the output of a first run, after which a second one has nothing to do."""
        output = self.make(*targets)
        assert "Nothing to be done" in self.make(*targets)
        return output

    def plan(self, *arguments: str) -> str:
        """Return the steps and commands that a dry run prints."""
        return self.make("--dry-run", "--printshellcmds", *arguments)

    def json(self, path: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / path).read_text())
        return content


@pytest.fixture
def work(commands: Path, tmp_path: Path) -> Work:
    return Work(tmp_path, commands)


@pytest.fixture(scope="module")
def main_job(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the main job was run. Read only."""
    work = Work(tmp_path_factory.mktemp("main"), commands)
    work.make_twice("results/demo_vsepp.json")
    return work.folder


@pytest.fixture
def more(main_job: Path, commands: Path, tmp_path: Path) -> Work:
    """A copy of that folder, for what needs the same images, features or run."""
    shutil.copytree(main_job, tmp_path, dirs_exist_ok=True)
    return Work(tmp_path, commands)


@pytest.mark.slow
def test_the_main_job_ends_with_the_metrics_of_the_settings(main_job: Path) -> None:
    result = json.loads((main_job / "results/demo_vsepp.json").read_text())
    assert (result["dataset"], result["experiment"], result["n_images"]) == ("demo", "vsepp", 6)
    assert result["provenance"]["config"]["train"]["epochs"] == 2


@pytest.mark.nightly
@pytest.mark.slow
def test_fine_tuning_of_two_seeds_brings_its_bases_and_both_features(more: Work) -> None:
    """vsepp_ft starts from vsepp_rc of the same seed, which trains on a crop bank and is validated on centre crops."""
    more.preset("experiments/twice", "extends: vsepp_ft\nseeds: [3, 5]\n")
    lines = DEMO.splitlines(keepends=True)
    bank = [lines[4].replace("fc7: {", "fc7: &fc7 {"), "  fc7_rc: { <<: *fc7, n_random: 2 }\n"]
    more.preset("datasets/demo", "".join([*lines[:4], *bank, *lines[5:]]))
    more.make("results/demo_twice.json")
    result = more.json("results/demo_twice.json")
    assert (result["seeds"], result["protocols"]["full"]["rsum"].keys()) == ([3, 5], {"mean", "std"})
    for seed in (3, 5):
        record, base = (more.json(f"runs/demo_{name}/seed-{seed}/run.json") for name in ("twice", "vsepp_rc"))
        assert (record["features"]["name"], record["start_from"]) == ("fc7", f"../../demo_vsepp_rc/seed-{seed}")
        assert (base["features"]["name"], base["eval_features"]["name"]) == ("fc7_rc", "fc7")
    assert "seed-5" not in more.plan("results/demo_twice.json", "--config", "seeds=[3]")


DUO = """
presets:
  wide: { extends: vsepp, model: { dim: 24 } }
  duo: { title: Two widths, rows: [vsepp 4.1], seeds: [0, 1], ensemble_of: [vsepp, wide] }
  twice: { seeds: [0, 1], ensemble_of: [vsepp] }
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_an_ensemble_trains_its_members_and_averages_them_seed_by_seed(more: Work) -> None:
    more.preset("experiments/mine", DUO)
    more.make_twice("results/demo_duo.json", "results/demo_duo.html")
    result = more.json("results/demo_duo.json")
    assert (result["experiment"], result["seeds"]) == ("duo", [0, 1])
    members = [(member["experiment"], member["seed"]) for member in result["ensemble"]]
    assert members == [("vsepp", 0), ("wide", 0), ("vsepp", 1), ("wide", 1)]
    assert result["protocols"]["full"]["rsum"].keys() == {"mean", "std"}
    assert {path.name for path in (more.folder / "runs").iterdir()} == {"demo_vsepp", "demo_wide"}
    assert "<title>demo duo</title>" in (more.folder / "results/demo_duo.html").read_text()


def test_an_ensemble_is_a_row_of_tables_and_its_members_are_made_for_it(work: Work) -> None:
    work.preset("experiments/mine", DUO)
    settings = ["--config", "dataset=demo", 'experiments=["duo"]', "seeds=[3]"]
    tables = [f"results/tables/{name}.csv" for name in ("vsepp_4", "summary_demo")]
    text = work.plan(*tables, "results/demo_twice.json", *settings)
    files = "runs/demo_vsepp/seed-3/test.h5 runs/demo_wide/seed-3/test.h5"
    assert f"vse-eval {files} --ensemble --experiment duo --protocol auto --device cpu" in text
    assert "vse-table vsepp_4 results/demo_duo.json results/demo_vse0_10c_rv.json " in text
    assert "vse-table summary results/demo_duo.json --out" in text
    assert "runs/demo_duo" not in text
    files = "runs/demo_vsepp/seed-0/test.h5 runs/demo_vsepp/seed-1/test.h5"  # the seeds of one experiment are its members
    assert f"vse-eval {files} --ensemble --experiment twice " in text


def test_phrases_are_combined_with_sentences_by_a_share_that_validation_chooses(work: Work) -> None:
    text = work.plan("results/tables/twobranch_5.csv", "--config", "dataset=demo")
    sentences, phrases = "runs/demo_twobranch_constraints/seed-0", "runs/demo_phrase_embedding_sampling/seed-0"
    files = f"{sentences}/test.h5 {phrases}/test_sentences.h5"
    assert f"vse-eval {files} --ensemble --experiment twobranch_phrases --protocol auto" in text
    for split in ("test", "val"):
        assert f"vse-embed {phrases} --sentences --split {split} " in text
        assert f"vse-embed {sentences} --split {split} " in text
    assert f"vse-embed {phrases} --split" not in text


@pytest.mark.nightly
@pytest.mark.slow
def test_what_reads_cached_captions_brings_them_and_is_evaluated_on_sentences(more: Work) -> None:
    names = ("twobranch_constraints", "cca")
    for name in names:
        more.preset(f"experiments/small_{name}", f"extends: {name}\nfeature: fc7\ncaption_feature: tfidf\n")
    more.make_twice(*(f"results/demo_small_{name}.json" for name in names))
    assert (more.folder / "features/demo_tfidf.encoder.safetensors").exists()
    for name in names:
        result = more.json(f"results/demo_small_{name}.json")
        assert result["provenance"]["features"].keys() == {"fc7", "tfidf"}
        assert result["protocols"].keys() == {"full", "sentence"}
        record = more.json(f"runs/demo_small_{name}/seed-0/run.json")
        assert record["caption_features"]["path"] == "../../../features/demo_tfidf.h5"


@pytest.mark.nightly
@pytest.mark.slow
def test_features_of_each_kind_are_extracted_and_sound(more: Work) -> None:
    lines = DEMO.splitlines(keepends=True)
    network = "model: squeezenet1_1, weights: random, map: features.1, layer: features.2, pool: 8, grid: 2"
    features = f"""\
  fc7_10c: {{ <<: *fc7, crop: 28 }}
  fc7_rc: {{ <<: *fc7, n_random: 2 }}
  regions: {{ model: fasterrcnn_mobilenet_v3_large_320_fpn, weights: random, shorter: 32, longer: 48, proposals: 8 }}
  hglmm: {{ min_count: 1, centres: 2, trained_dim: 20, pca: 20 }}
  boxes: &b {{ {network}, shorter: 32, longer: 48, n_boxes: 8, thin_edges: true }}
  boxes_truth: *b
  tfidf_phrases: {{ min_count: 1 }}
"""
    few = [line.replace("shards: 2", "shards: 1") for line in lines[:4]]
    more.preset("datasets/demo", "".join([*few, lines[4].replace("fc7: {", "fc7: &fc7 {"), features, *lines[5:]]))
    names = ("fc7_10c", "fc7_rc", "regions", "hglmm", "boxes", "boxes_truth", "tfidf_phrases")
    targets = [f"features/demo_{name}.h5" for name in names]
    more.make_twice(*targets)
    for target in targets:
        done(extract_main, "verify", more.folder / target)
    boxes, truths, phrases = (open_cache(more.folder / target) for target in targets[-3:])
    check_truth_cache(truths, boxes)
    assert boxes.provenance["upper_bound"]["splits"].keys() == {"train", "val", "test"}
    assert phrases.text_unit == "phrases"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_on_embeddings_brings_the_run_that_makes_them(more: Work) -> None:
    """Each seed reads the embeddings of the run with the same seed."""
    preset = "extends: todnet_vsepp\nbackbone: vsepp\nseeds: [0, 2]\ntrain: { restval: false }\n"
    more.preset("experiments/small_todnet", preset)
    more.make_twice("results/demo_small_todnet.json")
    for seed in (0, 2):
        record = more.json(f"runs/demo_small_todnet/seed-{seed}/run.json")
        assert record["features"]["path"] == f"../../../features/demo_vsepp-{seed}_images.h5"
        assert record["caption_features"]["path"] == f"../../../features/demo_vsepp-{seed}_captions.h5"
        cache = open_cache(more.folder / f"features/demo_vsepp-{seed}_images.h5")
        backbone = cache.path.parent / cache.provenance["backbone_run"]
        assert backbone.samefile(more.folder / f"runs/demo_vsepp/seed-{seed}")
    result = more.json("results/demo_small_todnet.json")
    assert (result["seeds"], result["provenance"]["config"]["backbone"]) == ([0, 2], "vsepp")
    more.preset("datasets/demo", DEMO.replace("epochs: 2", "epochs: 1"))
    others = more.plan("results/demo_small_todnet.json")
    assert others.count("embed as features demo_vsepp seed") == 2, "other weights, other embeddings"


@pytest.mark.slow
def test_a_caption_feature_is_fitted_once_and_again_if_a_setting_changes(more: Work) -> None:
    target = "features/demo_tfidf.h5"
    assert more.make_twice(target).count("fit demo_tfidf ") == 1
    first = open_cache(more.folder / target)
    assert (first.kind, len(first.ids)) == ("text", 165)
    more.preset("datasets/demo", DEMO.replace("tfidf: { min_count: 1 }", "tfidf: { min_count: 3 }"))
    more.make(target)
    assert open_cache(more.folder / target).dim < first.dim


@pytest.mark.slow
def test_a_lost_shard_or_a_replaced_image_brings_its_shard_and_no_other(more: Work) -> None:
    target, folder = "features/demo_fc7.h5", more.folder / "features" / "demo_fc7.shards"
    shards = [folder / f"shard-{k:05d}-of-00002.h5" for k in range(2)]
    first, _ = (shard.stat().st_mtime_ns for shard in shards)
    for path in [*folder.glob("shard-00001*"), more.folder / target]:
        path.unlink()
    more.make(target)
    second = shards[1].stat().st_mtime_ns
    images = sorted((more.folder / "data" / "demo" / "images").iterdir())
    os.utime(images[0])
    assert "Nothing to be done" in more.make(target), "its bytes are what they were"
    shutil.copy(images[0], images[-1])
    more.make_twice(target)
    assert shards[0].stat().st_mtime_ns == first
    assert shards[1].stat().st_mtime_ns > second


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("features/demo_fc8.h5", "unknown feature 'fc8' (did you mean 'fc7'?"),
        ("results/f8j_vsepp.json", "unknown dataset 'f8j' (did you mean 'f8k'?"),
        ("results/f30k_vsepp.json", "Put dataset_flickr30k.json (the Karpathy split)"),
        ("results/f30k_entities_vsepp.json", "Put the files of Flickr30K Entities"),
        ("results/coco_vsepp.json", "or name their folder with --config coco_dir=FOLDER"),
        ("results/tables/vsepp_3.csv", "Put dataset_flickr30k.json (the Karpathy split)"),
    ],
)
def test_what_cannot_be_made_is_said_before_anything_runs(target: str, message: str, work: Work) -> None:
    assert message in work.make("--dry-run", target, expected=1)


def test_a_published_table_takes_all_its_experiments(work: Work) -> None:
    text = work.plan("results/tables/vsepp_4.csv", "results/tables/vsepp_4.tex", "--config", "dataset=demo")
    names = ("vse0_10c_rv", "order0_10c_rv", "vsepp_10c_rv", "orderpp_10c_rv")
    results = " ".join(f"results/demo_{name}.json" for name in names)
    for suffix in ("csv", "tex"):
        assert f"vse-table vsepp_4 {results} --dataset demo --out results/tables/vsepp_4.{suffix} " in text
    assert text.count("evaluate demo_") == 4
    assert "summary demo" not in text


def test_the_table_of_phrases_is_made_of_runs_on_boxes_their_truths_and_phrases(work: Work) -> None:
    tables = ("results/tables/twobranch_1.csv", "results/tables/summary_demo.csv")
    text = work.plan(*tables, "--config", "dataset=demo")
    for feature in ("boxes", "boxes_truth", "hglmm_phrases"):
        assert f"--out features/demo_{feature}.h5" in text
    assert "vse-train --features features/demo_boxes.h5 --captions data/demo/dataset.json --experiment phrase_network " in text
    assert text.count("vse-eval runs/demo_phrase_") == 13
    assert "vse-table summary results/demo_vse0.json results/demo_vsepp.json --out" in text


def test_an_imported_feature_is_read_and_without_its_cache_its_source_is_named(more: Work) -> None:
    more.preset("features/theirs", "extractor: imported\nwhere: Their page has them.\n")
    more.preset("experiments/mine", "extends: vsepp\nfeature: theirs\n")
    output = more.make("results/demo_mine.json", expected=1)
    command = "vse-data import-npy FILES --dataset data/demo/dataset.json --out-features features/demo_theirs.h5"
    assert (
        f"features/demo_theirs.h5 is imported, not extracted. Their page has them. Import the files with: {command}" in output
    )
    cache = open_cache(more.folder / "features/demo_fc7.h5")
    vectors = FeatureReader(cache).read_rows(np.arange(len(cache.ids)))
    np.savez(more.folder / "theirs.npz", features=vectors, ids=cache.ids)
    data = ["--dataset", more.folder / "data/demo/dataset.json", "--out-features", more.folder / "features/demo_theirs.h5"]
    done(data_main, "import-npy", more.folder / "theirs.npz", *data)
    more.make_twice("results/demo_mine.json")
    assert more.json("results/demo_mine.json")["provenance"]["features"].keys() == {"theirs"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["results/demo_vspp.json"], "unknown experiment 'vspp' (did you mean 'vsepp'?"),
        (["resluts/demo_vsepp.json"], "did you mean results/demo_vsepp.json?"),
        (["--config", "devce=cpu"], "unknown setting 'devce' (did you mean 'device'?"),
    ],
)
def test_a_mistake_is_the_last_line_without_a_traceback(arguments: list[str], message: str, work: Work) -> None:
    answer = work.run("--dry-run", *arguments)
    assert answer.returncode == 1
    assert message in answer.stderr.splitlines()[-1]
    assert "File " not in answer.stderr
    assert "Exception" not in answer.stderr


def test_the_user_s_own_files_are_used_by_configuration_alone(demo: Path, work: Work) -> None:
    source, target = work.folder / "source", "data/f8k/dataset.json"
    source.mkdir()
    shutil.copy(demo, source / "dataset_flickr8k.json")
    (source / "images").symlink_to(demo.parent / "images")
    work.make(target, "--config", f"f8k_dir={source}")
    assert work.json(target)["dataset"] == "f8k"
    assert (work.folder / "data/f8k/images/demo_000000.jpg").is_file()
    assert "Nothing to be done" in work.make(target), "the folder need not be named again"


def test_what_computes_asks_for_a_gpu_and_the_evaluation_stays_on_the_processor(work: Work) -> None:
    text = work.plan("--verbose", "results/demo_vsepp.json", "--resources", "gpu=4")
    jobs = {job.split(":")[0]: job for job in text.split("\nrule ")[1:]}
    assert {name for name, job in jobs.items() if "gpu=1" in job} == {"extract", "train", "embed"}
    assert "--device cpu" in jobs["evaluate"]


LADDER = """
features: [fc7, other]
caption_features: [words, tfidf]
experiments:
  vsepp: { title: VSE++, seeds: [0], settings: { train: { epochs: 1 } } }
  cca: { title: CCA }
seeds: [0, 1]
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_ladder_is_every_combination_that_fits_with_its_costs(more: Work) -> None:
    more.preset("ladders/demo", LADDER)
    more.preset("features/other", "extends: fc7\n")
    more.preset("datasets/demo", DEMO.replace("fc7: {", "fc7: &fc7 {").replace("  tfidf", "  other: *fc7\n  tfidf"))
    output = more.make_twice("results/tables/ladder_demo.csv")
    assert "cca@demo+words+fc7 is left out: the solver 'cca' reads captions as vectors, not as words" in output
    table = pd.read_csv(more.folder / "results/tables/ladder_demo.csv")
    rows = sorted(zip(table["method"], table["captions"], table["images"], table["seeds"], strict=True))
    expected = [("CCA", "tfidf", 2), ("VSE++", "tfidf", 1), ("VSE++", "words", 1)]
    assert rows == [(method, captions, images, n) for method, captions, n in expected for images in ("fc7", "other")]
    costs = ["extraction_s", "train_s", "eval_s", "total_s", "cache_mb", "model_mb"]
    assert table[costs].notna().all(axis=None)
    assert (table["total_s"] >= table["extraction_s"]).all()
    assert (table["best"] == "yes").any()
    assert table[["rsum_low", "rsum_high"]].notna().all(axis=None)
    assert table["rsum_std"].notna().tolist() == (table["seeds"] == 2).tolist()
    assert "<svg" in (more.folder / "results/tables/ladder_demo.svg").read_text()
    run = more.json("runs/demo_vsepp@demo+tfidf+other/seed-0/run.json")
    assert (run["features"]["name"], run["caption_features"]["name"], run["epochs"]) == ("other", "tfidf", 1)


def test_another_ladder_is_named_by_configuration(work: Work) -> None:
    target = "results/tables/ladder_demo.csv"
    assert "unknown ladder 'demoo' (did you mean 'demo'" in work.make(
        "--dry-run", target, "--config", "ladder=demoo", expected=1
    )
    work.preset("ladders/own", "features: [fc7]\nexperiments: { vsepp: }\nseeds: [5]\n")
    text = work.plan(target, "--config", "ladder=own")
    assert "--experiment vsepp@own+words+fc7 --seed 5" in text
    assert "vse-table ladder results/demo_vsepp@own+words+fc7.json --out results/tables/ladder_demo.svg" in text


@pytest.mark.nightly
def test_the_report_of_snakemake_contains_results_reports_and_tables(more: Work) -> None:
    files = ["results/demo_vsepp.json", "results/demo_vsepp.html", "results/tables/summary_demo.csv"]
    targets = [*files, "--config", 'experiments=["vsepp"]']
    more.make(*targets)
    more.make(*targets, "--report", "report.zip")
    with ZipFile(more.folder / "report.zip") as archive:
        included = {Path(name).name for name in archive.namelist()}
    assert {Path(file).name for file in files} <= included


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16(torch.device("cpu")), reason="this processor has no bf16")
def test_features_of_a_machine_with_bf16_are_kept_on_one_without(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = "features/demo_fc7.h5"
    work.preset("datasets/demo", DEMO.replace("fc7: {", "fc7: { precision: auto,"))
    work.make(cache)
    assert open_cache(work.folder / cache).provenance["config"]["precision"] == "bf16"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "Nothing to be done" in work.make(cache)
