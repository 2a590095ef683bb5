"""Caption encoders that read word by word: word embeddings, then a GRU, an LSTM or SRU layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from vse.pipeline.dataset.captions import END_ID, PAD_ID, START_ID, UNKNOWN_ID
from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec
from vse.training.models.encoders.linear import DenseLayersEncoder, DenseLayersSettings
from vse.training.models.encoders.pooling import GeneralisedPooling, WordAugmentation
from vse.training.models.recurrent_states import compute_last_states, compute_packed_states, select_last_states, unpack_states

_INITIAL_EMBEDDING_RANGE = 0.1  # word embeddings without a file start as U(-0.1, 0.1)


class WordReaderSettings(EncoderSettings):
    """The common settings of encoders that read captions word by word."""

    input_kinds: ClassVar = (InputKind.WORDS,)
    states: Literal["last", "all", "pooled"] = Field(
        "last",
        description="representation of a caption: the state after the last word (last), the set of the states after each word "
        "(all), or one vector of that set, by generalised pooling (pooled, VSE-infinity)",
    )
    size_augmentation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the words that is selected in each training step; half of the selected words become <unk>, a "
        "tenth another word, and the rest are removed (VSE-infinity: 0.2)",
    )
    head: DenseLayersSettings | None = Field(
        None, description="layers from the last state to the embedding; null: the state is the embedding"
    )
    words: str | None = Field(
        None,
        description="file of initial word vectors, unless --words names another file: word2vec (.bin or text), GloVe, or "
        "Skip-Thought's table (.npy with dictionary.txt next to it); null: word embeddings start as U(-0.1, 0.1)",
    )
    train_words: bool = Field(
        True,
        description="train the word embeddings that start from a file; word embeddings that start at random are always "
        "trained",
    )

    def output_kind(self, kind: InputKind) -> InputKind:
        return InputKind.SETS if self.states == "all" else InputKind.VECTORS

    def word_vector_file(self) -> Path | None:
        return Path(self.words) if self.words else None

    def build_network(self, spec: EncoderSpec) -> nn.Module:
        """Return the network over word embeddings, with states of length ``spec.dim``."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_head(self) -> WordReaderSettings:
        if self.states == "all" and self.head is not None:
            raise ValueError("a head reads the last state; it does not go with states: all")
        return self


class WordReader(Encoder):
    """Word embeddings, a recurrent network over words, and optional layers on the last or pooled state.

    The last state is the state after ``<end>`` (VSE++ paper, section 3).

    ``words`` : the word embeddings.
    ``recurrent`` : the recurrent network.
    ``head`` : layers on the last or pooled state, or None.
    """

    def __init__(self, spec: EncoderSpec, settings: WordReaderSettings) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.input_dim, spec.word_dim)
        nn.init.uniform_(self.words.weight, -_INITIAL_EMBEDDING_RANGE, _INITIAL_EMBEDDING_RANGE)
        self.recurrent = settings.build_network(spec)
        self.head = None if settings.head is None else DenseLayersEncoder(spec.dim, settings.head)
        self.dim = spec.dim if self.head is None else self.head.dim
        self.states = settings.states
        self.pooling = GeneralisedPooling() if settings.states == "pooled" else None
        share = settings.size_augmentation
        self.augmentation = (
            WordAugmentation(share, spec.input_dim, (PAD_ID, START_ID, END_ID), UNKNOWN_ID, PAD_ID) if share else None
        )
        self._trains_words = settings.train_words

    def compute_all_states(self, words: PackedSequence) -> Float[Tensor, "n_packed dim"]:
        """Return the state after each word, in the order of the packed words ``words.data``."""
        raise NotImplementedError

    def compute_last_states(self, words: PackedSequence) -> Float[Tensor, "n dim"]:
        """Return the state after the last word of each caption, in the order before packing."""
        raise NotImplementedError

    def forward(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> BatchVectors:
        """Return the embeddings of captions, given padded ``words`` and the ``lengths`` of the captions (on the CPU)."""
        if self.augmentation is not None and self.training:
            words, mask = self.augmentation(words, _build_length_mask(lengths, words.shape[1], words.device))
            lengths = mask.sum(1).cpu()
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        if self.states != "last":
            states = unpack_states(packed._replace(data=self.compute_all_states(packed)))
            mask = _build_length_mask(lengths, states.shape[1], states.device)
            if self.pooling is None:
                return states, mask
            state = self.pooling(states, mask)
        else:
            state = self.compute_last_states(packed)
        return (state,) if self.head is None else self.head(state)

    def load_word_vectors(self, vectors: Float[Tensor, "n_words word_dim"], known: Bool[Tensor, " n_words"]) -> None:
        """Initialise the embeddings of ``known`` words with these vectors.

        Other words keep random vectors, scaled to the standard deviation of the vectors of known words.
        """
        with torch.no_grad():
            weight = self.words.weight
            vectors, known = vectors.to(weight), known.to(weight.device)
            scale = vectors[known].std(correction=0) / (_INITIAL_EMBEDDING_RANGE / 3**0.5)
            weight.copy_(torch.where(known[:, None], vectors, weight * scale))
            weight.requires_grad_(self._trains_words)

    def weights_without_decay(self) -> list[Tensor]:
        return [self.words.weight]


def _build_length_mask(lengths: Tensor, longest: int, device: torch.device) -> Bool[Tensor, "n longest"]:
    return torch.arange(longest, device=device) < lengths.to(device)[:, None]


_ROW_MULTIPLE = 256  # rows are padded to a multiple of this number, because oneDNN compiles a kernel for every new shape


class RecurrentSettings(WordReaderSettings):
    """Settings that the GRU and the LSTM share."""

    network_class: ClassVar[type[nn.GRU] | type[nn.LSTM]]
    bidirectional: bool = Field(
        False,
        description="whether the state at each word is the mean of the states of two networks, one of them reading captions "
        "from the end (SCAN); not with states=last",
    )

    def build(self, spec: EncoderSpec) -> Encoder:
        return RecurrentEncoder(spec, self)

    def build_network(self, spec: EncoderSpec) -> nn.Module:
        return self.network_class(spec.word_dim, spec.dim, batch_first=True, bidirectional=self.bidirectional)

    @model_validator(mode="after")
    def _check_direction(self) -> RecurrentSettings:
        if self.states == "last" and self.bidirectional:
            raise ValueError("bidirectional goes with states: all or pooled")
        return self


class GruSettings(RecurrentSettings):
    """Word embeddings and a one-layer GRU, whose last state is the embedding of the caption (VSE++ paper, section 3).

    Eq. 2 of the paper also has a linear map from this state to the embedding. The authors' code does not. This encoder has
    such a map only if ``head`` is set, for example ``head: { widths: [1024] }``.
    """

    name: Literal["gru"] = "gru"
    network_class: ClassVar = nn.GRU


class LstmSettings(RecurrentSettings):
    """Word embeddings and a one-layer LSTM, whose last state is the caption's embedding (two-branch paper, section 5.4)."""

    name: Literal["lstm"] = "lstm"
    network_class: ClassVar = nn.LSTM


class RecurrentEncoder(WordReader):
    """Word embeddings and a one-layer GRU or LSTM."""

    recurrent: nn.GRU | nn.LSTM

    def compute_last_states(self, words: PackedSequence) -> Tensor:
        if words.data.device.type == "cpu":
            return compute_last_states(self.recurrent, self.words.weight, words)
        _, last = self.recurrent(words._replace(data=self.words(words.data)))
        state: Tensor = (last[0] if isinstance(last, tuple) else last)[0]
        return state

    def compute_all_states(self, words: PackedSequence) -> Tensor:
        if words.data.device.type == "cpu":
            directions = [
                compute_packed_states(self.recurrent, self.words.weight, words, backwards=bool(k))
                for k in range(len(self.recurrent.all_weights))
            ]
        else:
            output, _ = self.recurrent(words._replace(data=self.words(words.data)))
            directions = output.data.chunk(len(self.recurrent.all_weights), 1)
        return directions[0] if len(directions) == 1 else (directions[0] + directions[1]) / 2


class SruLayers(nn.Module):
    """A stack of SRU layers (Lei et al., EMNLP 2018).

    Dropout acts on the input of each layer and, except in the last layer, on the difference between the output and the input
    of the layer. All steps of a caption have the same dropout mask.
    """

    def __init__(self, input_dim: int, dim: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SruLayer(input_dim if k == 0 else dim, dim, dropout, dropout if k + 1 < n_layers else 0.0) for k in range(n_layers)
        )

    def forward(self, inputs: Float[Tensor, "n_packed input_dim"], batch_sizes: list[int]) -> Float[Tensor, "n_packed dim"]:
        """Return the state of the last layer after each step (word) of packed captions.

        ``batch_sizes[t]`` is the number of captions with a step t, as in a :class:`PackedSequence`.
        """
        n_packed = len(inputs)
        states = nn.functional.pad(inputs, (0, 0, 0, -n_packed % _ROW_MULTIPLE))
        for layer in self.layers:
            states = layer(states, batch_sizes)
        return states[:n_packed]


class SruLayer(nn.Module):
    """An SRU layer with tanh and a highway from the input, in the form of the paper's first version, as in DSVE-loc.

    With the input x, the forget gate f, the reset gate r, the cell c and the output h at step t::

        f_t = sigmoid(W_f x_t + b_f)                r_t = sigmoid(W_r x_t + b_r)
        c_t = f_t c_{t-1} + (1 - f_t) W x_t         h_t = r_t tanh(c_t) + (1 - r_t) x_t

    The printed paper adds v c_{t-1}, with a learned v, to both gates. If x and h differ in length, W_h x_t replaces x_t in the
    formula of h_t. As in the authors' package, biases start as 0. Weights start uniform in [-a, a], with
    a = sqrt(3 / input_dim) sqrt(1 - ``input_dropout``). W is also multiplied by sqrt(1 - ``dropout``).

    ``input_dropout`` : dropout of x.
    ``dropout`` : dropout of the difference tanh(c_t) - x_t in h_t.
    """

    def __init__(self, input_dim: int, dim: int, input_dropout: float, dropout: float) -> None:
        super().__init__()
        self.dim, self.input_dropout, self.dropout = dim, input_dropout, dropout
        n_products = 3 if input_dim == dim else 4
        self.weight = nn.Parameter(torch.empty(n_products * dim, input_dim))  # W, W_f, W_r and, if lengths differ, W_h
        self.bias = nn.Parameter(torch.zeros(2 * dim))  # b_f and b_r
        nn.init.uniform_(self.weight, -((3 / input_dim) ** 0.5), (3 / input_dim) ** 0.5)
        with torch.no_grad():
            self.weight.mul_((1 - input_dropout) ** 0.5)
            self.weight[:dim].mul_((1 - dropout) ** 0.5)

    def forward(self, inputs: Float[Tensor, "n_rows input_dim"], batch_sizes: list[int]) -> Float[Tensor, "n_rows dim"]:
        products = linear(self._apply_dropout(inputs, self.input_dropout, batch_sizes), self.weight).to(self.weight.dtype)
        gates = (products[:, self.dim : 3 * self.dim] + self.bias).sigmoid()
        cells: Tensor = _SruCells.apply(products[:, : self.dim], gates[:, : self.dim], batch_sizes)
        highway = inputs if len(self.weight) == 3 * self.dim else products[:, 3 * self.dim :]
        return highway + self._apply_dropout(cells.tanh() - highway, self.dropout, batch_sizes) * gates[:, self.dim :]

    def _apply_dropout(self, rows: Tensor, rate: float, batch_sizes: list[int]) -> Tensor:
        """Apply dropout to packed captions, with one mask for each caption."""
        if not rate or not self.training:
            return rows
        factors = rows.new_empty(batch_sizes[0], rows.shape[1]).bernoulli_(1 - rate).div_(1 - rate)
        captions = torch.cat([torch.arange(size) for size in (*batch_sizes, len(rows) - sum(batch_sizes))])
        return rows * factors[captions.clamp(max=batch_sizes[0] - 1).to(rows.device)]


class _SruCells(torch.autograd.Function):
    """The cells c_t = f_t c_{t-1} + (1 - f_t) u_t of an SRU layer, for all captions. u is ``inputs``, f is ``forget``."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forget: Tensor, batch_sizes: list[int]) -> Tensor:
        cells = torch.zeros_like(inputs)
        start, cell = 0, torch.zeros_like(inputs[: batch_sizes[0]])
        for size in batch_sizes:
            step = slice(start, start := start + size)
            cell = torch.lerp(inputs[step], cell[:size], forget[step], out=cells[step])
        ctx.save_for_backward(inputs, forget, cells)
        ctx.batch_sizes = batch_sizes
        return cells

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, forget, cells = ctx.saved_tensors
        of_cells, of_forget = torch.zeros_like(inputs), torch.zeros_like(inputs)
        end = sum(ctx.batch_sizes)
        later: Tensor | None = None  # the gradient with respect to the cells of a step, through the next step
        for size, earlier in zip(reversed(ctx.batch_sizes), [*reversed(ctx.batch_sizes[:-1]), 0], strict=True):
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


class SruSettings(WordReaderSettings):
    """Word embeddings and SRU layers, whose last state is the caption's embedding (DSVE-loc, Engilberge et al., CVPR 2018)."""

    name: Literal["sru"] = "sru"
    layers: PositiveInt = Field(4, description="number of SRU layers")
    dropout: float = Field(0.25, ge=0, lt=1, description="dropout in each layer, with one mask for all words of a caption")

    def build(self, spec: EncoderSpec) -> Encoder:
        return SruEncoder(spec, self)

    def build_network(self, spec: EncoderSpec) -> nn.Module:
        return SruLayers(spec.word_dim, spec.dim, self.layers, self.dropout)


class SruEncoder(WordReader):
    """Word embeddings and SRU layers."""

    recurrent: SruLayers

    def compute_last_states(self, words: PackedSequence) -> Tensor:
        return select_last_states(self.compute_all_states(words), words)

    def compute_all_states(self, words: PackedSequence) -> Tensor:
        states: Tensor = self.recurrent(self.words(words.data), words.batch_sizes.tolist())
        return states
