"""The order similarity of Vendrov et al. (ICLR 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vse.eval.ranking.ranks import order_scores
from vse.training.kinds import BatchVectors
from vse.training.models.similarities.base import Similarity, SimilaritySettings, safe_sqrt

_DIFFERENCES_PER_BLOCK = {
    "cpu": 2**18,
    "cuda": 2**26,
}  # number of differences in memory at a time; on a CPU they fit into its cache


class OrderSettings(SimilaritySettings):
    """Order embeddings, whose score measures the order violation max(0, c - v) (VSE++ paper, section 3.5).

    v is the embedding of an image, c the embedding of a caption.
    """

    name: Literal["order"] = "order"
    ranking_similarity: ClassVar = "order"
    form: Literal["squared", "norm"] = Field(
        "squared", description="score: minus the squared norm of the violation (the papers), or minus the norm (VSE++ code)"
    )

    def build(self, dim: int) -> Similarity:
        return OrderSimilarity(self.form)


class OrderSimilarity(Similarity):
    """Scores of images v with captions c: minus the norm ||max(0, c - v)||, or minus its square."""

    def __init__(self, form: Literal["squared", "norm"]) -> None:
        super().__init__()
        self.form = form

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Tensor:
        return compute_order_scores(images[0], captions[0], self.form)


def compute_order_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], form: str = "squared"
) -> Float[Tensor, "n_images n_captions"]:
    """Return the score of each image v and caption c: -||max(0, c - v)||^2, or -||max(0, c - v)|| for the form ``norm``."""
    squared: Tensor = _OrderScores.apply(images, captions)
    return squared if form == "squared" else -safe_sqrt(-squared)


class _OrderScores(torch.autograd.Function):
    """The score -||max(0, c - v)||^2 of every pair. The backward pass computes the differences again, block by block."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, captions: Tensor) -> Tensor:
        ctx.save_for_backward(images, captions)
        scores = images.new_empty(len(images), len(captions))
        order_scores(images, captions, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        images, captions = ctx.saved_tensors
        of_images, of_captions = torch.empty_like(images), torch.zeros_like(captions)
        for rows, exceeding in _iterate_violation_blocks(images, captions):
            weights = 2 * gradients[0][rows]
            of_images[rows] = torch.bmm(weights[:, None], exceeding)[:, 0]
            of_captions -= exceeding.mul_(weights[:, :, None]).sum(0) if len(exceeding) > 1 else exceeding[0].mul_(weights.T)
        return of_images, of_captions


def _iterate_violation_blocks(images: Tensor, captions: Tensor) -> Iterator[tuple[slice, Tensor]]:
    size = max(1, _DIFFERENCES_PER_BLOCK.get(images.device.type, 2**26) // max(1, captions.numel()))
    for start in range(0, len(images), size):
        rows = slice(start, min(start + size, len(images)))
        yield rows, (captions[None] - images[rows, None]).clamp_(min=0)
