"""A data set of Hugging Face, which its library ``datasets`` saved in a folder or finds by name, as one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vse.pipeline.errors import UserError, import_extra
from vse.pipeline.files.columnar import check_arrow, check_compressed_file
from vse.pipeline.files.images import BadImage, read_image_bytes
from vse.pipeline.files.inputs import error_reason, is_path, wrap_read_errors
from vse.pipeline.files.writing import lock_for_writing, read_json
from vse.pipeline.imports.photos import MOST_BYTES, ImageFolders, UnpackedPhotos
from vse.pipeline.imports.rows import BadRow, GatheredRows, ImportSettings, check_name, write_imported_data
from vse.pipeline.imports.tables import columns_read, row_of
from vse.pipeline.progress import progress_bar

_ENDINGS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp"}


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of the library wrote a folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def import_hugging_face(folder: Path, settings: ImportSettings, images: Path | None = None) -> Path:
    """Write ``dataset.json`` and the photos of a data set; returns its path.

    ``folder`` is what ``save_to_disk`` wrote or else what ``load_dataset`` takes: another folder of a data set, or a name on
    the hub, ``OWNER/NAME`` or ``OWNER/NAME:CONFIGURATION``, which is downloaded into the library's cache.
    One column holds images, as files or as bytes, and another one a caption or a list of them. Its splits stay, where their
    names are ours; of a data set without splits a column may give them. Nothing of it is run. An import that was stopped goes
    on where it was. A row whose image is a path is taken if the file lies in ``folder``, in the folder ``images`` or where the
    library unpacked the data set. :class:`UserError` if the library is not installed.
    """
    check_name(settings.name)
    library = import_extra("datasets", f"{folder}: a Hugging Face data set", "datasets")
    loaded = _loaded(library, folder)
    by_split = loaded if isinstance(loaded, library.DatasetDict) else {"": loaded}
    gathered = GatheredRows(settings)
    folders = ImageFolders(_folders(library, folder, images))
    with lock_for_writing(settings.out, folder=True):
        photos = UnpackedPhotos(settings.out, gathered)
        for split, rows in by_split.items():
            _add_split(folder, folders, str(split), rows, library.Image, gathered, photos, settings.columns)
        content = gathered.content(format="hugging-face", files=[folder.name])
        return write_imported_data(content, settings, None, [])


def _check_files(folder: Path) -> None:
    """Raise UserError if a file in the folder, or one that a saved data set names, decodes to more bytes than it may."""
    for path in folder.rglob("*"):
        if path.is_file():
            check_compressed_file(path)
    for state in folder.rglob("state.json"):
        content = read_json(state)
        listed = content.get("_data_files") if isinstance(content, dict) else None
        for entry in listed or ():
            name = entry.get("filename") if isinstance(entry, dict) else None
            if isinstance(name, str) and is_path(name):
                check_arrow(state.parent / name)


def _folders(library: Any, source: Path, images: Path | None) -> list[Path]:
    """Return the folders that images may lie in: the data set's, that of --images, and the library's own copies."""
    folders = [folder for folder in (source if source.exists() else None, images) if folder is not None]
    if not is_saved_dataset(source):
        folders += [Path(library.config.DOWNLOADED_DATASETS_PATH), Path(library.config.EXTRACTED_DATASETS_PATH)]
    if not source.exists():
        hub = import_extra("huggingface_hub.constants", "a data set of the hub", "datasets")
        owner_and_name = str(source).partition(":")[0].replace("/", "--")
        folders.append(Path(hub.HF_HUB_CACHE, f"datasets--{owner_and_name}"))
    return folders


def _loaded(library: Any, source: Path) -> Any:
    """The data set, opened by the library; nothing of it is run."""
    if source.is_dir():
        _check_files(source)
    if is_saved_dataset(source):
        with wrap_read_errors(source, "a data set that the library 'datasets' saved"):
            return library.load_from_disk(str(source))
    name, _, configuration = str(source).partition(":")
    try:
        return library.load_dataset(name, configuration or None)
    except Exception as error:  # of the network, the hub and many formats
        hint = "" if source.exists() else "; where there is no network, import a folder that save_to_disk wrote elsewhere"
        where = "as a data set of Hugging Face" if source.exists() else "from the Hugging Face hub"
        raise UserError(f"{source}: cannot be loaded {where} ({error_reason(error)}){hint}") from None


def _add_split(
    folder: Path,
    folders: ImageFolders,
    split: str,
    rows: Any,
    image_type: Any,
    gathered: GatheredRows,
    photos: UnpackedPhotos,
    columns: Mapping[str, tuple[str, ...]],
) -> None:
    """Take the rows of one split; the images are taken as they are stored, undecoded."""
    holding = [name for name, kind in rows.features.items() if isinstance(kind, image_type)]
    (image,) = columns.get("file", tuple(holding[:1]) or ("",))
    if image not in holding:
        raise UserError(f"{folder}: no column {image!r} of images; those are {', '.join(holding) or 'none'}")
    chosen = columns_read(folder, rows.features, {**columns, "file": (image,)})
    seen: set[str] = set()
    stored = rows.cast_column(image, image_type(decode=False))
    for number, row in enumerate(progress_bar(stored, desc=f"read {split or folder.name}", total=len(rows), unit="row")):
        place = f"{folder}: {split} row {number}".replace(":  ", ": ")
        try:
            name, content = _photo(row[image], number, folders)
            if name in seen:
                name = f"{number:08d}_{name}"
            photos.once(seen, name)
            said = {what: [row[name] for name in names] for what, names in chosen.items()}
            said = {**({"split": [split]} if split else {}), **said, "file": [f"{split}/{name}".lstrip("/")]}
            photos.add(row_of(place, said), content)
        except BadRow as reason:
            gathered.refuse(place, reason)


def _photo(stored: Any, number: int, folders: ImageFolders) -> tuple[str, bytes]:
    """Return name and bytes of a row's image. Raises BadRow if it has none, or only a path that leads elsewhere."""
    if not isinstance(stored, dict) or not (stored.get("bytes") or stored.get("path")):
        raise BadRow("no image")
    path = str(stored.get("path") or "")
    try:
        content: bytes = stored.get("bytes") or read_image_bytes(folders.find(path))
    except BadImage as fault:
        raise BadRow(fault) from None
    if len(content) > MOST_BYTES:
        raise BadRow(f"an image of {len(content)} bytes, more than {MOST_BYTES}")
    end = next((end for start, end in _ENDINGS.items() if content.startswith(start)), "")
    return (Path(path).name if path else f"{number:08d}{end}"), content
