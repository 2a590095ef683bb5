"""The cosine similarity."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from vse.train.kinds import Encoded
from vse.train.models.similarities.base import Similarity, SimilaritySettings


class CosineSettings(SimilaritySettings):
    """Inner products of embeddings; cosines, if both have unit length (VSE++ paper, Eq. 3)."""

    name: Literal["cosine"] = "cosine"
    ranked_by: ClassVar = "cosine"
    compares_one_side: ClassVar = True

    def build(self, dim: int) -> Similarity:
        return Cosine()


class Cosine(Similarity):
    """Inner products. The model sets unit length; in VSE0 only captions have it."""

    def forward(self, images: Encoded, captions: Encoded) -> Tensor:
        return cosine(images[0], captions[0])


def cosine(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"]
) -> Float[Tensor, "n_images n_captions"]:
    """Return the inner product of each image with each caption."""
    return images @ captions.T
