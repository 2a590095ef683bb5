"""Words read by a GRU or an LSTM."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from vse.train.kinds import Encoded, Kind
from vse.train.models.encoders.base import Encoder, EncoderSettings, Sizes
from vse.train.models.encoders.branch import Branch, LayersSettings
from vse.train.models.recurrent_states import last_states, packed_states


class RecurrentSettings(EncoderSettings):
    """What the GRU and the LSTM share."""

    takes: ClassVar = (Kind.WORDS,)
    network: ClassVar[type[nn.GRU] | type[nn.LSTM]]
    states: Literal["last", "all"] = Field(
        "last", description="last: a caption is the state after its last word; all: the set of the states after each word"
    )
    bidirectional: bool = Field(
        False,
        description="with states: all, the mean of that state and of the one that a second network has there, which reads "
        "captions from their end (SCAN)",
    )
    head: LayersSettings | None = Field(None, description="layers from the last state to the embedding; none: the state is it")

    def gives(self, kind: Kind) -> Kind:
        return Kind.VECTORS if self.states == "last" else Kind.SETS

    def build(self, sizes: Sizes) -> Encoder:
        return RecurrentEncoder(sizes, self)

    @model_validator(mode="after")
    def _fits(self) -> RecurrentSettings:
        if self.states == "all" and self.head is not None:
            raise ValueError("states: all gives a state per word, and a head reads the last one alone")
        if self.states == "last" and self.bidirectional:
            raise ValueError("bidirectional goes with states: all")
        return self


class Gru(RecurrentSettings):
    """Word embeddings and a one-layer GRU whose last state is the caption (VSE++ paper, section 3).

    The paper's Eq. 2 projects that state, g(c) = W_g psi(c); the authors' code has no such projection, and neither has this
    unless ``head`` is one, such as ``head: { widths: [1024] }``.
    """

    name: Literal["gru"] = "gru"
    network: ClassVar = nn.GRU


class Lstm(RecurrentSettings):
    """Word embeddings and a one-layer LSTM whose last state is the caption (two-branch paper, section 5.4)."""

    name: Literal["lstm"] = "lstm"
    network: ClassVar = nn.LSTM


class RecurrentEncoder(Encoder):
    """Word embeddings, a one-layer recurrent network, and layers on its last state, if there are any.

    Word embeddings start as U(-0.1, 0.1). The last state is the one after ``<end>`` (VSE++ paper, section 3).
    """

    def __init__(self, sizes: Sizes, settings: RecurrentSettings) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.input_dim, sizes.word_dim)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.recurrent = settings.network(sizes.word_dim, sizes.dim, batch_first=True, bidirectional=settings.bidirectional)
        self.head = None if settings.head is None else Branch(sizes.dim, settings.head)
        self.dim = sizes.dim if self.head is None else self.head.dim
        self.states = settings.states

    def forward(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> Encoded:
        """``words`` are padded after ``lengths`` words; ``lengths`` lie on the CPU."""
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        if self.states == "all":
            states, _ = pad_packed_sequence(packed._replace(data=self._after_each(packed)), batch_first=True)
            return states, torch.arange(states.shape[1], device=states.device) < lengths.to(states.device)[:, None]
        if words.device.type == "cpu":
            state = last_states(self.recurrent, self.words.weight, packed)
        else:
            _, last = self.recurrent(packed._replace(data=self.words(packed.data)))
            state = (last[0] if isinstance(last, tuple) else last)[0]
        return (state,) if self.head is None else self.head(state)

    def _after_each(self, words: PackedSequence) -> Tensor:
        """The state after each word, (n_packed, dim), of two networks their mean."""
        if words.data.device.type == "cpu":
            directions = [
                packed_states(self.recurrent, self.words.weight, words, backwards=bool(k))
                for k in range(len(self.recurrent.all_weights))
            ]
        else:
            output, _ = self.recurrent(words._replace(data=self.words(words.data)))
            directions = output.data.chunk(len(self.recurrent.all_weights), 1)
        return directions[0] if len(directions) == 1 else (directions[0] + directions[1]) / 2

    def undecayed(self) -> list[Tensor]:
        return [self.words.weight]
