"""The file between a model and the evaluator: embeddings (or scores) of a split, with ids.

Any program can write it; see ``docs/formats.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.eval.ranking.scores import SIMILARITIES
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files import write_bytes

_IDS = ("image_ids", "caption_ids", "caption_image_ids")
_MATRICES = ("images", "captions", "scores")
_CHECKED = 4096  # rows looked at at once
_ATTRIBUTES = ("dataset", "split", "experiment", "seed", "similarity")


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of a split: ``images`` (n_images, dim) and ``captions`` (n_captions, dim), or ``scores``.

    Where there are ``scores`` (n_images, n_captions), images and captions are compared by them; ``captions``, if they
    are there as well, serve to compare captions. Attributes name the ``dataset``, ``split``, ``experiment``, ``seed`` and
    ``similarity`` (without ``scores`` one of :data:`vse.eval.ranking.scores.SIMILARITIES`); ``provenance`` is what the writer noted
    about features, settings and versions. ``coco_ids`` (n_images,) are the images' numbers in MS-COCO, if they are of it.
    """

    image_ids: NDArray[np.int64]
    caption_ids: NDArray[np.int64]
    caption_image_ids: NDArray[np.int64]
    images: NDArray[np.float32] | None
    captions: NDArray[np.float32] | None
    scores: NDArray[np.float32] | None
    dataset: str
    split: str
    experiment: str
    seed: int
    similarity: str = "cosine"
    provenance: str = "{}"
    coco_ids: NDArray[np.int64] | None = None

    def image_of_caption(self) -> NDArray[np.int64]:
        """For each caption the row of its image; :class:`UserError` if an id has no image."""
        order = np.argsort(self.image_ids, kind="stable")
        places = np.searchsorted(self.image_ids[order], self.caption_image_ids).clip(max=len(order) - 1)
        rows: NDArray[np.int64] = order[places]
        lost = self.image_ids[rows] != self.caption_image_ids
        if lost.any():
            imgid = self.caption_image_ids[lost][0]
            raise UserError(f"a caption belongs to image {imgid}, which is not among the image ids")
        return rows


def write_embeddings(path: Path, embeddings: Embeddings) -> Path:
    """Write the file atomically; returns ``path``."""
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        for name in (*_IDS, "coco_ids", *_MATRICES):
            values = getattr(embeddings, name)
            if values is not None:
                file.create_dataset(name, data=values)
        for name in (*_ATTRIBUTES, "provenance"):
            file.attrs[name] = getattr(embeddings, name)
    return write_bytes(path, buffer.getbuffer())


def read_embeddings(path: Path) -> Embeddings:
    """Read and check a file; :class:`UserError` names what is missing, duplicate, or of the wrong length.

    Matrices that lie in the file as one piece of float32 are mapped, so that they may be larger than memory.
    """
    try:
        with h5py.File(path, "r") as file:
            items = {name: file.get(name) for name in (*_IDS, "coco_ids", *_MATRICES)}
            arrays = {name: _array(path, item) for name, item in items.items() if isinstance(item, h5py.Dataset)}
            noted = {name: file.attrs[name] for name in (*_ATTRIBUTES, "provenance") if name in file.attrs}
    except OSError as error:
        reason = "no such file" if not path.exists() else f"not a readable HDF5 file ({error})"
        raise UserError(f"{path}: {reason}") from None
    attributes = {name: _plain(path, name, value) for name, value in noted.items()}
    missing = [name for name in _IDS if name not in arrays]
    missing += [f"the attribute {name}" for name in _ATTRIBUTES if name not in attributes]
    if "scores" not in arrays:
        missing += [name for name in ("images", "captions") if name not in arrays]
    if missing:
        raise UserError(f"{path}: not a whole embeddings file, it lacks {', '.join(missing)} (docs/formats.md)")
    values: dict[str, Any] = {name: _ids(path, name, arrays[name]) for name in _IDS}
    values["coco_ids"] = _ids(path, "coco_ids", arrays["coco_ids"]) if "coco_ids" in arrays else None
    values |= {name: _matrix(path, name, arrays[name]) if name in arrays else None for name in _MATRICES}
    run = Embeddings(**values, **attributes)
    _check(path, run)
    return run


def same_split(first_path: Path, first: Embeddings, path: Path, run: Embeddings, of: Sequence[str] = ()) -> None:
    """:class:`UserError` unless two files are of one split, row by row, and agree in the attributes ``of``."""
    for name in ("dataset", "split", *of):
        if getattr(first, name) != getattr(run, name):
            raise UserError(f"{path} is of {name} {getattr(run, name)!r}, {first_path} of {getattr(first, name)!r}")
    for name in _IDS:
        if not np.array_equal(getattr(first, name), getattr(run, name)):
            raise UserError(f"{path} and {first_path} differ in {name}; what is evaluated together shares them")
    if first.coco_ids is not None and run.coco_ids is not None and not np.array_equal(first.coco_ids, run.coco_ids):
        raise UserError(f"{path} and {first_path} differ in coco_ids; what is evaluated together shares them")


def _array(path: Path, item: h5py.Dataset) -> NDArray[Any]:
    """A data set's values: of a matrix a view of the file if it can be, which no change reaches."""
    if item.ndim == 2 and item.size and item.dtype == np.float32 and item.id.get_offset() is not None:
        return np.memmap(path, np.float32, "c", item.id.get_offset(), item.shape)
    values = item[()]
    return values if isinstance(values, h5py.Empty) else np.asarray(values)


def _plain(path: Path, name: str, value: Any) -> Any:
    """An attribute as text, however the writer stored it; of the seed as a whole number."""
    value = value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim) else value
    try:
        value = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise UserError(f"{path}: the attribute {name} is not UTF-8") from None
    if name == "seed" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int if name == "seed" else str):
        raise UserError(f"{path}: the attribute {name} is {value!r}, not {'a whole number' if name == 'seed' else 'a text'}")
    return value


def _ids(path: Path, name: str, values: NDArray[Any]) -> NDArray[np.int64]:
    whole = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"
    if not whole or (values.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max):
        kind = f"{values.dtype} of shape {values.shape}" if isinstance(values, np.ndarray) else "empty"
        raise UserError(f"{path}: {name} are to be whole numbers in one row, and are {kind}")
    return values.astype(np.int64)


def _matrix(path: Path, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """A matrix in float32; scores in the precision that they have, so that no two become equal."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise UserError(f"{path}: {name} holds no numbers")
    if name == "scores" and values.dtype == np.float64:
        return values
    with np.errstate(over="ignore"):  # what becomes infinite is refused by its row
        return values.astype(np.float32, copy=False)


def _check(path: Path, found: Embeddings) -> None:
    if found.scores is None and found.similarity not in SIMILARITIES:
        raise UserError(f"{path}: unknown similarity {found.similarity!r}{did_you_mean(str(found.similarity), SIMILARITIES)}")
    n_images, n_captions = len(found.image_ids), len(found.caption_ids)
    if not n_images or not n_captions:
        raise UserError(f"{path}: no images or no captions")
    if found.coco_ids is not None and found.coco_ids.shape != (n_images,):
        raise UserError(f"{path}: {n_images} images, but coco_ids of shape {found.coco_ids.shape}")
    for name, ids in (("image", found.image_ids), ("caption", found.caption_ids)):
        values, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise UserError(f"{path}: duplicate {name} id {values[counts > 1][0]}")
    if found.caption_image_ids.shape != (n_captions,):
        raise UserError(f"{path}: {n_captions} caption ids, but caption_image_ids of shape {found.caption_image_ids.shape}")
    shapes = {"images": (n_images, None), "captions": (n_captions, None), "scores": (n_images, n_captions)}
    for name, (rows, columns) in shapes.items():
        values = getattr(found, name)
        if values is None:
            continue
        if values.ndim != 2 or len(values) != rows or columns not in (None, values.shape[1]) or not values.size:
            raise UserError(f"{path}: {name} has shape {values.shape}, expected ({rows}, {columns or 'dim'})")
        for start in range(0, rows, _CHECKED):
            finite = np.isfinite(values[start : start + _CHECKED]).all(1)
            if not finite.all():
                raise UserError(f"{path}: {name} row {start + int(finite.argmin())} is not finite (NaN or infinite)")
