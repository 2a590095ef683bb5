"""What all losses share: their settings, the batch that they see, and the cost that they give.

The hinge costs that the ranking losses sum up or take the highest of.

The temperature, and the bias, that a loss learns together with the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from vse.pipeline.presets.schema import Settings
from vse.train.kinds import Encoded
from vse.train.models.similarities.base import Similarity, SimilaritySettings


def hinge_costs(
    scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"], margin: float
) -> Float[Tensor, "n m"]:
    """The cost [margin - s(q, positive) + s(q, c)]+ of every query q (row) and negative c (column), 0 elsewhere."""
    return (margin + scores - scores.gather(1, positives[:, None])).clamp(min=0) * negatives


def highest(costs: Float[Tensor, "n m"], settings: Loss) -> Float[Tensor, ""]:
    """The ``k`` highest costs of each row: their sum, or with the reduction ``mean_topk`` their mean over all rows."""
    top = costs if settings.k is None else costs.topk(min(settings.k, costs.shape[1]), sorted=False).values
    return top.mean() if settings.reduction == "mean_topk" else top.sum()


class LearnedScale(nn.Module):
    """Logits exp(log_scale) s + bias of scores s; both numbers are learned, in float32.

    The scale is learned by its logarithm, so that it stays positive (CLIP: Radford et al., 2021, section 2.3; SigLIP: Zhai
    et al., 2023, Algorithm 1).

    Parameters
    ----------
    temperature : 1 / scale at the start
    bias : at the start; None: there is none
    least : the temperature is held at this or above; None: it is not held
    """

    def __init__(self, temperature: float, bias: float | None = None, least: float | None = None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature), dtype=torch.float32))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias, dtype=torch.float32))
        self._highest = math.inf if least is None else -math.log(least)

    def forward(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        logits = in_full_precision(scores) * self.log_scale.exp()
        return logits if self.bias is None else logits + self.bias

    @torch.no_grad()
    def bound(self) -> None:
        """Hold the temperature at its least; called after each step."""
        self.log_scale.clamp_(max=self._highest)

    def values(self) -> dict[str, float]:
        """The temperature and, if there is one, the bias."""
        temperature = {"temperature": math.exp(-self.log_scale.item())}
        return temperature if self.bias is None else {**temperature, "bias": self.bias.item()}


def in_full_precision(scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Scores in float32 at least."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The pairs of a batch.

    images, captions : embeddings of the n pairs, see :mod:`vse.train.kinds`
    image_of, text_of : (n,) a number for the image and for the text of each pair
    more_images, more_captions : embeddings of further candidates, which are negatives of every query, such as an adversary's
    pair_of : (n,) the number of each pair among those that are trained on, if an adversary asks
    """

    images: Encoded
    captions: Encoded
    image_of: Numbers
    text_of: Numbers
    more_images: Encoded | None = None
    more_captions: Encoded | None = None
    pair_of: Numbers | None = None


class Ranking(NamedTuple):
    """What the queries of one direction were compared with: scores (n, m), positives (n,) and negatives (n, m)."""

    scores: Float[Tensor, "n m"]
    positives: Tensor
    negatives: Bool[Tensor, "n m"]


class Cost(NamedTuple):
    """The loss of a batch, what it would be if all embeddings were equal, and what images and captions were compared with."""

    loss: Float[Tensor, ""]
    collapsed: Float[Tensor, ""]
    rankings: tuple[Ranking, Ranking] | None = None


# From a batch, and a seed for what is drawn at random, to its cost.
Objective = Callable[[Batch, int], Cost]


@dataclass(frozen=True)
class LossUse:
    """What a loss is used with.

    similarity : the model's
    compiled : whether it is to be compiled
    adversary : whether there is one
    phrases : whether regions are matched with phrases
    warmup : the loss of the first epochs, if they have one of their own
    """

    similarity: SimilaritySettings
    compiled: bool = False
    adversary: bool = False
    phrases: bool = False
    warmup: str | None = None


class Loss(Settings, ABC):
    """Settings of a loss, chosen by its ``name`` (VSE++ paper, Eqs. 5 and 6; two-branch paper, Eqs. 3 to 7).

    ``ranks`` says whether it compares the candidates of a query, so that a hardest negative exists; ``several_positives``
    whether a query may have more positives than one.
    """

    ranks: ClassVar[bool]
    several_positives: ClassVar[bool] = False
    name: str
    margin: float = Field(0.2, ge=0, description="alpha of the hinges; m of the two-branch paper")
    same_image: Literal["keep", "mask", "positive"] = Field(
        "keep",
        description="whether other captions of the same image count as negatives (keep, as in the VSE++ paper), do not count "
        "(mask), or are positives too (positive: of infonce and sigmoid)",
    )
    k: PositiveInt | None = Field(
        10, description="top and the neighbourhood terms: the highest so many hinges count; none: all"
    )
    reduction: Literal["sum", "mean_topk"] = Field(
        "sum",
        description="of top and of the neighbourhood terms: the sum over the triplets that violate the margin (the two-branch "
        "paper), or the mean over all k of each query, be they 0 or not (the authors' code)",
    )
    lambda1: float = Field(1.0, ge=0, description="weight of the terms in which an image is the query")
    lambda2: float = Field(1.0, ge=0, description="weight of those in which a caption is")
    lambda3: float = Field(0.0, ge=0, description="weight of the neighbourhood constraints among images")
    lambda4: float = Field(0.0, ge=0, description="weight of those among captions")

    @model_validator(mode="after")
    def _positives(self) -> Self:
        if self.same_image == "positive" and not self.several_positives:
            raise ValueError(f"same_image: positive goes with infonce and sigmoid, not with {self.name} (mask does)")
        return self

    @property
    def averages(self) -> bool:
        """Whether the cost of a batch is a mean over its queries, not a sum."""
        return False

    @property
    def lists_negatives(self) -> bool:
        """Whether its costs come with the rankings of a batch, of which hard negatives can be listed."""
        return self.ranks

    def check_use(self, use: LossUse) -> None:
        """:class:`ValueError` if it cannot be used so."""

    @property
    def own_rate(self) -> float | None:
        """The learning rate of what the loss itself learns; None: that of the model."""
        return None

    def weights(self) -> LearnedScale | None:
        """What the loss itself learns, at its start; None if it learns nothing."""
        return None

    @abstractmethod
    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        """What training minimises.

        Parameters
        ----------
        similarity : compares embeddings
        compiled : by torch.compile, if it can be
        weights : what :meth:`weights` gave, as far as it is learned; None: settings stay as they are
        """
