"""Score matrices that are read some rows at a time: the mean of several, and a selection of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.ranking.ranks import ScoreMatrix


@dataclass(frozen=True)
class MeanScores:
    """The mean of several score matrices of one shape, computed where it is read, in the precision of the first."""

    members: Sequence[ScoreMatrix]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.members[0].shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        total: NDArray[Any] = np.array(self.members[0][rows])
        for scores in self.members[1:]:
            np.add(total, scores[rows], out=total)
        total /= np.float32(len(self.members))
        return total


@dataclass(frozen=True)
class _SelectedScores:
    scores: ScoreMatrix
    images: NDArray[np.int64]
    captions: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.images), len(self.captions)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, rows: Any, /) -> NDArray[Any]:
        selected: NDArray[Any] = self.scores[self.images[rows]][:, self.captions]
        return selected


def selected_scores(scores: ScoreMatrix, images: NDArray[np.int64], captions: NDArray[np.int64]) -> ScoreMatrix:
    """The scores of some images with some captions, by their rows and columns; selected where they are read."""
    return _SelectedScores(scores, images, captions)
