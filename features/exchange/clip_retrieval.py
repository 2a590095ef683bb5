"""The folder that clip-retrieval writes, vectors of images and texts beside their metadata, as a data set with two caches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.rows import Ids, Rows
from vse.features.cache.shards import check_cache_out
from vse.features.exchange.arrays import open_array, row_hashes, write_imported
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.sources import check_dataset_name
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import WatchedFile
from vse.pipeline.imports.rows import (
    BadRow,
    ImportedRow,
    ImportSettings,
    RowCollector,
    image_file,
    write_imported_data,
)
from vse.pipeline.imports.tables import build_row, photo_checker, table_rows
from vse.pipeline.progress import progress_bar

METADATA = (".parquet", ".jsonl", ".csv")
_PART = re.compile(r"(img_emb|text_emb|metadata)_([0-9]+)")
_Place = tuple[int, int]  # of a vector: its part, and its row there


@dataclass(frozen=True)
class _Part:
    """One part of the folder: row k of ``images`` and of ``texts`` belongs to row k of the table ``metadata``."""

    images: NDArray[Any]
    texts: NDArray[Any]
    files: tuple[Path, Path]
    metadata: Path


def is_clip_folder(folder: Path) -> bool:
    """Whether a folder has vectors of images as clip-retrieval writes them."""
    return any(folder.glob("img_emb_*.npy")) or any(folder.glob("img_emb/img_emb_*.npy"))


def import_clip(folder: Path, settings: ImportSettings, out_features: Path, images: Path | None = None) -> tuple[Path, Path]:
    """Write ``dataset.json`` and the caches of images and captions of a folder of clip-retrieval; returns the two caches.

    ``img_emb_N.npy``, ``text_emb_N.npy`` and ``metadata_N.parquet`` (or ``.jsonl``, ``.csv``) lie in it, or in the folders
    ``img_emb``, ``text_emb`` and ``metadata``; row k is the same pair in all three. Rows of one image have the same vector.
    ``images`` is the folder of the photos; without it the data set has none. The caches are ``<name>_img_emb.h5`` and
    ``<name>_text_emb.h5`` in ``out_features``.
    """
    check_dataset_name(settings.name)
    parts = _parts(folder)
    inputs = [path for part in parts for path in (*part.files, part.metadata)]
    for feature in ("img_emb", "text_emb"):
        check_cache_out(out_features / f"{settings.name}_{feature}.h5", settings.name, feature, inputs)
    gathered = RowCollector(settings, (lambda file: None) if images is None else photo_checker(images))
    where: dict[str, list[_Place]] = {}
    for number in progress_bar(range(len(parts)), desc=f"read {folder.name}", unit="part"):
        _add_part(number, parts, gathered, where, settings, images)
    content = gathered.content(format="clip-retrieval", files=[part.metadata.name for part in parts])
    if images is None:
        content = {**content, "pictures": False}
    file = write_imported_data(content, settings, images, inputs)
    order = [places for name in gathered.files() for places in [where[name]]]
    dataset = load_dataset_file(file)

    def write(kind: Literal["image", "text"], name: str, ids: list[int], places: list[_Place]) -> Path:
        arrays = [part.images if kind == "image" else part.texts for part in parts]
        watched = [WatchedFile(part.files[kind == "text"]) for part in parts]
        wanted = np.asarray(ids, np.int64)
        out = out_features / f"{settings.name}_{name}.h5"
        layout = {"layout": "clip-retrieval"}
        return write_imported(out, dataset, kind, layout, watched, wanted, _rows(arrays, wanted, places), arrays[0][:1].nbytes)

    image_ids = [image.imgid for image in dataset.images]
    caption_ids = [caption.sentid for image in dataset.images for caption in image.captions]
    return (
        write("image", "img_emb", image_ids, [places[0] for places in order]),
        write("text", "text_emb", caption_ids, [place for places in order for place in places]),
    )


def _rows(arrays: list[NDArray[Any]], ids: Ids, places: list[_Place]) -> Callable[[slice], Rows]:
    """The rows of a part of the ids, whose vectors lie at ``places`` of the arrays."""

    def rows(part: slice) -> Rows:
        values = np.stack([arrays[number][row] for number, row in places[part]])
        return Rows(ids[part], values, row_hashes(values))

    return rows


def _parts(folder: Path) -> list[_Part]:
    """The parts of a folder in the order of their numbers; :class:`UserError` if one lacks a file or has a vector too few."""
    files: dict[tuple[int, str], Path] = {}
    for place in (folder, folder / "img_emb", folder / "text_emb", folder / "metadata"):
        for path in sorted(place.iterdir() if place.is_dir() else ()):
            match = _PART.fullmatch(path.stem)
            if match is None or path.suffix not in (METADATA if match[1] == "metadata" else (".npy",)):
                continue
            key = int(match[2]), match[1]
            if key in files:
                raise UserError(f"{files[key]} and {path} are the same part; move one away")
            files[key] = path
    parts = []
    for number in sorted({number for number, _ in files}):
        lacking = [name for name in ("img_emb", "text_emb", "metadata") if (number, name) not in files]
        if lacking:
            raise UserError(f"{folder}: part {number} has no {lacking[0]}_{number}, and vectors on both sides are read")
        vectors = files[number, "img_emb"], files[number, "text_emb"]
        images, texts = (open_array(path) for path in vectors)
        if images.ndim != 2 or texts.ndim != 2 or len(images) != len(texts):
            raise UserError(f"{vectors[1]}: {texts.shape} does not fit {vectors[0].name}, which is {images.shape}")
        parts.append(_Part(images, texts, vectors, files[number, "metadata"]))
    for part in parts:
        for now, first, path in zip((part.images, part.texts), (parts[0].images, parts[0].texts), part.files, strict=True):
            if (now.shape[1], now.dtype) != (first.shape[1], first.dtype):
                first_has = f"{first.shape[1]} {first.dtype} in the first part"
                raise UserError(f"{path}: {now.shape[1]} {now.dtype} a row, and {first_has}")
    if not parts:
        raise UserError(f"{folder}: no img_emb_0.npy, text_emb_0.npy and metadata_0.parquet in it")
    return parts


def _add_part(
    number: int,
    parts: list[_Part],
    gathered: RowCollector,
    where: dict[str, list[_Place]],
    settings: ImportSettings,
    images: Path | None,
) -> None:
    """Take the rows of a part; ``where`` gets the places of the vectors of each image's captions."""
    part, refused = parts[number], 0

    def refuse(place: str, reason: object) -> None:
        nonlocal refused
        refused += 1
        gathered.refuse(place, reason)

    taken = -1
    for taken, (place, values) in enumerate(table_rows(part.metadata, settings, refuse)):
        row_number = taken + refused
        try:
            if row_number >= len(part.images):
                raise BadRow(f"{part.files[0].name} has no row {row_number}")
            row = _with_file(build_row(place, values), images)
            _check_vectors(row, part, row_number, parts, where)
        except BadRow as reason:
            gathered.refuse(place, reason)
            continue
        file = gathered.add(row)
        if file is not None:
            where.setdefault(file, []).append((number, row_number))
    n_rows = taken + 1 + refused
    if n_rows != len(part.images):
        raise UserError(f"{part.metadata}: {n_rows} rows for the {len(part.images)} of {part.files[0].name}")


def _with_file(row: ImportedRow, images: Path | None) -> ImportedRow:
    """The row with the path of its image in the folder of photos, or below the root if there is no such folder."""
    path = Path(row.file)
    if images is not None and path.is_absolute():
        if not path.is_relative_to(images.absolute()):
            raise BadRow(f"{path} is not in {images}")
        path = path.relative_to(images.absolute())
    file = image_file(path.as_posix().lstrip("/"))
    return ImportedRow(**{**vars(row), "file": file})


def _check_vectors(row: ImportedRow, part: _Part, number: int, parts: list[_Part], where: dict[str, list[_Place]]) -> None:
    if len(row.captions) != 1:
        raise BadRow(f"{len(row.captions)} captions for one vector")
    for vectors, path in zip((part.images, part.texts), part.files, strict=True):
        if not np.isfinite(vectors[number]).all():
            raise BadRow(f"its vector in {path.name} is not finite")
    if row.file in where:
        other, at = where[row.file][0]
        if not np.array_equal(parts[other].images[at], part.images[number]):
            raise BadRow(f"{row.file} has another vector than in row {at} of {parts[other].files[0].name}")
