"""Measure the speeds of this machine for ``vse-data plan``, from its finished runs and shards or by a short computation."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vse.features.settings import load_feature
from vse.features.settings.base import FeatureSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.preset_files import read_yaml
from vse.pipeline.presets.presets import load_experiment_outline

CALIBRATION_SECONDS = 10.0
_COST_SETTINGS = ("model", "loss", "images", "adversary", "solver", "start_from", "backbone", "feature", "caption_feature")
_CHANGED_SETTINGS_PATTERN = re.compile(r"--set\b|\bsets=")  # found in the command of a run with changed settings


class TrainingRate(NamedTuple):
    """Training pairs per second, and the device of the run."""

    per_s: float
    device: str


@dataclass(frozen=True)
class OwnRates:
    """Speeds of this machine.

    training : speed of a finished run; the key is the JSON of its experiment and of the settings that determine the speed
    features : rows per second of a feature; the key is the JSON of the feature's settings
    relative_speed : speed of this machine divided by the speed of the machine of ``config/rates.yaml``; None: not measured
    """

    training: Mapping[str, TrainingRate] = field(default_factory=dict)
    features: Mapping[str, float] = field(default_factory=dict)
    relative_speed: float | None = None

    def find_training_rate(self, dataset: str, experiment: str) -> TrainingRate | None:
        """Return the speed of a run of the same experiment; None without such a run.

        A run on another data set counts only if the two data sets' presets leave the model, the loss, the batch size and the
        features the same. The demo's preset has a smaller network and model, so its speed is not that of COCO.
        """
        cost = _describe_cost(dataset, experiment)
        return None if cost is None else self.training.get(_to_key(cost))

    def find_feature_rate(self, config: FeatureSettings) -> float | None:
        """Return the rows per second of a cache of the same extractor, network and settings; None without such a cache."""
        settings = config.key_settings()
        precisions = ("bf16", "fp16", "fp32") if settings.get("precision") == "auto" else (settings.get("precision"),)
        keys = (_to_key({**settings, **({"precision": one} if one else {})}) for one in precisions)
        return next((self.features[key] for key in keys if key in self.features), None)


def read_own_rates(folder: Path = Path()) -> OwnRates:
    """Return the speeds of the finished runs in ``runs/`` and of the finished shards in ``features/`` of a folder.

    A run counts only if it has the settings of its preset: neither the command nor a later edit of the preset changed them.
    """
    training: dict[str, TrainingRate] = {}
    for file in sorted(folder.glob("runs/*/seed-*/run.json"), key=lambda path: path.stat().st_mtime):
        with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError, UserError):
            record, settings = json.loads(file.read_text(encoding="utf-8")), read_yaml(file.with_name("config.yaml"))
            cost = _describe_cost(record["dataset"], record["experiment"])
            is_changed = _CHANGED_SETTINGS_PATTERN.search(record["made"]["command"] or "") is not None
            if (
                record["state"] == "finished"
                and cost is not None
                and not is_changed
                and _has_settings(settings, cost["preset"])
            ):
                per_s = record["n_train_pairs"] * record["epochs"] / record["train_seconds"]
                training[_to_key(cost)] = TrainingRate(per_s, str(record["device"]))
    rows: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for file in folder.glob("features/*.shards/shard-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(file.read_text(encoding="utf-8"))
            key_of_feature, duration = _to_key(record["identity"]["content"]["config"]), float(record["seconds"])
            rows[key_of_feature] = rows.get(key_of_feature, 0) + record["rows"]
            seconds[key_of_feature] = seconds.get(key_of_feature, 0) + duration
    return OwnRates(training, {key: rows[key] / seconds[key] for key in rows if seconds[key] > 0})


def measure_calibration() -> float:
    """Run a fixed convolution and a fixed matrix product for ten seconds; return how often both run per second.

    The convolution stands for extraction, the matrix product for training. ``config/rates.yaml`` contains the result of the
    machine on which its rates were measured.
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
    """Return the settings that determine how long a training pair takes; None for an unknown experiment or data set.

    The entry ``preset`` holds settings of the experiment, the entry ``features`` the settings of the features that it reads.
    """
    try:
        settings = load_experiment_outline(experiment, dataset).weight_settings()
        names = [name for name in (settings.get("feature"), settings.get("caption_feature")) if isinstance(name, str)]
        features = [load_feature(name, dataset).key_settings() for name in names]
    except UserError:
        return None
    preset = {key: settings[key] for key in _COST_SETTINGS if settings.get(key) is not None}
    batch_size = (settings.get("train") or {}).get("batch_size")
    return {
        "experiment": experiment,
        "preset": {**preset, **({"train": {"batch_size": batch_size}} if batch_size is not None else {})},
        "features": features,
    }


def _has_settings(settings: Any, wanted: Any) -> bool:
    """Return whether the ``settings`` of a run contain the settings ``wanted``. A name matches the settings of this name."""
    if isinstance(wanted, Mapping):
        return isinstance(settings, Mapping) and all(_has_settings(settings.get(key), wanted[key]) for key in wanted)
    return bool((settings.get("name") if isinstance(settings, Mapping) else settings) == wanted)


def _to_key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
