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
QUERY_PHOTO_SUFFIXES = (*PHOTO_SUFFIXES, ".gif", ".bmp")  # suffixes of a photo that is only a query
PHOTO_SPLIT = "test"  # the split of all photos of a folder


def list_photos(folder: Path) -> list[Path]:
    """Return the JPEG, PNG and WebP files of a folder and its subfolders as sorted paths, relative to the folder.

    Raises UserError if the folder is missing or has no such file.
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
    """A data set of the photos in the folder ``path``, without captions.

    If a model is used without its training data, an object without photos takes the place of the data set.
    """

    def image_path(self, image: Image) -> Path:
        return self.path / image.file

    @property
    def input_paths(self) -> list[Path]:
        return [self.image_path(image) for image in self.images]

    @property
    def content_paths(self) -> list[Path]:
        return [*sorted({file.parent for file in self.input_paths}), *self.input_paths]

    def split(self, name: str) -> tuple[Image, ...]:
        """Return all photos. Raises UserError if there are no photos, or if ``name`` is not ``test``."""
        if not self.images:
            raise UserError(
                f"{self.path}: a model without photos; name a folder of photos with --images, or a feature cache of photos "
                "with --features"
            )
        if name != PHOTO_SPLIT:
            raise UserError(f"{self.path}: a folder of photos has no splits; leave --split {name} out")
        return tuple(self.images)


def open_photo_folder(folder: Path, tokeniser: str = DEFAULT_TOKENISER) -> PhotoFolder:
    """Return a folder of photos as a data set. Files that are not images are left out, with a warning.

    ``tokeniser`` names the function that splits queries into words. The SHA-256 of the data set depends on the names, sizes
    and times of the files. Raises UserError if no photo is left.
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


def build_empty_photo_folder(model: Path, tokeniser: str) -> PhotoFolder:
    """Return a data set without photos for the use of a model without its training data. Errors name the file ``model``."""
    return PhotoFolder(model.resolve().name, model, (), tokeniser=tokeniser)
