"""Caption encoders with a GRU or an LSTM over words."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from vse.train.models.encoders.base import Encoder, Sizes
from vse.train.models.encoders.word_reader import WordReader, WordReaderSettings
from vse.train.models.recurrent_states import last_states, packed_states


class RecurrentSettings(WordReaderSettings):
    """Settings of both the GRU and the LSTM."""

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
    """Word embeddings and a one-layer GRU whose last state is the caption (VSE++ paper, section 3).

    The paper's Eq. 2 projects that state, g(c) = W_g psi(c). The authors' code has no such projection, and this encoder has it
    only if ``head`` is set, for example ``head: { widths: [1024] }``.
    """

    name: Literal["gru"] = "gru"
    kind: ClassVar = nn.GRU


class Lstm(RecurrentSettings):
    """Word embeddings and a one-layer LSTM whose last state is the caption (two-branch paper, section 5.4)."""

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
        """Return the state after each word; with two networks, their mean."""
        if words.data.device.type == "cpu":
            directions = [
                packed_states(self.recurrent, self.words.weight, words, backwards=bool(k))
                for k in range(len(self.recurrent.all_weights))
            ]
        else:
            output, _ = self.recurrent(words._replace(data=self.words(words.data)))
            directions = output.data.chunk(len(self.recurrent.all_weights), 1)
        return directions[0] if len(directions) == 1 else (directions[0] + directions[1]) / 2
