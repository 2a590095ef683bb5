"""Image encoders that pool a set into one vector: mean, attention, or WELDON's highest and lowest responses."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec, l2_normalize, xavier_linear


class PooledSettings(EncoderSettings):
    """A linear map of each vector of a set, and pooling into one vector, for similarities that compare vectors."""

    name: Literal["pooled"] = "pooled"
    input_kinds: ClassVar = (InputKind.SETS,)
    pooling: Literal["mean", "attention"] = Field(
        "mean",
        description="pooling of the mapped vectors x_k, which have unit length: mean, or attention, sum_k w_k x_k with w = "
        "softmax_k(q . x_k) and a learned vector q",
    )

    def embedding_kind(self, kind: InputKind) -> InputKind:
        return InputKind.VECTORS

    def build(self, spec: EncoderSpec) -> Encoder:
        return PooledEncoder(spec.input_dim, spec.dim, self.pooling == "attention")


class PooledEncoder(Encoder):
    """The linear map and the pooling. ``query`` is the vector q of attention, which starts as zeros (equal weights)."""

    def __init__(self, input_dim: int, dim: int, attends: bool) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.query = nn.Parameter(torch.zeros(dim)) if attends else None

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> BatchVectors:
        mapped = l2_normalize(self.linear(vectors))
        if self.query is None:
            weights = mask / mask.sum(1, keepdim=True)
        else:
            weights = (mapped @ self.query).float().masked_fill(~mask, -torch.inf).softmax(1)
        return ((mapped * weights[:, :, None]).sum(1),)


class WeldonSettings(EncoderSettings):
    """WELDON pooling of CNN positions, and a linear map into the joint space (DSVE-loc, Engilberge et al., CVPR 2018).

    A 1 x 1 convolution computes ``channels`` responses at each position. The output of a channel is the mean of its ``k_max``
    highest responses over all positions plus the mean of its ``k_min`` lowest responses.
    """

    name: Literal["weldon"] = "weldon"
    input_kinds: ClassVar = (InputKind.SETS,)
    channels: PositiveInt = Field(2400, description="number of responses at each position")
    k_max: PositiveInt = Field(15, description="number of highest responses of a channel in the mean; all, if there are fewer")
    k_min: int = Field(15, ge=0, description="number of lowest responses; 0: none")
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout of the pooled channels")

    def embedding_kind(self, kind: InputKind) -> InputKind:
        return InputKind.VECTORS

    def build(self, spec: EncoderSpec) -> Encoder:
        return WeldonEncoder(spec.input_dim, spec.dim, self)


class WeldonEncoder(Encoder):
    """The convolution, the pooling and the linear map."""

    def __init__(self, input_dim: int, dim: int, settings: WeldonSettings) -> None:
        super().__init__()
        self.dim = dim
        self.k_max, self.k_min = settings.k_max, settings.k_min
        self.convolution = xavier_linear(input_dim, settings.channels)
        self.dropout = nn.Dropout(settings.dropout)
        self.linear = xavier_linear(settings.channels, dim)

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> BatchVectors:
        pooled = weldon_pooling(self.convolution(vectors), mask, self.k_max, self.k_min)
        return (self.linear(self.dropout(pooled)),)


def weldon_pooling(
    responses: Float[Tensor, "n longest channels"], mask: Bool[Tensor, "n longest"], k_max: int, k_min: int
) -> Float[Tensor, "n channels"]:
    """Return the mean of the ``k_max`` highest responses plus the mean of the ``k_min`` lowest (Durand et al., CVPR 2016)."""
    by_channel = responses.transpose(1, 2).contiguous()
    pooled = _mean_of_highest(by_channel, mask, k_max)
    return pooled - _mean_of_highest(-by_channel, mask, k_min) if k_min else pooled


def _mean_of_highest(responses: Tensor, mask: Tensor, k: int) -> Tensor:
    k = min(k, mask.shape[1])
    top = responses.masked_fill(~mask[:, None], -torch.inf).topk(k, sorted=True).values
    top = top.to(torch.promote_types(top.dtype, torch.float32))
    counts = mask.sum(1).clamp(max=k)[:, None]
    exists = torch.arange(k, device=mask.device) < counts
    return top.masked_fill(~exists[:, None], 0).sum(2) / counts
