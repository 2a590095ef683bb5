"""Nested embeddings: the first dimensions of an embedding are trained to be embeddings themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vse.training.kinds import BatchVectors
from vse.training.losses.base import Batch, Cost, Objective
from vse.training.models.encoders.base import l2_normalize


def build_nested_objective(objective: Objective, dims: Sequence[int]) -> Objective:
    """Return the mean of ``objective`` over the first m dimensions, for each m in ``dims``, and over all dimensions.

    The first m dimensions of an embedding are divided by their length (Matryoshka representation learning: Kusupati et al.,
    NeurIPS 2022, Eq. 1, with equal weights). Hard negatives are listed by the scores over all
    dimensions.
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
