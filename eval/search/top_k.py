"""Top-K search over embeddings with FAISS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.ranking.scores import similarity_by_name
from vse.eval.search.exact import (
    BLOCK,
    Corpus,
    TopK,
    check_direction,
    checked_queries,
    exact_scores,
    exact_search,
    merged,
)
from vse.eval.search.index import search_index

CANDIDATES = 200  # of a query, to be scored exactly


def search(
    corpus: Corpus,
    queries: NDArray[np.float32],
    k: int,
    similarity: str = "cosine",
    *,
    direction: str | None = None,
    candidates: int = CANDIDATES,
    index: Any = None,
    block: int = BLOCK,
) -> TopK:
    """The ``k`` rows of ``corpus`` (n, dim) most similar to each query (m, dim), best first: scores and rows (m, k).

    For ``cosine`` that is exact. Of any other similarity FAISS knows nothing: it finds the ``candidates`` rows with the
    highest inner product (``k`` of them at least), and these are put in order by their exact scores. What is not among
    them is missed, however similar; with as many candidates as rows nothing is.

    ``direction`` says which side queries, since ``order`` is not symmetric: with ``i2t`` the queries are images and the corpus
    captions, with ``t2i`` the queries are captions and the corpus images. With an ``index`` of the corpus's rows (see
    :func:`vse.eval.search.index.build_index`) it is this that finds, with its own scores for ``cosine``; where it finds fewer
    than ``k``, scores end in -inf and rows in -1. Without one ``block`` rows are read at a time.
    """
    similarity_by_name(similarity)
    queries = checked_queries(corpus, queries)
    if similarity == "cosine":
        return exact_search(corpus, queries, k, block=block) if index is None else search_index(index, queries, k)
    check_direction(similarity, direction)
    near = search(corpus, queries, max(k, candidates), index=index, block=block).rows
    return merged(k, TopK(exact_scores(corpus, queries, near, similarity, direction), near))
