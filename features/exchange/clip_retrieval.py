"""Import a folder of the program clip-retrieval as a data set with two caches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.rows import FeatureRows, Ids
from vse.features.cache.shards import check_cache_output
from vse.features.exchange.arrays import hash_rows, map_npy_file, write_imported_cache
from vse.pipeline.dataset.columns import caption_ids, image_ids
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.preparation import check_dataset_name
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import WatchedFile
from vse.pipeline.imports.rows import (
    BadRow,
    ImportedRow,
    ImportSettings,
    RowCollector,
    normalize_image_path,
    write_imported_data,
)
from vse.pipeline.imports.tables import build_photo_checker, build_row, read_table_rows
from vse.pipeline.progress import progress_bar

_CACHED_PATHS = 10_000  # the rows of an image follow each other
_ROWS_PER_CHECK = 4096
METADATA_SUFFIXES = (".parquet", ".jsonl", ".csv")
_PART_NAME_PATTERN = re.compile(r"(img_emb|text_emb|metadata)_([0-9]+)")
_VectorLocation = tuple[int, int]  # place of a vector: index of a part, and row in this part


@dataclass(frozen=True)
class _FolderPart:
    """One part of the folder: row k of both arrays and of the table ``metadata_file`` is one pair of image and text.

    vector_files : paths of the arrays ``image_vectors`` and ``text_vectors``
    """

    image_vectors: NDArray[Any]
    text_vectors: NDArray[Any]
    vector_files: tuple[Path, Path]
    metadata_file: Path


def is_clip_folder(folder: Path) -> bool:
    """Return whether a folder holds image vectors in the layout of clip-retrieval."""
    return any(folder.glob("img_emb_*.npy")) or any(folder.glob("img_emb/img_emb_*.npy"))


def import_clip(folder: Path, settings: ImportSettings, out_features: Path, images: Path | None = None) -> tuple[Path, Path]:
    """Import a folder of clip-retrieval: write ``dataset.json`` and the caches of images and captions; return the caches.

    The folder, or its subfolders ``img_emb``, ``text_emb`` and ``metadata``, hold the files ``img_emb_N.npy``,
    ``text_emb_N.npy`` and ``metadata_N.parquet`` (or ``.jsonl``, ``.csv``). Row k of these three files describes the same
    pair. Rows of the same image must have the same vector. ``images`` is the folder of the photos; None: the data set has no
    photos. The caches are ``<name>_img_emb.h5`` and ``<name>_text_emb.h5`` in ``out_features``.
    """
    check_dataset_name(settings.name)
    parts = _open_parts(folder)
    inputs = [path for part in parts for path in (*part.vector_files, part.metadata_file)]
    for feature in ("img_emb", "text_emb"):
        check_cache_output(out_features / f"{settings.name}_{feature}.h5", settings.name, feature, inputs)
    collector = RowCollector(settings, (lambda file: None) if images is None else build_photo_checker(images))
    places_by_file: dict[str, list[_VectorLocation]] = {}
    n_rows = sum(len(part.image_vectors) for part in parts)
    with progress_bar(total=n_rows, desc=f"read {folder.name}", unit="row") as bar:
        for index in range(len(parts)):
            _add_part(index, parts, collector, places_by_file, settings, images, bar)
    content = collector.build_dataset_content(
        images, format="clip-retrieval", files=[part.metadata_file.name for part in parts]
    )
    if images is None:
        content = {**content, "pictures": False}
    file = write_imported_data(content, settings, images, inputs)
    places = [places_by_file[name] for name in collector.list_image_files()]
    del content, collector, places_by_file  # the data set is loaded next
    dataset = load_dataset_file(file)

    def write(kind: Literal["image", "text"], name: str, ids: Ids, row_places: list[_VectorLocation]) -> Path:
        arrays = [part.image_vectors if kind == "image" else part.text_vectors for part in parts]
        watched = [WatchedFile(part.vector_files[kind == "text"]) for part in parts]
        rows = _build_row_reader(arrays, ids, row_places)
        out = out_features / f"{settings.name}_{name}.h5"
        return write_imported_cache(out, dataset, kind, {"layout": "clip-retrieval"}, watched, ids, rows, arrays[0][:1].nbytes)

    return (
        write("image", "img_emb", image_ids(dataset.images), [image_places[0] for image_places in places]),
        write("text", "text_emb", caption_ids(dataset.images), [place for image_places in places for place in image_places]),
    )


def _build_row_reader(arrays: list[NDArray[Any]], ids: Ids, places: list[_VectorLocation]) -> Callable[[slice], FeatureRows]:
    """Return a function from a slice of ``ids`` to the rows of these ids; the vector of ``ids[k]`` is at ``places[k]``."""

    def rows(part: slice) -> FeatureRows:
        values = np.stack([arrays[index][row] for index, row in places[part]])
        return FeatureRows(ids[part], values, hash_rows(values))

    return rows


def _open_parts(folder: Path) -> list[_FolderPart]:
    """Return the parts of a folder in order. Raises UserError if a part lacks a file, or if shapes or types differ."""
    files: dict[tuple[int, str], Path] = {}
    for subfolder in (folder, folder / "img_emb", folder / "text_emb", folder / "metadata"):
        for path in sorted(subfolder.iterdir() if subfolder.is_dir() else ()):
            match = _PART_NAME_PATTERN.fullmatch(path.stem)
            if match is None or path.suffix not in (METADATA_SUFFIXES if match[1] == "metadata" else (".npy",)):
                continue
            key = int(match[2]), match[1]
            if key in files:
                raise UserError(f"{files[key]} and {path} are the same part; move one away")
            files[key] = path
    parts = []
    for number in sorted({number for number, _ in files}):
        missing = [name for name in ("img_emb", "text_emb", "metadata") if (number, name) not in files]
        if missing:
            raise UserError(f"{folder}: part {number} has no {missing[0]}_{number}; vectors of images and texts are needed")
        vectors = files[number, "img_emb"], files[number, "text_emb"]
        images, texts = (map_npy_file(path).view(np.ndarray) for path in vectors)  # rows of a memmap are slow to make
        if images.ndim != 2 or texts.ndim != 2 or len(images) != len(texts):
            raise UserError(f"{vectors[1]}: {texts.shape} does not fit {vectors[0].name}, which is {images.shape}")
        parts.append(_FolderPart(images, texts, vectors, files[number, "metadata"]))
    for part in parts:
        for array, first, path in zip(
            (part.image_vectors, part.text_vectors),
            (parts[0].image_vectors, parts[0].text_vectors),
            part.vector_files,
            strict=True,
        ):
            if (array.shape[1], array.dtype) != (first.shape[1], first.dtype):
                in_first = f"{first.shape[1]} {first.dtype} in the first part"
                raise UserError(f"{path}: {array.shape[1]} {array.dtype} per row, but {in_first}")
    if not parts:
        raise UserError(f"{folder}: no img_emb_0.npy, text_emb_0.npy and metadata_0.parquet in it")
    return parts


def _add_part(
    index: int,
    parts: list[_FolderPart],
    collector: RowCollector,
    places_by_file: dict[str, list[_VectorLocation]],
    settings: ImportSettings,
    images: Path | None,
    bar: Any,
) -> None:
    """Add the rows of part ``index`` to ``collector``, and the places of the vectors to ``places_by_file``."""
    part, n_bad_rows = parts[index], 0
    images_folder = None if images is None else images.absolute()
    finite = [_find_finite_rows(vectors) for vectors in (part.image_vectors, part.text_vectors)]

    def on_bad_row(place: str, reason: object) -> None:
        nonlocal n_bad_rows
        n_bad_rows += 1
        collector.add_bad_row(place, reason)

    n_read = 0
    for n_read, (place, values) in enumerate(read_table_rows(part.metadata_file, settings, on_bad_row), 1):
        row_index = n_read - 1 + n_bad_rows
        bar.update()
        try:
            if row_index >= len(part.image_vectors):
                raise BadRow(f"{part.vector_files[0].name} has no row {row_index}")
            row = build_row(place, values)
            row = replace(row, file=_make_relative(row.file, images_folder))
            for is_finite, path in zip(finite, part.vector_files, strict=True):
                if not is_finite[row_index]:
                    raise BadRow(f"its vector in {path.name} is not finite")
            _check_vectors(row, part, row_index, parts, places_by_file)
        except BadRow as reason:
            collector.add_bad_row(place, reason)
            continue
        file = collector.add(row)
        if file is not None:
            places_by_file.setdefault(file, []).append((index, row_index))
    n_rows = n_read + n_bad_rows
    if n_rows != len(part.image_vectors):
        raise UserError(f"{part.metadata_file}: {n_rows} rows, but {part.vector_files[0].name} has {len(part.image_vectors)}")


def _find_finite_rows(vectors: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each vector whether all its numbers are finite."""
    starts = range(0, len(vectors), _ROWS_PER_CHECK)
    found = [np.isfinite(vectors[start : start + _ROWS_PER_CHECK]).all(1) for start in starts]
    return np.concatenate(found) if found else np.empty(0, bool)


@lru_cache(maxsize=_CACHED_PATHS)
def _make_relative(file: str, images_folder: Path | None) -> str:
    """Return an image's path relative to an absolute folder or, if the folder is None, without a slash at the start."""
    path = Path(file)
    if images_folder is not None and path.is_absolute():
        if not path.is_relative_to(images_folder):
            raise BadRow(f"{path} is not in {images_folder}")
        path = path.relative_to(images_folder)
    return normalize_image_path(path.as_posix().lstrip("/"))


def _check_vectors(
    row: ImportedRow,
    part: _FolderPart,
    row_index: int,
    parts: list[_FolderPart],
    places_by_file: dict[str, list[_VectorLocation]],
) -> None:
    """Check that a row has one caption, and that the image's vector is that of earlier rows. Raises BadRow."""
    if len(row.captions) != 1:
        raise BadRow(f"{len(row.captions)} captions for one vector")
    if row.file in places_by_file:
        other, other_row = places_by_file[row.file][0]
        if not np.array_equal(parts[other].image_vectors[other_row], part.image_vectors[row_index]):
            raise BadRow(f"{row.file} has another vector than in row {other_row} of {parts[other].vector_files[0].name}")
