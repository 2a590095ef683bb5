"""No training: compare cached vectors of images and captions directly, for the zero-shot results of a model such as CLIP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.errors import UserError
from vse.training.settings import SolverSettings
from vse.training.solvers.base import Progress, RetrievalSolver, RetrievalTask, Solver, TrainingTask

log = logging.getLogger(__name__)


class NoTrainingSettings(SolverSettings):
    """No training, for a direct comparison of image and caption vectors of one model, such as CLIP's."""

    name: Literal["none"] = "none"
    uses_loss: ClassVar = False
    learns: ClassVar = False
    accepts_words: ClassVar = False

    def check_inputs(self, images: FeatureCache, captions: FeatureCache | None) -> None:
        """Raise :class:`UserError` if the vectors have different lengths. Warn if different models computed the vectors."""
        assert captions is not None, "words are refused before"
        if images.dim != captions.dim:
            raise UserError(
                f"solver: none compares vectors directly, but {images.path} has {images.dim} numbers per vector, "
                f"{captions.path} {captions.dim}; both caches must be of one model"
            )
        models = [_model_and_weight_names(cache) for cache in (images, captions)]
        if None in models:
            log.warning("%s and %s: it is not known whether the same model computed both", images.path, captions.path)
        elif models[0] != models[1]:
            names = [f"{model[0]} ({model[1]})" for model in models if model is not None]
            log.warning("images by %s, captions by %s: only vectors of one model can be compared directly", *names)

    def build(self, task: TrainingTask) -> Solver:
        assert isinstance(task, RetrievalTask)
        return NoTrainingSolver(task)


class NoTrainingSolver(RetrievalSolver):
    """A solver with one epoch and no step: the model has no weights and is only validated."""

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
        with self.stop_on_signal(save):
            row = {"epoch": 1, **self.validate()}
        row["seconds"] = round(time.perf_counter() - started, 2)
        self.progress = Progress(1, [row])

    def describe(self, row: Mapping[str, float]) -> str:
        return "nothing is trained"


def _model_and_weight_names(cache: FeatureCache) -> tuple[str, str] | None:
    """Return the names of the model that computed a cache and of the weights, or None for a cache of imported features."""
    made = cache.provenance
    model = made.get("config", {}).get("model")
    return None if model is None else (str(model), str(made.get("weights")))
