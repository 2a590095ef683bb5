"""Trained models of the interface against the commands: training, embedding, encoding and searching."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import vse
from tests.conftest import TINY_FEATURE
from tests.eval.evaluating import succeeds
from tests.training.conftest import COMMAND, SETS
from tests.training.phrases.some_regions import Caches
from vse.training.cli import embed_main, search_main, train_main


def test_a_training_is_that_of_the_command(cache: Path) -> None:
    succeeds(train_main, "--features", cache, "--out", "command", "--seed", 3, *COMMAND)
    model = vse.train(vse.open_features(cache), sets=SETS, seed=3, out="function")
    other = vse.load("command")
    assert model.json["files"]["best.safetensors"] == other.json["files"]["best.safetensors"]
    assert model.settings == other.settings
    columns = [name for name in model.frame if name not in ("seconds", "pairs_per_s")]
    pd.testing.assert_frame_equal(model.frame[columns], other.frame[columns])
    again = vse.train(cache, sets=SETS, seed=3, out="function")
    assert again.json["made"] == model.json["made"], "a finished run is not trained again"
    assert model.json["made"]["command"].startswith("vse.train(")
    more = vse.train(cache, sets=SETS, out="more", options=vse.TrainOptions(log_negatives=2))
    assert (more.path / "negatives.csv").is_file()


def test_embeddings_are_arrays_with_ids(run: Path) -> None:
    embedded = vse.load(run).embed(out="function.h5")
    succeeds(embed_main, run, "--out", "command.h5")
    other = vse.embeddings("command.h5")
    for name in ("images", "captions", "image_ids", "caption_ids", "caption_image_ids"):
        assert np.array_equal(getattr(embedded, name), getattr(other, name))
    expected = embedded.images @ embedded.captions.T
    for direction in ("i2t", "t2i"):
        assert np.allclose(embedded.scores(direction), expected, atol=1e-6)
    with pytest.raises(vse.UserError, match="known are i2t and t2i"):
        embedded.scores("both")
    assert embedded.frame["image_id"].tolist() == embedded.caption_image_ids.tolist()
    assert embedded.json["embedded"]["command"] == f"vse.load({str(run)!r}).embed(out='function.h5')"
    result = vse.evaluate(embedded)
    vectors = embedded.images, embedded.captions, embedded.caption_image_ids
    assert vse.evaluate(vse.embeddings(*vectors, image_ids=embedded.image_ids)).metrics == result.metrics


def test_embeddings_as_features_are_two_caches(run: Path, demo: Path) -> None:
    model = vse.load(run)
    other = model.embed("val", out="val.h5")
    assert (other.split, TINY_FEATURE.name in other.json["features"]) == ("val", True)
    images, captions = model.embed_as_features("features/mine")
    assert (images.kind, captions.kind) == ("image", "text")
    assert len(captions) == 5 * len(images)
    embedded = model.embed(out="test.h5")
    others = vse.embeddings_as_features(["test.h5"], "features/others", captions=demo)
    assert np.allclose(others[0][embedded.image_ids], embedded.images, atol=1e-3)
    with pytest.raises(vse.UserError, match=r"call vse.load\(run\).embed_as_features"):
        vse.embeddings_as_features(run, "features/x")


def test_new_texts_and_photos_are_encoded_as_those_of_the_split(run: Path, demo: Path) -> None:
    model, data = vse.load(run), vse.open_dataset(demo)
    embedded = model.embed(out="test.h5")
    texts = data.frame.set_index("caption_id")["caption"]
    captions = model.encode_captions(texts[embedded.caption_ids[:4]].tolist())
    assert np.allclose(captions, embedded.captions[:4], atol=1e-5)
    photos = [data.photo(image_id) for image_id in embedded.image_ids[:3]]
    images = model.encode_images(photos)
    assert np.allclose(images, embedded.images[:3], atol=1e-2), "the cache holds rounded features"
    assert np.array_equal(model.encode_images(photos[0]), images[0])
    assert np.array_equal(model.encode_captions(texts.iloc[0]).shape, (16,))
    with pytest.raises(vse.UserError, match=r"'\?!': no word"):
        model.encode_captions(["a circle", "?!"])


def test_a_search_finds_what_the_command_prints(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = vse.load(run)
    hits = model.search("a red circle", k=3)
    succeeds(search_main, run, "a red circle", "-k", 3)
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows = zip(*(hits.frame[column] for column in ("rank", "score", "file", "caption")), strict=True)
    assert [[str(rank), f"{score:.4f}", file, caption] for rank, score, file, caption in rows] == printed
    assert hits._repr_html_().count("data:image/jpeg") == len(hits) == 3
    assert hits.json[0]["caption_id"] is None
    data = vse.open_dataset(demo)
    captions = model.search(data.photo(60), k=2, html="page.html")
    texts = data.frame.set_index("caption_id")["caption"]
    assert captions.frame["caption"].tolist() == texts[captions.frame["caption_id"].tolist()].tolist()
    assert Path("page.html").is_file()


def test_a_model_is_loaded_once_for_several_searches(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vse.training.use import search

    loaded: list[Path] = []
    load = search.load_run_for_search
    monkeypatch.setattr(search, "load_run_for_search", lambda *arguments: loaded.append(arguments[0]) or load(*arguments))
    monkeypatch.setattr("vse.pipeline.files.inputs.FileState.detects_writes_after", lambda *_: True)
    model = vse.load(run)
    first, again = model.search("a red circle", k=3), model.search("a red circle", k=3)
    pd.testing.assert_frame_equal(first.frame, again.frame)
    assert loaded == [run]
    indexed = model.search("a red circle", k=3, index=vse.SearchIndex("i.faiss", factory="Flat"))
    assert indexed.frame["image_id"].tolist() == first.frame["image_id"].tolist()
    assert Path("i.faiss").is_file()
    pd.testing.assert_frame_equal(model.search("a red circle", k=3, index="i.faiss").frame, indexed.frame)
    with pytest.raises(vse.UserError, match="nprobe"):
        model.search("a red circle", index=vse.SearchIndex("i.faiss", parameters="nprobe=x"))


def test_a_phrase_is_found_in_a_photo_and_evaluated(phrase_run: Path, caches: Caches) -> None:
    embedded = vse.load(phrase_run).embed(out="phrases.h5")
    assert embedded.frame.columns.tolist() == ["phrase_id", "image_id", "caption_id", "types", "n_candidates"]
    with pytest.raises(vse.UserError, match="holds scores of phrases and boxes"):
        _ = embedded.images
    result = vse.evaluate(embedded, bootstrap=0, options=vse.EvaluateOptions(iou=0.4))
    assert result.metrics["phrase"]["iou"] == 0.4
    assert "R@1/5/10 at IoU 0.4" in repr(result)
    with pytest.raises(vse.UserError, match="to_trec does not apply to phrase scores"):
        result.to_trec("t")


def test_every_object_is_displayed_in_a_notebook(demo: Path, cache: Path, run: Path) -> None:
    model = vse.load(run)
    assert model.json == json.loads((run / "run.json").read_text())
    assert (model.frame["epoch"].tolist(), model.settings["model"]["dim"]) == ([1, 2, 3], 16)
    embedded = model.embed(out="e.h5")
    for displayed in (vse.open_dataset(demo), vse.open_features(cache), model, embedded):
        assert "<" in displayed._repr_html_()
        assert repr(displayed)
    page = vse.report(vse.evaluate(embedded).save("r.json"), "r.html", queries=2)
    assert page.html == Path("r.html").read_text(encoding="utf-8")
    assert page._repr_html_().startswith("<iframe")
    assert page._repr_html_().count("<") == 2, "its own tags are escaped"
