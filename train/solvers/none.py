"""No training at all: cached vectors of one model are compared as they are, its zero-shot row."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.errors import UserError
from vse.train.settings import SolverSettings
from vse.train.solvers.base import Progress, RetrievalSolver, RetrievalTask, Solver, Task

log = logging.getLogger(__name__)


class NoTrainingSettings(SolverSettings):
    """Nothing is trained: image and caption vectors that share a space already, as CLIP's do, are compared as they are."""

    name: Literal["none"] = "none"
    uses_loss: ClassVar = False
    learns: ClassVar = False
    reads_words: ClassVar = False

    def check_inputs(self, images: FeatureCache, captions: FeatureCache | None) -> None:
        """Vectors of two lengths are refused; those of two models are compared with a warning."""
        assert captions is not None, "words are refused before"
        if images.dim != captions.dim:
            raise UserError(
                f"solver: none compares vectors as they are, and {images.path} has {images.dim} numbers per vector, "
                f"{captions.path} {captions.dim}; both caches must be of one model"
            )
        towers = [_tower(cache) for cache in (images, captions)]
        if None in towers:
            log.warning("%s and %s: whether they are of one model is not known", images.path, captions.path)
        elif towers[0] != towers[1]:
            made_by = [f"{tower[0]} ({tower[1]})" for tower in towers if tower is not None]
            log.warning("images by %s, captions by %s: only vectors of one model can be compared as they are", *made_by)

    def build(self, task: Task) -> Solver:
        assert isinstance(task, RetrievalTask)
        return NoTraining(task)


class NoTraining(RetrievalSolver):
    """A run of one epoch without a step: the model is validated, and its weights, which are none, are its best."""

    epochs = 1

    def __init__(self, task: RetrievalTask) -> None:
        if task.processes.size > 1:
            raise UserError("solver: none takes one process")
        weight = next((name for name, _ in task.model.named_parameters()), None)
        if weight is not None:
            part = weight.partition(".")[0]
            cure = f"--set model.{part}=identity" if part.endswith("encoder") else f"a {part} without weights"
            raise UserError(f"solver: none trains nothing, and the {part.replace('_', ' ')} has weights to learn: {cure}")
        super().__init__(task)

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Validate."""
        started = time.perf_counter()
        with self.stoppable(save):
            row = {"epoch": 1, **self.validate()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.progress = Progress(1, [row])

    def described(self, row: Mapping[str, float]) -> str:
        return "nothing is trained"


def _tower(cache: FeatureCache) -> tuple[str, str] | None:
    """The model that made a cache and the name of its weights; None if that is not known, as of imported features."""
    made = cache.provenance
    model = made.get("config", {}).get("model")
    return None if model is None else (str(model), str(made.get("weights")))
