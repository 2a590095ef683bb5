"""The identity of a data set: its ids, and hashes of its photographs and captions.

Two data sets may share their name and all of their ids. Wherever two files meet, their identities are compared, by id.

Hash photographs and captions of a data set that is at hand, and compare them with what a file records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from vse.pipeline.dataset.columns import IdRows, Ids, Image, caption_ids, image_ids
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, read_image_bytes, read_image_size

PHOTO_BYTES = 32  # of a photograph's hash: a complete SHA-256
CAPTION_BYTES = 8  # of a caption's hash: there are many captions, and nobody forges one
Hashes = NDArray[np.uint8]


class DataSums(BaseModel):
    """A data set, or a split of it, as SHA-256: of the ids, of the photographs and of the captions, sorted by id.

    None stands for an unknown sum. The sum of the captions covers which image each belongs to. For a complete data set there
    is also the sum of the ids of the images of each split.
    """

    ids_sha256: str
    photos_sha256: str | None = None
    captions_sha256: str | None = None
    splits_sha256: str | None = None

    @property
    def short(self) -> str:
        """Return eight hexadecimal digits that stand for all sums, for the name of a file."""
        return hashlib.sha256("".join(str(value) for value in self.model_dump().values()).encode()).hexdigest()[:8]

    def differences(self, other: DataSums) -> list[str]:
        """Return which of the sums that both sides know differ: of ids, photographs, captions, splits."""
        names = {"ids": "ids", "photographs": "photos", "captions": "captions", "splits": "splits"}
        pairs = {name: (getattr(self, f"{key}_sha256"), getattr(other, f"{key}_sha256")) for name, key in names.items()}
        return [name for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]]


@dataclass(frozen=True)
class DataIdentity:
    """Ids of images and captions with hashes of their contents; None stands for unknown hashes.

    ``photos`` (n_images, 32) are the SHA-256 of the image files, ``captions`` (n_captions, 8) what :func:`caption_hash`
    returns. A caption's hash covers its image's id and its text as it was written.
    """

    image_ids: Ids
    caption_ids: Ids
    photos: Hashes | None = None
    captions: Hashes | None = None

    @property
    def sums(self) -> DataSums:
        """Return the sums of the rows."""
        images, captions = np.argsort(self.image_ids), np.argsort(self.caption_ids)
        return DataSums(
            ids_sha256=_sum(self.image_ids[images], self.caption_ids[captions]),
            photos_sha256=None if self.photos is None else _sum(self.image_ids[images], self.photos[images]),
            captions_sha256=None if self.captions is None else _sum(self.caption_ids[captions], self.captions[captions]),
        )


def caption_hash(imgid: int, raw: str) -> bytes:
    """Return the first 8 bytes of the SHA-256 of a caption's image id and text."""
    return hashlib.sha256(f"{imgid}\n{raw}".encode(errors="surrogatepass")).digest()[:CAPTION_BYTES]


def caption_hashes(images: Sequence[Image]) -> Hashes:
    """Return the hash of each caption of some images, (n_captions, 8), in their order."""
    hashes = b"".join(caption_hash(image.imgid, caption.raw) for image in images for caption in image.captions)
    return np.frombuffer(hashes, np.uint8).reshape(-1, CAPTION_BYTES)


def identity_of_images(images: Sequence[Image], photos: Hashes | None = None) -> DataIdentity:
    """Return the identity of some images of a data set; ``photos`` (n_images, 32) are the hashes of their files, if known."""
    return DataIdentity(image_ids(images), caption_ids(images), photos, caption_hashes(images))


def data_differences(ours: DataIdentity, theirs: DataIdentity) -> list[str]:
    """Return the differences between two data sets: ``12 of 300 compared captions differ, the first is id 5``, or nothing.

    Images and captions are compared by their ids, so a split or a subset does not differ from the complete data set. If
    photographs differ, the captions are mentioned as well, and the reverse: as equal, or as not compared.
    """
    parts = {
        "photographs": _compared(ours.image_ids, ours.photos, theirs.image_ids, theirs.photos),
        "captions": _compared(ours.caption_ids, ours.captions, theirs.caption_ids, theirs.captions),
    }
    differ = [
        f"{len(wrong)} of {n} compared {name} differ, the first is id {wrong[0]}"
        for name, (n, wrong) in parts.items()
        if len(wrong)
    ]
    if not differ:
        return []
    others = [f"{name} {'are equal' if n else 'were not compared'}" for name, (n, wrong) in parts.items() if not len(wrong)]
    return differ + others


def check_same_data(path: Path, ours: DataIdentity, other_path: Path, theirs: DataIdentity) -> None:
    """Raise UserError if two files are of different data sets, although they have ids in common."""
    if differences := data_differences(ours, theirs):
        raise UserError(f"{path} and {other_path} are of different data sets: {'; '.join(differences)}")


def check_all_same_data(files: Sequence[tuple[Path, DataIdentity]]) -> None:
    """Raise UserError if two of some files are of different data sets; a file without hashes agrees with any."""
    for (path, ours), (other_path, theirs) in combinations(files, 2):
        check_same_data(other_path, theirs, path, ours)


def _compared(ids: Ids, hashes: Hashes | None, other_ids: Ids, other_hashes: Hashes | None) -> tuple[int, Ids]:
    """Return how many rows were compared, those of the ids that both sides have, and the ids of those that differ."""
    if hashes is None or other_hashes is None:
        return 0, ids[:0]
    rows = IdRows(other_ids).of(ids)
    shared = np.flatnonzero(rows >= 0)
    return len(shared), ids[shared[(hashes[shared] != other_hashes[rows[shared]]).any(1)]]


def _sum(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


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
            content = read_image_bytes(path)
            read_image_size(path, content)  # a damaged file is reported by the command that decodes it
            hashed[imgid] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
        except BadImage:
            continue
    return np.fromiter(hashed, np.int64), np.stack(list(hashed.values())) if hashed else None
