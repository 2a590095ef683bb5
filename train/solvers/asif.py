"""ASIF: represent images and captions by their similarities to a fixed set of pairs, without training."""

from __future__ import annotations

import logging
from itertools import product
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar
from vse.train.models.encoders.base import unit_length
from vse.train.models.encoders.linear import RelativeEncoder
from vse.train.settings import SolverSettings
from vse.train.solvers.base import RetrievalTask, Solver, Task
from vse.train.solvers.cca import ClosedForm, Point

_BLOCK = 1024  # pairs
log = logging.getLogger(__name__)


class AsifSettings(SolverSettings):
    """ASIF (Norelli et al., NeurIPS 2023): representations relative to anchors, which are training pairs.

    An image becomes the vector of its cosines with the images of the ``model.dim`` anchors, and a caption the vector of its
    cosines with their captions. In each vector the ``k`` highest cosines are raised to the power ``power``, and the others are
    set to 0. Images and captions are compared by the cosine of these vectors (section 2 of the paper, where k = 800 and
    power = 8). Both encoders are ``relative``.
    """

    name: Literal["asif"] = "asif"
    uses_loss: ClassVar = False
    reads_words: ClassVar = False
    k: list[PositiveInt] = Field(default=[50, 200, 800], min_length=1, description="number of the highest cosines to keep")
    power: list[Annotated[float, Field(gt=0)]] = Field(
        default=[4.0, 8.0],
        min_length=1,
        description="exponent of the cosines; each is tried with each k, and validation chooses",
    )

    def build(self, task: Task) -> Solver:
        assert isinstance(task, RetrievalTask)
        return Asif(task, self)


class Asif(ClosedForm):
    """A run of ASIF: one epoch for each k and power."""

    def __init__(self, task: RetrievalTask, settings: AsifSettings) -> None:
        encoders = [task.model.image_encoder, task.model.caption_encoder]
        self._encoders = [encoder for encoder in encoders if isinstance(encoder, RelativeEncoder)]
        if len(self._encoders) < 2:
            raise UserError("solver: asif requires model.image_encoder=relative and model.caption_encoder=relative")
        if len(task.pairs) < task.model.dim:
            log.warning("solver: asif: only %d training pairs can be anchors, not %d", len(task.pairs), task.model.dim)
        points = product([k for k in settings.k if k <= task.model.dim] or [task.model.dim], settings.power)
        super().__init__("asif", task, [{"k": k, "power": power} for k, power in points])
        self._filled = False

    def fit(self, point: Point) -> None:
        """Set k and power, and in the first epoch the anchors."""
        if not self._filled:
            self._fill(anchor_pairs(self.pairs.image_of, self.model.dim, self.task.seed))
        for encoder in self._encoders:
            encoder.k.fill_(int(point["k"]))
            encoder.power.fill_(point["power"])

    def _fill(self, anchors: Int[np.ndarray, " n_anchors"]) -> None:
        images, captions = self._encoders
        for encoder in self._encoders:
            encoder.anchors.zero_()  # with too few pairs some anchors stay zero: no cosine with them is above 0
        for start in progress_bar(range(0, len(anchors), _BLOCK), desc="anchors", unit="block"):
            indices = anchors[start : start + _BLOCK]
            (seen,) = self.cached.read_images(self.pairs.image_of[indices])
            (read,) = self.task.captions.read(indices)
            for encoder, vectors in ((images, seen), (captions, read)):
                encoder.anchors[start : start + len(indices)] = unit_length(vectors.float())
        self._filled = True


def anchor_pairs(image_of: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Return the indices, sorted, of ``n`` random pairs of as many different images as possible.

    A second caption of an image is chosen only when every image has one, and so on.
    """
    order = np.random.default_rng(seed).permutation(len(image_of))
    by_image = order[np.argsort(image_of[order], kind="stable")]
    _, firsts, counts = np.unique(image_of[by_image], return_index=True, return_counts=True)
    turn = np.empty(len(image_of), np.int64)
    turn[by_image] = np.arange(len(image_of)) - np.repeat(firsts, counts)
    return np.sort(order[np.argsort(turn[order], kind="stable")][:n])
