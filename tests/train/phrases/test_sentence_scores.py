"""Scores of whole sentences by their phrases, against a loop over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.train.phrases.test_localisation_split import MODELS, model_of, split
from vse.train.models.build import Model
from vse.train.phrases.localisation import PhraseSplit, sentence_scores

__all__ = ["split"]  # the training split, in which the last image has no candidates


def captions(split: PhraseSplit) -> tuple[np.ndarray, int]:
    """The number of each phrase's caption, and how many captions there are: the last has no phrase."""
    ids, caption_of = np.unique(split.pairs.caption_ids, return_inverse=True)
    return caption_of, len(ids) + 1


def slow_score(model: Model, split: PhraseSplit, image: int, phrases: list[int]) -> float:
    """The mean over phrases of the score with the best region, one pair at a time."""
    candidates, best = split.regions.candidates, []
    own = np.arange(candidates.counts[image]) + candidates.starts[image]
    for phrase in phrases:
        text = model.embed_captions(*split.texts.read(split.pairs.text_of[phrase : phrase + 1]))
        scores = []
        for region in own:
            seen = model.embed_images(split.regions.read(np.asarray([region])))
            if model.pairwise:
                scores.append(float(model.similarity(seen, text)))
            else:
                scores.append(-float((seen[0].double() - text[0].double()).norm()))
        best.append(max(scores))
    return float(np.mean(best))


@pytest.mark.parametrize("name", MODELS)
def test_a_sentence_scores_as_the_mean_of_its_phrases_with_their_best_regions(name: str, split: PhraseSplit) -> None:
    model, (caption_of, n_captions) = model_of(name), captions(split)
    found = sentence_scores(model, split, caption_of, n_captions)
    assert found.shape == (len(split.pairs.image_ids), n_captions)
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        for image, caption in zip(rng.integers(0, len(found) - 1, 40), rng.integers(0, n_captions - 1, 40), strict=True):
            expected = slow_score(model, split, image, np.flatnonzero(caption_of == caption).tolist())
            assert found[image, caption] == pytest.approx(expected, abs=2e-4)


def test_what_has_no_phrase_or_no_region_scores_as_the_worst_pair(split: PhraseSplit) -> None:
    caption_of, n_captions = captions(split)
    found = sentence_scores(model_of("euclidean"), split, caption_of, n_captions)
    worst = found[:-1, :-1].min()
    assert (found[-1] == worst).all()  # its image has no candidates
    assert (found[:, -1] == worst).all()


def test_a_phrase_that_comes_twice_in_a_sentence_counts_twice(split: PhraseSplit) -> None:
    caption_of, n_captions = captions(split)
    once = sentence_scores(model_of("cosine"), split, caption_of, n_captions)
    both = np.where(caption_of == 1, 0, caption_of)  # the phrases of the second caption are those of the first, too
    together = sentence_scores(model_of("cosine"), split, both, n_captions)
    n = [np.count_nonzero(caption_of == k) for k in (0, 1)]
    expected = (n[0] * once[:-1, 0] + n[1] * once[:-1, 1]) / sum(n)
    np.testing.assert_allclose(together[:-1, 0], expected, rtol=1e-5)
