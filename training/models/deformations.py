"""Deformations T(x; v) of a vector x under a condition v: an MLP, and an invertible flow of coupling layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

from vse.training.models.encoders.base import xavier_linear

# The scale as a function of a network's output s, and the value of s for which the scale is (nearly) 1.
SCALES_WITH_IDENTITY_INPUT: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, 0.0),
    "exp_tanh": (lambda s: s.tanh().exp(), 0.0),
    "sigmoid": (lambda s: logsigmoid(s + 2).exp(), 0.0),  # starts as 0.88, not 1
    "product": (lambda s: s, 1.0),
}


class ConditionalNetwork(nn.Module):
    """An MLP with ReLU on the concatenation of a vector and its condition.

    Leading axes of vectors and conditions broadcast. The first layer is linear, so it maps n vectors (1, n, dim) and k
    conditions (k, 1, condition_dim) separately, and adds the results. The other layers compute all k n combinations. With
    ``starts_at_zero``, the weights of the last layer start as 0.
    """

    def __init__(self, dim: int, condition_dim: int, widths: Sequence[int], n_out: int, starts_at_zero: bool) -> None:
        super().__init__()
        self.dim = dim
        inputs = [dim + condition_dim, *widths]
        self.linears = nn.ModuleList(xavier_linear(n_in, n) for n_in, n in zip(inputs, [*widths, n_out], strict=True))
        if starts_at_zero:
            nn.init.zeros_(self.last_layer.weight)

    @property
    def _first_layer(self) -> nn.Linear:
        first = self.linears[0]
        assert isinstance(first, nn.Linear)
        return first

    @property
    def last_layer(self) -> nn.Linear:
        last = self.linears[-1]
        assert isinstance(last, nn.Linear)
        return last

    def project_condition(self, condition: Float[Tensor, "... condition_dim"]) -> Float[Tensor, "... width"]:
        """Return the product of the condition with the weights that the first layer has for the condition."""
        return linear(condition, self._first_layer.weight[:, self.dim :])

    def forward(
        self,
        x: Float[Tensor, "... dim"],
        condition: Float[Tensor, "... condition_dim"] | None,
        projection: Float[Tensor, "... width"] | None = None,
    ) -> Tensor:
        """Return the output for vectors x under conditions.

        ``projection`` is the result of :meth:`project_condition`. If it is given, ``condition`` is not used.
        """
        if projection is None and condition is not None:
            projection = self.project_condition(condition)
        hidden = linear(x, self._first_layer.weight[:, : self.dim], self._first_layer.bias)
        if projection is not None:
            hidden = hidden + projection
        for layer in self.linears[1:]:
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

    def project_condition(self, condition: Tensor) -> list[Tensor]:
        """Return the products of the conditions with the weights of the first layer, as a list of one tensor.

        The list can be computed once for many vectors, and passed to :meth:`compute_deformed_parts`.
        """
        return [self.network.project_condition(condition)]

    def compute_deformed_parts(
        self, x: Float[Tensor, "... dim"], condition: Tensor | None, projections: Sequence[Tensor | None] = (None,)
    ) -> list[Tensor]:
        """Return the deformed vectors T(x; v) as a list of one tensor. :class:`ConditionalFlow` returns a list of two halves.

        ``projections`` is the result of :meth:`project_condition`. If it is given, ``condition`` is not used.
        """
        out = self.network(x, condition, projections[0]).to(x.dtype)
        return [x + out if self.adds_input else out]

    def forward(self, x: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """Return the vectors x, deformed under the conditions: T(x; v). Leading axes broadcast."""
        return self.compute_deformed_parts(x, condition)[0]


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
    ``scale`` : name of the function scale(s): ``exp``, ``exp_tanh``, ``sigmoid`` or ``product``.
    ``identity`` : whether t starts as 0, and scale(s) as 1 (``sigmoid``: as 0.88), so that T(x; v) starts (nearly) as x.
    ``kept_half`` : the half that the first layer keeps, 0 or 1.
    """

    def __init__(
        self, dim: int, condition_dim: int, layers: int, widths: Sequence[int], scale: str, identity: bool, kept_half: int
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"vectors of the odd length {dim} have no halves")
        self.networks = nn.ModuleList(
            ConditionalNetwork(dim // 2, condition_dim, widths, dim, identity) for _ in range(layers)
        )
        self._scale, at_identity = SCALES_WITH_IDENTITY_INPUT[scale]
        self._first_kept_half = kept_half
        if identity:
            for network in self.networks:
                assert isinstance(network, ConditionalNetwork)
                nn.init.constant_(network.last_layer.bias[: dim // 2], at_identity)

    def project_condition(self, condition: Tensor) -> list[Tensor]:
        """Return the products of the conditions with the first weights of each network, one tensor for each coupling layer.

        The list can be computed once for many vectors, and passed to :meth:`compute_deformed_parts`.
        """
        return [network.project_condition(condition) for network in self.networks if isinstance(network, ConditionalNetwork)]

    def compute_deformed_parts(
        self, x: Float[Tensor, "... dim"], condition: Tensor | None, projections: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        """Return the two halves of the deformed vectors T(x; v).

        A single coupling layer changes only one half. The other half is the half of x, without the broadcast axes.
        ``projections`` is the result of :meth:`project_condition`. If it is given, ``condition`` is not used.
        """
        halves = list(x.chunk(2, -1))
        for k, network in enumerate(self.networks):
            kept = (self._first_kept_half + k) % 2
            projection = None if projections is None else projections[k]
            scale, shift = self._scale_and_shift(network, halves[kept], condition, projection)
            halves[1 - kept] = torch.addcmul(shift, halves[1 - kept], scale)
        return halves

    def forward(self, x: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """Return the vectors x, deformed under the conditions: T(x; v). Leading axes broadcast."""
        return _concatenate_halves(self.compute_deformed_parts(x, condition))

    def inverse(self, y: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """Return the vectors x whose deformation T(x; v) is y."""
        halves = list(y.chunk(2, -1))
        for k, network in reversed(list(enumerate(self.networks))):
            kept = (self._first_kept_half + k) % 2
            scale, shift = self._scale_and_shift(network, halves[kept], condition)
            halves[1 - kept] = (halves[1 - kept] - shift) / scale
        return _concatenate_halves(halves)

    def _scale_and_shift(
        self, network: nn.Module, kept: Tensor, condition: Tensor | None, projection: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        s, t = network(kept, condition, projection).to(kept.dtype).chunk(2, -1)
        return self._scale(s), t


def _concatenate_halves(halves: Sequence[Tensor]) -> Tensor:
    first, second = halves
    total = first + second  # has the broadcast shape
    return torch.cat([first.expand_as(total), second.expand_as(total)], -1)
