"""Two data sets of one name and equal ids, through each command that takes two files: refused, or kept apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from tests.conftest import TINY_FEATURE
from tests.faults.suite import StartSuite, Suite
from vse.cli import data_main
from vse.eval.cli import eval_main, table_main
from vse.features.cli import extract_main
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path
from vse.features.extractors.cnn import CnnExtractor
from vse.features.feature_job import extract_feature
from vse.features.options import FeatureRequest
from vse.features.settings.captions import TfidfConfig
from vse.pipeline.demo import create_demo
from vse.training.cli import embed_main, report_main, search_main, train_main
from vse.training.experiment import load_experiment
from vse.training.serve.cli import serve_main
from vse.training.training import train

SAID = ("the data set has changed", "different data sets", "not the data set", "another data set", "search one file")
Main = Callable[[list[str]], None]
SMALL = ["model.dim=8", "model.word_dim=8", "train.epochs=1", "train.batch_size=16", "train.min_count=1", "warmup.epochs=0"]


class Data(NamedTuple):
    """A data set called ``demo`` with a cache of its images, one of its captions, a run, and the run's results."""

    dataset: Path
    cache: Path
    tfidf: Path
    run: Path
    test: Path
    result: Path

    @property
    def folder(self) -> Path:
        return self.dataset.parent.parent


def code_of(main: Main, *arguments: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0)


def made(dataset: Path) -> Data:
    folder = dataset.parent.parent
    cache, tfidf = folder / "features" / "demo_tiny.h5", folder / "features" / "demo_tfidf.h5"
    extract_shards(dataset, CnnExtractor(TINY_FEATURE), cache, 1)
    merge_feature(dataset, cache, 1)
    extract_feature(FeatureRequest(dataset=dataset, feature="tfidf", out=tfidf, sets=("min_count=1",), shards=1))
    run = train(cache, load_experiment("vsepp", sets=SMALL), out=folder / "run")
    result = folder / "result.json"
    assert code_of(embed_main, run) == 0
    assert code_of(eval_main, run / "test.h5", "--bootstrap", 0, "--out", result) == 0
    return Data(dataset, cache, tfidf, run, run / "test.h5", result)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return made(create_demo(tmp_path_factory.mktemp("ours") / "data", 12, seed=0))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return made(create_demo(tmp_path_factory.mktemp("theirs") / "data", 12, seed=1))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def pairs_of_files(a: Data, b: Data, dataset: Path, out: Path) -> dict[str, tuple[Main, list[object]]]:
    """Commands with files of two data sets that cannot be joined; ``dataset`` is not that of ``a``."""
    sets = [argument for text in SMALL for argument in ("--set", text)]
    trained = ["--features", a.cache, "--out", out / "new", *sets]
    return {
        "vse-train --captions": (train_main, [*trained, "--captions", dataset]),
        "vse-train --eval-features": (train_main, [*trained, "--eval-features", b.cache]),
        "vse-train --caption-features": (train_main, [*trained, "--caption-features", b.tfidf]),
        "vse-embed --captions": (embed_main, [a.run, "--captions", dataset, "--out", out / "new.h5"]),
        "vse-embed --as-features": (embed_main, [a.run, "--captions", dataset, "--as-features", out / "new"]),
        "vse-embed files --as-features": (embed_main, [a.test, "--captions", dataset, "--as-features", out / "new"]),
        "vse-search --captions": (search_main, [a.run, "a red circle", "--captions", dataset]),
        "vse-serve --captions": (serve_main, [a.run, "--captions", dataset, "--check"]),
        "vse-serve of two runs": (serve_main, [a.run, b.run, "--check"]),
        "vse-eval of two seeds": (eval_main, [a.test, b.test, "--out", out / "new.json"]),
        "vse-eval --compare": (eval_main, ["--compare", a.test, b.test, "--out", out / "new.json"]),
        "vse-eval --ensemble": (eval_main, ["--ensemble", a.test, b.test, "--out", out / "new.json"]),
        "vse-table summary": (table_main, ["summary", a.result, b.result, "--out", out / "new.csv"]),
        "vse-table ladder": (table_main, ["ladder", a.result, b.result, "--out", out / "new.csv"]),
        "vse-report --data": (report_main, [a.result, "--data", dataset, "--out", out / "new.html"]),
        "vse-report of two results": (report_main, [a.result, b.result, "--out", out / "new.html"]),
        "vse-data export-precomp": (data_main, ["export-precomp", a.cache, "--captions", dataset, "--out", out / "new"]),
        "vse-data pack": (data_main, ["pack", a.cache, b.tfidf, "--out", out / "new"]),
    }


def recorded(suite: Suite, name: str, code: int, before: dict[str, bytes], out: Path, err: str) -> None:
    lines = [line for line in err.splitlines() if "error:" in line]
    if code == 0:
        suite.record("silent", name)
    elif code != 2 or len(lines) != 1 or contents(out) != before or not any(text in lines[0] for text in SAID):
        suite.record("wrong", f"{name}: {code}, {lines or err[-300:]}")
    else:
        suite.record("refused", name)


def test_files_of_two_data_sets_are_refused(
    ours: Data, theirs: Data, tmp_path: Path, suite_of_faults: StartSuite, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_of_faults("files of two data sets with the same name and ids", 3)
    datasets = [theirs.dataset]
    for name, photographs, captions in (("captions", ours, theirs), ("photographs", theirs, ours)):
        shutil.copytree(photographs.dataset.parent, tmp_path / name / "data")
        datasets.append(Path(shutil.copy(captions.dataset, tmp_path / name / "data" / "dataset.json")))
    for number in range(suite.n_tries):
        a, b = (ours, theirs) if number // 3 % 2 == 0 else (theirs, ours)
        dataset = datasets[number % 3] if a is ours else ours.dataset
        for name, (main, arguments) in pairs_of_files(a, b, dataset, tmp_path / "out").items():
            if number and dataset not in arguments:
                continue  # the same two files as in the first try
            before = contents(tmp_path / "out")
            capsys.readouterr()
            code = code_of(main, *arguments)
            recorded(suite, f"{name} with {dataset}", code, before, tmp_path / "out", capsys.readouterr().err)


def test_two_data_sets_make_no_table(ours: Data, theirs: Data, tmp_path: Path, fails: Callable[..., str]) -> None:
    for name, data in (("a", ours), ("b", theirs)):
        other = Path(shutil.copy(data.test, tmp_path / f"{name}.h5"))
        with h5py.File(other, "r+") as file:
            file["images"][...] = file["images"][:][::-1]
            del file.attrs["content_sha256"]
        line = ["--compare", data.test, other, "--bootstrap", 50, "--out", tmp_path / f"{name}.json"]
        assert code_of(eval_main, *line) == 0
    line = ["significance", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "t.csv"]
    assert "sets with the name 'demo'" in fails(table_main, *line)


def test_embeddings_of_another_data_set_get_a_name_of_their_own(ours: Data, theirs: Data, tmp_path: Path) -> None:
    run = Path(shutil.copytree(ours.run, tmp_path / "run"))
    kept = {path.name: path.read_bytes() for path in run.iterdir()}
    assert code_of(embed_main, run, "--features", theirs.cache) == 0
    (other,) = [path for path in run.iterdir() if path.name not in kept]
    assert other.name.startswith("demo-")
    assert other.name.endswith("_test.h5")
    assert {name: (run / name).read_bytes() for name in kept} == kept
    with h5py.File(other) as file:
        assert str(file.attrs["trained_on"]).startswith("demo-")
    assert code_of(eval_main, other, "--bootstrap", 0, "--out", tmp_path / "cross.json") == 0
    assert json.loads((tmp_path / "cross.json").read_text())["trained_on"].startswith("demo-")
    assert code_of(report_main, tmp_path / "cross.json", "--data", theirs.dataset, "--out", tmp_path / "page.html") == 0


def test_captions_of_another_data_set_are_not_those_of_the_cache_of_the_run(ours: Data, theirs: Data, tmp_path: Path) -> None:
    """The ids of both data sets are equal, so the vectors of the cache would fit; the encoder reads the captions instead."""
    sets = [*SMALL, "caption_feature=tfidf"]
    run = train(ours.cache, load_experiment("vsepp", sets=sets), out=tmp_path / "run")
    fitted = tmp_path / "demo_tfidf.h5"  # a cache of the other captions by the encoder that was fitted on ours
    for file in (encoder_path(ours.tfidf), ours.tfidf.with_suffix(".encoder.json")):
        shutil.copy(file, tmp_path)
    encoder = CaptionExtractor(TfidfConfig(name="tfidf", min_count=1), encoder_path(fitted))
    extract_shards(theirs.dataset, encoder, fitted, 1)
    merge_feature(theirs.dataset, fitted, 1)
    for name, options in (("a", ["--caption-features", fitted]), ("b", [])):
        line = [run, "--features", theirs.cache, *options, "--out", tmp_path / f"{name}.h5"]
        assert code_of(embed_main, *line) == 0
    with h5py.File(tmp_path / "a.h5") as cached, h5py.File(tmp_path / "b.h5") as read:
        np.testing.assert_allclose(cached["captions"][:], read["captions"][:], atol=1e-5)


def test_shards_and_boxes_of_another_are_refused(ours: Data, theirs: Data, tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "demo_tiny.h5"
    for shard, data in enumerate((ours, theirs)):
        extract_shards(data.dataset, CnnExtractor(TINY_FEATURE), out, 2, only_index=shard)
    line = fails(extract_main, "merge", "--dataset", theirs.dataset, "--out", out, "--shards", 2)
    assert "6 of 6 compared photographs differ, the first is id 0" in line
    assert not out.exists()
    out = tmp_path / "demo_boxes.h5"
    sets = ("n_boxes=2", "model=squeezenet1_1", "map=features.2", "layer=features.3")
    extract_feature(FeatureRequest(dataset=ours.dataset, feature="boxes", out=out, sets=sets, shards=1))
    changed = [argument for text in (*sets[1:], f"boxes={out}") for argument in ("--set", text)]
    line = ["boxes", "--dataset", theirs.dataset, "--out", tmp_path / "demo_other.h5", *changed]
    assert "12 of 12 compared photographs differ" in fails(extract_main, *line)


def test_a_data_set_that_changed_in_place_is_named(
    ours: Data, tmp_path: Path, fails: Callable[..., str], edit: Callable[..., Path]
) -> None:
    own = Path(shutil.copytree(ours.folder, tmp_path / "own"))

    def change(content: dict[str, list[dict[str, list[dict[str, str]]]]]) -> None:
        content["images"][2]["sentences"][1]["raw"] += " and a fox"

    edit(own / "data" / "dataset.json", change)
    line = fails(embed_main, own / "run")
    assert re.search("the data set has changed since .* was made", line)
    assert "1 of 60 compared captions differ, the first is id 11; photographs are equal" in line
    assert "vse-extract" in line
    extract_shards(own / "data" / "dataset.json", CnnExtractor(TINY_FEATURE), own / "features" / "demo_tiny.h5", 1)
    merge_feature(own / "data" / "dataset.json", own / "features" / "demo_tiny.h5", 1)
    assert code_of(embed_main, own / "run") == 0, "the same command keeps the shards"


def test_the_same_content_in_another_file_is_the_same_data_set(ours: Data, tmp_path: Path) -> None:
    own = Path(shutil.copytree(ours.folder, tmp_path / "own"))
    before = (own / "run" / "test.h5").read_bytes()
    content = json.loads((own / "data" / "dataset.json").read_text())
    (own / "data" / "dataset.json").write_text(json.dumps(content, indent=3))
    assert code_of(embed_main, own / "run") == 0
    assert (own / "run" / "test.h5").read_bytes() != before, "the time is another one"
    line = ["--compare", own / "run" / "test.h5", ours.test, "--bootstrap", 50, "--out", tmp_path / "c.json"]
    assert code_of(eval_main, *line) == 0


def test_files_without_hashes_are_compared_by_ids(ours: Data, theirs: Data, tmp_path: Path) -> None:
    plain = []
    for name, data in (("a", ours), ("b", theirs)):
        plain.append(Path(shutil.copy(data.test, tmp_path / f"{name}.h5")))
        with h5py.File(plain[-1], "r+") as file:
            del file["photo_hashes"], file["caption_hashes"], file.attrs["content_sha256"]
    assert code_of(eval_main, "--compare", *plain, "--bootstrap", 50, "--out", tmp_path / "c.json") == 0
