"""A run on other data than it was trained on: another data set, an album without captions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from tests.conftest import TINY_FEATURE
from tests.train.conftest import experiment
from vse.eval.cli import eval_main, table_main
from vse.features.cache.feature_cache import open_cache
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.captions import load_cache_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.demo import create_demo
from vse.train.cli import embed_main, report_main, search_main, train_main
from vse.train.run.folder import RunFolder
from vse.train.training import train
from vse.train.use.search import search_split

Run = Callable[..., None]


def done(main: Run, *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


def extracted(data: Path, out: Path, **changes: object) -> Path:
    extract_shards(data, CnnExtractor(TINY_FEATURE.model_copy(update=changes)), out, 1)
    return merge(data, out, 1)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of another data set, of 17 images, 3 of them for testing, by the extractor of the demo's cache."""
    folder = tmp_path_factory.mktemp("shapes")
    return extracted(create_demo(folder / "data", 17, seed=5, name="shapes"), folder / "features" / "shapes_tiny.h5")


@pytest.fixture
def album(shapes: Path, tmp_path: Path) -> Path:
    """The cache of some photos that nobody has described."""
    source = shapes.parent.parent / "data"
    images = json.loads((source / "dataset.json").read_text())["images"]
    entries = [{"imgid": image["imgid"], "filename": image["filename"], "split": "test", "sentences": []} for image in images]
    del entries[0]["sentences"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(source / "images")
    (tmp_path / "data" / "dataset.json").write_text(json.dumps({"dataset": "album", "images": entries}))
    return extracted(tmp_path / "data" / "dataset.json", tmp_path / "album_tiny.h5")


def test_trained_on_one_data_set_and_tested_on_another(
    own_run: Path, shapes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vse")
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
    caplog.clear()
    done(table_main, "vsepp_4", "--out", tmp_path / "p.csv")


def test_a_result_on_other_data_is_no_row_of_a_published_table(
    own_run: Path, shapes: Path, tmp_path: Path, fails: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    done(embed_main, own_run, "--features", shapes)
    done(eval_main, own_run / "shapes_test.h5", "--bootstrap", 0, "--out", tmp_path / "cross.json")
    capsys.readouterr()
    table = [table_main, "vsepp_4", tmp_path / "cross.json", "--dataset", "shapes", "--out", tmp_path / "p.csv"]
    assert "no result belongs to a row" in fails(*table)


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
    assert said == {
        "words": sum(map(sum, expected)),
        "of": sum(map(len, expected)),
        "captions": sum(map(any, expected)),
    }
    assert said["words"] >= 8


def test_an_album_is_searched_by_a_text(run: Path, album: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done(search_main, run, "a red circle", "--features", album, "-k", 3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.split("\t")[2].endswith(".jpg") for line in lines)


def test_an_album_has_no_captions_to_find_or_to_rank(run: Path, album: Path, fails: Callable[..., str]) -> None:
    photo = next((album.parent / "data" / "images").iterdir())
    assert "no image of the split 'test' has a caption" in fails(search_main, run, photo, "--features", album)
    assert "no image of the split 'test' has a caption" in fails(embed_main, run, "--features", album)
    assert "no images in split 'train'" in fails(train_main, "--features", album)


def test_images_without_captions_are_only_candidates(own_run: Path, own_demo: Path) -> None:
    """Of a split with both, the metrics are those of the images that have captions, among all."""
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


def test_images_without_captions_are_left_out_of_a_training(
    cache: Path, own_demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = json.loads(own_demo.read_text())
    for image in content["images"][::7]:
        image["sentences"], image["sentids"] = [], []
    own_demo.write_text(json.dumps(content))
    from vse.train.options import TrainInputs

    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", inputs=TrainInputs(captions=own_demo))
    assert "images without captions are left out" in caplog.text
    n_captioned = sum(bool(image["sentences"]) and image["split"] == "train" for image in content["images"])
    assert RunFolder(run).record()["n_train_pairs"] == 5 * n_captioned


@pytest.mark.parametrize("recorded", [True, False])
def test_another_extractor_is_refused_with_what_differs(
    recorded: bool, own_run: Path, shapes: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    """Runs of an earlier version do not say what extractor made their cache; then the cache does, if it is there."""
    data = shapes.parent.parent / "data" / "dataset.json"
    if not recorded:
        record = json.loads((own_run / "run.json").read_text())
        del record["features"]["extractor"]
        own_cache = RunFolder(own_run).feature_file()
        record["features"]["path"] = str(own_cache.resolve())
        (own_run / "run.json").write_text(json.dumps(record))
    done(embed_main, own_run, "--features", shapes)
    line = fails(embed_main, own_run, "--features", extracted(data, tmp_path / "shapes_tiny.h5", grid=1))
    assert "config.grid: 2 -> 1" in line
    assert "is not the cache that" in line
    weights = extracted(data, tmp_path / "other" / "shapes_tiny.h5", seed=9)
    assert "weights_sha256" in fails(embed_main, own_run, "--features", weights)


def test_captions_of_another_data_set_go_through_the_encoder_of_the_run(
    cache: Path, tfidf: Path, shapes: Path, tmp_path: Path
) -> None:
    run = train(cache, experiment("caption_feature=tfidf", "train.epochs=1"), out=tmp_path / "run")
    done(embed_main, run, "--features", shapes)
    with h5py.File(run / "shapes_test.h5") as file:
        captions = file["captions"][:]
    hits = search_split(run, "a red circle", k=3)
    assert len(hits) == 3
    content = json.loads((shapes.parent.parent / "data" / "dataset.json").read_text())
    tokens = [s["tokens"] for image in content["images"] if image["split"] == "test" for s in image["sentences"]]
    vectors = load_cache_encoder(open_cache(tfidf), "cpu").encode(tokens).numpy().astype(np.float16).astype(np.float32)
    weights = RunFolder(run).best_weights()
    weight, bias = (
        next(w.numpy() for n, w in weights.items() if n.startswith("caption") and n.endswith(e)) for e in ("weight", "bias")
    )
    slow = vectors @ weight.T + bias
    np.testing.assert_allclose(captions, slow / np.linalg.norm(slow, axis=1, keepdims=True), atol=1e-5)
