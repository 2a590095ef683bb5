from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.training.conftest import Capture, Edit, Fails, Log, Patch, done, experiment
from vse.cli import data_main as main
from vse.eval.cli import eval_main, table_main
from vse.features.cache.feature_cache import open_cache
from vse.features.cli import extract_main
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import load_cache_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.preparation import check_and_describe_dataset
from vse.pipeline.demo import create_demo
from vse.pipeline.errors import Interrupted, UserError
from vse.training.cli import embed_main, report_main, search_main, train_main
from vse.training.options import RunInputOptions, TrainInputs
from vse.training.run.folder import RunFolder
from vse.training.solvers import retrieval
from vse.training.training import train
from vse.training.use.search import RunSearchOptions, search_run


def extracted(data: Path, out: Path, **changes: object) -> Path:
    extract_shards(data, CnnExtractor(TINY_FEATURE.model_copy(update=changes)), out, 1)
    return merge_feature(data, out, 1)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of another data set, of 17 images, 3 of them for testing, by the extractor of the demo's cache."""
    folder = tmp_path_factory.mktemp("shapes")
    return extracted(create_demo(folder / "data", 17, seed=5, name="shapes"), folder / "features" / "shapes_tiny.h5")


def test_a_run_is_tested_on_another_data_set(
    own_run: Path, shapes: Path, tmp_path: Path, fails: Fails, capsys: Capture
) -> None:
    done(embed_main, own_run, "--features", shapes)
    file = own_run / "shapes_test.h5"
    assert not (own_run / "test.h5").exists(), "that one would be of the run's own data set"
    with h5py.File(file) as embedded:
        assert dict(embedded.attrs) | {"dataset": "shapes", "trained_on": "demo"} == dict(embedded.attrs)
        assert len(embedded["image_ids"]) == 3
    done(eval_main, file, "--bootstrap", 100, "--out", tmp_path / "cross.json")
    result = json.loads((tmp_path / "cross.json").read_text())
    assert (result["dataset"], result["trained_on"]) == ("shapes", "demo")
    done(table_main, "summary", tmp_path / "cross.json", "--out", tmp_path / "t.csv")
    table = pd.read_csv(tmp_path / "t.csv")
    assert (table["dataset"][0], table["trained_on"][0]) == ("shapes", "demo")
    done(table_main, "summary", tmp_path / "cross.json", "--out", tmp_path / "t.tex")
    assert "demo" in (tmp_path / "t.tex").read_text()
    done(report_main, tmp_path / "cross.json", "--out", tmp_path / "page.html")
    assert "<dt>Trained on</dt><dd>demo</dd>" in (tmp_path / "page.html").read_text().replace("\n", "")
    published = [table_main, "vsepp_4", tmp_path / "cross.json", "--dataset", "shapes", "--out", tmp_path / "p.csv"]
    capsys.readouterr()
    assert "no result belongs to a row" in fails(*published)


def test_words_that_the_training_captions_lack_are_counted(own_run: Path, own_demo: Path, cache: Path) -> None:
    content = json.loads(own_demo.read_text())
    sentences = [sentence for image in content["images"] if image["split"] == "test" for sentence in image["sentences"]]
    for sentence in sentences[:4]:
        sentence["tokens"] = ["zebra", "quagga", *sentence["tokens"][2:]]
    own_demo.write_text(json.dumps(content))
    words = set(json.loads((own_run / "vocab.json").read_text()))
    expected = [[token not in words for token in sentence["tokens"]] for sentence in sentences]
    done(embed_main, own_run, "--captions", own_demo)
    with h5py.File(own_run / "test.h5") as file:
        said = json.loads(file.attrs["provenance"])["unknown_words"]
    assert said == {"words": sum(map(sum, expected)), "of": sum(map(len, expected)), "captions": sum(map(any, expected))}
    assert said["words"] >= 8


def test_images_without_captions_are_only_candidates(own_run: Path, own_demo: Path) -> None:
    done(embed_main, own_run, "--out", own_run / "before.h5")
    content = json.loads(own_demo.read_text())
    tests = [image for image in content["images"] if image["split"] == "test"]
    tests[3]["sentences"], tests[3]["sentids"] = [], []
    own_demo.write_text(json.dumps(content))
    done(embed_main, own_run, "--captions", own_demo)
    with h5py.File(own_run / "before.h5") as before, h5py.File(own_run / "test.h5") as after:
        np.testing.assert_array_equal(before["images"][:], after["images"][:])
        assert len(after["captions"]) == len(before["captions"]) - 5
    done(eval_main, own_run / "test.h5", "--bootstrap", 100, "--out", own_run / "r.json")
    assert json.loads((own_run / "r.json").read_text())["protocols"]["full"]["n_queries"] == {"i2t": 11, "t2i": 55}


def test_images_without_captions_are_left_out_of_a_training(cache: Path, own_demo: Path, tmp_path: Path, caplog: Log) -> None:
    content = json.loads(own_demo.read_text())
    for image in content["images"][::7]:
        image["sentences"], image["sentids"] = [], []
    own_demo.write_text(json.dumps(content))
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", inputs=TrainInputs(captions=own_demo))
    assert "images without captions are left out" in caplog.text
    n_captioned = sum(bool(image["sentences"]) and image["split"] == "train" for image in content["images"])
    assert RunFolder(run).read_record()["n_train_pairs"] == 5 * n_captioned


@pytest.mark.parametrize("recorded", [True, False])
def test_another_extractor_is_refused(recorded: bool, own_run: Path, shapes: Path, tmp_path: Path, fails: Fails) -> None:
    data = shapes.parent.parent / "data" / "dataset.json"
    if not recorded:
        record = json.loads((own_run / "run.json").read_text())
        del record["features"]["extractor"]
        own_cache = RunFolder(own_run).image_cache_file()
        record["features"]["path"] = str(own_cache.resolve())
        (own_run / "run.json").write_text(json.dumps(record))
    done(embed_main, own_run, "--features", shapes)
    line = fails(embed_main, own_run, "--features", extracted(data, tmp_path / "shapes_tiny.h5", grid=1))
    assert "config.grid: 2 -> 1" in line
    assert "is not the cache that" in line
    weights = extracted(data, tmp_path / "other" / "shapes_tiny.h5", seed=9)
    assert "weights_sha256" in fails(embed_main, own_run, "--features", weights)


def test_other_captions_go_through_the_encoder_of_the_run(cache: Path, tfidf: Path, shapes: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("caption_feature=tfidf", "train.epochs=1"), out=tmp_path / "run")
    done(embed_main, run, "--features", shapes)
    with h5py.File(run / "shapes_test.h5") as file:
        captions = file["captions"][:]
    hits = search_run(run, "a red circle", RunSearchOptions(k=3))
    assert len(hits) == 3
    content = json.loads((shapes.parent.parent / "data" / "dataset.json").read_text())
    tokens = [s["tokens"] for image in content["images"] if image["split"] == "test" for s in image["sentences"]]
    vectors = load_cache_encoder(open_cache(tfidf), "cpu").encode(tokens).numpy().astype(np.float16).astype(np.float32)
    weights = RunFolder(run).read_best_weights()
    weight, bias = (
        next(w.numpy() for n, w in weights.items() if n.startswith("caption") and n.endswith(e)) for e in ("weight", "bias")
    )
    slow = vectors @ weight.T + bias
    np.testing.assert_allclose(captions, slow / np.linalg.norm(slow, axis=1, keepdims=True), atol=1e-5)


@pytest.fixture
def photos(shapes: Path, tmp_path: Path) -> Path:
    """Three photos, one of them in a folder, and a file that is none."""
    (tmp_path / "photos" / "2019").mkdir(parents=True)
    files = sorted((shapes.parent.parent / "data" / "images").iterdir())
    for file, name in zip(files, ["b.JPG", "a.jpeg", "2019/c.jpg"], strict=False):
        shutil.copy(file, tmp_path / "photos" / name)
    (tmp_path / "photos" / "notes.txt").write_text("mine")
    return tmp_path / "photos"


def test_what_is_no_album_is_one_line(photos: Path, few: Path, tmp_path: Path, fails: Fails) -> None:
    assert "no such folder" in fails(main, "album", tmp_path / "none", "--out", tmp_path / "album")
    (tmp_path / "empty").mkdir()
    assert "no JPEG, PNG or WebP" in fails(main, "album", tmp_path / "empty", "--out", tmp_path / "album")
    shutil.copytree(few.parent, tmp_path / "demo")
    before = (tmp_path / "demo" / "dataset.json").read_bytes()
    for name in ("demo", "album"):
        line = fails(main, "album", photos, "--out", tmp_path / "demo", "--name", name)
        assert {"demo": "describes another data set", "album": "is not the data set 'album'"}[name] in line
    assert (tmp_path / "demo" / "dataset.json").read_bytes() == before


def test_an_album_is_extracted_like_the_cache_of_a_run_and_searched_but_not_ranked(
    photos: Path, run: Path, cache: Path, tfidf: Path, tmp_path: Path, fails: Fails, capsys: Capture
) -> None:
    for _ in range(2):
        done(main, "album", photos, "--out", tmp_path / "album")
    dataset = load_dataset_file(tmp_path / "album" / "dataset.json")
    assert (dataset.name, [image.file for image in dataset.images]) == ("album", ["2019/c.jpg", "a.jpeg", "b.JPG"])
    assert "3 images       0 captions" in check_and_describe_dataset(dataset.path)
    assert sorted(path.name for path in (tmp_path / "album").iterdir()) == ["dataset.json", "images"]
    data, out = tmp_path / "album" / "dataset.json", tmp_path / "album_tiny.h5"
    of_album = ["cnn", "--dataset", data, "--out", out, "--like"]
    assert "--set does not go with --like" in fails(extract_main, *of_album, cache, "--set", "grid=1")
    assert f"{tfidf}: --like " in fails(extract_main, *of_album, tfidf)
    done(extract_main, *of_album, cache)
    capsys.readouterr()
    done(search_main, run, "a red circle", "--features", out, "-k", 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert {line.split("\t")[2] for line in lines} < {str(image) for image in (tmp_path / "album" / "images").rglob("*.*")}
    photo = tmp_path / "album" / "images" / "a.jpeg"
    assert "no image of the split 'test' has a caption" in fails(search_main, run, photo, "--features", out)
    assert "no image of split 'test' has a caption" in fails(embed_main, run, "--features", out)
    assert "no images in split 'train'" in fails(train_main, "--features", out)


def test_an_album_reads_queries_as_the_run_does_or_by_its_own_tokeniser(
    photos: Path, own_run: Path, cache: Path, tmp_path: Path, edit: Edit, fails: Fails, caplog: Log
) -> None:
    edit(own_run / "run.json", lambda record: record.update(tokeniser="unicode_words"))
    for tokeniser, words in (((), "s"), (("--tokeniser", "nltk"), "'s")):
        done(main, "album", photos, "--out", tmp_path / "album", *tokeniser)
        out, data = tmp_path / f"{len(tokeniser)}.h5", tmp_path / "album" / "dataset.json"
        done(extract_main, "cnn", "--dataset", data, "--out", out, "--like", cache)
        caplog.clear()
        search_run(own_run, "a circle's", RunSearchOptions(k=1), RunInputOptions(features=out))
        assert f"not a word of the training captions: {words}" in caplog.messages
        assert "words were cut by" not in caplog.text
    assert "--tokeniser: no tokeniser 'nlkt'" in fails(main, "album", photos, "--out", tmp_path / "x", "--tokeniser", "nlkt")


@pytest.fixture
def leaking(demo: Path, tmp_path: Path) -> Path:
    """The cache of another data set: 2 training and 3 test images of the demo under other names, to be tested on."""
    images = json.loads(demo.read_text())["images"]
    taken = [image for image in images if image["split"] == "train"][:2]
    taken += [image for image in images if image["split"] == "test"][:3]
    (tmp_path / "other" / "images").mkdir(parents=True)
    for number, image in enumerate(taken):
        shutil.copy(demo.parent / "images" / image["filename"], tmp_path / "other" / "images" / f"photo{number}.jpg")
        image.update(filename=f"photo{number}.jpg", split="test")
    file = tmp_path / "other" / "dataset.json"
    file.write_text(json.dumps({"dataset": "other", "images": taken}))
    extract_shards(file, CnnExtractor(TINY_FEATURE), tmp_path / "features" / "other_tiny.h5", 1)
    return merge_feature(file, tmp_path / "features" / "other_tiny.h5", 1)


def test_leaks_are_refused(own_run: Path, leaking: Path, demo: Path, fails: Fails, tmp_path: Path, capsys: Capture) -> None:
    line = fails(embed_main, own_run, "--features", leaking)
    assert f"{own_run}: was trained on 2 of the 5 images of split 'test'" in line
    assert "photo0.jpg is demo_000000.jpg in split 'train' of" in line
    assert "--allow-leak" in line
    assert not (own_run / "other_test.h5").exists()
    capsys.readouterr()
    done(embed_main, own_run, "--features", leaking, "--allow-leak")
    assert "was trained on 2 of the 5 images" in capsys.readouterr().err
    with h5py.File(own_run / "other_test.h5") as file:
        assert json.loads(file.attrs["provenance"])["images_trained_on"] == {"images": 2, "of": 5}
    done(eval_main, own_run / "other_test.h5", "--bootstrap", 0, "--out", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["provenance"]["images_trained_on"] == {"images": 2, "of": 5}


def test_other_splits_of_the_same_images_are_refused(own_run: Path, own_demo: Path, edit: Edit, fails: Fails) -> None:
    done(embed_main, own_run, "--split", "train")
    with h5py.File(own_run / "train.h5") as file:
        assert len(file["image_ids"]) == 48
        assert "images_trained_on" not in json.loads(file.attrs["provenance"])

    def exchange(content: Any) -> None:
        for image in content["images"]:
            image["split"] = {"train": "test", "test": "train"}.get(image["split"], image["split"])

    line = fails(embed_main, own_run, "--captions", edit(own_demo, exchange))
    assert "was trained on 48 of the 48 images of split 'test'" in line


def test_if_its_own_data_set_is_gone_that_is_said(own_run: Path, leaking: Path, capsys: Capture) -> None:
    record = json.loads((own_run / "run.json").read_text())
    for features in (record["features"], record.get("eval_features", {})):
        features["path"] = "../gone.h5"
    (own_run / "run.json").write_text(json.dumps(record))
    done(embed_main, own_run, "--features", leaking)
    assert "whether it was trained on images of" in capsys.readouterr().err


def stopped(cache: Path, out: Path, monkeypatch: Patch, how: str) -> Path:
    """A run that ends in its second epoch."""
    real, steps = retrieval.RetrievalTrainer.step, iter(range(100))

    def step(self: retrieval.RetrievalTrainer, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        loss, collapsed = real(self, *arguments)  # type: ignore[arg-type]
        if next(steps) >= 10:
            if how == "running":
                os.kill(os.getpid(), signal.SIGTERM)
            elif how == "diverged":
                return loss * torch.nan, collapsed
        return loss, collapsed

    with monkeypatch.context() as patch:
        patch.setattr(retrieval.RetrievalTrainer, "step", step)
        if how == "collapsed":
            patch.setattr(retrieval.RetrievalTrainer, "_is_collapsed", lambda self, row, _: row["epoch"] == 2)
        with pytest.raises((Interrupted, UserError)):
            train(cache, experiment(), out=out)
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["running", "diverged", "collapsed"])
def test_an_unfinished_run_needs_an_option(how: str, cache: Path, tmp_path: Path, monkeypatch: Patch, fails: Fails) -> None:
    run = stopped(cache, tmp_path / "run", monkeypatch, how)
    assert RunFolder(run).read_record()["state"] == how
    line = fails(embed_main, run)
    assert f"did not finish (state: {how})" in line
    assert "--allow-unfinished" in line
    assert not (run / "test.h5").exists()
    done(embed_main, run, "--unfinished")
    out = tmp_path / "r.json"
    line = fails(eval_main, run / "test.h5", "--out", out)
    assert f"did not finish (state: {how})" in line
    assert not out.exists()
    done(eval_main, run / "test.h5", "--bootstrap", 100, "--unfinished", "--out", out)
    assert json.loads(out.read_text())["unfinished"] == [{"file": "run/test.h5", "state": how}]
    done(table_main, "summary", out, "--out", tmp_path / "t.csv")
    assert pd.read_csv(tmp_path / "t.csv")["unfinished"].tolist() == [how]
    done(report_main, out, "--out", tmp_path / "page.html")
    assert f"the training did not finish ({how})" in (tmp_path / "page.html").read_text()


def test_a_comparison_asks_too(cache: Path, own_run: Path, tmp_path: Path, monkeypatch: Patch, fails: Fails) -> None:
    run = stopped(cache, tmp_path / "stopped", monkeypatch, "running")
    done(embed_main, run, "--unfinished")
    done(embed_main, own_run)
    both = [own_run / "test.h5", run / "test.h5", "--compare", "--bootstrap", 20, "--out", tmp_path / "c.json"]
    assert "did not finish" in fails(eval_main, *both)
    done(eval_main, *both, "--allow-unfinished")
    assert json.loads((tmp_path / "c.json").read_text())["unfinished"] == [{"file": "stopped/test.h5", "state": "running"}]
