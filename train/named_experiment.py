"""An experiment by its name, with settings changed, as the data set changes it: trained on a feature cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vse.features.cache import open_cache
from vse.features.hardware import NO_MEMORY, memory_guard, use_threads
from vse.pipeline.errors import UserError
from vse.pipeline.presets import changed_fields
from vse.train.experiment import load_experiment
from vse.train.run.inputs import InputPaths
from vse.train.run.resume import Existing, Extras
from vse.train.training import train

log = logging.getLogger(__name__)


def leads() -> bool:
    """Whether this process is the first of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def train_experiment(
    features: Path,
    experiment: str = "vsepp",
    sets: Sequence[str] = (),
    label: str | None = None,
    *,
    seed: int = 0,
    out: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    inputs: InputPaths = InputPaths(),
    existing: Existing = Existing(),
    extras: Extras = Extras(),
) -> Path:
    """Train an experiment on a feature cache; returns the run folder. See :func:`vse.train.training.train`.

    ``experiment`` is a preset or a YAML file, ``sets`` changes settings of it (``key=value``), and ``label`` is what tables
    call the run; by default the experiment and what was changed. What the preset of the data set changes is logged.
    """
    if label is not None and not (label.strip() and label.isprintable()):
        raise UserError(f"--name {label!r}: a name is a line of printable text")
    if not leads():
        logging.getLogger("vse").setLevel(logging.WARNING)
    use_threads(threads)
    dataset = open_cache(features).dataset
    config = load_experiment(experiment, dataset, sets)
    plain = load_experiment(experiment, None, sets)
    changes = changed_fields(plain.model_dump(), config.model_dump())
    if changes:
        log.info("data set preset %r changes %s", dataset, "; ".join(changes))
    with memory_guard(f"lower train.batch_size, or --set train.features_in_memory=false; {NO_MEMORY}"):
        return train(
            features,
            config.model_copy(update={"label": label}),
            seed=seed,
            out=out,
            device=device,
            inputs=inputs,
            existing=existing,
            extras=extras,
        )
