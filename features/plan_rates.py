"""Sizes and measured rates of networks, features and trainings, by which :mod:`vse.features.plan` estimates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from vse.pipeline.config import Settings
from vse.pipeline.preset_files import read_yaml
from vse.pipeline.presets import merged, validated


class NetworkRates(Settings):
    """What is known of a network; what is not is left out."""

    numbers: dict[str, PositiveInt] = Field(default_factory=dict, description="of a vector, by the layer; text: of a caption")
    weights_mb: NonNegativeFloat | None = None
    per_s: dict[str, PositiveFloat] = Field(default_factory=dict, description="crops or captions a second, by precision")


class Rates(Settings):
    """All that is known of a machine, see ``config/rates.yaml``."""

    machine: str
    networks: dict[str, NetworkRates] = Field(default_factory=dict)
    features: dict[str, PositiveFloat] = Field(default_factory=dict, description="rows a second, by the preset's name")
    training: dict[str, PositiveFloat] = Field(default_factory=dict, description="pairs a second, by the experiment's name")


def load_rates(own: Path | None = None) -> Rates:
    """The rates that ship, with those of a file of the same form on top; its ``machine`` is named beside the other one's."""
    shipped = read_yaml(Path(str(files("vse.presets").joinpath("rates.yaml"))))
    if own is None:
        return validated(Rates, "rates", "rates.yaml", shipped)
    content = read_yaml(own)
    content = content if isinstance(content, Mapping) else {"machine": content}
    named = content.get("machine", f"that of {own}")
    both = {**merged(shipped, content), "machine": f"{named}; where {own.name} has none: {shipped['machine']}"}
    return validated(Rates, "rates", str(own), both)


def measured_here(runs: Path = Path("runs")) -> dict[str, float]:
    """Pairs a second of each experiment that was trained in a folder of runs, the last that finished."""
    rates: dict[str, float] = {}
    for file in sorted(runs.glob("*/seed-*/run.json"), key=lambda path: path.stat().st_mtime):
        with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["state"] == "finished":
                rates[str(record["experiment"])] = record["n_train_pairs"] * record["epochs"] / record["train_seconds"]
    return rates
