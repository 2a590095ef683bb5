"""Similarities of single vectors: inner product, Euclidean distance, order violation, and a network that classifies a pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.eval.ranking.ranks import write_order_scores
from vse.training.kinds import BatchVectors, select_batch_rows
from vse.training.models.encoders.base import xavier_linear
from vse.training.models.similarities.base import Similarity, SimilaritySettings, safe_sqrt


class CosineSettings(SimilaritySettings):
    """Inner products of embeddings: cosines, if all embeddings have unit length (VSE++ paper, Eq. 3)."""

    name: Literal["cosine"] = "cosine"
    ranking_similarity: ClassVar = "cosine"
    compares_within_modality: ClassVar = True

    def build(self, dim: int) -> Similarity:
        return CosineSimilarity()


class CosineSimilarity(Similarity):
    """Inner products of images and captions."""

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Tensor:
        return compute_inner_products(images[0], captions[0])


def compute_inner_products(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"]
) -> Float[Tensor, "n_images n_captions"]:
    """Return the inner product of each image with each caption."""
    return images @ captions.T


class EuclideanSettings(SimilaritySettings):
    """Minus the Euclidean distance of unit vectors, with the same ranks as the cosine (two-branch paper, section 3.2)."""

    name: Literal["euclidean"] = "euclidean"
    ranking_similarity: ClassVar = "cosine"
    compares_within_modality: ClassVar = True
    needs_unit_length: ClassVar = True
    floor: float = Field(
        0.0,
        ge=0,
        description="number that is added to squared distances before the root; 1e-4 in the authors' code of the two-branch "
        "networks",
    )

    def build(self, dim: int) -> Similarity:
        return EuclideanSimilarity(self.floor)


class EuclideanSimilarity(Similarity):
    """Minus the distance of each image to each caption."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Tensor:
        return compute_euclidean_scores(images[0], captions[0], self.floor)


def compute_euclidean_scores(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], floor: float = 0.0
) -> Float[Tensor, "n_images n_captions"]:
    """Return the score -sqrt(||v - c||^2 + floor) of each image v and caption c. The gradient at a root of 0 is 0."""
    squares = images.square().sum(1)[:, None] + captions.square().sum(1)[None, :]
    return -safe_sqrt((squares - 2 * images @ captions.T).clamp(min=0) + floor)


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
        write_order_scores(images, captions, scores)
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


_PAIRS_PER_BLOCK = 2**15  # number of pairs that are scored at once


class SimilarityNetworkSettings(SimilaritySettings):
    """A network from the elementwise product of two embeddings to a score (two-branch paper, section 3.3)."""

    name: Literal["network"] = "network"
    widths: list[PositiveInt] = Field(
        default=[512, 256], description="output lengths of the layers before the last one, whose output is the score"
    )

    def build(self, dim: int) -> Similarity:
        return SimilarityNetwork(dim, self.widths)


class SimilarityNetwork(Similarity):
    """Fully connected layers with ReLU, from the elementwise product of two embeddings to a score."""

    def __init__(self, dim: int, widths: Sequence[int]) -> None:
        super().__init__()
        inputs = [dim, *widths]
        self.linears = nn.ModuleList(xavier_linear(n_in, n_out) for n_in, n_out in zip(inputs, [*widths, 1], strict=True))

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Float[Tensor, "n_images n_captions"]:
        n, m = len(images[0]), len(captions[0])
        blocks = [
            self._score_products(images[0][pairs // m] * captions[0][pairs % m])
            for pairs in torch.split(torch.arange(n * m, device=images[0].device), _PAIRS_PER_BLOCK)
        ]
        return torch.cat([*blocks, images[0].new_empty(0)]).view(n, m)

    def score_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        return self._score_products(select_batch_rows(images, rows)[0] * select_batch_rows(captions, columns)[0])

    def _score_products(self, products: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
        *hidden, last = self.linears
        for layer in hidden:
            products = layer(products).relu()
        score: Tensor = last(products)
        return score[:, 0].float()
