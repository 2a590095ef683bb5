"""A linear map to unit length, with a weight for each dimension."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, unit_length, xavier_linear


class Weighted(EncoderSettings):
    """f(x) = r * u, u = (W x + b) / |W x + b|, with a weight r for each dimension (Li et al., ICLR 2025)."""

    name: Literal["weighted"] = "weighted"
    takes: ClassVar = (Kind.VECTORS,)

    def build(self, sizes: Sizes) -> Encoder:
        return WeightedEncoder(sizes.input_dim, sizes.dim)


class WeightedEncoder(Encoder):
    """The linear map, and ``weights`` (dim,), which start as 1."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.weights = nn.Parameter(torch.ones(dim))

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> Encoded:
        return (self.weights * unit_length(self.linear(vectors)),)
