"""The base class of encoders that read captions word by word: word embeddings, a recurrent network, and optional layers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from vse.pipeline.dataset.captions import END_ID, PAD_ID, START_ID, UNKNOWN_ID
from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec
from vse.training.models.encoders.gpo import GeneralisedPooling, WordAugmentation
from vse.training.models.encoders.mlp import BranchEncoder, DenseLayersSettings
from vse.training.models.recurrent_states import unpack_states

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
        description="share of the words that is selected in each training step; half of them become <unk>, a tenth another "
        "word, and the rest are removed (VSE-infinity: 0.2)",
    )
    head: DenseLayersSettings | None = Field(
        None, description="layers from the last state to the embedding; none: the state is the embedding"
    )
    words: str | None = Field(
        None,
        description="file of initial word vectors, unless --words names another file: word2vec (.bin or text), GloVe, or "
        "Skip-Thought's table (.npy with dictionary.txt next to it); none: word embeddings start as U(-0.1, 0.1)",
    )
    train_words: bool = Field(True, description="train word embeddings that start from a file; others are always trained")

    def embedding_kind(self, kind: InputKind) -> InputKind:
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
        self.head = None if settings.head is None else BranchEncoder(spec.dim, settings.head)
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
