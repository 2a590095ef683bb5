"""Similarities of single vectors: the inner product (the cosine of unit vectors) and minus the Euclidean distance."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vse.training.kinds import BatchVectors
from vse.training.models.similarities.base import Similarity, SimilaritySettings, safe_sqrt


class CosineSettings(SimilaritySettings):
    """Inner products of embeddings: cosines, if all embeddings have unit length (VSE++ paper, Eq. 3)."""

    name: Literal["cosine"] = "cosine"
    ranking_similarity: ClassVar = "cosine"
    compares_within_side: ClassVar = True

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
    compares_within_side: ClassVar = True
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
