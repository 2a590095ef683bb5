"""Import features and captions in the layout of VSE++ and SCAN.

A folder of the layout holds ``<split>_caps.txt``, ``<split>_ims.npy`` and optionally ``<split>_ids.txt``. A file of captions
has one caption per line, those of the same image in succession. An array has one row per image, or repeats each row once per
caption. The importer compares the rows themselves to tell these two forms apart; the number of rows alone does not decide.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import open_cache, read_sources
from vse.features.cache.rows import Rows
from vse.features.cache.shards import check_cache_out, feature_from_path
from vse.features.exchange.arrays import hash_rows, open_array, read_ids, write_imported
from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, IMPORT_TOKENISER, find_tokeniser, tokenize
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import WatchedFile, check_input, is_name
from vse.pipeline.files.outputs import check_output, json_kind, may_replace_others
from vse.pipeline.files.writing import lock_for_writing, read_json, write_json

SPLITS = {"train": "train", "dev": "val", "test": "test", "testall": "test"}
BOM = b"\xef\xbb\xbf"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CaptionFile:
    """The captions of a file, and what is needed to write the same bytes again.

    Attributes
    ----------
    bom : whether the file begins with a byte-order mark
    newline : the end of a line, LF or CR LF
    final_newline : whether the last line has this end
    """

    captions: tuple[str, ...]
    bom: bool
    newline: str
    final_newline: bool

    @classmethod
    def read(cls, path: Path) -> CaptionFile:
        """Read a file of captions, one per line. Raises UserError, which names a line that is empty or not UTF-8.

        If all lines end in CR LF, the carriage returns belong to the line ends. Otherwise carriage returns stay in the
        captions, and a warning is logged.
        """
        check_input(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
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
            if not caption_tokens(text):
                raise UserError(f"{path}: line {number} is an empty caption")
            captions.append(text)
        if stray:
            log.warning(
                "%s: %d of %d lines contain a carriage return inside the line, the first is line %d; it stays in the caption",
                path,
                len(stray),
                len(lines),
                stray[0],
            )
        return cls(tuple(captions), bom, "\r\n" if crlf else "\n", final_newline)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        text = self.newline.join(self.captions) + (self.newline if self.final_newline else "")
        return (BOM if self.bom else b"") + text.encode()


@dataclass(frozen=True)
class PrecompSplit:
    """The files of one split in the layout.

    Attributes
    ----------
    name : prefix of the file names
    text : the captions, those of the same image in succession
    rows : (n_images * repeats, ...), the features; each image has ``repeats`` equal rows in succession
    ids : an id per image, or None without a file of ids
    ids_repeats : how often the file of ids repeats the id of an image
    files : the input files; a change of one of them while it is read raises UserError
    """

    name: str
    text: CaptionFile
    rows: NDArray[Any]
    repeats: int
    n_images: int
    ids: list[int] | None
    ids_repeats: int
    files: tuple[WatchedFile, ...]

    @property
    def image_rows(self) -> NDArray[Any]:
        """The features with one row per image, (n_images, ...)."""
        return self.rows[:: self.repeats]

    @property
    def captions_per_image(self) -> int:
        """The number of captions of each image."""
        return len(self.text.captions) // self.n_images


_DATASET = json_kind("a data set", "dataset", "images")


def import_precomp(
    folder: Path,
    dataset: str,
    out_features: Path,
    out_data: Path,
    captions_per_image: int = 5,
    test: str | None = None,
    tokeniser: str | None = None,
) -> Path:
    """Import a folder of the layout: write ``dataset.json`` and the cache; returns the cache.

    Arrays (n, dim) become vectors and (n, n_regions, dim) become regions. Ids become image ids; without ids, images are
    counted from 0 over all splits. Raises UserError, which names the file and line of a fault.

    Parameters
    ----------
    dataset : name of the data set
    captions_per_image : needed to recognise arrays with one row per image
    test : which of ``test`` and ``testall`` becomes the test split if both exist; by default ``testall``
    tokeniser : name of the tokeniser; by default that of an existing ``out_data``, else ``unicode_words``
    """
    if not is_name(dataset):
        raise UserError(
            f"--dataset {dataset}: the name becomes a part of file names; use one without slashes and without a leading dot"
        )
    splits = [_read_split(folder, name, captions_per_image) for name in _find_splits(folder, test)]
    sources = [file.path for split in splits for file in split.files]
    check_output(out_data, _DATASET, sources)
    check_cache_out(out_features, dataset, feature_from_path(out_features, dataset), [out_data, *sources])
    _warn_of_missing(folder, [split.name for split in splits])
    shapes = {split.rows.shape[1:] for split in splits} | {split.rows.dtype for split in splits}
    if len(shapes) != 2:
        raise UserError(f"{folder}: the splits' features differ in shape or type: {', '.join(map(str, shapes))}")
    ids = _image_ids(splits)
    existing = read_json(out_data) if out_data.exists() and not may_replace_others() else None
    default_tokeniser = existing.get("tokeniser", DEFAULT_TOKENISER) if isinstance(existing, dict) else IMPORT_TOKENISER
    content = _dataset_content(dataset, splits, ids, tokeniser or default_tokeniser)
    if existing not in (None, content):
        raise UserError(f"{out_data} exists and has other content; move it away, or write to another --out-data")
    with lock_for_writing(out_data.parent, folder=True):
        write_json(out_data, content)
    loaded = load_dataset_file(out_data)
    all_ids = np.concatenate(ids)
    starts = _split_ends(splits) - [split.n_images for split in splits]

    def rows(part: slice) -> Rows:
        parts = [
            split.image_rows[max(part.start - start, 0) : max(part.stop - start, 0)]
            for split, start in zip(splits, starts, strict=True)
        ]
        values = np.concatenate(parts)
        hashes = hash_rows(values)
        if values.ndim == 2:
            return Rows(all_ids[part], values, hashes)
        offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
        return Rows(all_ids[part], values.reshape(-1, values.shape[2]), hashes, offsets=offsets)

    files = [file for split in splits for file in split.files]
    row_bytes = splits[0].rows[:1].nbytes
    path = write_imported(out_features, loaded, "image", {"layout": "precomp"}, files, all_ids, rows, row_bytes)
    _warn_of_duplicates(path)
    return path


def caption_tokens(text: str, tokenise: Callable[[str], list[str]] = tokenize) -> list[str]:
    """Return the tokens of a caption; if ``tokenise`` finds none, its words or the parts between its spaces."""
    return tokenise(text) or re.findall(r"\w+", text.lower()) or text.split()


def _find_splits(folder: Path, test: str | None) -> list[str]:
    """Return the names of the layout's splits in a folder; of ``test`` and ``testall`` only one."""
    names = [name for name in SPLITS if (folder / f"{name}_ims.npy").is_file() or (folder / f"{name}_caps.txt").is_file()]
    if not names:
        raise UserError(f"{folder}: no <split>_ims.npy and <split>_caps.txt of {', '.join(SPLITS)}")
    both = {"test", "testall"} <= set(names)
    test_name = test or ("testall" if both else None)
    if test_name is not None and test_name not in names:
        raise UserError(f"{folder}: no {test_name}_ims.npy")
    if both:
        log.info("%s: has both test and testall; %s is imported, the other left out", folder, test_name)
    return [name for name in names if SPLITS[name] != "test" or test_name in (None, name)]


def _read_split(folder: Path, name: str, captions_per_image: int) -> PrecompSplit:
    """Read the files of a split. Raises UserError if their numbers of rows, captions and ids do not fit together."""
    caps, ims, ids_file = (folder / f"{name}_{suffix}" for suffix in ("caps.txt", "ims.npy", "ids.txt"))
    files = tuple(WatchedFile(file) for file in (caps, ims, ids_file) if file != ids_file or ids_file.is_file())
    text, rows = CaptionFile.read(caps), open_array(ims)
    ids = read_ids(ids_file) if ids_file.is_file() else None
    n_captions, n_rows = len(text.captions), len(rows)
    if ids is not None and len(ids) != n_rows and not len(ids) == n_captions == n_rows * captions_per_image:
        raise UserError(f"{ids_file}: {len(ids)} ids for the {n_rows} rows of {ims.name}")
    if n_rows == n_captions:
        repeats = captions_per_image if captions_per_image > 1 and _are_repeated(ims, rows, captions_per_image) else 1
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
    ids_repeats = len(ids) // n_images  # 1, or as often as the row, or once per caption while there is one row per image
    groups = np.asarray(ids).reshape(-1, ids_repeats)
    broken = np.flatnonzero((groups != groups[:, :1]).any(axis=1))
    if len(broken):
        what = "equal rows" if repeats > 1 else "captions of an image"
        raise UserError(f"{ids_file}: lines from {broken[0] * ids_repeats + 1} on: {ids_repeats} {what} have different ids")
    if ids_repeats > repeats:
        log.info("%s: one id per caption, but one row per image; of %d equal ids one is read", ids_file, ids_repeats)
    return PrecompSplit(name, text, rows, repeats, n_images, groups[:, 0].tolist(), ids_repeats, files)


def _are_repeated(path: Path, rows: NDArray[Any], times: int) -> bool:
    """Return whether each row is repeated ``times`` times in succession. Raises UserError if only some rows are."""
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


def _image_ids(splits: Sequence[PrecompSplit]) -> list[NDArray[np.int64]]:
    """Return the ids of the images of each split. Raises UserError if an id occurs twice, or some splits have no ids."""
    with_ids = [split for split in splits if split.ids is not None]
    if not with_ids:
        return [np.arange(end - split.n_images, end) for split, end in zip(splits, _split_ends(splits), strict=True)]
    if len(with_ids) < len(splits):
        without = next(split for split in splits if split.ids is None)
        raise UserError(f"{without.files[0].path.parent}: {with_ids[0].name} has an ids file, but {without.name} has none")
    owner: dict[int, str] = {}
    for split in splits:
        for identity in split.ids or ():
            if identity in owner:
                raise UserError(f"{split.files[-1].path}: id {identity} occurs twice ({owner[identity]} and {split.name})")
            owner[identity] = split.name
    return [np.asarray(split.ids, np.int64) for split in splits]


def _split_ends(splits: Sequence[PrecompSplit]) -> NDArray[np.int64]:
    """Return for each split the number of images up to its end."""
    return np.cumsum([split.n_images for split in splits])


def _dataset_content(
    name: str, splits: Sequence[PrecompSplit], ids: Sequence[NDArray[np.int64]], tokeniser: str
) -> dict[str, Any]:
    """Return the content of ``dataset.json``, with the layout of each split for a later export."""
    tokenise, images, sentid = find_tokeniser(tokeniser, "--tokeniser"), [], 0
    for split, split_ids in zip(splits, ids, strict=True):
        n_captions = split.captions_per_image
        for k, imgid in enumerate(split_ids.tolist()):
            sentences = []
            for raw in split.text.captions[k * n_captions : (k + 1) * n_captions]:
                tokens = caption_tokens(raw, tokenise)
                sentences.append({"sentid": sentid, "imgid": imgid, "raw": raw, "tokens": tokens})
                sentid += 1
            image = {"imgid": imgid, "filename": f"{imgid}.jpg", "split": SPLITS[split.name], "sentences": sentences}
            images.append(image)
    layouts = {
        SPLITS[s.name]: {
            "name": s.name,
            "repeats": s.repeats,
            "bom": s.text.bom,
            "newline": s.text.newline,
            "ends": s.text.final_newline,
            "ids": s.ids is not None,
            **({"ids_repeats": s.ids_repeats} if s.ids_repeats != s.repeats else {}),
            "ids_text": list(_line_ends(s.files[2].path)) if s.ids is not None else None,
        }
        for s in splits
    }
    tokeniser_entry = {} if tokeniser == DEFAULT_TOKENISER else {"tokeniser": tokeniser}
    return {"dataset": name, **tokeniser_entry, "pictures": False, "precomp": layouts, "images": images}


def _line_ends(path: Path) -> tuple[str, bool]:
    """Return the line end of a file, and whether its last line has one."""
    content = path.read_bytes()
    return "\r\n" if b"\r\n" in content else "\n", content.endswith(b"\n")


def _warn_of_missing(folder: Path, names: Sequence[str]) -> None:
    """Log a warning for each missing split, with the files that it needs."""
    for name, use in (("train", "trained on"), ("dev", "validated on"), ("test", "tested on")):
        if not any(SPLITS[present] == SPLITS[name] for present in names):
            log.warning(
                "%s: no split %s, so nothing can be %s; for that put %s_ims.npy and %s_caps.txt there and import again",
                folder,
                name,
                use,
                name,
                name,
            )


def _warn_of_duplicates(path: Path) -> None:
    """Log a warning if images have exactly the same features as another image."""
    sources = read_sources(open_cache(path))
    repeated = len(sources) - len(np.unique(sources, axis=0))
    if repeated:
        log.warning("%s: %d images have exactly the features of another image", path, repeated)
