"""Sentence-to-sentence retrieval: each caption is a query for the other captions of its image among all captions.

Wang et al., "Learning Two-Branch Neural Networks for Image-Text Matching Tasks", TPAMI 2018, section 5.5, Table 4.
Captions are compared by cosine, whatever similarity the model has for images and captions. Order scores are not symmetric: a
caption is the more general side of a pair with an image, but two captions are on the same side. A model that scores pairs of
an image and a caption has no score for two captions.
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
    """The ranks of captions that query captions.

    Attributes
    ----------
    queries : (n_queries,) rows of the captions whose image has other captions
    ranks : (n_queries,) their 0-based ranks
    answers : their best right and wrong answers, as rows of captions
    """

    queries: NDArray[np.int64]
    ranks: NDArray[np.int64]
    answers: BestAnswers


def sentence_ranks(captions: Float[Tensor, "n_captions dim"], image_of_caption: Int[Tensor, " n_captions"]) -> SentenceRanks:
    """Return the rank of each query: how many captions of other images are at least as near as the nearest right caption.

    Right captions are the others of the same image. The query itself is no candidate, and the only caption of an image is no
    query. Raises UserError if there is no query, or if a row is not finite.

    Parameters
    ----------
    captions : embeddings of any length
    image_of_caption : for each caption the row of its image
    """
    check_finite("captions", captions)
    queries = torch.nonzero(torch.bincount(image_of_caption)[image_of_caption] > 1)[:, 0]
    if not len(queries):
        raise UserError("the protocol sentence needs images with two captions or more: here every image has one")
    # Sort captions by image, so that the right answers to a block of queries are neighbours.
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
        queried = order[rows]
        ranks[queried] = (scores >= best).sum(1) - (own & (near >= best)).sum(1)
        right_scores[queried], right_rows[queried] = best[:, 0], order[first + place[:, 0]]
        wrong = scores.clone()
        wrong[:, first:last].masked_fill_(own, -torch.inf)
        wrong_scores[queried], place = wrong.max(1)
        wrong_rows[queried] = order[place]
    found = (values[queries].numpy() for values in (ranks, right_rows, right_scores, wrong_rows, wrong_scores))
    answers = BestAnswers(queries.numpy(), *found)
    return SentenceRanks(answers.queries, answers.ranks, answers)


def unit_rows(rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Divide each row by its length, in float32; a row of zeros does not change."""
    largest = rows.float().abs().amax(1, keepdim=True)
    # Divide by the largest value first: squares then do not overflow, and the length is at least 1 unless all values are 0.
    scaled = rows.float() / largest.where(largest > 0, 1)
    lengths: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / lengths.clamp_min(1)
