"""The metrics of a random order."""

from __future__ import annotations

from vse.eval.defaults import DEFAULT_KS


def compute_chance_within(k: int, n_candidates: int, n_right: int = 1) -> float:
    """Return the probability that, in a random order, one of ``n_right`` right answers is among the first ``k`` candidates."""
    missed = 1.0
    for n in range(n_right):
        missed *= max(0, n_candidates - k - n) / max(1, n_candidates - n)
    return 1.0 - missed


def captions_per_image(n_images: int, n_captions: int) -> int:
    """Return the mean number of captions of an image, rounded, at least 1."""
    return max(1, round(n_captions / max(1, n_images)))


def chance_recall(direction: str, k: int, n_images: int, n_captions: int) -> float:
    """Return R@``k`` of a random order in percent, in the direction ``i2t`` or ``t2i``."""
    if direction == "t2i":
        return 100.0 * compute_chance_within(k, n_images)
    return 100.0 * compute_chance_within(k, n_captions, captions_per_image(n_images, n_captions))


def chance_rsum(n_images: int, n_captions: int) -> float:
    """Return rsum of a random order: the sum of R@1, R@5 and R@10 in both directions."""
    return sum(chance_recall(direction, k, n_images, n_captions) for direction in ("i2t", "t2i") for k in DEFAULT_KS)
