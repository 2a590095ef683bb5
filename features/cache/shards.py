"""Shards: the files that an extractor writes, each atomically, each with a record of what it holds.

Beside ``shard-00000-of-00004.h5`` lies its record (``.json``: sha256, bytes, rows, identity), written after it:
a shard without a record is not finished. Everything here that finds a fault names the file.

The file of a feature cache: ids, sources and provenance, and virtual views of the arrays of its shards.

Where a cache is about to be written: whether that may be replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from vse.features.cache.arrays import CHECKSUMS, are_checksums
from vse.features.cache.rows import FORMAT, VERSION, Identity, Ids, Rows
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import is_name
from vse.pipeline.files.outputs import OutputKind, check_output, json_kind, read_first_bytes
from vse.pipeline.files.writing import read_json, sha256_file, sha256_json, write_bytes, write_json
from vse.pipeline.presets.presets import list_changes

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
    changes = list_changes(asdict(shard.identity), asdict(identity))
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
    changes = list_changes(asdict(one), asdict(other))
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
        return [require_hdf5_dataset(file, name)[:] for name in names]


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


ARRAYS = ("features", *RAGGED, *PER_ROW)


def virtual_views(
    cache: Path,
    shards: Sequence[Shard],
    dataset_file: Path,
    skipped: Sequence[int],
    said: Mapping[str, Any],
    known: Mapping[str, NDArray[Any]],
) -> tuple[bytes, str]:
    """Return the bytes of a cache file, and its key: of the identity, the ids that are there and their sources."""
    folder, identity = shards_folder(cache), shards[0].identity
    files = [folder / shard.file for shard in shards]
    ids, sources = (np.concatenate(parts) for parts in zip(*(read_rows(f, "ids", "sources") for f in files), strict=True))
    digests = {
        "ids_sha256": sha256_json(ids.tolist()),
        "sources_sha256": hashlib.sha256(sources.tobytes()).hexdigest(),
    }
    key = sha256_json([identity.key, digests])
    counts = {name: sum(shard.counts.get(name, 0) for shard in shards) for shard in shards for name in shard.counts}
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        write_attributes(file, identity, key)
        file.attrs["captions"] = Path(os.path.relpath(dataset_file, cache.parent)).as_posix()
        provenance = {**identity.content, **joined_notes(shards), **digests, "counts": counts, **said}
        file.attrs["provenance"] = json.dumps(provenance, sort_keys=True)
        file.create_dataset("ids", data=ids)
        file.create_dataset("sources", data=sources)
        file.create_dataset("skipped_ids", data=np.asarray(skipped, np.int64))
        for name, values in known.items():
            file.create_dataset(name, data=values)
        with open_hdf5(files[0], "a readable shard") as first:
            names = [name for name in ARRAYS if name in first]
            if "offsets" in first:
                file.create_dataset("offsets", data=joined_offsets([read_rows(f, "offsets")[0] for f in files]))
        for name in names:
            _virtual_view(file, name, files)
    return buffer.getvalue(), key


def _virtual_view(file: h5py.File, name: str, shards: Sequence[Path]) -> None:
    shapes = []
    for path in shards:
        with open_hdf5(path, "a readable shard") as shard:
            data = require_hdf5_dataset(shard, name)
            shapes.append(data.shape)
            dtype = data.dtype
    row_shape = max(shapes)[1:]  # a shard without rows may not know it
    layout = h5py.VirtualLayout(shape=(sum(shape[0] for shape in shapes), *row_shape), dtype=dtype)
    start = 0
    for path, shape in zip(shards, shapes, strict=True):
        if shape[0]:
            layout[start : start + shape[0]] = h5py.VirtualSource(f"{path.parent.name}/{path.name}", name, shape=shape)
        start += shape[0]
    file.create_virtual_dataset(name, layout, fillvalue=np.nan if dtype.kind == "f" else -1)


def joined_offsets(parts: Sequence[Ids]) -> Ids:
    """Return the offsets of the rows of several shards one after the other, from 0."""
    counts = np.concatenate([np.diff(part) for part in parts])
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


_HDF5 = b"\x89HDF\r\n\x1a\n"
_SHARD = OutputKind("a shard of a feature cache", lambda path: read_first_bytes(path, len(_HDF5)) == _HDF5)
_RECORD = json_kind("the record of a shard", "identity", "sha256")
_MANIFEST = json_kind("the manifest of a feature cache", "shards", "key")
_ENCODER = OutputKind("an encoder of captions", lambda path: b'"vse"' in read_first_bytes(path, 2**16))
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
    check_output(out, cache_kind(out), files)
    check_output(out.with_name(f"{out.name}.failures.jsonl"), _FAILURES, files)
    if encoder is not None:
        check_output(encoder, _ENCODER, files)
        check_output(encoder.with_suffix(".json"), _ENCODER_RECORD, files)
    if shards_folder(out).exists() and not shards_folder(out).is_dir():
        raise UserError(f"cannot write {out}: {shards_folder(out)} is a file, and the shards would lie in that folder")
    check_output(shards_folder(out) / "manifest.json", _MANIFEST, files)
    for shard in sorted(shards_folder(out).glob("shard-*")):
        check_output(shard, _RECORD if shard.suffix == ".json" else _SHARD, files)
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
    return read_first_bytes(path, 2**16).partition(b"\n")[0]
