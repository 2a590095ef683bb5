"""The similarity network, which scores a pair by classification instead of by a distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.training.kinds import BatchVectors, select_rows
from vse.training.models.encoders.base import xavier_linear
from vse.training.models.similarities.base import Similarity, SimilaritySettings

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
        return self._score_products(select_rows(images, rows)[0] * select_rows(captions, columns)[0])

    def _score_products(self, products: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
        *hidden, last = self.linears
        for layer in hidden:
            products = layer(products).relu()
        score: Tensor = last(products)
        return score[:, 0].float()
