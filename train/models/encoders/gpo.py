"""A set of vectors as one, by the generalised pooling operator: the image encoder of VSE-infinity."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, xavier_linear
from vse.train.models.generalised_pooling import GeneralisedPooling
from vse.train.models.size_augmentation import some_of_sets


class Gpo(EncoderSettings):
    """A linear map of each vector of a set, a small network beside it, and generalised pooling (Chen et al., CVPR 2021).

    It reads regions, positions of a grid, or the vectors of a caption's tokens.
    """

    name: Literal["gpo"] = "gpo"
    takes: ClassVar = (Kind.SETS,)
    residual: bool = Field(
        True,
        description="add to the linear map two layers, the first with dim / 2 outputs, batch normalisation and ReLU, as the "
        "authors' code does with cached features",
    )
    size_augmentation: float = Field(
        0.2, ge=0, lt=1, description="share of the vectors of a set that is left out in training, drawn in each step"
    )

    def gives(self, kind: Kind) -> Kind:
        return Kind.VECTORS

    def build(self, sizes: Sizes) -> Encoder:
        return GpoEncoder(sizes.input_dim, sizes.dim, self)


class GpoEncoder(Encoder):
    """The linear map, the layers beside it, and the pooling."""

    def __init__(self, input_dim: int, dim: int, settings: Gpo) -> None:
        super().__init__()
        self.dim = dim
        self.size_augmentation = settings.size_augmentation
        self.linear = xavier_linear(input_dim, dim)
        self.residual = _ResidualLayers(input_dim, max(1, dim // 2), dim) if settings.residual else None
        self.pooling = GeneralisedPooling()

    def forward(self, vectors: Float[Tensor, "n longest input_dim"], mask: Bool[Tensor, "n longest"]) -> Encoded:
        if self.training and self.size_augmentation:
            mask = some_of_sets(mask, self.size_augmentation)
        rows = vectors[mask]
        mapped = self.linear(rows)
        if self.residual is not None:
            mapped = mapped + self.residual(rows)
        sets = mapped.new_zeros(*mask.shape, self.dim)
        sets[mask] = mapped
        return (self.pooling(sets, mask),)


class _ResidualLayers(nn.Module):
    """Two layers with batch normalisation and ReLU between them, of vectors without any padding."""

    def __init__(self, input_dim: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(input_dim, hidden)
        self.batch_norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, dim)

    def forward(self, rows: Float[Tensor, "n input_dim"]) -> Float[Tensor, "n dim"]:
        hidden = self.first(rows)
        if self.training and len(rows) < 2:  # which have no variance
            norm = self.batch_norm
            hidden = torch.nn.functional.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        else:
            hidden = self.batch_norm(hidden)
        mapped: Tensor = self.last(hidden.relu())
        return mapped
