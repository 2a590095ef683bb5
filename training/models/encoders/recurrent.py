"""Caption encoders with a GRU or an LSTM over words."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from vse.training.models.encoders.base import Encoder, Sizes
from vse.training.models.encoders.word_reader import WordReader, WordReaderSettings
from vse.training.models.recurrent_states import last_of, last_states, packed_states

_MANY = 256  # rows are rounded up to a multiple of this, because oneDNN compiles a kernel for every new shape


class RecurrentSettings(WordReaderSettings):
    """Settings that the GRU and the LSTM share."""

    kind: ClassVar[type[nn.GRU] | type[nn.LSTM]]
    bidirectional: bool = Field(
        False,
        description="with states: all or pooled, the mean of the states of two networks at each word; the second reads "
        "captions from their end (SCAN)",
    )

    def build(self, sizes: Sizes) -> Encoder:
        return RecurrentEncoder(sizes, self)

    def network(self, sizes: Sizes) -> nn.Module:
        return self.kind(sizes.word_dim, sizes.dim, batch_first=True, bidirectional=self.bidirectional)

    @model_validator(mode="after")
    def _fits(self) -> RecurrentSettings:
        if self.states == "last" and self.bidirectional:
            raise ValueError("bidirectional goes with states: all or pooled")
        return self


class Gru(RecurrentSettings):
    """Word embeddings and a one-layer GRU, whose last state is the embedding of the caption (VSE++ paper, section 3).

    The paper's Eq. 2 projects that state, g(c) = W_g psi(c). The authors' code has no such projection, and this encoder has it
    only if ``head`` is set, for example ``head: { widths: [1024] }``.
    """

    name: Literal["gru"] = "gru"
    kind: ClassVar = nn.GRU


class Lstm(RecurrentSettings):
    """Word embeddings and a one-layer LSTM, whose last state is the caption's embedding (two-branch paper, section 5.4)."""

    name: Literal["lstm"] = "lstm"
    kind: ClassVar = nn.LSTM


class RecurrentEncoder(WordReader):
    """Word embeddings and a one-layer GRU or LSTM."""

    recurrent: nn.GRU | nn.LSTM

    def after_last(self, words: PackedSequence) -> Tensor:
        if words.data.device.type == "cpu":
            return last_states(self.recurrent, self.words.weight, words)
        _, last = self.recurrent(words._replace(data=self.words(words.data)))
        state: Tensor = (last[0] if isinstance(last, tuple) else last)[0]
        return state

    def after_each(self, words: PackedSequence) -> Tensor:
        if words.data.device.type == "cpu":
            directions = [
                packed_states(self.recurrent, self.words.weight, words, backwards=bool(k))
                for k in range(len(self.recurrent.all_weights))
            ]
        else:
            output, _ = self.recurrent(words._replace(data=self.words(words.data)))
            directions = output.data.chunk(len(self.recurrent.all_weights), 1)
        return directions[0] if len(directions) == 1 else (directions[0] + directions[1]) / 2


class SruLayers(nn.Module):
    """A stack of SRU layers (Lei et al., EMNLP 2018).

    ``dropout`` acts on the input of each layer and, except in the last layer, on what the layer adds to its input. A caption
    has one mask for all steps.
    """

    def __init__(self, input_dim: int, dim: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SruLayer(input_dim if k == 0 else dim, dim, dropout, dropout if k + 1 < n_layers else 0.0) for k in range(n_layers)
        )

    def forward(self, inputs: Float[Tensor, "n_packed input_dim"], sizes: list[int]) -> Float[Tensor, "n_packed dim"]:
        """Return the state of the last layer after each step (word) of packed captions, the longest caption first.

        ``sizes[t]`` is the number of captions that have a step t.
        """
        n_packed = len(inputs)
        states = nn.functional.pad(inputs, (0, 0, 0, -n_packed % _MANY))
        for layer in self.layers:
            states = layer(states, sizes)
        return states[:n_packed]


class SruLayer(nn.Module):
    """A layer with tanh and a highway from its input, in the form of the paper's first version, as in DSVE-loc.

    With the input x, the forget gate f, the reset gate r, the cell c and the output h::

        f_t = sigmoid(W_f x_t + b_f)                r_t = sigmoid(W_r x_t + b_r)
        c_t = f_t c_{t-1} + (1 - f_t) W x_t         h_t = r_t tanh(c_t) + (1 - r_t) x_t

    The printed paper adds v c_{t-1} to both gates. If x and h differ in length, W_h x_t replaces x_t in h_t. Weights start as
    U(-a, a), a = sqrt(3 / input_dim), smaller where there is dropout, and biases as 0 (the authors' package).
    """

    def __init__(self, input_dim: int, dim: int, input_dropout: float, dropout: float) -> None:
        super().__init__()
        self.dim, self.input_dropout, self.dropout = dim, input_dropout, dropout
        n_products = 3 if input_dim == dim else 4
        self.weight = nn.Parameter(torch.empty(n_products * dim, input_dim))  # W, W_f, W_r and, if it is needed, W_h
        self.bias = nn.Parameter(torch.zeros(2 * dim))  # b_f and b_r
        nn.init.uniform_(self.weight, -((3 / input_dim) ** 0.5), (3 / input_dim) ** 0.5)
        with torch.no_grad():
            self.weight.mul_((1 - input_dropout) ** 0.5)
            self.weight[:dim].mul_((1 - dropout) ** 0.5)

    def forward(self, inputs: Float[Tensor, "n_rows input_dim"], sizes: list[int]) -> Float[Tensor, "n_rows dim"]:
        seen = self._dropout(inputs, self.input_dropout, sizes)
        products = linear(seen, self.weight).to(self.weight.dtype)
        gates = (products[:, self.dim : 3 * self.dim] + self.bias).sigmoid()
        cells: Tensor = _Cells.apply(products[:, : self.dim], gates[:, : self.dim], sizes)
        passed = inputs if len(self.weight) == 3 * self.dim else products[:, 3 * self.dim :]
        return passed + self._dropout(cells.tanh() - passed, self.dropout, sizes) * gates[:, self.dim :]

    def _dropout(self, rows: Tensor, rate: float, sizes: list[int]) -> Tensor:
        """Apply dropout to packed captions, with one mask for each caption."""
        if not rate or not self.training:
            return rows
        kept = rows.new_empty(sizes[0], rows.shape[1]).bernoulli_(1 - rate).div_(1 - rate)
        caption = torch.cat([torch.arange(size) for size in (*sizes, len(rows) - sum(sizes))]).clamp(max=sizes[0] - 1)
        return rows * kept[caption.to(rows.device)]


class _Cells(torch.autograd.Function):
    """The cells c_t = f_t c_{t-1} + (1 - f_t) u_t of an SRU layer, computed step by step for all captions at once."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forget: Tensor, sizes: list[int]) -> Tensor:
        cells = torch.zeros_like(inputs)
        start, before = 0, torch.zeros_like(inputs[: sizes[0]])
        for size in sizes:
            step = slice(start, start := start + size)
            before = torch.lerp(inputs[step], before[:size], forget[step], out=cells[step])
        ctx.save_for_backward(inputs, forget, cells)
        ctx.sizes = sizes
        return cells

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, forget, cells = ctx.saved_tensors
        of_cells, of_forget = torch.zeros_like(inputs), torch.zeros_like(inputs)
        end = sum(ctx.sizes)
        later: Tensor | None = None  # the gradient with respect to the cells of a step, through the next one
        for size, earlier in zip(reversed(ctx.sizes), [*reversed(ctx.sizes[:-1]), 0], strict=True):
            start = end - size
            step = slice(start, end)
            of_cell = of_cells[step].copy_(gradients[0][step])
            if later is not None:
                of_cell[: len(later)] += later
            if earlier:
                torch.sub(cells[start - earlier : start - earlier + size], inputs[step], out=of_forget[step])
            else:
                torch.neg(inputs[step], out=of_forget[step])
            later = of_cell * forget[step]
            end = start
        return of_cells * (1 - forget), of_cells * of_forget, None


class Sru(WordReaderSettings):
    """Word embeddings and SRU layers, whose last state is the caption's embedding (DSVE-loc, Engilberge et al., CVPR 2018)."""

    name: Literal["sru"] = "sru"
    layers: PositiveInt = 4
    dropout: float = Field(0.25, ge=0, lt=1, description="dropout in each layer, with one mask for all words of a caption")

    def build(self, sizes: Sizes) -> Encoder:
        return SruEncoder(sizes, self)

    def network(self, sizes: Sizes) -> nn.Module:
        return SruLayers(sizes.word_dim, sizes.dim, self.layers, self.dropout)


class SruEncoder(WordReader):
    """Word embeddings and SRU layers."""

    recurrent: SruLayers

    def after_last(self, words: PackedSequence) -> Tensor:
        return last_of(self.after_each(words), words)

    def after_each(self, words: PackedSequence) -> Tensor:
        states: Tensor = self.recurrent(self.words(words.data), words.batch_sizes.tolist())
        return states
