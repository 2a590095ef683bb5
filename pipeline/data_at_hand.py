"""Hash photographs and captions of a data set that is at hand, and compare them with what a file records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vse.pipeline.data_identity import DataIdentity, Hashes, caption_hashes, data_differences
from vse.pipeline.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.id_rows import IdRows, Ids
from vse.pipeline.image_arrays import caption_ids, image_ids
from vse.pipeline.image_files import BadImage, image_size, read_bytes

COMPARED_PHOTOS = 64  # of a data set whose dataset.json is the recorded one
COMPARED_PHOTOS_IF_CHANGED = 256
_NONE = np.empty(0, np.int64)


def check_data_of(dataset: Dataset, recorded: DataIdentity) -> None:
    """Raise UserError if a file of embeddings or scores is of other captions or photographs than a data set has at these ids.

    All captions are compared, and some photographs, evenly spread, as far as they are at hand.
    """
    captions = None if recorded.captions is None else caption_hashes(dataset.images)
    photo_ids, photos = photos_at_hand(dataset, recorded, COMPARED_PHOTOS_IF_CHANGED)
    ours = DataIdentity(photo_ids, caption_ids(dataset.images), photos, captions)
    if differences := data_differences(ours, recorded):
        raise UserError(
            f"{dataset.path}: not the data set that the embeddings or scores are of: {'; '.join(differences)}; give that data "
            "set, or embed this one"
        )


def photos_at_hand(dataset: Dataset, recorded: DataIdentity, most: int) -> tuple[Ids, Hashes | None]:
    """Hash at most ``most`` photographs of a data set, evenly spread over the images whose photographs are recorded.

    Returns their ids (n,) and hashes (n, 32); None for the hashes if no file is at hand.
    """
    if recorded.photos is None or not dataset.pictures:
        return _NONE, None
    rows = np.flatnonzero(IdRows(recorded.image_ids).of(image_ids(dataset.images)) >= 0)
    chosen = rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)] if len(rows) else rows
    images = [dataset.images[int(row)] for row in chosen]
    return hashed_photos([(image.imgid, dataset.image_path(image)) for image in images])


def hashed_photos(files: Sequence[tuple[int, Path]]) -> tuple[Ids, Hashes | None]:
    """Return the ids (n,) and SHA-256 (n, 32) of all readable files; the second is None if no file can be read."""
    hashed = {}
    for imgid, path in files:
        try:
            content = read_bytes(path)
            image_size(path, content)  # a damaged file is reported by the command that decodes it
            hashed[imgid] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
        except BadImage:
            continue
    return np.fromiter(hashed, np.int64), np.stack(list(hashed.values())) if hashed else None
