"""What a model that knows nothing reaches: the metrics of a random order of candidates."""

from __future__ import annotations

from vse.eval.defaults import RECALLS


def first_within(k: int, n_candidates: int, n_right: int = 1) -> float:
    """How probable it is that, in a random order, the first of ``n_right`` right answers is among the first ``k``."""
    missed = 1.0
    for drawn in range(n_right):
        missed *= max(0, n_candidates - k - drawn) / max(1, n_candidates - drawn)
    return 1.0 - missed


def captions_each(n_images: int, n_captions: int) -> int:
    """How many captions an image has, in whole numbers."""
    return max(1, round(n_captions / max(1, n_images)))


def chance_recall(direction: str, k: int, n_images: int, n_captions: int) -> float:
    """R@``k`` in percent of the direction ``i2t`` or ``t2i`` in a random order."""
    if direction == "t2i":
        return 100.0 * first_within(k, n_images)
    return 100.0 * first_within(k, n_captions, captions_each(n_images, n_captions))


def chance_rsum(n_images: int, n_captions: int) -> float:
    """The sum of R@1, 5 and 10 in both directions in a random order."""
    return sum(chance_recall(direction, k, n_images, n_captions) for direction in ("i2t", "t2i") for k in RECALLS)
