"""A folder of photos as a data set without captions, for a search with a model that was trained on other photos."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from vse.pipeline.dataset.captions import DEFAULT_TOKENISER
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.images import Image
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.writing import sha256_json

log = logging.getLogger(__name__)
PHOTO_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
QUERY_PHOTO_SUFFIXES = (*PHOTO_SUFFIXES, ".gif", ".bmp")  # of a photo that is only a query
PHOTO_SPLIT = "test"  # the split of all photos of a folder


def list_photos(folder: Path) -> list[Path]:
    """Return the JPEG, PNG and WebP files of a folder and its subfolders, sorted, relative to the folder.

    Raises UserError if there are none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of photos")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES)
    files = [file for file in files if (folder / file).is_file()]
    if not files:
        raise UserError(f"{folder}: no JPEG, PNG or WebP file in it")
    return files


@dataclass(frozen=True)
class PhotoFolder(Dataset):
    """The photos of a folder, ``path``. Without photos, a placeholder for the data of a model that travels without data."""

    def image_path(self, image: Image) -> Path:
        return self.path / image.file

    @property
    def input_paths(self) -> list[Path]:
        return [self.image_path(image) for image in self.images]

    @property
    def listed_files(self) -> list[Path]:
        return [*sorted({file.parent for file in self.input_paths}), *self.input_paths]

    def split(self, name: str) -> tuple[Image, ...]:
        """Return all photos. Raises UserError if there are none, or for another split than ``test``."""
        if not self.images:
            raise UserError(
                f"{self.path}: a model without photos; name a folder of photos with --images, or a feature cache of photos "
                "with --features"
            )
        if name != PHOTO_SPLIT:
            raise UserError(f"{self.path}: a folder of photos has no splits; leave --split {name} out")
        return tuple(self.images)


def open_photo_folder(folder: Path, tokeniser: str = DEFAULT_TOKENISER) -> PhotoFolder:
    """Open a folder of photos. A warning states the number of files that are left out because they are no images.

    The SHA-256 of the result depends on the names, sizes and times of the files. Raises UserError if no photo remains.
    """
    images: list[Image] = []
    states, bad = [], []
    for file in list_photos(folder):
        try:
            read_image_size(folder / file)
        except BadImage as error:
            bad.append(str(error))
            continue
        status = (folder / file).stat()
        images.append(Image(len(images), file.as_posix(), PHOTO_SPLIT, ()))
        states.append([file.as_posix(), status.st_size, status.st_mtime_ns])
    if bad:
        log.warning("%d files in %s cannot be read and are left out, the first: %s", len(bad), folder, bad[0])
    if not images:
        raise UserError(f"{folder}: none of its files can be read, the first: {bad[0]}")
    return PhotoFolder(folder.resolve().name, folder, tuple(images), sha256=sha256_json(states), tokeniser=tokeniser)


def without_photos(model: Path, tokeniser: str) -> PhotoFolder:
    """Return an empty data set for a model that is used without photos."""
    return PhotoFolder(model.resolve().name, model, (), tokeniser=tokeniser)
