"""Tasks, and batches of them, that adversaries play with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.training.conftest import experiment
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.experiment import ExperimentConfig
from vse.training.losses.base import Batch
from vse.training.options import TrainInputs
from vse.training.prepare import prepare_task
from vse.training.processes.launchers import join_processes
from vse.training.run.folder import RunFolder
from vse.training.run.inputs import open_inputs
from vse.training.solvers.base import RetrievalTask

STATES = "model.caption_encoder={name: gru, states: all, bidirectional: true}"
SCAN = ["model.similarity={name: scan, attention: i2t, sharpness: 4}", STATES]


def task_of(cache: Path, *sets: str) -> RetrievalTask:
    """What a solver would be given for an experiment on a cache."""
    return prepared(cache, experiment(*sets))


def prepared(cache: Path, settings: ExperimentConfig) -> RetrievalTask:
    opened = open_cache(cache)
    dataset = load_dataset_file(opened.dataset_file)
    inputs = open_inputs(opened, dataset, settings, RunFolder(Path("nowhere")), 0, TrainInputs())
    return prepare_task(settings, inputs, 0, join_processes("cpu"), 0)[0]


def batch_of(task: RetrievalTask, pairs: list[int]) -> Batch:
    """Some pairs, embedded."""
    numbers = np.asarray(pairs)
    image_indices = task.pairs.image_indices
    (seen,) = task.image_inputs.read_batches([numbers], image_indices, 0, 0)
    images, captions = task.model.embed_images(*seen), task.model.embed_captions(*task.caption_inputs.read(numbers))
    return Batch(images, captions, image_indices[numbers], numbers, pair_indices=numbers)


def grid(loss: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients, zeros where there are none."""
    gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
