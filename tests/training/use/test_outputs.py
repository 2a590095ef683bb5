from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.conftest import Fails, done
from vse.eval.cli import eval_main
from vse.features.cli import extract_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.cli import embed_main, report_main, search_main, train_main

RUN_FILES = ("best.safetensors", "run.json", "config.yaml", "vocab.json", "last.ckpt", "metrics.csv")


@pytest.fixture
def world(own_cache: Path, run: Path) -> Path:
    """A folder with data, features and a run, and what is made from them."""
    folder = own_cache.parent.parent
    shutil.copytree(run, folder / "run")
    for arguments in (["--out", folder / "test.h5"], ["--split", "val", "--out", folder / "other.h5"]):
        places = ["--features", own_cache, "--captions", folder / "data" / "dataset.json"]
        done(embed_main, folder / "run", *places, *arguments)
    done(eval_main, folder / "test.h5", "--bootstrap", 0, "--out", folder / "result.json")
    (folder / "words.txt").write_text("a 1 2\nred 2 1\n")
    return folder


def everything(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_no_output_is_an_input(world: Path, fails: Fails) -> None:
    data, cache = world / "data" / "dataset.json", world / "features" / "demo_tiny.h5"
    shard = sorted(cache.with_suffix(".shards").glob("*.h5"))[0]
    photo = load_dataset_file(data).images[0].file
    shared = [data, cache, shard, shard.with_suffix(".json"), shard.with_name("manifest.json"), world / "data/images" / photo]
    of_run = [world / "run" / name for name in RUN_FILES]
    places = ["--features", cache, "--captions", data]
    before = everything(world)
    for file in (*shared, *of_run):
        assert "output is also an input" in fails(embed_main, world / "run", *places, "--out", file), file
        assert "output is also an input" in fails(search_main, world / "run", "a dog", *places, "--html", file), file
    corpus = ["--corpus", world / "test.h5", *places]
    assert "also an input" in fails(search_main, world / "run", "a dog", *corpus, "--html", world / "test.h5")
    assert "also an input" in fails(search_main, world / "run", "a dog", *corpus, "--index", world / "test.h5")
    assert "also an input" in fails(search_main, world / "run", world / "data/images" / photo, *places, "--html", shared[-1])
    for file in (world / "result.json", world / "test.h5", data, shared[-1]):
        assert "also an input" in fails(report_main, world / "result.json", "--out", file, "--force"), file
    assert "holds the feature 'tiny' of 'demo'" in fails(extract_main, "tfidf", "--dataset", data, "--out", cache)
    words = ["--words", world / "words.txt", "--out", world / "words.txt"]
    assert "output is also an input" in fails(extract_main, "mean_vector", "--dataset", data, *words)
    assert everything(world) == before


def test_a_run_starts_from_no_run_that_it_replaces(own_cache: Path, own_run: Path, fails: Fails) -> None:
    before = everything(own_run)
    (own_run.parent / "link").symlink_to(own_run)
    start = ["--start-from", own_run, "--overwrite"]
    line = fails(train_main, "--features", own_cache, "--out", own_run.parent / "link", *start)
    assert "output is also an input" in line
    assert everything(own_run) == before
    assert (own_run.parent / "link").is_symlink()
