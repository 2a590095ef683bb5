"""The layout of VSE++ and SCAN: ``<split>_caps.txt``, ``<split>_ims.npy`` and, perhaps, ``<split>_ids.txt`` in a folder.

Captions lie one per line, those of an image one after the other. An array has one row per image, or each row once per
caption; which of the two is looked up in the rows themselves, never guessed from their number alone.
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
from vse.features.cache.shards import check_cache_out, feature_at
from vse.features.exchange.arrays import open_array, read_ids, row_hashes, write_imported
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
    """Captions of a file, and what else its bytes say: a byte-order mark, how lines end, and whether the last one does."""

    captions: tuple[str, ...]
    bom: bool
    newline: str
    ends: bool

    @classmethod
    def read(cls, path: Path) -> CaptionFile:
        """Captions of a file; :class:`UserError` names a line that is empty or not UTF-8.

        A carriage return counts as the end of a line where all lines have one; others stay in the captions, with a warning.
        """
        check_input(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        bom, ends = content.startswith(BOM), content.endswith(b"\n")
        lines = content.removeprefix(BOM).removesuffix(b"\n").split(b"\n")
        windows = all(line.endswith(b"\r") for line in (lines if ends else lines[:-1])) and b"\r\n" in content
        captions, stray = [], []
        for number, line in enumerate(lines, 1):
            try:
                last = number == len(lines) and not ends
                text = (line.removesuffix(b"\r") if windows and not last else line).decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason})") from None
            if "\r" in text:
                stray.append(number)
            if not words_of(text):
                raise UserError(f"{path}: line {number} is an empty caption")
            captions.append(text)
        if stray:
            log.warning(
                "%s: %d of %d lines hold a carriage return that ends no line, the first is line %d; it stays in the caption",
                path,
                len(stray),
                len(lines),
                stray[0],
            )
        return cls(tuple(captions), bom, "\r\n" if windows else "\n", ends)

    def bytes(self) -> bytes:
        """The file, byte for byte."""
        text = self.newline.join(self.captions) + (self.newline if self.ends else "")
        return (BOM if self.bom else b"") + text.encode()


@dataclass(frozen=True)
class PrecompSplit:
    """One split of the layout: ``name`` is its prefix; image k has ``captions[k]`` and row ``k * repeats`` of ``rows``.

    ``ids`` has an id per image; in its file each stands ``ids_repeats`` times.
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
        """One row per image, (n_images, ...)."""
        return self.rows[:: self.repeats]

    @property
    def per_image(self) -> int:
        """Captions of each image."""
        return len(self.text.captions) // self.n_images


_DATASET = json_kind("a data set", "dataset", "images")


def import_precomp(
    folder: Path,
    dataset: str,
    out_features: Path,
    out_data: Path,
    per_image: int = 5,
    test: str | None = None,
    tokeniser: str | None = None,
) -> Path:
    """Make a data set and a cache from a folder of the layout; returns the cache.

    Arrays (n, dim) become vectors, (n, n_regions, dim) regions. Ids become image ids; without them images are counted
    from 0 over the splits. ``test`` says which of ``test`` and ``testall`` is the test split, if there are both (testall).
    ``tokeniser`` cuts the captions into words; by default that of ``out_data`` if it was imported before, else
    ``unicode_words``.
    """
    if not is_name(dataset):
        raise UserError(
            f"--dataset {dataset}: the name becomes a part of file names; take one without slashes or a dot in front"
        )
    splits = [_read_split(folder, name, per_image) for name in _names(folder, test)]
    sources = [file.path for split in splits for file in split.files]
    check_output(out_data, _DATASET, sources)
    check_cache_out(out_features, dataset, feature_at(out_features, dataset), [out_data, *sources])
    _report_missing(folder, [split.name for split in splits])
    shapes = {split.rows.shape[1:] for split in splits} | {split.rows.dtype for split in splits}
    if len(shapes) != 2:
        raise UserError(f"{folder}: the splits' features differ in shape or type: {', '.join(map(str, shapes))}")
    ids = _image_ids(splits)
    before = read_json(out_data) if out_data.exists() and not may_replace_others() else None
    earlier = before.get("tokeniser", DEFAULT_TOKENISER) if isinstance(before, dict) else IMPORT_TOKENISER
    content = _dataset(dataset, splits, ids, tokeniser or earlier)
    if before not in (None, content):
        raise UserError(f"{out_data} is there and holds something else; move it away, or write to another --out-data")
    with lock_for_writing(out_data.parent, folder=True):
        write_json(out_data, content)
    loaded = load_dataset_file(out_data)
    flat = np.concatenate(ids)
    starts = _ends(splits) - [split.n_images for split in splits]

    def rows(part: slice) -> Rows:
        parts = [
            split.image_rows[max(part.start - start, 0) : max(part.stop - start, 0)]
            for split, start in zip(splits, starts, strict=True)
        ]
        values = np.concatenate(parts)
        hashes = row_hashes(values)
        if values.ndim == 2:
            return Rows(flat[part], values, hashes)
        offsets = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
        return Rows(flat[part], values.reshape(-1, values.shape[2]), hashes, offsets=offsets)

    files = [file for split in splits for file in split.files]
    row_bytes = splits[0].rows[:1].nbytes
    path = write_imported(out_features, loaded, "image", {"layout": "precomp"}, files, flat, rows, row_bytes)
    _report_duplicates(path)
    return path


def words_of(text: str, cut: Callable[[str], list[str]] = tokenize) -> list[str]:
    """Tokens of a caption: as they are ``cut`` or, if that leaves none, its words, or what stands between its blanks."""
    return cut(text) or re.findall(r"\w+", text.lower()) or text.split()


def _names(folder: Path, test: str | None) -> list[str]:
    there = [name for name in SPLITS if (folder / f"{name}_ims.npy").is_file() or (folder / f"{name}_caps.txt").is_file()]
    if not there:
        raise UserError(f"{folder}: no <split>_ims.npy and <split>_caps.txt of {', '.join(SPLITS)}")
    both = {"test", "testall"} <= set(there)
    test_name = test or ("testall" if both else None)
    if test_name is not None and test_name not in there:
        raise UserError(f"{folder}: no {test_name}_ims.npy")
    if both:
        log.info("%s: there are test and testall; %s is taken, the other left out", folder, test_name)
    return [name for name in there if SPLITS[name] != "test" or test_name in (None, name)]


def _read_split(folder: Path, name: str, per_image: int) -> PrecompSplit:
    caps, ims, ids_file = (folder / f"{name}_{end}" for end in ("caps.txt", "ims.npy", "ids.txt"))
    files = tuple(WatchedFile(file) for file in (caps, ims, ids_file) if file != ids_file or ids_file.is_file())
    text, rows = CaptionFile.read(caps), open_array(ims)
    ids = read_ids(ids_file) if ids_file.is_file() else None
    n_captions, n_rows = len(text.captions), len(rows)
    if ids is not None and len(ids) != n_rows and not len(ids) == n_captions == n_rows * per_image:
        raise UserError(f"{ids_file}: {len(ids)} ids for the {n_rows} rows of {ims.name}")
    if n_rows == n_captions:
        repeats = per_image if per_image > 1 and _repeated(ims, rows, per_image) else 1
    elif n_rows * per_image == n_captions:
        repeats = 1
    else:
        raise UserError(
            f"{ims}: {n_rows} rows for {n_captions} captions, neither one row per caption nor one per {per_image} captions "
            "(--captions-per-image)"
        )
    n_images = n_rows // repeats
    if ids is None:
        return PrecompSplit(name, text, rows, repeats, n_images, None, 1, files)
    ids_repeats = len(ids) // n_images  # 1; or as often as the row; or once per caption beside a row per image
    groups = np.asarray(ids).reshape(-1, ids_repeats)
    broken = np.flatnonzero((groups != groups[:, :1]).any(axis=1))
    if len(broken):
        what = "equal rows" if repeats > 1 else "captions of an image"
        raise UserError(f"{ids_file}: lines from {broken[0] * ids_repeats + 1} on: {ids_repeats} {what} have different ids")
    if ids_repeats > repeats:
        log.info("%s: an id per caption beside a row per image; of each %d one is taken", ids_file, ids_repeats)
    return PrecompSplit(name, text, rows, repeats, n_images, groups[:, 0].tolist(), ids_repeats, files)


def _repeated(path: Path, rows: NDArray[Any], times: int) -> bool:
    """Whether each row is there ``times`` times in a row; :class:`UserError` if some do and others do not."""
    as_before = np.zeros(len(rows), bool)
    block = max(1, 64_000_000 // rows[:1].nbytes)
    for start in range(1, len(rows), block):
        end = min(start + block, len(rows))
        pair = np.asarray(rows[start - 1 : end])
        as_before[start:end] = (pair[1:] == pair[:-1]).reshape(end - start, -1).all(axis=1)
    inside = np.arange(len(rows)) % times != 0
    if not as_before.any():
        return False
    broken = np.flatnonzero(inside & ~as_before)
    if len(broken) or len(rows) % times:
        row = int(broken[0]) if len(broken) else len(rows)
        raise UserError(
            f"{path}: {as_before.sum()} rows are the same as the one before, but row {row} is not, where rows that are "
            f"repeated {times} times would be: rows are missing or out of order"
        )
    return True


def _image_ids(splits: Sequence[PrecompSplit]) -> list[NDArray[np.int64]]:
    with_ids = [split for split in splits if split.ids is not None]
    if not with_ids:
        return [np.arange(end - split.n_images, end) for split, end in zip(splits, _ends(splits), strict=True)]
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


def _ends(splits: Sequence[PrecompSplit]) -> NDArray[np.int64]:
    """Number of images up to and with each split."""
    return np.cumsum([split.n_images for split in splits])


def _dataset(name: str, splits: Sequence[PrecompSplit], ids: Sequence[NDArray[np.int64]], tokeniser: str) -> dict[str, Any]:
    cut, images, sentid = find_tokeniser(tokeniser, "--tokeniser"), [], 0
    for split, of_split in zip(splits, ids, strict=True):
        for k, imgid in enumerate(of_split.tolist()):
            sentences = []
            for raw in split.text.captions[k * split.per_image : (k + 1) * split.per_image]:
                sentences.append({"sentid": sentid, "imgid": imgid, "raw": raw, "tokens": words_of(raw, cut)})
                sentid += 1
            image = {"imgid": imgid, "filename": f"{imgid}.jpg", "split": SPLITS[split.name], "sentences": sentences}
            images.append(image)
    layouts = {
        SPLITS[s.name]: {
            "name": s.name,
            "repeats": s.repeats,
            "bom": s.text.bom,
            "newline": s.text.newline,
            "ends": s.text.ends,
            "ids": s.ids is not None,
            **({"ids_repeats": s.ids_repeats} if s.ids_repeats != s.repeats else {}),
            "ids_text": list(_line_ends(s.files[2].path)) if s.ids is not None else None,
        }
        for s in splits
    }
    named = {} if tokeniser == DEFAULT_TOKENISER else {"tokeniser": tokeniser}
    return {"dataset": name, **named, "pictures": False, "precomp": layouts, "images": images}


def _line_ends(path: Path) -> tuple[str, bool]:
    """How the lines of a file end, and whether the last one does."""
    content = path.read_bytes()
    return "\r\n" if b"\r\n" in content else "\n", content.endswith(b"\n")


def _report_missing(folder: Path, names: Sequence[str]) -> None:
    """Say what cannot be done without a split, and what to do."""
    for name, use in (("train", "trained on"), ("dev", "validated on"), ("test", "tested on")):
        if not any(SPLITS[there] == SPLITS[name] for there in names):
            log.warning(
                "%s: no split %s, so nothing can be %s; for that put %s_ims.npy and %s_caps.txt there and import again",
                folder,
                name,
                use,
                name,
                name,
            )


def _report_duplicates(path: Path) -> None:
    """Say how many images have the very features of another."""
    sources = read_sources(open_cache(path))
    repeated = len(sources) - len(np.unique(sources, axis=0))
    if repeated:
        log.warning("%s: %d images have exactly the features of another image", path, repeated)
