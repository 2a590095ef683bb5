"""The slow, obvious way: every pair, one after the other, in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np


def slow_order_scores(images: np.ndarray, captions: np.ndarray) -> np.ndarray:
    """Minus the sum of the squares by which each caption exceeds each image."""
    scores = np.zeros((len(images), len(captions)))
    for i, image in enumerate(images.astype(np.float64)):
        for c, caption in enumerate(captions.astype(np.float64)):
            scores[i, c] = -sum(max(0.0, x - v) ** 2 for x, v in zip(caption, image, strict=True))
    return scores


def slow_ranks(scores: np.ndarray, image_of_caption: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ranks by looking at every pair, equal scores against the model."""
    n_images, n_captions = scores.shape
    i2t = []
    for i in range(n_images):
        best = max(scores[i, c] for c in range(n_captions) if image_of_caption[c] == i)
        i2t.append(sum(1 for c in range(n_captions) if image_of_caption[c] != i and scores[i, c] >= best))
    t2i = [
        sum(1 for i in range(n_images) if i != image_of_caption[c] and scores[i, c] >= scores[image_of_caption[c], c])
        for c in range(n_captions)
    ]
    return i2t, t2i


def slow_list_metrics(scores: np.ndarray, right: set[int]) -> dict[str, float]:
    """nDCG@10, MRR and mAP of a query: all candidates in order, wrong ones first among equals, one after the other."""
    order = sorted(range(len(scores)), key=lambda candidate: (-scores[candidate], candidate in right))
    found, reciprocal, precisions, gain = 0, 0.0, 0.0, 0.0
    for place, candidate in enumerate(order, 1):
        if candidate in right:
            found += 1
            reciprocal = reciprocal or 1 / place
            precisions += found / place
            gain += 1 / log2(1 + place) if place <= 10 else 0
    best = sum(1 / log2(1 + place) for place in range(1, 11) if place <= len(right))
    return {"ndcg10": 100 * gain / best, "mrr": 100 * reciprocal, "map": 100 * precisions / len(right)}


def slow_metrics_of_lists(i2t: np.ndarray, t2i: np.ndarray, image_of_caption: Sequence[int]) -> dict[str, dict[str, float]]:
    """Their means in both directions, of scores (n_images, n_captions) for each."""
    of = list(image_of_caption)
    lists = {
        "i2t": [slow_list_metrics(i2t[i], {c for c, own in enumerate(of) if own == i}) for i in sorted(set(of))],
        "t2i": [slow_list_metrics(t2i[:, c], {own}) for c, own in enumerate(of)],
    }
    return {
        direction: {name: float(np.mean([one[name] for one in of_queries])) for name in of_queries[0]}
        for direction, of_queries in lists.items()
    }


def slow_cosines(captions: np.ndarray) -> np.ndarray:
    """The cosine of every two captions, 0 with one of zeros."""
    rows = [[float(x) for x in caption] for caption in captions]
    lengths = [sum(x * x for x in row) ** 0.5 or 1.0 for row in rows]
    scores = np.zeros((len(rows), len(rows)))
    for q, query in enumerate(rows):
        for c, caption in enumerate(rows):
            products = (x / lengths[q] * (y / lengths[c]) for x, y in zip(query, caption, strict=True))
            scores[q, c] = sum(products)
    return scores


def slow_sentence_ranks(scores: np.ndarray, image_of_caption: Sequence[int]) -> dict[int, int]:
    """The rank of each caption that is not the only one of its image, equal scores against the model."""
    ranks = {}
    for q, image in enumerate(image_of_caption):
        right = [scores[q, c] for c, other in enumerate(image_of_caption) if other == image and c != q]
        wrong = [scores[q, c] for c, other in enumerate(image_of_caption) if other != image]
        if right:
            ranks[q] = sum(1 for score in wrong if score >= max(right))
    return ranks
