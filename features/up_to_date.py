"""Recognise a finished cache of captions without the libraries that compute vectors, which take seconds to import."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.shards import read_manifest, read_shard_record, shard_path
from vse.features.data_checks import is_from_file
from vse.features.settings.base import FeatureSettings
from vse.features.settings.captions import FittedCaptionSettings, hash_word_file
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.parts import is_own_part

_TORCH_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "U8": "uint8", "BOOL": "bool"}


def is_up_to_date(
    out: Path, dataset: Dataset, config: FeatureSettings, n_shards: int, encoder: Path, word_file: Path | None
) -> bool:
    """Return whether an extraction would change nothing: the cache ``out``, its shards and its encoder exist and are whole.

    Only the vectors of fitted caption encoders are recognised. The SHA-256 of a shard counts as known while its size and its
    modification time are those in its record; ``vse-extract verify`` hashes all shards. In doubt the result is False, and the
    extraction repairs or reports the fault.
    """
    if not isinstance(config, FittedCaptionSettings) or is_own_part(config) or not out.is_file():
        return False
    try:
        cache = open_cache(out)
        return (
            (cache.dataset, cache.feature) == (dataset.name, config.name)
            and cache.dataset_file.resolve() == dataset.path.resolve()
            and is_from_file(cache, dataset)
            and sha256_json(cache.provenance.get("config")) == sha256_json(config.key_settings())
            and cache.provenance.get("extractor_version") == config.extractor_version
            and _has_recorded_shards(cache, n_shards)
            and _has_encoder(cache, encoder, config.find_word_file(word_file))
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


def _has_encoder(cache: FeatureCache, encoder: Path, word_file: Path | None) -> bool:
    """Return whether the file ``encoder`` is the undamaged encoder of the cache, fitted to the words of ``word_file``."""
    try:
        with safe_open(encoder, framework="numpy") as file:
            inputs = json.loads(file.metadata()["vse"])["inputs"]
            sha256 = _hash_tensors(file)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return False
    words = hash_word_file(word_file) if word_file is not None else None
    return sha256 == cache.provenance.get("weights_sha256") and inputs.get("words_sha256") == words


def _hash_tensors(file: Any) -> str:
    """Return the hash of :func:`vse.features.backbones.model_folder.hash_tensors`, without torch."""
    digest = hashlib.sha256()
    for name in sorted(file.keys()):
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        digest.update(f"{name} torch.{_TORCH_TYPES[part.get_dtype()]} {shape};".encode())
        digest.update(file.get_tensor(name).tobytes())
    return digest.hexdigest()
