"""What turns an image feature or a caption into a vector: linear maps, branches of layers, and recurrent networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from vse.pipeline.config import BranchesConfig
from vse.train.models.recurrent import last_states


def unit_length(vectors: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Each row over its Euclidean norm, in float32 at least; a zero row stays zero instead of becoming NaN."""
    exact = vectors.float() if vectors.dtype in (torch.bfloat16, torch.float16) else vectors
    return nn.functional.normalize(exact, dim=1)


def linear(n_in: int, n_out: int) -> nn.Linear:
    """A linear map, Xavier uniform, its bias 0 at the start."""
    layer = nn.Linear(n_in, n_out)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class LinearEncoder(nn.Module):
    """A linear map into the joint space, f(i) = W phi(i) + b (VSE++ paper, Eq. 1)."""

    def __init__(self, feature_dim: int, dim: int) -> None:
        super().__init__()
        self.linear = linear(feature_dim, dim)

    def forward(self, features: Float[Tensor, "n feature_dim"]) -> Float[Tensor, "n dim"]:
        embeddings: Tensor = self.linear(features)
        return embeddings


class Branch(nn.Module):
    """Fully connected layers with ReLU and dropout between them and batch normalisation (two-branch paper, section 3.2.1).

    Parameters
    ----------
    feature_dim : length of an input vector
    widths : outputs of the layers; a single layer is the linear variant, which has no batch normalisation
    settings : where the batch normalisation is, its momentum, and the dropout
    """

    def __init__(self, feature_dim: int, widths: Sequence[int], settings: BranchesConfig) -> None:
        super().__init__()
        inputs = [feature_dim, *widths[:-1]]
        self.linears = nn.ModuleList(linear(n_in, n_out) for n_in, n_out in zip(inputs, widths, strict=True))
        self.normalized_layer = 0 if settings.batch_norm == "after_first" else len(widths) - 1
        self.batch_norm = (
            nn.BatchNorm1d(widths[self.normalized_layer], momentum=settings.batch_norm_momentum) if len(widths) > 1 else None
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, features: Float[Tensor, "n feature_dim"]) -> Float[Tensor, "n dim"]:
        """The last layer's output, not of unit length yet."""
        for number, layer in enumerate(self.linears):
            features = layer(features)
            if self.batch_norm is not None and number == self.normalized_layer:
                features = self.batch_norm(features)
            if number < len(self.linears) - 1:
                features = self.dropout(features.relu())
        return features


class WordEncoder(nn.Module):
    """Word embeddings, U(-0.1, 0.1) at the start, and a one-layer GRU or LSTM whose last state is the caption.

    The last state is the one after ``<end>`` (VSE++ paper, Eq. 2 and section 3).
    """

    def __init__(self, n_words: int, word_dim: int, dim: int, recurrent: Literal["gru", "lstm"] = "gru") -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, word_dim)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}[recurrent](word_dim, dim, batch_first=True)

    def forward(self, words: Int[Tensor, "n n_words"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """``words`` are padded behind ``lengths`` tokens; ``lengths`` lie on the CPU."""
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        if words.device.type == "cpu":
            return last_states(self.recurrent, self.words.weight, packed)
        _, last = self.recurrent(packed._replace(data=self.words(packed.data)))
        state: Tensor = last[0] if isinstance(last, tuple) else last
        return state[0]
