"""Write arrays in memory as a data set and feature caches, for a trainer that reads files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.rows import FeatureKind, FeatureRows, Ids, row_ids
from vse.features.exchange.arrays import hash_rows, write_imported_cache
from vse.pipeline.dataset.captions import IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.preparation import write_dataset
from vse.pipeline.errors import UserError

ARRAYS_NAME = "arrays"  # the name of the data set
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class ArrayData:
    """Images as vectors, and their captions as vectors, as texts, or both. The ids are the indices of the rows.

    ``images`` : (n_images, dim), or sets of vectors (n_images, n_regions, dim).
    ``captions`` : (n_captions, dim), or sets of vectors; None if the captions are only texts.
    ``texts`` : n_captions texts; None if the captions are only vectors.
    ``image_of_caption`` : (n_captions,) row of each caption's image.
    """

    images: Vectors
    captions: Vectors | None
    texts: Sequence[str] | None
    image_of_caption: Ids

    def append(self, other: ArrayData) -> ArrayData:
        """Return these images and captions, followed by those of ``other``, which must have the same fields."""
        return ArrayData(
            images=np.concatenate([self.images, other.images]),
            captions=_append_optional(self.captions, other.captions),
            texts=None if self.texts is None or other.texts is None else [*self.texts, *other.texts],
            image_of_caption=np.concatenate([self.image_of_caption, other.image_of_caption + len(self.images)]),
        )


def _append_optional(first: Vectors | None, second: Vectors | None) -> Vectors | None:
    return None if first is None or second is None else np.concatenate([first, second])


def sample_validation_images(data: ArrayData, share: float, seed: int) -> Ids:
    """Return the rows of a random share of the images with captions, but at least one. Raises UserError if none is left."""
    captioned = np.unique(data.image_of_caption)
    if len(captioned) < 2:
        raise UserError(f"images: {len(captioned)} image with captions; at least 2 are needed, because one is for validation")
    n_validation = max(1, round(share * len(captioned)))
    return np.sort(np.random.default_rng(seed).choice(captioned, n_validation, replace=False))


def write_array_data(data: ArrayData, validation: Ids, folder: Path) -> tuple[Path, Path | None]:
    """Write a data set and the caches of its vectors to ``folder``. Return the caches of images and of captions.

    ``validation`` has the rows of the images for validation; all other images are training images. The second result is None
    if the captions are only texts. A caption without a text gets the text ``caption 17``, if its row is 17.
    """
    dataset = load_dataset_file(_write_dataset(data, validation, folder))
    captions = None if data.captions is None else _write_cache(data.captions, dataset, "text", folder)
    return _write_cache(data.images, dataset, "image", folder), captions


def _write_dataset(data: ArrayData, validation: Ids, folder: Path) -> Path:
    tokenise = find_tokeniser(IMPORT_TOKENISER, "captions")
    sentences: list[list[dict[str, object]]] = [[] for _ in data.images]
    for row, image in enumerate(data.image_of_caption.tolist()):
        text = f"caption {row}" if data.texts is None else data.texts[row]
        tokens = tokenise(text)
        if not tokens:
            raise UserError(f"captions: row {row} is {text!r:.60}, which has no word; leave it out")
        sentences[image].append({"sentid": row, "imgid": image, "raw": text, "tokens": tokens})
    is_validation = np.isin(np.arange(len(data.images)), validation).tolist()
    images = [
        {"imgid": row, "filename": str(row), "split": "val" if is_validation[row] else "train", "sentences": listed}
        for row, listed in enumerate(sentences)
    ]
    content = {"dataset": ARRAYS_NAME, "tokeniser": IMPORT_TOKENISER, "pictures": False, "images": images}
    return write_dataset(content, folder, None, [])


def _write_cache(vectors: Vectors, dataset: Dataset, kind: FeatureKind, folder: Path) -> Path:
    ids = row_ids(dataset, kind)

    def rows(part: slice) -> FeatureRows:
        values = vectors[ids[part]]
        return FeatureRows(ids[part], values, hash_rows(values))

    layout = {"layout": ARRAYS_NAME, "array_sha256": hashlib.sha256(np.ascontiguousarray(vectors).data).hexdigest()}
    out = folder / f"{ARRAYS_NAME}_{'images' if kind == 'image' else 'captions'}.h5"
    return write_imported_cache(out, dataset, kind, layout, [], ids, rows, vectors[:1].nbytes)
