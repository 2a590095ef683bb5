"""The ranks and the best answers of queries, as arrays. This module does not import torch, so that tables start quickly."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]  # rows, ids, ranks or counts
Scores = NDArray[np.floating]


@dataclass(frozen=True)
class Ranks:
    """0-based ranks of both directions.

    Attributes
    ----------
    i2t : (n_queries,) rank of the best own caption of each image that has captions. An image without captions is no query,
        but it is a candidate for captions.
    t2i : (n_captions,) rank of each caption's image
    by_caption : (n_captions,) rank of each caption as the answer to its image, counted among the captions of other images;
        None if not requested. The lowest rank among the captions of an image is the image's rank in ``i2t``.
    """

    i2t: Ints
    t2i: Ints
    by_caption: Ints | None = None

    @property
    def by_direction(self) -> dict[str, Ints]:
        return {"i2t": self.i2t, "t2i": self.t2i}


@dataclass(frozen=True)
class BestAnswers:
    """The best right and the best wrong answer to each query of one direction.

    ``queries``, ``right_answers`` and ``wrong_answers`` are row indices in the split; :meth:`with_ids` replaces them by ids.

    Attributes
    ----------
    queries : (n,) the queries
    ranks : (n,) 0-based: the number of wrong answers that score at least as high as the best right one
    right_answers, right_scores : (n,) the best right answer and its score; the first one if several tie
    wrong_answers, wrong_scores : (n,) the best wrong answer and its score; the score is -inf if the query has no wrong answer
    """

    queries: Ints
    ranks: Ints
    right_answers: Ints
    right_scores: Scores
    wrong_answers: Ints
    wrong_scores: Scores

    def with_ids(self, query_ids: Ints, answer_ids: Ints) -> BestAnswers:
        """Return the answers with ids in place of rows. The meaningless row of a missing wrong answer is not replaced."""
        wrong = np.where(np.isneginf(self.wrong_scores), self.wrong_answers, answer_ids[self.wrong_answers])
        return replace(
            self, queries=query_ids[self.queries], right_answers=answer_ids[self.right_answers], wrong_answers=wrong
        )
