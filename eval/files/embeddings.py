"""Reader and writer of files with the embeddings or scores of a split. Any program can write such files (docs/formats.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.eval.files.array_folder import MAX_IN_MEMORY_BYTES, read_array_folder
from vse.eval.files.split import BANK_SCORE_NAMES, MATRIX_NAMES, POOLED_VECTOR_NAMES, SCORE_NAMES, VECTOR_NAMES, Embeddings
from vse.eval.ranking.ranks import SIMILARITIES, ScoreBlocks, ScoreMatrix
from vse.pipeline.dataset.dataset import parse_fold
from vse.pipeline.dataset.identity import CAPTION_HASH_BYTES, PHOTO_HASH_BYTES, check_same_data
from vse.pipeline.dataset.languages import check_language_fields
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.hdf5 import (
    HASH_ATTRIBUTE,
    ArrayHash,
    ModelOutputMetadata,
    check_content_hash,
    check_same_attributes,
    find_hdf5_dataset,
    hash_array,
    hash_content,
    parse_attribute,
    parse_floats,
    parse_hashes,
    parse_ids,
)
from vse.pipeline.files.inputs import InputFile, InputFolder, wrap_read_errors
from vse.pipeline.files.outputs import hdf5_kind
from vse.pipeline.files.writing import open_atomic, write_bytes

__all__ = [
    "EMBEDDINGS_KIND",
    "Embeddings",
    "build_embeddings",
    "check_same_split",
    "experiment_name",
    "parse_provenance",
    "read_embeddings",
    "write_embeddings",
    "write_scores",
]
_ID_NAMES = ("image_ids", "caption_ids", "caption_image_ids")
_COUNT_NAMES = ("n_phrases", "n_regions")
_OPTIONAL_ID_NAMES = ("coco_ids", "caption_languages", *_COUNT_NAMES)
_BYTES_BY_HASH_NAME = {"photo_hashes": PHOTO_HASH_BYTES, "caption_hashes": CAPTION_HASH_BYTES}
_N_ROWS_PER_CHECK = 4096  # number of rows of a matrix that are checked at once
_MIN_SCORE_SIZE = 2.0**-100  # lowest accepted score; below 2**-126, the smallest normal float32, a score may become 0
_ATTRIBUTE_NAMES = ("dataset", "split", "experiment", "seed", "similarity", "provenance", "trained_on", "fold", "languages")
_OPTIONAL_ATTRIBUTES = ("experiment", "seed", "provenance", "trained_on", "fold", "languages")
EMBEDDINGS_KIND = hdf5_kind(
    "a file of embeddings that vse wrote", lambda file: HASH_ATTRIBUTE in file.attrs and "caption_image_ids" in file
)


def write_embeddings(path: Path, embeddings: Embeddings) -> Path:
    """Write embeddings or scores to a file atomically, and return ``path``.

    This function holds all scores in memory; :func:`write_scores` holds only one block of scores.
    """
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        hashes = _write_ids_and_vectors(file, embeddings)
        for name in SCORE_NAMES:
            scores: ScoreMatrix | None = getattr(embeddings, name)
            if scores is not None:
                values = scores[:]
                file.create_dataset(name, data=values)
                hashes[name] = hash_array(values)
        file.attrs[HASH_ATTRIBUTE] = hash_content(hashes, _collect_attributes(embeddings))
    return write_bytes(path, buffer.getbuffer())


def write_scores(
    path: Path,
    embeddings: Embeddings,
    i2t: ScoreBlocks,
    t2i: ScoreBlocks | None = None,
    provenance: Callable[[], str] | None = None,
) -> Path:
    """Write the scores that a model computes block by block to a file, and return ``path``.

    The file is written atomically: after an error ``path`` is unchanged. Raises UserError if scores are not finite; the
    message names the row of the image.

    Parameters
    ----------
    embeddings : the ids, attributes and optional vectors to write; it has no scores
    i2t : scores for image-to-text retrieval, stored as ``scores_i2t``; without ``t2i`` these scores serve both directions, and
        are stored as ``scores``
    t2i : scores for text-to-image retrieval, stored as ``scores_t2i``; each block is requested after the same block of ``i2t``
    provenance : function that returns the model's features, settings and versions as a JSON text; it is called after the last
        score was computed. None keeps the text in ``embeddings``
    """
    directions = {"scores": i2t} if t2i is None else {"scores_i2t": i2t, "scores_t2i": t2i}
    shape = len(embeddings.image_ids), len(embeddings.caption_ids)
    for name, blocks in directions.items():
        if (blocks.n_images, len(blocks.image_of_caption)) != shape or blocks.rows_per_block != i2t.rows_per_block:
            raise ValueError(
                f"{name}: blocks of {blocks.n_images} images for {shape[0]} image ids, or blocks with another number of rows"
            )
    with open_atomic(path) as stream, _create_hdf5(stream) as file:
        hashes = _write_ids_and_vectors(file, embeddings)
        matrices = {name: file.create_dataset(name, shape, np.float32) for name in directions}
        hashes |= {name: ArrayHash(np.float32, shape) for name in directions}
        for rows in i2t.row_slices:
            for name, blocks in directions.items():
                scores = blocks.score(rows, None).float().cpu().numpy()
                _compute_finite_row_maxima(path, name, scores, rows.start)
                matrices[name][rows] = scores
                hashes[name].add(scores)
        if provenance is not None:
            embeddings = replace(embeddings, provenance=provenance())
            file.attrs["provenance"] = embeddings.provenance
        file.attrs[HASH_ATTRIBUTE] = hash_content(hashes, _collect_attributes(embeddings))
    return path


def read_embeddings(path: Path) -> Embeddings:
    """Read and check a file of embeddings, or a folder (see :func:`vse.eval.files.array_folder.read_array_folder`).

    If all arrays together have up to 128 MiB, vectors are read into memory. In a larger file, contiguous matrices of float32
    are memory-mapped. Scores are always memory-mapped if possible. Raises UserError if an array or attribute is missing, if an
    array has the wrong shape or is not finite, or if ids are duplicate.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    arrays: Mapping[str, Any]
    source: InputFile | InputFolder
    names, content_sha256 = (*_ID_NAMES, *_OPTIONAL_ID_NAMES, *_BYTES_BY_HASH_NAME, *MATRIX_NAMES), None
    if path.is_dir():
        arrays, stored, source = read_array_folder(path, names, _ATTRIBUTE_NAMES)
    else:
        source = InputFile(path)
        with wrap_read_errors(path, "a readable HDF5 file of embeddings"), h5py.File(source.stream, "r") as file:
            items = {name: find_hdf5_dataset(file, name, path=path) for name in names}
            in_memory = sum(item.nbytes for item in items.values() if item is not None) <= MAX_IN_MEMORY_BYTES
            arrays = {
                name: _read_array(source, item, in_memory and not name.startswith("scores"))
                for name, item in items.items()
                if item is not None
            }
            stored = {name: file.attrs[name] for name in _ATTRIBUTE_NAMES if name in file.attrs}
            content_sha256 = file.attrs.get(HASH_ATTRIBUTE)
    run = build_embeddings(path, arrays, stored, source)
    check_content_hash(
        path,
        content_sha256,
        lambda: hash_content({name: hash_array(values) for name, values in arrays.items()}, _collect_attributes(run)),
    )
    return run


def build_embeddings(
    path: Path, arrays: Mapping[str, Any], attributes: Mapping[str, Any], source: InputFile | InputFolder | None = None
) -> Embeddings:
    """Build embeddings or scores from named arrays and attributes, and check them.

    Error messages name ``path``. ``source`` is the file or folder that was read; None for arrays in memory.
    """
    attributes = {name: parse_attribute(path, name, value) for name, value in attributes.items()}
    _check_required_names(path, set(arrays), set(attributes))
    values: dict[str, Any] = {name: parse_ids(path, name, arrays[name]) for name in _ID_NAMES}
    for name in _OPTIONAL_ID_NAMES:
        values[name] = parse_ids(path, name, arrays[name]) if name in arrays else None
    for (name, width), ids in zip(_BYTES_BY_HASH_NAME.items(), (values["image_ids"], values["caption_ids"]), strict=True):
        values[name] = parse_hashes(path, name, arrays[name], len(ids), width) if name in arrays else None
    values |= {name: parse_floats(path, name, arrays[name], "fiub") if name in arrays else None for name in MATRIX_NAMES}
    run = Embeddings(**values, **attributes, source=source)
    _check_values(path, run)
    return run


def experiment_name(path: Path, metadata: ModelOutputMetadata) -> str:
    """Return the name of the experiment from a file's metadata.

    If the metadata has no such name, return the name of the file without its suffix.
    """
    return path.stem if metadata.experiment is None else metadata.experiment


def find_dataset_file(file: Path, run: ModelOutputMetadata) -> Path | None:
    """Return the path of the ``dataset.json`` from which an embeddings file was computed; None if the path is not recorded.

    ``run`` is the content of the embeddings file ``file``. The recorded path is relative to the folder of ``file``.
    """
    captions = parse_provenance(run).get("captions")
    return resolve_path(file, captions) if isinstance(captions, str) else None


def resolve_path(file: Path, relative: str) -> Path:
    """Return the path ``relative``, which is relative to the folder of ``file``, without resolving symbolic links."""
    return Path(os.path.normpath(file.parent / relative))


def parse_provenance(metadata: ModelOutputMetadata) -> dict[str, Any]:
    """Return a file's provenance as a dict: the features, settings and versions with which the file was computed.

    The metadata has the provenance as a JSON text. The dict is empty if the text is not JSON. If the JSON is not an object,
    the dict has its value under the key ``note``.
    """
    try:
        record = json.loads(metadata.provenance, parse_constant=lambda constant: None)  # JSON has no NaN and no infinities
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {"note": record}


def require_complete_scores(path: Path, metadata: ModelOutputMetadata, option: str) -> None:
    """Raise UserError if a file lacks the scores of some pairs, as after ``vse-embed --shortlist``.

    ``option`` is the option that needs the scores of all pairs, for the message.
    """
    if "shortlist" in parse_provenance(metadata):
        raise UserError(
            f"{path}: the model scored only the pairs that can change a rank, and {option} needs all scores; leave it out, or "
            "run vse-embed without --shortlist"
        )


def check_same_split(
    first_path: Path, first: Embeddings, path: Path, embeddings: Embeddings, attributes: Sequence[str] = ()
) -> None:
    """Raise UserError if two files differ in data set, split, ids, or the hashes of images or captions.

    The ids must be in the same order. The files must also have the same values of ``attributes``, such as ``similarity``. An
    attribute or a hash is compared only if both files have it.
    """
    check_same_attributes(first_path, first, path, embeddings, ("dataset", "split", *attributes))
    has_coco_ids = first.coco_ids is not None and embeddings.coco_ids is not None
    for name in (*_ID_NAMES, *(["coco_ids"] if has_coco_ids else [])):
        if not np.array_equal(getattr(first, name), getattr(embeddings, name)):
            raise UserError(f"{path} and {first_path} differ in {name}; files that are evaluated together must have the same")
    check_same_data(path, embeddings.identity, first_path, first.identity)


def _write_ids_and_vectors(file: h5py.File, embeddings: Embeddings) -> dict[str, ArrayHash]:
    hashes = {}
    for name in (*_ID_NAMES, *_OPTIONAL_ID_NAMES, *_BYTES_BY_HASH_NAME, *VECTOR_NAMES):
        values = getattr(embeddings, name)
        if values is not None:
            file.create_dataset(name, data=values)
            hashes[name] = hash_array(values)
    for name in _ATTRIBUTE_NAMES:
        value = getattr(embeddings, name)
        if value is not None:
            file.attrs[name] = value
    return hashes


def _collect_attributes(embeddings: Embeddings) -> dict[str, Any]:
    return {name: getattr(embeddings, name) for name in _ATTRIBUTE_NAMES}


@contextmanager
def _create_hdf5(stream: BinaryIO) -> Iterator[h5py.File]:
    """Yield a new HDF5 file that writes its content to ``stream``. The stream must be readable, too."""
    with open(os.dup(stream.fileno()), "r+b") as both, h5py.File(both, "w") as file:
        yield file


def _check_required_names(path: Path, arrays: set[str], attributes: set[str]) -> None:
    missing = [name for name in _ID_NAMES if name not in arrays]
    missing += [
        f"the attribute {name}" for name in _ATTRIBUTE_NAMES if name not in attributes and name not in _OPTIONAL_ATTRIBUTES
    ]
    pair = {"scores_i2t", "scores_t2i"}
    if "scores" in arrays and pair & arrays:
        raise UserError(f"{path}: holds both scores and {min(pair & arrays)}; scores of one direction replace scores of both")
    if pair & arrays:
        missing += sorted(pair - arrays)
    elif "scores" not in arrays:
        missing += [name for name in ("images", "captions") if name not in arrays]
    for together in (POOLED_VECTOR_NAMES, BANK_SCORE_NAMES, _COUNT_NAMES):
        if set(together) & arrays:
            missing += [name for name in together if name not in arrays]
    if ("caption_languages" in arrays) != ("languages" in attributes):
        missing.append("the attribute languages" if "caption_languages" in arrays else "caption_languages")
    if set(_COUNT_NAMES) & arrays and "scores" not in arrays:
        missing.append("scores")
    if missing:
        raise UserError(f"{path}: not a complete embeddings file, it lacks {', '.join(missing)} (docs/formats.md)")


def _read_array(source: InputFile, item: h5py.Dataset, in_memory: bool) -> NDArray[Any] | h5py.Empty:
    if not in_memory and item.ndim == 2 and item.size and item.dtype == np.float32 and item.id.get_offset() is not None:
        return np.memmap(source.stream, np.float32, "r", item.id.get_offset(), item.shape)
    values = item[()]
    return values if isinstance(values, h5py.Empty) else np.asarray(values)


def _check_values(path: Path, run: Embeddings) -> None:
    if run.vectors is not None and run.similarity not in SIMILARITIES:
        raise UserError(f"{path}: unknown similarity {run.similarity!r}{did_you_mean(run.similarity, SIMILARITIES)}")
    n_images, n_captions = len(run.image_ids), len(run.caption_ids)
    if not n_images or not n_captions:
        raise UserError(f"{path}: no images or no captions")
    if run.fold is not None and parse_fold(run.fold) is None:
        raise UserError(f"{path}: the attribute fold is {run.fold!r}, and not a text like '0 of 5'")
    if run.caption_languages is not None:
        check_language_fields(path, run.caption_languages, str(run.languages), n_captions)
    if run.coco_ids is not None and run.coco_ids.shape != (n_images,):
        raise UserError(f"{path}: {n_images} images, but coco_ids of shape {run.coco_ids.shape}")
    for name, numbers, n in (("n_phrases", run.n_phrases, n_captions), ("n_regions", run.n_regions, n_images)):
        if numbers is not None and (numbers.shape != (n,) or numbers.min() < 0):
            raise UserError(f"{path}: {name} are not {n} numbers from 0 on")
    for name, ids in (("image", run.image_ids), ("caption", run.caption_ids)):
        values, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise UserError(f"{path}: duplicate {name} id {values[counts > 1][0]}")
    if run.caption_image_ids.shape != (n_captions,):
        raise UserError(f"{path}: {n_captions} caption ids, but caption_image_ids of shape {run.caption_image_ids.shape}")
    row_maxima: dict[str, NDArray[Any]] = {}
    for name in MATRIX_NAMES:
        if getattr(run, name) is not None:
            rows, columns = n_captions if name.endswith("captions") else n_images, n_captions if name in SCORE_NAMES else None
            row_maxima[name] = _check_and_compute_row_magnitudes(path, name, getattr(run, name), rows, columns)
    _check_no_underflow(path, run, row_maxima)
    if run.pooled_vectors is not None and run.pooled_vectors[0].shape[1] != run.pooled_vectors[1].shape[1]:
        dims = " and ".join(
            f"{name} of {vectors.shape[1]}" for name, vectors in zip(POOLED_VECTOR_NAMES, run.pooled_vectors, strict=True)
        )
        raise UserError(f"{path}: {dims} dimensions have no inner products")


def _check_and_compute_row_magnitudes(
    path: Path, name: str, values: NDArray[Any], rows: int, columns: int | None
) -> NDArray[Any]:
    """Return the largest absolute value of each row of ``values``, the matrix ``name`` of the file ``path``.

    Raises UserError if the shape is not (``rows``, ``columns``), or if a row is not finite. If
    ``columns`` is None, any number of columns is allowed.
    """
    if values.ndim != 2 or len(values) != rows or columns not in (None, values.shape[1]) or not values.size:
        raise UserError(f"{path}: {name} has shape {values.shape}, expected ({rows}, {columns or 'dim'})")
    starts = range(0, rows, _N_ROWS_PER_CHECK)
    return np.concatenate([_compute_finite_row_maxima(path, name, values[k : k + _N_ROWS_PER_CHECK], k) for k in starts])


def _check_no_underflow(path: Path, run: Embeddings, row_maxima: Mapping[str, NDArray[Any]]) -> None:
    """Raise UserError if the numbers in vectors are so small that the scores of pairs would be rounded to 0 in float32.

    ``row_maxima`` has, for each matrix, the largest absolute value of each row.
    """
    if run.vectors is None:
        return
    images, captions = (row_maxima[name][row_maxima[name] > 0] for name in ("images", "captions"))
    if not len(images) or not len(captions):
        return
    if run.similarity == "order":
        score = max(float(images.max()), float(captions.max())) ** 2
    else:
        score = float(images.min()) * float(captions.min())
    if score < _MIN_SCORE_SIZE:
        side = "images" if images.min() <= captions.min() else "captions"
        maxima = row_maxima[side]
        row = int(np.where(maxima > 0, maxima, np.inf).argmin())
        raise UserError(
            f"{path}: {side} row {row} is so short (largest number {maxima[row]:.2g}) that scores vanish in float32; "
            "multiply all vectors by one power of two, which changes no rank"
        )


def _compute_finite_row_maxima(path: Path, name: str, rows: NDArray[Any], start: int) -> NDArray[Any]:
    """Return the largest absolute value of each row. Raises UserError if a row has NaN or an infinity.

    ``start`` is the index of ``rows[0]`` in the matrix ``name``, for the error message.
    """
    maxima: NDArray[Any] = np.maximum(rows.max(1), -rows.min(1))
    finite = np.isfinite(maxima)
    if not finite.all():
        raise UserError(f"{path}: {name} row {start + int(finite.argmin())} is not finite (NaN or infinite)")
    return maxima
