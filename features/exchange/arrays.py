"""Features that other programs made: arrays with ids, and bottom-up-attention TSV files, as caches of ours."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vse.features.cache import shards
from vse.features.cache.feature_cache import merge_shards
from vse.features.cache.rows import Identity, Ids, Rows, row_ids, sha256_bytes
from vse.features.cache.shards import check_cache_out, feature_at
from vse.features.extractors.proposals import inside
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.decoded_limit import check_zip
from vse.pipeline.files.inputs import WatchedFile, check_input, wrap_read_errors
from vse.pipeline.files.writing import lock_for_writing, sha256_json

SHARD_BYTES = 512_000_000
_TSV = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
log = logging.getLogger(__name__)


def import_arrays(
    features: Path, ids: Path | None, dataset_file: Path, out: Path, kind: Literal["image", "text"] = "image"
) -> Path:
    """A cache of the rows of a ``.npy`` file, whose ids (one per row) lie in ``ids``, a ``.txt`` or ``.npy`` file.

    A ``.npz`` file may hold both, as ``features`` and ``ids``. Rows (n, dim) or (n, n_crops, dim) may come in any order;
    each image (or caption) of the data set must have one. The type stays float16 or float32. Returns ``out``.
    """
    files = [WatchedFile(file) for file in (features, ids) if file is not None]
    array, of_rows = _arrays(features, ids)
    dataset = load_dataset_file(dataset_file)
    wanted = row_ids(dataset, kind)
    place = _places(features, of_rows.tolist(), wanted)

    def rows(part: slice) -> Rows:
        values = np.asarray(array[[place[int(i)] for i in wanted[part]]])
        return Rows(wanted[part], values, row_hashes(values))

    return write_imported(out, dataset, kind, {"layout": "arrays"}, files, wanted, rows, array[:1].nbytes)


def import_tsv(files: Sequence[Path], dataset_file: Path, out: Path, match: str | None = None) -> Path:
    """A cache of regions from bottom-up-attention TSV files (image_id, image_w, image_h, num_boxes, boxes, features).

    Boxes and features are base64 of float32. ``match`` says what an image_id is: ``cocoid`` (the default, if the data
    set has them), ``imgid`` or ``filename`` (its digits). Of duplicate rows one is taken. Returns ``out``.
    """
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: no such TSV file")
    watched = [WatchedFile(path) for path in files]
    dataset = load_dataset_file(dataset_file)
    of_image = _tsv_ids(dataset, match)
    where = _tsv_places(files, {str(identity) for identity in of_image.values()})
    absent = [image for image, identity in of_image.items() if str(identity) not in where]
    if absent:
        names = ", ".join(map(str, files))
        raise UserError(f"{names}: {len(absent)} of {len(of_image)} images are not there, the first is imgid {absent[0]}")
    wanted = np.asarray(list(of_image), np.int64)
    streams = {path: path.open("rb") for path in files}

    def rows(part: slice) -> Rows:
        lines, parsed = [], []
        for imgid in wanted[part]:
            path, offset = where[str(of_image[int(imgid)])]
            streams[path].seek(offset)
            lines.append(streams[path].readline())
            parsed.append(_tsv_row(path, lines[-1]))
            if (length := parsed[-1][0].shape[1]) != dim:
                raise UserError(f"{path}: image_id {of_image[int(imgid)]}: {length} numbers a box, where others have {dim}")
        return Rows(
            ids=wanted[part],
            features=np.concatenate([features for features, _, _ in parsed]),
            sources=np.stack([sha256_bytes(line) for line in lines]),
            offsets=np.cumsum([0, *(len(features) for features, _, _ in parsed)], dtype=np.int64),
            boxes=np.concatenate([boxes for _, boxes, _ in parsed]),
            image_size=np.asarray([size for _, _, size in parsed], np.int32),
        )

    try:
        path, offset = where[str(of_image[int(wanted[0])])]
        streams[path].seek(offset)
        first = _tsv_row(path, streams[path].readline())[0]
        dim = first.shape[1]
        layout = {"layout": "tsv", "image_ids_sha256": sha256_json(sorted(of_image.items()))}
        return write_imported(out, dataset, "image", layout, watched, wanted, rows, first.nbytes)
    finally:
        for stream in streams.values():
            stream.close()


def write_imported(
    out: Path,
    dataset: Dataset,
    kind: Literal["image", "text"],
    layout: Mapping[str, str],
    files: Sequence[WatchedFile],
    ids: Ids,
    rows: Callable[[slice], Rows],
    row_bytes: int,
) -> Path:
    """Write the cache ``out`` from ``rows`` of a part of ``ids``, in shards of half a gigabyte; finished ones are kept."""
    content = {
        "imported": {**layout, "files_sha256": [file.sha256 for file in files]},
        "requested_ids_sha256": sha256_json(ids.tolist()),
        "extractor_version": 1,
    }
    identity = Identity(dataset.name, feature_at(out, dataset.name), kind, content)
    n_shards = min(len(ids), max(1, -(-len(ids) * row_bytes // SHARD_BYTES)))
    check_cache_out(out, dataset.name, identity.feature, [dataset.path, *(file.path for file in files)])
    with lock_for_writing(out):
        empty = _write_shards(out, n_shards, identity, files, ids, rows)
        if empty:
            log.warning("%s: %d of %d rows are all zeros, the first is of id %d", out, len(empty), len(ids), empty[0])
        return merge_shards(out, n_shards, dataset.path, ids, dataset=dataset)


def _write_shards(
    out: Path, n_shards: int, identity: Identity, files: Sequence[WatchedFile], ids: Ids, rows: Callable[[slice], Rows]
) -> list[int]:
    """Write the shards that are not there yet; returns the ids of their rows that are all zeros."""
    empty: list[int] = []
    for index in tqdm(range(n_shards), desc=f"import {out.name}", unit="shard", disable=None):
        path = shards.shard_path(out, index, n_shards)
        if shards.finished_shard(path, identity) is None:
            notes = {"files": [file.path.name for file in files]}
            made = rows(shards.shard_slice(len(ids), index, n_shards))
            empty += _all_zero(made)
            for file in files:
                file.check()
            shards.write_shard(path, identity, made, notes=notes)
    return empty


def _all_zero(rows: Rows) -> list[int]:
    """The ids whose features, of all crops or regions, are zero."""
    filled = (rows.features != 0).reshape(len(rows.features), -1).any(axis=1)
    if rows.offsets is not None:
        filled = np.asarray([part.any() for part in np.split(filled, rows.offsets[1:-1])])
    return [int(identity) for identity in rows.ids[~filled]]


def row_hashes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """SHA-256 of each row's bytes, (n, 32)."""
    return np.stack([sha256_bytes(np.ascontiguousarray(row).tobytes()) for row in rows])


def open_array(path: Path) -> NDArray[Any]:
    """A ``.npy`` file of float16 or float32, mapped; :class:`UserError` if it is anything else."""
    check_input(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy's own message advises to unpickle it
        raise UserError(f"{path}: not a readable .npy file of numbers; it is cut off, or something else") from None
    return _checked(path, array)


def read_ids(path: Path) -> list[int]:
    """Ids of a text file, one integer per line, or of a ``.npy`` file."""
    check_input(path)
    with wrap_read_errors(path, "a file of integer ids"):
        if path.suffix == ".npy":
            ids = _integers(path, np.load(path, allow_pickle=False))
        else:
            ids = np.asarray([int(line) for line in path.read_text().split()], np.int64)
    return list(map(int, ids))


def _integers(path: Path, ids: NDArray[Any]) -> Ids:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"{path}: ids are {ids.dtype} of shape {ids.shape}; they must be a 1-D integer array")
    if ids.dtype.kind == "u" and len(ids) and ids.max() > np.iinfo(np.int64).max:
        raise UserError(f"{path}: ids are beyond int64")
    return ids.astype(np.int64)


def _checked(path: Path, array: Any) -> NDArray[Any]:
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3) or not len(array):
        raise UserError(f"{path}: features of shape (n, dim) or (n, m, dim) are needed")
    if array.dtype not in (np.float16, np.float32):
        raise UserError(f"{path}: features are {array.dtype}; a cache holds float16 or float32, so convert them first")
    return array


def _arrays(features: Path, ids: Path | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if features.suffix == ".npz":
        check_input(features)
        try:
            check_zip(features)
            with np.load(features, allow_pickle=False) as file:
                array, row_ids = _checked(features, file["features"]), _integers(features, file["ids"])
        except UserError:
            raise
        except Exception:  # of a zip file, of numpy, or of what is no dictionary
            raise UserError(f"{features}: needs to be a .npz file with the arrays 'features' and 'ids'") from None
    elif ids is None:
        raise UserError(f"{features}: the ids of its rows are needed: --ids FILE")
    else:
        array, row_ids = open_array(features), np.asarray(read_ids(ids), np.int64)
    if len(row_ids) != len(array):
        row_ids = _per_row(row_ids, len(array))
    if len(row_ids) != len(array):
        raise UserError(f"{features}: {len(array)} rows, but {len(row_ids)} ids")
    return array, row_ids


def _per_row(ids: Ids, n_rows: int) -> Ids:
    """An id per row of ids per caption, where each is there as often in a row as the counts say; else the ids as they are."""
    times, rest = divmod(len(ids), n_rows)
    if rest or times < 2 or (ids.reshape(n_rows, times) != ids[::times, None]).any():
        return ids
    log.info("%d ids for %d rows: each stands %d times in a row, once per caption, and is taken once", len(ids), n_rows, times)
    return ids[::times]


def _places(path: Path, ids: Sequence[int], wanted: Ids) -> dict[int, int]:
    place = {identity: row for row, identity in enumerate(ids)}
    if len(place) != len(ids):
        repeated = next(identity for row, identity in enumerate(ids) if place[identity] != row)
        raise UserError(f"{path}: id {repeated} occurs more than once")
    absent = [int(i) for i in wanted if int(i) not in place]
    if absent:
        raise UserError(f"{path}: {len(absent)} of the data set's {len(wanted)} ids are not in it, the first is {absent[0]}")
    if len(ids) > len(wanted):
        log.info("%s: %d rows of other ids are left out", path, len(ids) - len(wanted))
    return place


def _tsv_ids(dataset: Dataset, match: str | None) -> dict[int, int]:
    """What the TSV calls each image, by imgid."""
    match = match or ("cocoid" if all(image.cocoid is not None for image in dataset.images) else "imgid")
    names: dict[int, int] = {}
    for image in dataset.images:
        digits = "".join(c for c in Path(image.file).stem.rpartition("_")[2] if c.isdigit())
        name = {"cocoid": image.cocoid, "imgid": image.imgid, "filename": int(digits) if digits else None}[match]
        if name is None:
            raise UserError(f"{dataset.path}: image {image.imgid} has no {match} to find it by in a TSV file")
        names[image.imgid] = name
    return names


def _tsv_places(files: Sequence[Path], wanted: set[str]) -> dict[str, tuple[Path, int]]:
    """File and byte offset of each wanted image's line."""
    places: dict[str, tuple[Path, int]] = {}
    twice = 0
    for path in files:
        for number, offset, line in _lines(path):
            name = line.partition(b"\t")[0].decode("ascii", "replace")
            if name not in wanted:
                continue
            n_fields = len(line.split(b"\t"))
            if n_fields != len(_TSV):
                raise UserError(f"{path}: line {number} has {n_fields} fields, {len(_TSV)} are needed: {', '.join(_TSV)}")
            if name in places:
                other, there = places[name]
                with other.open("rb") as stream:
                    stream.seek(there)
                    if stream.readline() != line:
                        raise UserError(f"{path}: line {number}: image_id {name} occurs twice, with other values")
                twice += 1
            else:
                places[name] = (path, offset)
    if twice:
        log.info("%d duplicate rows are left out", twice)
    return places


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with path.open("rb") as stream, tqdm(
        total=path.stat().st_size, desc=f"read {path.name}", unit="B", unit_scale=True, disable=None
    ) as progress:  # fmt: skip
        for number, line in enumerate(stream, 1):
            yield number, offset, line
            offset += len(line)
            progress.update(len(line))


def _tsv_row(path: Path, line: bytes) -> tuple[NDArray[np.float32], NDArray[np.float32], tuple[int, int]]:
    name, width, height, count, boxes, features = line.rstrip(b"\r\n").split(b"\t")
    with wrap_read_errors(path, f"readable: of image_id {name.decode()} the boxes or features are not what num_boxes says"):
        n = int(count)
        corners = np.frombuffer(base64.b64decode(boxes, validate=True), np.float32).reshape(n, 4)
        vectors = np.frombuffer(base64.b64decode(features, validate=True), np.float32).reshape(n, -1)
        size = (int(width), int(height))
        np.asarray(size, np.int32)
    return vectors, inside(corners, size, f"{path}: image_id {name.decode()}"), size
