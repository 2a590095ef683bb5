"""Import features of other programs into caches: arrays with ids, and TSV files of bottom-up attention."""

from __future__ import annotations

import base64
import hashlib
import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vse.features.cache import shards
from vse.features.cache.feature_cache import merge_shards
from vse.features.cache.rows import CacheIdentity, FeatureRows, Ids, list_row_ids, sha256_bytes
from vse.features.cache.shards import check_cache_output, parse_feature_name
from vse.pipeline.dataset.columns import IdIndex
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.images import clip_boxes
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import WatchedFile, check_decoded_zip_size, check_input, wrap_read_errors
from vse.pipeline.files.writing import lock_for_writing, sha256_json

_ROWS_PER_BLOCK = 16_384
MAX_SHARD_BYTES = 256_000_000  # limit on the features of a shard, because all of them are in memory at once
_TSV_FIELDS = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
log = logging.getLogger(__name__)


def import_arrays(
    features: Path, ids: Path | None, dataset_file: Path, out: Path, kind: Literal["image", "text"] = "image"
) -> Path:
    """Import the rows of a ``.npy`` or ``.npz`` file into the cache ``out``; return ``out``.

    Raises UserError if an image of the data set (or a caption, with ``kind="text"``) has no row.

    features : file with rows (n, dim) or (n, n_crops, dim), float16 or float32, in any order
    ids : ``.txt`` or ``.npy`` file with one id per row; None for a ``.npz`` file with the arrays ``features`` and ``ids``
    kind : ``image`` if the ids are ids of images (imgid), ``text`` if they are ids of captions (sentid)
    """
    files = [WatchedFile(file) for file in (features, ids) if file is not None]
    array, array_ids = _load_features_and_ids(features, ids)
    dataset = load_dataset_file(dataset_file)
    wanted_ids = list_row_ids(dataset, kind)
    row_of_id = _find_rows_by_id(features, array_ids, wanted_ids)

    def read_rows(row_slice: slice) -> FeatureRows:
        values = gather_rows([array], np.zeros(len(wanted_ids[row_slice]), np.int64), row_of_id[row_slice])
        return FeatureRows(wanted_ids[row_slice], values, hash_rows(values))

    return write_imported_cache(out, dataset, kind, {"layout": "arrays"}, files, wanted_ids, read_rows, array[:1].nbytes)


def import_bottom_up_tsv(files: Sequence[Path], dataset_file: Path, out: Path, match: str | None = None) -> Path:
    """Import regions from TSV files of bottom-up attention into the cache ``out``; return ``out``.

    The fields of a line are image_id, image_w, image_h, num_boxes, boxes and features; boxes and features are base64 of
    float32. ``match`` is the field of the data set's images that equals image_id: ``cocoid``, ``imgid``, or ``filename`` for
    the digits at the end of the file name; None: ``cocoid`` if all images have one, else ``imgid``. Duplicate lines are read
    once. Raises UserError if an image of the data set has no line, or two different lines.
    """
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: no such TSV file")
    watched = [WatchedFile(path) for path in files]
    dataset = load_dataset_file(dataset_file)
    tsv_ids = _map_image_ids_to_tsv_ids(dataset, match)
    places = _locate_tsv_lines(files, {str(tsv_id) for tsv_id in tsv_ids.values()})
    missing = [imgid for imgid, tsv_id in tsv_ids.items() if str(tsv_id) not in places]
    if missing:
        names = ", ".join(map(str, files))
        raise UserError(f"{names}: {len(missing)} of {len(tsv_ids)} images are not there, the first is imgid {missing[0]}")
    wanted_ids = np.asarray(list(tsv_ids), np.int64)
    streams = {path: path.open("rb") for path in files}

    def read_rows(row_slice: slice) -> FeatureRows:
        lines, parsed = [], []
        for imgid in wanted_ids[row_slice]:
            path, offset = places[str(tsv_ids[int(imgid)])]
            streams[path].seek(offset)
            lines.append(streams[path].readline())
            parsed.append(_parse_tsv_line(path, lines[-1]))
            if (length := parsed[-1][0].shape[1]) != dim:
                raise UserError(f"{path}: image_id {tsv_ids[int(imgid)]}: {length} numbers per box, but others have {dim}")
        return FeatureRows(
            ids=wanted_ids[row_slice],
            features=np.concatenate([features for features, _, _ in parsed]),
            input_hashes=np.stack([sha256_bytes(line) for line in lines]),
            offsets=np.cumsum([0, *(len(features) for features, _, _ in parsed)], dtype=np.int64),
            boxes=np.concatenate([boxes for _, boxes, _ in parsed]),
            image_size=np.asarray([size for _, _, size in parsed], np.int32),
        )

    try:
        path, offset = places[str(tsv_ids[int(wanted_ids[0])])]
        streams[path].seek(offset)
        first = _parse_tsv_line(path, streams[path].readline())[0]
        dim = first.shape[1]
        layout = {"layout": "tsv", "image_ids_sha256": sha256_json(sorted(tsv_ids.items()))}
        return write_imported_cache(out, dataset, "image", layout, watched, wanted_ids, read_rows, first.nbytes)
    finally:
        for stream in streams.values():
            stream.close()


def write_imported_cache(
    out: Path,
    dataset: Dataset,
    kind: Literal["image", "text"],
    layout: Mapping[str, str],
    files: Sequence[WatchedFile],
    ids: Ids,
    read_rows: Callable[[slice], FeatureRows],
    row_bytes: int,
) -> Path:
    """Write a cache of imported features in shards of at most 256 MB; return ``out``. Finished shards are kept.

    Raises UserError if one of ``files`` changes during the import.

    layout : name of the files' layout, and further hashes; the cache records them in the provenance entry ``imported``
    files : input files
    ids : (n,) ids of all rows
    read_rows : function that returns the rows of a slice of ``ids``
    row_bytes : size of one row's features in bytes
    """
    content = {
        "imported": {**layout, "files_sha256": [file.sha256 for file in files]},
        "requested_ids_sha256": sha256_json(ids.tolist()),
        "extractor_version": 1,
    }
    identity = CacheIdentity(dataset.name, parse_feature_name(out, dataset.name), kind, content)
    n_shards = min(len(ids), max(1, -(-len(ids) * row_bytes // MAX_SHARD_BYTES)))
    check_cache_output(out, dataset.name, identity.feature, [dataset.path, *(file.path for file in files)])
    with lock_for_writing(out):
        empty: list[int] = []
        for index in tqdm(range(n_shards), desc=f"import {out.name}", unit="shard", disable=None):
            path = shards.shard_path(out, index, n_shards)
            if shards.read_intact_shard_record(path, identity) is None:
                empty += _write_shard(path, identity, read_rows(shards.shard_slice(len(ids), index, n_shards)), files)
        if empty:
            log.warning("%s: %d of %d rows are all zeros, the first is of id %d", out, len(empty), len(ids), empty[0])
        return merge_shards(out, n_shards, dataset.path, ids, dataset=dataset)


def _write_shard(path: Path, identity: CacheIdentity, rows: FeatureRows, files: Sequence[WatchedFile]) -> list[int]:
    """Write a shard of imported rows; return the ids of all-zero rows. Raises UserError if an input file has changed."""
    for file in files:
        file.check_unchanged()
    shards.write_shard(path, identity, rows, notes={"files": [file.path.name for file in files]})
    return _find_zero_rows(rows)


def _test_rows_in_blocks(features: NDArray[Any], test: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Return the result of ``test`` for each row. A mapped file is read in blocks, so that it does not fill the memory.

    ``test`` gets blocks of rows as matrices (n_rows, n_numbers).
    """
    starts = range(0, len(features), _ROWS_PER_BLOCK)
    blocks = (features[start : start + _ROWS_PER_BLOCK] for start in starts)
    return np.concatenate([np.empty(0, bool), *(test(block.reshape(len(block), -1)) for block in blocks)])


def _are_rows_nonzero(block: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each row of a matrix has a number other than 0.0 and -0.0."""
    bits = block.view(f"u{block.itemsize}") << 1  # without the sign; comparisons of float16 are slow
    return np.asarray(bits.any(axis=1))


def _find_zero_rows(rows: FeatureRows) -> list[int]:
    """Return the ids of the rows that are all zeros."""
    filled = _test_rows_in_blocks(np.asarray(rows.features), _are_rows_nonzero)
    if rows.offsets is not None:
        filled = np.asarray([part.any() for part in np.split(filled, rows.offsets[1:-1])])
    return [int(identity) for identity in rows.ids[~filled]]


def hash_rows(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the SHA-256 of each row's bytes, (n, 32) uint8."""
    hashes = b"".join(hashlib.sha256(row.data).digest() for row in np.ascontiguousarray(rows))
    return np.frombuffer(hashes, np.uint8).reshape(len(rows), 32)


def gather_rows(arrays: Sequence[NDArray[Any]], array_index: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Return row ``rows[k]`` of ``arrays[array_index[k]]`` for each k. Mapped files are copied in blocks, to save memory."""
    gathered = np.empty((len(rows), *arrays[0].shape[1:]), arrays[0].dtype)
    for start in range(0, len(rows), _ROWS_PER_BLOCK):
        block = slice(start, start + _ROWS_PER_BLOCK)
        for index in np.unique(array_index[block]).tolist():
            chosen = np.flatnonzero(array_index[block] == index)
            gathered[start + chosen] = arrays[index][rows[block][chosen]]
        release_mapped_memory(arrays)
    return gathered


def release_mapped_memory(arrays: Sequence[NDArray[Any]]) -> None:
    """Release the memory of mapped files. The system reads the files again on access."""
    for array in arrays:
        mapped: Any = array
        while mapped is not None and not isinstance(mapped, mmap.mmap):
            mapped = getattr(mapped, "_mmap", None) or getattr(mapped, "base", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def map_npy_file(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` file into memory. Raises UserError if it is not a 2-D or 3-D array of float16 or float32."""
    check_input(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy's own message would advise to unpickle the file
        raise UserError(f"{path}: not a readable .npy file of numbers; it is truncated, or another kind of file") from None
    return _require_feature_array(path, array)


def read_ids(path: Path) -> list[int]:
    """Read the ids in a text file, one integer per line, or in a ``.npy`` file. Raises UserError for other content."""
    check_input(path)
    with wrap_read_errors(path, "a file of integer ids"):
        if path.suffix == ".npy":
            ids = _parse_id_array(path, np.load(path, allow_pickle=False))
        else:
            ids = np.asarray([int(line) for line in path.read_text().split()], np.int64)
    return list(map(int, ids))


def _parse_id_array(path: Path, ids: NDArray[Any]) -> Ids:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"{path}: ids are {ids.dtype} of shape {ids.shape}; they must be a 1-D integer array")
    if ids.dtype.kind == "u" and len(ids) and ids.max() > np.iinfo(np.int64).max:
        raise UserError(f"{path}: ids are beyond int64")
    return ids.astype(np.int64)


def _require_feature_array(path: Path, array: Any) -> NDArray[Any]:
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3) or not len(array):
        raise UserError(f"{path}: features of shape (n, dim) or (n, m, dim) are needed")
    if array.dtype not in (np.float16, np.float32):
        raise UserError(f"{path}: features are {array.dtype}; a cache holds float16 or float32, so convert them first")
    return array


def _load_features_and_ids(features: Path, ids: Path | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    if features.suffix == ".npz":
        check_input(features)
        try:
            check_decoded_zip_size(features)
            with np.load(features, allow_pickle=False) as file:
                array, given_ids = _require_feature_array(features, file["features"]), _parse_id_array(features, file["ids"])
        except UserError:
            raise
        except Exception:  # errors of zipfile or of numpy, or a file without these names
            raise UserError(f"{features}: needs to be a .npz file with the arrays 'features' and 'ids'") from None
    elif ids is None:
        raise UserError(f"{features}: the ids of its rows are needed: --ids FILE")
    else:
        array, given_ids = map_npy_file(features), np.asarray(read_ids(ids), np.int64)
    given_ids = _keep_one_id_per_row(given_ids, len(array))
    if len(given_ids) != len(array):
        raise UserError(f"{features}: {len(array)} rows, but {len(given_ids)} ids")
    return array, given_ids


def _keep_one_id_per_row(ids: Ids, n_rows: int) -> Ids:
    """Return one id per row, if ``ids`` has each id several times in succession (once per caption); else ``ids`` unchanged."""
    times, rest = divmod(len(ids), n_rows)
    if rest or times < 2 or (ids.reshape(n_rows, times) != ids[::times, None]).any():
        return ids
    log.info("%d ids for %d rows: each is repeated %d times, once per caption, and is read once", len(ids), n_rows, times)
    return ids[::times]


def _find_rows_by_id(path: Path, ids: Ids, wanted_ids: Ids) -> NDArray[np.int64]:
    """Return the row of each wanted id, given the ids of the rows. ``path`` is the file of the ids, for messages.

    Raises UserError if a wanted id is missing, or if an id occurs more than once.
    """
    unique, first_rows = np.unique(ids, return_index=True)
    if len(unique) != len(ids):
        repeated = np.delete(ids, first_rows)[0]
        raise UserError(f"{path}: id {repeated} occurs more than once")
    rows = IdIndex(ids).find_rows(wanted_ids)
    if (rows < 0).any():
        raise UserError(
            f"{path}: {np.count_nonzero(rows < 0)} of the data set's {len(wanted_ids)} ids are not in it, the first is "
            f"{wanted_ids[rows < 0][0]}"
        )
    if len(ids) > len(wanted_ids):
        log.info("%s: %d rows of other ids are left out", path, len(ids) - len(wanted_ids))
    return rows


def _map_image_ids_to_tsv_ids(dataset: Dataset, match: str | None) -> dict[int, int]:
    """Return a dictionary from each image's id in the data set (imgid) to the image's id in TSV files (image_id).

    ``match`` is the field of an image that equals image_id: ``cocoid``, ``imgid`` or ``filename`` (the digits at its end);
    None: ``cocoid`` if all images have one, else ``imgid``. Raises UserError if an image lacks the field.
    """
    match = match or ("cocoid" if all(image.cocoid is not None for image in dataset.images) else "imgid")
    tsv_ids: dict[int, int] = {}
    for image in dataset.images:
        digits = "".join(c for c in Path(image.file).stem.rpartition("_")[2] if c.isdigit())
        tsv_id = {"cocoid": image.cocoid, "imgid": image.imgid, "filename": int(digits) if digits else None}[match]
        if tsv_id is None:
            raise UserError(f"{dataset.path}: image {image.imgid} has no {match}, which would identify it in a TSV file")
        tsv_ids[image.imgid] = tsv_id
    return tsv_ids


def _locate_tsv_lines(files: Sequence[Path], wanted_ids: set[str]) -> dict[str, tuple[Path, int]]:
    """Return the file and the byte offset of the line of each image_id in ``wanted_ids``.

    Raises UserError if an image_id has two different lines.
    """
    places: dict[str, tuple[Path, int]] = {}
    n_duplicates = 0
    for path in files:
        for number, offset, line in _read_numbered_lines(path):
            name = line.partition(b"\t")[0].decode("ascii", "replace")
            if name not in wanted_ids:
                continue
            n_fields = len(line.split(b"\t"))
            if n_fields != len(_TSV_FIELDS):
                needed = f"{len(_TSV_FIELDS)} are needed: {', '.join(_TSV_FIELDS)}"
                raise UserError(f"{path}: line {number} has {n_fields} fields, {needed}")
            if name in places:
                other, other_offset = places[name]
                with other.open("rb") as stream:
                    stream.seek(other_offset)
                    if stream.readline() != line:
                        raise UserError(f"{path}: line {number}: image_id {name} occurs twice, with other values")
                n_duplicates += 1
            else:
                places[name] = (path, offset)
    if n_duplicates:
        log.info("%d duplicate rows are left out", n_duplicates)
    return places


def _read_numbered_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with path.open("rb") as stream, tqdm(
        total=path.stat().st_size, desc=f"read {path.name}", unit="B", unit_scale=True, disable=None
    ) as progress:  # fmt: skip
        for number, line in enumerate(stream, 1):
            yield number, offset, line
            offset += len(line)
            progress.update(len(line))


def _parse_tsv_line(path: Path, line: bytes) -> tuple[NDArray[np.float32], NDArray[np.float32], tuple[int, int]]:
    """Return the features (n, dim), the boxes (n, 4) inside the image, and the width and height of the image."""
    name, width, height, count, boxes, features = line.rstrip(b"\r\n").split(b"\t")
    with wrap_read_errors(path, f"readable: boxes or features of image_id {name.decode()} do not fit its num_boxes"):
        n = int(count)
        corners = np.frombuffer(base64.b64decode(boxes, validate=True), np.float32).reshape(n, 4)
        vectors = np.frombuffer(base64.b64decode(features, validate=True), np.float32).reshape(n, -1)
        size = (int(width), int(height))
        np.asarray(size, np.int32)
    return vectors, clip_boxes(corners, size, f"{path}: image_id {name.decode()}"), size
