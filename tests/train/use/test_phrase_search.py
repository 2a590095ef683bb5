"""A phrase that is searched in one photo, by the command; and a run of phrases from its scores to a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.phrases.some_regions import Caches, small
from vse.eval.cli import eval_main
from vse.eval.files.phrase_scores import read_phrase_scores
from vse.eval.files.results import read_result
from vse.features.cache.feature_cache import open_cache
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.settings.texts import TfidfConfig
from vse.pipeline.dataset.dataset import load_dataset_file, mentions
from vse.train.cli import embed_main, report_main, search_main
from vse.train.options import TrainInputs
from vse.train.training import train
from vse.train.use.embed import embed_split


def done(command: Callable[[list[str]], None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        command([str(argument) for argument in arguments])
    assert stop.value.code == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--split", "val"], "--image searches one photo, and --split is of a split"),
        (["--rerank", 5], "--image searches one photo, and --rerank is of a split"),
        (["--index", "i.faiss"], "--image searches one photo, and --index is of a split"),
    ],
)
def test_options_of_a_split_are_refused(
    options: list[Any], reason: str, phrase_run: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert reason in fails(search_main, phrase_run, "--image", tmp_path / "it.jpg", "a hat", *options)


def test_a_photo_that_is_not_there_or_would_be_overwritten_is_refused(
    phrase_run: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert "no such image file" in fails(search_main, phrase_run, "--image", tmp_path / "it.jpg", "a hat")
    photo = next((own_demo.parent / "images").iterdir())
    before = photo.read_bytes()
    assert str(photo) in fails(search_main, phrase_run, "--image", photo, "a hat", "--html", photo)
    assert photo.read_bytes() == before


@pytest.fixture(scope="module")
def own_words_run(caches: Caches, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of phrases whose cache has an encoder, which reads any phrase. Read only."""
    folder = tmp_path_factory.mktemp("own_words")
    cache, phrases = open_cache(caches.candidates), folder / "demo_tfidf_phrases.h5"
    config = TfidfConfig(name="tfidf_phrases", min_count=1, of="phrases")
    extractor = CaptionExtractor(config, fit_encoder(cache.captions, config, encoder_path(phrases)))
    extract_shards(cache.captions, extractor, phrases, 1)
    read = TrainInputs(caption_features=merge(cache.captions, phrases, 1))
    return train(caches.candidates, small("caption_feature=tfidf_phrases"), out=folder / "run", inputs=read)


def test_a_phrase_is_found_in_a_photo_by_the_scores_that_the_file_has(
    own_words_run: Path, caches: Caches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = load_dataset_file(open_cache(caches.candidates).captions)
    scored = read_phrase_scores(embed_split(own_words_run, tmp_path / "val.h5", "val"))
    number = scored.phrase_ids.tolist().index(next(m.phrase_id for m in mentions(dataset) if m.image.split == "val"))
    mention = mentions(dataset)[scored.phrase_ids[number]]
    photo, page = dataset.image_path(mention.image), tmp_path / "page.html"
    done(search_main, own_words_run, "--image", photo, mention.text.upper(), "-k", 3, "--html", page)
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    own = scored.candidates(number)
    best = np.argsort(-scored.scores[own], kind="stable")[:3]
    assert [row[0] for row in rows] == ["1", "2", "3"][: len(best)]
    np.testing.assert_allclose([float(row[1]) for row in rows], scored.scores[own][best], atol=1e-4)
    assert [[float(corner) for corner in row[2:]] for row in rows] == np.round(scored.boxes[own][best]).tolist()
    html = page.read_text()
    assert mention.text.upper() in html
    assert html.count("data:image/") == 1
    assert f"{scored.scores[own][best[0]]:.4f}" in html


def test_a_phrase_without_a_known_word_is_refused(own_words_run: Path, caches: Caches, fails: Callable[..., str]) -> None:
    dataset = load_dataset_file(open_cache(caches.candidates).captions)
    photo = dataset.image_path(dataset.images[0])
    assert "none of its words is known to 'tfidf_phrases'" in fails(search_main, own_words_run, "--image", photo, "qwertz")


def test_scores_become_a_result_and_a_report(phrase_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done(embed_main, phrase_run, "--out", tmp_path / "test.h5")
    done(eval_main, tmp_path / "test.h5", "--out", tmp_path / "r.json")
    done(report_main, tmp_path / "r.json", "--out", tmp_path / "r.html")
    protocol = read_result(tmp_path / "r.json").protocols["phrase"]
    assert set(protocol.directions["phrase"]) == {"r1", "r5", "r10", "bound", "mean_iou"}
    assert (tmp_path / "r.html").read_text().count("<article") == 2
