"""Search of the best answers to each query, ranked lists of candidates, and a reader of vectors in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.metrics import BestAnswers, Ints, Ranks, Scores
from vse.eval.ranking.ranks import (
    ScoreBlocks,
    blocks_from_embeddings,
    check_finite,
    iter_caption_scores,
    list_rows_and_captions,
    shared_tensor,
)
from vse.pipeline.errors import UserError


def find_best_answers(i2t_scores: ScoreBlocks, t2i_scores: ScoreBlocks | None, ranks: Ranks) -> dict[str, BestAnswers]:
    """Return the best right and the best wrong answer to each query, in the directions ``i2t`` and ``t2i``.

    Images rank captions by ``i2t_scores``. Captions rank images by ``t2i_scores``, or by ``i2t_scores`` if ``t2i_scores`` is
    None. ``ranks``, the ranks by these scores, are copied into the answers. Each block of scores is computed once.
    """
    image_of_caption = i2t_scores.image_of_caption
    for_images = _BestAnswersSoFar(i2t_scores.n_images, image_of_caption.device)
    for_captions = _BestAnswersSoFar(len(image_of_caption), image_of_caption.device)
    for rows, own in list_rows_and_captions(i2t_scores):
        scores = i2t_scores.score(rows, None)
        right = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        right[image_of_caption[own] - rows.start, own] = True
        for_images.update(rows, scores, right, 0)
        if t2i_scores is not None:
            scores = t2i_scores.score(rows, None)
        for_captions.update(slice(None), scores.T, right.T, rows.start)
    images_with_captions, captions = torch.unique(image_of_caption).numpy(), np.arange(len(image_of_caption))
    return {
        "i2t": for_images.build_answers(images_with_captions, ranks.i2t),
        "t2i": for_captions.build_answers(captions, ranks.t2i),
    }


class _BestAnswersSoFar:
    """The best right and the best wrong answer to each query, among the candidates that were scored so far."""

    def __init__(self, n_queries: int, device: torch.device) -> None:
        self._scores = torch.full((2, n_queries), -torch.inf, dtype=torch.float64, device=device)
        self._rows = torch.zeros((2, n_queries), dtype=torch.int64, device=device)
        self._dtype = np.dtype(np.float32)

    def update(self, queries: slice, scores: Float[Tensor, "n m"], right: Tensor, first: int) -> None:
        """Update the best answers to n queries by their ``scores`` for m further candidates.

        ``queries`` is the slice of these queries. ``right`` (n, m) marks the right answers. The new candidates have
        consecutive rows from ``first`` on.
        """
        self._dtype = np.dtype(str(scores.dtype).removeprefix("torch."))
        for k, others in enumerate((~right, right)):
            best, row = scores.masked_fill(others, -torch.inf).max(1)
            before, rows = self._scores[k, queries], self._rows[k, queries]
            better = best > before
            self._rows[k, queries] = torch.where(better, row + first, rows)
            self._scores[k, queries] = torch.where(better, best.double(), before)

    def build_answers(self, queries: Ints, ranks: Ints) -> BestAnswers:
        scores, rows = self._scores.cpu().numpy()[:, queries].astype(self._dtype), self._rows.cpu().numpy()[:, queries]
        return BestAnswers(queries, ranks, rows[0], scores[0], rows[1], scores[1])


def find_sentence_answers(
    captions: Float[Tensor, "n_captions dim"], image_of_caption: Int[Tensor, " n_captions"]
) -> BestAnswers:
    """Return the ranks and best answers of captions that query all other captions.

    Queries and answers are row indices of ``captions``. The right answers to a caption are the other captions of the same
    image. If an image has one caption, this caption is not a query. ``image_of_caption`` has the row of each caption's image.
    Captions are always compared by the cosine, even if the model compares images with captions by another similarity (Wang et
    al., "Learning Two-Branch Neural Networks for Image-Text Matching Tasks", TPAMI 2018, section 5.5, Table 4). Raises
    UserError if there is no query, or if a row is not finite.
    """
    check_finite("captions", captions)
    queries = torch.nonzero(torch.bincount(image_of_caption)[image_of_caption] > 1)[:, 0]
    if not len(queries):
        raise UserError("the protocol sentence needs images with two captions or more: here every image has one")
    # Sort captions by image, so that the right answers to a block of queries are consecutive rows.
    order = torch.argsort(image_of_caption, stable=True)
    units, images = normalise_rows(captions[order]), image_of_caption[order]
    blocks = blocks_from_embeddings(units, units, torch.arange(len(units)))
    ranks, right_rows, wrong_rows = (torch.empty_like(image_of_caption) for _ in range(3))
    right_scores, wrong_scores = torch.empty(len(units)), torch.empty(len(units))
    for start in range(0, len(image_of_caption), blocks.rows_per_block):
        rows = slice(start, min(start + blocks.rows_per_block, len(image_of_caption)))
        scores = blocks.score(rows, None)
        first = int(torch.searchsorted(images, images[start]))
        last = int(torch.searchsorted(images, images[rows.stop - 1], right=True))
        own = images[rows, None] == images[first:last]
        near = scores[:, first:last]
        right = near.masked_fill(~own, -torch.inf)
        right.diagonal(start - first).fill_(-torch.inf)  # a query is not an answer to itself
        best, place = right.max(1, keepdim=True)
        queried = order[rows]
        ranks[queried] = (scores >= best).sum(1) - (own & (near >= best)).sum(1)
        right_scores[queried], right_rows[queried] = best[:, 0], order[first + place[:, 0]]
        wrong = scores.clone()
        wrong[:, first:last].masked_fill_(own, -torch.inf)
        wrong_scores[queried], place = wrong.max(1)
        wrong_rows[queried] = order[place]
    found = (values[queries].numpy() for values in (ranks, right_rows, right_scores, wrong_rows, wrong_scores))
    return BestAnswers(queries.numpy(), *found)


def normalise_rows(rows: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Return rows divided by their Euclidean lengths, in float32. A row of zeros stays zero."""
    largest = rows.float().abs().amax(1, keepdim=True)
    # Divide by the largest value first: squares then do not overflow, and the length is at least 1 unless all values are 0.
    scaled = rows.float() / largest.where(largest > 0, 1)
    lengths: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / lengths.clamp_min(1)


_MAX_ABSOLUTE_SCORE = 1e38  # larger scores are clipped; the largest float32 is 3.4e38


class RankedList(NamedTuple):
    """The best candidates for a query, best first: their ``rows`` (n,) and ``scores`` (n,). ``query`` is the query's row."""

    query: int
    rows: Ints
    scores: Scores


def rank_captions(blocks: ScoreBlocks, depth: int) -> Iterator[RankedList]:
    """Yield the best captions for each image that has captions, image by image.

    At most ``depth`` captions are listed; 0 lists all. If scores are equal, wrong captions come before right captions, and
    lower rows before higher rows.
    """
    for rows, own in list_rows_and_captions(blocks):
        image_of_own = blocks.image_of_caption[own]
        scores = blocks.score(rows, None).cpu().numpy()
        for image in torch.unique(image_of_own).tolist():
            yield _build_ranked_list(image, scores[image - rows.start], own[image_of_own == image].cpu().numpy(), depth)


def rank_images(blocks: ScoreBlocks, depth: int) -> Iterator[RankedList]:
    """Yield the best images for each caption, caption by caption.

    At most ``depth`` images are listed; 0 lists all. If scores are equal, wrong images come before the right image, and lower
    rows before higher rows.
    """
    image_of_caption = blocks.image_of_caption.cpu().numpy()
    for captions, scores in iter_caption_scores(blocks, np.arange(len(image_of_caption))):
        for caption, column in zip(captions, np.ascontiguousarray(scores.T), strict=True):
            yield _build_ranked_list(int(caption), column, image_of_caption[caption, None], depth)


def break_ties(scores: Scores) -> NDArray[np.float32]:
    """Return descending scores in float32 without ties, so that a program that sorts by score keeps the order.

    A score that is not below the score before it is lowered to the largest float32 below that score.
    """
    bits = np.clip(scores, -_MAX_ABSOLUTE_SCORE, _MAX_ABSOLUTE_SCORE).astype(np.float32).view(np.int32).astype(np.int64)
    # Map all float32 numbers, in ascending order, to consecutive integers; both zeros become 0.
    places = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    steps = np.arange(len(places))
    places = np.minimum.accumulate(places + steps) - steps
    sizes = np.abs(places).astype(np.int32).view(np.float32)
    strict: NDArray[np.float32] = np.where(places < 0, -sizes, sizes)
    return strict


def _build_ranked_list(query: int, scores: Scores, right: Ints, depth: int) -> RankedList:
    """Return the ``depth`` best candidates for a query, best first; 0 lists all.

    ``scores`` (n_candidates,) are the scores of all candidates. ``right`` has the rows of the right answers; if scores are
    equal, wrong answers come first.
    """
    n = len(scores)
    rows = np.arange(n)
    if 0 < depth < n:
        rows = np.flatnonzero(scores >= np.partition(scores, n - depth)[n - depth])
    is_right = np.zeros(n, bool)
    is_right[right] = True
    rows = rows[np.lexsort((rows, is_right[rows], -scores[rows]))][: depth or n]
    return RankedList(query, rows, scores[rows])


N_ROWS_PER_BLOCK = 65_536  # rows that are read at once: 256 MB for 1,024 dimensions

Vectors = NDArray[np.float32]


class Corpus(Protocol):
    """Vectors (n, dim) that are read a block at a time: an array, a memory map or a data set of an HDF5 file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


def read_blocks(corpus: Corpus, block: int, checked: bool = True) -> Iterator[tuple[int, Vectors]]:
    """Yield the index of the first row of each block of vectors, and the block itself, (``block``, dim) in float32.

    The last block may have fewer rows. With ``checked``, raises UserError if a row is not finite.
    """
    if block < 1:
        raise ValueError(f"blocks of {block} rows")
    for start in range(0, len(corpus), block):
        rows = np.ascontiguousarray(corpus[start : start + block], np.float32)
        if checked:
            check_finite("corpus", shared_tensor(rows), start)
        yield start, rows
