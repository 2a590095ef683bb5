"""Speeds of this machine, for ``vse-data plan``: of its finished runs and caches, and of a short fixed computation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vse.features.settings import load_feature
from vse.features.settings.base import FeatureSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import load_experiment_outline

CALIBRATION_SECONDS = 8.0
_COST_SETTINGS = ("model", "loss", "images", "adversary", "solver", "start_from", "backbone")  # they set the time of a step


@dataclass(frozen=True)
class OwnRates:
    """Speeds of this machine.

    training : pairs per second, by data set and experiment
    features : rows per second, by the settings of the feature as JSON
    relative_speed : speed relative to the machine of ``config/rates.yaml``; None: not calibrated
    """

    training: Mapping[tuple[str, str], float] = field(default_factory=dict)
    features: Mapping[str, float] = field(default_factory=dict)
    relative_speed: float | None = None

    def find_training_rate(self, dataset: str, experiment: str) -> float | None:
        """Return the pairs per second of a run of the same experiment; None without such a run.

        A run on another data set counts only if the two data sets' presets leave the model, the loss, the batch size and the
        feature the same. The demo's preset has a smaller network and model, so its speed is not that of COCO.
        """
        if (dataset, experiment) in self.training:
            return self.training[dataset, experiment]
        wanted = _describe_cost(dataset, experiment)
        if wanted is None:
            return None
        others = (other for other, name in self.training if name == experiment)
        return next(
            (self.training[other, experiment] for other in others if _describe_cost(other, experiment) == wanted), None
        )

    def find_feature_rate(self, config: FeatureSettings) -> float | None:
        """Return the rows per second of a cache of the same extractor, network and settings; None without such a cache."""
        settings = config.key_settings()
        precisions = ("bf16", "fp16", "fp32") if settings.get("precision") == "auto" else (settings.get("precision"),)
        keys = (_to_key({**settings, **({"precision": one} if one else {})}) for one in precisions)
        return next((self.features[key] for key in keys if key in self.features), None)


def read_own_rates(folder: Path = Path()) -> OwnRates:
    """Return the speeds of the finished runs in ``runs/`` and of the finished shards in ``features/`` of a folder."""
    training: dict[tuple[str, str], float] = {}
    for file in sorted(folder.glob("runs/*/seed-*/run.json"), key=lambda path: path.stat().st_mtime):
        with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["state"] == "finished":
                key = str(record["dataset"]), str(record["experiment"])
                training[key] = record["n_train_pairs"] * record["epochs"] / record["train_seconds"]
    rows: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for file in folder.glob("features/*.shards/shard-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(file.read_text(encoding="utf-8"))
            key_of_feature, taken = _to_key(record["identity"]["content"]["config"]), float(record["seconds"])
            rows[key_of_feature] = rows.get(key_of_feature, 0) + record["rows"]
            seconds[key_of_feature] = seconds.get(key_of_feature, 0) + taken
    return OwnRates(training, {key: rows[key] / seconds[key] for key in rows if seconds[key] > 0})


def measure_calibration() -> float:
    """Return how often a second this machine runs a convolution and a matrix product of fixed sizes, in eight seconds.

    The two stand for the networks and for the training. The shipped rates contain the number of their machine.
    """
    import torch

    images, kernels = torch.ones(4, 64, 56, 56), torch.ones(64, 64, 3, 3)
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    count, started = 0, time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() - started < CALIBRATION_SECONDS:
            torch.nn.functional.conv2d(images, kernels, padding=1)
            left @ right
            count += 1
    return count / (time.perf_counter() - started)


def _describe_cost(dataset: str, experiment: str) -> dict[str, Any] | None:
    """Return the settings of an experiment on a data set that determine the time of a training pair; None if unknown."""
    try:
        outline = load_experiment_outline(experiment, dataset)
        settings = outline.weight_settings()
        names = [name for name in (settings.get("feature"), settings.get("caption_feature")) if isinstance(name, str)]
        features = [load_feature(name, dataset).key_settings() for name in names]
    except UserError:
        return None
    cost = {key: settings.get(key) for key in _COST_SETTINGS}
    return {**cost, "batch_size": (settings.get("train") or {}).get("batch_size"), "features": features}


def _to_key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
