"""Canonical correlation analysis (CCA), the linear baseline of the two-branch paper, and the base of closed-form solvers."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from vse.pipeline.errors import UserError
from vse.pipeline.presets.schema import Settings
from vse.pipeline.progress import progress_bar
from vse.training.data.images import CachedImageFeatures
from vse.training.settings import SolverSettings
from vse.training.solvers.base import Progress, RetrievalSolver, RetrievalTask, Solver, TrainingTask

log = logging.getLogger(__name__)

_IMAGES_PER_BLOCK = 1024
_MIN_CORRELATION = 1e-6  # canonical directions with a lower correlation are dropped

FloatArray = NDArray[np.float64]
GridPoint = Mapping[str, float]  # the values of settings that one epoch tries
PairBlock = tuple[Tensor, Tensor, NDArray[np.int64]]  # see :func:`compute_covariances`


@dataclass(frozen=True)
class Covariances:
    """The means and covariances of image vectors x and caption vectors y, over all pairs; ``xy`` is (dim_x, dim_y)."""

    mean_x: FloatArray
    mean_y: FloatArray
    xx: FloatArray
    yy: FloatArray
    xy: FloatArray


def compute_covariances(
    blocks: Iterator[tuple[Float[Tensor, "n dim_x"], Float[Tensor, "m dim_y"], NDArray[np.int64]]],
) -> Covariances:
    """Compute means and covariances over all pairs of an image and its caption.

    Each block holds the vectors of n images, the vectors of all m captions of these images, and for each caption the position
    of its image in the block.
    """
    n, shift_x, shift_y = 0, None, None
    sums: list[Tensor] = []
    for images, captions, image_of_caption in blocks:
        if shift_x is None or shift_y is None:
            shift_x, shift_y = images.mean(0), captions.mean(0)
        x, y = images - shift_x, captions - shift_y
        image = torch.from_numpy(image_of_caption)
        counts = torch.bincount(image, minlength=len(x)).float()
        y_of_image = torch.zeros(len(x), y.shape[1]).index_add_(0, image, y)
        shapes = (x.shape[1],), (y.shape[1],), (x.shape[1],) * 2, (y.shape[1],) * 2, (x.shape[1], y.shape[1])
        sums = sums or [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        sums[0] += counts @ x
        sums[1] += y.sum(0)
        sums[2] += (x * counts[:, None]).T @ x
        sums[3] += y.T @ y
        sums[4] += x.T @ y_of_image
        n += len(y)
    assert shift_x is not None
    assert shift_y is not None
    x_mean, y_mean, xx, yy, xy = (total.div_(n) for total in sums)
    for products, left, right in ((xx, x_mean, x_mean), (yy, y_mean, y_mean), (xy, x_mean, y_mean)):
        products.addr_(left, right, alpha=-1)
    return Covariances((shift_x + x_mean).numpy(), (shift_y + y_mean).numpy(), xx.numpy(), yy.numpy(), xy.numpy())


def compute_canonical_directions(
    statistics: Covariances, dim: int, regularization: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the ``dim`` most correlated directions of images and captions, and their correlations (Hotelling, 1936).

    Shapes are (dim_x, dim), (dim_y, dim) and (dim,), highest correlation first, padded with zeros if there are fewer
    directions. Along each direction, images and captions have unit variance. Different directions are uncorrelated.
    First, the diagonal of the covariance matrix of images is increased by ``regularization`` times the mean of this diagonal,
    and likewise for captions. Raises UserError if one of these matrices is then still singular.
    """
    x, y = (_cholesky(covariance, regularization) for covariance in (statistics.xx, statistics.yy))
    whitened = scipy.linalg.solve_triangular(x, statistics.xy, lower=True)
    whitened = scipy.linalg.solve_triangular(y, whitened.T, lower=True, overwrite_b=True).T
    smaller = whitened if len(whitened) <= whitened.shape[1] else whitened.T
    n = len(smaller)
    squares, left = scipy.linalg.eigh(smaller @ smaller.T, subset_by_index=[max(0, n - dim), n - 1], overwrite_a=True)
    correlations = np.sqrt(np.maximum(squares[::-1], 0))
    correlations = correlations[correlations > _MIN_CORRELATION]
    left = left[:, ::-1][:, : len(correlations)]
    right = smaller.T @ left / correlations
    u, v = (left, right) if smaller is whitened else (right, left)
    missing = dim - len(correlations)
    return (
        np.pad(scipy.linalg.solve_triangular(x, u, lower=True, trans=1), ((0, 0), (0, missing))),
        np.pad(scipy.linalg.solve_triangular(y, v, lower=True, trans=1), ((0, 0), (0, missing))),
        np.pad(correlations, (0, missing)),
    )


def _cholesky(covariance: FloatArray, regularization: float) -> FloatArray:
    ridged = covariance.copy(order="F")
    ridged.flat[:: len(covariance) + 1] += regularization * np.trace(covariance) / len(covariance)
    try:
        factor: FloatArray = scipy.linalg.cholesky(ridged, lower=True, overwrite_a=True)
    except scipy.linalg.LinAlgError:
        raise UserError(f"solver.regularization {regularization:g} is too small: a covariance is singular") from None
    return factor


class CommonCcaSettings(Settings):
    """The settings of CCA: regularisations to try, and the scale of canonical directions (Gong et al., IJCV 2014)."""

    regularization: list[NonNegativeFloat] = Field(
        default=[1e-4, 1e-3, 1e-2, 1e-1],
        min_length=1,
        description="numbers added to the diagonals of both covariances, as a share of their mean; each is tried, and "
        "validation chooses",
    )
    power: float = Field(4.0, ge=0, description="exponent of the correlations by which directions are scaled (4 in the paper)")


class CcaSettings(SolverSettings, CommonCcaSettings):
    """Canonical correlation analysis (Gong et al., IJCV 2014), the linear baseline of the two-branch paper."""

    name: Literal["cca"] = "cca"
    uses_loss: ClassVar = False
    accepts_words: ClassVar = False

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, RetrievalTask)
        return CaptionCcaSolver(task, self)


class GridSearchSolver(Solver):
    """A solver that tries one point of a ``grid`` of settings in each epoch. Validation chooses the best point."""

    def __init__(self, task: TrainingTask, grid: Sequence[GridPoint]) -> None:
        super().__init__(task)
        self.grid, self.epochs = grid, len(grid)

    @abstractmethod
    def fit(self, point: GridPoint) -> None:
        """Set the weights of the model for a point of the grid."""

    @abstractmethod
    def iterate_pair_blocks(self) -> Iterator[PairBlock]:
        """Yield all training pairs in blocks: image vectors, caption vectors, and the position of each caption's image."""

    @cached_property
    def covariances(self) -> Covariances:
        """The means and covariances of all training pairs."""
        return compute_covariances(self.iterate_pair_blocks())

    def run_epoch(self, save: Callable[[], None]) -> None:
        started = time.perf_counter()
        point = self.grid[self.progress.epoch]
        with self.validation_context(save), torch.no_grad():
            self.fit(point)
            row = {"epoch": self.progress.epoch + 1, **point, **self.validate()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.progress = Progress(self.progress.epoch + 1, [*self.progress.rows, row])
        if self.progress.epoch == len(self.grid):
            self._warn_if_largest_regularization_is_best()

    def _warn_if_largest_regularization_is_best(self) -> None:
        tried = sorted({point["regularization"] for point in self.grid if "regularization" in point})
        best = self.progress.best_row
        if len(tried) > 1 and best is not None and best["regularization"] == tried[-1]:
            larger = ", ".join(f"{tried[-1] * factor:g}" for factor in (1, 3, 10, 30))
            log.warning(
                "the best regularization, %g, is the largest that was tried; with few pairs, larger ones may be better: "
                "--set 'solver.regularization=[%s]'",
                tried[-1],
                larger,
            )

    def describe_epoch(self, row: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {row[name]:g}" for name in self.grid[0])


class CcaSolver(GridSearchSolver):
    """CCA with canonical directions that are scaled by a power of their correlations (Gong et al., IJCV 2014)."""

    def __init__(self, task: TrainingTask, settings: CommonCcaSettings) -> None:
        layers = [encoder.single_linear_layer() for encoder in (task.model.image_encoder, task.model.caption_encoder)]
        if None in layers or task.model.config.similarity.ranking_similarity != "cosine":
            raise UserError("solver: cca finds two linear maps compared by the cosine; both encoders must be one layer")
        super().__init__(task, [{"regularization": value} for value in settings.regularization])
        self._power, self._layers = settings.power, [layer for layer in layers if layer is not None]

    def fit(self, point: GridPoint) -> None:
        x, y, correlations = compute_canonical_directions(self.covariances, self.model.dim, point["regularization"])
        means = self.covariances.mean_x, self.covariances.mean_y
        for layer, mean, directions in zip(self._layers, means, (x, y), strict=True):
            scaled = directions * correlations**self._power
            layer.weight.copy_(torch.from_numpy(scaled.T))
            layer.bias.copy_(torch.from_numpy(-mean @ scaled))


class CaptionCcaSolver(CcaSolver, RetrievalSolver):
    """CCA of the cached vectors of images and captions."""

    def __init__(self, task: RetrievalTask, settings: CommonCcaSettings) -> None:
        self._cached_images = require_cached_images("cca", task)
        super().__init__(task, settings)

    def iterate_pair_blocks(self) -> Iterator[PairBlock]:
        return read_pair_blocks(self.task, self._cached_images)


def require_cached_images(solver: str, task: RetrievalTask) -> CachedImageFeatures:
    """Return the cached features of the training images. ``solver`` is the name of the solver in error messages.

    Raises UserError if there are several processes, or if images are not read from a cache.
    """
    if task.processes.size > 1:
        raise UserError(f"solver: {solver} requires a single process")
    if not isinstance(task.image_inputs, CachedImageFeatures):
        raise UserError(f"solver: {solver} reads cached features of images (--set images.source=cache)")
    return task.image_inputs


def read_pair_blocks(task: RetrievalTask, cached: CachedImageFeatures) -> Iterator[PairBlock]:
    """Yield the vectors of all training images and captions in blocks of images.

    A block has image vectors, the vectors of all captions of these images, and for each caption the position of its image.
    """
    pairs = task.pairs
    ends = np.searchsorted(pairs.image_indices, np.arange(len(pairs.images)), side="right")
    with progress_bar(total=len(pairs.images), desc="covariances", unit="image") as bar:
        for start in range(0, len(pairs.images), _IMAGES_PER_BLOCK):
            stop = min(start + _IMAGES_PER_BLOCK, len(pairs.images))
            indices = np.arange(ends[start - 1] if start else 0, ends[stop - 1])
            (images,) = cached.read_images(np.arange(start, stop))
            (captions,) = task.caption_inputs.read(indices)
            yield images.cpu().float(), captions.cpu().float(), pairs.image_indices[indices] - start
            bar.update(stop - start)
