"""Solvers without gradients besides CCA: ridge regression, canonical similarity analysis, ASIF, and no training at all.

Without training, cached vectors are compared directly, for the zero-shot results of a model such as CLIP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, ClassVar, Literal

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt

from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar
from vse.training.models.encoders.base import l2_normalize
from vse.training.models.encoders.linear import RelativeEncoder, WeightedEncoder
from vse.training.settings import SolverSettings
from vse.training.solvers.base import Progress, RetrievalSolver, RetrievalTask, Solver, TrainingTask
from vse.training.solvers.cca import (
    Covariances,
    FloatArray,
    GridPoint,
    GridSearchSolver,
    PairBlock,
    compute_canonical_directions,
    read_pair_blocks,
    require_cached_images,
)

log = logging.getLogger(__name__)

MappedVectors = Literal["captions", "images", "both"]
_PAIRS_PER_BLOCK = 1024


class ClosedFormSolver(GridSearchSolver, RetrievalSolver):
    """A closed-form solver for cached features of images and captions. The model compares embeddings by inner products."""

    def __init__(self, name: str, task: RetrievalTask, grid: Sequence[GridPoint]) -> None:
        self.cached_images = require_cached_images(name, task)
        if task.model.config.similarity.ranking_similarity != "cosine":
            raise UserError(f"solver: {name} requires a comparison by inner products (--set model.similarity=cosine)")
        super().__init__(task, grid)

    def iterate_pair_blocks(self) -> Iterator[PairBlock]:
        return read_pair_blocks(self.task, self.cached_images)


class RidgeSettings(SolverSettings):
    """Ridge regression (Hoerl and Kennard, 1970) from caption vectors to image vectors, or the reverse.

    For n pairs of centred image vectors x and caption vectors y, the matrix A minimises sum |x - A y|^2 / n + r |A|^2. The
    solution is A = C_xy (C_yy + r I)^-1, with C_xy the covariance of x and y, and C_yy the covariance of y. r is a value of
    ``regularization`` times the mean variance of the dimensions of y. The score of an image x and a caption y is the cosine of
    x and A y. ``maps: images`` exchanges the roles: a matrix B maps images into the space of captions. With ``maps: both``, an
    image becomes (x / s_x, B x / s_y) and a caption (A y / s_x, y / s_y), where s_x^2 (or s_y^2) is the sum of the variances
    of the dimensions of x (or y). If this common space has more than ``model.dim`` dimensions, it is projected on its first
    ``model.dim`` principal directions, computed from images and captions together. A smaller space is padded with zeros.
    """

    name: Literal["ridge"] = "ridge"
    uses_loss: ClassVar = False
    accepts_words: ClassVar = False
    maps: MappedVectors = Field(
        "captions",
        description="captions: map captions into the space of images; images: map images into the space of captions; both: "
        "both maps",
    )
    regularization: list[NonNegativeFloat] = Field(
        default=[1e-3, 1e-2, 1e-1, 1.0],
        min_length=1,
        description="r as a share of the mean variance of the mapped vectors' dimensions; validation chooses",
    )

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, RetrievalTask)
        return RidgeSolver(task, self)


class RidgeSolver(ClosedFormSolver):
    """Ridge regression, whose matrices become the weights of two linear encoders."""

    def __init__(self, task: RetrievalTask, settings: RidgeSettings) -> None:
        layers = [encoder.single_linear_layer() for encoder in (task.model.image_encoder, task.model.caption_encoder)]
        if None in layers:
            raise UserError(
                "solver: ridge finds linear maps of vectors: both encoders must have a single layer, such as linear"
            )
        self._layers = [layer for layer in layers if layer is not None]
        super().__init__("ridge", task, [{"regularization": value} for value in settings.regularization])
        self._mapped_vectors = settings.maps

    def fit(self, point: GridPoint) -> None:
        maps = fit_ridge_maps(self.covariances, self._mapped_vectors, point["regularization"])
        reduced = reduce_or_pad_maps(*maps, self.covariances, self.model.dim)
        means = self.covariances.mean_x, self.covariances.mean_y
        for layer, mean, weights in zip(self._layers, means, reduced, strict=True):
            layer.weight.copy_(torch.from_numpy(weights))
            layer.bias.copy_(torch.from_numpy(-weights @ mean))


def fit_ridge_maps(statistics: Covariances, maps: MappedVectors, regularization: float) -> tuple[FloatArray, FloatArray]:
    """Return two matrices, (dim, dim_x) and (dim, dim_y), that map centred image and caption vectors into a common space.

    ``maps`` names the vectors that the regression maps: ``captions``, ``images`` or ``both`` (see :class:`RidgeSettings`).
    Raises UserError if a covariance is singular.
    """
    dim_x, dim_y = statistics.xy.shape
    if maps == "captions":
        return np.eye(dim_x), _solve_ridge_regression(statistics.xy, statistics.yy, regularization)
    if maps == "images":
        return _solve_ridge_regression(statistics.xy.T, statistics.xx, regularization), np.eye(dim_y)
    caption_map = _solve_ridge_regression(statistics.xy, statistics.yy, regularization)
    image_map = _solve_ridge_regression(statistics.xy.T, statistics.xx, regularization)
    s_x, s_y = (max(np.sqrt(np.trace(c)), np.finfo(np.float64).tiny) for c in (statistics.xx, statistics.yy))
    return (np.concatenate([np.eye(dim_x) / s_x, image_map / s_y]), np.concatenate([caption_map / s_x, np.eye(dim_y) / s_y]))


def reduce_or_pad_maps(
    x_map: FloatArray, y_map: FloatArray, statistics: Covariances, dim: int
) -> tuple[FloatArray, FloatArray]:
    """Project the common space of two maps on its first ``dim`` principal directions.

    If the space has fewer dimensions, pad both maps with rows of zeros to ``dim`` rows instead.
    """
    missing = dim - len(x_map)
    if missing >= 0:
        return np.pad(x_map, ((0, missing), (0, 0))), np.pad(y_map, ((0, missing), (0, 0)))
    spread = x_map @ statistics.xx @ x_map.T + y_map @ statistics.yy @ y_map.T
    _, directions = scipy.linalg.eigh(spread, subset_by_index=[len(x_map) - dim, len(x_map) - 1])
    return directions.T @ x_map, directions.T @ y_map


def _solve_ridge_regression(cross_covariance: FloatArray, covariance: FloatArray, regularization: float) -> FloatArray:
    size = len(covariance)
    ridged = covariance + regularization * np.trace(covariance) / size * np.eye(size)
    try:
        solved: FloatArray = scipy.linalg.solve(ridged, cross_covariance.T, assume_a="pos").T
    except (scipy.linalg.LinAlgError, scipy.linalg.LinAlgWarning):
        raise UserError(f"solver.regularization {regularization:g} is too small: a covariance is singular") from None
    return solved


class CsaSettings(SolverSettings):
    """Canonical similarity analysis (Li, Chinchali and Topcu, ICLR 2025).

    The matrices A and B project images and captions on the s most correlated canonical directions of CCA. r_i are the
    correlations. The similarity of a centred image x and caption y is sum_i r_i (A x)_i (B y)_i / (|A x| |B y|). The
    correlations weight the product, but not the norms. The image encoder is ``weighted``, which scales A x to unit length and
    multiplies dimension i by r_i.
    """

    name: Literal["csa"] = "csa"
    uses_loss: ClassVar = False
    accepts_words: ClassVar = False
    regularization: list[NonNegativeFloat] = Field(
        default=[1e-4, 1e-3, 1e-2, 1e-1], min_length=1, description="the same as in the solver cca; each value is tried"
    )
    directions: list[PositiveInt] = Field(
        default=[32, 64, 128, 256],
        min_length=1,
        description="values of s, at most model.dim; each is tried with each regularization, and validation chooses",
    )

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, RetrievalTask)
        return CsaSolver(task, self)


class CsaSolver(ClosedFormSolver):
    """Canonical similarity analysis, with one epoch for each combination of ``regularization`` and ``directions``."""

    def __init__(self, task: RetrievalTask, settings: CsaSettings) -> None:
        images, captions = task.model.image_encoder, task.model.caption_encoder.single_linear_layer()
        if not isinstance(images, WeightedEncoder) or captions is None or task.model.config.normalize_image:
            raise UserError(
                "solver: csa requires model.image_encoder=weighted, a linear caption encoder and model.normalize_image=false"
            )
        cuts = sorted({min(n, task.model.dim) for n in settings.directions}, reverse=True)
        points = product(settings.regularization, cuts)
        super().__init__("csa", task, [{"regularization": value, "directions": n} for value, n in points])
        self._image_encoder, self._caption_layer = images, captions
        self._solved_directions: tuple[float, tuple[FloatArray, FloatArray, FloatArray]] | None = None

    def fit(self, point: GridPoint) -> None:
        regularization, kept = point["regularization"], int(point["directions"])
        if self._solved_directions is None or self._solved_directions[0] != regularization:
            self._solved_directions = (
                regularization,
                compute_canonical_directions(self.covariances, self.model.dim, regularization),
            )
        x, y, correlations = (array.copy() for array in self._solved_directions[1])
        x[:, kept:], y[:, kept:], correlations[kept:] = 0, 0, 0
        means = self.covariances.mean_x, self.covariances.mean_y
        for layer, mean, directions in zip((self._image_encoder.linear, self._caption_layer), means, (x, y), strict=True):
            layer.weight.copy_(torch.from_numpy(directions.T))
            layer.bias.copy_(torch.from_numpy(-mean @ directions))
        self._image_encoder.weights.copy_(torch.from_numpy(correlations))


class AsifSettings(SolverSettings):
    """ASIF (Norelli et al., NeurIPS 2023), which describes an image or caption by its cosines with training pairs (anchors).

    An image becomes the vector of its cosines with the images of the ``model.dim`` anchors. A caption becomes the vector of
    its cosines with the captions of the anchors. In each vector the ``k`` highest cosines are raised to the power ``power``,
    and the others are set to 0. Images and captions are compared by the cosine of these vectors (section 2 of the paper, where
    k = 800 and power = 8). The experiment must set both encoders to ``relative``, which computes these vectors.
    """

    name: Literal["asif"] = "asif"
    uses_loss: ClassVar = False
    accepts_words: ClassVar = False
    k: list[PositiveInt] = Field(default=[50, 200, 800], min_length=1, description="numbers of the highest cosines to keep")
    power: list[Annotated[float, Field(gt=0)]] = Field(
        default=[4.0, 8.0],
        min_length=1,
        description="exponents of the cosines; each is tried with each k, and validation chooses",
    )

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, RetrievalTask)
        return AsifSolver(task, self)


class AsifSolver(ClosedFormSolver):
    """The solver of :class:`AsifSettings`, with one epoch for each combination of the settings ``k`` and ``power``."""

    def __init__(self, task: RetrievalTask, settings: AsifSettings) -> None:
        encoders = [task.model.image_encoder, task.model.caption_encoder]
        self._encoders = [encoder for encoder in encoders if isinstance(encoder, RelativeEncoder)]
        if len(self._encoders) < 2:
            raise UserError("solver: asif requires model.image_encoder=relative and model.caption_encoder=relative")
        if len(task.pairs) < task.model.dim:
            log.warning("solver: asif: only %d training pairs can be anchors, not %d", len(task.pairs), task.model.dim)
        points = product([k for k in settings.k if k <= task.model.dim] or [task.model.dim], settings.power)
        super().__init__("asif", task, [{"k": k, "power": power} for k, power in points])
        self._has_anchors = False

    def fit(self, point: GridPoint) -> None:
        if not self._has_anchors:
            self._store_anchors(sample_anchor_pairs(self.pairs.image_indices, self.model.dim, self.task.seed))
        for encoder in self._encoders:
            encoder.k.fill_(int(point["k"]))
            encoder.power.fill_(point["power"])

    def _store_anchors(self, anchors: Int[np.ndarray, " n_anchors"]) -> None:
        images, captions = self._encoders
        for encoder in self._encoders:
            encoder.anchors.zero_()  # with too few pairs, some anchors stay zero, so that their cosines are 0
        for start in progress_bar(range(0, len(anchors), _PAIRS_PER_BLOCK), desc="anchors", unit="block"):
            indices = anchors[start : start + _PAIRS_PER_BLOCK]
            (image_vectors,) = self.cached_images.read_images(self.pairs.image_indices[indices])
            (caption_vectors,) = self.task.caption_inputs.read(indices)
            for encoder, vectors in ((images, image_vectors), (captions, caption_vectors)):
                encoder.anchors[start : start + len(indices)] = l2_normalize(vectors.float())
        self._has_anchors = True


def sample_anchor_pairs(image_indices: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Return the sorted indices of ``n`` random pairs, spread over the images as evenly as possible."""
    order = np.random.default_rng(seed).permutation(len(image_indices))
    by_image = order[np.argsort(image_indices[order], kind="stable")]
    _, firsts, counts = np.unique(image_indices[by_image], return_index=True, return_counts=True)
    turn = np.empty(len(image_indices), np.int64)
    turn[by_image] = np.arange(len(image_indices)) - np.repeat(firsts, counts)
    return np.sort(order[np.argsort(turn[order], kind="stable")][:n])


class NoTrainingSettings(SolverSettings):
    """No training, for a direct comparison of image and caption vectors of one model, such as CLIP's."""

    name: Literal["none"] = "none"
    uses_loss: ClassVar = False
    learns: ClassVar = False
    accepts_words: ClassVar = False

    def check_inputs(self, images: FeatureCache, captions: FeatureCache | None) -> None:
        """Raise UserError if image and caption vectors differ in length. Warn if different models may have computed them."""
        assert captions is not None, "words are refused before"
        if images.dim != captions.dim:
            raise UserError(
                f"solver: none compares vectors directly, but {images.path} has {images.dim} numbers per vector, "
                f"{captions.path} {captions.dim}; both caches must be of one model"
            )
        models = [_read_model_and_weight_names(cache) for cache in (images, captions)]
        if None in models:
            log.warning("%s and %s: it is not known whether the same model computed both", images.path, captions.path)
        elif models[0] != models[1]:
            names = [f"{model[0]} ({model[1]})" for model in models if model is not None]
            log.warning("images by %s, captions by %s: only vectors of one model can be compared directly", *names)

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, RetrievalTask)
        return NoTrainingSolver(task)


class NoTrainingSolver(RetrievalSolver):
    """A solver with one epoch, which only validates the model. The model must have no weights to learn."""

    epochs = 1

    def __init__(self, task: RetrievalTask) -> None:
        if task.processes.size > 1:
            raise UserError("solver: none requires a single process")
        weight = next((name for name, _ in task.model.named_parameters()), None)
        if weight is not None:
            part = weight.partition(".")[0]
            cure = f"--set model.{part}=identity" if part.endswith("encoder") else f"a {part} without weights"
            raise UserError(f"solver: none trains nothing, but the {part.replace('_', ' ')} has weights to learn: {cure}")
        super().__init__(task)

    def run_epoch(self, save: Callable[[], None]) -> None:
        started = time.perf_counter()
        with self.validation_context(save):
            row = {"epoch": 1, **self.validate()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.progress = Progress(1, [row])

    def describe_epoch(self, row: Mapping[str, float]) -> str:
        return "nothing is trained"


def _read_model_and_weight_names(cache: FeatureCache) -> tuple[str, str] | None:
    """Return the names of the model and the weights that computed a cache, or None if the cache was imported."""
    model = cache.provenance.get("config", {}).get("model")
    return None if model is None else (str(model), str(cache.provenance.get("weights")))
