"""The base class of solvers in closed form: they fit the model for each point of a grid, and validation chooses the best."""

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
    """A run with one epoch for each point of ``grid``, for example ``{"regularization": 0.1}``.

    The settings of the point become part of the epoch's row.
    """

    def __init__(self, name: str, task: RetrievalTask, grid: Sequence[Point]) -> None:
        if task.processes.size > 1:
            raise UserError(f"solver: {name} requires a single process")
        if not isinstance(task.images, CachedImages):
            raise UserError(f"solver: {name} reads cached features of images (--set images.source=cache)")
        if task.model.config.similarity.ranked_by != "cosine":
            raise UserError(f"solver: {name} requires a comparison by inner products (--set model.similarity=cosine)")
        super().__init__(task)
        self.cached, self.grid, self.epochs = task.images, grid, len(grid)
        self._covariances: Covariances | None = None

    @abstractmethod
    def fit(self, point: Point) -> None:
        """Set the weights of the model for a point of the grid."""

    @property
    def statistics(self) -> Covariances:
        """The means and covariances of all pairs, computed once."""
        if self._covariances is None:
            self._covariances = covariances(blocks_of_pairs(self.task, self.cached))
        return self._covariances

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Fit the model for the next point and validate it."""
        started = time.perf_counter()
        point = self.grid[self.progress.epoch]
        with self.stoppable(save), torch.no_grad():
            self.fit(point)
            row = {"epoch": self.progress.epoch + 1, **point, **self.validate()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.progress = Progress(self.progress.epoch + 1, [*self.progress.rows, row])

    def described(self, row: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {row[name]:g}" for name in self.grid[0])
