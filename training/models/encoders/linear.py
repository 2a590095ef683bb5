"""Encoders of linear layers: from the identity and one linear map to a multi-layer perceptron and residual blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import gelu

from vse.pipeline.presets.schema import Settings
from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec, l2_normalize, xavier_linear


class MlpSettings(EncoderSettings):
    """Linear maps into the joint space with GELU and dropout between them, applied to each vector of a set.

    With one hidden layer, this encoder is the projection head of SimCLR (Chen et al., 2020, section 4.2), but with GELU
    (Hendrycks and Gimpel, 2016) instead of ReLU. There is no batch normalisation, so several processes can train the encoder.
    """

    name: Literal["mlp"] = "mlp"
    input_kinds: ClassVar = (InputKind.VECTORS, InputKind.SETS)
    hidden: list[PositiveInt] = Field(default=[2048], min_length=1, description="output lengths of the layers before the last")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout after each GELU")

    def build(self, spec: EncoderSpec) -> Encoder:
        return MlpEncoder(spec.input_dim, self, spec.dim)


class MlpEncoder(Encoder):
    """The network of :class:`MlpSettings`. The mask of a set is returned unchanged."""

    def __init__(self, input_dim: int, settings: MlpSettings, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linears = nn.ModuleList(xavier_linear(*sizes) for sizes in pairwise([input_dim, *settings.hidden, dim]))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, vectors: Tensor, *mask: Tensor) -> BatchVectors:
        *hidden, last = self.linears
        for layer in hidden:
            vectors = self.dropout(gelu(layer(vectors)))
        return last(vectors), *mask


class ResidualSettings(EncoderSettings):
    """A linear map y = W x + b, then blocks y <- y + V gelu(U norm(y)), applied to each vector of a set.

    The norm is layer normalisation (the pre-norm form: Xiong et al., 2020). V starts as 0, so that the encoder starts as the
    linear map (residual blocks: He et al., 2016; zero start: Goyal et al., 2017, section 5.1).
    """

    name: Literal["residual"] = "residual"
    input_kinds: ClassVar = (InputKind.VECTORS, InputKind.SETS)
    blocks: PositiveInt = Field(1, description="number of blocks")
    width: PositiveInt = Field(2048, description="length of the hidden vector of a block")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the output of a block")

    def build(self, spec: EncoderSpec) -> Encoder:
        return ResidualEncoder(spec.input_dim, self, spec.dim)


class ResidualEncoder(Encoder):
    """The network of :class:`ResidualSettings`. The mask of a set is returned unchanged."""

    def __init__(self, input_dim: int, settings: ResidualSettings, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.blocks = nn.ModuleList(_ResidualBlock(dim, settings.width, settings.dropout) for _ in range(settings.blocks))

    def forward(self, vectors: Tensor, *mask: Tensor) -> BatchVectors:
        vectors = self.linear(vectors)
        for block in self.blocks:
            vectors = vectors + block(vectors)
        return vectors, *mask


class _ResidualBlock(nn.Module):
    def __init__(self, dim: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.inner, self.outer = xavier_linear(dim, width), xavier_linear(width, dim)
        nn.init.zeros_(self.outer.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, vectors: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.outer(gelu(self.inner(self.norm(vectors)))))
        return added


class DenseLayersSettings(Settings):
    """Fully connected layers with ReLU, dropout and batch normalisation (two-branch paper, section 3.2.1).

    If there is a single layer, it has no ReLU, no dropout and no batch normalisation.
    """

    widths: list[PositiveInt] = Field(default=[2048, 512], min_length=1, description="output lengths of the layers")
    batch_norm: Literal["after_last", "after_first"] = Field(
        "after_last",
        description="place of batch normalisation: after_last, after the last layer (the text of the two-branch paper); "
        "after_first, between the first layer and its ReLU (the paper's code)",
    )
    batch_norm_momentum: float = Field(
        0.1, gt=0, le=1, description="weight of a batch in the running statistics; 0.9 in the code of the two-branch paper"
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout after each ReLU")


class BranchSettings(EncoderSettings, DenseLayersSettings):
    """An encoder of fully connected layers, a branch of the two-branch networks (two-branch paper, section 3.2.1)."""

    name: Literal["branch"] = "branch"
    input_kinds: ClassVar = (InputKind.VECTORS,)

    def build(self, spec: EncoderSpec) -> Encoder:
        return DenseLayersEncoder(spec.input_dim, self)


class DenseLayersEncoder(Encoder):
    """A stack of fully connected layers, with the settings :class:`DenseLayersSettings`."""

    def __init__(self, input_dim: int, settings: DenseLayersSettings) -> None:
        super().__init__()
        widths = settings.widths
        self.dim = widths[-1]
        inputs = [input_dim, *widths[:-1]]
        self.linears = nn.ModuleList(xavier_linear(n_in, n_out) for n_in, n_out in zip(inputs, widths, strict=True))
        self.normalized_layer_index = 0 if settings.batch_norm == "after_first" else len(widths) - 1
        self.batch_norm = (
            nn.BatchNorm1d(widths[self.normalized_layer_index], momentum=settings.batch_norm_momentum)
            if len(widths) > 1
            else None
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> BatchVectors:
        for k, layer in enumerate(self.linears):
            vectors = layer(vectors)
            if self.batch_norm is not None and k == self.normalized_layer_index:
                vectors = self.batch_norm(vectors)
            if k < len(self.linears) - 1:
                vectors = self.dropout(vectors.relu())
        return (vectors,)

    def single_linear_layer(self) -> nn.Linear | None:
        layer = self.linears[0]
        assert isinstance(layer, nn.Linear)
        return layer if len(self.linears) == 1 else None


class LinearSettings(EncoderSettings):
    """A linear map into the joint space, f(x) = W x + b (VSE++ paper, Eq. 1), applied to each vector of a set."""

    name: Literal["linear"] = "linear"
    input_kinds: ClassVar = (InputKind.VECTORS, InputKind.SETS)

    def build(self, spec: EncoderSpec) -> Encoder:
        return LinearEncoder(spec.input_dim, spec.dim)


class LinearEncoder(Encoder):
    """A linear map of vectors. The mask of a set is returned unchanged."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)

    def forward(self, vectors: Tensor, *mask: Tensor) -> BatchVectors:
        return self.linear(vectors), *mask

    def single_linear_layer(self) -> nn.Linear:
        return self.linear


class IdentitySettings(EncoderSettings):
    """An encoder that returns cached vectors unchanged, for image and caption features that already share a space."""

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
    """The network of :class:`WeightedSettings`. Its ``weights`` (dim,) start as 1."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = xavier_linear(input_dim, dim)
        self.weights = nn.Parameter(torch.ones(dim))

    def forward(self, vectors: Float[Tensor, "n input_dim"]) -> BatchVectors:
        return (self.weights * l2_normalize(self.linear(vectors)),)


class RelativeSettings(EncoderSettings):
    """An encoder that describes a vector by its cosines with ``model.dim`` anchors (ASIF: Norelli et al., NeurIPS 2023).

    The k highest cosines are raised to a power. The others become 0. The solver ``asif`` sets k and the power, and chooses the
    anchors among the vectors of training images (or captions).
    """

    name: Literal["relative"] = "relative"
    input_kinds: ClassVar = (InputKind.VECTORS,)

    def build(self, spec: EncoderSpec) -> Encoder:
        return RelativeEncoder(spec.input_dim, spec.dim)


class RelativeEncoder(Encoder):
    """An encoder that returns the cosines of a vector with fixed anchors. It has no trained weights.

    ``anchors`` : (dim, input_dim) vectors of unit length.
    ``k`` : number of highest cosines of a vector that are kept; all others become 0, and so do negative cosines.
    ``power`` : exponent of the kept cosines.
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
        highest, columns = cosines.topk(int(self.k), dim=1)
        return (torch.zeros_like(cosines).scatter_(1, columns, highest.clamp(min=0) ** self.power),)
