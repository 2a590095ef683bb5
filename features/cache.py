"""The feature cache: an HDF5 file of virtual views over shards that are whole or not there.

``features/<dataset>_<feature>.h5`` refers to ``features/<dataset>_<feature>.shards/shard-00000-of-00004.h5`` ...
by relative names. Beside each shard lies its record (``.json``: sha256, bytes, rows, key), written after it:
a shard without a record is not finished. ``manifest.json`` joins the records, when all shards are there.

Attributes and datasets are those of ``docs/formats.md``. Everything here that finds a fault names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, sha256_file, sha256_json, write_bytes, write_json
from vse.pipeline.presets import changed_fields

FORMAT, VERSION = "vse-features", 1
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Identity:
    """What a cache holds: ``content`` is all that determines the vectors, ``key`` its hash."""

    dataset: str
    feature: str
    kind: Literal["image", "text"]
    content: Mapping[str, Any]

    @property
    def key(self) -> str:
        """SHA-256 of the identity."""
        return sha256_json([FORMAT, VERSION, self.dataset, self.feature, self.kind, self.content])


@dataclass(frozen=True)
class Shard:
    """A finished shard's record. ``skipped`` lists the unreadable images: id, path and reason.

    ``notes`` (library versions, where the weights came from) are no part of the identity: an upgrade makes no cache stale.
    """

    file: str
    sha256: str
    bytes: int
    rows: int
    key: str
    identity: Identity
    skipped: Sequence[Mapping[str, Any]] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardRows:
    """Where a shard's rows lie in its file: ``count`` contiguous rows from byte ``offset``."""

    path: Path
    offset: int
    count: int


@dataclass(frozen=True)
class FeatureCache:
    """An opened and checked cache. No file stays open; :class:`vse.features.reader.FeatureReader` reads the rows."""

    path: Path
    dataset: str
    feature: str
    kind: str
    key: str
    provenance: Mapping[str, Any]
    captions: Path
    ids: Ids
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[ShardRows, ...]
    skipped: frozenset[int]

    @property
    def dim(self) -> int:
        """Length of one vector."""
        return self.row_shape[-1]


def shards_folder(cache: Path) -> Path:
    """``features/demo_fc7.h5`` -> ``features/demo_fc7.shards``."""
    return cache.with_suffix(".shards")


def shard_path(cache: Path, index: int, n_shards: int) -> Path:
    """Path of shard ``index`` of ``n_shards``."""
    return shards_folder(cache) / f"shard-{index:05d}-of-{n_shards:05d}.h5"


def failures_path(cache: Path) -> Path:
    """``features/demo_fc7.h5.failures.jsonl``: the images that ``--skip-bad`` left out."""
    return cache.with_name(f"{cache.name}.failures.jsonl")


def shard_slice(n_rows: int, index: int, n_shards: int) -> slice:
    """Rows of shard ``index``: consecutive, and as even as whole rows allow."""
    return slice(n_rows * index // n_shards, n_rows * (index + 1) // n_shards)


def write_shard(
    path: Path,
    identity: Identity,
    ids: Ids,
    features: NDArray[Any],
    skipped: Sequence[Mapping[str, Any]] = (),
    notes: Mapping[str, Any] | None = None,
) -> Shard:
    """Write one shard, then its record. ``ids`` (n,), ``features`` (n, dim) or (n, n_crops, dim), finite."""
    if len(ids) != len(features):
        raise ValueError(f"{len(ids)} ids for {len(features)} rows")
    bad = ~np.isfinite(features.reshape(len(ids), -1)).all(axis=1) if len(ids) else np.zeros(0, bool)
    if bad.any():
        first = ids[bad][0]
        raise UserError(f"{path}: {bad.sum()} rows are NaN or infinite in {features.dtype}, the first is id {first}")
    record = path.with_suffix(".json")
    record.unlink(missing_ok=True)  # so that no record ever vouches for another file
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        _write_attributes(file, identity)
        file.create_dataset("ids", data=ids.astype(np.int64))
        file.create_dataset("features", data=features)
    write_bytes(path, buffer.getbuffer())
    shard = Shard(path.name, sha256_file(path), path.stat().st_size, len(ids), identity.key, identity, skipped, notes or {})
    write_json(record, asdict(shard))
    return shard


def finished_shard(path: Path, identity: Identity) -> Shard | None:
    """The record of a shard that is there, whole and of this ``identity``; None if it must be made.

    :class:`UserError` names the setting if the shard was made with others.
    """
    shard = _read_record(path)
    if shard is None:
        return None
    _refuse_other(path, shard.identity, identity)
    return shard if path.stat().st_size == shard.bytes and sha256_file(path) == shard.sha256 else None


def merge_shards(cache: Path, n_shards: int, dataset_file: Path, row_ids: Ids) -> Path:
    """Join finished shards: check each, write ``manifest.json``, then the cache file with its virtual views.

    ``row_ids`` are the ids that the whole cache should hold, in order; what shards skipped is left out.
    """
    shards: list[Shard] = []
    for index in range(n_shards):
        path = shard_path(cache, index, n_shards)
        record = _read_record(path)
        shard = finished_shard(path, (shards[0] if shards else record).identity) if record else None
        if shard is None:
            raise UserError(f"{path}: missing or not whole; extract shard {index} of {n_shards} again")
        expected = row_ids[shard_slice(len(row_ids), index, n_shards)]
        left_out = {int(item["id"]) for item in shard.skipped}
        if _read_ids(path).tolist() != [i for i in expected.tolist() if i not in left_out]:
            raise UserError(f"{path}: its ids are not those of part {index} of {n_shards} of {dataset_file}")
        shards.append(shard)
    skipped = [item for shard in shards for item in shard.skipped]
    _write_failures(cache, skipped)
    manifest = {"key": shards[0].key, "shards": [_entry(shard) for shard in shards]}
    write_json(shards_folder(cache) / "manifest.json", manifest)
    return write_bytes(cache, _virtual_views(cache, shards, dataset_file, [int(item["id"]) for item in skipped]))


def open_cache(path: Path) -> FeatureCache:
    """Open a cache: format, version, row counts, and that every shard is there and has all its bytes.

    HDF5 itself returns fill values for a missing or short shard, so nothing is read through its views.
    """
    attributes, ids, dtype, shape, skipped = _read_head(path)
    manifest = _read_manifest(path)
    if manifest["key"] != attributes["key"]:
        raise UserError(f"{path}: its shards were made with other settings; run vse-extract again")
    shards = tuple(
        _locate(shards_folder(path) / entry["file"], entry, shape, dtype, attributes["key"]) for entry in manifest["shards"]
    )
    rows = sum(shard.count for shard in shards)
    if not rows == len(ids) == shape[0]:
        raise UserError(f"{path}: {len(ids)} ids and {shape[0]} rows, but its shards hold {rows} rows")
    if len(np.unique(ids)) != len(ids):
        values, counts = np.unique(ids, return_counts=True)
        raise UserError(f"{path}: duplicate id {values[counts > 1][0]}")
    return FeatureCache(
        path=path,
        dataset=attributes["dataset"],
        feature=attributes["feature"],
        kind=attributes["kind"],
        key=attributes["key"],
        provenance=json.loads(attributes["provenance"]),
        captions=path.parent / attributes["captions"],
        ids=ids,
        row_shape=shape[1:],
        dtype=dtype,
        shards=shards,
        skipped=frozenset(int(i) for i in skipped),
    )


def verify_cache(path: Path) -> FeatureCache:
    """Open a cache, re-hash every shard and compare the ids; :class:`UserError` names what is broken."""
    cache = open_cache(path)
    manifest = _read_manifest(path)
    for shard, entry in zip(cache.shards, manifest["shards"], strict=True):
        if sha256_file(shard.path) != entry["sha256"]:
            raise UserError(f"{shard.path}: its bytes changed (sha256 differs); delete it and extract it again")
    stored = np.concatenate([_read_ids(shard.path) for shard in cache.shards])
    if not np.array_equal(stored, cache.ids):
        raise UserError(f"{path}: the shards' ids are not the cache's ids")
    return cache


def _write_attributes(file: h5py.File, identity: Identity) -> None:
    file.attrs.update(
        {
            "format": FORMAT,
            "version": VERSION,
            "dataset": identity.dataset,
            "feature": identity.feature,
            "kind": identity.kind,
            "key": identity.key,
        }
    )


def _virtual_views(cache: Path, shards: Sequence[Shard], dataset_file: Path, skipped: Sequence[int]) -> bytes:
    folder, identity = shards_folder(cache), shards[0].identity
    rows = sum(shard.rows for shard in shards)
    with h5py.File(folder / shards[0].file, "r") as first:
        row_shape, dtype = first["features"].shape[1:], first["features"].dtype
    layout = h5py.VirtualLayout(shape=(rows, *row_shape), dtype=dtype)
    ids, start = [], 0
    for shard in shards:
        source = h5py.VirtualSource(f"{folder.name}/{shard.file}", "features", shape=(shard.rows, *row_shape))
        if shard.rows:
            layout[start : start + shard.rows] = source
        ids.append(_read_ids(folder / shard.file))
        start += shard.rows
    all_ids = np.concatenate(ids)
    provenance = {**identity.content, **shards[0].notes, "ids_sha256": sha256_json(all_ids.tolist())}
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        _write_attributes(file, identity)
        file.attrs["captions"] = Path(os.path.relpath(dataset_file, cache.parent)).as_posix()
        file.attrs["provenance"] = json.dumps(provenance, sort_keys=True)
        file.create_dataset("ids", data=all_ids)
        file.create_dataset("skipped_ids", data=np.asarray(skipped, np.int64))
        file.create_virtual_dataset("features", layout, fillvalue=np.nan)
    return buffer.getvalue()


def _read_head(path: Path) -> tuple[dict[str, Any], Ids, np.dtype[Any], tuple[int, ...], Ids]:
    if not path.is_file():
        raise UserError(f"{path}: no such feature cache; make it with vse-extract or snakemake --cores all {path}")
    try:
        with h5py.File(path, "r") as file:
            attributes = dict(file.attrs.items())
            if attributes.get("format") != FORMAT or attributes.get("version") != VERSION:
                raise UserError(f"{path}: not a feature cache of version {VERSION} (format {attributes.get('format')!r})")
            missing = {"dataset", "feature", "kind", "key", "captions", "provenance"} - attributes.keys()
            if missing:
                raise UserError(f"{path}: not a whole feature cache, it lacks {', '.join(sorted(missing))}")
            ids, features = file["ids"][:], file["features"]
            return attributes, ids, features.dtype, features.shape, file["skipped_ids"][:]
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: not a readable feature cache ({error})") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest beside a cache's shards, with the fields that are read from it."""
    file = shards_folder(path) / "manifest.json"
    manifest: dict[str, Any] = read_json(file)
    try:
        fields = [manifest["key"], *((e["file"], e["sha256"], e["bytes"], e["rows"]) for e in manifest["shards"])]
    except (TypeError, KeyError):
        fields = []
    if not fields:
        raise UserError(f"{file}: not the manifest of a feature cache; delete it and run vse-extract again")
    return manifest


def _locate(path: Path, entry: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any], key: str) -> ShardRows:
    if not path.is_file():
        again = f"run the same vse-extract again, or delete {path.parent.with_suffix('.h5')} and run snakemake again"
        raise UserError(f"{path}: this shard is missing; {again}: only what is missing is made")
    if path.stat().st_size != entry["bytes"]:
        raise UserError(f"{path}: {path.stat().st_size} bytes, {entry['bytes']} expected; delete it and extract it again")
    try:
        with h5py.File(path, "r") as file:
            features = file["features"]
            if file.attrs["key"] != key:
                raise UserError(f"{path}: made with other settings than the cache; run the same extraction again")
            if features.shape != (entry["rows"], *shape[1:]) or features.dtype != dtype:
                raise UserError(f"{path}: features are {features.dtype} {features.shape}, the manifest says otherwise")
            offset = features.id.get_offset()
            if offset is None and features.shape[0]:
                raise UserError(f"{path}: its features are not contiguous; delete it and extract it again")
            return ShardRows(path, offset or 0, features.shape[0])
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: not a readable shard ({error}); delete it and extract it again") from None


def _read_ids(path: Path) -> Ids:
    with h5py.File(path, "r") as file:
        ids: Ids = file["ids"][:]
    return ids


def _read_record(path: Path) -> Shard | None:
    record = path.with_suffix(".json")
    if not record.is_file() or not path.is_file():
        return None
    content = read_json(record)
    try:
        return Shard(**{**content, "identity": Identity(**content["identity"])})
    except (TypeError, KeyError):
        raise UserError(f"{record}: not the record of a shard; delete it and extract the shard again") from None


def _entry(shard: Shard) -> dict[str, Any]:
    return {"file": shard.file, "sha256": shard.sha256, "bytes": shard.bytes, "rows": shard.rows}


def _refuse_other(path: Path, made: Identity, asked: Identity) -> None:
    changes = changed_fields(asdict(made), asdict(asked))
    if changes:
        raise UserError(
            f"{path.parent} was made with other settings ({'; '.join(changes[:4])}); "
            "delete that folder to make it anew, or write to another --out"
        )


def _write_failures(cache: Path, skipped: Sequence[Mapping[str, Any]]) -> None:
    path = failures_path(cache)
    if skipped:
        write_bytes(path, "".join(json.dumps(dict(item)) + "\n" for item in skipped).encode())
    else:
        path.unlink(missing_ok=True)
