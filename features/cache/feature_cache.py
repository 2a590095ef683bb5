"""Merge shards into a feature cache, open a cache and verify it.

A cache is an HDF5 file ``features/<dataset>_<feature>.h5`` with virtual views of the arrays in its shards. The shards and
their list, ``manifest.json``, lie in the folder ``features/<dataset>_<feature>.shards``. See ``docs/formats.md``.
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

from vse.features.cache.arrays import CHECKSUMS_KEY, BlockChecker, StoredArray, compute_shard_checksums, locate_array
from vse.features.cache.rows import CACHE_FORMAT, CACHE_VERSION, Ids, TextUnit, find_text_unit
from vse.features.cache.shards import (
    CHECKED_ARRAY_NAMES,
    REGION_ARRAY_NAMES,
    ROW_ARRAY_NAMES,
    ShardRecord,
    concatenate_offsets,
    encode_cache_file,
    read_arrays,
    read_intact_shard_record,
    read_manifest,
    read_shard_record,
    shard_path,
    shard_slice,
    shards_folder,
    sum_extraction_seconds,
)
from vse.pipeline.dataset.columns import caption_ids
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.identity import hash_captions
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5, require_hdf5_dataset
from vse.pipeline.files.inputs import is_path_text, is_valid_name, wrap_read_errors
from vse.pipeline.files.writing import sha256_file, write_bytes, write_json

log = logging.getLogger(__name__)

_REQUIRED_ATTRIBUTES = ("dataset", "feature", "kind", "key", "captions", "provenance")

# Hashes in a cache's provenance that identify its rows, not the extractor that computed them.
ROW_HASH_NAMES = ("requested_ids_sha256", "ids_sha256", "sources_sha256", "boxes_sha256")


@dataclass(frozen=True)
class FeatureCache:
    """The metadata of a cache. No file stays open; :class:`vse.features.cache.reader.FeatureReader` reads the features.

    dataset, feature : names of the data set and of the feature
    kind : ``image`` or ``text``: whether the features were computed from images or from texts
    key : hash that identifies the settings, the weights and the rows
    provenance : settings, hashes, versions and counts of the extraction
    dataset_file : path of the ``dataset.json`` to which the cache refers
    ids : (n,) ids of the rows
    offsets : (n + 1,), row k has the regions (or tokens) ``offsets[k]:offsets[k + 1]``; None if each row has the same shape
    row_shape : shape of a row or, with ``offsets``, of one region
    shard_arrays : for each shard (a file of consecutive rows), the locations of its arrays by name
    skipped_ids : ids of the images or texts that the extractor left out
    block_checker : checker that compares the features with their checksums
    extraction_seconds : duration of the extraction; None if unknown
    model_folder : folder of the packed model (a trained model with its encoders); None if a cache file was read
    """

    path: Path
    dataset: str
    feature: str
    kind: str
    key: str
    provenance: Mapping[str, Any]
    dataset_file: Path
    ids: Ids
    offsets: NDArray[np.int64] | None
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shard_arrays: tuple[Mapping[str, StoredArray], ...]
    skipped_ids: frozenset[int]
    block_checker: BlockChecker
    extraction_seconds: float | None = None
    model_folder: Path | None = None

    @property
    def n_bytes(self) -> int:
        files = [self.path, *(shard["features"].path for shard in self.shard_arrays)]
        return sum(file.stat().st_size for file in files)

    @property
    def has_rows(self) -> bool:
        """False if this object describes only the feature, such as a feature of a packed model, and no cache file was read."""
        return bool(self.shard_arrays)

    @property
    def dim(self) -> int:
        """Length of one vector."""
        return self.row_shape[-1]

    @property
    def extractor_identity(self) -> Mapping[str, Any]:
        """The settings, weight hashes and version of the extractor; for imported features only their layout and shape.

        A model that was trained on one cache can read every cache with an equal extractor.
        """
        provenance = self.provenance
        known = {name: provenance[name] for name in ("config", "extractor_version") if name in provenance}
        hashes = {name: provenance[name] for name in provenance if name.endswith("_sha256") and name not in ROW_HASH_NAMES}
        if "imported" in provenance:
            known["imported"] = {"layout": provenance["imported"].get("layout"), "row_shape": list(self.row_shape)}
        return {"kind": self.kind, **known, **hashes}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """The kind of a row: one vector (dim,), the vectors of several crops (n_crops, dim), or a set of vectors.

        With ``offsets``, a set holds a vector for each region of an image or for each token of a text, and may be empty.
        Without ``offsets``, all sets have the same size, such as a grid of positions or a row of an imported 3-D array.
        """
        if self.offsets is not None:
            return "sets"
        if len(self.row_shape) == 1:
            return "vectors"
        return "crops" if str(self.provenance.get("config", {}).get("crops", "")).endswith("_bank") else "sets"

    @property
    def text_unit(self) -> TextUnit:
        """The texts that the rows of a cache of texts belong to: captions, or the distinct phrases in captions."""
        return find_text_unit(self.provenance.get("config", {}))

    def describe(self) -> str:
        """Return a description for a person, such as ``66 image rows of 10 x 4096 float16``."""
        each = f"{' x '.join(map(str, self.row_shape))} {self.dtype}"
        if self.offsets is None:
            return f"{len(self.ids)} {'phrase' if self.text_unit == 'phrases' else self.kind} rows of {each}"
        rows, parts = ("images", "regions") if self.kind == "image" else (self.text_unit, "tokens")
        return f"{len(self.ids)} {rows} with {self.offsets[-1]} {parts} of {each}"


def skipped_images_path(cache: Path) -> Path:
    """Return the path of a cache's list of skipped images: ``features/demo_fc7.h5.failures.jsonl``."""
    return cache.with_name(f"{cache.name}.failures.jsonl")


def merge_shards(
    cache: Path,
    n_shards: int,
    dataset_file: Path,
    wanted_ids: Ids,
    collect_provenance: Callable[[Sequence[Path]], Mapping[str, Any]] = lambda _: {},
    dataset: Dataset | None = None,
) -> Path:
    """Check the finished shards of a cache, write its manifest and its file, and return the path ``cache``.

    cache : the cache file to write
    n_shards : number of shards
    dataset_file : the ``dataset.json`` to which the cache refers
    wanted_ids : ids of all rows in order, including skipped ones
    collect_provenance : function that returns further provenance entries, given the paths of the checked shards
    dataset : data set; the cache records hashes of its captions, to recognise the data set later; None: no such hashes

    Raises UserError if a shard is missing or damaged, has other ids, or has other settings than the first shard.
    """
    shards: list[ShardRecord] = []
    for index in range(n_shards):
        path = shard_path(cache, index, n_shards)
        record = read_shard_record(path)
        shard = read_intact_shard_record(path, (shards[0] if shards else record).identity) if record else None
        if shard is None:
            raise UserError(f"{path}: missing or damaged; extract shard {index} of {n_shards} again")
        expected = wanted_ids[shard_slice(len(wanted_ids), index, n_shards)]
        left_out = {int(item["id"]) for item in shard.skipped}
        if read_arrays(path, "ids")[0].tolist() != [i for i in expected.tolist() if i not in left_out]:
            raise UserError(f"{path}: its ids differ from the ids of part {index} of {n_shards} of {dataset_file}")
        shards.append(shard)
    skipped = [item for shard in shards for item in shard.skipped]
    if skipped:
        write_bytes(skipped_images_path(cache), "".join(json.dumps(dict(item)) + "\n" for item in skipped).encode())
    else:
        skipped_images_path(cache).unlink(missing_ok=True)
    provenance = collect_provenance([shards_folder(cache) / shard.file for shard in shards])
    arrays: dict[str, NDArray[Any]] = {}
    if dataset is not None:
        provenance = {**provenance, "data": {"sha256": dataset.sha256}}
        arrays |= {"caption_ids": caption_ids(dataset.images), "caption_hashes": hash_captions(dataset.images)}
    skipped_ids = [int(item["id"]) for item in skipped]
    content, key = encode_cache_file(cache, shards, dataset_file, skipped_ids, provenance, arrays)
    entries = [
        {"file": shard.file, "sha256": shard.sha256, "bytes": shard.bytes, "rows": shard.rows}
        | {CHECKSUMS_KEY: compute_shard_checksums(shards_folder(cache) / shard.file, CHECKED_ARRAY_NAMES)}
        for shard in shards
    ]
    manifest = {
        "key": key,
        "shard_key": shards[0].identity.sha256,
        "seconds": sum_extraction_seconds(cache, shards),
        "shards": entries,
    }
    write_json(shards_folder(cache) / "manifest.json", manifest)
    return write_bytes(cache, content)


def open_cache(path: Path) -> FeatureCache:
    """Open a cache and check its attributes, row counts and ids, and the size of every shard.

    Raises UserError, which names the first fault.
    """
    # Features are not read through the virtual views: HDF5 returns fill values for a missing or short shard.
    attributes, arrays, shape, dtype = _read_cache_file(path)
    ids, offsets = arrays["ids"], arrays.get("offsets")
    manifest = read_manifest(path)
    if manifest["key"] != attributes["key"]:
        raise UserError(f"{path}: its shards were made with other settings; run vse-extract again")
    folder = shards_folder(path)
    shards = tuple(
        _locate_shard_arrays(folder / entry["file"], entry, manifest["shard_key"], shape, dtype, offsets is not None)
        for entry in manifest["shards"]
    )
    if any(CHECKSUMS_KEY not in entry for entry in manifest["shards"]):
        log.info("%s: has no block checksums to detect changed features; vse-extract verify --write adds them", path)
    rows, vectors = sum(entry["rows"] for entry in manifest["shards"]), sum(s["features"].shape[0] for s in shards)
    n_vectors = len(ids) if offsets is None else int(offsets[-1])
    if rows != len(ids) or not vectors == n_vectors == shape[0] or (offsets is not None and len(offsets) != len(ids) + 1):
        raise UserError(f"{path}: {len(ids)} ids and {shape[0]} vectors, but its shards hold {rows} rows, {vectors} vectors")
    in_order = np.sort(ids)
    if len(duplicates := in_order[1:][in_order[1:] == in_order[:-1]]):
        raise UserError(f"{path}: duplicate id {duplicates[0]}")
    return FeatureCache(
        path=path,
        dataset=attributes["dataset"],
        feature=attributes["feature"],
        kind=attributes["kind"],
        key=attributes["key"],
        provenance=attributes["provenance"],
        dataset_file=path.parent / attributes["captions"],
        ids=ids,
        offsets=offsets,
        row_shape=shape[1:],
        dtype=dtype,
        shard_arrays=shards,
        block_checker=BlockChecker([shard["features"] for shard in shards]),
        skipped_ids=frozenset(int(i) for i in arrays["skipped_ids"]),
        extraction_seconds=manifest.get("seconds"),
    )


def verify_cache(path: Path, correct_checksums: bool = False) -> FeatureCache:
    """Open a cache and check the SHA-256 and block checksums of its shards, and their ids and input hashes.

    Raises UserError, which names the first fault. With ``correct_checksums``, missing or wrong block checksums are
    corrected in the manifest and are not faults.
    """
    cache, manifest = open_cache(path), read_manifest(path)
    folder, entries = shards_folder(path), []
    for entry in manifest["shards"]:
        file = folder / entry["file"]
        if sha256_file(file) != entry["sha256"]:
            raise UserError(f"{file}: its bytes changed (sha256 differs); delete it and extract it again")
        entries.append({**entry, CHECKSUMS_KEY: compute_shard_checksums(file, CHECKED_ARRAY_NAMES)})
        if not correct_checksums and entry.get(CHECKSUMS_KEY, entries[-1][CHECKSUMS_KEY]) != entries[-1][CHECKSUMS_KEY]:
            raise UserError(
                f"{folder / 'manifest.json'}: the checksums of {file.name} changed; vse-extract verify --write corrects them"
            )
    files = [shard["features"].path for shard in cache.shard_arrays]
    names = ("ids", "sources") if cache.offsets is None else ("ids", "sources", "offsets")
    stored = [np.concatenate(parts) for parts in zip(*(read_arrays(file, "ids", "sources") for file in files), strict=True)]
    if cache.offsets is not None:
        stored.append(concatenate_offsets([read_arrays(file, "offsets")[0] for file in files]))
    for name, in_shards, in_cache in zip(names, stored, read_arrays(path, *names), strict=True):
        if not np.array_equal(in_shards, in_cache):
            raise UserError(f"{path}: the shards' {name} are not the cache's {name}; delete it and merge its shards again")
    if correct_checksums and entries != manifest["shards"]:
        write_json(folder / "manifest.json", {**manifest, "shards": entries})
        return open_cache(path)
    return cache


def read_input_hashes(cache: FeatureCache) -> NDArray[np.uint8]:
    """Return the SHA-256 of the image file or text of each row, (n, 32)."""
    return read_arrays(cache.path, "sources")[0]


def _read_cache_file(path: Path) -> tuple[dict[str, Any], dict[str, Ids], tuple[int, ...], np.dtype[Any]]:
    if not path.exists():
        raise UserError(f"{path}: no such feature cache; create it with vse-extract or snakemake --cores all {path}")
    with open_hdf5(path, "a readable feature cache") as file:
        attributes = {name: file.attrs[name] for name in ("format", "version", *_REQUIRED_ATTRIBUTES) if name in file.attrs}
        if str(attributes.get("format")) != CACHE_FORMAT or str(attributes.get("version")) != str(CACHE_VERSION):
            raise UserError(f"{path}: not a feature cache of version {CACHE_VERSION} (format {attributes.get('format')!r})")
        missing = set(_REQUIRED_ATTRIBUTES) - attributes.keys()
        if missing:
            raise UserError(f"{path}: not a complete feature cache, it lacks {', '.join(sorted(missing))}")
        attributes["provenance"] = json.loads(attributes["provenance"])
        json.dumps(attributes, ensure_ascii=False, default=str).encode()  # fails for a text with half a surrogate pair
        _check_attributes(attributes)
        arrays = {
            name: _read_integers(file, name) for name in ("ids", "offsets", "skipped_ids") if name in file or name == "ids"
        }
        arrays.setdefault("skipped_ids", np.empty(0, np.int64))
        offsets = arrays.get("offsets")
        if offsets is not None and (not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any()):
            raise ValueError("its offsets do not ascend from 0")
        require_hdf5_dataset(file, "sources")
        features = require_hdf5_dataset(file, "features", virtual=True)
        if features.ndim < 2 or features.dtype not in (np.float16, np.float32):
            raise ValueError(f"its features are {features.dtype} {features.shape}")
        return attributes, arrays, features.shape, features.dtype


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    provenance = attributes["provenance"]
    valid = {
        "dataset": is_valid_name(attributes["dataset"]),
        "feature": is_valid_name(attributes["feature"]),
        "kind": attributes["kind"] in ("image", "text") if isinstance(attributes["kind"], str) else False,
        "key": isinstance(attributes["key"], str),
        "captions": is_path_text(attributes["captions"]),
        "provenance": isinstance(provenance, dict)
        and all(isinstance(provenance.get(name, {}), dict) for name in ("config", "counts")),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"its attribute {name} is not valid")


def _read_integers(file: h5py.File, name: str) -> Ids:
    data = require_hdf5_dataset(file, name)
    if data.ndim != 1 or data.dtype.kind != "i":
        raise ValueError(f"its {name} are {data.dtype} {data.shape}")
    values: Ids = data[:].astype(np.int64)
    return values


def _locate_shard_arrays(
    path: Path, entry: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: np.dtype[Any], ragged: bool
) -> dict[str, StoredArray]:
    if not path.is_file():
        advice = f"run the same vse-extract again, or delete {path.parent.with_suffix('.h5')} and run snakemake again"
        raise UserError(f"{path}: this shard is missing; {advice}: only missing shards are extracted")
    if path.stat().st_size != entry["bytes"]:
        raise UserError(f"{path}: {path.stat().st_size} bytes, {entry['bytes']} expected; delete it and extract it again")
    with (
        wrap_read_errors(path, "a readable shard; delete it and extract it again"),
        h5py.File(path, "r", locking=False) as file,
    ):
        if file.attrs["key"] != key:
            raise UserError(f"{path}: extracted with other settings than the cache; run the same extraction again")
        features, rows = require_hdf5_dataset(file, "features"), entry["rows"]
        n_vectors = int(_read_integers(file, "offsets")[-1]) if ragged else rows
        other = n_vectors and (features.shape != (n_vectors, *shape[1:]) or features.dtype != dtype)
        if other or len(require_hdf5_dataset(file, "ids")) != rows:
            raise UserError(f"{path}: features are {features.dtype} {features.shape}, which differs from the manifest")
        lengths = {
            "features": n_vectors,
            **dict.fromkeys(REGION_ARRAY_NAMES, n_vectors),
            **dict.fromkeys(ROW_ARRAY_NAMES, rows),
        }
        checksums = entry.get(CHECKSUMS_KEY, {})
        stored = {
            name: locate_array(path, data, checksums)
            for name in lengths
            if (data := find_hdf5_dataset(file, name)) is not None
        }
        wrong = [name for name, array in stored.items() if len(array.shape) < 1 or array.shape[0] != lengths[name]]
        if wrong:
            raise ValueError(f"its {wrong[0]} are of shape {stored[wrong[0]].shape} for {lengths[wrong[0]]} rows")
        return stored
