"""What the models of a report looked at in the pairs that it shows, as a function of its caller says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vse.eval.files.embeddings import Embeddings
from vse.eval.search.hits import Attention
from vse.pipeline.errors import UserError

if TYPE_CHECKING:  # a search does without pandas
    from vse.eval.report.reported import ReportedResult

log = logging.getLogger(__name__)
_TOLERANCE = 0.01  # of a score; embeddings may be of another device

Pair = tuple[int, int]
"""The ids of an image and of a caption."""


@dataclass(frozen=True)
class AttendingRun:
    """A run whose model attends: ``of_pairs`` gives the attention in each of some pairs, None where it cannot be drawn.

    ``inputs`` are the files and folders that it is read from.
    """

    of_pairs: Callable[[Sequence[Pair]], Sequence[Attention | None]]
    inputs: Sequence[Path]


AttentionOfRun = Callable[[Path, Embeddings], AttendingRun | None]
"""Of the run in a folder, for its embeddings; None if its model does not attend, :class:`UserError` if nobody can tell how."""


class Attended:
    """The attention of the model of one result; nothing if it does not attend or its run is not at hand.

    ``missing`` gets a sentence on why it is not shown; others will read it, so that it names no folders.
    """

    def __init__(self, reported: ReportedResult, of_run: AttentionOfRun | None, missing: list[str]) -> None:
        self._missing, self._name = missing, reported.result.experiment
        self._run: AttendingRun | None = None
        if of_run is None or reported.folder is None or reported.run is None:
            return
        try:
            self._run = of_run(reported.folder, reported.run)
        except UserError as error:
            log.warning("%s", error)
            self._lacks("its run, its features or their places on the photos are not at hand")

    @property
    def inputs(self) -> Sequence[Path]:
        """What it is read from."""
        return self._run.inputs if self._run else ()

    def of(self, scores: Mapping[Pair, float]) -> dict[Pair, Attention]:
        """The attention in pairs of these scores; in none if the run has other scores than the embeddings."""
        if self._run is None or not scores:
            return {}
        found = zip(scores, self._run.of_pairs(list(scores)), strict=True)
        seen = {pair: attention for pair, attention in found if attention is not None}
        for pair, attention in seen.items():
            if not math.isclose(attention.score, scores[pair], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                log.warning("image %d, caption %d: score %g, by the run %g", *pair, scores[pair], attention.score)
                self._lacks("the run was trained again since it was embedded")
                self._run = None
                return {}
        return seen

    def _lacks(self, why: str) -> None:
        self._missing.append(f"where the words of {self._name} look: {why}")
