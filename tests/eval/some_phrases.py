"""Phrase scores for tests: photographs with random candidates, one of which lies near the truth."""

from __future__ import annotations

from typing import Any

import numpy as np

from vse.eval.files.phrase_scores import PhraseScores

TYPES = ["people", "clothing", "people/other", "scene"]


def some_phrases(
    n_images: int = 6, n_each: int = 4, n_candidates: int = 9, skill: float = 1.0, seed: int = 0, **changes: Any
) -> PhraseScores:
    """``n_each`` phrases for each of two captions of every image, the last without a box; ``skill`` raises right scores."""
    data = np.random.default_rng(7)  # of the data set, so that models of other seeds share it
    noise = np.random.default_rng(100 + seed)
    n_phrases = n_images * 2 * n_each
    corners = data.integers(0, 50, (n_images, n_candidates, 2))
    boxes = np.concatenate([corners, corners + data.integers(10, 40, corners.shape)], 2).astype(np.float32)
    image = np.repeat(np.arange(n_images), 2 * n_each)
    right = data.integers(0, n_candidates, n_phrases)
    truth = boxes[image, right] + data.integers(-2, 3, (n_phrases, 4)).astype(np.float32)
    types = np.array(TYPES)[np.arange(n_phrases) % len(TYPES)]
    truth[types == "scene"] = np.nan
    scores = noise.normal(size=(n_phrases, n_candidates))
    scores[np.arange(n_phrases), right] += skill
    fields: dict[str, Any] = {
        "phrase_ids": np.arange(n_phrases) + 50,
        "image_ids": image + 10,
        "caption_ids": np.repeat(np.arange(2 * n_images), n_each) + 20,
        "offsets": np.arange(n_phrases + 1) * n_candidates,
        "scores": scores.ravel().astype(np.float32),
        "boxes": boxes[image].reshape(-1, 4),
        "truth": truth,
        "types": types,
        "dataset": "toy",
        "split": "test",
        "experiment": "phrases",
        "seed": seed,
    }
    return PhraseScores(**(fields | changes))
