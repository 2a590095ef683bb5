"""An encoder that describes vectors by their similarities to anchor vectors."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, unit_length


class Relative(EncoderSettings):
    """The k highest cosines with ``model.dim`` anchors, raised to a power, and 0 elsewhere (Norelli et al., NeurIPS 2023).

    The solver ``asif`` sets the anchors. Negative cosines become 0.
    """

    name: Literal["relative"] = "relative"
    takes: ClassVar = (Kind.VECTORS,)

    def build(self, sizes: Sizes) -> Encoder:
        return RelativeEncoder(sizes.input_dim, sizes.dim)


class RelativeEncoder(Encoder):
    """The anchors (dim, input_dim) of unit length, the number of cosines that are kept, and their power; not trained."""

    anchors: Tensor
    k: Tensor
    power: Tensor

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.anchors = nn.Parameter(unit_length(torch.randn(dim, input_dim)), requires_grad=False)
        self.register_buffer("k", torch.tensor(dim))
        self.register_buffer("power", torch.tensor(1.0))

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> Encoded:
        cosines = unit_length(vectors.float()) @ self.anchors.T
        highest, places = cosines.topk(int(self.k), dim=1)
        return (torch.zeros_like(cosines).scatter_(1, places, highest.clamp(min=0) ** self.power),)
