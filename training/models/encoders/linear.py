"""Encoders with at most one layer: the identity, a linear map, a weighted linear map, and cosines with anchors."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec, l2_normalize, xavier_linear


class LinearSettings(EncoderSettings):
    """A linear map into the joint space, f(x) = W x + b (VSE++ paper, Eq. 1), applied to each vector of a set."""

    name: Literal["linear"] = "linear"
    input_kinds: ClassVar = (InputKind.VECTORS, InputKind.SETS)

    def build(self, spec: EncoderSpec) -> Encoder:
        return LinearEncoder(spec.input_dim, spec.dim)


class LinearEncoder(Encoder):
    """The linear map. The mask of sets is returned unchanged."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)

    def forward(self, vectors: Tensor, *mask: Tensor) -> BatchVectors:
        return self.linear(vectors), *mask

    def single_linear_layer(self) -> nn.Linear:
        return self.linear


class IdentitySettings(EncoderSettings):
    """Cached vectors, unchanged, for image and caption features that already share a space. Nothing is learned."""

    name: Literal["identity"] = "identity"
    input_kinds: ClassVar = (InputKind.VECTORS, InputKind.SETS)

    def build(self, spec: EncoderSpec) -> Encoder:
        return IdentityEncoder(spec.input_dim)


class IdentityEncoder(Encoder):
    """An encoder without weights, which returns the input in float32."""

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.dim = input_dim

    def forward(self, vectors: Tensor, *mask: Tensor) -> BatchVectors:
        return vectors.float(), *mask


class WeightedSettings(EncoderSettings):
    """A linear map to unit vectors u, and a weight r for each dimension: f(x) = r * u, u = (W x + b) / |W x + b|.

    The weighting follows Li et al., ICLR 2025.
    """

    name: Literal["weighted"] = "weighted"
    input_kinds: ClassVar = (InputKind.VECTORS,)

    def build(self, spec: EncoderSpec) -> Encoder:
        return WeightedEncoder(spec.input_dim, spec.dim)


class WeightedEncoder(Encoder):
    """The linear map, and the weights (dim,), which start as 1."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.weights = nn.Parameter(torch.ones(dim))

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> BatchVectors:
        return (self.weights * l2_normalize(self.linear(vectors)),)


class RelativeSettings(EncoderSettings):
    """The k highest cosines with ``model.dim`` anchors, raised to a power, and 0 elsewhere (Norelli et al., NeurIPS 2023).

    Anchors are vectors of training items. The solver ``asif`` chooses them.
    """

    name: Literal["relative"] = "relative"
    input_kinds: ClassVar = (InputKind.VECTORS,)

    def build(self, spec: EncoderSpec) -> Encoder:
        return RelativeEncoder(spec.input_dim, spec.dim)


class RelativeEncoder(Encoder):
    """An encoder of cosines with anchors. None of its tensors is trained.

    ``anchors`` : (dim, input_dim) vectors of unit length.
    ``k`` : number of cosines that are kept.
    ``power`` : exponent of the cosines.
    """

    anchors: Tensor
    k: Tensor
    power: Tensor

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.anchors = nn.Parameter(l2_normalize(torch.randn(dim, input_dim)), requires_grad=False)
        self.register_buffer("k", torch.tensor(dim))
        self.register_buffer("power", torch.tensor(1.0))

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> BatchVectors:
        cosines = l2_normalize(vectors.float()) @ self.anchors.T
        highest, places = cosines.topk(int(self.k), dim=1)
        return (torch.zeros_like(cosines).scatter_(1, places, highest.clamp(min=0) ** self.power),)
