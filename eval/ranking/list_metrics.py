"""nDCG@10, MRR and mAP: metrics of the positions of all right answers to a query, as trec_eval defines them.

Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 2002 (nDCG, here of gains 0 and 1);
Manning, Raghavan and Schütze, "Introduction to Information Retrieval", 2008, chapter 8 (mAP).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEPTH = 10  # of nDCG
LIST_METRICS = ("ndcg10", "mrr", "map")
_DISCOUNTS = 1 / np.log2(np.arange(DEPTH) + 2)
_BEST = np.cumsum(_DISCOUNTS)  # discounted gain of 1, 2, ... right answers that come first


def list_metrics(query_of: NDArray[np.int64], wrong_before: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """The metrics of each query (n_queries,), in percent, from all its right answers.

    MRR has 1 / (1 + p) for the first right position p, which starts at 0; AP is the mean, over all right answers, of the share
    of right ones up to each; nDCG@10 is the sum of 1 / log2(2 + p) over right positions below 10, as a share of the most
    that so many right answers can have.

    Parameters
    ----------
    query_of : (n_right,) for each right answer the number of its query, from 0; every query has one
    wrong_before : (n_right,) how many wrong candidates come before it
    """
    order = np.lexsort((wrong_before, query_of))
    of, wrong = query_of[order], wrong_before[order]
    n_right = np.bincount(of)
    first = np.cumsum(n_right) - n_right
    right_before = np.arange(len(of)) - first[of]
    positions = wrong + right_before
    precision = (1 + right_before) / (1 + positions)
    gains = np.where(positions < DEPTH, _DISCOUNTS[np.minimum(positions, DEPTH - 1)], 0)
    values = {
        "ndcg10": np.bincount(of, gains) / _BEST[np.minimum(n_right, DEPTH) - 1],
        "mrr": 1 / (1 + positions[first]),
        "map": np.bincount(of, precision) / n_right,
    }
    return {name: 100 * of_query for name, of_query in values.items()}
