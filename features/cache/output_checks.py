"""Check that a new cache overwrites only files of an older cache of the same data set and feature."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import h5py

from vse.features.cache.rows import CACHE_FORMAT
from vse.features.cache.shards import shards_folder
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import OutputKind, check_output, json_kind, read_first_bytes

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SHARD_KIND = OutputKind(
    "a shard of a feature cache", lambda path: read_first_bytes(path, len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE
)
_RECORD_KIND = json_kind("the record of a shard", "identity", "sha256")
_MANIFEST_KIND = json_kind("the manifest of a feature cache", "shards", "key")
_ENCODER_KIND = OutputKind("an encoder of captions", lambda path: b'"vse"' in read_first_bytes(path, 2**16))
_ENCODER_TIMES_KIND = json_kind("the record of an encoder", "seconds")
_FAILURES_KIND = OutputKind(
    "a list of images that were left out", lambda path: "id" in json.loads(read_first_bytes(path, 2**16).partition(b"\n")[0])
)


def build_cache_kind(out: Path) -> OutputKind:
    """Return the kind of file that a new cache may overwrite at ``out``: a feature cache.

    A damaged cache is recognised, too, if the file begins like HDF5 and has a manifest.
    """
    manifest = shards_folder(out) / "manifest.json"
    return OutputKind(
        "a feature cache",
        lambda path: (
            _read_dataset_and_feature(path) is not None or (_MANIFEST_KIND.is_at(manifest) and _SHARD_KIND.is_at(path))
        ),
    )


def check_cache_output(out: Path, dataset: str, feature: str, inputs: Iterable[Path], encoder: Path | None = None) -> None:
    """Check that the cache of this data set and feature may be written to ``out``. Raises UserError if not.

    The cache file, the shards and the file ``encoder`` may overwrite files of the same kind, but none of the ``inputs``, and
    no cache of another data set or feature.
    """
    files = list(inputs)
    check_output(out, build_cache_kind(out), files)
    check_output(out.with_name(f"{out.name}.failures.jsonl"), _FAILURES_KIND, files)
    if encoder is not None:
        check_output(encoder, _ENCODER_KIND, files)
        check_output(encoder.with_suffix(".json"), _ENCODER_TIMES_KIND, files)
    if shards_folder(out).exists() and not shards_folder(out).is_dir():
        raise UserError(f"cannot write {out}: {shards_folder(out)} is a file, and the shards would lie in that folder")
    check_output(shards_folder(out) / "manifest.json", _MANIFEST_KIND, files)
    for shard in sorted(shards_folder(out).glob("shard-*")):
        check_output(shard, _RECORD_KIND if shard.suffix == ".json" else _SHARD_KIND, files)
    existing = _read_dataset_and_feature(out)
    if existing is not None and existing != (dataset, feature):
        raise UserError(f"{out}: holds the feature {existing[1]!r} of {existing[0]!r}; give another --out, or delete it")


def parse_feature_name(out: Path, dataset: str) -> str:
    """Return the feature name in the file name of a cache: ``clip`` for ``birds_clip.h5`` of the data set ``birds``."""
    return out.stem.removeprefix(f"{dataset}_")


def _read_dataset_and_feature(path: Path) -> tuple[str, str] | None:
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != CACHE_FORMAT:
                return None
            return str(file.attrs["dataset"]), str(file.attrs["feature"])
    except (OSError, KeyError):
        return None
