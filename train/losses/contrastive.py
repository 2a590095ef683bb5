"""The base class of contrastive losses: a fixed or learned temperature, several positives, and blocks of scores."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.train.losses.base import (
    Batch,
    Cost,
    LearnedScale,
    LossUse,
    Mask,
    Objective,
    Positives,
    Ranking,
    Scalar,
    ScoreMatrix,
    in_full_precision,
)
from vse.train.losses.ranking import BlockCost, RankingLoss, block_costs
from vse.train.models.similarities.base import Similarity


class ScoreBlock(NamedTuple):
    """The logits of b images of a batch with all its n captions.

    own : column of the caption that each image is paired with
    same : True where a caption belongs to the image
    """

    logits: Float[Tensor, "b n"]
    own: Int[Tensor, " b"]
    same: Bool[Tensor, "b n"]


class ContrastiveLoss(RankingLoss):
    """A loss of logits. A logit is a score divided by a temperature.

    With ``block``, only that many rows of the n x n scores of a batch are in memory at a time, and the backward pass computes
    them again. Loss and gradients are the same up to rounding.
    """

    several_positives: ClassVar = True
    temperature: float = Field(0.1, ge=1e-6, description="divides the scores; the first value of a learned temperature")
    learned: bool = Field(False, description="whether the temperature is learned")
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of the temperature and bias, which have no weight decay; none: train.learning_rate",
    )
    block: PositiveInt | None = Field(
        None,
        description="number of images that are compared with all captions of a batch at a time, for large batches of single "
        "vectors: memory holds block x batch_size scores, and the loss is the same; none: all images at once",
    )

    @property
    def lists_negatives(self) -> bool:
        return self.block is None

    def check_use(self, use: LossUse) -> None:
        required = {"learned: false": not self.learned, "block: null": self.block is None}
        required["same_image: mask"] = self.same_image != "positive"
        for setting, is_set in required.items():
            if use.phrases and not is_set:
                raise ValueError(f"with phrases the loss {self.name} requires {setting}")
        if self.block is None:
            return
        if use.similarity.ranked_by is None:
            raise ValueError(f"loss.block compares single vectors, not by {use.similarity.name}, which scores pair by pair")
        conflicts = {"an adversary": use.adversary, "train.compile": use.compiled}
        conflicts["lambda3 and lambda4"] = bool(self.lambda3 or self.lambda4)
        for other, is_used in conflicts.items():
            if is_used:
                raise ValueError(f"loss.block cannot be combined with {other}")
        if use.warmup is not None:
            raise ValueError(f"loss.block bounds no memory of the warm-up loss {use.warmup}; warmup.epochs: 0 leaves it out")

    @property
    def initial_bias(self) -> float | None:
        """First value of the bias of the logits; None: no bias."""
        return None

    @property
    def lower_bound(self) -> float | None:
        """Lower bound of a learned temperature; None: no bound."""
        return None

    @property
    def weights_rate(self) -> float | None:
        return self.learning_rate

    def weights(self) -> LearnedScale | None:
        return LearnedScale(self.temperature, self.initial_bias, self.lower_bound) if self.learned else None

    def logits(self, scores: ScoreMatrix, weights: nn.Module | None = None) -> ScoreMatrix:
        """Return the scores divided by the learned temperature, or by the one in the settings."""
        if weights is not None:
            learned: Tensor = weights(scores)
            return learned
        return in_full_precision(scores) / self.temperature + (self.initial_bias or 0)

    def cost(self, scores: ScoreMatrix, positives: Positives, negatives: Mask) -> Scalar:
        return self.direction_cost(Ranking(scores, positives, negatives))

    def direction_cost(self, ranking: Ranking, weights: nn.Module | None = None) -> Scalar:
        own = torch.zeros_like(ranking.negatives).scatter(1, ranking.positives[:, None], True)
        positives = ~ranking.negatives if self.same_image == "positive" else own
        return self.logit_cost(self.logits(ranking.scores, weights), positives, ranking.negatives)

    @abstractmethod
    def logit_cost(self, logits: ScoreMatrix, positives: Mask, negatives: Mask) -> Scalar:
        """Return the cost of one direction, summed over its queries; each query has at least one positive."""

    @abstractmethod
    def block_cost(self, block: ScoreBlock) -> tuple[Scalar, Float[Tensor, " m"]]:
        """Return the cost of a block in both directions, and a value for each column as input of :meth:`column_cost`."""

    @abstractmethod
    def column_cost(self, columns: Float[Tensor, "n_blocks m"]) -> Scalar:
        """Return the cost that is added to the costs of all blocks, from the column values of all blocks."""

    @abstractmethod
    def collapsed_cost(self, n_same: Int[Tensor, " n"], mean: Scalar) -> Scalar:
        """Return the loss of a batch whose logits all equal ``mean``; ``n_same`` counts the pairs with the same image."""

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        if self.block is None:
            return super().objective(similarity, compiled, weights)
        size = self.block
        return lambda batch, seed: self._cost_by_blocks(batch, similarity, weights, size)

    def _cost_by_blocks(self, batch: Batch, similarity: Similarity, weights: nn.Module | None, size: int) -> Cost:
        image_of = torch.from_numpy(batch.image_of).to(batch.images[0].device)

        def row_cost(images: Tensor, captions: Tensor, start: int) -> BlockCost:
            scores = similarity((images,), (captions,))
            assert isinstance(scores, Tensor)
            own = torch.arange(start, start + len(images), device=image_of.device)
            block = ScoreBlock(self.logits(scores, weights), own, image_of[own][:, None] == image_of)
            return *self.block_cost(block), scores.detach().sum()

        parameters = () if weights is None else weights.parameters()
        cost, columns, total = block_costs(row_cost, size, batch.images[0], batch.captions[0], *parameters)
        _, which, counts = torch.unique(image_of, return_inverse=True, return_counts=True)
        with torch.no_grad():
            mean = self.logits(total[None, None] / len(image_of) ** 2, weights)[0, 0]
            collapsed = self.collapsed_cost(counts[which], mean)
        return Cost(cost + self.column_cost(columns), collapsed)
