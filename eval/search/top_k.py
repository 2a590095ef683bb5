"""Top-K search of embeddings with FAISS, and the search results that people read.

:func:`search` returns rows and scores. :class:`SearchHit`, :class:`PhraseHit` and :class:`Attention` describe results with
their photos, captions and boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from vse.eval.ranking.scores import similarity_by_name
from vse.eval.search.exact import (
    BLOCK,
    Corpus,
    TopK,
    check_direction,
    check_queries,
    exact_scores,
    exact_search,
    merge_top_k,
)
from vse.eval.search.index import search_index

CANDIDATES = 200  # candidates of a query that are scored exactly


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
    """Return the ``k`` rows of ``corpus`` (n, dim) that are most similar to each query (m, dim): scores and rows (m, k).

    For ``cosine`` the search is exact. FAISS does not have other similarities: it finds the ``candidates`` rows with the
    highest inner products (at least ``k``), and these are sorted by their exact scores. A row that is not a candidate is
    missed. With as many candidates as rows no row is missed.

    ``direction`` states which side queries, because ``order`` is not symmetric: with ``i2t`` the queries are images and the
    corpus has captions, with ``t2i`` the queries are captions and the corpus has images. If ``index`` is an index of the
    corpus (see :func:`vse.eval.search.index.build_index`), it is searched instead, and for ``cosine`` its scores are returned;
    if it finds fewer than ``k`` rows, scores end in -inf and rows in -1. Without an index ``block`` rows are read at a time.
    """
    similarity_by_name(similarity)
    queries = check_queries(corpus, queries)
    if similarity == "cosine":
        return exact_search(corpus, queries, k, block=block) if index is None else search_index(index, queries, k)
    check_direction(similarity, direction)
    near = search(corpus, queries, max(k, candidates), index=index, block=block).rows
    return merge_top_k(k, TopK(exact_scores(corpus, queries, near, similarity, direction), near))


@dataclass(frozen=True)
class Attention:
    """The attention between the words of a caption and the regions of a photo.

    Attributes
    ----------
    side : side that attends to the other. With ``t2i`` each word divides its attention among the regions, and each column of
        ``weights`` adds up to 1; with ``i2t`` each region divides it among the words, and each row adds up to 1
    words : tokens that the model reads; tokens that are not words of the caption are in angle brackets
    size : width and height of the photo
    boxes : x1, y1, x2, y2 of the regions in pixels of the photo
    score : score of the pair by the model that attends
    """

    side: Literal["t2i", "i2t"]
    words: tuple[str, ...]
    size: tuple[int, int]
    boxes: Float[np.ndarray, "n_regions 4"]
    weights: Float[np.ndarray, "n_regions n_words"]
    score: float


@dataclass(frozen=True, eq=False)
class PhraseHit:
    """The candidate boxes of a photo for a phrase, best first.

    Attributes
    ----------
    text : the phrase
    boxes : x1, y1, x2, y2 in pixels of the photo, x2 and y2 exclusive
    scores : scores of the boxes, descending
    """

    text: str
    boxes: Float[np.ndarray, "n_boxes 4"]
    scores: Float[np.ndarray, " n_boxes"]

    def best(self, k: int) -> PhraseHit:
        """Return the ``k`` best boxes."""
        return PhraseHit(self.text, self.boxes[:k], self.scores[:k])


@dataclass(frozen=True)
class SearchHit:
    """An image or a caption that a search returned, with its score.

    If ``dataset.json`` does not have the image, ``photo`` is None and ``captions`` is empty. Otherwise ``captions`` has the
    caption with the id ``caption_id`` or, if images were searched, all captions of the image. ``attention`` is that between
    the query and this hit, if the model attends.
    """

    score: float
    image_id: int
    photo: Path | None
    captions: tuple[str, ...]
    caption_id: int | None = None
    attention: Attention | None = None

    @property
    def caption(self) -> str | None:
        """The text of the returned caption, or its id if the text is unknown; None if images were searched."""
        return None if self.caption_id is None else self.captions[0] if self.captions else str(self.caption_id)
