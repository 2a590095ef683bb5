"""The loss of a batch, from the embeddings of its pairs: which scores are compared, and what counts as wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.train.losses import LOSSES, PAIR_LOSSES, negative_pairs
from vse.train.losses.neighbourhood import neighbourhood
from vse.train.models.build import TwoBranchModel

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Pairs of a batch: embeddings (n, dim) of each one's image and caption, and the numbers (n,) of its image and text."""

    images: Float[Tensor, "n dim"]
    captions: Float[Tensor, "n dim"]
    image_of: Numbers
    text_of: Numbers


class Cost(NamedTuple):
    """The loss of a batch, what it would be if all embeddings were alike, and the scores (n, n) that were compared, if any."""

    loss: Float[Tensor, ""]
    collapsed_loss: Float[Tensor, ""]
    scores: Float[Tensor, "n n"] | None = None
    negatives: Bool[Tensor, "n n"] | None = None


class Objective:
    """A ranking loss of all scores of a batch with its neighbourhood constraints, or a loss of single pairs.

    Parameters
    ----------
    name : of the loss, which an experiment may change in its first epochs
    settings : the experiment's group ``loss``
    model : whose similarity compares the embeddings
    compiled : compile the ranking loss (torch.compile)
    """

    def __init__(self, name: str, settings: LossConfig, model: TwoBranchModel, compiled: bool = False) -> None:
        self._settings, self._model = settings, model
        self._of_pairs = PAIR_LOSSES.get(name)
        self._ranking = LOSSES.get(name)
        if compiled and self._ranking is not None:
            self._ranking = torch.compile(self._ranking)

    def __call__(self, batch: Batch, seed: int) -> Cost:
        """The cost of a batch; ``seed`` is that of the wrong pairs, where they are drawn."""
        return self._ranked(batch) if self._of_pairs is None else self._classified(batch, seed)

    def _ranked(self, batch: Batch) -> Cost:
        assert self._ranking is not None
        settings = self._settings
        image_of, text_of = (torch.from_numpy(ids).to(batch.images.device) for ids in (batch.image_of, batch.text_of))
        negatives = negative_pairs(image_of, settings.same_image == "mask")
        scores = self._model.similarity(batch.images, batch.captions)
        loss = self._ranking(scores, negatives, settings)
        with torch.no_grad():
            alike = self._ranking(torch.zeros_like(scores), negatives, settings)
        for weight, side, own, others in (
            (settings.lambda3, batch.images, image_of, text_of),
            (settings.lambda4, batch.captions, torch.arange(len(image_of), device=image_of.device), image_of),
        ):
            if weight:
                first, neighbours, outside = related(own, others)
                within = self._model.similarity(side[first], side[first])
                loss = loss + weight * neighbourhood(within, neighbours, outside, settings)
                with torch.no_grad():
                    alike = alike + weight * neighbourhood(torch.zeros_like(within), neighbours, outside, settings)
        return Cost(loss, alike, scores, negatives)

    def _classified(self, batch: Batch, seed: int) -> Cost:
        assert self._of_pairs is not None
        rows, columns = balanced_pairs(batch.image_of, np.random.default_rng(seed))
        labels = torch.ones(len(rows), device=batch.images.device)
        labels[len(rows) // 2 :] = -1
        where = (torch.from_numpy(numbers).to(batch.images.device) for numbers in (rows, columns))
        scores = self._model.score_pairs(batch.images, batch.captions, *where)
        with torch.no_grad():
            alike = self._of_pairs(torch.zeros_like(scores), labels)
        return Cost(self._of_pairs(scores, labels), alike)


def related(
    own: Int[Tensor, " n"], others: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " m"], Bool[Tensor, "m m"], Bool[Tensor, "m m"]]:
    """Which items of one side belong together, since they share an item of the other side in some pair of the batch.

    ``own`` and ``others`` number the items of each pair on both sides. Returns the first pair of each different item, which of
    these are neighbours of which (none of itself), and which are not related at all.
    """
    items, item_of = torch.unique(own, return_inverse=True)
    partners, partner_of = torch.unique(others, return_inverse=True)
    places = torch.arange(len(own), device=own.device)
    first = places.new_full((len(items),), len(own)).scatter_reduce(0, item_of, places, "amin")
    has = torch.zeros(len(items), len(partners), device=own.device)
    has[item_of, partner_of] = 1
    share = (has @ has.T) > 0
    itself = torch.eye(len(items), dtype=torch.bool, device=own.device)
    return first, share & ~itself, ~share


def balanced_pairs(image_of: Numbers, rng: np.random.Generator) -> tuple[Numbers, Numbers]:
    """The right pairs of a batch, then for each its image with a random caption of another image: (2n,) rows and columns.

    Every caption of another image is as likely. If all are of one image, there are no pairs.
    """
    order = np.argsort(image_of, kind="stable")
    _, number, counts = np.unique(image_of, return_inverse=True, return_counts=True)
    firsts = (np.cumsum(counts) - counts)[number]
    n_wrong = len(image_of) - counts[number]
    rows = np.flatnonzero(n_wrong)
    drawn = rng.integers(0, np.maximum(1, n_wrong))[rows]
    wrong = order[drawn + counts[number][rows] * (drawn >= firsts[rows])]
    return np.concatenate([rows, rows]), np.concatenate([rows, wrong])
