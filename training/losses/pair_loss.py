"""Losses of single positive and negative pairs, such as the logistic loss of the similarity network."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from vse.training.losses.base import Batch, Cost, Indices, Loss, Objective, Scalar
from vse.training.models.similarities.base import Similarity


class PairLoss(Loss):
    """A loss of single pairs. Each positive pair of a batch is accompanied by one random negative pair."""

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
    """Return the images and captions of the pairs of a batch, followed by one random negative pair for each of these pairs.

    A negative pair has the image of the positive pair and a caption of another image. Pairs without such a caption are left
    out. Both results (2 n_left,) are positions in ``image_indices`` (n,), the image index of each pair of the batch.
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
