"""Late interaction (MaxSim): each word is compared with its nearest region, or each region with its nearest word."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vse.training.kinds import BatchVectors, InputKind, is_known_full, select_rows
from vse.training.models.similarities.base import Similarity, SimilaritySettings

_COSINES_PER_BLOCK = {"cpu": 2**20, "cuda": 2**26}  # number of cosines in memory at a time; on a CPU they fit into its caches
_MAX_STORED_COSINES = 2**26  # for more cosines in a call, the backward pass computes each block again


class MaxSimSettings(SimilaritySettings):
    """The mean cosine of words with their nearest region (ColBERT: Khattab and Zaharia, SIGIR 2020).

    With ``queries=words``, the score of an image with region vectors v_k and a caption with word vectors e_j is
    mean_j max_k cos(e_j, v_k). ColBERT has the sum over the words; the mean makes scores of long and short captions
    comparable. With ``regions`` the sides are exchanged: mean_k max_j cos(e_j, v_k). ``both`` averages the two scores. A pair
    has one score, whether its caption or its image is the query of a search.
    """

    name: Literal["maxsim"] = "maxsim"
    image_kind: ClassVar = InputKind.SETS
    caption_kind: ClassVar = InputKind.SETS
    needs_unit_length: ClassVar = True
    queries: Literal["words", "regions", "both"] = Field(
        "words", description="words look for their nearest region, regions for their nearest word, or both in turn"
    )

    def build(self, dim: int) -> Similarity:
        return MaxSimSimilarity(self)


class MaxSimSimilarity(Similarity):
    """MaxSim of sets of regions with sets of words, some images at a time."""

    def __init__(self, settings: MaxSimSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Float[Tensor, "n_images n_captions"]:
        (regions, region_mask), (words, word_mask) = images, captions
        (n, n_regions, _), (m, n_words, _) = regions.shape, words.shape
        n_per_image = n_regions * n_words * m
        size = max(1, _COSINES_PER_BLOCK.get(regions.device.type, 2**26) // max(1, n_per_image))
        recompute = torch.is_grad_enabled() and n * n_per_image > _MAX_STORED_COSINES

        def score_block(rows: slice) -> Tensor:
            cosines = (regions[rows].flatten(0, 1) @ words.flatten(0, 1).T).view(-1, n_regions, m, n_words)
            return self._aggregate(cosines, region_mask[rows], word_mask[None])

        blocks = [slice(start, start + size) for start in range(0, n, size)]
        parts = [
            checkpoint(score_block, rows, use_reentrant=False, preserve_rng_state=False) if recompute else score_block(rows)
            for rows in blocks
        ]
        return torch.cat([*parts, regions.new_empty(0, m)])

    def score_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        (regions, region_mask), (words, word_mask) = select_rows(images, rows), select_rows(captions, columns)
        return self._aggregate((regions @ words.transpose(1, 2))[:, :, None], region_mask, word_mask[:, None])[:, 0]

    def _aggregate(
        self,
        cosines: Float[Tensor, "k n_regions m n_words"],
        region_mask: Bool[Tensor, "k n_regions"],
        word_mask: Bool[Tensor, "#k m n_words"],
    ) -> Float[Tensor, "k m"]:
        """Return the scores of k images with m captions from the cosines of their regions and words. Padding is left out."""
        scores = []
        if self.settings.queries != "regions":
            nearest = _exclude(cosines, region_mask[:, :, None, None]).amax(1)
            scores.append((nearest * word_mask).sum(2) / word_mask.sum(2))
        if self.settings.queries != "words":
            nearest = _exclude(cosines, word_mask[:, None]).amax(3)
            scores.append((nearest * region_mask[:, :, None]).sum(1) / region_mask.sum(1)[:, None])
        return sum(scores[1:], start=scores[0]) / len(scores)


def _exclude(cosines: Tensor, mask: Tensor) -> Tensor:
    """Return the cosines with minus infinity where ``mask`` is false."""
    return cosines if is_known_full(mask) else cosines.masked_fill(~mask, -torch.inf)
