"""The base class of losses, the input of a loss (a batch) and its output (a cost), hinge costs, and a learned temperature.

A loss of single pairs derives from :class:`PairLoss`, such as the logistic loss of the similarity network. A nested objective
(:func:`build_nested_objective`) also trains the first dimensions of an embedding to be an embedding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import softplus

from vse.pipeline.presets.schema import Settings
from vse.training.kinds import BatchVectors
from vse.training.models.encoders.base import l2_normalize
from vse.training.models.similarities.base import Similarity, SimilaritySettings
from vse.training.processes.group import ProcessGroup

Indices = NDArray[np.int64]
ScoreMatrix = Float[Tensor, "n m"]  # scores of n queries (rows) with m candidates (columns)
Mask = Bool[Tensor, "n m"]
PositiveColumns = Int[Tensor, " n"]  # for each query, the column of its positive
Scalar = Float[Tensor, ""]


def hinge_costs(scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask, margin: float) -> ScoreMatrix:
    """Return [margin - s(q, positive) + s(q, c)]+ for every query q (row) and negative c (column), and 0 elsewhere."""
    return (margin + scores - scores.gather(1, positives[:, None])).clamp(min=0) * negatives


def reduce_highest_costs(costs: ScoreMatrix, loss: Loss) -> Scalar:
    """Return the sum of the ``loss.k`` highest costs of every row or, with ``loss.reduction: mean_topk``, their mean."""
    top = costs if loss.k is None else costs.topk(min(loss.k, costs.shape[1]), sorted=False).values
    return top.mean() if loss.reduction == "mean_topk" else top.sum()


def upcast_to_float32(scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return scores of 16 bits as float32, and scores of another type unchanged."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


class LearnedScale(nn.Module):
    """A learned map from scores s to logits exp(log_scale) s + bias. ``log_scale`` and ``bias`` are float32 parameters.

    The logarithm keeps the scale positive (CLIP: Radford et al., 2021, section 2.3; SigLIP: Zhai et al., 2023, Algorithm 1).

    ``temperature`` : 1 / scale at the start.
    ``bias`` : bias at the start; None: no bias.
    ``min_temperature`` : lower bound of the temperature; None: no bound.
    """

    def __init__(self, temperature: float, bias: float | None = None, min_temperature: float | None = None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature), dtype=torch.float32))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias, dtype=torch.float32))
        self._max_log_scale = math.inf if min_temperature is None else -math.log(min_temperature)

    def forward(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        logits = upcast_to_float32(scores) * self.log_scale.exp()
        return logits if self.bias is None else logits + self.bias

    @torch.no_grad()
    def clamp_temperature(self) -> None:
        """Raise a temperature below the lower bound to this bound. The trainer calls this method after each step."""
        self.log_scale.clamp_(max=self._max_log_scale)

    def temperature_and_bias(self) -> dict[str, float]:
        """Return the current ``temperature`` and, if one is learned, the ``bias``."""
        temperature = {"temperature": math.exp(-self.log_scale.item())}
        return temperature if self.bias is None else {**temperature, "bias": self.bias.item()}


@dataclass(frozen=True)
class Batch:
    """The n pairs of a batch.

    ``image_embeddings``, ``caption_embeddings`` : embeddings of the pairs, see :mod:`vse.training.kinds`.
    ``image_indices`` : (n,) index of each pair's image among all training images.
    ``text_indices`` : (n,) index of each pair's text, the same for equal texts; used only if the setting ``lambda3`` is not 0.
    ``extra_negative_images``, ``extra_negative_captions`` : embeddings of further negatives of every query; None: no others.
    ``pair_indices`` : (n,) index of each pair among all training pairs, for adversaries.
    ``processes`` : the processes that each compute the cost of their own images; ``image_embeddings`` has only the images
        of this process. None: this process computes the cost of all images.
    """

    image_embeddings: BatchVectors
    caption_embeddings: BatchVectors
    image_indices: Indices
    text_indices: Indices
    extra_negative_images: BatchVectors | None = None
    extra_negative_captions: BatchVectors | None = None
    pair_indices: Indices | None = None
    processes: ProcessGroup | None = None


class QueryScores(NamedTuple):
    """The scores of all queries of one direction (images or captions) with all candidates.

    ``scores`` : score of each query (row) with each candidate (column).
    ``positive_columns`` : column of each query's positive.
    ``negative_mask`` : mask of the negatives of each query.
    """

    scores: ScoreMatrix
    positive_columns: PositiveColumns
    negative_mask: Mask


class Cost(NamedTuple):
    """The cost that a loss assigns to a batch.

    ``value`` : the number that training minimises.
    ``collapsed_value`` : the value of a model whose embeddings are all equal.
    ``query_scores`` : the scores with images and with captions as queries; None for a loss that keeps no scores.
    """

    value: Scalar
    collapsed_value: Scalar
    query_scores: tuple[QueryScores, QueryScores] | None = None


# A function of a batch and of a random seed that returns the cost of the batch.
Objective = Callable[[Batch, int], Cost]


@dataclass(frozen=True)
class LossContext:
    """The properties of a training that decide whether a loss can be used.

    ``similarity`` : settings of the similarity.
    ``is_compiled`` : whether torch.compile compiles the loss.
    ``has_adversary`` : whether the training has an adversary.
    ``reads_phrases`` : whether the model is trained on phrases and image regions instead of captions and images.
    ``warmup_loss`` : name of the loss of the first epochs; None if there is no warm-up.
    """

    similarity: SimilaritySettings
    is_compiled: bool = False
    has_adversary: bool = False
    reads_phrases: bool = False
    warmup_loss: str | None = None


class Loss(Settings, ABC):
    """Settings of a loss, chosen by its ``name`` (VSE++ paper, Eqs. 5 and 6; two-branch paper, Eqs. 3 to 7).

    ``is_ranking`` : whether the loss compares the candidates of a query, so that a hardest negative exists.
    ``allows_several_positives`` : whether a query may have more than one positive.
    """

    is_ranking: ClassVar[bool]
    allows_several_positives: ClassVar[bool] = False
    name: str
    margin: float = Field(0.2, ge=0, description="margin of the hinges: alpha in the VSE++ paper, m in the two-branch paper")
    same_image: Literal["keep", "mask", "positive"] = Field(
        "keep",
        description="other captions of the same image are negatives (keep, as in the VSE++ paper), are ignored (mask), or are "
        "positives (positive: infonce and sigmoid only)",
    )
    k: PositiveInt | None = Field(
        10, description="number of a query's highest hinges that count, in the loss top and in neighbourhood terms; null: all"
    )
    reduction: Literal["sum", "mean_topk"] = Field(
        "sum",
        description="for the loss top and for neighbourhood terms. sum: the sum of the hinges of triplets that violate the "
        "margin, as in the two-branch paper. mean_topk: the mean of the k highest hinges of each query, zeros included, as in "
        "the code of that paper",
    )
    nested: list[PositiveInt] = Field(
        default_factory=list,
        description="numbers of first dimensions that are trained as embeddings of their own, such as [64, 128], so that "
        "embeddings can be cut later; null: no nesting",
    )
    lambda1: float = Field(1.0, ge=0, description="weight of the terms with an image as the query")
    lambda2: float = Field(1.0, ge=0, description="weight of the terms with a caption as the query")
    lambda3: float = Field(0.0, ge=0, description="weight of the neighbourhood constraints among images")
    lambda4: float = Field(0.0, ge=0, description="weight of the neighbourhood constraints among captions")

    @model_validator(mode="after")
    def _check_positives(self) -> Self:
        if self.same_image == "positive" and not self.allows_several_positives:
            raise ValueError(f"same_image: positive goes with infonce and sigmoid, not with {self.name} (mask does)")
        return self

    @property
    def is_mean_over_queries(self) -> bool:
        """True if the cost of a batch is a mean over queries, False if the cost is a sum."""
        return False

    @property
    def has_query_scores(self) -> bool:
        """True if the :class:`Cost` of a batch has ``query_scores``. The list of the hardest negatives requires them."""
        return self.is_ranking

    def check_context(self, context: LossContext) -> None:
        """Raise ValueError if the loss cannot be used in this training."""

    def splits_by_image(self, context: LossContext) -> bool:
        """Return whether several processes can compute the cost of a batch together, each for its own images only."""
        return False

    @property
    def learning_rate_of_scale(self) -> float | None:
        """The learning rate of the learned temperature and bias; None: the learning rate of the model."""
        return None

    def build_scale(self) -> LearnedScale | None:
        """Return a new module with the temperature and bias that the loss learns, or None if the loss learns nothing."""
        return None

    @abstractmethod
    def build_objective(self, similarity: Similarity, compiled: bool = False, scale: nn.Module | None = None) -> Objective:
        """Return the function that training minimises. ``compiled`` requests compilation by torch.compile, if possible.

        ``scale`` has the learned temperature and bias, see :meth:`build_scale`. None: both come from the settings.
        """


def build_nested_objective(objective: Objective, dims: Sequence[int]) -> Objective:
    """Return a function that averages ``objective`` over complete embeddings and shortened embeddings.

    For each m in ``dims``, embeddings are cut to the first m dimensions and scaled to unit length (Matryoshka representation
    learning: Kusupati et al., NeurIPS 2022, Eq. 1, with equal weights). The ``query_scores`` of the cost come from complete
    embeddings.
    """

    def cost(batch: Batch, seed: int) -> Cost:
        images, captions = batch.image_embeddings, batch.caption_embeddings
        parts = [
            objective(replace(batch, image_embeddings=_truncate(images, m), caption_embeddings=_truncate(captions, m)), seed)
            for m in dims
        ]
        whole = objective(batch, seed)
        value = torch.stack([part.value for part in [*parts, whole]]).mean()
        collapsed = torch.stack([part.collapsed_value for part in [*parts, whole]]).mean()
        return Cost(value, collapsed, whole.query_scores)

    return cost


def _truncate(embeddings: BatchVectors, n_dims: int) -> BatchVectors:
    return (l2_normalize(embeddings[0][..., :n_dims]), *embeddings[1:])


class PairLoss(Loss):
    """A loss of single pairs: the pairs of a batch, and one random negative pair for each pair of the batch."""

    is_ranking: ClassVar = False

    @abstractmethod
    def cost(self, scores: Float[Tensor, " n"], labels: Float[Tensor, " n"]) -> Scalar:
        """Return the sum of the costs of pairs with ``labels`` +1 (positive) or -1 (negative)."""

    def build_objective(self, similarity: Similarity, compiled: bool = False, scale: nn.Module | None = None) -> Objective:
        def cost(batch: Batch, seed: int) -> Cost:
            device = batch.image_embeddings[0].device
            rows, columns = sample_balanced_pairs(batch.image_indices, np.random.default_rng(seed))
            labels = torch.ones(len(rows), device=device)
            labels[len(rows) // 2 :] = -1
            where = (torch.from_numpy(indices).to(device) for indices in (rows, columns))
            scores = similarity.score_pairs(batch.image_embeddings, batch.caption_embeddings, *where)
            with torch.no_grad():
                collapsed = self.cost(torch.zeros_like(scores), labels)
            return Cost(self.cost(scores, labels), collapsed)

        return cost


def sample_balanced_pairs(image_indices: Indices, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Return the pairs of a batch, followed by one random negative pair for each of them.

    A negative pair has the image of a pair of the batch and a caption of another image. If the batch has a single image, the
    result is empty. The two arrays hold the position in the batch of each pair's image, and of each pair's caption.
    """
    order = np.argsort(image_indices, kind="stable")
    _, image, counts = np.unique(image_indices, return_inverse=True, return_counts=True)
    firsts = (np.cumsum(counts) - counts)[image]
    n_wrong = len(image_indices) - counts[image]
    rows = np.flatnonzero(n_wrong)
    chosen = rng.integers(0, np.maximum(1, n_wrong))[rows]
    wrong = order[chosen + counts[image][rows] * (chosen >= firsts[rows])]
    return np.concatenate([rows, rows]), np.concatenate([rows, wrong])


class LogisticLoss(PairLoss):
    """The logistic loss log(1 + exp(-z p)) for scores p and labels z = +1 or -1 (two-branch paper, Eq. 7)."""

    name: Literal["logistic"] = "logistic"

    def cost(self, scores: Float[Tensor, " n"], labels: Float[Tensor, " n"]) -> Scalar:
        return softplus(-labels * scores).sum()
