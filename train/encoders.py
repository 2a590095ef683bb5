"""The two branches: a linear map of cached image features, and a GRU over a caption's words."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


def unit_length(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Each row over its Euclidean norm; a zero row stays zero instead of becoming NaN."""
    return nn.functional.normalize(vectors, dim=1)


class ImageEncoder(nn.Module):
    """A linear map into the joint space, f(i) = W phi(i) + b (VSE++ paper, Eq. 1), Xavier uniform, b = 0 at the start.

    Parameters
    ----------
    feature_dim : length of a cached feature
    dim : length of an embedding
    normalize : make embeddings unit length (true for VSE++, false for VSE0)
    """

    def __init__(self, feature_dim: int, dim: int, normalize: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(feature_dim, dim)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.normalize = normalize

    def forward(self, features: Float[Tensor, "n feature_dim"]) -> Float[Tensor, "n dim"]:
        embeddings = self.linear(features)
        return unit_length(embeddings) if self.normalize else embeddings


class CaptionEncoder(nn.Module):
    """Word embeddings, U(-0.1, 0.1) at the start, and a one-layer GRU whose last state is the caption, unit length.

    The last state is the one after ``<end>`` (VSE++ paper, Eq. 2 and section 3).
    """

    def __init__(self, n_words: int, word_dim: int, dim: int) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, word_dim)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.gru = nn.GRU(word_dim, dim, batch_first=True)

    def forward(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """``words`` are padded behind ``lengths`` tokens; ``lengths`` lie on the CPU."""
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return unit_length(torch.as_tensor(last[0]))
