"""Phrase scores for tests: photographs with random candidates, one of which lies near the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vse.eval.files.phrase_scores import PhraseScores, rowwise_iou
from vse.pipeline.dataset.dataset import list_mentions, load_dataset_file

TYPES = ["people", "clothing", "people/other", "scene"]
NAMED = {"dataset": "toy", "split": "test", "experiment": "phrases"}


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
    captions = np.repeat(np.arange(2 * n_images), n_each) + 20
    fields: dict[str, Any] = {"phrase_ids": np.arange(n_phrases) + 50, "image_ids": image + 10, "caption_ids": captions}
    fields |= {"offsets": np.arange(n_phrases + 1) * n_candidates, "scores": scores.ravel().astype(np.float32)}
    fields |= {"boxes": boxes[image].reshape(-1, 4), "truth": truth, "types": types, **NAMED, "seed": seed}
    return PhraseScores(**(fields | changes))


def phrases_of(dataset: Path, skill: float = 2.0, seed: int = 0, n_candidates: int = 20, **changes: Any) -> PhraseScores:
    """Scores of the test phrases of a data set on disk: each image has its truths and random boxes for candidates."""
    whole = load_dataset_file(dataset)
    shown = [mention for mention in list_mentions(whole) if mention.image.split == "test"]
    noise = np.random.default_rng(seed)
    of_image: dict[int, np.ndarray] = {}
    for mention in shown:
        if mention.image.imgid not in of_image:
            rng = np.random.default_rng(mention.image.imgid)
            truths = {m.phrase.truth_box for m in shown if m.image is mention.image and m.phrase.truth_box}
            corners = rng.uniform(0, 120, (n_candidates, 2))
            random = np.concatenate([corners, corners + rng.uniform(20, 90, corners.shape)], 1)
            of_image[mention.image.imgid] = np.array([*sorted(truths), *random], np.float32)[:n_candidates]
    truth = np.array([m.phrase.truth_box or [np.nan] * 4 for m in shown], np.float32)
    boxes = [of_image[m.image.imgid] for m in shown]
    scores = [
        noise.normal(size=len(own)) + skill * np.nan_to_num(rowwise_iou(own, np.tile(at, (len(own), 1))))
        for own, at in zip(boxes, truth, strict=True)
    ]
    ids = np.array([(m.phrase_id, m.image.imgid, m.caption.sentid) for m in shown]).T
    fields: dict[str, Any] = dict(zip(("phrase_ids", "image_ids", "caption_ids"), ids, strict=True)) | NAMED
    fields |= {"dataset": whole.name, "seed": seed, "types": np.array(["/".join(m.phrase.types) for m in shown])}
    fields |= {"offsets": np.cumsum([0, *map(len, boxes)]), "scores": np.concatenate(scores).astype(np.float32)}
    fields |= {"boxes": np.concatenate(boxes), "truth": truth}
    return PhraseScores(**(fields | changes))
