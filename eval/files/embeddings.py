"""The file between a model and the evaluator: embeddings or scores of a split, with ids.

Any program can write it; see ``docs/formats.md``.
"""

from __future__ import annotations

import json
import logging
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

from vse.eval.files.array_folder import HELD_BYTES, read_array_folder
from vse.eval.files.hdf5_fields import (
    SUM,
    ArraySum,
    Described,
    array_sum,
    content_sum,
    stored_attribute,
    stored_hashes,
    stored_ids,
)
from vse.eval.files.split import MATRICES, POOLED, SCORES, VECTORS, Embeddings
from vse.eval.ranking.ranks import ScoreBlocks, ScoreMatrix
from vse.eval.ranking.scores import SIMILARITIES
from vse.pipeline.dataset.identity import CAPTION_BYTES, PHOTO_BYTES, check_same_data
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.hdf5 import find_hdf5_dataset
from vse.pipeline.files.inputs import InputFile, InputFolder, wrap_read_errors
from vse.pipeline.files.outputs import hdf5_kind
from vse.pipeline.files.writing import open_atomic, write_bytes

__all__ = [
    "EMBEDDINGS",
    "Embeddings",
    "embeddings_of",
    "experiment_of",
    "provenance_of",
    "read_embeddings",
    "same_split",
    "write_embeddings",
    "write_scores",
]
_IDS = ("image_ids", "caption_ids", "caption_image_ids")
_COUNTS = ("n_phrases", "n_regions")
_HASHES = {"photo_hashes": PHOTO_BYTES, "caption_hashes": CAPTION_BYTES}
_CHECKED = 4096  # rows looked at at once
_SHORTEST = 2.0**-100  # of an inner product or a square: 26 powers of two above the smallest full float32
_ATTRIBUTES = ("dataset", "split", "experiment", "seed", "similarity", "provenance", "trained_on")
_OPTIONAL = ("experiment", "seed", "provenance", "trained_on")
log = logging.getLogger(__name__)
EMBEDDINGS = hdf5_kind("a file of embeddings that vse wrote", lambda file: SUM in file.attrs and "caption_image_ids" in file)


def write_embeddings(path: Path, embeddings: Embeddings) -> Path:
    """Write the file atomically; returns ``path``. For scores that do not fit into memory see :func:`write_scores`."""
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        sums = _write_all_but_scores(file, embeddings)
        for name in SCORES:
            scores: ScoreMatrix | None = getattr(embeddings, name)
            if scores is not None:
                values = scores[:]
                file.create_dataset(name, data=values)
                sums[name] = array_sum(values)
        file.attrs[SUM] = content_sum(sums, _attributes_of(embeddings))
    return write_bytes(path, buffer.getbuffer())


def write_scores(
    path: Path,
    embeddings: Embeddings,
    i2t: ScoreBlocks,
    t2i: ScoreBlocks | None = None,
    provenance: Callable[[], str] | None = None,
) -> Path:
    """Write a file of scores that a model computes, block by block, atomically; returns ``path``.

    ``embeddings`` has ids and attributes, ``captions`` if these can be compared, and no scores. The blocks are those that
    :func:`vse.eval.ranking.ranks.ranks_from_blocks` takes, and are asked for in the same order: they become ``scores``, or
    with ``t2i`` ``scores_i2t`` and ``scores_t2i``, as float32 in one piece, so that a reader can map them. No more than a
    block is held. ``provenance`` is asked for at the end, when all has been computed. On an error or an interruption ``path``
    stays as it was. :class:`UserError` names the first image row whose scores are not finite.
    """
    directions = {"scores": i2t} if t2i is None else {"scores_i2t": i2t, "scores_t2i": t2i}
    shape = len(embeddings.image_ids), len(embeddings.caption_ids)
    for name, blocks in directions.items():
        if (blocks.n_images, len(blocks.image_of_caption)) != shape or blocks.rows != i2t.rows:
            raise ValueError(
                f"{name}: blocks of {blocks.n_images} images do not fit ids of {shape[0]}, or differ in their rows"
            )
    with open_atomic(path) as stream, _hdf5(stream) as file:
        sums = _write_all_but_scores(file, embeddings)
        matrices = {name: file.create_dataset(name, shape, np.float32) for name in directions}
        sums |= {name: ArraySum(np.float32, shape) for name in directions}
        for start in range(0, i2t.n_images, i2t.rows):
            rows = slice(start, min(start + i2t.rows, i2t.n_images))
            for name, blocks in directions.items():
                scores = blocks.score(rows, None).float().cpu().numpy()
                _check_finite(path, name, scores, start)
                matrices[name][rows] = scores
                sums[name].add(scores)
        if provenance is not None:
            embeddings = replace(embeddings, provenance=provenance())
            file.attrs["provenance"] = embeddings.provenance
        file.attrs[SUM] = content_sum(sums, _attributes_of(embeddings))
    return path


def read_embeddings(path: Path) -> Embeddings:
    """Read and check a file, or a folder of arrays (see :func:`vse.eval.files.array_folder.read_array_folder`).

    Each file is opened once: what is renamed over it meanwhile is not read. Vectors of a file of up to 128 MiB are read at
    once. Of a larger one, matrices that lie in it as one piece of float32 are mapped, so that they may be larger than memory.
    Scores are mapped in any case.
    :class:`UserError` names what is missing, duplicate, or of the wrong length.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    arrays: Mapping[str, Any]
    source: InputFile | InputFolder
    names, content_sha256 = (*_IDS, "coco_ids", *_COUNTS, *_HASHES, *MATRICES), None
    if path.is_dir():
        arrays, stored, source = read_array_folder(path, names, _ATTRIBUTES)
    else:
        source = InputFile(path)
        with wrap_read_errors(path, "a readable HDF5 file of embeddings"), h5py.File(source.stream, "r") as file:
            items = {name: find_hdf5_dataset(file, name, path=path) for name in names}
            held = sum(item.nbytes for item in items.values() if item is not None) <= HELD_BYTES
            arrays = {
                name: _array(source, item, held and not name.startswith("scores"))
                for name, item in items.items()
                if item is not None
            }
            stored = {name: file.attrs[name] for name in _ATTRIBUTES if name in file.attrs}
            content_sha256 = file.attrs.get(SUM)
    run = embeddings_of(path, arrays, stored, source)
    _check_sum(path, content_sha256, arrays, run)
    return run


def embeddings_of(
    path: Path, arrays: Mapping[str, Any], stored: Mapping[str, Any], source: InputFile | InputFolder | None = None
) -> Embeddings:
    """Embeddings or scores from arrays and attributes by their names, checked; ``path`` is what errors call them."""
    attributes = {name: stored_attribute(path, name, value) for name, value in stored.items()}
    _check_complete(path, set(arrays), set(attributes))
    values: dict[str, Any] = {name: stored_ids(path, name, arrays[name]) for name in _IDS}
    for name in ("coco_ids", *_COUNTS):
        values[name] = stored_ids(path, name, arrays[name]) if name in arrays else None
    for (name, width), ids in zip(_HASHES.items(), (values["image_ids"], values["caption_ids"]), strict=True):
        values[name] = stored_hashes(path, name, arrays[name], len(ids), width) if name in arrays else None
    values |= {name: _matrix(path, name, arrays[name]) if name in arrays else None for name in MATRICES}
    run = Embeddings(**values, **attributes, source=source)
    _check(path, run)
    return run


def experiment_of(path: Path, run: Described) -> str:
    """What to call the model of a file: its experiment, or the file's name if it does not say."""
    return path.stem if run.experiment is None else run.experiment


def provenance_of(run: Described) -> dict[str, Any]:
    """What a file says of features, settings and versions; empty if that is no JSON, since any program may have written it."""
    try:
        said = json.loads(run.provenance, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {"note": said}


def _no_number(constant: str) -> None:
    """What JSON does not know, NaN and infinities, becomes null."""


def same_split(first_path: Path, first: Embeddings, path: Path, run: Embeddings, of: Sequence[str] = ()) -> None:
    """:class:`UserError` unless two files are of one split, row by row, and agree in the attributes ``of`` that both have."""
    for name in ("dataset", "split", *of):
        ours, theirs = getattr(first, name), getattr(run, name)
        if None not in (ours, theirs) and ours != theirs:
            raise UserError(f"{path} is of {name} {theirs!r}, {first_path} of {ours!r}")
    for name in _IDS:
        if not np.array_equal(getattr(first, name), getattr(run, name)):
            raise UserError(f"{path} and {first_path} differ in {name}; what is evaluated together shares them")
    if first.coco_ids is not None and run.coco_ids is not None and not np.array_equal(first.coco_ids, run.coco_ids):
        raise UserError(f"{path} and {first_path} differ in coco_ids; what is evaluated together shares them")
    check_same_data(path, run.identity, first_path, first.identity)


def _write_all_but_scores(file: h5py.File, embeddings: Embeddings) -> dict[str, ArraySum]:
    """Write ids, vectors and attributes; returns the sums of these arrays by their names."""
    sums = {}
    for name in (*_IDS, "coco_ids", *_COUNTS, *_HASHES, *VECTORS):
        values = getattr(embeddings, name)
        if values is not None:
            file.create_dataset(name, data=values)
            sums[name] = array_sum(values)
    for name in _ATTRIBUTES:
        value = getattr(embeddings, name)
        if value is not None:
            file.attrs[name] = value
    return sums


def _attributes_of(embeddings: Embeddings) -> dict[str, Any]:
    return {name: getattr(embeddings, name) for name in _ATTRIBUTES}


def _check_sum(path: Path, stored: object, arrays: Mapping[str, Any], run: Embeddings) -> None:
    """:class:`UserError` if a file's content is not that of its sum; of a file without one, of another program, it is said."""
    if stored is None:
        log.info("%s: has no %s, so its content is not checked", path, SUM)
    elif not isinstance(stored, str) or stored != content_sum(
        {name: array_sum(values) for name, values in arrays.items()}, _attributes_of(run)
    ):
        raise UserError(f"{path}: its content is not what was written (its {SUM} is of another one); make it again")


@contextmanager
def _hdf5(stream: BinaryIO) -> Iterator[h5py.File]:
    """An HDF5 file that is written into a temporary file, which HDF5 reads as well."""
    with open(os.dup(stream.fileno()), "r+b") as both, h5py.File(both, "w") as file:
        yield file


def _check_complete(path: Path, arrays: set[str], attributes: set[str]) -> None:
    missing = [name for name in _IDS if name not in arrays]
    missing += [f"the attribute {name}" for name in _ATTRIBUTES if name not in attributes and name not in _OPTIONAL]
    pair = {"scores_i2t", "scores_t2i"}
    if "scores" in arrays and pair & arrays:
        raise UserError(f"{path}: holds both scores and {min(pair & arrays)}; scores of one direction replace scores of both")
    if pair & arrays:
        missing += sorted(pair - arrays)
    elif "scores" not in arrays:
        missing += [name for name in ("images", "captions") if name not in arrays]
    for together in (POOLED, _COUNTS):
        if set(together) & arrays:
            missing += [name for name in together if name not in arrays]
    if set(_COUNTS) & arrays and "scores" not in arrays:
        missing.append("scores")
    if missing:
        raise UserError(f"{path}: not a complete embeddings file, it lacks {', '.join(missing)} (docs/formats.md)")


def _array(source: InputFile, item: h5py.Dataset, held: bool) -> NDArray[Any] | h5py.Empty:
    """Return the values of a data set: in memory if ``held``, else of a matrix a view of the file if that is possible."""
    if not held and item.ndim == 2 and item.size and item.dtype == np.float32 and item.id.get_offset() is not None:
        return np.memmap(source.stream, np.float32, "r", item.id.get_offset(), item.shape)
    values = item[()]
    return values if isinstance(values, h5py.Empty) else np.asarray(values)


def _matrix(path: Path, name: str, values: NDArray[Any] | h5py.Empty) -> NDArray[Any]:
    """A matrix in float32; scores in the precision that they have, so that no two become equal."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise UserError(f"{path}: {name} holds no numbers")
    if name in SCORES and values.dtype == np.float64:
        return values
    with np.errstate(over="ignore"):  # what becomes infinite is refused by its row
        return values.astype(np.float32, copy=False)


def _check(path: Path, run: Embeddings) -> None:
    if run.vectors is not None and run.similarity not in SIMILARITIES:
        raise UserError(f"{path}: unknown similarity {run.similarity!r}{did_you_mean(run.similarity, SIMILARITIES)}")
    n_images, n_captions = len(run.image_ids), len(run.caption_ids)
    if not n_images or not n_captions:
        raise UserError(f"{path}: no images or no captions")
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
    extents: dict[str, NDArray[Any]] = {}
    for name in MATRICES:
        if getattr(run, name) is not None:
            rows, columns = n_captions if name.endswith("captions") else n_images, n_captions if name in SCORES else None
            extents[name] = _check_matrix(path, name, getattr(run, name), rows, columns)
    _check_lengths(path, run, extents)
    if run.pooled is not None and run.pooled[0].shape[1] != run.pooled[1].shape[1]:
        dims = " and ".join(f"{name} of {vectors.shape[1]}" for name, vectors in zip(POOLED, run.pooled, strict=True))
        raise UserError(f"{path}: {dims} dimensions have no inner products")


def _check_matrix(path: Path, name: str, values: NDArray[Any], rows: int, columns: int | None) -> NDArray[Any]:
    """Check shape and values; returns the largest absolute value of each row, (n_rows,)."""
    if values.ndim != 2 or len(values) != rows or columns not in (None, values.shape[1]) or not values.size:
        raise UserError(f"{path}: {name} has shape {values.shape}, expected ({rows}, {columns or 'dim'})")
    parts = [_check_finite(path, name, values[start : start + _CHECKED], start) for start in range(0, rows, _CHECKED)]
    return np.concatenate(parts)


def _check_lengths(path: Path, run: Embeddings, extents: Mapping[str, NDArray[Any]]) -> None:
    """Raises UserError if vectors are so short that scores of pairs vanish in float32, where they would all be equal."""
    if run.vectors is None:
        return
    images, captions = (extents[name][extents[name] > 0] for name in ("images", "captions"))
    if not len(images) or not len(captions):
        return
    if run.similarity == "order":
        score = max(float(images.max()), float(captions.max())) ** 2
    else:
        score = float(images.min()) * float(captions.min())
    if score < _SHORTEST:
        which = "images" if images.min() <= captions.min() else "captions"
        row = int(np.where(extents[which] > 0, extents[which], np.inf).argmin())
        raise UserError(
            f"{path}: {which} row {row} is so short (largest number {extents[which][row]:.2g}) that scores vanish in float32; "
            "multiply all vectors by one power of two, which changes no rank"
        )


def _check_finite(path: Path, name: str, rows: NDArray[Any], start: int) -> NDArray[Any]:
    """Return the largest absolute value of each row; raises UserError if one is not finite."""
    extent: NDArray[Any] = np.maximum(rows.max(1), -rows.min(1))
    finite = np.isfinite(extent)
    if not finite.all():
        raise UserError(f"{path}: {name} row {start + int(finite.argmin())} is not finite (NaN or infinite)")
    return extent
