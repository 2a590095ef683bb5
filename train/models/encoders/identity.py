"""An encoder that returns cached vectors unchanged."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes


class IdentitySettings(EncoderSettings):
    """Cached vectors, unchanged, for features that already share a space. Nothing is learned; ``dim`` is their length."""

    name: Literal["identity"] = "identity"
    takes: ClassVar = (Kind.VECTORS, Kind.SETS)

    def build(self, sizes: Sizes) -> Encoder:
        return IdentityEncoder(sizes.input_dim)


class IdentityEncoder(Encoder):
    """An encoder without weights; a mask is passed through."""

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.dim = input_dim

    def forward(self, vectors: Tensor, *mask: Tensor) -> Encoded:
        return vectors.float(), *mask
