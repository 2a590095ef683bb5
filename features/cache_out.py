"""Where a cache is about to be written: whether that may be replaced."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import h5py

from vse.features.rows import FORMAT
from vse.features.shards import shards_folder
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out


def check_cache_out(out: Path, dataset: str, feature: str, inputs: Iterable[Path], encoder: Path | None = None) -> None:
    """Check before any work that ``out`` may be written as the cache of this data set and feature.

    :class:`UserError` if it, or the ``encoder`` beside it, is one of the ``inputs``, or something that is no cache of ours, or
    a cache of another data set or feature.
    """
    files = list(inputs)
    check_out(out, files)
    if encoder is not None:
        check_out(encoder, files)
    if shards_folder(out).exists() and not shards_folder(out).is_dir():
        raise UserError(f"cannot write {out}: {shards_folder(out)} is a file, and the shards would lie in that folder")
    if not out.exists():
        return
    held = _held(out)
    if held is None and not (shards_folder(out) / "manifest.json").is_file():  # a damaged cache of ours has one
        raise UserError(f"{out}: is there and is no feature cache; give another --out")
    if held is not None and held != (dataset, feature):
        raise UserError(f"{out}: holds the feature {held[1]!r} of {held[0]!r}; give another --out, or delete it")


def _held(path: Path) -> tuple[str, str] | None:
    """Data set and feature of a cache; None if it is none that can be read."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT:
                return None
            return str(file.attrs["dataset"]), str(file.attrs["feature"])
    except (OSError, KeyError):
        return None
