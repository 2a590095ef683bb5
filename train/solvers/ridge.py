"""Ridge regression from the vectors of one side to the vectors of the other side, in one direction or in both."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import scipy.linalg
import torch
from pydantic import Field, NonNegativeFloat
from torch import nn

from vse.pipeline.errors import UserError
from vse.train.settings import SolverSettings
from vse.train.solvers.base import RetrievalTask, Solver, Task
from vse.train.solvers.cca import ClosedForm, Covariances, Matrix, Point

Maps = Literal["captions", "images", "both"]


class RidgeSettings(SolverSettings):
    """Ridge regression (Hoerl and Kennard, 1970) of one side's vectors on the other's, compared by the cosine.

    For n pairs of centred image vectors x and caption vectors y, A minimises sum |x - A y|^2 / n + r |A|^2. The solution is
    A = C_xy (C_yy + r I)^-1, and an image x and a caption A y are compared in the space of images. ``maps: images`` swaps the
    roles of the sides. With ``maps: both`` an image becomes (x / s_x, B x / s_y) and a caption (A y / s_x, y / s_y), where s^2
    is the variance of a side. If the compared space has more than ``model.dim`` dimensions, it is projected on its first
    ``model.dim`` principal directions, those of images and captions together. A larger ``model.dim`` loses nothing.
    """

    name: Literal["ridge"] = "ridge"
    uses_loss: ClassVar = False
    reads_words: ClassVar = False
    maps: Maps = Field("captions", description="the side that is mapped into the other's space, or both")
    regularization: list[NonNegativeFloat] = Field(
        default=[1e-3, 1e-2, 1e-1, 1.0],
        min_length=1,
        description="r as a share of the mean variance of the mapped side's dimensions; each is tried, and validation chooses",
    )

    def build(self, task: Task) -> Solver:
        assert isinstance(task, RetrievalTask)
        return Ridge(task, self)


class Ridge(ClosedForm):
    """A run of ridge regression, whose maps are the weights of two linear encoders."""

    def __init__(self, task: RetrievalTask, settings: RidgeSettings) -> None:
        layers = [encoder.linear_map() for encoder in (task.model.image_encoder, task.model.caption_encoder)]
        self._image_layer, self._caption_layer = (_linear(layer) for layer in layers)
        super().__init__("ridge", task, [{"regularization": value} for value in settings.regularization])
        self._maps = settings.maps

    def fit(self, point: Point) -> None:
        """Set the weights to the solution for one regularization."""
        x, y = reduced(*ridge_maps(self.statistics, self._maps, point["regularization"]), self.statistics, self.model.dim)
        means = self.statistics.mean_x, self.statistics.mean_y
        for layer, mean, weights in zip((self._image_layer, self._caption_layer), means, (x, y), strict=True):
            layer.weight.copy_(torch.from_numpy(weights))
            layer.bias.copy_(torch.from_numpy(-weights @ mean))


def ridge_maps(statistics: Covariances, maps: Maps, regularization: float) -> tuple[Matrix, Matrix]:
    """Return the maps of centred image vectors (dim, dim_x) and caption vectors (dim, dim_y) into the compared space."""
    dim_x, dim_y = statistics.xy.shape
    if maps == "captions":
        return np.eye(dim_x), _regression(statistics.xy, statistics.yy, regularization)
    if maps == "images":
        return _regression(statistics.xy.T, statistics.xx, regularization), np.eye(dim_y)
    of_captions = _regression(statistics.xy, statistics.yy, regularization)
    of_images = _regression(statistics.xy.T, statistics.xx, regularization)
    s_x, s_y = (max(np.sqrt(np.trace(one)), np.finfo(np.float64).tiny) for one in (statistics.xx, statistics.yy))
    return (
        np.concatenate([np.eye(dim_x) / s_x, of_images / s_y]),
        np.concatenate([of_captions / s_x, np.eye(dim_y) / s_y]),
    )


def reduced(x: Matrix, y: Matrix, statistics: Covariances, dim: int) -> tuple[Matrix, Matrix]:
    """Project two maps into one space on its ``dim`` principal directions, or pad them with zeros to ``dim`` rows."""
    missing = dim - len(x)
    if missing >= 0:
        return np.pad(x, ((0, missing), (0, 0))), np.pad(y, ((0, missing), (0, 0)))
    spread = x @ statistics.xx @ x.T + y @ statistics.yy @ y.T
    _, directions = scipy.linalg.eigh(spread, subset_by_index=[len(x) - dim, len(x) - 1])
    return directions.T @ x, directions.T @ y


def _regression(across: Matrix, within: Matrix, regularization: float) -> Matrix:
    """Return ``across`` (dim_out, dim_in) times the inverse of ``within`` with a ridge."""
    ridged = within + regularization * np.trace(within) / len(within) * np.eye(len(within))
    try:
        solved: Matrix = scipy.linalg.solve(ridged, across.T, assume_a="pos").T
    except (scipy.linalg.LinAlgError, scipy.linalg.LinAlgWarning):
        raise UserError(f"solver.regularization {regularization:g} is too small: a covariance is singular") from None
    return solved


def _linear(layer: nn.Linear | None) -> nn.Linear:
    if layer is None:
        raise UserError("solver: ridge finds linear maps of vectors: both encoders must have a single layer, such as linear")
    return layer
