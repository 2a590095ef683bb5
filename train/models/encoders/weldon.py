"""A map of an image as one vector, from the positions of each channel's highest and lowest responses: DSVE-loc's encoder."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, xavier_linear


class Weldon(EncoderSettings):
    """WELDON pooling of a map, and a linear map into the joint space (DSVE-loc, Engilberge et al., CVPR 2018).

    A linear map of the vector at each position, which is a 1 x 1 convolution, has ``channels`` responses. Of each channel the
    mean of the ``k_max`` highest over all positions and the mean of the ``k_min`` lowest are added up.
    """

    name: Literal["weldon"] = "weldon"
    takes: ClassVar = (Kind.SETS,)
    channels: PositiveInt = 2400
    k_max: PositiveInt = Field(15, description="highest responses of a channel whose mean counts; all, if there are fewer")
    k_min: int = Field(15, ge=0, description="lowest ones; 0: none")
    dropout: float = Field(0.5, ge=0, lt=1, description="of the pooled channels")

    def gives(self, kind: Kind) -> Kind:
        return Kind.VECTORS

    def build(self, sizes: Sizes) -> Encoder:
        return WeldonEncoder(sizes.input_dim, sizes.dim, self)


class WeldonEncoder(Encoder):
    """The convolution, the pooling and the linear map."""

    def __init__(self, input_dim: int, dim: int, settings: Weldon) -> None:
        super().__init__()
        self.dim = dim
        self.k_max, self.k_min = settings.k_max, settings.k_min
        self.convolution = xavier_linear(input_dim, settings.channels)
        self.dropout = nn.Dropout(settings.dropout)
        self.linear = xavier_linear(settings.channels, dim)

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> Encoded:
        pooled = weldon_pooling(self.convolution(vectors), mask, self.k_max, self.k_min)
        return (self.linear(self.dropout(pooled)),)


def weldon_pooling(
    responses: Float[Tensor, "n longest channels"], mask: Bool[Tensor, "n longest"], k_max: int, k_min: int
) -> Float[Tensor, "n channels"]:
    """The mean of the ``k_max`` highest responses of each channel plus that of the ``k_min`` lowest, among masked positions.

    Where there are fewer positions, all of them count (Durand et al., CVPR 2016).
    """
    by_channel = responses.transpose(1, 2).contiguous()
    pooled = _mean_of_highest(by_channel, mask, k_max)
    return pooled - _mean_of_highest(-by_channel, mask, k_min) if k_min else pooled


def _mean_of_highest(responses: Tensor, mask: Tensor, k: int) -> Tensor:
    """Of responses (n, channels, longest), the mean of the ``k`` highest."""
    k = min(k, mask.shape[1])
    top = responses.masked_fill(~mask[:, None], -torch.inf).topk(k, sorted=True).values
    top = top.to(torch.promote_types(top.dtype, torch.float32))
    counts = mask.sum(1).clamp(max=k)[:, None]
    there = torch.arange(k, device=mask.device) < counts
    return top.masked_fill(~there[:, None], 0).sum(2) / counts
