"""A linear map of vectors into the joint space."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, xavier_linear


class Linear(EncoderSettings):
    """A linear map into the joint space, f(x) = W x + b (VSE++ paper, Eq. 1), applied to each vector of a set."""

    name: Literal["linear"] = "linear"
    takes: ClassVar = (Kind.VECTORS, Kind.SETS)

    def build(self, sizes: Sizes) -> Encoder:
        return LinearEncoder(sizes.input_dim, sizes.dim)


class LinearEncoder(Encoder):
    """The linear map; a mask is passed through."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)

    def forward(self, vectors: Tensor, *mask: Tensor) -> Encoded:
        return self.linear(vectors), *mask

    def linear_map(self) -> nn.Linear:
        return self.linear
