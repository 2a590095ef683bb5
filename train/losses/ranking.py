"""Losses of rankings: of each query, how its positive scores among its negatives, for images and for captions as queries."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vse.train.kinds import Encoded, select
from vse.train.losses.base import Batch, Cost, Loss, Objective, Ranking
from vse.train.losses.neighbourhood import neighbourhood, related
from vse.train.models.similarities.base import Scores, Similarity


class RankingLoss(Loss):
    """A loss of scores (n, m) of queries with candidates.

    With ``distinct_candidates`` an image that a batch has several times is a candidate once, at the first of its rows.
    """

    ranks: ClassVar = True
    distinct_candidates: ClassVar[bool] = False

    @abstractmethod
    def cost(
        self, scores: Float[Tensor, "n m"], positives: Int[Tensor, " n"], negatives: Bool[Tensor, "n m"]
    ) -> Float[Tensor, ""]:
        """The cost of one direction, summed over its queries.

        Parameters
        ----------
        scores : of each query (row) with each candidate (column)
        positives : the column of each query's positive
        negatives : which candidates count as negatives of a query
        """

    def of_direction(self, ranking: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        """The cost of one direction, by what the loss has learned, if it learns anything."""
        return self.cost(*ranking)

    def of_rankings(self, images: Ranking, captions: Ranking, weights: nn.Module | None = None) -> Float[Tensor, ""]:
        """The weighted costs of images as queries and of captions as queries."""
        return self.lambda1 * self.of_direction(images, weights) + self.lambda2 * self.of_direction(captions, weights)

    def if_equal(self, images: Ranking, captions: Ranking) -> tuple[Ranking, Ranking]:
        """Both rankings as they would be if all embeddings were equal."""
        equal = self.equal_scores
        return images._replace(scores=equal(images.scores)), captions._replace(scores=equal(captions.scores))

    def equal_scores(self, scores: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """What the scores would be if all embeddings were equal; 0, unless the loss is not the same for any number."""
        return torch.zeros_like(scores)

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        """The cost of both directions and the neighbourhood constraints of a batch."""
        of_rankings = torch.compile(self.of_rankings) if compiled else self.of_rankings

        def cost(batch: Batch, seed: int) -> Cost:
            rankings = rankings_of(batch, similarity, self.same_image != "keep", self.distinct_candidates)
            loss = of_rankings(*rankings, weights)
            with torch.no_grad():
                collapsed = of_rankings(*self.if_equal(*rankings), weights)
            for weight, side, own, others in _sides(self, batch):
                first, neighbours, outside = related(own, others)
                chosen = select(side, first)
                within = similarity(chosen, chosen)
                loss = loss + weight * neighbourhood(within, neighbours, outside, self)
                with torch.no_grad():
                    collapsed = collapsed + weight * neighbourhood(torch.zeros_like(within), neighbours, outside, self)
            return Cost(loss, collapsed, rankings)

        return cost


def rankings_of(
    batch: Batch, similarity: Similarity, mask_same_image: bool, distinct: bool = False
) -> tuple[Ranking, Ranking]:
    """What each image and each caption of a batch is compared with: the other side, and the batch's further candidates."""
    image_of = torch.from_numpy(batch.image_of).to(batch.images[0].device)
    negatives = negative_pairs(image_of, mask_same_image)
    positives = torch.arange(len(image_of), device=image_of.device)
    i2t, t2i = _both(similarity(batch.images, batch.captions))
    among_images = negatives.T
    if distinct:
        among_images = among_images & ~(~negatives).tril(-1).any(1)
    return (
        _ranking(
            i2t,
            positives,
            negatives,
            None if batch.more_captions is None else _both(similarity(batch.images, batch.more_captions))[0],
        ),
        _ranking(
            t2i.T,
            positives,
            among_images,
            None if batch.more_images is None else _both(similarity(batch.more_images, batch.captions))[1].T,
        ),
    )


def negative_pairs(image_ids: Int[Tensor, " n"], mask_same_image: bool) -> Bool[Tensor, "n n"]:
    """Which pairs of a batch are negatives: all but i = j, or, if masked, all whose images differ.

    A batch of shuffled captions can hold two captions of one image. The VSE++ paper and its code count
    each as a negative of the other's image; masking does not.
    """
    if mask_same_image:
        return image_ids[:, None] != image_ids[None, :]
    return ~torch.eye(len(image_ids), dtype=torch.bool, device=image_ids.device)


def _ranking(scores: Tensor, positives: Tensor, negatives: Tensor, more: Tensor | None) -> Ranking:
    if more is None:
        return Ranking(scores, positives, negatives)
    return Ranking(torch.cat([scores, more], 1), positives, torch.cat([negatives, torch.ones_like(more, dtype=torch.bool)], 1))


def _both(scores: Scores) -> tuple[Tensor, Tensor]:
    return scores if isinstance(scores, tuple) else (scores, scores)


def _sides(loss: Loss, batch: Batch) -> list[tuple[float, Encoded, Tensor, Tensor]]:
    """The sides that have neighbourhood constraints: their weight, embeddings, own numbers and those of the other side."""
    if not loss.lambda3 and not loss.lambda4:
        return []
    device = batch.images[0].device
    image_of, text_of = (torch.from_numpy(numbers).to(device) for numbers in (batch.image_of, batch.text_of))
    sides = [
        (loss.lambda3, batch.images, image_of, text_of),
        (loss.lambda4, batch.captions, torch.arange(len(image_of), device=device), image_of),
    ]
    return [side for side in sides if side[0]]
