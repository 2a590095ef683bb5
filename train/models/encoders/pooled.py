"""Pooling of a set: a linear map of each vector, then their mean or a weighted mean."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, unit_length, xavier_linear


class Pooled(EncoderSettings):
    """A linear map of each vector of a set, and pooling into one vector, for similarities that compare vectors."""

    name: Literal["pooled"] = "pooled"
    takes: ClassVar = (Kind.SETS,)
    pooling: Literal["mean", "attention"] = Field(
        "mean",
        description="mean: the mean of the mapped vectors x_k at unit length; attention: sum_k w_k x_k, w = "
        "softmax_k(q . x_k), with a learned vector q",
    )

    def gives(self, kind: Kind) -> Kind:
        return Kind.VECTORS

    def build(self, sizes: Sizes) -> Encoder:
        return PooledEncoder(sizes.input_dim, sizes.dim, self.pooling == "attention")


class PooledEncoder(Encoder):
    """The linear map and the pooling; ``query`` is q. It starts as zeros, so that both poolings start as the mean."""

    def __init__(self, input_dim: int, dim: int, attends: bool) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.query = nn.Parameter(torch.zeros(dim)) if attends else None

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> Encoded:
        mapped = unit_length(self.linear(vectors))
        if self.query is None:
            weights = mask / mask.sum(1, keepdim=True)
        else:
            weights = (mapped @ self.query).float().masked_fill(~mask, -torch.inf).softmax(1)
        return ((mapped * weights[:, :, None]).sum(1),)
