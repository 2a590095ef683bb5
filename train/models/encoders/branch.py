"""Fully connected layers: a branch of the two-branch networks."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.pipeline.presets.schema import Settings
from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes, xavier_linear


class LayersSettings(Settings):
    """Fully connected layers with ReLU and dropout between them and batch normalisation (two-branch paper, section 3.2.1).

    A single layer is the linear variant, without batch normalisation and dropout.
    """

    widths: list[PositiveInt] = Field(default=[2048, 512], min_length=1, description="output lengths of the layers")
    batch_norm: Literal["after_last", "after_first"] = Field(
        "after_last",
        description="after_last: after the last layer (the paper's text); after_first: between the first layer and its ReLU "
        "(the authors' code)",
    )
    batch_norm_momentum: float = Field(
        0.1, gt=0, le=1, description="weight of a batch in the running statistics; 0.9 in the authors' code"
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="after each ReLU")


class BranchSettings(EncoderSettings, LayersSettings):
    """Fully connected layers with ReLU, dropout and batch normalisation (two-branch paper, section 3.2.1)."""

    name: Literal["branch"] = "branch"
    takes: ClassVar = (Kind.VECTORS,)

    def build(self, sizes: Sizes) -> Encoder:
        return Branch(sizes.input_dim, self)


class Branch(Encoder):
    """A network of fully connected layers.

    Parameters
    ----------
    input_dim : length of an input vector
    settings : widths of the layers, place and momentum of the batch normalisation, and dropout
    """

    def __init__(self, input_dim: int, settings: LayersSettings) -> None:
        super().__init__()
        widths = settings.widths
        self.dim = widths[-1]
        inputs = [input_dim, *widths[:-1]]
        self.linears = nn.ModuleList(xavier_linear(n_in, n_out) for n_in, n_out in zip(inputs, widths, strict=True))
        self.normalized_layer = 0 if settings.batch_norm == "after_first" else len(widths) - 1
        self.batch_norm = (
            nn.BatchNorm1d(widths[self.normalized_layer], momentum=settings.batch_norm_momentum) if len(widths) > 1 else None
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> Encoded:
        for number, layer in enumerate(self.linears):
            vectors = layer(vectors)
            if self.batch_norm is not None and number == self.normalized_layer:
                vectors = self.batch_norm(vectors)
            if number < len(self.linears) - 1:
                vectors = self.dropout(vectors.relu())
        return (vectors,)

    def linear_map(self) -> nn.Linear | None:
        layer = self.linears[0]
        assert isinstance(layer, nn.Linear)
        return layer if len(self.linears) == 1 else None
