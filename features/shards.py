"""Shards: the files that an extractor writes, each atomically, each with a record of what it holds.

Beside ``shard-00000-of-00004.h5`` lies its record (``.json``: sha256, bytes, rows, identity), written after it:
a shard without a record is not finished. Everything here that finds a fault names the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from vse.features.rows import FORMAT, VERSION, Identity, Rows
from vse.features.stored import CHECKSUMS, are_checksums
from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, sha256_file, write_bytes, write_json
from vse.pipeline.hdf5_files import open_hdf5, required_data
from vse.pipeline.input_files import is_name
from vse.pipeline.presets import changed_fields

RAGGED = ("boxes", "scores")  # beside features: one entry per region
PER_ROW = ("image_size",)
PAGE = 4096


@dataclass(frozen=True)
class Shard:
    """A finished shard's record.

    ``notes`` (library versions, where the weights came from) are no part of the identity: an upgrade makes no cache stale. Nor
    are the ``seconds`` that the rows took, which are not known of imported ones.
    """

    file: str
    sha256: str
    bytes: int
    rows: int
    identity: Identity
    skipped: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None


def shards_folder(cache: Path) -> Path:
    """``features/demo_fc7.h5`` -> ``features/demo_fc7.shards``."""
    return cache.with_suffix(".shards")


def shard_path(cache: Path, index: int, n_shards: int) -> Path:
    """Path of shard ``index`` of ``n_shards``."""
    return shards_folder(cache) / f"shard-{index:05d}-of-{n_shards:05d}.h5"


def fit_record_path(cache: Path) -> Path:
    """``features/demo_hglmm.encoder.json``: how long the encoder beside a cache of captions took to fit."""
    return cache.with_suffix(".encoder.json")


def seconds_of(cache: Path, shards: Sequence[Shard]) -> float | None:
    """How long all shards of a cache took, and the fit of its encoder if there is one; None if that is not known of all."""
    record = fit_record_path(cache)
    fitted = read_json(record) if record.is_file() else {"seconds": 0.0}
    seconds = [*(shard.seconds for shard in shards), fitted.get("seconds") if isinstance(fitted, dict) else None]
    known = [value for value in seconds if isinstance(value, (int, float))]
    return round(sum(known), 4) if len(known) == len(seconds) else None


def shard_slice(n_rows: int, index: int, n_shards: int) -> slice:
    """Rows of shard ``index``: consecutive, and as even as whole rows allow."""
    return slice(n_rows * index // n_shards, n_rows * (index + 1) // n_shards)


def write_shard(
    path: Path, identity: Identity, rows: Rows, notes: Mapping[str, Any] | None = None, seconds: float | None = None
) -> Shard:
    """Write one shard, then its record; :class:`UserError` if a feature is not finite."""
    _check(path, rows)
    record = path.with_suffix(".json")
    record.unlink(missing_ok=True)  # so that no record ever vouches for another file
    buffer = BytesIO()
    # Large arrays begin on a page, so that a row of 4096 float16 lies on two pages and not on three when it is mapped.
    with h5py.File(buffer, "w", alignment_threshold=PAGE, alignment_interval=PAGE) as file:
        write_attributes(file, identity, identity.key)
        for name in ("ids", "features", "sources", "offsets", *RAGGED, *PER_ROW):
            if (array := getattr(rows, name)) is not None:
                file.create_dataset(name, data=array)
    write_bytes(path, buffer.getbuffer())
    shard = Shard(
        file=path.name,
        sha256=hashlib.sha256(buffer.getbuffer()).hexdigest(),
        bytes=buffer.getbuffer().nbytes,
        rows=len(rows.ids),
        identity=identity,
        skipped=rows.skipped,
        counts=rows.counts,
        notes=notes or {},
        seconds=seconds,
    )
    write_json(record, asdict(shard))
    return shard


def finished_shard(path: Path, identity: Identity) -> Shard | None:
    """The record of a shard that exists, undamaged and of this ``identity``; None if it must be made.

    :class:`UserError` names the setting if the shard was made with others.
    """
    shard = read_record(path)
    if shard is None:
        return None
    changes = changed_fields(asdict(shard.identity), asdict(identity))
    if differ_in_precision(shard.identity, identity):
        raise mixed_precisions(path.parent, shard.identity, identity)
    if changes:
        raise UserError(
            f"{path.parent} was made with other settings ({'; '.join(changes[:4])}); "
            "delete that folder to regenerate it, or write to another --out"
        )
    return shard if path.stat().st_size == shard.bytes and sha256_file(path) == shard.sha256 else None


def precision_of(identity: Identity) -> str | None:
    """Return the precision that the rows were computed in; None if no network made them."""
    config = identity.content.get("config")
    return config.get("precision") if isinstance(config, Mapping) else None


def differ_in_precision(one: Identity, other: Identity) -> bool:
    """Return whether two identities differ in the precision of a network, and in nothing else."""
    changes = changed_fields(asdict(one), asdict(other))
    return len(changes) == 1 and changes[0].startswith("content.config.precision: ")


def shards_in_other_precision(cache: Path, n_shards: int, identity: Identity) -> dict[Path, Identity]:
    """Return the shards of a cache that differ from ``identity`` in their precision alone, each with its own identity."""
    paths = [shard_path(cache, index, n_shards) for index in range(n_shards)]
    found = {path: record.identity for path in paths if (record := read_record(path)) is not None}
    return {path: own for path, own in found.items() if differ_in_precision(own, identity)}


def mixed_precisions(folder: Path, one: Identity, other: Identity) -> UserError:
    """Return the refusal of shards that would have two precisions."""
    there, here = precision_of(one), precision_of(other)
    return UserError(
        f"{folder} was made with other settings (config.precision: {there} -> {here}), and a cache has one precision; "
        f"give --set precision={there} to go on in that one, or delete that folder and give "
        f"--set precision=fp32 on each machine (for the workflow, precision: fp32 in the preset of feature {one.feature!r})"
    )


def read_record(path: Path) -> Shard | None:
    """The record of a shard; None if the shard or its record is not there."""
    record = path.with_suffix(".json")
    if not record.is_file() or not path.is_file():
        return None
    content = read_json(record)
    try:
        shard = TypeAdapter(Shard).validate_python(content)
        if not all(type(item.get("id")) is int for item in shard.skipped):
            raise ValueError("images that were left out lack their ids")
        return shard
    except ValueError:
        raise UserError(f"{record}: not the record of a shard; delete it and extract the shard again") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest beside a cache's shards, with the fields that are read from it."""
    file = shards_folder(path) / "manifest.json"
    manifest: dict[str, Any] = read_json(file)
    try:
        texts = [manifest["key"], manifest["shard_key"], *(entry["sha256"] for entry in manifest["shards"])]
        counts = [entry[name] for entry in manifest["shards"] for name in ("bytes", "rows")]
        files = [entry["file"] for entry in manifest["shards"]]
        sound = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in counts)
        sound = sound and bool(files) and all(map(is_name, files))
        sound = sound and all(are_checksums(e[CHECKSUMS]) for e in manifest["shards"] if CHECKSUMS in e)
        sound = sound and isinstance(manifest.get("seconds"), (int, float, type(None)))
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise UserError(f"{file}: not the manifest of a feature cache; delete it and run vse-extract again")
    return manifest


def joined_notes(shards: Sequence[Shard]) -> dict[str, Any]:
    """The notes of the first of some shards; where these were computed on several devices, all of them."""
    devices = sorted({str(shard.notes["device"]) for shard in shards if "device" in shard.notes})
    return {**shards[0].notes, **({"device": ", ".join(devices)} if devices else {})}


def read_rows(path: Path, *names: str) -> list[NDArray[Any]]:
    """Whole datasets of a shard or a cache. No lock is asked for, so that read-only file systems will do."""
    with open_hdf5(path, "a readable shard or cache") as file:
        return [required_data(file, name)[:] for name in names]


def write_attributes(file: h5py.File, identity: Identity, key: str) -> None:
    """The attributes that a shard and a cache share."""
    file.attrs.update(
        {
            "format": FORMAT,
            "version": VERSION,
            "dataset": identity.dataset,
            "feature": identity.feature,
            "kind": identity.kind,
            "key": key,
        }
    )


def _check(path: Path, rows: Rows) -> None:
    n = len(rows.ids)
    last = rows.offsets[-1] if rows.offsets is not None else n
    lengths = {len(rows.sources), n if rows.offsets is None else len(rows.offsets) - 1}
    if lengths != {n} or len(rows.features) != last:
        raise ValueError(f"{n} ids for {len(rows.features)} rows of features and {len(rows.sources)} of sources")
    bad = np.flatnonzero(~np.isfinite(rows.features).all(axis=tuple(range(1, rows.features.ndim))))
    if len(bad):
        row = bad[0] if rows.offsets is None else np.searchsorted(rows.offsets, bad[0], side="right") - 1
        raise UserError(
            f"{path}: {len(bad)} vectors are NaN or infinite in {rows.features.dtype}, the first is of id {rows.ids[row]}; "
            "if they are only too large for float16, keep them with --set dtype=float32"
        )
