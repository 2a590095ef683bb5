"""A trained run of phrases put to use: its file of scores, and a phrase of yours in a photo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.eval.evaluating import write_phrase_result
from tests.train.phrases.some_regions import Caches, make_caches
from vse.eval.files.embeddings import read_embeddings
from vse.eval.files.phrase_scores import read_phrase_scores
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import load_dataset_file, mentions
from vse.pipeline.demo import create_demo
from vse.pipeline.errors import UserError
from vse.train.options import RunFiles
from vse.train.run.folder import RunFolder
from vse.train.use.embed import embed_split
from vse.train.use.model import load_run


@pytest.fixture(scope="module")
def scored(phrase_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scores of the validation split. Read only."""
    return embed_split(phrase_run, tmp_path_factory.mktemp("scores") / "val.h5", "val")


def test_the_file_has_every_phrase_of_the_split_with_the_candidates_of_its_image(scored: Path, caches: Caches) -> None:
    cache, found = open_cache(caches.candidates), read_phrase_scores(scored)
    expected = [m for m in mentions(load_dataset_file(cache.captions)) if m.image.split == "val"]
    assert found.phrase_ids.tolist() == [m.phrase_id for m in expected]
    assert found.image_ids.tolist() == [m.image.imgid for m in expected]
    assert found.caption_ids.tolist() == [m.caption.sentid for m in expected]
    assert found.types.tolist() == ["/".join(m.phrase.types) for m in expected]
    assert (found.dataset, found.split, found.experiment, found.seed) == ("demo", "val", "phrase_embedding", 0)
    boxes = np.concatenate([shard["boxes"].map() for shard in cache.shards])
    for k, mention in enumerate(expected):
        row = cache.ids.tolist().index(mention.image.imgid)
        own = boxes[cache.offsets[row] : cache.offsets[row + 1]]
        np.testing.assert_array_equal(found.boxes[found.candidates(k)], own)
        truth = mention.phrase.truth
        assert (tuple(found.truth[k].tolist()) == truth) if truth else np.isnan(found.truth[k]).all()


def test_the_evaluator_finds_what_validation_found(scored: Path, phrase_run: Path, tmp_path: Path) -> None:
    result = json.loads(write_phrase_result([scored], tmp_path / "result.json", bootstrap=0).read_text())
    metrics = result["protocols"]["phrase"]["phrase"]
    assert sum(metrics[f"r{k}"] for k in (1, 5, 10)) == pytest.approx(RunFolder(phrase_run).record()["best_rsum"])


def test_the_split_and_the_file_have_their_usual_names(phrase_run: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(phrase_run, phrase_run.parent / "own"))
    assert embed_split(own) == own / "test.h5"
    assert read_phrase_scores(own / "test.h5").split == "test"


def test_sentences_are_scored_by_their_phrases(phrase_run: Path, scored: Path, caches: Caches, tmp_path: Path) -> None:
    found = read_embeddings(embed_split(phrase_run, tmp_path / "s.h5", "val", sentences=True))
    dataset, phrases = load_dataset_file(open_cache(caches.candidates).captions), read_phrase_scores(scored)
    images = dataset.split("val")
    assert found.image_ids.tolist() == [image.imgid for image in images]
    assert found.caption_ids.tolist() == [caption.sentid for image in images for caption in image.captions]
    assert (found.dataset, found.split, found.experiment, found.seed) == ("demo", "val", "phrase_embedding", 0)
    for column, sentid in enumerate(found.caption_ids.tolist()):
        own = np.flatnonzero(phrases.caption_ids == sentid).tolist()
        assert found.n_phrases[column] == len(own)
        row = found.image_of_caption()[column]
        best = [phrases.scores[phrases.candidates(k)].max() for k in own if phrases.offsets[k] < phrases.offsets[k + 1]]
        if len(best):  # cosines of the caption's own image
            assert found.n_regions[row] == phrases.offsets[own[0] + 1] - phrases.offsets[own[0]]
            nearest = -np.sqrt(2 - 2 * np.asarray(best, np.float64).clip(max=1)).mean()
            assert found.scores[row][column] == pytest.approx(nearest, abs=2e-3)


def test_sentences_have_a_name_of_their_own_and_a_model_of_phrases(phrase_run: Path, run: Path) -> None:
    own = Path(shutil.copytree(phrase_run, phrase_run.parent / "sentences"))
    assert embed_split(own, sentences=True) == own / "test_sentences.h5"
    with pytest.raises(UserError, match="matches images and captions, and not phrases, whose scores --sentences are"):
        embed_split(run, sentences=True)


def test_a_run_of_phrases_embeds_no_captions(phrase_run: Path) -> None:
    with pytest.raises(UserError, match="localises phrases, and embeds no images and captions"):
        load_run(phrase_run, "test")


def test_phrases_of_another_data_set_need_a_cache_or_its_encoder(phrase_run: Path, tmp_path: Path) -> None:
    other = create_demo(tmp_path / "data", n_images=24, seed=9)
    caches = make_caches(other, tmp_path / "features")
    places = RunFiles(features=caches.candidates, caption_features=caches.phrases)
    out = embed_split(phrase_run, tmp_path / "other.h5", "test", places)
    assert len(read_phrase_scores(out).phrase_ids) == len(
        [m for m in mentions(load_dataset_file(other)) if m.image.split == "test"]
    )
