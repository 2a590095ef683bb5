"""A similarity of one's own: each region of an image finds its best word, each word its best region."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.similarities.base import Similarity, SimilaritySettings


class ToySettings(SimilaritySettings):
    """The mean over one side's vectors of the highest cosine with the other side's."""

    name: Literal["toy"] = "toy"
    image_kind: ClassVar = InputKind.SETS
    caption_kind: ClassVar = InputKind.SETS

    def build(self, dim: int) -> Similarity:
        return Toy()


class Toy(Similarity):
    """Scores (n, m) of sets of regions with sets of words: i2t averages over the regions, t2i over the words."""

    def forward(self, images: BatchVectors, captions: BatchVectors) -> tuple[Tensor, Tensor]:
        (regions, inside), (words, spoken) = images, captions
        cosines = torch.einsum("nrd,mwd->nmrw", regions, words)
        both = inside[:, None, :, None] & spoken[None, :, None, :]
        best_word = cosines.masked_fill(~both, -1).amax(3) * inside[:, None]
        best_region = cosines.masked_fill(~both, -1).amax(2) * spoken[None]
        return best_word.sum(2) / inside.sum(1)[:, None], best_region.sum(2) / spoken.sum(1)[None]
