"""Import a Hugging Face data set, from a folder or by name from the hub, with the library ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.preparation import check_dataset_name
from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.columnar import check_decoded_arrow_size, check_decoded_file_size
from vse.pipeline.files.images import BadImage, read_image_bytes
from vse.pipeline.files.inputs import error_reason, is_path_text, wrap_read_errors
from vse.pipeline.files.photo_archives import MAX_PHOTO_BYTES
from vse.pipeline.files.writing import lock_for_writing, read_json
from vse.pipeline.imports.photos import ImageFolders, PhotoWriter
from vse.pipeline.imports.rows import (
    BadRow,
    ImportSettings,
    RowCollector,
    write_imported_data,
)
from vse.pipeline.imports.tables import build_imported_row, choose_columns
from vse.pipeline.progress import progress_bar

_SUFFIX_BY_MAGIC = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}


def is_saved_dataset(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of the library ``datasets`` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def import_hugging_face(source: Path, settings: ImportSettings, images: Path | None = None) -> Path:
    """Import a Hugging Face data set: write ``dataset.json`` and the photos, and return the path of ``dataset.json``.

    ``source`` is a folder that ``save_to_disk`` wrote, or an argument of ``load_dataset``: another folder of a data set, or a
    name on the hub, ``OWNER/NAME`` or ``OWNER/NAME:CONFIGURATION``. No code of the data set is run.

    One column has images, as files or as bytes. Another column has a caption or a list of captions. The splits of the data
    set are kept, unless a column names the split of each row. A row with an unknown split is invalid.

    The path of an image must lie inside ``source``, the folder ``images``, or the folders in which the library stores
    downloads. An interrupted import can be repeated: photos that are already written are kept. Raises UserError if the
    library is not installed.
    """
    check_dataset_name(settings.name)
    library = import_extra("datasets", f"{source}: a Hugging Face data set", "datasets")
    loaded = _load_hugging_face(library, source)
    by_split = loaded if isinstance(loaded, library.DatasetDict) else {"": loaded}
    collector = RowCollector(settings)
    folders = ImageFolders(_list_image_folders(library, source, images))
    with lock_for_writing(settings.out, folder=True):
        photos = PhotoWriter(settings.out, collector)
        for split, rows in by_split.items():
            _add_rows_of_split(source, folders, str(split), rows, library.Image, collector, photos, settings.columns)
        content = collector.build_dataset_content(photos.images_folder, format="hugging-face", files=[source.name])
        return write_imported_data(content, settings, None, [])


def _check_decoded_sizes(folder: Path) -> None:
    """Raise UserError if a file in ``folder`` expands to over about 100 times its size.

    The Arrow files that a ``state.json`` in ``folder`` lists are checked, too.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            check_decoded_file_size(path)
    for state in folder.rglob("state.json"):
        content = read_json(state)
        listed = content.get("_data_files") if isinstance(content, dict) else None
        for entry in listed or ():
            name = entry.get("filename") if isinstance(entry, dict) else None
            if isinstance(name, str) and is_path_text(name):
                check_decoded_arrow_size(state.parent / name)


def _list_image_folders(library: Any, source: Path, images: Path | None) -> list[Path]:
    """Return the folders in which images may lie: the data set, ``images``, and the caches of the library."""
    folders = [folder for folder in (source if source.exists() else None, images) if folder is not None]
    if not is_saved_dataset(source):
        folders += [Path(library.config.DOWNLOADED_DATASETS_PATH), Path(library.config.EXTRACTED_DATASETS_PATH)]
    if not source.exists():
        hub = import_extra("huggingface_hub.constants", "a data set of the hub", "datasets")
        owner_and_name = str(source).partition(":")[0].replace("/", "--")
        folders.append(Path(hub.HF_HUB_CACHE, f"datasets--{owner_and_name}"))
    return folders


def _load_hugging_face(library: Any, source: Path) -> Any:
    if source.is_dir():
        _check_decoded_sizes(source)
    if is_saved_dataset(source):
        with wrap_read_errors(source, "a data set that the library 'datasets' saved"):
            return library.load_from_disk(str(source))
    name, _, configuration = str(source).partition(":")
    try:
        return library.load_dataset(name, configuration or None)
    except Exception as error:  # the network, the hub and the formats raise many kinds of errors
        hint = "" if source.exists() else "; where there is no network, import a folder that save_to_disk wrote elsewhere"
        where = "as a data set of Hugging Face" if source.exists() else "from the Hugging Face hub"
        raise UserError(f"{source}: cannot be loaded {where} ({error_reason(error)}){hint}") from None


def _add_rows_of_split(
    source: Path,
    folders: ImageFolders,
    split: str,
    rows: Any,
    image_type: Any,
    collector: RowCollector,
    photos: PhotoWriter,
    columns: Mapping[str, tuple[str, ...]],
) -> None:
    image_columns = [name for name, kind in rows.features.items() if isinstance(kind, image_type)]
    (image,) = columns.get("file", tuple(image_columns[:1]) or ("",))
    if image not in image_columns:
        raise UserError(f"{source}: no column {image!r} of images; columns of images: {', '.join(image_columns) or 'none'}")
    chosen = choose_columns(source, rows.features, {**columns, "file": (image,)})
    seen: set[str] = set()
    stored = rows.cast_column(image, image_type(decode=False))
    for index, row in enumerate(progress_bar(stored, desc=f"read {split or source.name}", total=len(rows), unit="row")):
        place = f"{source}: {split} row {index}".replace(":  ", ": ")
        try:
            name, content = _read_photo(row[image], index, folders)
            if name in seen:
                name = f"{index:08d}_{name}"
            if name in seen:
                raise BadRow(f"an earlier photo is also called {name}")
            seen.add(name)
            values = {field: [row[name] for name in names] for field, names in chosen.items()}
            values = {**({"split": [split]} if split else {}), **values, "file": [f"{split}/{name}".lstrip("/")]}
            photos.add(build_imported_row(place, values), content)
        except BadRow as reason:
            collector.add_bad_row(place, reason)


def _read_photo(stored: Any, index: int, folders: ImageFolders) -> tuple[str, bytes]:
    """Return the file name and the bytes of an image. Raises BadRow if the image is missing or lies outside of ``folders``.

    ``stored`` is a cell of the image column, with ``bytes`` or a ``path``. An image without a path is named after ``index``,
    the index of the row.
    """
    if not isinstance(stored, dict) or not (stored.get("bytes") or stored.get("path")):
        raise BadRow("no image")
    path = str(stored.get("path") or "")
    try:
        content: bytes = stored.get("bytes") or read_image_bytes(folders.find_image(path))
    except BadImage as fault:
        raise BadRow(fault) from None
    if len(content) > MAX_PHOTO_BYTES:
        raise BadRow(f"the image has {len(content)} bytes, more than {MAX_PHOTO_BYTES}")
    suffix = next((suffix for magic, suffix in _SUFFIX_BY_MAGIC.items() if content.startswith(magic)), "")
    return (Path(path).name if path else f"{index:08d}{suffix}"), content
