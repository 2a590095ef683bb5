"""The ranking losses of one query at a time, from their equations, and a similarity that looks its scores up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vse.training.kinds import BatchVectors
from vse.training.losses import LOSSES
from vse.training.losses.ranking import RankingLoss
from vse.training.models.similarities.base import Scores, Similarity

RANKING = [name for name in LOSSES if LOSSES[name].is_ranking]


def ranking_loss(name: str, **settings: Any) -> RankingLoss:
    """A ranking loss; settings that it does not have are left out."""
    kind = LOSSES[name]
    loss = kind(**{key: value for key, value in settings.items() if key in kind.model_fields})
    assert isinstance(loss, RankingLoss)
    return loss


def _hinges(loss: RankingLoss, positive: Tensor, negatives: list[Tensor]) -> list[Tensor]:
    return [torch.relu(loss.margin - positive + negative) for negative in negatives]


def _max(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """Eq. 6 of the VSE++ paper."""
    candidates = [*negatives, -positive] if loss.mirrored_positive else negatives
    return max(_hinges(loss, positive, candidates), key=Tensor.item, default=0 * positive)


def _sum(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """Eq. 5 of the VSE++ paper."""
    return sum(_hinges(loss, positive, negatives), start=0 * positive)


def _top(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """Eq. 3 of the two-branch paper."""
    return sum(sorted(_hinges(loss, positive, negatives), key=Tensor.item, reverse=True)[: loss.k], start=0 * positive)


def _spectrum(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """Each hinge h weighs exp((h - the query's largest) / temperature), a plain number."""
    hinges = _hinges(loss, positive, negatives)
    hardest = max((hinge.item() for hinge in hinges), default=0.0)
    weighted = (math.exp((hinge.item() - hardest) / loss.temperature) * hinge for hinge in hinges)
    return sum(weighted, start=0 * positive)


def _infonce(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """How unlikely the positive is among all candidates of the query."""
    likely = [torch.exp(score / loss.temperature) for score in (positive, *negatives)]
    return -torch.log(likely[0] / sum(likely, start=0 * positive))


def _gce(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """(1 - p^q) / q with the probability p of the positive among all candidates of the query."""
    likely = [torch.exp(score / loss.temperature) for score in (positive, *negatives)]
    return (1 - (likely[0] / sum(likely, start=0 * positive)) ** loss.q) / loss.q


def _sigmoid(loss: Any, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """Eq. 1 of the SigLIP paper, of the pairs that a query is in."""
    labelled = [(positive, 1), *((negative, -1) for negative in negatives)]
    costs = [torch.log(1 + torch.exp(-z * (score / loss.temperature + loss.bias))) for score, z in labelled]
    return sum(costs, start=0 * positive)


_SLOW: dict[str, Callable[[Any, Tensor, list[Tensor]], Tensor]] = {
    "max": _max, "sum": _sum, "top": _top, "spectrum": _spectrum, "infonce": _infonce, "sigmoid": _sigmoid,
    "gce": _gce,
}  # fmt: skip


def slow_query(loss: RankingLoss, positive: Tensor, negatives: list[Tensor]) -> Tensor:
    """The cost of one query, from the score of its positive and those of its negatives."""
    return _SLOW[loss.name](loss, positive, negatives)


class Table(Similarity):
    """Scores that are looked up, of images and captions that are their own numbers (n, 1); for both directions or for each."""

    def __init__(self, *tables: Tensor) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Scores:
        i2t, *t2i = (table[images[0][:, 0]][:, captions[0][:, 0]] for table in self.tables)
        return (i2t, t2i[0]) if t2i else i2t


def numbered(start: int, end: int) -> BatchVectors:
    """Images or captions for a :class:`Table`."""
    return (torch.arange(start, end)[:, None],)
