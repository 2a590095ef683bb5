"""Estimate the downloads, the disk space and the time of a workflow target before it runs (``vse-data plan``).

Speeds come from this machine's runs and caches (:mod:`vse.features.up_to_date`), or else from ``config/rates.yaml``. The
speeds in that file were measured on another machine, so an estimate from them is a range. Unknown sizes and speeds are
listed, not guessed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from operator import mul, truediv
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from vse.features.settings import load_feature_preset
from vse.features.settings.base import FeatureSettings
from vse.features.up_to_date import LocalRates, measure_calibration, read_local_rates
from vse.pipeline.dataset.columns import count_captions_per_image
from vse.pipeline.dataset.dataset import find_dataset_file, load_dataset_file
from vse.pipeline.dataset.preparation import find_source_folder
from vse.pipeline.presets.preset_files import read_yaml
from vse.pipeline.presets.presets import (
    list_preset_names,
    load_dataset_preset,
    load_experiment_outline,
    merge_settings,
    validate_settings,
)
from vse.pipeline.presets.schema import DatasetConfig, Settings
from vse.pipeline.workflow import PlannedFile, build_dataset_pattern, plan_files


class NetworkRates(Settings):
    """Sizes and speeds of a pretrained network, to estimate disk space and time. None: unknown."""

    numbers: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="length of a layer's output vector, by layer name; the name text stands for a caption's vector",
    )
    weights_mb: NonNegativeFloat | None = None
    stride: PositiveInt | None = Field(None, description="pixels of a crop per position of the last feature map")
    per_s: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="crops of 224 x 224 pixels or captions per second, by precision"
    )


class Rates(Settings):
    """Sizes and speeds that were measured on a machine (``config/rates.yaml``). ``machine`` describes this machine."""

    machine: str
    calibration_per_s: PositiveFloat | None = Field(
        None, description="result of vse.features.up_to_date.measure_calibration on this machine"
    )
    networks: dict[str, NetworkRates] = Field(default_factory=dict)
    features: dict[str, PositiveFloat] = Field(default_factory=dict, description="rows per second, by the preset's name")
    training: dict[str, PositiveFloat] = Field(default_factory=dict, description="pairs per second, by the experiment's name")
    local_names: frozenset[str] = Field(
        frozenset(), description="networks, features and experiments whose rates are those of the user's machine"
    )


def load_rates(user_file: Path | None = None) -> Rates:
    """Return the sizes and speeds in ``config/rates.yaml``. Entries of ``user_file`` replace entries of the same name.

    With a ``user_file``, the field ``machine`` of the result names the machines of both files. Raises UserError if an entry is
    not valid.
    """
    shipped = read_yaml(Path(str(files("vse.presets").joinpath("rates.yaml"))))
    if user_file is None:
        return validate_settings(Rates, "rates", "rates.yaml", shipped)
    content = read_yaml(user_file)
    content = content if isinstance(content, Mapping) else {"machine": content}
    named = content.get("machine", f"that of {user_file}")
    both = {**merge_settings(shipped, content), "machine": f"{named}; where {user_file.name} has none: {shipped['machine']}"}
    rates = validate_settings(Rates, "rates", str(user_file), both)
    networks, *groups = (content.get(key) or {} for key in ("networks", "features", "training"))
    names = [*(name for name in networks if "per_s" in networks[name]), *(name for group in groups for name in group)]
    return rates.model_copy(update={"local_names": frozenset(names)})


DEFAULT_EPOCHS = 30  # for an experiment without a number of epochs
_USER_RATE_SOURCE = "given by --rates"
# Factor by which a time may be shorter or longer than estimated from the rates of another machine. Cores of the processors of
# the last ten years differ in speed by a factor of about 3. A calibration measures this factor, but networks also differ in
# their use of memory and instructions.
_UNCALIBRATED_FACTOR, _CALIBRATED_FACTOR = 3.0, 1.5
_RATE_CROP_SIDE = 224  # side of the crops whose rates were measured
_BYTES_PER_NUMBER = {"float16": 2, "float32": 4}
_OUTPUT_PATTERNS = {  # patterns of output paths, by the name of the workflow's rule
    "extract": r"features/({dataset})_([^/]+)\.shards/shard-\d+-of-(\d+)\.h5",
    "fit": r"features/({dataset})_([^/]+)\.encoder\.safetensors",
    "train": r"runs/({dataset})_([^/]+)/seed-(\d+)/run\.json",
    "prepare": r"data/({dataset})/dataset\.json",
    "imported": r"features/({dataset})_([^/]+)\.h5",
}
_UNCOUNTED_OUTPUT_NAMES = ("manifest.json",)  # second output files; not counted as jobs
ImageAndCaptionCounts = dict[str, tuple[int, int]]  # numbers of images and captions, by split


class Duration(NamedTuple):
    """The estimated time of one extraction or training.

    description : text for the report, with the work and the speed
    is_measured_here : True if the speed was measured on the user's machine
    """

    seconds: float
    description: str
    is_measured_here: bool = False


@dataclass
class TargetPlan:
    """The estimated work of the workflow for some targets.

    job_counts : number of jobs of each rule
    download_sizes : (bytes, description) of each download
    cache_sizes : (bytes, description) of each feature cache
    durations : the time of each extraction and training
    unknown_amounts : descriptions of unknown sizes and times
    """

    job_counts: Counter[str] = field(default_factory=Counter)
    download_sizes: list[tuple[float, str]] = field(default_factory=list)
    cache_sizes: list[tuple[float, str]] = field(default_factory=list)
    durations: list[Duration] = field(default_factory=list)
    unknown_amounts: list[str] = field(default_factory=list)


def describe_plan(
    targets: Sequence[str], settings: Sequence[str] = (), rates_file: Path | None = None, must_calibrate: bool = False
) -> str:
    """Return a report of the remaining work of the workflow for some targets. Nothing is run.

    ``settings`` are the arguments of ``snakemake --config``. ``rates_file`` has the format of ``config/rates.yaml`` and holds
    speeds of the user's machine. With ``must_calibrate``, a computation of ten seconds compares this machine with the machine
    in ``config/rates.yaml``. Raises UserError if the workflow lacks a target.
    """
    rates, local = load_rates(rates_file), read_local_rates()
    planned_files = plan_files(targets, settings)
    if must_calibrate and rates.calibration_per_s is not None:
        local = replace(local, relative_speed=measure_calibration() / rates.calibration_per_s)
    plan = estimate_plan(planned_files, rates, local)
    return "\n".join(_build_report_lines(", ".join(targets), plan, rates, local.relative_speed))


def estimate_plan(planned_files: Sequence[PlannedFile], rates: Rates, local: LocalRates | None = None) -> TargetPlan:
    """Return the estimated work for the files that the workflow still has to write.

    rates : sizes and speeds of ``config/rates.yaml`` or of the user's file
    local : speeds of finished runs and caches on this machine, which replace speeds in ``rates``; None: no such speeds
    """
    plan, local = TargetPlan(), local or LocalRates()
    shards: Counter[tuple[str, str, int]] = Counter()
    seen: set[tuple[str, ...]] = set()
    for planned_file in planned_files:
        pattern = _OUTPUT_PATTERNS.get(planned_file.rule)
        match = (
            re.fullmatch(pattern.replace("{dataset}", build_dataset_pattern()), planned_file.path.as_posix())
            if pattern
            else None
        )
        if match is None:
            plan.job_counts[planned_file.rule] += (
                planned_file.rule not in _OUTPUT_PATTERNS and planned_file.path.name not in _UNCOUNTED_OUTPUT_NAMES
            )
            continue
        plan.job_counts[planned_file.rule] += 1
        names = match.groups()
        if planned_file.rule == "extract":
            shards[names[0], names[1], int(names[2])] += 1
        elif planned_file.rule == "prepare":
            _add_downloads(plan, load_dataset_preset(names[0]))
        elif planned_file.rule == "imported":
            where = getattr(load_feature_preset(names[1], names[0]), "where", "")
            plan.unknown_amounts.append(f"files to import into {planned_file.path}. {where}")
        elif planned_file.rule == "train" and names not in seen:
            seen.add(names)
            _add_training(plan, names[0], names[1], names[2], rates, local)
    for (dataset, feature, n_shards), pending in shards.items():
        _add_extraction(plan, dataset, feature, pending / n_shards, rates, local)
    return plan


def _add_downloads(plan: TargetPlan, config: DatasetConfig) -> None:
    folder = find_source_folder(config.name)
    missing = {one.url: one.bytes for one in config.files if not (folder / one.to).exists()}
    for url, size in missing.items():
        plan.download_sizes.append((size, f"{url.rpartition('/')[2]}, by vse-data fetch {config.name}"))
    images = folder / config.images
    fetched = any(one.to == config.images or one.to.startswith(f"{config.images}/") for one in config.files)
    if config.is_published and not images.is_dir() and not fetched:
        plan.unknown_amounts.append(f"size of the images of {config.name}, which must be requested: {images} is not there")


def _add_extraction(plan: TargetPlan, dataset: str, feature: str, share: float, rates: Rates, local: LocalRates) -> None:
    """Add a feature's download, size and time to ``plan``; ``share`` is the share of its shards that are not finished."""
    config = load_feature_preset(feature, dataset)
    name, counts = f"features/{dataset}_{feature}.h5", _count_images_and_captions(dataset)
    network = rates.networks.get(str(getattr(config, "model", "")))
    model, weights = getattr(config, "model", None), getattr(config, "weights", None)
    if model is not None and weights != "random" and not config.list_input_files():
        what = f"weights of {model}, unless they are in --weights-dir or in their library's cache"
        if network is None or network.weights_mb is None:
            plan.unknown_amounts.append(f"size of the {what}")
        elif all(what != known for _, known in plan.download_sizes):
            plan.download_sizes.append((network.weights_mb * 1e6, what))
    if counts is None or config.text_unit == "phrases":
        plan.unknown_amounts.append(f"size and time of {name}: the number of rows is not known")
        return
    splits = getattr(config, "splits", None) or counts
    rows = share * sum(n[config.kind == "text"] for split, n in counts.items() if split in splits)
    numbers = _count_numbers_per_row(config, rates)
    if numbers is None:
        plan.unknown_amounts.append(f"size of {name}: the number of values in a row is not known")
    else:
        at_most = "at most " if config.row_kind == "sets" else ""
        plan.cache_sizes.append(
            (rows * numbers * _BYTES_PER_NUMBER[config.dtype], f"{name}, {rows:,.0f} rows of {at_most}{numbers:,} numbers")
        )
    rate = _find_rows_per_second(config, rates)
    source = _USER_RATE_SOURCE if {config.name, model} & rates.local_names else None
    if (measured := local.find_feature_rate(config)) is not None:
        rate, source = measured, "measured here"
    if rate is None:
        plan.unknown_amounts.append(
            f"time of {name}: no rate of {getattr(config, 'model', feature)}; add it to a --rates file"
        )
    else:
        plan.durations.append(_build_duration(rows, rate, name, "rows per second", source, local))


def _count_numbers_per_row(config: FeatureSettings, rates: Rates) -> int | None:
    if config.fits_encoder:
        if (pca := getattr(config, "pca", None)) is not None:
            return int(pca) * len(getattr(config, "mixtures", ["hybrid"]))
        trained = getattr(config, "trained_dim", None)
        return None if trained is None or config.find_word_file() is not None else int(trained)
    network = rates.networks.get(str(getattr(config, "model", "")))
    layer = {"text": "text", "regions": "box_head"}.get(config.extractor_name(), str(getattr(config, "layer", "")))
    vector, vectors = None if network is None else network.numbers.get(layer), config.max_vectors_per_row
    if vectors is None and network is not None and network.stride is not None and getattr(config, "positions", False):
        vectors = math.ceil(getattr(config, "crop", _RATE_CROP_SIDE) / network.stride) ** 2
    return None if vector is None or vectors is None else vector * vectors


def _find_rows_per_second(config: FeatureSettings, rates: Rates) -> float | None:
    if config.name in rates.features:
        return rates.features[config.name]
    network = rates.networks.get(str(getattr(config, "model", "")))
    if network is None or config.n_network_passes is None:
        return None
    precision = str(getattr(config, "precision", "fp32"))
    fastest = max(network.per_s.values(), default=None)
    rate = fastest if precision == "auto" else network.per_s.get(precision)
    if (config.extractor_name() == "text" and "text" not in network.numbers) or rate is None:
        return None
    return rate / config.n_network_passes / (getattr(config, "crop", _RATE_CROP_SIDE) / _RATE_CROP_SIDE) ** 2


def _add_training(plan: TargetPlan, dataset: str, experiment: str, seed: str, rates: Rates, local: LocalRates) -> None:
    name, counts = f"runs/{dataset}_{experiment}/seed-{seed}", _count_images_and_captions(dataset)
    settings = load_experiment_outline(experiment, dataset).settings_affecting_weights().get("train") or {}
    rate, source = rates.training.get(experiment), _USER_RATE_SOURCE if experiment in rates.local_names else None
    if (measured := local.find_training_rate(dataset, experiment)) is not None:
        rate, source = measured.per_s, f"measured here on {measured.device}"
    if counts is None or rate is None:
        reason = f"no rate of {experiment}; add it to a --rates file" if rate is None else "the number of pairs is not known"
        plan.unknown_amounts.append(f"time of {name}: {reason}")
        return
    splits = ("train", "restval") if settings.get("restval") else ("train",)
    pairs, epochs = sum(counts[split][1] for split in splits if split in counts), int(settings.get("epochs", DEFAULT_EPOCHS))
    what = f"{name}, {epochs} epochs of {pairs:,} pairs"
    plan.durations.append(_build_duration(pairs * epochs, rate, what, "per second", source, local))


def _build_duration(amount: float, rate: float, work: str, unit: str, source: str | None, local: LocalRates) -> Duration:
    """Return the time for an amount of rows or training pairs, at ``rate`` rows or pairs per second.

    ``work`` describes the work for the report. ``source`` states for the report where this machine's rate comes from; None:
    the rate was measured on another machine. It is then scaled by the relative speed of this machine, if that is known.
    """
    if source is not None:
        return Duration(amount / rate, f"{work}, {rate:,.1f} {unit}, {source}", is_measured_here=True)
    rate *= local.relative_speed or 1.0
    origin = "measured on" if local.relative_speed is None else "scaled from"
    return Duration(amount / rate, f"{work}, {rate:,.1f} {unit}, {origin} another machine")


def _count_images_and_captions(dataset: str) -> ImageAndCaptionCounts | None:
    file = find_dataset_file(Path("data", dataset))
    if file.is_file():
        splits = load_dataset_file(file).splits
        return {split: (len(images), int(count_captions_per_image(images).sum())) for split, images in splits.items()}
    if dataset not in list_preset_names("datasets"):
        return None
    config = load_dataset_preset(dataset)
    if config.n_images is not None:
        n = config.n_images
        parts = {"train": n * 8 // 11, "val": n // 11}
        parts["test"] = n - sum(parts.values())
        return {split: (images, 5 * images) for split, images in parts.items()}
    return config.splits or None


def _format_hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _format_time_range(seconds: Sequence[float], factors: Sequence[float]) -> str:
    """Return the sum of times as a text, such as ``2.0 h to 8.0 h``; a single time if all ``factors`` are 1.

    Time k lies between ``seconds[k] / factors[k]`` and ``seconds[k] * factors[k]``.
    """
    low, high = (sum(map(operator, seconds, factors)) for operator in (truediv, mul))
    return _format_hours(low) if low == high else f"{_format_hours(low)} to {_format_hours(high)}"


def _build_report_lines(targets: str, plan: TargetPlan, rates: Rates, relative_speed: float | None) -> Iterator[str]:
    jobs = ", ".join(f"{n} {rule}" for rule, n in sorted(plan.job_counts.items()))
    n_jobs = sum(plan.job_counts.values())
    yield f"{targets}: {n_jobs} jobs to run ({jobs})" if jobs else f"{targets}: nothing to run, all files exist"
    for name, sizes in (("to download", plan.download_sizes), ("caches", plan.cache_sizes)):
        if sizes:
            yield f"{name}: {sum(size for size, _ in sizes) / 1e9:.2f} GB"
        for size, description in sorted(sizes, key=lambda item: -item[0]):
            yield f"  {f'{size / 1e9:.2f} GB':>10}  {description}"
    spread = _UNCALIBRATED_FACTOR if relative_speed is None else _CALIBRATED_FACTOR
    durations = sorted(plan.durations, key=lambda item: -item.seconds)
    factors = [1.0 if item.is_measured_here else spread for item in durations]
    if durations:
        yield f"time: {_format_time_range([item.seconds for item in durations], factors)}"
    for item, factor in zip(durations, factors, strict=True):
        yield f"  {_format_time_range([item.seconds], [factor]):>18}  {item.description}"
    if plan.unknown_amounts:
        yield "not known:"
        yield from (f"  {description}" for description in dict.fromkeys(plan.unknown_amounts))
    if not durations:
        return
    if not all(item.is_measured_here for item in durations):
        yield f"The other machine: {rates.machine}."
        if relative_speed is None:
            yield "--calibrate compares this machine with it in ten seconds, and narrows the ranges."
        else:
            yield f"This machine has {relative_speed:.2f} times its speed."
    yield "Jobs run one after the other; embedding and evaluation are not counted."
