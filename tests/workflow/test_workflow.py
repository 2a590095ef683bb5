"""Test the workflow as a user runs it, on a demo of 33 images in a new folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from vse.features.backbones.device import has_bf16
from vse.features.cache.feature_cache import open_cache
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


Workflow = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def snakemake(commands: Path, tmp_path: Path) -> Workflow:
    """Return a function that runs the workflow with the tiny demo's preset in a folder outside of the repository."""

    def run(*arguments: str, demo: str = DEMO) -> subprocess.CompletedProcess[str]:
        presets = tmp_path / "presets" / "datasets"
        presets.mkdir(parents=True, exist_ok=True)
        (presets / "demo.yaml").write_text(demo)
        environment = {**os.environ, "VSE_PRESETS": str(presets.parent), "PATH": f"{commands}:{os.environ['PATH']}"}
        command = [str(commands / "snakemake"), "--snakefile", str(ROOT / "Snakefile"), "--cores", "8", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_the_main_job_runs_once_and_again_does_nothing(tmp_path: Path, snakemake: Workflow) -> None:
    done = snakemake("results/demo_vsepp.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results/demo_vsepp.json").read_text())
    assert (result["dataset"], result["experiment"], result["n_images"]) == ("demo", "vsepp", 6)
    assert result["provenance"]["config"]["train"]["epochs"] == 2
    again = snakemake("results/demo_vsepp.json")
    assert again.returncode == 0
    assert "Nothing to be done" in again.stderr + again.stdout


@pytest.mark.slow
def test_fine_tuning_of_two_seeds_brings_its_bases_and_both_features(tmp_path: Path, snakemake: Workflow) -> None:
    """vsepp_ft starts from vsepp_rc of the same seed, which trains on a crop bank and is validated on centre crops."""
    (tmp_path / "presets" / "experiments").mkdir(parents=True)
    (tmp_path / "presets" / "experiments" / "twice.yaml").write_text("extends: vsepp_ft\nseeds: [3, 5]\n")
    bank = "  fc7: &fc7 { model: squeezenet1_1, layer: features.2, grid: 2, weights: random, resize: 32, crop: 32 }\n"
    demo = DEMO.replace(DEMO.splitlines()[4] + "\n", f"{bank}  fc7_rc: {{ <<: *fc7, n_random: 2 }}\n")
    done = snakemake("results/demo_twice.json", demo=demo)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results/demo_twice.json").read_text())
    assert result["seeds"] == [3, 5]
    assert result["protocols"]["full"]["rsum"].keys() == {"mean", "std"}
    for seed in (3, 5):
        record = json.loads((tmp_path / f"runs/demo_twice/seed-{seed}/run.json").read_text())
        assert (record["features"]["name"], record["start_from"]) == ("fc7", f"../../demo_vsepp_rc/seed-{seed}")
        base = json.loads((tmp_path / f"runs/demo_vsepp_rc/seed-{seed}/run.json").read_text())
        assert (base["features"]["name"], base["eval_features"]["name"]) == ("fc7_rc", "fc7")
    one = snakemake("--dry-run", "results/demo_twice.json", "--config", "seeds=[3]", demo=demo)
    assert "seed-5" not in one.stdout + one.stderr


DUO = """
presets:
  wide: { extends: vsepp, model: { dim: 24 } }
  duo: { title: Two widths, rows: [vsepp 4.1], seeds: [0, 1], ensemble_of: [vsepp, wide] }
"""


@pytest.mark.slow
def test_an_ensemble_trains_its_members_and_averages_them_seed_by_seed(tmp_path: Path, snakemake: Workflow) -> None:
    (tmp_path / "presets" / "experiments").mkdir(parents=True)
    (tmp_path / "presets" / "experiments" / "mine.yaml").write_text(DUO)
    targets = ["results/demo_duo.json", "results/demo_duo.html"]
    done = snakemake(*targets)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results/demo_duo.json").read_text())
    assert (result["experiment"], result["seeds"]) == ("duo", [0, 1])
    members = [("vsepp", 0), ("wide", 0), ("vsepp", 1), ("wide", 1)]
    assert [(member["experiment"], member["seed"]) for member in result["ensemble"]] == members
    assert result["protocols"]["full"]["rsum"].keys() == {"mean", "std"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"demo_vsepp", "demo_wide"}
    assert "<title>demo duo</title>" in (tmp_path / "results/demo_duo.html").read_text()
    again = snakemake(*targets)
    assert "Nothing to be done" in again.stderr + again.stdout


@pytest.mark.slow
def test_an_ensemble_is_a_row_of_tables_and_its_members_are_made_for_it(tmp_path: Path, snakemake: Workflow) -> None:
    (tmp_path / "presets" / "experiments").mkdir(parents=True)
    (tmp_path / "presets" / "experiments" / "mine.yaml").write_text(DUO)
    settings = ["--config", "dataset=demo", 'experiments=["duo"]', "seeds=[3]"]
    answer = snakemake("--dry-run", "results/tables/vsepp_4.csv", "results/tables/summary_demo.csv", *settings)
    assert answer.returncode == 0, answer.stderr
    text = answer.stdout + answer.stderr
    files = "runs/demo_vsepp/seed-3/test.h5 runs/demo_wide/seed-3/test.h5"
    assert f"vse-eval {files} --ensemble --experiment duo --protocol auto --device cpu" in text
    assert "vse-table vsepp_4 results/demo_duo.json results/demo_vse0_10c_rv.json " in text
    assert "vse-table summary results/demo_duo.json --out" in text
    assert "runs/demo_duo" not in text


@pytest.mark.slow
def test_the_seeds_of_an_ensemble_of_one_experiment_are_its_members(tmp_path: Path, snakemake: Workflow) -> None:
    (tmp_path / "presets" / "experiments").mkdir(parents=True)
    (tmp_path / "presets" / "experiments" / "twice.yaml").write_text("seeds: [0, 1]\nensemble_of: [vsepp]\n")
    answer = snakemake("--dry-run", "results/demo_twice.json", "--config", "seeds=[3]")
    assert answer.returncode == 0, answer.stderr
    files = "runs/demo_vsepp/seed-0/test.h5 runs/demo_vsepp/seed-1/test.h5"
    assert f"vse-eval {files} --ensemble --experiment twice " in answer.stdout + answer.stderr


@pytest.mark.slow
def test_phrases_are_combined_with_sentences_by_a_share_that_validation_chooses(tmp_path: Path, snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", "results/tables/twobranch_5.csv", "--config", "dataset=demo")
    assert answer.returncode == 0, answer.stderr
    text = answer.stdout + answer.stderr
    sentences, phrases = "runs/demo_twobranch_constraints/seed-0", "runs/demo_phrase_embedding_sampling/seed-0"
    files = f"{sentences}/test.h5 {phrases}/test_sentences.h5"
    assert f"vse-eval {files} --ensemble --experiment twobranch_phrases --protocol auto" in text
    for split in ("test", "val"):
        assert f"vse-embed {phrases} --sentences --split {split} " in text
        assert f"vse-embed {sentences} --split {split} " in text
    assert f"vse-embed {phrases} --split" not in text


@pytest.mark.slow
def test_what_reads_cached_captions_brings_them_and_is_evaluated_on_sentences(tmp_path: Path, snakemake: Workflow) -> None:
    (tmp_path / "presets" / "experiments").mkdir(parents=True)
    for name in ("twobranch_constraints", "cca"):
        preset = f"extends: {name}\nfeature: fc7\ncaption_feature: tfidf\n"
        (tmp_path / "presets" / "experiments" / f"small_{name}.yaml").write_text(preset)
    targets = ["results/demo_small_twobranch_constraints.json", "results/demo_small_cca.json"]
    done = snakemake(*targets)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "features/demo_tfidf.encoder.safetensors").exists()
    for target in targets:
        result = json.loads((tmp_path / target).read_text())
        assert result["provenance"]["features"].keys() == {"fc7", "tfidf"}
        assert result["protocols"].keys() == {"full", "sentence"}
        record = json.loads((tmp_path / f"runs/{Path(target).stem}/seed-0/run.json").read_text())
        assert record["caption_features"]["path"] == "../../../features/demo_tfidf.h5"
    again = snakemake(*targets)
    assert "Nothing to be done" in again.stderr + again.stdout


@pytest.mark.slow
def test_phrases_and_their_boxes_are_features_like_others(tmp_path: Path, snakemake: Workflow) -> None:
    network = "model: squeezenet1_1, weights: random, map: features.1, layer: features.2, pool: 8, grid: 2"
    small = f"  boxes: &b {{ {network}, shorter: 32, longer: 48 }}\n  boxes_truth: *b\n  tfidf_phrases: {{ min_count: 1 }}\n"
    demo = DEMO.replace("experiment:\n", f"{small}experiment:\n")
    targets = [f"features/demo_{name}.h5" for name in ("boxes", "boxes_truth", "tfidf_phrases")]
    done = snakemake(*targets, demo=demo)
    assert done.returncode == 0, done.stderr
    boxes, truths, phrases = (open_cache(tmp_path / target) for target in targets)
    check_truth_cache(truths, boxes)
    assert boxes.provenance["upper_bound"]["splits"].keys() == {"train", "val", "test"}
    assert phrases.text_rows == "phrases"
    assert "Nothing to be done" in (again := snakemake(*targets, demo=demo)).stderr + again.stdout


@pytest.mark.slow
def test_a_model_on_embeddings_brings_the_run_that_makes_them(tmp_path: Path, snakemake: Workflow) -> None:
    """Each seed reads the embeddings of the run with the same seed."""
    (tmp_path / "presets" / "experiments").mkdir(parents=True)
    preset = "extends: todnet_vsepp\nbackbone: vsepp\nseeds: [0, 2]\ntrain: { restval: false }\n"
    (tmp_path / "presets" / "experiments" / "small_todnet.yaml").write_text(preset)
    done = snakemake("results/demo_small_todnet.json")
    assert done.returncode == 0, done.stderr
    for seed in (0, 2):
        record = json.loads((tmp_path / f"runs/demo_small_todnet/seed-{seed}/run.json").read_text())
        assert record["features"]["path"] == f"../../../features/demo_vsepp-{seed}_images.h5"
        assert record["caption_features"]["path"] == f"../../../features/demo_vsepp-{seed}_captions.h5"
        cache = open_cache(tmp_path / f"features/demo_vsepp-{seed}_images.h5")
        assert (cache.path.parent / cache.provenance["backbone_run"]).samefile(tmp_path / f"runs/demo_vsepp/seed-{seed}")
    result = json.loads((tmp_path / "results/demo_small_todnet.json").read_text())
    assert result["seeds"] == [0, 2]
    assert result["provenance"]["config"]["backbone"] == "vsepp"
    again = snakemake("results/demo_small_todnet.json")
    assert "Nothing to be done" in again.stderr + again.stdout
    stricter = snakemake("results/demo_small_todnet.json", demo=DEMO.replace("epochs: 2", "epochs: 1"))
    assert stricter.returncode == 0, stricter.stderr
    assert (stricter.stdout + stricter.stderr).count("rule embed_as_features:") == 2, "other weights, other embeddings"


FEATURES = """
  fc7_10c: { <<: *fc7, crop: 28 }
  fc7_rc: { <<: *fc7, n_random: 2 }
  regions: { model: fasterrcnn_resnet50_fpn, weights: random, shorter: 32, longer: 48, proposals: 8 }
  hglmm: { min_count: 1, centres: 2, trained_dim: 20, pca: 20 }
"""


@pytest.mark.slow
def test_features_of_each_kind_are_extracted_and_sound(tmp_path: Path, snakemake: Workflow, commands: Path) -> None:
    lines = DEMO.splitlines(keepends=True)
    demo = "".join([*lines[:4], lines[4].replace("fc7: {", "fc7: &fc7 {"), FEATURES.lstrip("\n"), *lines[5:]])
    caches = [f"features/demo_{name}.h5" for name in ("fc7_10c", "fc7_rc", "regions", "hglmm")]
    done = snakemake(*caches, demo=demo)
    assert done.returncode == 0, done.stderr
    for cache in caches:
        subprocess.run([commands / "vse-extract", "verify", cache], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_a_caption_feature_is_fitted_once_and_again_if_a_setting_changes(tmp_path: Path, snakemake: Workflow) -> None:
    target = "features/demo_tfidf.h5"
    done = snakemake(target)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("rule fit:") == 1
    first = open_cache(tmp_path / target)
    assert (first.kind, len(first.ids)) == ("text", 165)
    assert "Nothing to be done" in (again := snakemake(target)).stderr + again.stdout
    changed = snakemake(target, demo=DEMO.replace("tfidf: { min_count: 1 }", "tfidf: { min_count: 3 }"))
    assert changed.returncode == 0, changed.stderr
    assert open_cache(tmp_path / target).dim < first.dim


@pytest.mark.slow
def test_a_shard_that_is_lost_is_made_again_alone(tmp_path: Path, snakemake: Workflow) -> None:
    assert snakemake("features/demo_fc7.h5").returncode == 0
    shards = tmp_path / "features" / "demo_fc7.shards"
    kept = (shards / "shard-00000-of-00002.h5").stat().st_mtime_ns
    for path in [*shards.glob("shard-00001*"), tmp_path / "features" / "demo_fc7.h5"]:
        path.unlink()
    assert snakemake("features/demo_fc7.h5").returncode == 0
    assert (shards / "shard-00000-of-00002.h5").stat().st_mtime_ns == kept
    assert (shards / "shard-00001-of-00002.h5").exists()


@pytest.mark.slow
def test_a_replaced_image_brings_its_shard_and_no_other(tmp_path: Path, snakemake: Workflow) -> None:
    assert snakemake("features/demo_fc7.h5").returncode == 0
    shards = tmp_path / "features" / "demo_fc7.shards"
    names = [f"shard-{k:05d}-of-00002.h5" for k in range(2)]
    before = [(shards / name).stat().st_mtime_ns for name in names]
    images = sorted((tmp_path / "data" / "demo" / "images").iterdir())
    os.utime(images[0])
    done = snakemake("features/demo_fc7.h5")
    assert "Nothing to be done" in done.stdout + done.stderr, "its bytes are what they were"
    shutil.copy(images[0], images[-1])
    assert snakemake("features/demo_fc7.h5").returncode == 0
    after = [(shards / name).stat().st_mtime_ns for name in names]
    assert after[0] == before[0]
    assert after[1] > before[1]
    done = snakemake("features/demo_fc7.h5")
    assert "Nothing to be done" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("results/demo_vspp.json", "unknown experiment 'vspp' (did you mean 'vsepp'?"),
        ("features/demo_fc8.h5", "unknown feature 'fc8' (did you mean 'fc7'?"),
        ("results/f8j_vsepp.json", "unknown dataset 'f8j' (did you mean 'f8k'?"),
        ("results/f30k_vsepp.json", "Put dataset_flickr30k.json (the Karpathy split)"),
        ("results/f30k_entities_vsepp.json", "Put the files of Flickr30K Entities"),
        ("results/coco_vsepp.json", "or name their folder with --config coco_dir=FOLDER"),
        ("results/tables/vsepp_3.csv", "Put dataset_flickr30k.json (the Karpathy split)"),
    ],
)
def test_what_cannot_be_made_is_said_before_anything_runs(target: str, message: str, snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", target)
    assert answer.returncode == 1
    assert message in answer.stderr + answer.stdout


@pytest.mark.parametrize("suffix", ["csv", "tex"])
def test_a_published_table_takes_all_its_experiments(suffix: str, snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", f"results/tables/vsepp_4.{suffix}", "--config", "dataset=demo")
    assert answer.returncode == 0, answer.stderr
    text = answer.stdout + answer.stderr
    names = ("vse0_10c_rv", "order0_10c_rv", "vsepp_10c_rv", "orderpp_10c_rv")
    results = " ".join(f"results/demo_{name}.json" for name in names)
    assert f"vse-table vsepp_4 {results} --dataset demo --out results/tables/vsepp_4.{suffix} " in text
    assert text.count("rule evaluate:") == 4
    assert "rule summary:" not in text


def test_the_table_of_phrases_is_made_of_runs_on_boxes_their_truths_and_phrases(snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", "--printshellcmds", "results/tables/twobranch_1.csv", "--config", "dataset=demo")
    text = answer.stdout + answer.stderr
    assert answer.returncode == 0, text
    for feature in ("boxes", "boxes_truth", "hglmm_phrases"):
        assert f"--out features/demo_{feature}.h5" in text
    assert "vse-train --features features/demo_boxes.h5 --captions data/demo/dataset.json --experiment phrase_network " in text
    assert text.count("vse-eval runs/demo_phrase_") == 13


def test_the_summary_of_a_data_set_is_no_published_table(snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", "results/tables/summary_demo.csv")
    assert "vse-table summary results/demo_vse0.json results/demo_vsepp.json --out" in answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["results/demo_vspp.json"], "unknown experiment 'vspp' (did you mean 'vsepp'?"),
        (["resluts/demo_vsepp.json"], "did you mean results/demo_vsepp.json?"),
        (["--config", "devce=cpu"], "unknown setting 'devce' (did you mean 'device'?"),
    ],
)
def test_a_mistake_is_the_last_line_without_a_traceback(arguments: list[str], message: str, snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", *arguments)
    assert answer.returncode == 1
    assert message in answer.stderr.splitlines()[-1]
    assert "File " not in answer.stderr
    assert "Exception" not in answer.stderr


def test_an_unknown_setting_of_the_workflow_is_named(snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", "results/demo_vsepp.json", "--config", "thread=2")
    assert "did you mean 'threads'" in answer.stderr + answer.stdout


def test_the_user_s_own_files_are_used_by_configuration_alone(demo: Path, tmp_path: Path, snakemake: Workflow) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(demo, source / "dataset_flickr8k.json")
    (source / "images").symlink_to(demo.parent / "images")
    done = snakemake("data/f8k/dataset.json", "--config", f"f8k_dir={source}")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "data/f8k/dataset.json").read_text())["dataset"] == "f8k"
    assert (tmp_path / "data/f8k/images/demo_000000.jpg").is_file()
    again = snakemake("data/f8k/dataset.json")
    assert "Nothing to be done" in again.stderr + again.stdout, "the folder need not be named again"


def test_what_computes_asks_for_a_gpu_and_the_evaluation_stays_on_the_processor(snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", "results/demo_vsepp.json", "--resources", "gpu=4")
    assert answer.returncode == 0, answer.stderr
    jobs = {job.split(":")[0]: job for job in (answer.stdout + answer.stderr).split("\nrule ")[1:]}
    assert {name for name, job in jobs.items() if "gpu=1" in job} == {"extract", "train", "embed"}
    assert "--device cpu" in jobs["evaluate"]


LADDER = """
features: [fc7, other]
caption_features: [words, tfidf]
experiments:
  vsepp: { title: VSE++, settings: { train: { epochs: 1 } } }
  cca: { title: CCA, seeds: [0] }
seeds: [0, 1]
"""
NETWORKS = """\
  fc7: &fc7 { model: squeezenet1_1, layer: features.2, grid: 2, weights: random, resize: 32, crop: 32 }
  other: *fc7
"""


@pytest.mark.slow
def test_a_ladder_is_every_combination_that_fits_with_its_costs(tmp_path: Path, snakemake: Workflow) -> None:
    for folder, name, preset in (("ladders", "demo", LADDER), ("features", "other", "extends: fc7\n")):
        (tmp_path / "presets" / folder).mkdir(parents=True)
        (tmp_path / "presets" / folder / f"{name}.yaml").write_text(preset)
    demo = DEMO.replace(DEMO.splitlines()[4] + "\n", NETWORKS)
    targets = ["results/tables/ladder_demo.csv"]
    done = snakemake(*targets, demo=demo)
    assert done.returncode == 0, done.stderr
    assert "cca@demo+words+fc7 is left out: the solver 'cca' reads captions as vectors, not as words" in done.stderr
    table = pd.read_csv(tmp_path / "results/tables/ladder_demo.csv")
    rows = sorted(zip(table["method"], table["captions"], table["images"], table["seeds"], strict=True))
    assert rows == [
        ("CCA", "tfidf", "fc7", 1),
        ("CCA", "tfidf", "other", 1),
        ("VSE++", "tfidf", "fc7", 2),
        ("VSE++", "tfidf", "other", 2),
        ("VSE++", "words", "fc7", 2),
        ("VSE++", "words", "other", 2),
    ]
    costs = ["extraction_s", "train_s", "eval_s", "total_s", "cache_mb", "model_mb"]
    assert table[costs].notna().all(axis=None)
    assert (table["total_s"] >= table["extraction_s"]).all()
    assert (table["best"] == "yes").any()
    assert table[["rsum_low", "rsum_high"]].notna().all(axis=None)
    assert table["rsum_std"].notna().tolist() == (table["seeds"] == 2).tolist()
    assert "<svg" in (tmp_path / "results/tables/ladder_demo.svg").read_text()
    run = json.loads((tmp_path / "runs/demo_vsepp@demo+tfidf+other/seed-1/run.json").read_text())
    assert (run["features"]["name"], run["caption_features"]["name"], run["epochs"]) == ("other", "tfidf", 1)
    again = snakemake(*targets, demo=demo)
    assert "Nothing to be done" in again.stderr + again.stdout


def test_another_ladder_is_named_by_configuration(tmp_path: Path, snakemake: Workflow) -> None:
    answer = snakemake("--dry-run", "results/tables/ladder_demo.csv", "--config", "ladder=demoo")
    assert answer.returncode == 1
    assert "unknown ladder 'demoo' (did you mean 'demo'" in answer.stderr + answer.stdout
    (tmp_path / "presets" / "ladders").mkdir(parents=True)
    (tmp_path / "presets" / "ladders" / "own.yaml").write_text("features: [fc7]\nexperiments: { vsepp: }\nseeds: [5]\n")
    answer = snakemake("--dry-run", "results/tables/ladder_demo.csv", "--config", "ladder=own")
    text = answer.stdout + answer.stderr
    assert answer.returncode == 0, text
    assert "--experiment vsepp@own+words+fc7 --seed 5" in text
    assert "vse-table ladder results/demo_vsepp@own+words+fc7.json --out results/tables/ladder_demo.svg" in text


@pytest.mark.slow
@pytest.mark.skipif(not has_bf16(torch.device("cpu")), reason="this processor has no bf16")
def test_features_of_a_machine_with_bf16_are_kept_on_one_without(
    tmp_path: Path, snakemake: Workflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, demo = "features/demo_fc7.h5", DEMO.replace("fc7: {", "fc7: { precision: auto,")
    assert snakemake(cache, demo=demo).returncode == 0
    assert open_cache(tmp_path / cache).provenance["config"]["precision"] == "bf16"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    again = snakemake(cache, demo=demo)
    assert "Nothing to be done" in again.stderr + again.stdout
