"""Means of the captions' word vectors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from vse.features.caption_encoders import CaptionEncoder, TokenLists
from vse.features.words import WordVectors


class MeanVectorEncoder(CaptionEncoder):
    """The mean of the word vectors, unit length."""

    def __init__(self, words: WordVectors) -> None:
        self.words, self.dim = words, words.vectors.shape[1]

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        """Vectors of captions."""
        rows, lengths = self.words.flat(captions)
        starts = lengths.cumsum(0) - lengths
        return normalize(torch.nn.functional.embedding_bag(rows, torch.from_numpy(self.words.vectors), starts, mode="mean"))

    def tensors(self) -> dict[str, Tensor]:
        """The word vectors."""
        return self.words.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> MeanVectorEncoder:
        """The encoder whose :meth:`tensors` these are."""
        return cls(WordVectors.from_tensors(tensors))
