"""How much a target of the workflow downloads and stores, and how long it takes, before anything starts.

Sizes and measured rates of networks, features and trainings, by which :mod:`vse.features.plan` estimates.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from vse.features.settings.base import FeatureSettings
from vse.features.settings.presets import load_feature
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.sources import source_folder
from vse.pipeline.presets.preset_files import read_yaml
from vse.pipeline.presets.presets import known_presets, load_dataset, load_plan, merge_settings, validate_settings
from vse.pipeline.presets.schema import DatasetConfig, Settings
from vse.pipeline.workflow import PlannedFile, dataset_pattern, plan_files


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
        return validate_settings(Rates, "rates", "rates.yaml", shipped)
    content = read_yaml(own)
    content = content if isinstance(content, Mapping) else {"machine": content}
    named = content.get("machine", f"that of {own}")
    both = {**merge_settings(shipped, content), "machine": f"{named}; where {own.name} has none: {shipped['machine']}"}
    return validate_settings(Rates, "rates", str(own), both)


def measured_here(runs: Path = Path("runs")) -> dict[str, float]:
    """Pairs a second of each experiment that was trained in a folder of runs, the last that finished."""
    rates: dict[str, float] = {}
    for file in sorted(runs.glob("*/seed-*/run.json"), key=lambda path: path.stat().st_mtime):
        with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            record = json.loads(file.read_text(encoding="utf-8"))
            if record["state"] == "finished":
                rates[str(record["experiment"])] = record["n_train_pairs"] * record["epochs"] / record["train_seconds"]
    return rates


EPOCHS = 30  # of an experiment that names none
_BYTES = {"float16": 2, "float32": 4}
_PLACES = {
    "extract": r"features/({dataset})_([^/]+)\.shards/shard-\d+-of-(\d+)\.h5",
    "fit": r"features/({dataset})_([^/]+)\.encoder\.safetensors",
    "train": r"runs/({dataset})_([^/]+)/seed-(\d+)/run\.json",
    "prepare": r"data/({dataset})/dataset\.json",
}
_SECOND = ("manifest.json",)  # what a job makes beside its other file
Counts = dict[str, tuple[int, int]]


@dataclass
class TargetPlan:
    """What targets take: lines of ``(amount, what)``, and what is not known.

    downloads : bytes
    stored : bytes of feature caches
    seconds : of extraction and training, one job after the other
    """

    jobs: Counter[str] = field(default_factory=Counter)
    downloads: list[tuple[float, str]] = field(default_factory=list)
    stored: list[tuple[float, str]] = field(default_factory=list)
    seconds: list[tuple[float, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def plan_target(targets: Sequence[str], settings: Sequence[str] = (), rates_file: Path | None = None) -> str:
    """A report of what the jobs take that the workflow has to run for some targets; nothing is run.

    ``settings`` are those of ``snakemake --config``, ``rates_file`` has rates of another machine. What has no known size or
    rate is named, not guessed. :class:`vse.pipeline.errors.UserError` if the workflow makes no such target.
    """
    rates = load_rates(rates_file)
    plan = estimated(plan_files(targets, settings), rates, measured_here())
    return "\n".join(_lines(", ".join(targets), plan, rates))


def estimated(planned: Sequence[PlannedFile], rates: Rates, trained_here: dict[str, float]) -> TargetPlan:
    """The estimate for the files that jobs have to make."""
    plan = TargetPlan()
    shards: Counter[tuple[str, str, int]] = Counter()
    seen: set[tuple[str, ...]] = set()
    for one in planned:
        pattern = _PLACES.get(one.rule)
        match = re.fullmatch(pattern.replace("{dataset}", dataset_pattern()), one.path.as_posix()) if pattern else None
        if match is None:
            plan.jobs[one.rule] += one.rule not in _PLACES and one.path.name not in _SECOND
            continue
        plan.jobs[one.rule] += 1
        names = match.groups()
        if one.rule == "extract":
            shards[names[0], names[1], int(names[2])] += 1
        elif one.rule == "prepare":
            _downloads(plan, load_dataset(names[0]))
        elif one.rule == "train" and names not in seen:
            seen.add(names)
            _training(plan, names[0], names[1], names[2], rates, trained_here)
    for (dataset, feature, n_shards), pending in shards.items():
        _extraction(plan, dataset, feature, pending / n_shards, rates)
    return plan


def _downloads(plan: TargetPlan, config: DatasetConfig) -> None:
    """The published files of a data set that are not in its folder yet."""
    folder = source_folder(config.name)
    missing = {one.url: one.bytes for one in config.files if not (folder / one.to).exists()}
    for url, size in missing.items():
        plan.downloads.append((size, f"{url.rpartition('/')[2]}, by vse-data fetch {config.name}"))
    images = folder / config.images
    fetched = any(one.to == config.images or one.to.startswith(f"{config.images}/") for one in config.files)
    if config.is_published and not images.is_dir() and not fetched:
        plan.unknown.append(f"size of the images of {config.name}, which must be asked for: {images} is not there")


def _extraction(plan: TargetPlan, dataset: str, feature: str, share: float, rates: Rates) -> None:
    """The shards of a feature that are to be made, ``share`` of all."""
    config = load_feature(feature, dataset)
    name, counts = f"features/{dataset}_{feature}.h5", _counts(dataset)
    network = rates.networks.get(str(getattr(config, "model", "")))
    model, weights = getattr(config, "model", None), getattr(config, "weights", None)
    if model is not None and weights != "random" and not config.files():
        what = f"weights of {model}, unless they are in --weights-dir or in their library's cache"
        if network is None or network.weights_mb is None:
            plan.unknown.append(f"size of the {what}")
        elif all(what != known for _, known in plan.downloads):
            plan.downloads.append((network.weights_mb * 1e6, what))
    if counts is None or config.text_rows == "phrases":
        plan.unknown.append(f"size and time of {name}: how many rows it has")
        return
    rows = share * sum(n[config.kind == "text"] for n in counts.values())
    numbers = _numbers(config, rates)
    if numbers is None:
        plan.unknown.append(f"size of {name}: how many numbers a row has")
    else:
        at_most = "at most " if config.row_kind == "sets" else ""
        plan.stored.append(
            (rows * numbers * _BYTES[config.dtype], f"{name}, {rows:,.0f} rows of {at_most}{numbers:,} numbers")
        )
    rate = _rows_per_s(config, rates)
    if rate is None:
        plan.unknown.append(f"time of {name}: no rate of {getattr(config, 'model', feature)}; name one under --rates")
    else:
        plan.seconds.append((rows / rate, f"{name}, {rate:,.1f} rows a second"))


def _numbers(config: FeatureSettings, rates: Rates) -> int | None:
    """How many numbers a row of a feature has, or at most; None if that is not known."""
    if config.fitted:
        if (kept := getattr(config, "pca", None)) is not None:
            return int(kept) * len(getattr(config, "mixtures", ["hybrid"]))
        trained = getattr(config, "trained_dim", None)
        return None if trained is None or config.word_file() is not None else int(trained)
    network = rates.networks.get(str(getattr(config, "model", "")))
    layer = {"text": "text", "regions": "box_head"}.get(config.extractor_name(), str(getattr(config, "layer", "")))
    vector, vectors = None if network is None else network.numbers.get(layer), config.most_vectors
    return None if vector is None or vectors is None else vector * vectors


def _rows_per_s(config: FeatureSettings, rates: Rates) -> float | None:
    """How many rows of a feature are made a second."""
    if config.name in rates.features:
        return rates.features[config.name]
    network = rates.networks.get(str(getattr(config, "model", "")))
    if network is None or config.network_reads is None:
        return None
    precision = str(getattr(config, "precision", "fp32"))
    fastest = max(network.per_s.values(), default=None)
    rate = fastest if precision == "auto" else network.per_s.get(precision)
    if (config.extractor_name() == "text" and "text" not in network.numbers) or rate is None:
        return None
    return rate / config.network_reads


def _training(
    plan: TargetPlan, dataset: str, experiment: str, seed: str, rates: Rates, trained_here: dict[str, float]
) -> None:
    """A run, by the rate of earlier ones."""
    name, counts = f"runs/{dataset}_{experiment}/seed-{seed}", _counts(dataset)
    settings = load_plan(experiment, dataset).content().get("train") or {}
    rate = trained_here.get(experiment, rates.training.get(experiment))
    if counts is None or rate is None:
        why = f"no rate of {experiment}; name one under --rates" if rate is None else "how many pairs it has"
        plan.unknown.append(f"time of {name}: {why}")
        return
    splits = ("train", "restval") if settings.get("restval") else ("train",)
    pairs, epochs = sum(counts[split][1] for split in splits if split in counts), int(settings.get("epochs", EPOCHS))
    where = ", as measured in runs/" if experiment in trained_here else ""
    plan.seconds.append((pairs * epochs / rate, f"{name}, {epochs} epochs of {pairs:,} pairs, {rate:,.0f} a second{where}"))


def _counts(dataset: str) -> Counts | None:
    """Images and captions of each split: of the data set that is there, else as its preset has them; None if not known."""
    file = Path("data", dataset, "dataset.json")
    if file.is_file():
        images = load_dataset_file(file).splits
        return {split: (len(of), sum(len(image.captions) for image in of)) for split, of in images.items()}
    if dataset not in known_presets("datasets"):
        return None
    config = load_dataset(dataset)
    if config.n_images is not None:
        n = config.n_images
        parts = {"train": n * 8 // 11, "val": n // 11}
        parts["test"] = n - sum(parts.values())
        return {split: (images, 5 * images) for split, images in parts.items()}
    return config.splits or None


def _lines(targets: str, plan: TargetPlan, rates: Rates) -> Iterator[str]:
    jobs = ", ".join(f"{n} {rule}" for rule, n in sorted(plan.jobs.items()))
    yield f"{targets}: {sum(plan.jobs.values())} jobs to run ({jobs})" if jobs else f"{targets}: nothing to run, all is there"
    parts: tuple[tuple[str, list[tuple[float, str]], float, Callable[[float], str]], ...] = (
        ("to download", plan.downloads, 1e9, lambda value: f"{value:.2f} GB"),
        ("caches", plan.stored, 1e9, lambda value: f"{value:.2f} GB"),
        ("time", plan.seconds, 3600, lambda value: f"{value:.1f} h" if value >= 1 else f"{60 * value:.0f} min"),
    )
    for name, items, unit, shown in parts:
        if items:
            yield f"{name}: {shown(sum(amount for amount, _ in items) / unit)}"
        for amount, what in sorted(items, key=lambda item: -item[0]):
            yield f"  {shown(amount / unit):>10}  {what}"
    if plan.unknown:
        yield "not known:"
        yield from (f"  {what}" for what in dict.fromkeys(plan.unknown))
    if plan.seconds:
        yield f"Rates of {rates.machine}; jobs one after the other; embedding and evaluation are not counted."
