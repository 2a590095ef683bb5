"""The base class of contrastive losses: a fixed or learned temperature, several positives, and blocks of scores."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.train.losses.base import Batch, Cost, LearnedScale, LossUse, Objective, Ranking, in_full_precision
from vse.train.losses.ranking import BlockCost, RankingLoss, block_costs
from vse.train.models.similarities.base import Similarity


class ScoreBlock(NamedTuple):
    """The logits of b images of a batch with all its n captions.

    logits : (b, n)
    own : (b,) column of the caption that each image is paired with
    same : (b, n) True where a caption belongs to the image
    """

    logits: Float[Tensor, "b n"]
    own: Int[Tensor, " b"]
    same: Bool[Tensor, "b n"]


class ContrastiveLoss(RankingLoss):
    """A loss of logits, which are scores divided by a temperature.

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
        if use.phrases:
            for wrong, setting in (
                (self.learned, "learned: false"),
                (self.block is not None, "block: null"),
                (self.same_image == "positive", "same_image: mask"),
            ):
                if wrong:
                    raise ValueError(f"with phrases the loss {self.name} takes {setting}")
        if self.block is None:
            return
        if use.similarity.ranked_by is None:
            raise ValueError(f"loss.block compares single vectors, not by {use.similarity.name}, which scores pair by pair")
        for wrong, what in (
            (use.adversary, "an adversary"),
            (use.compiled, "train.compile"),
            (bool(self.lambda3 or self.lambda4), "lambda3 and lambda4"),
        ):
            if wrong:
                raise ValueError(f"loss.block does not go with {what}")
        if use.warmup is not None:
            raise ValueError(f"loss.block bounds no memory of the warm-up loss {use.warmup}; warmup.epochs: 0 leaves it out")

    @property
    def first_bias(self) -> float | None:
        """First value of the bias of the logits; None: no bias."""
        return None

    @property
    def held_at(self) -> float | None:
        """Lower bound of a learned temperature; None: no bound."""
        return None

    @property
    def own_rate(self) -> float | None:
        return self.learning_rate

    def weights(self) -> LearnedScale | None:
        return LearnedScale(self.temperature, self.first_bias, self.held_at) if self.learned else None

    def logits(self, scores: Float[Tensor, "n m"], weights: nn.Module | None = None) -> Float[Tensor, "n m"]:
        """Return the scores divided by the learned temperature, or by the one in the settings."""
        if weights is not None:
            learned: Tensor = weights(scores)
            return learned
        return in_full_precision(scores) / self.temperature + (self.first_bias or 0)

    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        return self.of_direction(Ranking(scores, positives, negatives))

    def of_direction(self, ranking: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        own = torch.zeros_like(ranking.negatives).scatter(1, ranking.positives[:, None], True)
        positives = ~ranking.negatives if self.same_image == "positive" else own
        return self.of_logits(self.logits(ranking.scores, weights), positives, ranking.negatives)

    @abstractmethod
    def of_logits(
        self, logits: Float[Tensor, "n m"], positives: Bool[Tensor, "n m"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        """Return the cost of one direction, summed over its queries; each query has at least one positive."""

    @abstractmethod
    def of_block(self, block: ScoreBlock) -> tuple[Float[Tensor, ""], Float[Tensor, " m"]]:
        """Return the cost of a block in both directions, and the numbers of its columns for :meth:`of_columns`."""

    @abstractmethod
    def of_columns(self, columns: Float[Tensor, "n_blocks m"]) -> Float[Tensor, ""]:
        """Return the cost that is added to the costs of all blocks."""

    @abstractmethod
    def of_equal(self, n_same: Int[Tensor, " n"], mean: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the loss of a batch whose logits all equal ``mean``; ``n_same`` counts the pairs with the same image."""

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        if self.block is None:
            return super().objective(similarity, compiled, weights)
        size = self.block

        def cost(batch: Batch, seed: int) -> Cost:
            return self._by_blocks(batch, similarity, weights, size)

        return cost

    def _by_blocks(self, batch: Batch, similarity: Similarity, weights: nn.Module | None, size: int) -> Cost:
        image_of = torch.from_numpy(batch.image_of).to(batch.images[0].device)

        def of_rows(images: Tensor, captions: Tensor, start: int) -> BlockCost:
            scores = similarity((images,), (captions,))
            assert isinstance(scores, Tensor)
            own = torch.arange(start, start + len(images), device=image_of.device)
            block = ScoreBlock(self.logits(scores, weights), own, image_of[own][:, None] == image_of)
            return *self.of_block(block), scores.detach().sum()

        parameters = () if weights is None else weights.parameters()
        cost, columns, total = block_costs(of_rows, size, batch.images[0], batch.captions[0], *parameters)
        _, which, counts = torch.unique(image_of, return_inverse=True, return_counts=True)
        with torch.no_grad():
            mean = self.logits(total[None, None] / len(image_of) ** 2, weights)[0, 0]
            collapsed = self.of_equal(counts[which], mean)
        return Cost(cost + self.of_columns(columns), collapsed)
