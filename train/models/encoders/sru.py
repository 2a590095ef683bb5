"""Words read by Simple Recurrent Units, the caption encoder of DSVE-loc."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from vse.train.models.encoders.base import Encoder, Sizes
from vse.train.models.encoders.word_reader import WordReader, WordReaderSettings
from vse.train.models.recurrent_states import last_of
from vse.train.models.sru_layers import SruLayers


class Sru(WordReaderSettings):
    """Word embeddings and layers of SRUs, whose last state is the caption (DSVE-loc, Engilberge et al., CVPR 2018)."""

    name: Literal["sru"] = "sru"
    layers: PositiveInt = 4
    dropout: float = Field(0.25, ge=0, lt=1, description="one mask for all words of a caption, in each layer")

    def build(self, sizes: Sizes) -> Encoder:
        return SruEncoder(sizes, self)

    def network(self, sizes: Sizes) -> nn.Module:
        return SruLayers(sizes.word_dim, sizes.dim, self.layers, self.dropout)


class SruEncoder(WordReader):
    """Word embeddings and the layers."""

    recurrent: SruLayers

    def after_last(self, words: PackedSequence) -> Tensor:
        return last_of(self.after_each(words), words)

    def after_each(self, words: PackedSequence) -> Tensor:
        states: Tensor = self.recurrent(self.words(words.data), words.batch_sizes.tolist())
        return states
