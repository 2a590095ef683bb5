"""R@K, Med r, mean r and rsum from ranks, over the whole split or over folds of 1,000 images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.ranks import Ranks

RECALLS = (1, 5, 10)
FOLD = 1000


def direction_metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """Metrics of one direction from 0-based ranks.

    ``r1``, ``r5``, ``r10`` = 100 x the share of queries whose rank is below K; ``medr`` = floor(median) + 1;
    ``meanr`` = mean + 1.
    """
    if not len(ranks):
        raise ValueError("no queries")
    recalls = {f"r{k}": 100.0 * int(np.count_nonzero(ranks < k)) / len(ranks) for k in RECALLS}
    return {**recalls, "medr": float(np.floor(np.median(ranks)) + 1), "meanr": float(np.mean(ranks)) + 1}


def metrics(ranks: Ranks) -> dict[str, Any]:
    """Both directions, ``rsum`` (the sum of the six recalls) and ``mean_recall`` (a sixth of it)."""
    i2t, t2i = direction_metrics(ranks.i2t), direction_metrics(ranks.t2i)
    rsum = sum(direction[f"r{k}"] for direction in (i2t, t2i) for k in RECALLS)
    return {"i2t": i2t, "t2i": t2i, "rsum": rsum, "mean_recall": rsum / 6}


def averaged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every figure over folds."""
    first = results[0]
    return {
        key: averaged([r[key] for r in results]) if isinstance(value, dict) else float(np.mean([r[key] for r in results]))
        for key, value in first.items()
    }
