"""What all similarities share: they score the images of a batch with its captions, alike for both directions or not."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vse.pipeline.errors import UserError
from vse.pipeline.presets.schema import Settings
from vse.train.kinds import Encoded, Kind

# Scores (n_images, n_captions), or one such matrix for each direction, i2t and t2i.
Scores = Tensor | tuple[Tensor, Tensor]


class Similarity(nn.Module):
    """Scores of n images with m captions, for any n and m.

    A pair's score depends on that image and that caption alone, not on the others that it is scored with.
    """

    def forward(self, images: Encoded, captions: Encoded) -> Scores:
        """Scores (n, m) for both directions, or (i2t, t2i), two matrices (n, m), if an image query scores otherwise."""
        raise NotImplementedError

    def of_pairs(
        self, images: Encoded, captions: Encoded, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        """Scores of the images ``rows`` with the captions ``columns``, one by one; for losses of single pairs."""
        scores = self(images, captions)
        if isinstance(scores, tuple):
            raise UserError("a loss of single pairs has no direction, and this similarity has a score for each")
        chosen: Tensor = scores[rows, columns]
        return chosen

    def attention(
        self, images: Encoded, captions: Encoded, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, "k n_context n_queries"]:
        """Of single pairs, how much each word attends to each region, or the reverse, where the settings say ``attends``."""
        raise NotImplementedError


class SimilaritySettings(Settings):
    """Settings of a similarity, chosen by its ``name``.

    Attributes
    ----------
    images, captions : the kind of embeddings that it compares, on each side
    ranked_by : the similarity of :mod:`vse.eval.ranking.scores` that ranks single vectors as this one does; None: every pair
        goes through the model, and its scores are what ``vse-embed`` writes
    compares_one_side : whether two images, or two captions, can be compared by it as well
    needs_unit_length : whether it takes unit vectors alone
    attends : which side of a pair attends to the other, so that ``attention`` gives weights: with ``t2i`` (k, n_regions,
        n_words), each word's over the regions; with ``i2t`` (k, n_words, n_regions), each region's over the words; or neither
    """

    name: str
    images: ClassVar[Kind] = Kind.VECTORS
    captions: ClassVar[Kind] = Kind.VECTORS
    ranked_by: ClassVar[str | None] = None
    compares_one_side: ClassVar[bool] = False
    needs_unit_length: ClassVar[bool] = False

    @property
    def attends(self) -> Literal["t2i", "i2t"] | None:
        return None

    def build(self, dim: int) -> Similarity:
        """The similarity of embeddings of length ``dim``."""
        raise NotImplementedError


def root_or_zero(squared: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Square roots whose gradient is 0, not infinite, where they are 0; a NaN stays a NaN."""
    positive = squared != 0  # which a NaN is, too
    return torch.where(positive, torch.where(positive, squared, 1).sqrt(), 0)
