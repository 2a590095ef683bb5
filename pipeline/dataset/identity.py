"""The identity of a data set: the ids and hashes of all photographs and captions.

Two data sets may have the same name and the same ids. Before files are used together, the photographs and captions with
common ids are therefore compared by their hashes.
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

from vse.pipeline.dataset.columns import (
    IdIndex,
    Ids,
    caption_ids,
    caption_texts,
    count_captions_per_image,
    image_ids,
    select_images,
)
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.images import Image
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, read_image_bytes, read_image_size

PHOTO_HASH_BYTES = 32  # a complete SHA-256
CAPTION_HASH_BYTES = 8  # the beginning of a SHA-256: there are many captions, and nobody forges one
_IMAGES_PER_BLOCK = 4096
Hashes = NDArray[np.uint8]


class DataChecksums(BaseModel):
    """SHA-256 checksums of the ids, the photographs and the captions of a data set or a split.

    Photographs and captions are sorted by id. None stands for an unknown checksum. The checksum of the captions also covers
    the image id of each caption. ``splits_sha256`` covers the image ids of each split of a complete data set.
    """

    ids_sha256: str
    photos_sha256: str | None = None
    captions_sha256: str | None = None
    splits_sha256: str | None = None

    @property
    def short_hash(self) -> str:
        """Eight hexadecimal digits for file names, computed from all checksums."""
        return hashlib.sha256("".join(str(value) for value in self.model_dump().values()).encode()).hexdigest()[:8]

    def list_differences(self, other: DataChecksums) -> list[str]:
        """Return the names of differing checksums: ids, photographs, captions, splits. Unknown checksums are not compared."""
        names = {"ids": "ids", "photographs": "photos", "captions": "captions", "splits": "splits"}
        pairs = {name: (getattr(self, f"{key}_sha256"), getattr(other, f"{key}_sha256")) for name, key in names.items()}
        return [name for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]]


@dataclass(frozen=True)
class DataIdentity:
    """The ids and hashes of images and captions. None stands for unknown hashes.

    ``photo_hashes`` (n_images, 32) holds the SHA-256 of the image files, and ``caption_hashes`` (n_captions, 8) the first 8
    bytes of the SHA-256 of the image id and the text of each caption.
    """

    image_ids: Ids
    caption_ids: Ids
    photo_hashes: Hashes | None = None
    caption_hashes: Hashes | None = None

    @property
    def checksums(self) -> DataChecksums:
        images, captions = np.argsort(self.image_ids), np.argsort(self.caption_ids)
        return DataChecksums(
            ids_sha256=_hash_arrays(self.image_ids[images], self.caption_ids[captions]),
            photos_sha256=None
            if self.photo_hashes is None
            else _hash_arrays(self.image_ids[images], self.photo_hashes[images]),
            captions_sha256=None
            if self.caption_hashes is None
            else _hash_arrays(self.caption_ids[captions], self.caption_hashes[captions]),
        )


def hash_caption(imgid: int, raw: str) -> bytes:
    """Return the first 8 bytes of the SHA-256 of the image id and the text of a caption."""
    return hashlib.sha256(f"{imgid}\n{raw}".encode(errors="surrogatepass")).digest()[:CAPTION_HASH_BYTES]


def hash_captions(images: Sequence[Image]) -> Hashes:
    """Return the hashes of all captions, (n_captions, 8), in the order of the images."""
    hashes = bytearray()
    for start in range(0, len(images), _IMAGES_PER_BLOCK):  # the texts of all images might not fit into memory
        block = images[start : start + _IMAGES_PER_BLOCK]
        owners = np.repeat(image_ids(block), count_captions_per_image(block)).tolist()
        hashes += b"".join(map(hash_caption, owners, caption_texts(block)))
    return np.frombuffer(hashes, np.uint8).reshape(-1, CAPTION_HASH_BYTES)


def build_identity(images: Sequence[Image], photos: Hashes | None = None) -> DataIdentity:
    """Return the ids and hashes of images and their captions. ``photos`` (n_images, 32) has the SHA-256 of files."""
    return DataIdentity(image_ids(images), caption_ids(images), photos, hash_captions(images))


def describe_data_differences(ours: DataIdentity, theirs: DataIdentity) -> list[str]:
    """Return messages about the differences between two data sets; an empty list if there are none.

    An example is ``12 of 300 compared captions differ, the first is id 5``. Only common ids are compared, so a split does not
    differ from the complete data set. If only the captions or only the photographs differ, a second message states whether
    the others are equal or were not compared.
    """
    parts = {
        "photographs": _find_differing_ids(ours.image_ids, ours.photo_hashes, theirs.image_ids, theirs.photo_hashes),
        "captions": _find_differing_ids(ours.caption_ids, ours.caption_hashes, theirs.caption_ids, theirs.caption_hashes),
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
    """Raise UserError if two files have the same id for different photographs or captions.

    ``path`` and ``other_path`` name the files in the message.
    """
    if differences := describe_data_differences(ours, theirs):
        raise UserError(f"{path} and {other_path} come from different data sets: {'; '.join(differences)}")


def check_all_same_data(files: Sequence[tuple[Path, DataIdentity]]) -> None:
    """Raise UserError if two of the files have the same id for different photographs or captions.

    Two files that have no ids in common are not compared, and neither is a file without hashes.
    """
    for (path, ours), (other_path, theirs) in combinations(files, 2):
        check_same_data(other_path, theirs, path, ours)


def _find_differing_ids(ids: Ids, hashes: Hashes | None, other_ids: Ids, other_hashes: Hashes | None) -> tuple[int, Ids]:
    """Return the number of ids in both lists, and the ids whose hashes differ. If hashes are unknown, return 0 and no ids."""
    if hashes is None or other_hashes is None:
        return 0, ids[:0]
    rows = IdIndex(other_ids).find_rows(ids)
    shared = np.flatnonzero(rows >= 0)
    return len(shared), ids[shared[(hashes[shared] != other_hashes[rows[shared]]).any(1)]]


def _hash_arrays(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


N_PHOTOS_COMPARED = 64  # photographs to compare if dataset.json is unchanged
N_PHOTOS_COMPARED_IF_DATASET_CHANGED = 256  # photographs to compare if dataset.json has changed
_NO_IDS = np.empty(0, np.int64)


def check_recorded_data(dataset: Dataset, recorded: DataIdentity) -> None:
    """Raise UserError if a data set has changed since a file of embeddings was written.

    ``recorded`` has the ids and hashes in the file of embeddings. All captions are compared, and some photographs, evenly
    spread over the data set.
    """
    captions = None if recorded.caption_hashes is None else hash_captions(dataset.images)
    photo_ids, photos = hash_available_photos(dataset, recorded, N_PHOTOS_COMPARED_IF_DATASET_CHANGED)
    ours = DataIdentity(photo_ids, caption_ids(dataset.images), photos, captions)
    if differences := describe_data_differences(ours, recorded):
        raise UserError(
            f"{dataset.path}: the embeddings or scores come from another data set: {'; '.join(differences)}; give that data "
            "set, or embed this one"
        )


def hash_available_photos(dataset: Dataset, recorded: DataIdentity, max_photos: int) -> tuple[Ids, Hashes | None]:
    """Hash at most ``max_photos`` photographs of a data set, evenly spread over the images whose ids are in ``recorded``.

    Returns ids (n,) and hashes (n, 32). Unreadable files are left out. Returns no ids, and None for the hashes, if no file is
    left, if the data set has no image files, or if ``recorded`` has no hashes of photographs.
    """
    if recorded.photo_hashes is None or not dataset.has_image_files:
        return _NO_IDS, None
    rows = np.flatnonzero(IdIndex(recorded.image_ids).find_rows(image_ids(dataset.images)) >= 0)
    chosen = rows[np.linspace(0, len(rows) - 1, min(max_photos, len(rows))).astype(np.int64)] if len(rows) else rows
    images = select_images(dataset.images, np.isin(np.arange(len(dataset.images)), chosen))
    return hash_photos([(image.imgid, dataset.image_path(image)) for image in images])


def hash_photos(files: Sequence[tuple[int, Path]]) -> tuple[Ids, Hashes | None]:
    """Return the ids (n,) and SHA-256 (n, 32) of image files. ``files`` holds the id and path of each image.

    Unreadable files are left out. If no file is readable, the ids are empty and the hashes are None.
    """
    hashes = {}
    for imgid, path in files:
        try:
            content = read_image_bytes(path)
            read_image_size(path, content)  # raises BadImage; the command that decodes the file reports it
            hashes[imgid] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
        except BadImage:
            continue
    return np.fromiter(hashes, np.int64), np.stack(list(hashes.values())) if hashes else None
