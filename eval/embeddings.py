"""The file between a model and the evaluator: embeddings (or scores) of a split, with ids.

Any program can write it; see ``docs/formats.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.files import write_bytes

_MATRICES = ("images", "captions", "scores")
_ATTRIBUTES = ("dataset", "split", "experiment", "seed", "similarity")


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of a split: ``images`` (n_images, dim) and ``captions`` (n_captions, dim), or ``scores``.

    Where there are ``scores`` (n_images, n_captions), images and captions are compared by them; ``captions``, if they
    are there as well, serve to compare captions. Attributes name the ``dataset``, ``split``, ``experiment``, ``seed`` and
    ``similarity`` (without ``scores`` one of :data:`vse.eval.scores.SIMILARITIES`); ``provenance`` is what the writer noted
    about features, settings and versions.
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

    def owners(self) -> NDArray[np.int64]:
        """For each caption the row of its image; :class:`UserError` if an id has no image."""
        row_of = {int(imgid): row for row, imgid in enumerate(self.image_ids)}
        try:
            return np.asarray([row_of[int(imgid)] for imgid in self.caption_image_ids], np.int64)
        except KeyError as error:
            raise UserError(f"a caption belongs to image {error.args[0]}, which is not among the image ids") from None


def write_embeddings(path: Path, embeddings: Embeddings) -> Path:
    """Write the file atomically; returns ``path``."""
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        for name in ("image_ids", "caption_ids", "caption_image_ids", "images", "captions", "scores"):
            values = getattr(embeddings, name)
            if values is not None:
                file.create_dataset(name, data=values)
        for name in (*_ATTRIBUTES, "provenance"):
            file.attrs[name] = getattr(embeddings, name)
    return write_bytes(path, buffer.getbuffer())


def read_embeddings(path: Path) -> Embeddings:
    """Read and check a file; :class:`UserError` names what is missing, duplicate, or of the wrong length."""
    try:
        with h5py.File(path, "r") as file:
            arrays = {name: item[()] for name, item in file.items() if isinstance(item, h5py.Dataset)}
            attributes = {name: _plain(value) for name, value in file.attrs.items()}
    except OSError as error:
        reason = "no such file" if not path.exists() else f"not a readable HDF5 file ({error})"
        raise UserError(f"{path}: {reason}") from None
    missing = [name for name in ("image_ids", "caption_ids", "caption_image_ids") if name not in arrays]
    missing += [name for name in _ATTRIBUTES if name not in attributes]
    if "scores" not in arrays:
        missing += [name for name in ("images", "captions") if name not in arrays]
    if missing:
        raise UserError(f"{path}: not an embeddings file, it lacks {', '.join(missing)}")
    values: dict[str, Any] = {
        name: arrays[name].astype(np.int64) for name in ("image_ids", "caption_ids", "caption_image_ids")
    }
    values |= {name: arrays[name].astype(np.float32) if name in arrays else None for name in _MATRICES}
    values |= {name: attributes[name] for name in _ATTRIBUTES}
    found = Embeddings(**values, provenance=attributes.get("provenance", "{}"))
    _check(path, found)
    return found


def _plain(value: Any) -> Any:
    """An attribute as a Python value, text whichever way the writer stored it."""
    value = value.item() if isinstance(value, np.generic) else value
    return value.decode() if isinstance(value, bytes) else value


def _check(path: Path, found: Embeddings) -> None:
    n_images, n_captions = len(found.image_ids), len(found.caption_ids)
    if not n_images or not n_captions:
        raise UserError(f"{path}: no images or no captions")
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
        if not np.isfinite(values).all():
            raise UserError(f"{path}: {name} row {np.argwhere(~np.isfinite(values))[0][0]} is not finite (NaN)")
