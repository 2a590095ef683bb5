"""The base class of losses, their input (a batch) and output (its cost), hinge costs, and a learned temperature."""

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
from vse.training.kinds import Encoded
from vse.training.models.similarities.base import Similarity, SimilaritySettings

Indices = NDArray[np.int64]
ScoreMatrix = Float[Tensor, "n m"]  # scores of n queries (rows) with m candidates (columns)
Mask = Bool[Tensor, "n m"]
Positives = Int[Tensor, " n"]  # for each query, the column of its positive
Scalar = Float[Tensor, ""]


def hinge_costs(scores: ScoreMatrix, positives: Positives, negatives: Mask, margin: float) -> ScoreMatrix:
    """Return [margin - s(q, positive) + s(q, c)]+ for every query q (row) and negative c (column), and 0 elsewhere."""
    return (margin + scores - scores.gather(1, positives[:, None])).clamp(min=0) * negatives


def sum_highest(costs: ScoreMatrix, settings: Loss) -> Scalar:
    """Return the sum of the ``settings.k`` highest costs of each row, or with the reduction ``mean_topk`` their mean."""
    top = costs if settings.k is None else costs.topk(min(settings.k, costs.shape[1]), sorted=False).values
    return top.mean() if settings.reduction == "mean_topk" else top.sum()


def in_full_precision(scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return scores of 16 bits as float32, and others unchanged."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


class LearnedScale(nn.Module):
    """A learned map from scores s to logits exp(log_scale) s + bias, with both numbers in float32.

    The logarithm of the scale is learned, which keeps the scale positive (CLIP: Radford et al., 2021, section 2.3; SigLIP:
    Zhai et al., 2023, Algorithm 1).

    ``temperature`` : 1 / scale at the start.
    ``bias`` : the bias at the start; None: no bias.
    ``least`` : lower bound of the temperature; None: no bound.
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
        """Raise the temperature to its lower bound if it is lower. Called after each step."""
        self.log_scale.clamp_(max=self._highest)

    def values(self) -> dict[str, float]:
        """Return the ``temperature`` and, if there is one, the ``bias``."""
        temperature = {"temperature": math.exp(-self.log_scale.item())}
        return temperature if self.bias is None else {**temperature, "bias": self.bias.item()}


@dataclass(frozen=True)
class Batch:
    """The n pairs of a batch.

    ``images``, ``captions`` : embeddings of the pairs, see :mod:`vse.training.kinds`.
    ``image_of``, ``text_of`` : (n,) the index of the image and of the text of each pair.
    ``more_images``, ``more_captions`` : embeddings of further candidates, negatives of every query.
    ``pair_of`` : (n,) the index of each pair among all training pairs, for adversaries that need it.
    """

    images: Encoded
    captions: Encoded
    image_of: Indices
    text_of: Indices
    more_images: Encoded | None = None
    more_captions: Encoded | None = None
    pair_of: Indices | None = None


class Ranking(NamedTuple):
    """The queries of one direction (images or captions), with all candidates.

    ``scores`` : the score of each query (row) with each candidate (column).
    ``positives`` : the column of each query's positive.
    ``negatives`` : a mask of the negatives of each query.
    """

    scores: ScoreMatrix
    positives: Tensor
    negatives: Mask


class Cost(NamedTuple):
    """The loss of a batch, its loss if all embeddings were equal (``collapsed``), and the rankings of both directions."""

    loss: Scalar
    collapsed: Scalar
    rankings: tuple[Ranking, Ranking] | None = None


# A function of a batch and of a random seed that returns the cost of the batch.
Objective = Callable[[Batch, int], Cost]


@dataclass(frozen=True)
class LossUse:
    """The circumstances in which a loss is used. ``warmup`` is the loss of the first epochs, if it is another one."""

    similarity: SimilaritySettings
    compiled: bool = False
    adversary: bool = False
    phrases: bool = False
    warmup: str | None = None


class Loss(Settings, ABC):
    """Settings of a loss, chosen by its ``name`` (VSE++ paper, Eqs. 5 and 6; two-branch paper, Eqs. 3 to 7).

    ``ranks`` : whether the loss compares the candidates of a query, so that a hardest negative exists.
    ``several_positives`` : whether a query may have more than one positive.
    """

    ranks: ClassVar[bool]
    several_positives: ClassVar[bool] = False
    name: str
    margin: float = Field(0.2, ge=0, description="margin of the hinges: alpha in the VSE++ paper, m in the two-branch paper")
    same_image: Literal["keep", "mask", "positive"] = Field(
        "keep",
        description="other captions of the same image are negatives (keep, as in the VSE++ paper), are ignored (mask), or are "
        "positives (positive: infonce and sigmoid only)",
    )
    k: PositiveInt | None = Field(
        10, description="for top and the neighbourhood terms: only the k highest hinges of a query count; none: all"
    )
    reduction: Literal["sum", "mean_topk"] = Field(
        "sum",
        description="for top and the neighbourhood terms: the sum over the triplets that violate the margin (sum, the "
        "two-branch paper), or the mean over the k highest hinges of all queries, zeros too (mean_topk, the authors' code)",
    )
    lambda1: float = Field(1.0, ge=0, description="weight of the terms with an image as the query")
    lambda2: float = Field(1.0, ge=0, description="weight of the terms with a caption as the query")
    lambda3: float = Field(0.0, ge=0, description="weight of the neighbourhood constraints among images")
    lambda4: float = Field(0.0, ge=0, description="weight of the neighbourhood constraints among captions")

    @model_validator(mode="after")
    def _check_positives(self) -> Self:
        if self.same_image == "positive" and not self.several_positives:
            raise ValueError(f"same_image: positive goes with infonce and sigmoid, not with {self.name} (mask does)")
        return self

    @property
    def averages(self) -> bool:
        """True if the cost of a batch is a mean over its queries, False if it is a sum."""
        return False

    @property
    def lists_negatives(self) -> bool:
        """True if the cost of a batch includes its rankings, from which the hardest negatives can be listed."""
        return self.ranks

    def check_use(self, use: LossUse) -> None:
        """Raise ValueError if the loss cannot be used in these circumstances."""

    @property
    def weights_rate(self) -> float | None:
        """Learning rate of the parameters of the loss; None: the rate of the model."""
        return None

    def weights(self) -> LearnedScale | None:
        """Return the parameters of the loss, such as a learned temperature, before training. None: the loss has none."""
        return None

    @abstractmethod
    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        """Return the function that training minimises, compiled (torch.compile) if possible and requested by ``compiled``.

        ``weights`` are the parameters of the loss, see :meth:`weights`; without them the settings are used.
        """
