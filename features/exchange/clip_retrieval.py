"""Import a folder that the program clip-retrieval wrote, as a data set with caches of its images and captions."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from vse.features.cache.rows import FeatureRows, Ids
from vse.features.cache.shards import check_cache_output, read_manifest, shards_folder
from vse.features.exchange.arrays import gather_rows, hash_rows, map_npy_file, release_mapped_memory, write_imported_cache
from vse.pipeline.dataset.captions import find_tokeniser
from vse.pipeline.dataset.dataset import load_dataset_file, remember_checks
from vse.pipeline.dataset.file_formats import choose_dataset_format, write_dataset_from_tables
from vse.pipeline.dataset.images import pause_garbage_collection
from vse.pipeline.dataset.preparation import check_dataset_name
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import FileState, WatchedFile
from vse.pipeline.files.writing import lock_for_writing, sha256_json
from vse.pipeline.imports.resumable_import import (
    CaptionOrigins,
    CaptionRow,
    ImportedPart,
    RowFault,
    RowsByImage,
    find_imported_part,
    is_import_finished,
    release_unused_memory,
    write_import_record,
    write_imported_part,
)
from vse.pipeline.imports.rows import (
    BadRow,
    BadRowList,
    ImportSettings,
    build_import_fields,
    normalize_image_path,
    parse_split,
    sample_missing_splits,
)
from vse.pipeline.imports.tables import build_photo_checker, read_imported_rows
from vse.pipeline.progress import progress_bar

log = logging.getLogger(__name__)
_IMPORT_RULES_VERSION = 1  # increase it if the checks of rows or the tokenisers change
_MAX_CACHED_PATHS = 10_000  # size of a cache by image path; the rows of an image are usually next to each other
_ROWS_PER_CHECK, _ROWS_PER_BLOCK = 4096, 16_384
METADATA_SUFFIXES = (".parquet", ".jsonl", ".csv")
_PART_NAME_PATTERN = re.compile(r"(img_emb|text_emb|metadata)_([0-9]+)")


@dataclass(frozen=True)
class _FolderPart:
    """One part of a clip-retrieval folder: ``img_emb_N.npy``, ``text_emb_N.npy`` and ``metadata_N.*`` with the same number N.

    Row k of the three files describes the same pair of image and caption.

    vector_files : paths of the arrays ``image_vectors`` and ``text_vectors``
    """

    image_vectors: NDArray[Any]
    text_vectors: NDArray[Any]
    vector_files: tuple[Path, Path]
    metadata_file: Path

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.vector_files, self.metadata_file)


def is_clip_folder(folder: Path) -> bool:
    """Return whether a folder holds image vectors in the layout of clip-retrieval."""
    return any(folder.glob("img_emb_*.npy")) or any(folder.glob("img_emb/img_emb_*.npy"))


def import_clip_folder(
    folder: Path, settings: ImportSettings, out_features: Path, images: Path | None = None
) -> tuple[Path, ...]:
    """Import a folder of clip-retrieval: write ``dataset.json`` and the caches of images and captions; return their paths.

    The folder, or its subfolders ``img_emb``, ``text_emb`` and ``metadata``, hold the files ``img_emb_N.npy``,
    ``text_emb_N.npy`` and ``metadata_N.parquet`` (or ``.jsonl``, ``.csv``). Row k of these three files describes the same
    pair. Rows of the same image must have the same vector. ``images`` is the folder of the photos; None: the data set has no
    photos. The caches are ``<name>_img_emb.h5`` and ``<name>_text_emb.h5`` in ``out_features``.
    """
    check_dataset_name(settings.name)
    parts = _open_parts(folder)
    inputs = [path for part in parts for path in part.files]
    for feature in ("img_emb", "text_emb"):
        check_cache_output(out_features / f"{settings.name}_{feature}.h5", settings.name, feature, inputs)
    parts_folder = settings.out / ".import.parts.tmp"
    chosen = [settings.name, settings.val, settings.test, settings.seed, settings.skip_bad]
    keys = [_hash_part(part, settings, images) for part in parts]
    key = sha256_json([chosen, str(out_features.absolute()), keys])
    caches = tuple(out_features / f"{settings.name}_{feature}.h5" for feature in ("img_emb", "text_emb"))
    if images is None and is_import_finished(settings.out, key):
        log.info("%s: this import has finished before, and its files are unchanged", settings.out)
        return caches
    try:
        with lock_for_writing(settings.out, folder=True), pause_garbage_collection():
            imported_parts = _import_parts(parts, parts_folder, settings, images)
            file, origins = _write_joined_dataset(parts, imported_parts, settings, images)
            _write_caches(parts, file, origins, caches)
            shards = [(shards_folder(one), entry) for one in caches for entry in read_manifest(one)["shards"]]
            hashed = {folder / entry["file"]: entry["sha256"] for folder, entry in shards}
            write_import_record(settings.out, key, [file, *caches], hashed)
    except UserError:
        shutil.rmtree(parts_folder, ignore_errors=True)
        raise
    shutil.rmtree(parts_folder, ignore_errors=True)
    return caches


def _import_parts(
    parts: list[_FolderPart], parts_folder: Path, settings: ImportSettings, images: Path | None
) -> list[ImportedPart]:
    """Read the metadata of each part of a folder, store the part's rows in a file in ``parts_folder``, and return the files.

    Parts that an interrupted import has already stored are not read again. ``images`` is the folder of photos; None: no
    photos.
    """
    imported_parts = []
    with progress_bar(total=sum(len(part.image_vectors) for part in parts), desc="read", unit="row") as bar:
        for index, part in enumerate(parts):
            path, key = parts_folder / f"part-{index:05d}.parquet", _hash_part(part, settings, images)
            stored_file = find_imported_part(path, key)
            if stored_file is not None:
                bar.update(len(part.image_vectors))
            bad_rows: list[RowFault] = []
            imported_parts.append(
                stored_file or write_imported_part(path, key, _read_rows(part, settings, images, bad_rows, bar), bad_rows)
            )
    return imported_parts


def _hash_part(part: _FolderPart, settings: ImportSettings, images: Path | None) -> str:
    """Return a hash of everything that determines the rows of a part: the settings, and the sizes and times of its files."""
    states = [FileState.from_stat(path.stat()) for path in part.files]
    chosen = settings.tokeniser, settings.columns, settings.quoting, settings.encoding, images and str(images.absolute())
    files = [(str(path), state.size, state.mtime_ns, state.inode) for path, state in zip(part.files, states, strict=True)]
    return sha256_json([_IMPORT_RULES_VERSION, chosen, files])


def _write_joined_dataset(
    parts: list[_FolderPart], imported_parts: list[ImportedPart], settings: ImportSettings, images: Path | None
) -> tuple[Path, CaptionOrigins]:
    """Write one data set of all parts of a folder; return the path of its file, and the origin of each caption.

    ``imported_parts`` hold the rows of ``parts``. An origin is the part and the row from which a caption comes.
    """
    bad_rows = BadRowList(settings.skip_bad)
    joined = RowsByImage(
        imported_parts,
        bad_rows,
        lambda part, row: f"has another vector than in row {row} of {parts[part].vector_files[0].name}",
    )
    n_rows = sum(len(part.image_vectors) for part in parts)
    bad_rows.raise_or_write_list(settings.out / "import.failures.jsonl", n_rows)
    if not joined.files:
        raise UserError(f"all {n_rows} rows lack an image with a caption")
    sampled_splits = sample_missing_splits(settings, joined.files, joined.has_splits, images)
    record = {"format": "clip-retrieval", "files": [part.metadata_file.name for part in parts]}
    head = build_import_fields(settings, joined.has_splits, len(bad_rows.places_and_faults), record)
    if images is None:
        head = {**head, "pictures": False}
    inputs = [path for part in parts for path in part.files]
    form = choose_dataset_format(len(joined.origins.sentids))
    file = write_dataset_from_tables(head, lambda: joined.build_tables(sampled_splits), settings.out, images, inputs, form)
    counts = ", ".join(f"{count} {split}" for split, count in joined.count_images_per_split(sampled_splits).items())
    log.info("%s: %d images (%s) with %d captions", file, len(joined.files), counts, len(joined.origins.sentids))
    return file, joined.origins


def _write_caches(parts: list[_FolderPart], file: Path, origins: CaptionOrigins, caches: tuple[Path, ...]) -> None:
    """Write the image cache and the caption cache to the two paths ``caches``.

    ``file`` is the ``dataset.json`` to which they belong. ``origins`` states the part and row of each image and caption.
    """
    dataset = load_dataset_file(file)
    release_unused_memory()
    first_captions = origins.caption_ends - np.diff(origins.caption_ends, prepend=0)
    all_captions = np.arange(len(origins.sentids))
    kinds: tuple[tuple[Literal["image", "text"], Ids, Ids], ...] = (
        ("image", origins.imgids, first_captions),
        ("text", origins.sentids, all_captions),
    )
    for out, (kind, ids, captions) in zip(caches, kinds, strict=True):
        arrays = [part.image_vectors if kind == "image" else part.text_vectors for part in parts]
        watched = [WatchedFile(part.vector_files[kind == "text"]) for part in parts]
        read_rows = _build_row_reader(arrays, ids, origins.part_index[captions], origins.row_index[captions])
        write_imported_cache(out, dataset, kind, {"layout": "clip-retrieval"}, watched, ids, read_rows, arrays[0][:1].nbytes)
    remember_checks(dataset)


def _build_row_reader(
    arrays: list[NDArray[Any]], ids: Ids, parts: NDArray[np.int64], rows: NDArray[np.int64]
) -> Callable[[slice], FeatureRows]:
    """Return a function that reads the rows of a slice of ``ids``. ``ids[k]`` has the vector ``arrays[parts[k]][rows[k]]``."""

    def read_rows(row_slice: slice) -> FeatureRows:
        values = gather_rows(arrays, parts[row_slice], rows[row_slice])
        return FeatureRows(ids[row_slice], values, hash_rows(values))

    return read_rows


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


def _read_rows(
    part: _FolderPart, settings: ImportSettings, images: Path | None, bad_rows: list[RowFault], bar: Any
) -> Iterator[list[CaptionRow]]:
    """Yield the rows of a part in blocks, and append invalid rows to ``bad_rows``.

    Contradictions between rows are found later, when the parts are joined.
    """
    rows: list[CaptionRow] = []
    images_folder = None if images is None else images.absolute()
    tokenise = find_tokeniser(settings.tokeniser, "--tokeniser")
    check_photo = lru_cache(_MAX_CACHED_PATHS)((lambda file: None) if images is None else _build_photo_checker(images))
    digests = _hash_image_vectors(part.image_vectors)
    fault_of_vector: dict[int, str] = {}
    for path, vectors in reversed([*zip(part.vector_files, (part.image_vectors, part.text_vectors), strict=True)]):
        fault_of_vector |= dict.fromkeys(_find_infinite_rows(vectors), f"its vector in {path.name} is not finite")
    n_read = 0

    def add_bad_row(place: str, reason: object) -> None:
        nonlocal n_read
        bad_rows.append((n_read, place, str(reason)))
        n_read += 1

    for row in read_imported_rows(part.metadata_file, settings, add_bad_row):
        index = n_read
        try:
            if index >= len(part.image_vectors):
                raise BadRow(f"{part.vector_files[0].name} has no row {index}")
            file, split = _make_path_relative(row.file, images_folder), parse_split(row.split)
            if index in fault_of_vector:
                raise BadRow(fault_of_vector[index])
            if len(row.captions) != 1:
                raise BadRow(f"{len(row.captions)} captions for one vector")
            raw, tokens = row.captions[0].strip(), tokenise(row.captions[0])
            if not tokens:
                raise BadRow(f"the caption {raw[:50]!r} has no word" if raw else "the caption is empty")
            if (fault := check_photo(file)) is not None:
                raise BadRow(fault)
            if len(row.sentids) > 1:
                raise BadRow(f"{len(row.sentids)} ids for 1 captions")
        except BadRow as reason:
            add_bad_row(row.row_location, reason)
            continue
        n_read += 1
        sentid = row.sentids[0] if row.sentids else None
        place, digest = row.row_location, digests[index]
        rows.append(CaptionRow(index, place, file, split, row.imgid, row.cocoid, sentid, raw, tokens, digest))
        if len(rows) == _ROWS_PER_BLOCK:
            yield rows
            bar.update(len(rows))
            rows = []
    bar.update(len(rows))
    if n_read != len(part.image_vectors):
        raise UserError(f"{part.metadata_file}: {n_read} rows, but {part.vector_files[0].name} has {len(part.image_vectors)}")
    if rows:
        yield rows


def _build_photo_checker(images: Path) -> Callable[[str], str | None]:
    """Return a function from a photo's file name to a description of its fault, or to None if the photo can be used."""
    check = build_photo_checker(images)

    def find_fault(file: str) -> str | None:
        try:
            check(file)
        except BadRow as fault:
            return str(fault)
        return None

    return find_fault


def _hash_image_vectors(vectors: NDArray[Any]) -> list[bytes]:
    digests = []
    for _, block in _iterate_blocks(vectors):
        has_negative_zero = (block.view(f"u{block.itemsize}") == 1 << (8 * block.itemsize - 1)).any()
        values = block + block.dtype.type(0) if has_negative_zero else block  # -0.0 becomes 0.0
        digests += [xxhash.xxh3_128_digest(row.data) for row in values]
    return digests


def _find_infinite_rows(vectors: NDArray[Any]) -> list[int]:
    """Return the indices of the vectors with a number that is not finite."""
    return [
        int(row) for start, block in _iterate_blocks(vectors) for row in start + np.flatnonzero(~np.isfinite(block).all(1))
    ]


def _iterate_blocks(vectors: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the first index and the vectors of each block. The pages of a mapped file do not stay in memory."""
    for start in range(0, len(vectors), _ROWS_PER_CHECK):
        yield start, vectors[start : start + _ROWS_PER_CHECK]
        release_mapped_memory([vectors])


@lru_cache(maxsize=_MAX_CACHED_PATHS)
def _make_path_relative(file: str, images_folder: Path | None) -> str:
    """Return an image's path relative to ``images_folder`` or, if that is None, the path without slashes at its start.

    Raises BadRow if an absolute path lies outside the folder.
    """
    if images_folder is None:
        return normalize_image_path(file.lstrip("/"))
    path = Path(file)
    if path.is_absolute():
        if not path.is_relative_to(images_folder):
            raise BadRow(f"{path} is not in {images_folder}")
        path = path.relative_to(images_folder)
    return normalize_image_path(path.as_posix().lstrip("/"))
