from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.eval.evaluating import write_phrase_result
from tests.training.conftest import Capture, Fails, done
from tests.training.phrases.some_regions import Caches, make_caches, small
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.eval.files.phrase_scores import read_phrase_scores
from vse.eval.files.results import read_result
from vse.features.cache.feature_cache import open_cache
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.settings.captions import TfidfConfig
from vse.pipeline.dataset.dataset import list_mentions, load_dataset_file
from vse.pipeline.demo import create_demo
from vse.pipeline.errors import UserError
from vse.training.cli import embed_main, report_main, search_main
from vse.training.options import RunInputOptions, TrainInputs
from vse.training.run.folder import RunFolder
from vse.training.training import train
from vse.training.use.embed import embed_split
from vse.training.use.model import load_run


@pytest.fixture(scope="module")
def scored(phrase_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scores of the validation split. Read only."""
    return embed_split(phrase_run, tmp_path_factory.mktemp("scores") / "val.h5", "val")


def test_the_file_has_every_phrase_of_the_split_with_the_candidates_of_its_image(scored: Path, caches: Caches) -> None:
    cache, found = open_cache(caches.candidates), read_phrase_scores(scored)
    expected = [m for m in list_mentions(load_dataset_file(cache.dataset_file)) if m.image.split == "val"]
    assert found.phrase_ids.tolist() == [m.phrase_id for m in expected]
    assert found.image_ids.tolist() == [m.image.imgid for m in expected]
    assert found.caption_ids.tolist() == [m.caption.sentid for m in expected]
    assert found.types.tolist() == ["/".join(m.phrase.types) for m in expected]
    assert (found.dataset, found.split, found.experiment, found.seed) == ("demo", "val", "phrase_embedding", 0)
    boxes = np.concatenate([shard["boxes"].map_to_memory() for shard in cache.shard_arrays])
    for k, mention in enumerate(expected):
        row = cache.ids.tolist().index(mention.image.imgid)
        own = boxes[cache.offsets[row] : cache.offsets[row + 1]]
        np.testing.assert_array_equal(found.boxes[found.candidate_slice(k)], own)
        truth = mention.phrase.truth_box
        assert (tuple(found.truth[k].tolist()) == truth) if truth else np.isnan(found.truth[k]).all()


def test_the_evaluator_finds_what_validation_found(scored: Path, phrase_run: Path, tmp_path: Path) -> None:
    result = json.loads(write_phrase_result([scored], tmp_path / "result.json", bootstrap=0).read_text())
    metrics = result["protocols"]["phrase"]["phrase"]
    assert sum(metrics[f"r{k}"] for k in (1, 5, 10)) == pytest.approx(RunFolder(phrase_run).read_record()["best_rsum"])
    own = Path(shutil.copytree(phrase_run, phrase_run.parent / "own"))
    assert embed_split(own) == own / "test.h5"
    assert read_phrase_scores(own / "test.h5").split == "test"


def test_sentences_are_scored_by_their_phrases(phrase_run: Path, scored: Path, caches: Caches, tmp_path: Path) -> None:
    found = read_embeddings(embed_split(phrase_run, tmp_path / "s.h5", "val", sentences=True))
    dataset, phrases = load_dataset_file(open_cache(caches.candidates).dataset_file), read_phrase_scores(scored)
    images = dataset.split("val")
    assert found.image_ids.tolist() == [image.imgid for image in images]
    assert found.caption_ids.tolist() == [caption.sentid for image in images for caption in image.captions]
    assert (found.dataset, found.split, found.experiment, found.seed) == ("demo", "val", "phrase_embedding", 0)
    for column, sentid in enumerate(found.caption_ids.tolist()):
        own = np.flatnonzero(phrases.caption_ids == sentid).tolist()
        assert found.n_phrases[column] == len(own)
        row = found.image_of_caption()[column]
        best = [phrases.scores[phrases.candidate_slice(k)].max() for k in own if phrases.offsets[k] < phrases.offsets[k + 1]]
        if len(best):  # cosines of the caption's own image
            assert found.n_regions[row] == phrases.offsets[own[0] + 1] - phrases.offsets[own[0]]
            nearest = -np.sqrt(2 - 2 * np.asarray(best, np.float64).clip(max=1)).mean()
            assert found.scores[row][column] == pytest.approx(nearest, abs=2e-3)


def test_sentences_need_a_model_of_phrases_which_embeds_no_captions(phrase_run: Path, run: Path) -> None:
    own = Path(shutil.copytree(phrase_run, phrase_run.parent / "sentences"))
    assert embed_split(own, sentences=True) == own / "test_sentences.h5"
    with pytest.raises(UserError, match="matches images and captions, and not phrases, whose scores --sentences are"):
        embed_split(run, sentences=True)
    with pytest.raises(UserError, match="localises phrases, and embeds no images and captions"):
        load_run(phrase_run, "test")


def test_phrases_of_another_data_set_need_a_cache_or_its_encoder(phrase_run: Path, tmp_path: Path) -> None:
    other = create_demo(tmp_path / "data", n_images=24, seed=9)
    caches = make_caches(other, tmp_path / "features")
    places = RunInputOptions(features=caches.candidates, caption_features=caches.phrases)
    out = embed_split(phrase_run, tmp_path / "other.h5", "test", places)
    expected = [m for m in list_mentions(load_dataset_file(other)) if m.image.split == "test"]
    assert len(read_phrase_scores(out).phrase_ids) == len(expected)


def test_options_of_splits_are_refused(phrase_run: Path, tmp_path: Path, fails: Fails) -> None:
    for option, value in (("--split", "val"), ("--rerank", 5), ("--index", "i.faiss")):
        line = fails(search_main, phrase_run, "--image", tmp_path / "it.jpg", "a hat", option, value)
        assert f"--image searches one photo, and {option} is of a split" in line


def test_phrases_without_a_known_word_and_photos_that_are_not_there_are_refused(
    phrase_run: Path, own_demo: Path, tmp_path: Path, fails: Fails, own_words_run: Path, caches: Caches
) -> None:
    assert "no such image file" in fails(search_main, phrase_run, "--image", tmp_path / "it.jpg", "a hat")
    photo = next((own_demo.parent / "images").iterdir())
    before = photo.read_bytes()
    assert str(photo) in fails(search_main, phrase_run, "--image", photo, "a hat", "--html", photo)
    assert photo.read_bytes() == before
    dataset = load_dataset_file(open_cache(caches.candidates).dataset_file)
    photo = dataset.image_path(dataset.images[0])
    assert "none of its words is known to 'tfidf_phrases'" in fails(search_main, own_words_run, "--image", photo, "qwertz")


@pytest.fixture(scope="module")
def own_words_run(caches: Caches, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of phrases whose cache has an encoder, which reads any phrase. Read only."""
    folder = tmp_path_factory.mktemp("own_words")
    cache, phrases = open_cache(caches.candidates), folder / "demo_tfidf_phrases.h5"
    config = TfidfConfig(name="tfidf_phrases", min_count=1, of="phrases")
    extractor = CaptionExtractor(config, fit_encoder(cache.dataset_file, config, encoder_path(phrases)))
    extract_shards(cache.dataset_file, extractor, phrases, 1)
    read = TrainInputs(caption_features=merge_feature(cache.dataset_file, phrases, 1))
    return train(caches.candidates, small("caption_feature=tfidf_phrases"), out=folder / "run", inputs=read)


def test_a_phrase_is_found_by_the_scores_of_the_file(
    own_words_run: Path, caches: Caches, tmp_path: Path, capsys: Capture
) -> None:
    dataset = load_dataset_file(open_cache(caches.candidates).dataset_file)
    scored = read_phrase_scores(embed_split(own_words_run, tmp_path / "val.h5", "val"))
    number = scored.phrase_ids.tolist().index(next(m.phrase_id for m in list_mentions(dataset) if m.image.split == "val"))
    mention = list_mentions(dataset)[scored.phrase_ids[number]]
    photo, page = dataset.image_path(mention.image), tmp_path / "page.html"
    done(search_main, own_words_run, "--image", photo, mention.text.upper(), "-k", 3, "--html", page)
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    own = scored.candidate_slice(number)
    best = np.argsort(-scored.scores[own], kind="stable")[:3]
    assert [row[0] for row in rows] == ["1", "2", "3"][: len(best)]
    np.testing.assert_allclose([float(row[1]) for row in rows], scored.scores[own][best], atol=1e-4)
    assert [[float(corner) for corner in row[2:]] for row in rows] == np.round(scored.boxes[own][best]).tolist()
    html = page.read_text()
    assert mention.text.upper() in html
    assert html.count("data:image/") == 1
    assert f"{scored.scores[own][best[0]]:.4f}" in html


def test_scores_become_a_result_and_a_report(phrase_run: Path, tmp_path: Path, capsys: Capture) -> None:
    done(embed_main, phrase_run, "--out", tmp_path / "test.h5")
    done(eval_main, tmp_path / "test.h5", "--out", tmp_path / "r.json")
    done(report_main, tmp_path / "r.json", "--out", tmp_path / "r.html")
    protocol = read_result(tmp_path / "r.json").protocols["phrase"]
    assert set(protocol.directions["phrase"]) == {"r1", "r5", "r10", "bound", "mean_iou"}
    assert (tmp_path / "r.html").read_text().count("<article") == 2
