"""Target-oriented deformation (TOD-Net): both vectors of a pair are mapped by what one of them says, and then compared."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vse.pipeline.errors import UserError
from vse.train.kinds import Encoded
from vse.train.models.coupling import ConditionalFlow, ConditionalMlp
from vse.train.models.encoders.base import unit_length
from vse.train.models.similarities.base import Scores, Similarity, SimilaritySettings

_EPS = 1e-8  # the least denominator of a cosine
_BLOCK = {"cpu": 2**11, "cuda": 2**15}  # pairs that are mapped at once
_KEPT = 2**28  # numbers that are kept for the backward pass of a matrix of scores
_SIDES = {  # what the condition is, of i2t and of t2i
    "target": ("captions", "images"),
    "query": ("images", "captions"),
    "caption": ("captions", "captions"),
    "image": ("images", "images"),
    "none": (None, None),
}


class TodNetSettings(SimilaritySettings):
    """Cosines in a space that a condition has deformed (TOD-Net: Matsubara, arXiv 2019).

    With a condition v, an image x and a caption c, the score is

        cos(T(x; v), T(c; v))

    and v is the target of the search: the caption where an image asks, the image where a caption does. T is a flow of coupling
    layers, see :class:`vse.train.models.coupling.ConditionalFlow`. The copies of the paper leave some of its settings blank.
    """

    name: Literal["todnet"] = "todnet"
    condition: Literal["target", "query", "caption", "image", "none"] = Field(
        "target", description="v: the target of a search, its query, always the caption or the image, or nothing"
    )
    transform: Literal["flow", "mlp"] = Field("flow", description="T: a conditional Real-NVP flow, or an MLP of x and v")
    layers: PositiveInt = Field(3, description="coupling layers of the flow")
    hidden: PositiveInt | None = Field(
        None, description="hidden layers of each network; none: 2 in those of the flow, 4 in the MLP, as in the paper"
    )
    width: PositiveInt | None = Field(None, description="of the hidden layers; none: the length of an embedding")
    scale: Literal["exp", "exp_tanh", "sigmoid", "product"] = Field(
        "exp",
        description="what multiplies a half of the flow: exp(s), exp(tanh(s)), sigmoid(s + 2), or s itself, with which T "
        "need not have an inverse",
    )
    identity: bool = Field(
        True,
        description="T(x; v) = x at the start: last layers are 0, and x is added to the output of the MLP; false: no. With "
        "sigmoid each coupling layer begins with a factor of 0.88",
    )
    kept_first: Literal["first", "second"] = Field(
        "first", description="the half of a vector that the first coupling layer leaves as it is"
    )
    networks: Literal["one", "per_direction"] = Field(
        "one", description="one T for both directions of retrieval, or one for each"
    )
    normalize_before: bool = Field(True, description="unit vectors before T, condition and all")
    normalize_after: bool = Field(True, description="unit vectors after T; false: scores are inner products")

    def build(self, dim: int) -> Similarity:
        return TodNet(self, dim)


class TodNet(Similarity):
    """Scores of images with captions in deformed spaces; two matrices if they depend on the direction.

    A pair's score takes a pass through T for each condition and each vector on the other side. What can be shared is: the
    first layer of each network splits into a part of x, which of the first coupling layer does not depend on the pair, and
    a part of v; T(v; v) is computed once for a condition. The rest are matrix products, of a block of pairs at a time; for
    large batches the backward pass computes each block again.
    """

    def __init__(self, settings: TodNetSettings, dim: int) -> None:
        super().__init__()
        self.settings = settings
        self._given = _SIDES[settings.condition]
        self.maps = nn.ModuleList(self._map(dim) for _ in range(1 if settings.networks == "one" else 2))
        width = settings.width or dim
        per_layer = self._hidden * width + dim
        self._kept_of_pair = per_layer * (settings.layers if settings.transform == "flow" else 1)

    @property
    def _hidden(self) -> int:
        return self.settings.hidden or (2 if self.settings.transform == "flow" else 4)

    def _map(self, dim: int) -> ConditionalFlow | ConditionalMlp:
        settings = self.settings
        widths = [settings.width or dim] * self._hidden
        condition_dim = 0 if settings.condition == "none" else dim
        if settings.transform == "mlp":
            return ConditionalMlp(dim, condition_dim, widths, settings.identity)
        if dim % 2:
            raise UserError(
                f"similarity: todnet splits embeddings into halves, and these have {dim} numbers; "
                "take embeddings of an even length, or similarity.transform=mlp"
            )
        kept = 0 if settings.kept_first == "first" else 1
        return ConditionalFlow(dim, condition_dim, settings.layers, widths, settings.scale, settings.identity, kept)

    def forward(self, images: Encoded, captions: Encoded) -> Scores:
        """Scores of every image (row) with every caption (column): (i2t, t2i), or one matrix where these are the same."""
        vectors = {"images": images[0], "captions": captions[0]}
        if self.settings.normalize_before:
            vectors = {side: unit_length(values) for side, values in vectors.items()}
        i2t = self._scores(self.maps[0], self._given[0], vectors)
        if len(self.maps) == 1 and self._given[0] == self._given[1]:
            return i2t
        return i2t, self._scores(self.maps[-1], self._given[1], vectors)

    def _scores(
        self, deform: nn.Module, given: str | None, vectors: dict[str, Tensor]
    ) -> Float[Tensor, "n_images n_captions"]:
        """The scores of one direction, whose conditions are of the side ``given``."""
        assert isinstance(deform, ConditionalFlow | ConditionalMlp)
        if given is None:
            return self._compared(*([part[None] for part in deform.parts(side, None)] for side in vectors.values()))[0]
        if given == "images":
            return self._under(deform, vectors["images"], vectors["captions"])
        return self._under(deform, vectors["captions"], vectors["images"]).T

    def _under(
        self, deform: ConditionalFlow | ConditionalMlp, conditions: Float[Tensor, "k dim"], others: Float[Tensor, "n dim"]
    ) -> Float[Tensor, "k n"]:
        """The score of each condition, a row, with each vector of the other side."""
        k, n = len(conditions), len(others)
        size = max(1, _BLOCK.get(conditions.device.type, 2**15) // max(1, n))
        again = torch.is_grad_enabled() and k * n * self._kept_of_pair > _KEPT

        def block(given: Tensor) -> Tensor:
            own = [part[:, None] for part in deform.parts(given, given)]
            return self._compared(own, deform.parts(others[None], given[:, None]))[:, 0]

        parts = [
            checkpoint(block, part, use_reentrant=False, preserve_rng_state=False) if again else block(part)
            for part in torch.split(conditions, size)
        ]
        return torch.cat([*parts, conditions.new_empty(0, n)])

    def _compared(self, first: list[Tensor], second: list[Tensor]) -> Float[Tensor, "b n m"]:
        """Cosines, or inner products, of vectors (b, n, ...) with vectors (b or 1, m, ...), which are in parts."""
        with torch.autocast(first[0].device.type, enabled=False):
            products = _total([a @ b.transpose(1, 2) for a, b in zip(first, second, strict=True)])
            if not self.settings.normalize_after:
                return products
            lengths = [_total([part.square().sum(2) for part in side]) for side in (first, second)]
            return products * torch.maximum(lengths[0][:, :, None] * lengths[1][:, None], products.new_tensor(_EPS**2)).rsqrt()


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of some tensors, whose axes broadcast."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
