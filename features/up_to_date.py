"""Check quickly whether features are up to date, and read the speeds of this machine from its runs and caches.

This module does not import the libraries that compute vectors, because their import takes seconds.
:func:`is_up_to_date` recognises finished caches of captions. When the workflow plans its jobs, :func:`hash_changed_photos`
finds the photographs that have changed since a shard was extracted. A photograph whose file is older than the shard is not
opened. A newer file is hashed, and its hash is compared with the hash in the shard. The file ``photos-00000-of-00004.h5`` next
to the shard records the result with the size and the modification time of the photograph, so that an unchanged file with a new
time is hashed only once. For a photograph in an archive, the size and times of the archive count. Photographs in
archives at URLs are not checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from safetensors import SafetensorError, safe_open

from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.rows import sha256_bytes
from vse.features.cache.shards import read_arrays, read_manifest, read_shard_record, shard_path, shard_slice
from vse.features.data_checks import is_from_dataset_file
from vse.features.settings import load_feature_preset
from vse.features.settings.base import FeatureSettings, hash_word_file
from vse.features.settings.captions import FittedCaptionSettings
from vse.pipeline.dataset.columns import image_files, image_ids
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, read_image_bytes
from vse.pipeline.files.outputs import read_first_bytes
from vse.pipeline.files.photo_archives import find_archived_photo
from vse.pipeline.files.writing import sha256_json, write_bytes
from vse.pipeline.presets.parts import is_user_written
from vse.pipeline.presets.preset_files import read_yaml
from vse.pipeline.presets.presets import load_experiment_outline

_TORCH_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "U8": "uint8", "BOOL": "bool"}


def is_up_to_date(
    out: Path, dataset: Dataset, config: FeatureSettings, n_shards: int, encoder: Path, word_file: Path | None
) -> bool:
    """Return whether an extraction would change nothing, because the cache ``out``, its shards and its encoder are finished.

    The result is False for features other than vectors of a fitted caption encoder. A shard counts as unchanged if it has the
    recorded size and modification time; ``vse-extract verify`` hashes all shards. A fault gives False, too, because the
    extraction then repairs or reports the fault.
    """
    if not isinstance(config, FittedCaptionSettings) or is_user_written(config) or not out.is_file():
        return False
    try:
        cache = open_cache(out)
        return (
            (cache.dataset, cache.feature) == (dataset.name, config.name)
            and cache.dataset_file.resolve() == dataset.path.resolve()
            and is_from_dataset_file(cache, dataset)
            and sha256_json(cache.provenance.get("config")) == sha256_json(config.list_cache_key_settings())
            and cache.provenance.get("extractor_version") == config.extractor_version
            and _has_recorded_shards(cache, n_shards)
            and _is_encoder_of_cache(cache, encoder, config.find_word_file(word_file))
        )
    except UserError:
        return False


def _has_recorded_shards(cache: FeatureCache, n_shards: int) -> bool:
    entries = read_manifest(cache.path)["shards"]
    for index, entry in enumerate(entries):
        path = shard_path(cache.path, index, n_shards)
        record = read_shard_record(path)
        if record is None or (record.file, record.sha256) != (entry["file"], entry["sha256"]):
            return False
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (record.bytes, record.mtime_ns):
            return False
    return len(entries) == n_shards


def _is_encoder_of_cache(cache: FeatureCache, encoder: Path, word_file: Path | None) -> bool:
    """Return whether the file ``encoder`` is the undamaged encoder of the cache, fitted with the given word vectors.

    ``word_file`` is the file of word vectors; None: the encoder was fitted without such a file.
    """
    try:
        with safe_open(encoder, framework="numpy") as file:
            inputs = json.loads(file.metadata()["vse"])["inputs"]
            sha256 = _hash_tensors(file)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return False
    words = hash_word_file(word_file) if word_file is not None else None
    return sha256 == cache.provenance.get("weights_sha256") and inputs.get("words_sha256") == words


def _hash_tensors(file: Any) -> str:
    """Return the SHA-256 of the names, types, shapes and values of the tensors in an open safetensors file, without torch.

    The result equals that of :func:`vse.features.backbones.model_folder.hash_tensors`.
    """
    digest = hashlib.sha256()
    for name in sorted(file.keys()):
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        digest.update(f"{name} torch.{_TORCH_TYPES[part.get_dtype()]} {shape};".encode())
        digest.update(file.get_tensor(name).tobytes())
    return digest.hexdigest()


_MAX_HEAD_BYTES = 2**20  # limit on the part of dataset.json before its images
_UNREADABLE_PHOTO_HASH = bytes(32)  # stands for the hash of a photograph that is missing or damaged


class _PhotoState(NamedTuple):
    """The state of a photograph at its last check.

    size, modified_ns : size in bytes and modification time of the file or archive; -1 if the file is missing
    sha256 : hash of the photograph; after a change, the hash of the changed photograph, even if the original was restored
    changed : True if the photograph has ever differed from the photograph that was extracted first
    """

    size: int
    modified_ns: int
    sha256: bytes
    changed: bool


def hash_changed_photos(
    dataset_file: Path, cache: Path, index: int, n_shards: int, splits: Sequence[str] | None = None
) -> str:
    """Return a hash of all photographs that have changed since the first extraction of shard ``index``; "" if none has.

    The workflow runs the job of the shard again if this hash changes. The job itself must not change the hash; otherwise the
    job would run again and again. The result of the check is stored next to the shard. ``splits`` are the splits in the cache;
    None: all splits. Raises UserError if the data set has no photographs.
    """
    shard = shard_path(cache, index, n_shards)
    record = shard.with_name(f"{shard.stem.replace('shard', 'photos', 1)}.h5")
    known_states = _read_photo_states(record)
    if _declares_no_photographs(dataset_file):
        raise UserError(
            f"{dataset_file}: this data set has no photographs, so {cache} cannot be extracted; choose an experiment that "
            "reads an imported feature, or change the experiment's features"
        )
    if dataset_file.is_file() and read_shard_record(shard) is not None:
        status = dataset_file.stat()
        ids, paths = _list_photos(dataset_file, status.st_mtime_ns, status.st_size, tuple(splits or ()))
        rows = shard_slice(len(ids), index, n_shards)
        updated = _update_photo_states(shard, ids[rows].tolist(), paths[rows], known_states)
        if updated != known_states:
            known_states = updated
            with suppress(UserError):  # in a folder that this user may not change, the photographs are hashed each time
                _write_photo_states(record, known_states)
    digest = hashlib.sha256()
    changed = {identity: photo for identity, photo in sorted(known_states.items()) if photo.changed}
    for identity, photo in changed.items():
        digest.update(identity.to_bytes(8, "little", signed=True) + photo.sha256)
    return digest.hexdigest() if changed else ""


def _update_photo_states(
    shard: Path, ids: list[int], paths: list[str], known_states: dict[int, _PhotoState]
) -> dict[int, _PhotoState]:
    """Return the states, by id, of the photographs that have ever changed, are missing, or are newer than the shard.

    ``ids`` and ``paths`` are those of the shard's photographs. ``known_states`` holds the states of the previous check.
    """
    written_ns = shard.stat().st_mtime_ns
    updated = {identity: photo for identity, photo in known_states.items() if photo.changed}
    hash_by_id: dict[int, bytes] | None = None
    for identity, path in zip(ids, paths, strict=True):
        try:
            status = _stat_photo(path)
            if status is None:
                continue
            state = (status.st_size, status.st_mtime_ns)
            if status.st_ctime_ns < written_ns:
                continue
        except OSError:
            state = (-1, -1)
        known = known_states.get(identity)
        if known is not None and (known.size, known.modified_ns) == state:
            updated[identity] = known
            continue
        if hash_by_id is None:
            extracted_ids, hashes = read_arrays(shard, "ids", "sources")
            hash_by_id = {one: row.tobytes() for one, row in zip(extracted_ids.tolist(), hashes, strict=True)}
        found = _hash_photo(path)
        if found != hash_by_id.get(identity, _UNREADABLE_PHOTO_HASH):
            updated[identity] = _PhotoState(*state, found, changed=True)
        else:
            updated[identity] = _PhotoState(
                *state, known.sha256 if known else found, changed=known is not None and known.changed
            )
    return updated


def _stat_photo(path: str) -> os.stat_result | None:
    """Return the status of the file or local archive of a photograph; None if the archive is at a URL."""
    try:
        return os.stat(path)  # Path.stat would take twice as long for a million files
    except OSError:
        photo = find_archived_photo(Path(path))
        if photo is None:
            raise
        return None if photo.archive.path is None else photo.archive.path.stat()


def _hash_photo(path: str) -> bytes:
    try:
        return sha256_bytes(read_image_bytes(Path(path))).tobytes()
    except (OSError, BadImage):
        return _UNREADABLE_PHOTO_HASH


def _declares_no_photographs(dataset_file: Path) -> bool:
    """Return whether a data set declares that it has no photographs, by ``"pictures": false``.

    Only the beginning of a ``dataset.json``, before its images, is read, because planning must be fast. A parquet file is
    loaded.
    """
    if not dataset_file.is_file():
        return False
    if dataset_file.suffix == ".parquet":
        return not load_dataset_file(dataset_file).has_image_files
    head, _, _ = read_first_bytes(dataset_file, _MAX_HEAD_BYTES).partition(b'"images":')
    return re.search(rb'"pictures":\s*false', head) is not None


@lru_cache(maxsize=4)
def _list_photos(
    dataset_file: Path, mtime_ns: int, size: int, splits: tuple[str, ...]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[str]]:
    """Return the ids and paths of the photographs in ``splits`` (empty: all splits).

    Results are cached. The time and size of ``dataset.json`` are arguments, so that a changed file is read again.
    """
    dataset = load_dataset_file(dataset_file)
    images = (dataset.keep_splits(splits) if splits else dataset).images
    folder = dataset_file.parent / "images"
    return image_ids(images), [f"{folder}/{file}" for file in image_files(images)]


def _read_photo_states(path: Path) -> dict[int, _PhotoState]:
    """Return the recorded states of photographs by id; an empty dictionary without a valid record."""
    if not path.is_file():
        return {}
    try:
        ids, states, hashes, changed = read_arrays(path, "ids", "states", "sha256", "changed")
        rows = zip(ids.tolist(), states.tolist(), hashes.reshape(len(ids), 32), changed.tolist(), strict=True)
        return {identity: _PhotoState(size, time, row.tobytes(), bool(flag)) for identity, (size, time), row, flag in rows}
    except (UserError, ValueError, TypeError):
        return {}


def _write_photo_states(path: Path, known_states: dict[int, _PhotoState]) -> None:
    photos = list(known_states.values())
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        file["ids"] = np.asarray(list(known_states), np.int64)
        file["states"] = np.asarray([(photo.size, photo.modified_ns) for photo in photos], np.int64).reshape(-1, 2)
        file["sha256"] = np.frombuffer(b"".join(photo.sha256 for photo in photos), np.uint8).reshape(-1, 32)
        file["changed"] = np.asarray([photo.changed for photo in photos], bool)
    write_bytes(path, buffer.getbuffer())


CALIBRATION_SECONDS = 10.0
_COST_SETTINGS = ("model", "loss", "images", "adversary", "solver", "start_from", "backbone", "feature", "caption_feature")
_CHANGED_SETTINGS_PATTERN = re.compile(r"--set\b|\bsets=")  # found in the command of a run with changed settings


class TrainingSpeed(NamedTuple):
    """Training pairs per second, and the device of the run."""

    per_s: float
    device: str


@dataclass(frozen=True)
class LocalRates:
    """Speeds of this machine.

    training : speed of a finished run; the key is the JSON of its experiment and of the settings that determine the speed
    features : rows per second of a feature; the key is the JSON of the feature's settings
    relative_speed : speed of this machine divided by the speed of the machine of ``config/rates.yaml``; None: not measured
    """

    training: Mapping[str, TrainingSpeed] = field(default_factory=dict)
    features: Mapping[str, float] = field(default_factory=dict)
    relative_speed: float | None = None

    def find_training_rate(self, dataset: str, experiment: str) -> TrainingSpeed | None:
        """Return the speed of a run of the same experiment; None without such a run.

        A run on another data set counts only if the presets of both data sets lead to the same model, loss, batch size and
        features. For example, the demo's preset has a smaller network and model, so its speed does not count for COCO.
        """
        cost = _collect_cost_settings(dataset, experiment)
        return None if cost is None else self.training.get(_encode_settings(cost))

    def find_feature_rate(self, config: FeatureSettings) -> float | None:
        """Return the rows per second of an extraction with the same settings on this machine; None if there was none."""
        settings = config.list_cache_key_settings()
        precisions = ("bf16", "fp16", "fp32") if settings.get("precision") == "auto" else (settings.get("precision"),)
        keys = (_encode_settings({**settings, **({"precision": one} if one else {})}) for one in precisions)
        return next((self.features[key] for key in keys if key in self.features), None)


def read_local_rates(folder: Path = Path()) -> LocalRates:
    """Return the speeds of the finished runs in ``runs/`` and of the finished shards in ``features/`` of a folder.

    A run counts only if it has the settings of its preset: neither the command nor a later edit of the preset changed them.
    """
    training: dict[str, TrainingSpeed] = {}
    for file in sorted(folder.glob("runs/*/seed-*/run.json"), key=lambda path: path.stat().st_mtime):
        with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError, UserError):
            record, settings = json.loads(file.read_text(encoding="utf-8")), read_yaml(file.with_name("config.yaml"))
            cost = _collect_cost_settings(record["dataset"], record["experiment"])
            is_changed = _CHANGED_SETTINGS_PATTERN.search(record["made"]["command"] or "") is not None
            if (
                record["state"] == "finished"
                and cost is not None
                and not is_changed
                and _contains_settings(settings, cost["preset"])
            ):
                per_s = record["n_train_pairs"] * record["epochs"] / record["train_seconds"]
                training[_encode_settings(cost)] = TrainingSpeed(per_s, str(record["device"]))
    rows: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for file in folder.glob("features/*.shards/shard-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(file.read_text(encoding="utf-8"))
            key_of_feature, duration = _encode_settings(record["identity"]["content"]["config"]), float(record["seconds"])
            rows[key_of_feature] = rows.get(key_of_feature, 0) + record["rows"]
            seconds[key_of_feature] = seconds.get(key_of_feature, 0) + duration
    return LocalRates(training, {key: rows[key] / seconds[key] for key in rows if seconds[key] > 0})


def measure_calibration() -> float:
    """Run a fixed convolution and a fixed matrix product for ten seconds; return the number of times that both run per second.

    The convolution resembles extraction, the matrix product resembles training. ``config/rates.yaml`` contains the result of
    the machine on which the rates in that file were measured.
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


def _collect_cost_settings(dataset: str, experiment: str) -> dict[str, Any] | None:
    """Return the settings that determine how long a training pair takes; None for an unknown experiment or data set.

    The entry ``preset`` holds settings of the experiment, the entry ``features`` the settings of the experiment's features.
    """
    try:
        settings = load_experiment_outline(experiment, dataset).settings_affecting_weights()
        names = [name for name in (settings.get("feature"), settings.get("caption_feature")) if isinstance(name, str)]
        features = [load_feature_preset(name, dataset).list_cache_key_settings() for name in names]
    except UserError:
        return None
    preset = {key: settings[key] for key in _COST_SETTINGS if settings.get(key) is not None}
    batch_size = (settings.get("train") or {}).get("batch_size")
    return {
        "experiment": experiment,
        "preset": {**preset, **({"train": {"batch_size": batch_size}} if batch_size is not None else {})},
        "features": features,
    }


def _contains_settings(settings: Any, wanted: Any) -> bool:
    """Return whether ``settings`` contain every entry of ``wanted``, with the same value and at every depth.

    A text in ``wanted``, such as ``max``, matches the same text, or settings with this ``name``.
    """
    if isinstance(wanted, Mapping):
        return isinstance(settings, Mapping) and all(_contains_settings(settings.get(key), wanted[key]) for key in wanted)
    return bool((settings.get("name") if isinstance(settings, Mapping) else settings) == wanted)


def _encode_settings(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)
