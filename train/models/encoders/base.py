"""What all encoders share: their settings, what they are built from, and vectors of unit length."""

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
from vse.train.kinds import Encoded, Kind


@dataclass(frozen=True)
class Sizes:
    """What an encoder is built for.

    kind : what it reads
    input_dim : length of a vector that it reads or, of words and tokens, how many there are
    dim : length of an embedding, unless the encoder's own settings say otherwise
    word_dim : length of a word's vector
    transformer : of tokens, whose they are
    """

    kind: Kind
    input_dim: int
    dim: int
    word_dim: int
    transformer: Transformer | None = None


class Encoder(nn.Module):
    """A network from one side of a batch to its embeddings.

    Its ``forward`` takes the tensors of one of the kinds that its settings name, and returns embeddings (n, dim), or sets of
    them with their mask; not of unit length yet. ``dim`` is the length of an embedding.
    """

    dim: int
    forward: Callable[..., Encoded]

    def linear_map(self) -> nn.Linear | None:
        """The only layer, if the encoder is no more than one linear map of vectors."""
        return None

    def undecayed(self) -> list[Tensor]:
        """Weights that weight decay leaves alone, such as word embeddings."""
        return []


class EncoderSettings(Settings):
    """Settings of an encoder, chosen by its ``name``; ``takes`` names the kinds of inputs that it reads."""

    name: str
    takes: ClassVar[tuple[Kind, ...]]

    def gives(self, kind: Kind) -> Kind:
        """What the encoder makes of inputs of a kind: vectors or sets."""
        return kind

    def word_file(self) -> Path | None:
        """The file of word vectors that word embeddings start from, if there is one."""
        return None

    def transformer(self, weights_dir: Path | None, words: Callable[[], Iterable[str]]) -> Transformer | None:
        """The transformer whose tokens the encoder reads; None if it reads other things.

        ``weights_dir`` has what stands in for a download, ``words`` gives those of the training captions.
        """
        return None

    def build(self, sizes: Sizes) -> Encoder:
        """The network, with its first weights drawn from torch's default generator."""
        raise NotImplementedError


def unit_length(vectors: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
    """Each vector over its Euclidean norm, in float32 at least; a zero vector stays zero instead of becoming NaN."""
    exact = vectors.float() if vectors.dtype in (torch.bfloat16, torch.float16) else vectors
    return nn.functional.normalize(exact, dim=-1)


def xavier_linear(n_in: int, n_out: int) -> nn.Linear:
    """A linear map, Xavier uniform, its bias 0 at the start."""
    layer = nn.Linear(n_in, n_out)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
