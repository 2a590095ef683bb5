"""Write and read the shards of a feature cache, and build the cache file that refers to the shards.

A shard ``shard-00000-of-00004.h5`` holds consecutive rows. Its hash and settings, called its record, are written afterwards
to ``shard-00000-of-00004.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from vse.features.cache.arrays import CHECKSUMS_KEY, are_checksums
from vse.features.cache.rows import CACHE_FORMAT, CACHE_VERSION, CacheIdentity, FeatureRows, write_features
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import is_valid_name
from vse.pipeline.files.outputs import OutputKind, check_output, json_kind, read_first_bytes
from vse.pipeline.files.writing import open_atomic, read_json, sha256_file, sha256_json, write_json
from vse.pipeline.presets.presets import list_setting_changes

REGION_ARRAY_NAMES = ("boxes", "scores")  # arrays with one entry per region
ROW_ARRAY_NAMES = ("image_size",)  # arrays with one entry per row
CHECKED_ARRAY_NAMES = ("features", *REGION_ARRAY_NAMES, *ROW_ARRAY_NAMES)  # arrays with block checksums and virtual views
PAGE_BYTES = 4096  # size of a memory page


@dataclass(frozen=True)
class ShardRecord:
    """The record of a finished shard, a JSON file next to the shard.

    A finished shard is kept if its ``identity`` equals that of the new extraction. The other fields may differ, so that a new
    version of a library, for example, does not invalidate a cache.

    file, sha256, bytes : name, hash and size of the shard file
    identity : names of the data set and feature, and the settings and hashes that determine the vectors
    skipped : id, path and reason of each image or text that was left out
    counts : numbers of unusual rows for the log, such as captions without a known word
    notes : further provenance, such as library versions and the source of the weights
    seconds : duration of the extraction; None for imported rows
    mtime_ns : modification time of the shard file when its hash was last computed; None in records of older versions
    dataset_sha256 : SHA-256 of the ``dataset.json`` with the images or texts; None in records of older versions
    """

    file: str
    sha256: str
    bytes: int
    rows: int
    identity: CacheIdentity
    skipped: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    mtime_ns: int | None = None
    dataset_sha256: str | None = None


def shards_folder(cache: Path) -> Path:
    """Return the folder of a cache's shards: ``features/demo_fc7.shards`` for ``features/demo_fc7.h5``."""
    return cache.with_suffix(".shards")


def shard_path(cache: Path, index: int, n_shards: int) -> Path:
    """Return the path of shard ``index`` (0-based) of ``n_shards``."""
    return shards_folder(cache) / f"shard-{index:05d}-of-{n_shards:05d}.h5"


def fit_duration_path(cache: Path) -> Path:
    """Return the path of the JSON file with the time that fitting the encoder took: ``features/demo_hglmm.encoder.json``."""
    return cache.with_suffix(".encoder.json")


def sum_extraction_seconds(cache: Path, shards: Sequence[ShardRecord]) -> float | None:
    """Return the duration of all shards and of the encoder's fit in seconds; None if a duration is unknown."""
    record = fit_duration_path(cache)
    fit = read_json(record) if record.is_file() else {"seconds": 0.0}
    seconds = [*(shard.seconds for shard in shards), fit.get("seconds") if isinstance(fit, dict) else None]
    known = [value for value in seconds if isinstance(value, (int, float))]
    return round(sum(known), 4) if len(known) == len(seconds) else None


def shard_slice(n_rows: int, index: int, n_shards: int) -> slice:
    """Return the slice of the rows in shard ``index``. The sizes of shards differ by at most one row."""
    return slice(n_rows * index // n_shards, n_rows * (index + 1) // n_shards)


def write_shard(
    path: Path,
    identity: CacheIdentity,
    rows: FeatureRows,
    notes: Mapping[str, Any] | None = None,
    started: float | None = None,
    dataset_sha256: str | None = None,
) -> ShardRecord:
    """Write a shard, then its record (a JSON file with its hash and settings); return the record.

    Raises UserError if a feature is not finite.

    identity : names of the data set and feature, and the settings and hashes that determine the vectors
    notes : further provenance for the record, such as library versions; None: nothing
    started : time at which the extraction started (:func:`time.perf_counter`); None for imported rows
    dataset_sha256 : SHA-256 of the ``dataset.json`` with the images or texts; None: not recorded
    """
    _check_row_counts(rows)
    record = path.with_suffix(".json")
    record.unlink(missing_ok=True)  # a record must never describe another file than the one next to it
    with open_atomic(path) as stream:
        # Large arrays begin on a page, so that a row of 4096 float16 touches two pages and not three when it is mapped.
        with h5py.File(stream, "w", alignment_threshold=PAGE_BYTES, alignment_interval=PAGE_BYTES) as file:
            write_identity_attributes(file, identity, identity.sha256)
            arrays = {**vars(rows), "sources": rows.input_hashes}
            for name in ("ids", "features", "sources", "offsets", *REGION_ARRAY_NAMES, *ROW_ARRAY_NAMES):
                if name == "features":
                    write_features(path, file, rows)
                elif arrays[name] is not None:
                    file.create_dataset(name, data=arrays[name])
        n_bytes = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    shard = ShardRecord(
        file=path.name,
        sha256=sha256,
        bytes=n_bytes,
        rows=len(rows.ids),
        identity=identity,
        skipped=rows.skipped,
        counts=rows.counts,
        notes=notes or {},
        seconds=None if started is None else round(time.perf_counter() - started, 4),
        mtime_ns=path.stat().st_mtime_ns,
        dataset_sha256=dataset_sha256,
    )
    write_json(record, asdict(shard))
    return shard


def read_intact_shard_record(path: Path, identity: CacheIdentity) -> ShardRecord | None:
    """Return the record (hash and settings) of a shard; None if the shard is missing or damaged.

    The shard is hashed only if its modification time differs from the recorded one. If the hash is right, the record gets the
    new modification time. Raises UserError if the names, settings or hashes of the shard differ from ``identity``.
    """
    shard = read_shard_record(path)
    if shard is None:
        return None
    changes = list_setting_changes(asdict(shard.identity), asdict(identity))
    if differ_only_in_precision(shard.identity, identity):
        raise mixed_precision_error(path.parent, shard.identity, identity)
    if changes:
        raise UserError(
            f"{path.parent} was made with other settings ({'; '.join(changes[:4])}); "
            "delete that folder to regenerate it, or write to another --out"
        )
    status = path.stat()
    if status.st_size != shard.bytes:
        return None
    if status.st_mtime_ns != shard.mtime_ns:
        if sha256_file(path) != shard.sha256:
            return None
        shard = replace(shard, mtime_ns=status.st_mtime_ns)
        with suppress(UserError):  # a record that cannot be written is still right
            write_json(path.with_suffix(".json"), asdict(shard))
    return shard


def get_network_precision(identity: CacheIdentity) -> str | None:
    """Return the precision of the network in the settings of a cache; None if no network computed the rows."""
    config = identity.content.get("config")
    precision = config.get("precision") if isinstance(config, Mapping) else None
    return precision if isinstance(precision, str) else None


def differ_only_in_precision(one: CacheIdentity, other: CacheIdentity) -> bool:
    """Return whether the identities of two shards (names, settings, hashes) differ only in the precision of a network."""
    changes = list_setting_changes(asdict(one), asdict(other))
    return len(changes) == 1 and changes[0].startswith("content.config.precision: ")


def find_other_precision_shards(cache: Path, n_shards: int, identity: CacheIdentity) -> dict[Path, CacheIdentity]:
    """Return the identities of a cache's existing shards that differ from ``identity`` only in the precision.

    An identity holds names, settings and hashes. The result is a dictionary from the paths of the shards.
    """
    paths = [shard_path(cache, index, n_shards) for index in range(n_shards)]
    found = {path: record.identity for path in paths if (record := read_shard_record(path)) is not None}
    return {path: other for path, other in found.items() if differ_only_in_precision(other, identity)}


def mixed_precision_error(folder: Path, one: CacheIdentity, other: CacheIdentity) -> UserError:
    """Return the error for a cache whose shards would have two precisions."""
    there, here = get_network_precision(one), get_network_precision(other)
    return UserError(
        f"{folder} was made with other settings (config.precision: {there} -> {here}), and a cache has one precision; "
        f"use --set precision={there} to continue in that precision, or delete that folder and use "
        f"--set precision=fp32 on each machine (for the workflow, precision: fp32 in the preset of feature {one.feature!r})"
    )


def read_shard_record(path: Path) -> ShardRecord | None:
    """Return the record (hash and settings) of a shard from its JSON file; None if this file or the shard does not exist."""
    record = path.with_suffix(".json")
    if not record.is_file() or not path.is_file():
        return None
    content = read_json(record)
    try:
        shard = TypeAdapter(ShardRecord).validate_python(content)
        if not all(type(item.get("id")) is int for item in shard.skipped):
            raise ValueError("a skipped image has no integer id")
        return shard
    except ValueError:
        raise UserError(f"{record}: not the record of a shard; delete it and extract the shard again") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a cache. Raises UserError if a field is missing or invalid."""
    file = shards_folder(path) / "manifest.json"
    manifest: dict[str, Any] = read_json(file)
    try:
        texts = [manifest["key"], manifest["shard_key"], *(entry["sha256"] for entry in manifest["shards"])]
        counts = [entry[name] for entry in manifest["shards"] for name in ("bytes", "rows")]
        files = [entry["file"] for entry in manifest["shards"]]
        sound = all(isinstance(text, str) for text in texts) and all(type(n) is int and n >= 0 for n in counts)
        sound = sound and bool(files) and all(map(is_valid_name, files))
        sound = sound and all(are_checksums(e[CHECKSUMS_KEY]) for e in manifest["shards"] if CHECKSUMS_KEY in e)
        sound = sound and isinstance(manifest.get("seconds"), (int, float, type(None)))
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise UserError(f"{file}: not the manifest of a feature cache; delete it and run vse-extract again")
    return manifest


def read_arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Read complete arrays of a shard or a cache by name. The file is not locked."""
    with open_hdf5(path, "a readable shard or cache") as file:
        return [require_hdf5_dataset(file, name)[:] for name in names]


def write_identity_attributes(file: h5py.File, identity: CacheIdentity, key: str) -> None:
    """Write the HDF5 attributes that shards and cache files share."""
    names = {"dataset": identity.dataset, "feature": identity.feature, "kind": identity.kind, "key": key}
    file.attrs.update({"format": CACHE_FORMAT, "version": CACHE_VERSION, **names})


def _check_row_counts(rows: FeatureRows) -> None:
    n = len(rows.ids)
    last = rows.offsets[-1] if rows.offsets is not None else n
    lengths = {len(rows.input_hashes), n if rows.offsets is None else len(rows.offsets) - 1}
    if lengths != {n} or len(rows.features) != last:
        raise ValueError(f"{n} ids for {len(rows.features)} rows of features and {len(rows.input_hashes)} of input hashes")


def encode_cache_file(
    cache: Path,
    shards: Sequence[ShardRecord],
    dataset_file: Path,
    skipped_ids: Sequence[int],
    more_provenance: Mapping[str, Any],
    more_arrays: Mapping[str, NDArray[Any]],
) -> tuple[bytes, str]:
    """Return the bytes of a cache file, and the key of the cache.

    The key is a hash of the identity, the ids and the input hashes. The file has HDF5's virtual views of the arrays in the
    shards, instead of copies. ``skipped_ids`` are ids of images or texts that were left out. ``more_provenance`` is added to
    the file's provenance, and ``more_arrays`` to its arrays.
    """
    folder, identity = shards_folder(cache), shards[0].identity
    files = [folder / shard.file for shard in shards]
    ids, input_hashes = (
        np.concatenate(parts) for parts in zip(*(read_arrays(f, "ids", "sources") for f in files), strict=True)
    )
    digests = {
        "ids_sha256": sha256_json(ids.tolist()),
        "sources_sha256": hashlib.sha256(input_hashes.tobytes()).hexdigest(),
    }
    key = sha256_json([identity.sha256, digests])
    counts = {name: sum(shard.counts.get(name, 0) for shard in shards) for shard in shards for name in shard.counts}
    devices = sorted({str(shard.notes["device"]) for shard in shards if "device" in shard.notes})
    notes = {**shards[0].notes, **({"device": ", ".join(devices)} if devices else {})}
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        write_identity_attributes(file, identity, key)
        file.attrs["captions"] = Path(os.path.relpath(dataset_file, cache.parent)).as_posix()
        provenance = {**identity.content, **notes, **digests, "counts": counts, **more_provenance}
        file.attrs["provenance"] = json.dumps(provenance, sort_keys=True)
        file.create_dataset("ids", data=ids)
        file.create_dataset("sources", data=input_hashes)
        file.create_dataset("skipped_ids", data=np.asarray(skipped_ids, np.int64))
        for name, values in more_arrays.items():
            file.create_dataset(name, data=values)
        with open_hdf5(files[0], "a readable shard") as first:
            names = [name for name in CHECKED_ARRAY_NAMES if name in first]
            if "offsets" in first:
                file.create_dataset("offsets", data=concatenate_offsets([read_arrays(f, "offsets")[0] for f in files]))
        for name in names:
            _create_virtual_view(file, name, files)
    return buffer.getvalue(), key


def _create_virtual_view(file: h5py.File, name: str, shards: Sequence[Path]) -> None:
    shapes = []
    for path in shards:
        with open_hdf5(path, "a readable shard") as shard:
            data = require_hdf5_dataset(shard, name)
            shapes.append(data.shape)
            dtype = data.dtype
    row_shape = max(shapes)[1:]  # the array of a shard without rows may have another shape
    layout = h5py.VirtualLayout(shape=(sum(shape[0] for shape in shapes), *row_shape), dtype=dtype)
    start = 0
    for path, shape in zip(shards, shapes, strict=True):
        if shape[0]:
            layout[start : start + shape[0]] = h5py.VirtualSource(f"{path.parent.name}/{path.name}", name, shape=shape)
        start += shape[0]
    file.create_virtual_dataset(name, layout, fillvalue=np.nan if dtype.kind == "f" else -1)


def concatenate_offsets(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the offsets of all rows, given the offsets of each shard's rows.

    The regions (or tokens) of row k are ``offsets[k]:offsets[k + 1]``. The result and the offsets of each shard start at 0.
    """
    counts = np.concatenate([np.diff(part) for part in parts])
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


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


def build_cache_output_kind(out: Path) -> OutputKind:
    """Return the kind of existing file that a new cache at ``out`` may replace: a feature cache.

    A damaged cache is also of this kind if it begins like HDF5 and the folder of its shards has a manifest (list of shards).
    """
    manifest = shards_folder(out) / "manifest.json"
    return OutputKind(
        "a feature cache",
        lambda path: (
            _read_dataset_and_feature(path) is not None
            or (_MANIFEST_KIND.recognises_file_at(manifest) and _SHARD_KIND.recognises_file_at(path))
        ),
    )


def check_cache_output(out: Path, dataset: str, feature: str, inputs: Iterable[Path], encoder: Path | None = None) -> None:
    """Raise UserError if the cache of this data set and feature may not be written to ``out``.

    The cache file, the shards and the file ``encoder`` (None: no encoder) may overwrite files of the same kind, but none of
    the ``inputs``, and no cache of another data set or feature.
    """
    files = list(inputs)
    check_output(out, build_cache_output_kind(out), files)
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
