"""The base class of encoders that read captions word by word: word embeddings, a network over them, and layers on top."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from vse.pipeline.dataset.captions import END, PAD, START, UNKNOWN
from vse.training.kinds import Encoded, Kind
from vse.training.models.encoders.base import Encoder, EncoderSettings, Sizes
from vse.training.models.encoders.gpo import GeneralisedPooling, WordAugmentation
from vse.training.models.encoders.mlp import Branch, LayersSettings

_RANGE = 0.1  # range of randomly initialised word embeddings


class WordReaderSettings(EncoderSettings):
    """Settings that all encoders of captions word by word share."""

    takes: ClassVar = (Kind.WORDS,)
    states: Literal["last", "all", "pooled"] = Field(
        "last",
        description="last: a caption is the state after its last word; all: the set of the states after each word; pooled: "
        "one vector of that set, by generalised pooling (VSE-infinity)",
    )
    size_augmentation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the words that is selected in each training step; half of them become <unk>, a tenth another "
        "word, and the rest are removed (VSE-infinity: 0.2)",
    )
    head: LayersSettings | None = Field(
        None, description="layers from the last state to the embedding; none: the state is the embedding"
    )
    words: str | None = Field(
        None,
        description="file of word vectors with which word embeddings start, unless --words names one: word2vec (.bin or "
        "text), GloVe, or Skip-Thought's table (.npy with dictionary.txt next to it); none: they start as U(-0.1, 0.1)",
    )
    train_words: bool = Field(True, description="train word embeddings that start from a file; others are always trained")

    def gives(self, kind: Kind) -> Kind:
        return Kind.SETS if self.states == "all" else Kind.VECTORS

    def word_file(self) -> Path | None:
        return Path(self.words) if self.words else None

    def network(self, sizes: Sizes) -> nn.Module:
        """Return the network over word embeddings; its states have the length ``sizes.dim``."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _head_fits(self) -> WordReaderSettings:
        if self.states == "all" and self.head is not None:
            raise ValueError("a head reads the last state; it does not go with states: all")
        return self


class WordReader(Encoder):
    """Word embeddings, a network over them, and optional layers on its last or pooled state.

    Word embeddings start as U(-0.1, 0.1). The last state is the one after ``<end>`` (VSE++ paper, section 3).
    """

    def __init__(self, sizes: Sizes, settings: WordReaderSettings) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.input_dim, sizes.word_dim)
        nn.init.uniform_(self.words.weight, -_RANGE, _RANGE)
        self.recurrent = settings.network(sizes)
        self.head = None if settings.head is None else Branch(sizes.dim, settings.head)
        self.dim = sizes.dim if self.head is None else self.head.dim
        self.states = settings.states
        self.pooling = GeneralisedPooling() if settings.states == "pooled" else None
        share = settings.size_augmentation
        self.augmentation = WordAugmentation(share, sizes.input_dim, (PAD, START, END), UNKNOWN, PAD) if share else None
        self._train_words = settings.train_words

    def after_each(self, words: PackedSequence) -> Float[Tensor, "n_packed dim"]:
        """Return the state after each word, in the order of the packed words ``words.data``."""
        raise NotImplementedError

    def after_last(self, words: PackedSequence) -> Float[Tensor, "n dim"]:
        """Return the state after the last word of each caption, in the order before packing."""
        raise NotImplementedError

    def forward(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> Encoded:
        """Return the embeddings of captions: padded ``words``, and ``lengths`` (on the CPU), their numbers of words."""
        if self.augmentation is not None and self.training:
            words, mask = self.augmentation(words, _mask(lengths, words.shape[1], words.device))
            lengths = mask.sum(1).cpu()
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        if self.states != "last":
            states, _ = pad_packed_sequence(packed._replace(data=self.after_each(packed)), batch_first=True)
            mask = _mask(lengths, states.shape[1], states.device)
            if self.pooling is None:
                return states, mask
            state = self.pooling(states, mask)
        else:
            state = self.after_last(packed)
        return (state,) if self.head is None else self.head(state)

    def start_words(self, vectors: Float[Tensor, "n_words word_dim"], known: Bool[Tensor, " n_words"]) -> None:
        """Initialise the word embeddings with these vectors.

        Words that are not ``known`` keep random vectors, scaled to the standard deviation of the vectors of known words.
        """
        with torch.no_grad():
            weight = self.words.weight
            vectors, known = vectors.to(weight), known.to(weight.device)
            scale = vectors[known].std(correction=0) / (_RANGE / 3**0.5)
            weight.copy_(torch.where(known[:, None], vectors, weight * scale))
            weight.requires_grad_(self._train_words)

    def undecayed(self) -> list[Tensor]:
        return [self.words.weight]


def _mask(lengths: Tensor, longest: int, device: torch.device) -> Bool[Tensor, "n longest"]:
    return torch.arange(longest, device=device) < lengths.to(device)[:, None]
