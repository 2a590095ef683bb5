"""Import and export features and captions in the layout of VSE++ and SCAN.

A folder in this layout, called precomp here, holds ``<split>_caps.txt`` with a caption per line, ``<split>_ims.npy`` and
optionally ``<split>_ids.txt``. Captions of an image follow each other. An array has one row per image, or repeats each row
once per caption. The importer compares the rows to find out which.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import open_cache, read_input_hashes
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import FeatureRows
from vse.features.cache.shards import check_cache_output, parse_feature_name
from vse.features.data_checks import check_belongs_to_dataset
from vse.features.exchange.arrays import hash_rows, map_npy_file, read_ids, write_imported_cache
from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, IMPORT_TOKENISER, ascii_words, find_tokeniser
from vse.pipeline.dataset.dataset import Image, load_dataset_file, read_dataset_head
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, WatchedFile, is_valid_name, wrap_read_errors
from vse.pipeline.files.outputs import bytes_kind, check_output, json_kind, may_replace_other_kinds
from vse.pipeline.files.writing import lock_for_writing, open_atomic, read_json, write_bytes, write_json

SPLITS_BY_FILE_PREFIX = {"train": "train", "dev": "val", "test": "test", "testall": "test"}
BOM = b"\xef\xbb\xbf"  # byte-order mark
_DATASET_KIND = json_kind("a data set", "dataset", "images")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptionFile:
    """The captions of a file, and the details that are needed to write the same bytes again.

    has_bom : True if the file begins with a byte-order mark
    line_end : LF or CR LF
    has_final_line_end : True if the last line ends with ``line_end``
    """

    captions: tuple[str, ...]
    has_bom: bool
    line_end: str
    has_final_line_end: bool

    @classmethod
    def read(cls, path: Path) -> CaptionFile:
        """Read a file of captions, one per line. Raises UserError, which names the line, if a line is empty or not UTF-8.

        Carriage returns are line ends if all lines end in CR LF. Otherwise they stay in the captions, with a warning.
        """
        content = InputFile(path).read()
        bom, final_newline = content.startswith(BOM), content.endswith(b"\n")
        lines = content.removeprefix(BOM).removesuffix(b"\n").split(b"\n")
        crlf = all(line.endswith(b"\r") for line in (lines if final_newline else lines[:-1])) and b"\r\n" in content
        captions, stray = [], []
        for number, line in enumerate(lines, 1):
            try:
                without_end = number == len(lines) and not final_newline
                text = (line.removesuffix(b"\r") if crlf and not without_end else line).decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason})") from None
            if "\r" in text:
                stray.append(number)
            if not tokenize_caption(text):
                raise UserError(f"{path}: line {number} is an empty caption")
            captions.append(text)
        if stray:
            message = "%s: %d of %d lines contain a carriage return, the first is line %d; it stays in the caption"
            log.warning(message, path, len(stray), len(lines), stray[0])
        return cls(tuple(captions), bom, "\r\n" if crlf else "\n", final_newline)

    def to_bytes(self) -> bytes:
        text = self.line_end.join(self.captions) + (self.line_end if self.has_final_line_end else "")
        return (BOM if self.has_bom else b"") + text.encode()


@dataclass(frozen=True)
class PrecompSplit:
    """The files of one split in a precomp folder.

    prefix : prefix of the file names: train, dev, test or testall
    caption_file : captions of the split
    features : (n_images * row_repeats, ...) rows of ``<split>_ims.npy``
    row_repeats : number of successive equal rows for each image
    image_ids : id of each image; None without a file of ids
    id_repeats : number of times that the file of ids repeats the id of an image
    input_files : input files, watched for changes
    """

    prefix: str
    caption_file: CaptionFile
    features: NDArray[Any]
    row_repeats: int
    n_images: int
    image_ids: list[int] | None
    id_repeats: int
    input_files: tuple[WatchedFile, ...]

    @property
    def image_rows(self) -> NDArray[Any]:
        """The features with one row per image, (n_images, ...)."""
        return self.features[:: self.row_repeats]

    @property
    def captions_per_image(self) -> int:
        return len(self.caption_file.captions) // self.n_images


def import_precomp(
    folder: Path,
    dataset: str,
    out_features: Path,
    out_data: Path,
    captions_per_image: int = 5,
    test: str | None = None,
    tokeniser: str | None = None,
) -> Path:
    """Import a precomp folder: write ``dataset.json`` and the cache; return the path of the cache.

    A row (dim,) becomes a vector, a row (n_regions, dim) becomes regions. Without files of ids, the images of all splits
    are numbered from 0. Raises UserError, which names the file and line of a fault.

    captions_per_image : number of captions of each image, needed to recognise arrays with one row per image
    test : name of the test files, ``test`` or ``testall``; None: ``testall`` if both exist
    tokeniser : name of the tokeniser; None: the tokeniser of an existing ``out_data``, else ``unicode_words``
    """
    if not is_valid_name(dataset):
        raise UserError(
            f"--dataset {dataset}: the name becomes a part of file names; use one without slashes and without a leading dot"
        )
    splits = [_read_split(folder, name, captions_per_image) for name in _find_file_prefixes(folder, test)]
    files = [file for split in splits for file in split.input_files]
    sources = [file.path for file in files]
    check_output(out_data, _DATASET_KIND, sources)
    check_cache_output(out_features, dataset, parse_feature_name(out_features, dataset), [out_data, *sources])
    present = {SPLITS_BY_FILE_PREFIX[split.prefix] for split in splits}
    for name, use in (("train", "trained on"), ("dev", "validated on"), ("test", "tested on")):
        if SPLITS_BY_FILE_PREFIX[name] not in present:
            message = "%s: no split %s, so nothing can be %s; for that put %s_ims.npy and %s_caps.txt there and import again"
            log.warning(message, folder, name, use, name, name)
    shapes = {split.features.shape[1:] for split in splits} | {split.features.dtype for split in splits}
    if len(shapes) != 2:
        raise UserError(f"{folder}: the splits' features differ in shape or type: {', '.join(map(str, shapes))}")
    ids = _collect_image_ids(splits)
    existing = read_json(out_data) if out_data.exists() and not may_replace_other_kinds() else None
    default_tokeniser = existing.get("tokeniser", DEFAULT_TOKENISER) if isinstance(existing, dict) else IMPORT_TOKENISER
    content = _build_dataset_content(dataset, splits, ids, tokeniser or default_tokeniser)
    if existing not in (None, content):
        raise UserError(f"{out_data} exists and has other content; move it away, or write to another --out-data")
    with lock_for_writing(out_data.parent, folder=True):
        write_json(out_data, content)
    loaded = load_dataset_file(out_data)
    all_ids = np.concatenate(ids)
    starts = np.cumsum([0, *(split.n_images for split in splits[:-1])])

    def read_rows(row_slice: slice) -> FeatureRows:
        parts = [
            split.image_rows[max(row_slice.start - start, 0) : max(row_slice.stop - start, 0)]
            for split, start in zip(splits, starts, strict=True)
        ]
        values = np.concatenate(parts)
        hashes = hash_rows(values)
        if values.ndim == 2:
            return FeatureRows(all_ids[row_slice], values, hashes)
        offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
        return FeatureRows(all_ids[row_slice], values.reshape(-1, values.shape[2]), hashes, offsets=offsets)

    row_bytes = splits[0].features[:1].nbytes
    path = write_imported_cache(out_features, loaded, "image", {"layout": "precomp"}, files, all_ids, read_rows, row_bytes)
    hashes = read_input_hashes(open_cache(path))
    if repeated := len(hashes) - len(np.unique(hashes, axis=0)):
        log.warning("%s: %d images have exactly the features of another image", path, repeated)
    return path


def tokenize_caption(text: str, tokenise: Callable[[str], list[str]] = ascii_words) -> list[str]:
    """Return the tokens that ``tokenise`` finds in a caption; if none, Unicode words; if none, the parts between blanks."""
    return tokenise(text) or re.findall(r"\w+", text.lower()) or text.split()


def _find_file_prefixes(folder: Path, test: str | None) -> list[str]:
    names = [p for p in SPLITS_BY_FILE_PREFIX if any((folder / f"{p}_{end}").is_file() for end in ("ims.npy", "caps.txt"))]
    if not names:
        raise UserError(f"{folder}: no <split>_ims.npy and <split>_caps.txt of {', '.join(SPLITS_BY_FILE_PREFIX)}")
    both = {"test", "testall"} <= set(names)
    test_name = test or ("testall" if both else None)
    if test_name is not None and test_name not in names:
        raise UserError(f"{folder}: no {test_name}_ims.npy")
    if both:
        log.info("%s: has both test and testall; %s is imported, the other left out", folder, test_name)
    return [name for name in names if SPLITS_BY_FILE_PREFIX[name] != "test" or test_name in (None, name)]


def _read_split(folder: Path, name: str, captions_per_image: int) -> PrecompSplit:
    caps, ims, ids_file = (folder / f"{name}_{suffix}" for suffix in ("caps.txt", "ims.npy", "ids.txt"))
    files = tuple(WatchedFile(file) for file in (caps, ims, ids_file) if file != ids_file or ids_file.is_file())
    text, rows = CaptionFile.read(caps), map_npy_file(ims)
    ids = read_ids(ids_file) if ids_file.is_file() else None
    n_captions, n_rows = len(text.captions), len(rows)
    if ids is not None and len(ids) != n_rows and not len(ids) == n_captions == n_rows * captions_per_image:
        raise UserError(f"{ids_file}: {len(ids)} ids for the {n_rows} rows of {ims.name}")
    if n_rows == n_captions:
        repeats = captions_per_image if captions_per_image > 1 and _are_rows_repeated(ims, rows, captions_per_image) else 1
    elif n_rows * captions_per_image == n_captions:
        repeats = 1
    else:
        raise UserError(
            f"{ims}: {n_rows} rows for {n_captions} captions, neither one row per caption nor one per {captions_per_image} "
            "captions (--captions-per-image)"
        )
    n_images = n_rows // repeats
    if ids is None:
        return PrecompSplit(name, text, rows, repeats, n_images, None, 1, files)
    ids_repeats = len(ids) // n_images  # 1, row_repeats, or captions_per_image
    groups = np.asarray(ids).reshape(-1, ids_repeats)
    broken = np.flatnonzero((groups != groups[:, :1]).any(axis=1))
    if len(broken):
        what = "equal rows" if repeats > 1 else "captions of an image"
        raise UserError(f"{ids_file}: lines from {broken[0] * ids_repeats + 1} on: {ids_repeats} {what} have different ids")
    if ids_repeats > repeats:
        log.info("%s: one id per caption, but one row per image; of %d equal ids one is read", ids_file, ids_repeats)
    return PrecompSplit(name, text, rows, repeats, n_images, groups[:, 0].tolist(), ids_repeats, files)


def _are_rows_repeated(path: Path, rows: NDArray[Any], times: int) -> bool:
    """Return whether every row occurs ``times`` times in succession. Raises UserError if only some rows do."""
    equals_previous = np.zeros(len(rows), bool)
    block = max(1, 64_000_000 // rows[:1].nbytes)
    for start in range(1, len(rows), block):
        end = min(start + block, len(rows))
        pair = np.asarray(rows[start - 1 : end])
        equals_previous[start:end] = (pair[1:] == pair[:-1]).reshape(end - start, -1).all(axis=1)
    should_equal = np.arange(len(rows)) % times != 0
    if not equals_previous.any():
        return False
    broken = np.flatnonzero(should_equal & ~equals_previous)
    if len(broken) or len(rows) % times:
        row = int(broken[0]) if len(broken) else len(rows)
        raise UserError(
            f"{path}: {equals_previous.sum()} rows equal the row before, but row {row} does not, as it would if each row were "
            f"repeated {times} times: rows are missing or out of order"
        )
    return True


def _collect_image_ids(splits: Sequence[PrecompSplit]) -> list[NDArray[np.int64]]:
    """Return the ids of each split's images. Raises UserError if an id occurs twice, or if only some splits have ids."""
    with_ids = [split for split in splits if split.image_ids is not None]
    if not with_ids:
        starts = np.cumsum([0, *(split.n_images for split in splits[:-1])])
        return [np.arange(start, start + split.n_images) for split, start in zip(splits, starts, strict=True)]
    if len(with_ids) < len(splits):
        first, other = with_ids[0], next(split for split in splits if split.image_ids is None)
        raise UserError(f"{other.input_files[0].path.parent}: {first.prefix} has an ids file, but {other.prefix} has none")
    seen: dict[int, str] = {}
    for split in splits:
        for imgid in split.image_ids or ():
            if imgid in seen:
                raise UserError(f"{split.input_files[-1].path}: id {imgid} occurs twice ({seen[imgid]} and {split.prefix})")
            seen[imgid] = split.prefix
    return [np.asarray(split.image_ids, np.int64) for split in splits]


def _build_dataset_content(
    name: str, splits: Sequence[PrecompSplit], ids: Sequence[NDArray[np.int64]], tokeniser: str
) -> dict[str, Any]:
    tokenise, images, sentid = find_tokeniser(tokeniser, "--tokeniser"), [], 0
    for split, split_ids in zip(splits, ids, strict=True):
        n_captions = split.captions_per_image
        for k, imgid in enumerate(split_ids.tolist()):
            sentences = []
            for raw in split.caption_file.captions[k * n_captions : (k + 1) * n_captions]:
                tokens = tokenize_caption(raw, tokenise)
                sentences.append({"sentid": sentid, "imgid": imgid, "raw": raw, "tokens": tokens})
                sentid += 1
            entry = {"imgid": imgid, "filename": f"{imgid}.jpg", "split": SPLITS_BY_FILE_PREFIX[split.prefix]}
            images.append({**entry, "sentences": sentences})
    layouts = {
        SPLITS_BY_FILE_PREFIX[s.prefix]: {
            **{"name": s.prefix, "repeats": s.row_repeats, "bom": caps.has_bom, "newline": caps.line_end},
            **{"ends": caps.has_final_line_end, "ids": s.image_ids is not None},
            **({"ids_repeats": s.id_repeats} if s.id_repeats != s.row_repeats else {}),
            # The line end of the file of ids, and whether its last line has one.
            "ids_text": ["\r\n" if b"\r\n" in text else "\n", text.endswith(b"\n")] if s.image_ids is not None else None,
        }
        for s in splits
        for caps, text in [(s.caption_file, b"" if s.image_ids is None else s.input_files[2].path.read_bytes())]
    }
    tokeniser_entry = {} if tokeniser == DEFAULT_TOKENISER else {"tokeniser": tokeniser}
    return {"dataset": name, **tokeniser_entry, "pictures": False, "precomp": layouts, "images": images}


def export_precomp(cache_file: Path, out: Path, dataset_file: Path | None = None, repeats: int | None = None) -> Path:
    """Write a cache and the captions of its data set as a precomp folder; return the folder ``out``.

    A data set that was imported from a precomp folder is exported byte for byte (exceptions: docs/formats.md). Other data sets
    get one row per image (or ``repeats`` equal rows), LF as the line end, and a file of ids. ``dataset_file`` is the
    ``dataset.json``; None: the file to which the cache refers. Raises UserError if the layout cannot hold the data set.
    """
    cache = open_cache(cache_file)
    if cache.kind != "image":
        raise UserError(f"{cache_file}: {cache.kind} features; the layout holds features of images")
    path = dataset_file or cache.dataset_file
    dataset = load_dataset_file(path)
    check_belongs_to_dataset(cache, dataset)
    layouts: Mapping[str, Any] = read_dataset_head(path).get("precomp", {})
    with wrap_read_errors(path, "a data set with a valid entry 'precomp'"):
        _check_precomp_entry(layouts)
    reader = FeatureReader(cache)
    texts: dict[Path, bytes] = {}
    arrays: dict[Path, tuple[Sequence[Image], int]] = {}
    for split, images in dataset.splits.items():
        layout = layouts.get(split, {"name": "dev" if split == "val" else split})
        name, times = layout["name"], repeats or layout.get("repeats", 1)
        text = CaptionFile(
            captions=tuple(caption.raw for image in images for caption in image.captions),
            has_bom=layout.get("bom", False),
            line_end=layout.get("newline", "\n"),
            has_final_line_end=layout.get("ends", True),
        )
        _check_export_layout(path, images, times, text)
        arrays[out / f"{name}_ims.npy"] = images, times
        texts[out / f"{name}_caps.txt"] = text.to_bytes()
        if layout.get("ids", True):
            id_times = times if repeats else layout.get("ids_repeats", times)
            lines = [str(image.imgid) for image in images for _ in range(id_times)]
            newline, final_newline = layout.get("ids_text") or ("\n", True)
            texts[out / f"{name}_ids.txt"] = (newline.join(lines) + newline * final_newline).encode()
    for file in (*texts, *arrays):
        # A text must have exactly these bytes, an array must begin with its header and first rows.
        start = texts[file] if file in texts else b"".join(islice(_encode_array(reader, *arrays[file]), 2))
        kind = bytes_kind("the same export", start, complete=file in texts)
        check_output(file, kind, [path, cache.path])
    for file, content in texts.items():
        write_bytes(file, content)
    for file, (images, times) in arrays.items():
        with open_atomic(file) as stream:  # not a memory map: on a full disk, writing to it ends the process with a bus error
            stream.writelines(_encode_array(reader, images, times))
    return out


def _check_precomp_entry(layouts: Mapping[str, Any]) -> None:
    """Raise ValueError if the layout of a split's files, stored in the entry ``precomp`` of ``dataset.json``, is not valid."""
    for split, layout in layouts.items():
        newline, final_newline = layout.get("ids_text") or ("\n", True)
        newlines = {newline, layout.get("newline", "\n")}
        flags = [final_newline, *(layout.get(name, True) for name in ("bom", "ends", "ids"))]
        times = layout.get("repeats", 1)
        is_split = isinstance(layout["name"], str) and SPLITS_BY_FILE_PREFIX.get(layout["name"]) == split
        types = {type(flag) for flag in flags}, type(times)
        if not is_split or not newlines <= {"\n", "\r\n"} or types != ({bool}, int):
            raise ValueError(f"the layout of split {split!r} is not valid")


def _check_export_layout(path: Path, images: Sequence[Image], times: int, text: CaptionFile) -> None:
    counts = {len(image.captions) for image in images}
    if len(counts) > 1:
        raise UserError(
            f"{path}: images have {min(counts)} to {max(counts)} captions; the layout needs the same number for each image"
        )
    if times not in (1, *counts):
        raise UserError(f"--repeat {times}: an image has {counts.pop()} captions, so --repeat must be 1 or that number")
    multiline = next((caption for caption in text.captions if "\n" in caption), None)
    if multiline is not None:
        raise UserError(f"{path}: the caption {multiline!r} contains a line feed; the layout needs one line per caption")


def _encode_array(reader: FeatureReader, images: Sequence[Image], times: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a ``.npy`` file in blocks, with ``times`` equal rows in succession for each image.

    Raises UserError if the images have different numbers of regions.
    """
    cache = reader.cache
    rows = reader.find_rows(image.imgid for image in images)
    shape: tuple[int, ...] = cache.row_shape
    if cache.offsets is not None:
        counts = np.unique(np.diff(cache.offsets)[rows])
        if len(counts) > 1:
            raise UserError(
                f"{cache.path}: images have {counts[0]} to {counts[-1]} regions; the layout needs equally many for each image"
            )
        shape = (int(counts[0]), *shape)
    header = {"descr": np.lib.format.dtype_to_descr(cache.dtype), "fortran_order": False}
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(stream, {**header, "shape": (len(rows) * times, *shape)})
    yield stream.getvalue()
    for k in range(0, len(rows), 512):
        block = rows[k : k + 512]
        values = reader.read_rows(block) if cache.offsets is None else reader.read_padded_regions(block).features
        yield np.ascontiguousarray(np.repeat(values, times, axis=0)).data.cast("B")
