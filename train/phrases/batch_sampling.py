"""What the two samplers of Algorithm 1 share: which candidates of a pair's image are positive, and which negative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int
from pydantic import Field, PositiveInt

from vse.eval.ranking.localisation import pairwise_iou
from vse.pipeline.config import Settings
from vse.train.data.cached import Numbers
from vse.train.phrases.phrase_pairs import PhrasePairs
from vse.train.phrases.region_features import BoxFeatures
from vse.train.phrases.spans import flat_spans, some_of_each


class PositiveSettings(Settings):
    """Which regions are positive for a phrase (two-branch paper, section 4.1)."""

    positives: Literal["truth", "augmented"] = Field(
        "augmented", description="truth: the ground-truth region alone; augmented: candidates that overlap it, too"
    )
    positive_iou: float = Field(0.7, gt=0, le=1, description="augmented: the IoU with the truth from which they are")


class SamplingSettings(PositiveSettings):
    """Algorithm 1 of the two-branch paper."""

    negative_iou: float = Field(0.3, gt=0, le=1, description="candidates below this IoU with the truth are negatives")
    neighbours: bool = Field(
        False,
        description="neighbourhood sampling, for losses of triplets: where a batch has one phrase for a region, or one region "
        "for a phrase, a second one",
    )
    negatives: Literal["balanced", "all"] = Field(
        "balanced", description="for losses of pairs: one negative pair for each positive one, or every negative candidate"
    )
    candidates: PositiveInt | None = Field(
        None, description="negatives are drawn from so many random candidates of an image, at each visit; none: from all"
    )


@dataclass(frozen=True)
class Near:
    """Candidates of the images of some pairs: positive or negative ones of each pair's phrase.

    rows : (n,) which of the pairs, ascending
    regions : (n,) the candidates' numbers
    """

    rows: Int[np.ndarray, " n"]
    regions: Int[np.ndarray, " n"]


class CandidateSampler:
    """Positive and negative candidates of pairs, and the numbers of their ground-truth regions.

    Parameters
    ----------
    pairs : all pairs that are trained on, each with a box
    candidates : the boxes of their images
    truth_of : (n_pairs,) the number of each pair's ground-truth region among all regions
    settings : of Algorithm 1
    """

    def __init__(
        self, pairs: PhrasePairs, candidates: BoxFeatures, truth_of: Int[np.ndarray, " n_pairs"], settings: SamplingSettings
    ) -> None:
        self.pairs, self.candidates, self.truth_of, self.settings = pairs, candidates, truth_of, settings

    def near(self, batch: Numbers, rng: np.random.Generator) -> tuple[Near, Near]:
        """The candidates with an IoU of at least ``positive_iou`` with each pair's truth, and drawn ones below the other."""
        images = self.pairs.image_of[batch]
        rows, regions = flat_spans(self.candidates.starts[images], self.candidates.counts[images])
        overlaps = pairwise_iou(self.pairs.truths[batch][rows], self.candidates.boxes[regions])
        positive = overlaps >= self.settings.positive_iou
        negative = (overlaps < self.settings.negative_iou) & self._drawn(images, rows, regions, rng)
        return Near(rows[positive], regions[positive]), Near(rows[negative], regions[negative])

    def _drawn(self, images: Numbers, rows: Numbers, regions: Numbers, rng: np.random.Generator) -> Bool[np.ndarray, " n"]:
        """Which candidates are among those that are drawn of their image, the same for all its pairs of the batch."""
        if self.settings.candidates is None:
            return np.ones(len(rows), bool)
        visited = np.unique(images)
        of_visit, every = flat_spans(self.candidates.starts[visited], self.candidates.counts[visited])
        return np.isin(regions, every[some_of_each(of_visit, self.settings.candidates, rng)])
