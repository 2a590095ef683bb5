"""The two branches: a linear map of cached image features, and a GRU over a caption's words."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vse.train.gru import last_states


def unit_length(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Each row over its Euclidean norm, in float32 at least; a zero row stays zero instead of becoming NaN."""
    exact = vectors.float() if vectors.dtype in (torch.bfloat16, torch.float16) else vectors
    return nn.functional.normalize(exact, dim=1)


class ImageEncoder(nn.Module):
    """A linear map into the joint space, f(i) = W phi(i) + b (VSE++ paper, Eq. 1), Xavier uniform, b = 0 at the start.

    Parameters
    ----------
    feature_dim : length of a cached feature
    dim : length of an embedding
    normalize : make embeddings unit length (true for VSE++, false for VSE0)
    absolute : take absolute values behind that (true for Order0)
    """

    def __init__(self, feature_dim: int, dim: int, normalize: bool = True, absolute: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(feature_dim, dim)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.normalize = normalize
        self.absolute = absolute

    def forward(self, features: Float[Tensor, "n feature_dim"]) -> Float[Tensor, "n dim"]:
        embeddings = self.linear(features)
        embeddings = unit_length(embeddings) if self.normalize else embeddings
        return embeddings.abs() if self.absolute else embeddings


class CaptionEncoder(nn.Module):
    """Word embeddings, U(-0.1, 0.1) at the start, and a one-layer GRU whose last state is the caption, unit length.

    The last state is the one after ``<end>`` (VSE++ paper, Eq. 2 and section 3).
    """

    def __init__(self, n_words: int, word_dim: int, dim: int, absolute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, word_dim)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.gru = nn.GRU(word_dim, dim, batch_first=True)
        self.absolute = absolute

    def forward(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """``words`` are padded behind ``lengths`` tokens; ``lengths`` lie on the CPU."""
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        if words.device.type == "cpu":
            last = last_states(self.gru, self.words.weight, packed)
        else:
            last = self.gru(packed._replace(data=self.words(packed.data)))[1][0]
        embeddings = unit_length(last)
        return embeddings.abs() if self.absolute else embeddings
