"""A folder of images and a table that says what is on them, as a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vse.pipeline.caption_tables import TABLES, add_table
from vse.pipeline.errors import UserError
from vse.pipeline.image_files import BadImage, image_size
from vse.pipeline.image_folders import ImageFolders
from vse.pipeline.imported_rows import BadRow, GatheredRows, ImportSettings
from vse.pipeline.imported_write import check_name, write_imported_data

_USUAL = ("metadata", "captions")  # what such a table in the folder of images is called


def table_in(folder: Path) -> Path | None:
    """The table of captions in a folder of images; None if there is none by a usual name, :class:`UserError` if several."""
    tables = [path for name in _USUAL for end in TABLES if (path := folder / f"{name}{end}").is_file()]
    if len(tables) > 1:
        raise UserError(f"{folder}: has {' and '.join(path.name for path in tables)}; say which one with --captions FILE")
    return tables[0] if tables else None


def import_table(images: Path, table: Path, settings: ImportSettings, others: Path | None = None) -> Path:
    """Write ``dataset.json`` of the images that a CSV, JSON lines or parquet file names, with a link to their folder.

    A row names an image, relative to the folder ``images``, and one or more captions; an image may have several rows. Symbolic
    links in that folder may lead to files in it or in the folder ``others``. The header of each image is read. Returns the
    path of ``dataset.json``.
    """
    if not images.is_dir():
        raise UserError(f"{images}: no such folder of images")
    check_name(settings.name)
    gathered = GatheredRows(settings, check_photo(images, others))
    add_table(table, gathered, settings)
    content = gathered.content(format="table", files=[table.name])
    return write_imported_data(content, settings, images, [table])


def check_photo(images: Path, others: Path | None = None) -> Callable[[str], None]:
    """Return a check of a file in the folder ``images``.

    It raises BadRow if the file is missing, is no image that can be read, or is a link that leads to neither of the folders.
    """
    folders = ImageFolders([folder for folder in (images, others) if folder is not None])

    def check(file: str) -> None:
        try:
            folders.find(file)
            image_size(images / file)
        except BadImage as fault:
            raise BadRow(fault) from None

    return check
