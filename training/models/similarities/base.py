"""The base classes of similarities, which score the images of a batch with its captions."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vse.pipeline.errors import UserError
from vse.pipeline.presets.schema import Settings
from vse.training.kinds import BatchVectors, InputKind

# Scores (n_images, n_captions), or one such matrix for each direction, i2t and t2i.
Scores = Tensor | tuple[Tensor, Tensor]


class Similarity(nn.Module):
    """A network that scores n images with m captions. A score does not depend on other images or captions."""

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Scores:
        """Return scores (n, m), or two such matrices (i2t, t2i) if the score of a pair depends on the direction."""
        raise NotImplementedError

    def score_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        """Return the scores of k pairs: pair i is the image ``rows[i]`` and the caption ``columns[i]``."""
        scores = self(images, captions)
        if isinstance(scores, tuple):
            raise UserError("a loss of single pairs has no direction, but this similarity has a score for each direction")
        chosen: Tensor = scores[rows, columns]
        return chosen

    def measure_pairs(self, images: BatchVectors, captions: BatchVectors) -> dict[str, float]:
        """Return this similarity's own metrics for ``metrics.csv``. Image k and caption k are a validation pair.

        Only similarities with ``measures_pairs`` define this method.
        """
        raise NotImplementedError

    def compute_attention(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, "k n_context n_queries"]:
        """Return the attention of each query vector to each context vector, for k pairs of an image and a caption.

        Pair i is the image ``rows[i]`` and the caption ``columns[i]``. If words attend to regions, queries are words and the
        context is regions; otherwise the reverse. Only similarities with an ``attention_direction`` define this method.
        """
        raise NotImplementedError


class SimilaritySettings(Settings):
    """Settings of a similarity, chosen by its ``name``.

    ``image_kind``, ``caption_kind`` : kind of the image embeddings, and of the caption embeddings.
    ``ranking_similarity`` : name of a similarity of vectors in :mod:`vse.eval.ranking.ranks` that gives the same ranks; None:
        the model must score every pair.
    ``compares_within_modality`` : whether images can also be compared with images, and captions with captions.
    ``needs_unit_length`` : whether embeddings must have unit length.
    ``measures_pairs`` : whether the similarity has its own metrics, see :meth:`Similarity.measure_pairs`.
    ``attention_direction`` : ``t2i`` if words attend to regions, ``i2t`` if regions attend to words, None without attention.
    """

    name: str
    image_kind: ClassVar[InputKind] = InputKind.VECTORS
    caption_kind: ClassVar[InputKind] = InputKind.VECTORS
    ranking_similarity: ClassVar[str | None] = None
    compares_within_modality: ClassVar[bool] = False
    needs_unit_length: ClassVar[bool] = False
    measures_pairs: ClassVar[bool] = False

    @property
    def attention_direction(self) -> Literal["t2i", "i2t"] | None:
        return None

    def build(self, dim: int) -> Similarity:
        """Return the similarity of embeddings of length ``dim``."""
        raise NotImplementedError


def safe_sqrt(squared: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return square roots. The gradient at 0 is 0 instead of infinity."""
    positive = squared != 0  # true for NaN, too
    return torch.where(positive, torch.where(positive, squared, 1).sqrt(), 0)
