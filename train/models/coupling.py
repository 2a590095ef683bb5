"""Maps of vectors that depend on a condition: the conditional Real-NVP flow, which has an inverse, and an MLP beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

from vse.train.models.encoders.base import xavier_linear

# What a network's output s becomes before it multiplies, and its value where that is the identity.
SCALES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (torch.exp, 0.0),
    "exp_tanh": (lambda s: s.tanh().exp(), 0.0),
    "sigmoid": (lambda s: logsigmoid(s + 2).exp(), 0.0),  # 0.88 at the start, not 1
    "product": (lambda s: s, 1.0),
}


class ConditionalNetwork(nn.Module):
    """An MLP with ReLU on a vector beside its condition.

    Both may have further axes in front, which broadcast: the first layer is computed for each of them alone, and its sum for
    every combination. So vectors (1, n, dim) and conditions (k, 1, dim) cost n + k passes through the first layer, and k n
    through the others.

    Parameters
    ----------
    dim, condition_dim : lengths of a vector and of its condition; 0: there is none
    widths : outputs of the layers before the last
    n_out : outputs of the last
    zero : whether the last layer's weights are 0 at the start
    """

    def __init__(self, dim: int, condition_dim: int, widths: Sequence[int], n_out: int, zero: bool) -> None:
        super().__init__()
        self.dim = dim
        inputs = [dim + condition_dim, *widths]
        self.linears = nn.ModuleList(xavier_linear(n_in, n) for n_in, n in zip(inputs, [*widths, n_out], strict=True))
        if zero:
            nn.init.zeros_(self.last.weight)

    @property
    def last(self) -> nn.Linear:
        """The layer without a ReLU."""
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
    """T(x; c) as an MLP of x and c: any continuous map, which need not be one to one (TOD-Net paper, section V-C).

    Where it is the identity at the start, its output is added to x.
    """

    def __init__(self, dim: int, condition_dim: int, widths: Sequence[int], identity: bool) -> None:
        super().__init__()
        self.network = ConditionalNetwork(dim, condition_dim, widths, dim, identity)
        self.adds = identity

    def parts(self, x: Float[Tensor, "... dim"], condition: Tensor | None) -> list[Tensor]:
        """T(x; c), in one part."""
        out = self.network(x, condition).to(x.dtype)
        return [x + out if self.adds else out]

    def forward(self, x: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """T(x; c) of vectors and conditions whose axes in front broadcast."""
        return self.parts(x, condition)[0]


class ConditionalFlow(nn.Module):
    """T(x; c) as coupling layers, a conditional Real-NVP (TOD-Net paper, section III-C; Dinh et al., ICLR 2017).

    A layer keeps one half x_k of the vector, and moves the other one, x_m, by what a network makes of x_k and the condition:

        (s, t) = network(x_k, c),  y_m = x_m * scale(s) + t

    Halves alternate. The inverse is x_m = (y_m - t) / scale(s), layer by layer from the last.

    Parameters
    ----------
    dim : even length of a vector
    condition_dim : length of a condition; 0: there is none
    layers : how many
    widths : of the hidden layers of each network
    scale : one of :data:`SCALES`
    identity : whether scale(s) is 1 (of ``sigmoid``, 0.88) and t 0 at the start
    kept : the half that the first layer keeps, 0 or 1
    """

    def __init__(
        self, dim: int, condition_dim: int, layers: int, widths: Sequence[int], scale: str, identity: bool, kept: int
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"{dim} numbers have no halves")
        self.networks = nn.ModuleList(
            ConditionalNetwork(dim // 2, condition_dim, widths, dim, identity) for _ in range(layers)
        )
        self._scale, at_identity = SCALES[scale]
        self._kept = kept
        if identity:
            for network in self.networks:
                assert isinstance(network, ConditionalNetwork)
                nn.init.constant_(network.last.bias[: dim // 2], at_identity)

    def parts(self, x: Float[Tensor, "... dim"], condition: Tensor | None) -> list[Tensor]:
        """T(x; c) as its halves, one of which may lack axes that the conditions alone have."""
        halves = list(x.chunk(2, -1))
        for number, network in enumerate(self.networks):
            kept = (self._kept + number) % 2
            scale, shift = self._of(network, halves[kept], condition)
            halves[1 - kept] = torch.addcmul(shift, halves[1 - kept], scale)
        return halves

    def forward(self, x: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """T(x; c) of vectors and conditions whose axes in front broadcast."""
        return _joined(self.parts(x, condition))

    def inverse(self, y: Float[Tensor, "... dim"], condition: Tensor | None = None) -> Tensor:
        """The x whose T(x; c) is y."""
        halves = list(y.chunk(2, -1))
        for number, network in reversed(list(enumerate(self.networks))):
            kept = (self._kept + number) % 2
            scale, shift = self._of(network, halves[kept], condition)
            halves[1 - kept] = (halves[1 - kept] - shift) / scale
        return _joined(halves)

    def _of(self, network: nn.Module, kept: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """What a layer multiplies by and adds, in the precision of the vectors."""
        s, t = network(kept, condition).to(kept.dtype).chunk(2, -1)
        return self._scale(s), t


def _joined(halves: Sequence[Tensor]) -> Tensor:
    """Halves side by side, whose axes in front broadcast."""
    first, second = halves
    whole = first + second  # of the shape that both have in common
    return torch.cat([first.expand_as(whole), second.expand_as(whole)], -1)
