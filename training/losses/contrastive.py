"""Contrastive losses: InfoNCE and sigmoid, with a fixed or learned temperature, and GCE, which tolerates noisy pairs.

A query has one positive or several. Scores can be computed block by block, to save memory.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from vse.training.losses.base import (
    Batch,
    Cost,
    LearnedScale,
    LossContext,
    Mask,
    Objective,
    PositiveColumns,
    QueryScores,
    Scalar,
    ScoreMatrix,
    upcast_to_float32,
)
from vse.training.losses.ranking import BlockResult, RankingLoss, compute_cost_in_blocks
from vse.training.models.similarities.base import Similarity
from vse.training.processes.group import ProcessGroup

_MASKED_LOGIT = -1e30  # its exponential is 0; minus infinity would risk NaN
_CLIP_TEMPERATURE = 0.07  # the first temperature of CLIP


class LogitBlock(NamedTuple):
    """The logits of b images of a batch with all n captions of the batch.

    ``paired_columns`` : for each image (row), the column of the caption in the same pair of the batch.
    ``same_image_mask`` : True for every caption of the row's image, also for captions in other pairs of the batch.
    """

    logits: Float[Tensor, "b n"]
    paired_columns: Int[Tensor, " b"]
    same_image_mask: Bool[Tensor, "b n"]


class ContrastiveLoss(RankingLoss):
    """A loss of scores that are divided by a fixed or learned temperature."""

    allows_several_positives: ClassVar = True
    temperature: float = Field(0.1, ge=1e-6, description="divisor of the scores; the first value of a learned temperature")
    learned: bool = Field(False, description="whether the temperature is learned")
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of the temperature and bias, which have no weight decay; null: train.learning_rate",
    )
    block: PositiveInt | None = Field(
        None,
        description="number of images that are compared with all captions of a batch at a time, for large batches of single "
        "vectors. Only block x batch_size scores are in memory, and the loss does not change. null: all images at once",
    )

    @property
    def has_query_scores(self) -> bool:
        return self.block is None

    def check_context(self, context: LossContext) -> None:
        required = {"learned: false": not self.learned, "block: null": self.block is None}
        required["same_image: mask"] = self.same_image != "positive"
        for setting, is_set in required.items():
            if context.reads_phrases and not is_set:
                raise ValueError(f"with phrases the loss {self.name} requires {setting}")
        if self.block is None:
            return
        if context.similarity.ranking_similarity is None:
            raise ValueError(
                f"loss.block compares single vectors, not by {context.similarity.name}, which scores pair by pair"
            )
        conflicts = {"an adversary": context.has_adversary, "train.compile": context.is_compiled}
        conflicts["lambda3 and lambda4"] = bool(self.lambda3 or self.lambda4)
        for other, is_used in conflicts.items():
            if is_used:
                raise ValueError(f"loss.block cannot be combined with {other}")
        if context.warmup_loss is not None:
            raise ValueError(
                f"loss.block bounds no memory of the warm-up loss {context.warmup_loss}; warmup.epochs: 0 leaves it out"
            )

    def splits_by_image(self, context: LossContext) -> bool:
        has_single_vectors = context.similarity.ranking_similarity is not None
        return has_single_vectors and not (context.is_compiled or context.has_adversary or self.lambda3 or self.lambda4)

    @property
    def initial_bias(self) -> float | None:
        """The value at which the bias of the logits starts; None: no bias."""
        return None

    @property
    def min_temperature(self) -> float | None:
        """The lower bound of a learned temperature; None: no bound."""
        return None

    @property
    def learning_rate_of_scale(self) -> float | None:
        return self.learning_rate

    def build_scale(self) -> LearnedScale | None:
        return LearnedScale(self.temperature, self.initial_bias, self.min_temperature) if self.learned else None

    def logits(self, scores: ScoreMatrix, scale: nn.Module | None = None) -> ScoreMatrix:
        """Return scores / temperature + bias. Both come from ``scale`` or, if ``scale`` is None, from the settings."""
        if scale is not None:
            learned: Tensor = scale(scores)
            return learned
        return upcast_to_float32(scores) / self.temperature + (self.initial_bias or 0)

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        return self.direction_cost(QueryScores(scores, positives, negatives))

    @abstractmethod
    def compute_block_results(self, logit_block: LogitBlock) -> tuple[Scalar, Float[Tensor, " m"]]:
        """Return the cost of a block of images and, for each caption, a partial result such as a sum over these images.

        :meth:`combine_caption_results` combines the partial results of all blocks. A loss without partial results has m = 0.
        """

    @abstractmethod
    def combine_caption_results(self, caption_results: Float[Tensor, "n_blocks m"]) -> Scalar:
        """Return the part of the cost that needs all images of a batch, such as the cost of captions as queries.

        Row k of ``caption_results`` has, for each of the m captions, the partial result that
        :meth:`compute_block_results` returned for the k-th block of images.
        """

    @abstractmethod
    def cost_of_equal_logits(self, n_same: Int[Tensor, " n"], mean: Scalar) -> Scalar:
        """Return the cost of a batch whose logits all equal ``mean``.

        ``n_same`` (n,) : for each pair, the number of pairs of the batch with the same image, including the pair itself.
        """

    def build_objective(self, similarity: Similarity, compiled: bool = False, scale: nn.Module | None = None) -> Objective:
        complete = super().build_objective(similarity, compiled, scale)

        def compute_batch_cost(batch: Batch, seed: int) -> Cost:
            if self.block is None and batch.processes is None:
                return complete(batch, seed)
            return self._compute_cost_in_blocks(batch, similarity, scale)

        return compute_batch_cost

    def _compute_cost_in_blocks(self, batch: Batch, similarity: Similarity, scale: nn.Module | None) -> Cost:
        """Return the cost of the batch, computed in blocks of images.

        If several processes share the batch, each computes the blocks of its own images. All processes return the complete
        cost, but gradients flow only through their own blocks.
        """
        processes = batch.processes or ProcessGroup()
        image_indices = torch.from_numpy(batch.image_indices).to(batch.image_embeddings[0].device)
        shares = processes.compute_share_sizes(len(image_indices))
        first, size = sum(shares[: processes.rank]), self.block or max(shares)

        def compute_block(images: Tensor, captions: Tensor, start: int) -> BlockResult:
            scores = similarity((images,), (captions,))
            assert isinstance(scores, Tensor)
            paired_columns = torch.arange(first + start, first + start + len(images), device=image_indices.device)
            logit_block = LogitBlock(
                self.logits(scores, scale), paired_columns, image_indices[paired_columns][:, None] == image_indices
            )
            return *self.compute_block_results(logit_block), scores.detach().sum()

        parameters = () if scale is None else scale.parameters()
        cost, caption_results, score_sum = compute_cost_in_blocks(
            compute_block, size, batch.image_embeddings[0], batch.caption_embeddings[0], *parameters
        )
        caption_results = processes.gather_rows(caption_results, [max(1, -(-share // size)) for share in shares])
        _, image_of_pair, counts = np.unique(batch.image_indices, return_inverse=True, return_counts=True)
        n_same = torch.from_numpy(counts[image_of_pair]).to(image_indices.device)
        with torch.no_grad():
            cost_of_other_processes = processes.sum(cost) - cost
            mean = self.logits(processes.sum(score_sum)[None, None] / len(image_indices) ** 2, scale)[0, 0]
            collapsed = self.cost_of_equal_logits(n_same, mean)
        return Cost(cost + cost_of_other_processes + self.combine_caption_results(caption_results), collapsed)


class InfoNceLoss(ContrastiveLoss):
    """Cross entropy of each query's positive among the negatives (van den Oord et al., 2018), in both directions.

    A learned temperature starts at 0.07 unless another value is set (CLIP: Radford et al., 2021, section 2.3). With
    ``same_image: positive`` a query may have several positives. Its cost is then the mean of the cross entropies of these
    positives, each among all candidates (UniCL: Yang et al., 2022, Eqs. 3 and 4). The margin is not used.
    """

    name: Literal["infonce"] = "infonce"
    least_temperature: float = Field(0.01, ge=1e-6, description="lower bound of a learned temperature")

    @model_validator(mode="before")
    @classmethod
    def _default_to_clip_temperature(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("learned") is True and "temperature" not in content:
            return {**content, "temperature": _CLIP_TEMPERATURE}
        return content

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.learned and self.temperature < self.least_temperature:
            raise ValueError(f"temperature {self.temperature:g} is below least_temperature {self.least_temperature:g}")
        return self

    @property
    def min_temperature(self) -> float:
        return self.least_temperature

    def direction_cost(self, query_scores: QueryScores, scale: nn.Module | None = None) -> Scalar:
        scores, positives, negatives = query_scores
        logits = self.logits(scores, scale)
        if self.same_image == "positive":  # each candidate is a positive or a negative
            shares = (~negatives).float()
            return cross_entropy(logits, shares / shares.sum(1, keepdim=True), reduction="sum")
        left_out = ~negatives.scatter(1, positives[:, None], True)
        return cross_entropy(logits.masked_fill(left_out, -torch.inf), positives, reduction="sum")

    def collapsed_cost(self, images: QueryScores, captions: QueryScores, scale: nn.Module | None = None) -> Scalar:
        """Return the cost of equal scores, the logarithm of the number of each query's candidates."""

        def count_candidates(side: QueryScores) -> Tensor:
            if self.same_image == "positive":
                return torch.full_like(side.positive_columns, side.scores.shape[1])
            return 1 + side.negative_mask.sum(1)

        image_cost, caption_cost = (count_candidates(side).log().sum() for side in (images, captions))
        return self.lambda1 * image_cost + self.lambda2 * caption_cost

    def compute_block_results(self, logit_block: LogitBlock) -> tuple[Scalar, Float[Tensor, " m"]]:
        logits, paired_columns, is_same_image = logit_block
        if self.same_image == "positive":
            positives = logits.masked_fill(~is_same_image, 0).sum(1) / is_same_image.sum(1)
        else:
            positives = logits.gather(1, paired_columns[:, None])[:, 0]
        if self.same_image == "mask":
            logits = logits.masked_fill(is_same_image.scatter(1, paired_columns[:, None], False), _MASKED_LOGIT)
        both = (self.lambda1 + self.lambda2) * positives.sum()
        return self.lambda1 * logits.logsumexp(1).sum() - both, logits.logsumexp(0)

    def combine_caption_results(self, caption_results: Float[Tensor, "n_blocks m"]) -> Scalar:
        return self.lambda2 * caption_results.logsumexp(0).sum()

    def cost_of_equal_logits(self, n_same: Int[Tensor, " n"], mean: Scalar) -> Scalar:
        left_out = n_same - 1 if self.same_image == "mask" else torch.zeros_like(n_same)
        return (self.lambda1 + self.lambda2) * (len(n_same) - left_out).log().sum()


class SigmoidLoss(ContrastiveLoss):
    """The sigmoid loss log(1 + exp(-z (s / temperature + bias))) of all pairs (SigLIP: Zhai et al., 2023, Eq. 1).

    s is a score, and z is +1 for positive pairs and -1 for negative pairs. Each pair counts half with the image as the query,
    and half with the caption as the query. If an image occurs in several pairs of a batch, the image and the caption of
    another of these pairs are negative (``same_image: keep``), positive (``positive``) or left out (``mask``). The margin is
    not used.
    """

    name: Literal["sigmoid"] = "sigmoid"
    learned: bool = Field(True, description="whether the temperature and the bias are learned")
    bias: float = Field(-10.0, description="number added to the logits; the first value of a learned bias")
    lambda1: float = Field(0.5, ge=0, description="weight of the terms with an image as the query")
    lambda2: float = Field(0.5, ge=0, description="weight of the terms with a caption as the query")

    @property
    def initial_bias(self) -> float:
        return self.bias

    def scores_if_collapsed(self, scores: ScoreMatrix) -> ScoreMatrix:
        """Return the scores of a batch whose embeddings are all equal: the mean of ``scores`` in every place.

        Zeros, as in the base class, would be wrong: the sigmoid loss changes if a constant is added to all scores.
        """
        return scores.mean().expand_as(scores) if scores.numel() else scores

    def direction_cost(self, query_scores: QueryScores, scale: nn.Module | None = None) -> Scalar:
        scores, positives, negatives = query_scores
        own = torch.zeros_like(negatives).scatter(1, positives[:, None], True)
        return self._sum_costs(self.logits(scores, scale), ~negatives if self.same_image == "positive" else own, negatives)

    def _sum_costs(self, logits: ScoreMatrix, positives: Mask, negatives: Mask) -> Scalar:
        costs = softplus(torch.where(positives, -logits, logits))
        return costs.masked_fill(~(positives | negatives), 0).sum()

    def compute_block_results(self, logit_block: LogitBlock) -> tuple[Scalar, Float[Tensor, " m"]]:
        logits, paired_columns, is_same_image = logit_block
        paired = torch.zeros_like(is_same_image).scatter(1, paired_columns[:, None], True)
        positives = is_same_image if self.same_image == "positive" else paired
        negatives = ~paired if self.same_image == "keep" else ~is_same_image
        return (self.lambda1 + self.lambda2) * self._sum_costs(logits, positives, negatives), logits.new_empty(0)

    def combine_caption_results(self, caption_results: Float[Tensor, "n_blocks m"]) -> Scalar:
        return caption_results.sum()

    def cost_of_equal_logits(self, n_same: Int[Tensor, " n"], mean: Scalar) -> Scalar:
        n = len(n_same)
        n_positives = n_same.sum() if self.same_image == "positive" else torch.tensor(n)
        n_negatives = n * n - (n if self.same_image == "keep" else n_same.sum())
        return (self.lambda1 + self.lambda2) * (n_positives * softplus(-mean) + n_negatives * softplus(mean))


class GeneralisedCrossEntropy(RankingLoss):
    """Generalised cross entropy: each query costs (1 - p^q) / q (Zhang and Sabuncu, NeurIPS 2018).

    p is the probability of the query's positive: the softmax of score / temperature over the positive and all negatives. The
    gradient of a query is the gradient of InfoNCE, -log p, times p^q. Most mismatched training pairs have a low p, so they
    count less. With q near 0 the loss is InfoNCE, and with q = 1 it is 1 - p. The margin is not used.
    """

    name: Literal["gce"] = "gce"
    temperature: float = Field(0.07, ge=1e-6, description="divisor of the scores")
    q: float = Field(0.4, gt=0, le=1, description="near 0: InfoNCE; higher: unlikely pairs count less")

    def cost(self, scores: ScoreMatrix, positives: PositiveColumns, negatives: Mask) -> Scalar:
        own = torch.zeros_like(negatives).scatter(1, positives[:, None], True)
        logits = (upcast_to_float32(scores) / self.temperature).masked_fill(~(own | negatives), -torch.inf)
        log_probabilities = logits.log_softmax(1).gather(1, positives[:, None])
        return -torch.expm1(self.q * log_probabilities).sum() / self.q
