"""Sentence-to-sentence retrieval: a caption queries all other captions, right are those of its image.

Wang et al., "Learning Two-Branch Neural Networks for Image-Text Matching Tasks", TPAMI 2018, section 5.5, Table 4.
Captions are compared by cosine, whatever the model compares images and captions by: order scores are not symmetric, a
caption being the more general side of a pair, and of two captions neither is; a model of pairs has no score for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.answers import BestAnswers
from vse.eval.ranking.ranks import blocks_from_embeddings, check_finite
from vse.pipeline.errors import UserError


class SentenceRanks(NamedTuple):
    """``queries`` (n_queries,): the rows of the captions whose image has others; ``ranks`` (n_queries,): 0-based.

    ``answers`` are the best right and wrong ones, in rows of captions.
    """

    queries: NDArray[np.int64]
    ranks: NDArray[np.int64]
    answers: BestAnswers


def sentence_ranks(captions: Float[Tensor, "n_captions dim"], image_of_caption: Int[Tensor, " n_captions"]) -> SentenceRanks:
    """How many captions of other images are at least as near to each query as the nearest other one of its own image.

    The query itself is no candidate, and a caption that is the only one of its image no query. :class:`UserError` if
    all are, or if a row is not finite.

    Parameters
    ----------
    captions : embeddings of any length
    image_of_caption : for each caption the row of its image
    """
    check_finite("captions", captions)
    queries = torch.nonzero(torch.bincount(image_of_caption)[image_of_caption] > 1)[:, 0]
    if not len(queries):
        raise UserError("the protocol sentence needs images with two captions or more: here every image has one")
    # Image after image: the right answers to a block of queries are then neighbours.
    order = torch.argsort(image_of_caption, stable=True)
    units, images = unit_rows(captions[order]), image_of_caption[order]
    blocks = blocks_from_embeddings(units, units, torch.arange(len(units)))
    ranks, right_rows, wrong_rows = (torch.empty_like(image_of_caption) for _ in range(3))
    right_scores, wrong_scores = torch.empty(len(units)), torch.empty(len(units))
    for start in range(0, len(image_of_caption), blocks.rows):
        rows = slice(start, min(start + blocks.rows, len(image_of_caption)))
        scores = blocks.score(rows, None)
        first = int(torch.searchsorted(images, images[start]))
        last = int(torch.searchsorted(images, images[rows.stop - 1], right=True))
        own = images[rows, None] == images[first:last]
        near = scores[:, first:last]
        right = near.masked_fill(~own, -torch.inf)
        right.diagonal(start - first).fill_(-torch.inf)  # the queries themselves
        best, place = right.max(1, keepdim=True)
        asked = order[rows]
        ranks[asked] = (scores >= best).sum(1) - (own & (near >= best)).sum(1)
        right_scores[asked], right_rows[asked] = best[:, 0], order[first + place[:, 0]]
        wrong = scores.clone()
        wrong[:, first:last].masked_fill_(own, -torch.inf)
        wrong_scores[asked], place = wrong.max(1)
        wrong_rows[asked] = order[place]
    found = (values[queries].numpy() for values in (ranks, right_rows, right_scores, wrong_rows, wrong_scores))
    answers = BestAnswers(queries.numpy(), *found)
    return SentenceRanks(answers.queries, answers.ranks, answers)


def unit_rows(rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Each row divided by its length, in float32; a row of zeros stays as it is."""
    largest = rows.float().abs().amax(1, keepdim=True)
    # With its largest value 1, no square of a row overflows, and its length is 1 at least, unless it is of zeros.
    scaled = rows.float() / largest.where(largest > 0, 1)
    lengths: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / lengths.clamp_min(1)
