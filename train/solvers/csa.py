"""Canonical similarity analysis: CCA with a comparison that weights directions by their correlations."""

from __future__ import annotations

from itertools import product
from typing import ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from vse.pipeline.errors import UserError
from vse.train.models.encoders.linear import WeightedEncoder
from vse.train.settings import SolverSettings
from vse.train.solvers.base import RetrievalTask, Solver, Task
from vse.train.solvers.cca import ClosedForm, Matrix, Point, canonical_directions


class CsaSettings(SolverSettings):
    """Canonical similarity analysis (Li, Chinchali and Topcu, ICLR 2025).

    A and B are the s most correlated canonical directions of CCA, and r their correlations. The similarity of an image x and a
    caption y is sum_i r_i (A x)_i (B y)_i / (|A x| |B y|): the correlations weight the product, but not the norms. The image
    encoder is ``weighted``, which scales A x to unit length and multiplies it by r.
    """

    name: Literal["csa"] = "csa"
    uses_loss: ClassVar = False
    reads_words: ClassVar = False
    regularization: list[NonNegativeFloat] = Field(
        default=[1e-4, 1e-3, 1e-2, 1e-1], min_length=1, description="as in the solver cca; each is tried"
    )
    directions: list[PositiveInt] = Field(
        default=[32, 64, 128, 256],
        min_length=1,
        description="s, at most model.dim; each is tried with each regularization, and validation chooses",
    )

    def build(self, task: Task) -> Solver:
        assert isinstance(task, RetrievalTask)
        return Csa(task, self)


class Csa(ClosedForm):
    """A run of CSA: one epoch for each regularization and number of directions."""

    def __init__(self, task: RetrievalTask, settings: CsaSettings) -> None:
        images, captions = task.model.image_encoder, task.model.caption_encoder.linear_map()
        if not isinstance(images, WeightedEncoder) or captions is None or task.model.config.normalize_image:
            raise UserError(
                "solver: csa requires model.image_encoder=weighted, a linear caption encoder and model.normalize_image=false"
            )
        cuts = sorted({min(n, task.model.dim) for n in settings.directions}, reverse=True)
        points = product(settings.regularization, cuts)
        super().__init__("csa", task, [{"regularization": value, "directions": n} for value, n in points])
        self._images, self._captions = images, captions
        self._solved: tuple[float, tuple[Matrix, Matrix, Matrix]] | None = None

    def fit(self, point: Point) -> None:
        """Set the weights for one regularization to its first directions, and the others to zero."""
        regularization, kept = point["regularization"], int(point["directions"])
        if self._solved is None or self._solved[0] != regularization:
            self._solved = regularization, canonical_directions(self.statistics, self.model.dim, regularization)
        x, y, correlations = (array.copy() for array in self._solved[1])
        x[:, kept:], y[:, kept:], correlations[kept:] = 0, 0, 0
        means = self.statistics.mean_x, self.statistics.mean_y
        for layer, mean, directions in zip((self._images.linear, self._captions), means, (x, y), strict=True):
            layer.weight.copy_(torch.from_numpy(directions.T))
            layer.bias.copy_(torch.from_numpy(-mean @ directions))
        self._images.weights.copy_(torch.from_numpy(correlations))
