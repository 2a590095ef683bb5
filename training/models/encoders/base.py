"""The base classes of encoders and of encoder settings, and functions that scale vectors and create linear maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vse.features.backbones.transformer import Transformer
from vse.pipeline.presets.schema import Settings
from vse.training.kinds import BatchVectors, InputKind


@dataclass(frozen=True)
class EncoderSpec:
    """The kind of input and the sizes for which an encoder is built.

    ``kind`` : kind of input.
    ``input_dim`` : length of an input vector; for words and tokens, the size of the vocabulary.
    ``dim`` : length of an embedding, unless the settings of the encoder set the length.
    ``word_dim`` : length of a word vector.
    ``transformer`` : the transformer whose tokens the encoder reads; None for other inputs.
    """

    kind: InputKind
    input_dim: int
    dim: int
    word_dim: int
    transformer: Transformer | None = None


class Encoder(nn.Module):
    """A network from the inputs of a batch to embeddings. ``dim`` is the length of an embedding.

    ``forward`` takes the tensors of one kind of input, and returns embeddings (n, dim), or sets of embeddings and a mask. The
    model scales embeddings to unit length afterwards, if required.
    """

    dim: int
    forward: Callable[..., BatchVectors]

    def single_linear_layer(self) -> nn.Linear | None:
        """Return the layer if the encoder consists of a single linear layer, else None."""
        return None

    def weights_without_decay(self) -> list[Tensor]:
        """Return the weights that are exempt from weight decay, such as word embeddings."""
        return []


class EncoderSettings(Settings):
    """Settings of an encoder, chosen by its ``name``; ``input_kinds`` lists the kinds of input that it can read."""

    name: str
    input_kinds: ClassVar[tuple[InputKind, ...]]

    def output_kind(self, kind: InputKind) -> InputKind:
        """Return the kind of embeddings, vectors or sets, that the encoder computes from a kind of input."""
        return kind

    def word_vector_file(self) -> Path | None:
        """Return the file of word vectors that initialise the word embeddings, or None for random embeddings."""
        return None

    def load_transformer(self, weights_dir: Path | None, words: Callable[[], Iterable[str]]) -> Transformer | None:
        """Return the transformer whose tokens the encoder reads, or None if the encoder reads no tokens.

        ``weights_dir`` : folder of weights; a transformer that it has is not downloaded. None: no such folder.
        ``words`` : function that returns the words of the training captions; called if the vocabulary is built from them.
        """
        return None

    def build(self, spec: EncoderSpec) -> Encoder:
        """Return the network, initialised with torch's default random generator."""
        raise NotImplementedError


def l2_normalize(vectors: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
    """Divide each vector by its Euclidean norm, in float32 if its type has 16 bits. A zero vector stays zero."""
    vectors = vectors.float() if vectors.dtype in (torch.bfloat16, torch.float16) else vectors
    return nn.functional.normalize(vectors, dim=-1)


def xavier_linear(n_in: int, n_out: int) -> nn.Linear:
    """Return a linear map with Xavier uniform weights and a bias of 0."""
    layer = nn.Linear(n_in, n_out)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
