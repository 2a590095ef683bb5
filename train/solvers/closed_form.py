"""What solvers in closed form share: they are fitted once for each point of a grid of settings, and validation decides."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from vse.pipeline.errors import UserError
from vse.train.data.images import CachedImages
from vse.train.solvers.base import Progress, RetrievalSolver, RetrievalTask
from vse.train.solvers.cca import Covariances, blocks_of_pairs, covariances

Point = Mapping[str, float]


class ClosedForm(RetrievalSolver):
    """A run of an epoch for each point of ``grid``, such as ``{"regularization": 0.1}``, whose settings go into its row."""

    def __init__(self, name: str, task: RetrievalTask, grid: Sequence[Point]) -> None:
        if task.processes.size > 1:
            raise UserError(f"solver: {name} takes one process")
        if not isinstance(task.images, CachedImages):
            raise UserError(f"solver: {name} reads cached features of images (--set images.source=cache)")
        if task.model.config.similarity.ranked_by != "cosine":
            raise UserError(f"solver: {name} compares by inner products (--set model.similarity=cosine)")
        super().__init__(task)
        self.cached, self.grid, self.epochs = task.images, grid, len(grid)
        self._covariances: Covariances | None = None

    @abstractmethod
    def fit(self, point: Point) -> None:
        """Give the model its weights for a point of the grid."""

    @property
    def statistics(self) -> Covariances:
        """Means and covariances of all pairs, computed once."""
        if self._covariances is None:
            self._covariances = covariances(blocks_of_pairs(self.task, self.cached))
        return self._covariances

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Fit with the next point and validate."""
        started = time.perf_counter()
        point = self.grid[self.progress.epoch]
        with self.stoppable(save), torch.no_grad():
            self.fit(point)
            row = {"epoch": self.progress.epoch + 1, **point, **self.validate()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.progress = Progress(self.progress.epoch + 1, [*self.progress.rows, row])

    def described(self, row: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {row[name]:g}" for name in self.grid[0])
