"""The feature cache: an HDF5 file of virtual views over shards that are written atomically.

``features/<dataset>_<feature>.h5`` refers to ``features/<dataset>_<feature>.shards/shard-00000-of-00004.h5`` ...
by relative names (:mod:`vse.features.cache.shards`); ``manifest.json`` beside them joins their records.
Attributes and datasets are those of ``docs/formats.md``. Everything here that finds a fault names the file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.features.cache.arrays import CHECKSUMS, Blocks, Stored, shard_checksums, stored_array
from vse.features.cache.rows import FORMAT, VERSION, Ids, TextRows, text_rows_of
from vse.features.cache.shards import (
    ARRAYS,
    PER_ROW,
    RAGGED,
    Shard,
    finished_shard,
    joined_offsets,
    read_manifest,
    read_record,
    read_rows,
    seconds_of,
    shard_path,
    shard_slice,
    shards_folder,
    virtual_views,
)
from vse.pipeline.dataset.columns import caption_ids
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.identity import caption_hashes
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import is_name, is_path, wrap_read_errors
from vse.pipeline.files.writing import sha256_file, write_bytes, write_json

log = logging.getLogger(__name__)

Said = Mapping[str, Any]
_ATTRIBUTES = ("dataset", "feature", "kind", "key", "captions", "provenance")

# Hashes in a cache's provenance that are of its rows, and say nothing of what made them.
_OF_ROWS = ("requested_ids_sha256", "ids_sha256", "sources_sha256", "boxes_sha256")


@dataclass(frozen=True)
class FeatureCache:
    """An opened and checked cache. No file stays open; :class:`vse.features.cache.reader.FeatureReader` reads the rows.

    ``shards`` holds, for each shard, where its arrays lie, by name; ``blocks`` are those of its features. With ``offsets``
    (n + 1,) the cache is one of regions: row k has regions ``offsets[k]:offsets[k + 1]``, and ``row_shape`` is the shape of
    one region. ``seconds`` is how long its rows took to make, None if that is not known.
    """

    path: Path
    dataset: str
    feature: str
    kind: str
    key: str
    provenance: Said
    captions: Path
    ids: Ids
    offsets: Ids | None
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[Mapping[str, Stored], ...]
    skipped: frozenset[int]
    blocks: Blocks
    seconds: float | None = None

    @property
    def n_bytes(self) -> int:
        """Its size on the disk, that of its shards included."""
        files = [self.path, *(shard["features"].path for shard in self.shards)]
        return sum(file.stat().st_size for file in files)

    @property
    def dim(self) -> int:
        """Length of one vector."""
        return self.row_shape[-1]

    @property
    def extractor(self) -> Mapping[str, Any]:
        """What made the rows, whatever they are rows of: settings, weights and version.

        Caches that agree in it can be read by the same model. Of imported features only their layout and shape are known.
        """
        made = self.provenance
        known = {name: made[name] for name in ("config", "extractor_version") if name in made}
        hashes = {name: made[name] for name in made if name.endswith("_sha256") and name not in _OF_ROWS}
        if "imported" in made:
            known["imported"] = {"layout": made["imported"].get("layout"), "row_shape": list(self.row_shape)}
        return {"kind": self.kind, **known, **hashes}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """What one row is: a vector (dim,), a bank of crops (n_crops, dim), or a set of vectors.

        Sets are the regions of an image, which may be none, or positions (n_positions, dim): those of a grid, the patches
        of a transformer, or imported arrays with three axes. Only extractors of ours make banks, so their settings say it.
        """
        if self.offsets is not None:
            return "sets"
        if len(self.row_shape) == 1:
            return "vectors"
        return "crops" if str(self.provenance.get("config", {}).get("crops", "")).endswith("_bank") else "sets"

    @property
    def text_rows(self) -> TextRows:
        """What a cache of texts has a row of: every caption, or every different text of the captions' phrases."""
        return text_rows_of(self.provenance.get("config", {}))

    def described(self) -> str:
        """What the cache holds, in words: ``66 image rows of 10 x 4096 float16``."""
        each = f"{' x '.join(map(str, self.row_shape))} {self.dtype}"
        if self.offsets is None:
            return f"{len(self.ids)} {'phrase' if self.text_rows == 'phrases' else self.kind} rows of {each}"
        rows, parts = ("images", "regions") if self.kind == "image" else (self.text_rows, "tokens")
        return f"{len(self.ids)} {rows} with {self.offsets[-1]} {parts} of {each}"


def failures_path(cache: Path) -> Path:
    """``features/demo_fc7.h5.failures.jsonl``: the images that ``--skip-bad`` left out."""
    return cache.with_name(f"{cache.name}.failures.jsonl")


def merge_shards(
    cache: Path,
    n_shards: int,
    dataset_file: Path,
    row_ids: Ids,
    more: Callable[[Sequence[Path]], Said] = lambda _: {},
    dataset: Dataset | None = None,
    photos: NDArray[np.uint8] | None = None,
) -> Path:
    """Join finished shards: check each, write ``manifest.json``, then the cache file with its virtual views.

    ``row_ids`` are the ids that the whole cache should hold, in order; what shards skipped is left out. ``more`` makes of the
    checked shards what the provenance has beside the usual. The cache records the captions of ``dataset`` and the hashes of
    its ``photos`` (n_rows, 32), by which it is recognised; photographs that rows were made from are known by their sources.
    """
    shards: list[Shard] = []
    for index in range(n_shards):
        path = shard_path(cache, index, n_shards)
        record = read_record(path)
        shard = finished_shard(path, (shards[0] if shards else record).identity) if record else None
        if shard is None:
            raise UserError(f"{path}: missing or damaged; extract shard {index} of {n_shards} again")
        expected = row_ids[shard_slice(len(row_ids), index, n_shards)]
        left_out = {int(item["id"]) for item in shard.skipped}
        if read_rows(path, "ids")[0].tolist() != [i for i in expected.tolist() if i not in left_out]:
            raise UserError(f"{path}: its ids are not those of part {index} of {n_shards} of {dataset_file}")
        shards.append(shard)
    skipped = [item for shard in shards for item in shard.skipped]
    _write_failures(cache, skipped)
    said = more([shards_folder(cache) / shard.file for shard in shards])
    known: dict[str, NDArray[Any]] = {} if photos is None else {"photo_hashes": photos}
    if dataset is not None:
        said = {**said, "data": {"sha256": dataset.sha256}}
        known |= {"caption_ids": caption_ids(dataset.images), "caption_hashes": caption_hashes(dataset.images)}
    content, key = virtual_views(cache, shards, dataset_file, [int(item["id"]) for item in skipped], said, known)
    entries = [_entry(shards_folder(cache), shard) for shard in shards]
    manifest = {"key": key, "shard_key": shards[0].identity.key, "seconds": seconds_of(cache, shards), "shards": entries}
    write_json(shards_folder(cache) / "manifest.json", manifest)
    return write_bytes(cache, content)


def open_cache(path: Path) -> FeatureCache:
    """Open a cache: format, version, row counts, and that every shard exists and has all its bytes.

    HDF5 itself returns fill values for a missing or short shard, so nothing is read through its views.
    """
    attributes, arrays, shape, dtype = _read_head(path)
    ids, offsets = arrays["ids"], arrays.get("offsets")
    manifest = read_manifest(path)
    if manifest["key"] != attributes["key"]:
        raise UserError(f"{path}: its shards were made with other settings; run vse-extract again")
    folder = shards_folder(path)
    shards = tuple(
        _locate(folder / entry["file"], entry, manifest["shard_key"], shape, dtype, offsets is not None)
        for entry in manifest["shards"]
    )
    if any(CHECKSUMS not in entry for entry in manifest["shards"]):
        log.info(
            "%s: has no checksums of its blocks, so changed features are not noticed; vse-extract verify --write adds them",
            path,
        )
    rows, vectors = sum(entry["rows"] for entry in manifest["shards"]), sum(s["features"].shape[0] for s in shards)
    n_vectors = len(ids) if offsets is None else int(offsets[-1])
    if rows != len(ids) or not vectors == n_vectors == shape[0] or (offsets is not None and len(offsets) != len(ids) + 1):
        raise UserError(f"{path}: {len(ids)} ids and {shape[0]} vectors, but its shards hold {rows} rows, {vectors} vectors")
    in_order = np.sort(ids)
    if len(again := in_order[1:][in_order[1:] == in_order[:-1]]):
        raise UserError(f"{path}: duplicate id {again[0]}")
    return FeatureCache(
        path=path,
        dataset=attributes["dataset"],
        feature=attributes["feature"],
        kind=attributes["kind"],
        key=attributes["key"],
        provenance=attributes["provenance"],
        captions=path.parent / attributes["captions"],
        ids=ids,
        offsets=offsets,
        row_shape=shape[1:],
        dtype=dtype,
        shards=shards,
        blocks=Blocks([shard["features"] for shard in shards]),
        skipped=frozenset(int(i) for i in arrays["skipped_ids"]),
        seconds=manifest.get("seconds"),
    )


def verify_cache(path: Path, write: bool = False) -> FeatureCache:
    """Open a cache, re-hash every shard, compare ids and sources; :class:`UserError` names what is broken.

    ``write`` adds checksums of blocks to the manifest where it lacks them, or has others than the verified shards.
    """
    cache, manifest = open_cache(path), read_manifest(path)
    folder, entries = shards_folder(path), []
    for entry in manifest["shards"]:
        file = folder / entry["file"]
        if sha256_file(file) != entry["sha256"]:
            raise UserError(f"{file}: its bytes changed (sha256 differs); delete it and extract it again")
        entries.append({**entry, CHECKSUMS: shard_checksums(file, ARRAYS)})
        if not write and entry.get(CHECKSUMS, entries[-1][CHECKSUMS]) != entries[-1][CHECKSUMS]:
            raise UserError(
                f"{folder / 'manifest.json'}: the checksums of {file.name} changed; vse-extract verify --write mends them"
            )
    files = [shard["features"].path for shard in cache.shards]
    names = ("ids", "sources") if cache.offsets is None else ("ids", "sources", "offsets")
    stored = [np.concatenate(parts) for parts in zip(*(read_rows(file, "ids", "sources") for file in files), strict=True)]
    if cache.offsets is not None:
        stored.append(joined_offsets([read_rows(file, "offsets")[0] for file in files]))
    for name, of_shards, expected in zip(names, stored, read_rows(path, *names), strict=True):
        if not np.array_equal(of_shards, expected):
            raise UserError(f"{path}: the shards' {name} are not the cache's {name}; delete it and merge its shards again")
    if write and entries != manifest["shards"]:
        write_json(folder / "manifest.json", {**manifest, "shards": entries})
        return open_cache(path)
    return cache


def read_sources(cache: FeatureCache) -> NDArray[np.uint8]:
    """SHA-256 of what each row was made from, (n, 32)."""
    return read_rows(cache.path, "sources")[0]


def _entry(folder: Path, shard: Shard) -> dict[str, Any]:
    """Return what a manifest says about a shard whose SHA-256 was compared."""
    entry = {"file": shard.file, "sha256": shard.sha256, "bytes": shard.bytes, "rows": shard.rows}
    return {**entry, CHECKSUMS: shard_checksums(folder / shard.file, ARRAYS)}


def _read_head(path: Path) -> tuple[dict[str, Any], dict[str, Ids], tuple[int, ...], np.dtype[Any]]:
    if not path.exists():
        raise UserError(f"{path}: no such feature cache; make it with vse-extract or snakemake --cores all {path}")
    with open_hdf5(path, "a readable feature cache") as file:
        attributes = {name: file.attrs[name] for name in ("format", "version", *_ATTRIBUTES) if name in file.attrs}
        if str(attributes.get("format")) != FORMAT or str(attributes.get("version")) != str(VERSION):
            raise UserError(f"{path}: not a feature cache of version {VERSION} (format {attributes.get('format')!r})")
        missing = set(_ATTRIBUTES) - attributes.keys()
        if missing:
            raise UserError(f"{path}: not a complete feature cache, it lacks {', '.join(sorted(missing))}")
        attributes["provenance"] = json.loads(attributes["provenance"])
        json.dumps(attributes, ensure_ascii=False, default=str).encode()  # no text may be half a surrogate pair
        _check_attributes(attributes)
        arrays = {name: _integers(file, name) for name in ("ids", "offsets", "skipped_ids") if name in file or name == "ids"}
        arrays.setdefault("skipped_ids", np.empty(0, np.int64))
        _check_offsets(arrays.get("offsets"))
        require_hdf5_dataset(file, "sources")
        features = require_hdf5_dataset(file, "features", virtual=True)
        if features.ndim < 2 or features.dtype not in (np.float16, np.float32):
            raise ValueError(f"its features are {features.dtype} {features.shape}")
        return attributes, arrays, features.shape, features.dtype


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    """:class:`ValueError` names an attribute that is not what caches have; some become parts of paths."""
    provenance = attributes["provenance"]
    fits = {
        "dataset": is_name(attributes["dataset"]),
        "feature": is_name(attributes["feature"]),
        "kind": attributes["kind"] in ("image", "text") if isinstance(attributes["kind"], str) else False,
        "key": isinstance(attributes["key"], str),
        "captions": is_path(attributes["captions"]),
        "provenance": isinstance(provenance, dict)
        and all(isinstance(provenance.get(name, {}), dict) for name in ("config", "counts")),
    }
    for name, fit in fits.items():
        if not fit:
            raise ValueError(f"its attribute {name} is not that of a cache")


def _integers(file: h5py.File, name: str) -> Ids:
    data = require_hdf5_dataset(file, name)
    if data.ndim != 1 or data.dtype.kind != "i":
        raise ValueError(f"its {name} are {data.dtype} {data.shape}")
    values: Ids = data[:].astype(np.int64)
    return values


def _check_offsets(offsets: Ids | None) -> None:
    if offsets is not None and (not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any()):
        raise ValueError("its offsets do not ascend from 0")


def _locate(
    path: Path, entry: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: np.dtype[Any], ragged: bool
) -> dict[str, Stored]:
    if not path.is_file():
        again = f"run the same vse-extract again, or delete {path.parent.with_suffix('.h5')} and run snakemake again"
        raise UserError(f"{path}: this shard is missing; {again}: only what is missing is made")
    if path.stat().st_size != entry["bytes"]:
        raise UserError(f"{path}: {path.stat().st_size} bytes, {entry['bytes']} expected; delete it and extract it again")
    with (
        wrap_read_errors(path, "a readable shard; delete it and extract it again"),
        h5py.File(path, "r", locking=False) as file,
    ):
        if file.attrs["key"] != key:
            raise UserError(f"{path}: made with other settings than the cache; run the same extraction again")
        features, rows = require_hdf5_dataset(file, "features"), entry["rows"]
        n_vectors = int(_integers(file, "offsets")[-1]) if ragged else rows
        other = n_vectors and (features.shape != (n_vectors, *shape[1:]) or features.dtype != dtype)
        if other or len(require_hdf5_dataset(file, "ids")) != rows:
            raise UserError(f"{path}: features are {features.dtype} {features.shape}, the manifest says otherwise")
        lengths = {"features": n_vectors, **dict.fromkeys(RAGGED, n_vectors), **dict.fromkeys(PER_ROW, rows)}
        sums = entry.get(CHECKSUMS, {})
        stored = {
            name: stored_array(path, data, sums) for name in lengths if (data := find_hdf5_dataset(file, name)) is not None
        }
        wrong = [name for name, array in stored.items() if len(array.shape) < 1 or array.shape[0] != lengths[name]]
        if wrong:
            raise ValueError(f"its {wrong[0]} are of shape {stored[wrong[0]].shape} for {lengths[wrong[0]]} rows")
        return stored


def _write_failures(cache: Path, skipped: Sequence[Mapping[str, Any]]) -> None:
    path = failures_path(cache)
    if skipped:
        write_bytes(path, "".join(json.dumps(dict(item)) + "\n" for item in skipped).encode())
    else:
        path.unlink(missing_ok=True)
