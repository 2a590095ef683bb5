"""Canonical correlation analysis of regions and phrases, the baseline of phrase localisation (Plummer et al., ICCV 2015)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np

from vse.pipeline.progress import progress_bar
from vse.train.phrases.batches import CandidateSampler, SamplingSettings
from vse.train.phrases.task import PhraseSettings, PhraseSolver, PhraseTask
from vse.train.solvers.base import Solver, Task
from vse.train.solvers.cca import Block, Cca, CcaFields

_IMAGES = 32  # images whose pairs are in memory at once


class PhraseCcaSettings(PhraseSettings, CcaFields):
    """CCA of regions and phrases from their positive pairs only; see the solver ``cca``."""

    name: Literal["phrases_cca"] = "phrases_cca"
    uses_loss: ClassVar = False

    def build(self, task: Task) -> Solver:
        assert isinstance(task, PhraseTask)
        return PhraseCca(task, self)


class PhraseCca(Cca, PhraseSolver):
    """CCA of all positive pairs: each phrase with its ground-truth region and, if augmented, with overlapping candidates."""

    task: PhraseTask

    def __init__(self, task: PhraseTask, settings: PhraseCcaSettings) -> None:
        super().__init__(task, settings)
        chosen = SamplingSettings(positives=settings.positives, positive_iou=settings.positive_iou)
        self._candidates = CandidateSampler(task.train.pairs, task.train.regions.candidates, task.truth_of, chosen)

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of regions with the phrases for which they are positive."""
        train, rng = self.task.train, np.random.default_rng(0)  # positives are not sampled
        n_images = len(train.pairs.image_ids)
        with progress_bar(total=n_images, desc="covariances", unit="image") as bar:
            for start in range(0, n_images, _IMAGES):
                stop = min(start + _IMAGES, n_images)
                pairs = np.arange(*np.searchsorted(train.pairs.image_of, [start, stop]))
                rows, positives = np.arange(len(pairs)), self.task.truth_of[pairs]
                if self._candidates.settings.positives == "augmented":
                    near = self._candidates.near(pairs, rng)[0]
                    rows, positives = np.concatenate([rows, near.rows]), np.concatenate([positives, near.regions])
                regions, region_of = np.unique(positives, return_inverse=True)
                if len(pairs):
                    (phrases,) = train.texts.of(train.pairs.text_of[pairs][rows])
                    yield train.regions.of(regions).cpu().float(), phrases.cpu().float(), region_of
                bar.update(stop - start)
