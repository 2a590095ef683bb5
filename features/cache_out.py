"""Where a cache is about to be written: whether that may be replaced."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import h5py

from vse.features.rows import FORMAT
from vse.features.shards import shards_folder
from vse.pipeline.errors import UserError
from vse.pipeline.outputs import OutputKind, check_out, first_bytes, json_kind

_HDF5 = b"\x89HDF\r\n\x1a\n"
_SHARD = OutputKind("a shard of a feature cache", lambda path: first_bytes(path, len(_HDF5)) == _HDF5)
_RECORD = json_kind("the record of a shard", "identity", "sha256")
_MANIFEST = json_kind("the manifest of a feature cache", "shards", "key")
_ENCODER = OutputKind("an encoder of captions", lambda path: b'"vse"' in first_bytes(path, 2**16))
_ENCODER_RECORD = json_kind("the record of an encoder", "seconds")
_FAILURES = OutputKind("a list of images that were left out", lambda path: "id" in json.loads(_first_line(path)))


def cache_kind(out: Path) -> OutputKind:
    """Return the kind of feature caches; a damaged one has a manifest in its folder of shards, and begins as HDF5 does."""
    manifest = shards_folder(out) / "manifest.json"
    return OutputKind(
        "a feature cache",
        lambda path: _held(path) is not None or (_MANIFEST.is_at(manifest) and _SHARD.is_at(path)),
    )


def check_cache_out(out: Path, dataset: str, feature: str, inputs: Iterable[Path], encoder: Path | None = None) -> None:
    """Check before any work that ``out`` may be written as the cache of this data set and feature.

    :class:`UserError` if it, or the ``encoder`` beside it, is one of the ``inputs``, or something that is no cache of ours, or
    a cache of another data set or feature.
    """
    files = list(inputs)
    check_out(out, cache_kind(out), files)
    check_out(out.with_name(f"{out.name}.failures.jsonl"), _FAILURES, files)
    if encoder is not None:
        check_out(encoder, _ENCODER, files)
        check_out(encoder.with_suffix(".json"), _ENCODER_RECORD, files)
    if shards_folder(out).exists() and not shards_folder(out).is_dir():
        raise UserError(f"cannot write {out}: {shards_folder(out)} is a file, and the shards would lie in that folder")
    check_out(shards_folder(out) / "manifest.json", _MANIFEST, files)
    for shard in sorted(shards_folder(out).glob("shard-*")):
        check_out(shard, _RECORD if shard.suffix == ".json" else _SHARD, files)
    held = _held(out)
    if held is not None and held != (dataset, feature):
        raise UserError(f"{out}: holds the feature {held[1]!r} of {held[0]!r}; give another --out, or delete it")


def feature_at(out: Path, dataset: str) -> str:
    """Return the name of the feature of a data set that a cache without a preset has, by the name of its file."""
    return out.stem.removeprefix(f"{dataset}_")


def _held(path: Path) -> tuple[str, str] | None:
    """Data set and feature of a cache; None if it is none that can be read."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT:
                return None
            return str(file.attrs["dataset"]), str(file.attrs["feature"])
    except (OSError, KeyError):
        return None


def _first_line(path: Path) -> bytes:
    return first_bytes(path, 2**16).partition(b"\n")[0]
