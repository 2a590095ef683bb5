"""Rows of other people's data, one image each with some of its captions, gathered to the content of a ``dataset.json``.

An imported data set is written, unless something else is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vse.pipeline.dataset.captions import NEW, tokeniser_named
from vse.pipeline.dataset.dataset import SPLITS
from vse.pipeline.dataset.sources import check_dataset_out, write_dataset
from vse.pipeline.errors import UserError, printable
from vse.pipeline.files.inputs import is_name, is_path
from vse.pipeline.files.outputs import check_output, may_replace_others, text_kind
from vse.pipeline.files.writing import read_json, write_text

_SPLIT_NAMES = {split: split for split in SPLITS} | {
    "training": "train",
    "dev": "val",
    "valid": "val",
    "validation": "val",
    "testing": "test",
}
_SHOWN = 5  # bad rows that the log names; all are in the list of failures
log = logging.getLogger(__name__)


class BadRow(Exception):
    """Why a row cannot be taken."""


@dataclass(frozen=True)
class ImportSettings:
    """How data are imported, whatever they come from.

    name, out : what the data set is called, and the folder of its ``dataset.json``
    val, test, seed : shares of the images that are drawn for these splits, where the source gives none; None is 0.1
    tokeniser : what cuts captions into words
    skip_bad : leave bad rows out, and list them
    quoting : "minimal" or "none", for CSV files; None is "minimal"
    columns : the source's name, or names, of a field of :class:`ImportedRow`, where it is not one of the usual ones
    """

    name: str
    out: Path
    val: float | None = None
    test: float | None = None
    seed: int = 0
    tokeniser: str = NEW
    skip_bad: bool = False
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quoting: str | None = None


def import_settings(
    out: Path,
    name: str | None = None,
    val: float | None = None,
    test: float | None = None,
    seed: int = 0,
    tokeniser: str | None = None,
    skip_bad: bool = False,
    columns: Iterable[str] = (),
    quoting: str | None = None,
) -> ImportSettings:
    """The settings of an import as a command has them: the data set is called as its folder, unless a name is given."""
    given = fields_of(columns)
    return ImportSettings(name or out.resolve().name, out, val, test, seed, tokeniser or NEW, skip_bad, given, quoting)


@dataclass(frozen=True)
class ImportedRow:
    """An image, by its file in the folder of images, and captions of it; ``place`` says where this stands.

    An image may have several rows. Ids are given by all rows or by none.
    """

    place: str
    file: str
    captions: tuple[str, ...]
    split: str | None = None
    imgid: int | None = None
    sentids: tuple[int, ...] = ()
    cocoid: int | None = None


@dataclass
class BadRows:
    """Rows that cannot be taken, with place and reason."""

    skipped: bool
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, place: str, reason: object) -> None:
        """Count a row, and name the first ones."""
        self.rows.append((place, printable(reason)))
        if len(self.rows) <= _SHOWN:
            log.warning("%s: %s", *self.rows[-1])

    def finish(self, file: Path, n_rows: int) -> None:
        """List the bad rows in ``file`` if they are left out; else :class:`UserError` if there are any."""
        if not self.rows:
            file.unlink(missing_ok=True)
            return
        count = f"{len(self.rows)} of {n_rows} rows cannot be taken"
        if not self.skipped:
            place, reason = self.rows[0]
            raise UserError(f"{place}: {reason} ({count}; --skip-bad leaves them out)")
        lines = [json.dumps({"place": place, "reason": reason}, ensure_ascii=False) for place, reason in self.rows]
        write_text(file, "\n".join([*lines, ""]))
        log.warning("%s and are left out; %s lists them", count, file)


@dataclass
class _Image:
    """An image with the places of its rows; a caption is its id, if it has one, its text and its words."""

    places: list[str]
    imgid: int | None
    cocoid: int | None
    split: str | None
    captions: list[tuple[int | None, str, list[str]]]


class GatheredRows:
    """Rows put together by image; ``check`` says by :class:`BadRow` what is wrong with the file of one."""

    def __init__(self, settings: ImportSettings, check: Callable[[str], None] = lambda file: None) -> None:
        self.bad = BadRows(settings.skip_bad)
        self.n_rows = 0
        self._settings, self._check = settings, check
        self._cut = tokeniser_named(settings.tokeniser, "--tokeniser")
        self._images: dict[str, _Image] = {}
        self._files: dict[int, str] = {}
        self._sentids: set[int] = set()
        self._faults: dict[str, str] = {}

    @property
    def ok(self) -> bool:
        """Whether something can still come of it."""
        return self.bad.skipped or not self.bad.rows

    def add(self, row: ImportedRow) -> str | None:
        """Take a row, or count it as bad; returns its file, relative to the folder of images, if it was taken."""
        self.n_rows += 1
        try:
            return self._taken(row)
        except BadRow as reason:
            self.bad.add(row.place, reason)
            return None

    def refuse(self, place: str, reason: object) -> None:
        """Count a row that cannot even be read."""
        self.n_rows += 1
        self.bad.add(place, reason)

    def files(self) -> list[str]:
        """The files of the images, in the order in which they came."""
        return list(self._images)

    def _taken(self, row: ImportedRow) -> str:
        file = image_file(row.file)
        split = _split(row.split)
        captions = [(text.strip(), self._cut(text)) for text in row.captions]
        for text, words in captions:
            if not words:
                raise BadRow(f"the caption {text[:50]!r} has no word" if text else "the caption is empty")
        if not captions:
            raise BadRow("has no caption")
        known = self._images.get(file)
        if known is None:
            self._check_file(file)
        self._check_ids(row, file, known, split)
        image = self._images.setdefault(file, _Image([], row.imgid, row.cocoid, split, []))
        image.places.append(row.place)
        sentids = row.sentids or (None,) * len(captions)
        image.captions += [(sentid, *caption) for sentid, caption in zip(sentids, captions, strict=True)]
        self._sentids.update(row.sentids)
        if row.imgid is not None:
            self._files[row.imgid] = file
        return file

    def _check_file(self, file: str) -> None:
        if file not in self._faults:
            try:
                self._check(file)
                return
            except BadRow as fault:
                self._faults[file] = str(fault)
        raise BadRow(self._faults[file])

    def _check_ids(self, row: ImportedRow, file: str, known: _Image | None, split: str | None) -> None:
        """Ids are unique, and all rows of an image agree."""
        if known is not None:
            for what, now, before in (("split", split, known.split), ("imgid", row.imgid, known.imgid)):
                if now != before:
                    raise BadRow(f"{file} has {what} {now}, and {what} {before} at {known.places[0]}")
        if row.imgid is not None and self._files.get(row.imgid, file) != file:
            raise BadRow(f"imgid {row.imgid} is that of {self._files[row.imgid]}, too")
        if row.sentids and len(row.sentids) != len(row.captions):
            raise BadRow(f"{len(row.sentids)} ids for {len(row.captions)} captions")
        twice = [sentid for sentid in row.sentids if sentid in self._sentids]
        if twice or len(set(row.sentids)) < len(row.sentids):
            raise BadRow(f"sentid {(twice or row.sentids)[0]} is there already")

    def content(self, **more: Any) -> dict[str, Any]:
        """The content of ``dataset.json``, with ``more`` in its head; bad rows are listed, or an error.

        Images and captions are numbered in their order if they have no ids, and splits drawn if there are none.
        """
        self._check_given("split", [image.split for image in self._images.values()])
        self._check_given("imgid", [image.imgid for image in self._images.values()])
        self._check_given("sentid", [image.captions[0][0] for image in self._images.values()])
        n_taken = sum(len(image.places) for image in self._images.values())
        n_refused = len(self.bad.rows)
        assert n_taken + n_refused == self.n_rows, "each row is taken or refused"
        self.bad.finish(self._settings.out / "import.failures.jsonl", self.n_rows)
        log.info("%d rows read: %d taken, %d refused", self.n_rows, n_taken, n_refused)
        if not self._images:
            raise UserError(f"no image with a caption is left of {self.n_rows} rows")
        given = next(iter(self._images.values())).split is not None
        if given and (self._settings.val, self._settings.test) != (None, None):
            raise UserError("the splits are given, so none is drawn; leave --val and --test out")
        drawn = {} if given else self._drawn()
        entries: list[dict[str, Any]] = []
        n_captions = 0
        for number, (file, image) in enumerate(self._images.items()):
            entries.append(_entry(number if image.imgid is None else image.imgid, file, image, drawn, n_captions))
            n_captions += len(image.captions)
        how = "given" if given else {"val": self._share("val"), "test": self._share("test"), "seed": self._settings.seed}
        imported = {**more, "splits": how, "bad_rows": len(self.bad.rows)}
        head = {"dataset": self._settings.name, "tokeniser": self._settings.tokeniser, "imported": imported}
        return {**head, "images": entries}

    def _check_given(self, what: str, values: list[Any]) -> None:
        """Images without what others have are bad, and go."""
        if all(value is None for value in values):
            return
        for (file, image), value in zip(list(self._images.items()), values, strict=True):
            if value is None:
                for place in image.places:
                    self.bad.add(place, f"{file} has no {what}, which others have")
                del self._images[file]

    def _share(self, split: str) -> float:
        share = {"val": self._settings.val, "test": self._settings.test}[split]
        return 0.1 if share is None else share

    def _drawn(self) -> dict[str, str]:
        """A split for each file, by its name and the seed alone: the order of the rows does not matter."""
        shares = {split: self._share(split) for split in ("val", "test")}
        if sum(shares.values()) >= 1:
            raise UserError(f"--val {shares['val']} and --test {shares['test']} leave nothing to train on")
        order = sorted(self._images, key=lambda file: hashlib.sha256(f"{self._settings.seed} {file}".encode()).digest())
        n_val, n_test = (round(shares[split] * len(order)) for split in ("val", "test"))
        return {file: "val" if k < n_val else "test" if k < n_val + n_test else "train" for k, file in enumerate(order)}


def image_file(name: str) -> str:
    """The path of an image in the folder of images, in its normal form; :class:`BadRow` if it leads elsewhere."""
    path = PurePosixPath(name)
    if not is_path(name) or not path.name:
        raise BadRow("names no image file")
    if path.is_absolute() or ".." in path.parts:
        raise BadRow(f"the file {name!r} is not inside the folder of images")
    return path.as_posix()


def _split(name: str | None) -> str | None:
    if name is None or not name.strip():
        return None
    split = _SPLIT_NAMES.get(name.strip().lower())
    if split is None:
        raise BadRow(f"unknown split {name!r}; known: {', '.join(_SPLIT_NAMES)}")
    return split


def _entry(imgid: int, file: str, image: _Image, drawn: dict[str, str], n_before: int) -> dict[str, Any]:
    """An image of ``dataset.json``; its captions are numbered from ``n_before`` if they have no ids."""
    path = PurePosixPath(file)
    sentences = [
        {"sentid": n_before + k if sentid is None else sentid, "imgid": imgid, "raw": raw, "tokens": words}
        for k, (sentid, raw, words) in enumerate(image.captions)
    ]
    return {
        "imgid": imgid,
        **({} if path.parent == PurePosixPath() else {"filepath": path.parent.as_posix()}),
        "filename": path.name,
        "split": image.split or drawn[file],
        **({} if image.cocoid is None else {"cocoid": image.cocoid}),
        "sentids": [sentence["sentid"] for sentence in sentences],
        "sentences": sentences,
    }


def whole_number(value: object, what: str) -> int | None:
    """An id as it stands in a row, a number or a text; :class:`BadRow` if it is neither."""
    if value is None or value == "":
        return None
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or abs(number) >= 2**63:
        raise BadRow(f"{what} {value!r} is no whole number")
    return number


def texts(values: Iterable[object]) -> tuple[str, ...]:
    """Captions that stand in a row as texts, or as lists of texts; :class:`BadRow` if something else is there."""
    flat = [text for value in values for text in (value if isinstance(value, list) else [value])]
    for text in flat:
        if text is not None and not isinstance(text, str):
            raise BadRow(f"the caption {text!r:.50} is no text")
    return tuple(str(text or "") for text in flat)


def fields_of(given: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Columns by field from texts ``FIELD=NAME``; :class:`UserError` if one is something else."""
    columns: dict[str, tuple[str, ...]] = {}
    for text in given:
        what, is_pair, name = text.partition("=")
        if not (what and is_pair and name):
            raise UserError(f"--column {text}: FIELD=NAME is needed, e.g. --column file=image_name")
        columns[what] = (*columns.get(what, ()), name)
    return columns


_FAILURES = text_kind("a list of rows that were left out", '{"place": ', within=10)


def check_name(name: str) -> None:
    """:class:`UserError` if ``name`` cannot be that of a data set."""
    if not is_name(name):
        raise UserError(f"{name!r} cannot be the name of a data set, which becomes a part of file names; give another --name")


def check_import_out(settings: ImportSettings) -> None:
    """Check before any work that the folder ``settings.out`` may be written; raises UserError if not."""
    check_dataset_out(settings.out, settings.name)
    check_output(settings.out / "import.failures.jsonl", _FAILURES)


def write_imported_data(content: dict[str, Any], settings: ImportSettings, images: Path | None, inputs: list[Path]) -> Path:
    """Write ``dataset.json``, and a link to the folder of images; returns its path.

    :class:`UserError` if another data set is there.
    """
    check_name(settings.name)
    file = settings.out / "dataset.json"
    if file.exists() and read_json(file) != content and not may_replace_others():
        raise UserError(f"{file} is there and holds something else; move it away, or give another --out or --force")
    counts = Counter(image["split"] for image in content["images"])
    n_captions = sum(len(image["sentences"]) for image in content["images"])
    of_splits = ", ".join(f"{count} {split}" for split, count in counts.items())
    written = write_dataset(content, settings.out, images, inputs)
    log.info("%s: %d images (%s) with %d captions", file, len(content["images"]), of_splits, n_captions)
    return written
