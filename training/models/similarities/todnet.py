"""Target-oriented deformation (TOD-Net): both vectors of a pair are deformed, given one of them, and then compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid
from torch.utils.checkpoint import checkpoint

from vse.pipeline.errors import UserError
from vse.training.kinds import BatchVectors
from vse.training.models.encoders.base import l2_normalize, xavier_linear
from vse.training.models.similarities.base import Scores, Similarity, SimilaritySettings

_EPS = 1e-8  # the smallest denominator of a cosine
_PAIRS_PER_BLOCK = {"cpu": 2**11, "cuda": 2**15}  # number of pairs that are deformed at a time
_MAX_STORED_NUMBERS = 2**28  # for more numbers in a call, the backward pass computes each block again
_CONDITION_SIDES = {  # the side of the condition, in the directions i2t and t2i
    "target": ("captions", "images"),
    "query": ("images", "captions"),
    "caption": ("captions", "captions"),
    "image": ("images", "images"),
    "none": (None, None),
}

# The scale as a function of a network's output s, and the value of s for which the scale is (nearly) 1.
SCALES_WITH_IDENTITY_INPUT: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, 0.0),
    "exp_tanh": (lambda s: s.tanh().exp(), 0.0),
    "sigmoid": (lambda s: logsigmoid(s + 2).exp(), 0.0),  # starts as 0.88, not 1
    "product": (lambda s: s, 1.0),
}


class ConditionalNetwork(nn.Module):
    """An MLP with ReLU on the concatenation of a vector and its condition.

    Leading axes of vectors and conditions broadcast. Vectors (1, n, dim) and conditions (k, 1, dim) cost n + k passes through
    the first layer, which is linear, and k n passes through the other layers. With ``zero``, the weights of the last layer
    start as 0.
    """

    def __init__(self, dim: int, condition_dim: int, widths: Sequence[int], n_out: int, zero: bool) -> None:
        super().__init__()
        self.dim = dim
        inputs = [dim + condition_dim, *widths]
        self.linears = nn.ModuleList(xavier_linear(n_in, n) for n_in, n in zip(inputs, [*widths, n_out], strict=True))
        if zero:
            nn.init.zeros_(self.last_layer.weight)

    @property
    def last_layer(self) -> nn.Linear:
        last = self.linears[-1]
        assert isinstance(last, nn.Linear)
        return last

    def forward(self, x: Float[Tensor, "... dim"], condition: Float[Tensor, "... condition_dim"] | None) -> Tensor:
        first, *rest = self.linears
        assert isinstance(first, nn.Linear)
        hidden = linear(x, first.weight[:, : self.dim], first.bias)
        if condition is not None:
            hidden = hidden + linear(condition, first.weight[:, self.dim :])
        for layer in rest:
            hidden = layer(hidden.relu())
        return hidden


class ConditionalMlp(nn.Module):
    """The deformation T(x; v) of a vector x under a condition v, as an MLP (TOD-Net paper, section V-C).

    With ``identity``, T(x; v) is x plus the output of the MLP, which starts as 0. Otherwise T(x; v) is the output of the MLP.
    """

    def __init__(self, dim: int, condition_dim: int, widths: Sequence[int], identity: bool) -> None:
        super().__init__()
        self.network = ConditionalNetwork(dim, condition_dim, widths, dim, identity)
        self.adds_input = identity

    def deformed_parts(self, x: Float[Tensor, "... dim"], condition: Tensor | None) -> list[Tensor]:
        """Return the deformed vectors T(x; v) in a list, as a flow returns its two halves."""
        out = self.network(x, condition).to(x.dtype)
        return [x + out if self.adds_input else out]

    def forward(self, x: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """Return the vectors x, deformed under the conditions: T(x; v). Leading axes broadcast."""
        return self.deformed_parts(x, condition)[0]


class ConditionalFlow(nn.Module):
    """The deformation T(x; v) of a vector x under a condition v, as a conditional Real-NVP of coupling layers.

    See the TOD-Net paper, section III-C, and Dinh et al., ICLR 2017. A layer keeps one half x_k of the vector, and changes the
    other half x_m:

        (s, t) = network(x_k, v),  y_m = x_m * scale(s) + t

    The next layer keeps the other half. The inverse is x_m = (y_m - t) / scale(s), layer by layer from the last layer.

    ``dim`` : length of a vector, an even number.
    ``condition_dim`` : length of a condition; 0: no condition.
    ``layers`` : number of coupling layers.
    ``widths`` : widths of the hidden layers of each network.
    ``scale`` : a key of :data:`SCALES_WITH_IDENTITY_INPUT`.
    ``identity`` : whether scale(s) starts as 1 (for ``sigmoid``, as 0.88) and t as 0.
    ``kept`` : the half that the first layer keeps, 0 or 1.
    """

    def __init__(
        self, dim: int, condition_dim: int, layers: int, widths: Sequence[int], scale: str, identity: bool, kept: int
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"vectors of the odd length {dim} have no halves")
        self.networks = nn.ModuleList(
            ConditionalNetwork(dim // 2, condition_dim, widths, dim, identity) for _ in range(layers)
        )
        self._scale, at_identity = SCALES_WITH_IDENTITY_INPUT[scale]
        self._first_kept_half = kept
        if identity:
            for network in self.networks:
                assert isinstance(network, ConditionalNetwork)
                nn.init.constant_(network.last_layer.bias[: dim // 2], at_identity)

    def deformed_parts(self, x: Float[Tensor, "... dim"], condition: Tensor | None) -> list[Tensor]:
        """Return both halves of the deformed vectors T(x; v). The half that a single layer keeps is not broadcast."""
        halves = list(x.chunk(2, -1))
        for k, network in enumerate(self.networks):
            kept = (self._first_kept_half + k) % 2
            scale, shift = self._scale_and_shift(network, halves[kept], condition)
            halves[1 - kept] = torch.addcmul(shift, halves[1 - kept], scale)
        return halves

    def forward(self, x: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """Return the vectors x, deformed under the conditions: T(x; v). Leading axes broadcast."""
        return _concatenate_halves(self.deformed_parts(x, condition))

    def inverse(self, y: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """Return the vectors x whose deformation T(x; v) is y."""
        halves = list(y.chunk(2, -1))
        for k, network in reversed(list(enumerate(self.networks))):
            kept = (self._first_kept_half + k) % 2
            scale, shift = self._scale_and_shift(network, halves[kept], condition)
            halves[1 - kept] = (halves[1 - kept] - shift) / scale
        return _concatenate_halves(halves)

    def _scale_and_shift(self, network: nn.Module, kept: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        s, t = network(kept, condition).to(kept.dtype).chunk(2, -1)
        return self._scale(s), t


def _concatenate_halves(halves: Sequence[Tensor]) -> Tensor:
    first, second = halves
    total = first + second  # has the broadcast shape
    return torch.cat([first.expand_as(total), second.expand_as(total)], -1)


class TodNetSettings(SimilaritySettings):
    """Cosines in a space that is deformed by a condition (TOD-Net: Matsubara, arXiv 2019).

    The score of an image x and a caption y under a condition v is cos(T(x; v), T(y; v)). By default, v is the target of the
    search: the caption y if an image is the query, the image x if a caption is the query. T is by default a flow of coupling
    layers, see :class:`ConditionalFlow`. The available copies of the paper leave some settings blank.
    """

    measures_pairs: ClassVar = True

    name: Literal["todnet"] = "todnet"
    condition: Literal["target", "query", "caption", "image", "none"] = Field(
        "target", description="v: the target of a search, its query, always the caption or the image, or nothing"
    )
    transform: Literal["flow", "mlp"] = Field("flow", description="T: a conditional Real-NVP flow, or an MLP of x and v")
    layers: PositiveInt = Field(3, description="number of coupling layers of the flow")
    hidden: PositiveInt | None = Field(
        None, description="number of hidden layers of each network; none: 2 in the flow, 4 in the MLP, as in the paper"
    )
    width: PositiveInt | None = Field(None, description="width of the hidden layers; none: the length of an embedding")
    scale: Literal["exp", "exp_tanh", "sigmoid", "product"] = Field(
        "exp",
        description="factor of the changed half of a coupling layer: exp(s), exp(tanh(s)), sigmoid(s + 2), or s (product), "
        "which may be 0, so that T need not have an inverse",
    )
    identity: bool = Field(
        True,
        description="start with T(x; v) = x: last layers start as 0, and x is added to the output of the MLP. With sigmoid "
        "the factors of the coupling layers start as 0.88",
    )
    kept_first: Literal["first", "second"] = Field(
        "first", description="which half of a vector the first coupling layer keeps: the first or the second half"
    )
    networks: Literal["one", "per_direction"] = Field(
        "one", description="one T for both directions of retrieval, or one for each"
    )
    normalize_before: bool = Field(True, description="normalise vectors and conditions to unit length before T")
    normalize_after: bool = Field(True, description="unit vectors after T; false: scores are inner products")

    def build(self, dim: int) -> Similarity:
        return TodNetSimilarity(self, dim)


class TodNetSimilarity(Similarity):
    """Scores of images with captions in deformed spaces; two matrices if scores depend on the direction.

    Each combination of a condition v (of one side) and a vector x (of the other side) needs a pass through the deformation T.
    Pairs are scored in blocks. For large batches the backward pass computes each block again. ``maps`` holds the deformations:
    one for both directions, or one for each.
    """

    def __init__(self, settings: TodNetSettings, dim: int) -> None:
        super().__init__()
        self.settings = settings
        self._condition_sides = _CONDITION_SIDES[settings.condition]
        self.maps = nn.ModuleList(self._build_deformation(dim) for _ in range(1 if settings.networks == "one" else 2))
        width = settings.width or dim
        per_layer = self._n_hidden_layers * width + dim
        self._numbers_per_pair = per_layer * (settings.layers if settings.transform == "flow" else 1)

    @property
    def _n_hidden_layers(self) -> int:
        return self.settings.hidden or (2 if self.settings.transform == "flow" else 4)

    def _build_deformation(self, dim: int) -> ConditionalFlow | ConditionalMlp:
        settings = self.settings
        widths = [settings.width or dim] * self._n_hidden_layers
        condition_dim = 0 if settings.condition == "none" else dim
        if settings.transform == "mlp":
            return ConditionalMlp(dim, condition_dim, widths, settings.identity)
        if dim % 2:
            raise UserError(
                f"similarity: todnet splits embeddings into halves, but their length is {dim}; "
                "use embeddings of an even length, or similarity.transform=mlp"
            )
        kept = 0 if settings.kept_first == "first" else 1
        return ConditionalFlow(dim, condition_dim, settings.layers, widths, settings.scale, settings.identity, kept)

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Scores:
        vectors = {"images": images[0], "captions": captions[0]}
        if self.settings.normalize_before:
            vectors = {side: l2_normalize(values) for side, values in vectors.items()}
        i2t = self._direction_scores(self.maps[0], self._condition_sides[0], vectors)
        if len(self.maps) == 1 and self._condition_sides[0] == self._condition_sides[1]:
            return i2t
        return i2t, self._direction_scores(self.maps[-1], self._condition_sides[1], vectors)

    def measure_pairs(self, images: BatchVectors, captions: BatchVectors) -> dict[str, float]:
        """Return ``deformation``, the mean distance between a vector x and its deformation T(x; v).

        The mean is over both vectors of each pair and both directions. If scores are cosines, both x and T(x; v) are scaled to
        unit length, so the distance is 0 if T keeps the direction of every vector, and 2 at most.
        """
        vectors = {"images": images[0], "captions": captions[0]}
        if self.settings.normalize_before:
            vectors = {side: l2_normalize(values) for side, values in vectors.items()}
        distances = []
        for deform, side in zip((self.maps[0], self.maps[-1]), self._condition_sides, strict=True):
            for x in vectors.values():
                deformed = deform(x, None if side is None else vectors[side])
                if self.settings.normalize_after:
                    x, deformed = l2_normalize(x), l2_normalize(deformed)
                distances.append((deformed - x).norm(dim=1).mean())
        return {"deformation": float(torch.stack(distances).mean().detach())}

    def _direction_scores(
        self, deform: nn.Module, condition_side: str | None, vectors: dict[str, Tensor]
    ) -> Float[Tensor, "n_images n_captions"]:
        assert isinstance(deform, ConditionalFlow | ConditionalMlp)
        if condition_side is None:
            return self._compare(*([part[None] for part in deform.deformed_parts(side, None)] for side in vectors.values()))[0]
        if condition_side == "images":
            return self._score_conditions(deform, vectors["images"], vectors["captions"])
        return self._score_conditions(deform, vectors["captions"], vectors["images"]).T

    def _score_conditions(
        self, deform: ConditionalFlow | ConditionalMlp, conditions: Float[Tensor, "k dim"], others: Float[Tensor, "n dim"]
    ) -> Float[Tensor, "k n"]:
        """Return the scores of conditions (rows), which are images or captions, with vectors of the other side (columns)."""
        k, n = len(conditions), len(others)
        size = max(1, _PAIRS_PER_BLOCK.get(conditions.device.type, 2**15) // max(1, n))
        recompute = torch.is_grad_enabled() and k * n * self._numbers_per_pair > _MAX_STORED_NUMBERS

        def block(rows: Tensor) -> Tensor:
            own = [part[:, None] for part in deform.deformed_parts(rows, rows)]
            return self._compare(own, deform.deformed_parts(others[None], rows[:, None]))[:, 0]

        parts = [
            checkpoint(block, part, use_reentrant=False, preserve_rng_state=False) if recompute else block(part)
            for part in torch.split(conditions, size)
        ]
        return torch.cat([*parts, conditions.new_empty(0, n)])

    def _compare(self, first: list[Tensor], second: list[Tensor]) -> Float[Tensor, "b n m"]:
        """Return the cosines or inner products of vectors (b, n, dim) with vectors (b or 1, m, dim).

        Both arguments are lists of parts, which form the vectors if they are concatenated.
        """
        with torch.autocast(first[0].device.type, enabled=False):
            products = _sum_tensors([a @ b.transpose(1, 2) for a, b in zip(first, second, strict=True)])
            if not self.settings.normalize_after:
                return products
            lengths = [_sum_tensors([part.square().sum(2) for part in side]) for side in (first, second)]
            return products * torch.maximum(lengths[0][:, :, None] * lengths[1][:, None], products.new_tensor(_EPS**2)).rsqrt()


def _sum_tensors(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
