"""A result of a search, as people read it, and what the model looked at in it.

Top-K search over embeddings with FAISS.
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
    queries = check_queries(corpus, queries)
    if similarity == "cosine":
        return exact_search(corpus, queries, k, block=block) if index is None else search_index(index, queries, k)
    check_direction(similarity, direction)
    near = search(corpus, queries, max(k, candidates), index=index, block=block).rows
    return merge_top_k(k, TopK(exact_scores(corpus, queries, near, similarity, direction), near))


@dataclass(frozen=True)
class Attention:
    """How much the words of a caption attend to the regions of a photo, or these to the words.

    Attributes
    ----------
    side : which attends to the other: with ``t2i`` each word divides its attention among the regions, so that a column of
        ``weights`` adds up to 1; with ``i2t`` each region does among the words, so that a row does
    words : what the model reads of the caption; in angle brackets what is no word of it
    size : width and height of the photo
    boxes : x1, y1, x2, y2 of the regions in its pixels
    score : of the pair, by the model that attends
    """

    side: Literal["t2i", "i2t"]
    words: tuple[str, ...]
    size: tuple[int, int]
    boxes: Float[np.ndarray, "n_regions 4"]
    weights: Float[np.ndarray, "n_regions n_words"]
    score: float


@dataclass(frozen=True, eq=False)
class PhraseHit:
    """The candidate boxes of a photo for a phrase, the best first.

    Attributes
    ----------
    text : the phrase
    boxes : x1, y1, x2, y2 in pixels of the photo, x2 and y2 exclusive
    scores : of the boxes, falling
    """

    text: str
    boxes: Float[np.ndarray, "n_boxes 4"]
    scores: Float[np.ndarray, " n_boxes"]

    def best(self, k: int) -> PhraseHit:
        """Its ``k`` best boxes."""
        return PhraseHit(self.text, self.boxes[:k], self.scores[:k])


@dataclass(frozen=True)
class SearchHit:
    """An image, or a caption of one, that a search returned, with its score.

    ``photo`` is None and ``captions`` is empty if ``dataset.json`` does not know the image. Otherwise ``captions`` is the one
    of the id ``caption_id`` or, if images were searched, all of the image. ``attention`` is that of the query and this hit,
    if the model attends.
    """

    score: float
    image_id: int
    photo: Path | None
    captions: tuple[str, ...]
    caption_id: int | None = None
    attention: Attention | None = None

    @property
    def caption(self) -> str | None:
        """The caption that was returned, or its id if that is all there is; None if images were searched."""
        return None if self.caption_id is None else self.captions[0] if self.captions else str(self.caption_id)
