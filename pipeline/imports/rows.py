"""Collect and check the rows of an import, and build the content of ``dataset.json``. A row is an image with some captions."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from vse.pipeline.dataset.captions import IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.dataset import SPLITS
from vse.pipeline.dataset.file_formats import choose_dataset_format, write_dataset_content
from vse.pipeline.dataset.images import build_caption_entry, build_image_entry
from vse.pipeline.dataset.preparation import check_dataset_name, check_dataset_output
from vse.pipeline.dataset.splits_and_noise import sample_splits
from vse.pipeline.errors import UserError, to_printable_line
from vse.pipeline.files.images import BadImage, read_image_size
from vse.pipeline.files.inputs import is_path_text
from vse.pipeline.files.outputs import check_output, text_kind
from vse.pipeline.files.writing import write_text

_SPLIT_BY_ALIAS = {split: split for split in SPLITS} | {"training": "train", "testing": "test"}
_SPLIT_BY_ALIAS |= dict.fromkeys(("dev", "valid", "validation"), "val")
# Paths that pathlib would not change and that cannot lead out of a folder: no component begins with a dot
_PLAIN_PATH_PATTERN = re.compile(r"(?:[^/\0.][^/\0]{0,59}/)*[^/\0.][^/\0]{0,59}")
_CACHED_PATHS = 10_000  # the rows of an image follow each other
_MAX_LOGGED_ROWS = 5  # bad rows in the log; import.failures.jsonl lists all of them
log = logging.getLogger(__name__)


class BadRow(Exception):
    """Raised for an invalid row; the message is the reason."""


@dataclass(frozen=True)
class ImportSettings:
    """The settings of an import, for all formats.

    name : the name of the data set
    out : the folder of ``dataset.json``
    val, test : the shares of images for these splits, if the imported data has no splits; None stands for 0.1
    seed : the seed of the sample
    tokeniser : the name of the tokeniser for the captions
    skip_bad : whether bad rows are left out and listed; otherwise a bad row is an error
    columns : the columns that the user chose, by field, such as ``caption``; other fields are read from their usual columns
    quoting : how the cells of CSV files are quoted, "minimal" or "none"; None stands for "minimal"
    encoding : the encoding of CSV files; None if it must be detected
    column_names : the names of the columns of a CSV file without a header; None if the first line is the header
    needs_confirmation : whether the user must confirm the columns and the first rows of a table before the import
    """

    name: str
    out: Path
    val: float | None = None
    test: float | None = None
    seed: int = 0
    tokeniser: str = IMPORT_TOKENISER
    skip_bad: bool = False
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quoting: str | None = None
    encoding: str | None = None
    column_names: tuple[str, ...] | None = None
    needs_confirmation: bool = False


class ImportedRow(NamedTuple):
    """A row of imported data: an image and captions of this image.

    ``file`` is the path of the image in the folder of images. ``row_location`` is the file and line of the row, for messages.
    An image may have several rows. If one row has ids, all rows need ids.
    """

    row_location: str
    file: str
    captions: tuple[str, ...]
    split: str | None = None
    imgid: int | None = None
    sentids: tuple[int, ...] = ()
    cocoid: int | None = None


@dataclass
class BadRowList:
    """The invalid rows of an import, each with its file and line and its fault.

    If ``skip_bad`` is false, an invalid row makes the import fail.
    """

    skip_bad: bool
    places_and_faults: list[tuple[str, str]] = field(default_factory=list)

    def add(self, place: str, reason: object) -> None:
        self.places_and_faults.append((place, to_printable_line(reason)))
        if len(self.places_and_faults) <= _MAX_LOGGED_ROWS:
            log.warning("%s: %s", *self.places_and_faults[-1])

    def raise_or_write_list(self, file: Path, n_rows: int) -> None:
        """Raise UserError if there are bad rows; if ``skip_bad`` is true, write a list of them to ``file`` instead.

        Without bad rows, an earlier ``file`` is removed. ``n_rows`` is the number of all rows, for the message.
        """
        if not self.places_and_faults:
            file.unlink(missing_ok=True)
            return
        count = f"{len(self.places_and_faults)} of {n_rows} rows cannot be imported"
        if not self.skip_bad:
            place, reason = self.places_and_faults[0]
            advice = "" if "--encoding" in reason else "; --skip-bad leaves them out"
            raise UserError(f"{place}: {reason} ({count}{advice})")
        entries = ({"place": place, "reason": reason} for place, reason in self.places_and_faults)
        write_text(file, "".join(f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries))
        log.warning("%s and are left out; %s lists them", count, file)


@dataclass
class _CollectedImage:
    """The rows of one image.

    row_locations : the file and line of each row
    captions : the id (None if it is missing), the text and the tokens of each caption
    """

    row_locations: list[str]
    imgid: int | None
    cocoid: int | None
    split: str | None
    captions: list[tuple[int | None, str, list[str]]]


class RowCollector:
    """A collector that groups rows by image.

    ``check`` is a function that gets the path of an image, and raises :class:`BadRow` if the file cannot be used.
    """

    def __init__(self, settings: ImportSettings, check: Callable[[str], None] = lambda file: None) -> None:
        self.bad_rows = BadRowList(settings.skip_bad)
        self.n_rows = 0
        self._settings, self._check_file = settings, check
        self._tokenise = find_tokeniser(settings.tokeniser, "--tokeniser")
        self._image_by_file: dict[str, _CollectedImage] = {}
        self._file_by_imgid: dict[int, str] = {}
        self._sentids: set[int] = set()
        self._fault_by_file: dict[str, str] = {}

    @property
    def can_succeed(self) -> bool:
        """True if all rows so far are valid, or if invalid rows may be left out (``skip_bad``)."""
        return self.bad_rows.skip_bad or not self.bad_rows.places_and_faults

    def add(self, row: ImportedRow) -> str | None:
        """Add a row; return the normalised path of its image. If the row is invalid, add it to ``bad_rows``; return None."""
        self.n_rows += 1
        try:
            return self._add(row)
        except BadRow as reason:
            self.bad_rows.add(row.row_location, reason)
            return None

    def add_row_with_photo(self, row: ImportedRow, content: bytes) -> str | None:
        """Add a row as :meth:`add` does. The row is also invalid if ``content``, the bytes of its photo, is not an image.

        The photo is not stored.
        """
        try:
            read_image_size(Path(row.file), content)
        except BadImage as fault:
            self.add_bad_row(row.row_location, fault)
            return None
        return self.add(row)

    def add_bad_row(self, place: str, reason: object) -> None:
        """Count an invalid row, and add it to ``bad_rows`` with its ``place`` (file and line) and the ``reason``."""
        self.n_rows += 1
        self.bad_rows.add(place, reason)

    def list_image_files(self) -> list[str]:
        """Return the paths of the images, in the order of the rows."""
        return list(self._image_by_file)

    def _add(self, row: ImportedRow) -> str:
        file = normalize_image_path(row.file)
        split = parse_split(row.split)
        # equal words are one object, because a million captions have ten million words, but few different ones
        captions = [(text.strip(), [*map(sys.intern, self._tokenise(text))]) for text in row.captions]
        for text, tokens in captions:
            if not tokens:
                raise BadRow(f"the caption {text[:50]!r} has no word" if text else "the caption is empty")
        if not captions:
            raise BadRow("has no caption")
        known = self._image_by_file.get(file)
        if known is None:
            if file not in self._fault_by_file:
                try:
                    self._check_file(file)
                except BadRow as fault:
                    self._fault_by_file[file] = str(fault)
            if file in self._fault_by_file:
                raise BadRow(self._fault_by_file[file])
        self._check_ids(row, file, known, split)
        image = self._image_by_file.setdefault(file, _CollectedImage([], row.imgid, row.cocoid, split, []))
        image.row_locations.append(row.row_location)
        sentids = row.sentids or (None,) * len(captions)
        image.captions += [(sentid, *caption) for sentid, caption in zip(sentids, captions, strict=True)]
        self._sentids.update(row.sentids)
        if row.imgid is not None:
            self._file_by_imgid[row.imgid] = file
        return file

    def _check_ids(self, row: ImportedRow, file: str, known: _CollectedImage | None, split: str | None) -> None:
        if known is not None:
            for name, value, earlier in (("split", split, known.split), ("imgid", row.imgid, known.imgid)):
                if value != earlier:
                    raise BadRow(f"{file} has {name} {value}, but {name} {earlier} at {known.row_locations[0]}")
            if bool(row.sentids) != (known.captions[0][0] is not None):
                raise BadRow(f"{file} has captions with and without an id")
        if row.imgid is not None and self._file_by_imgid.get(row.imgid, file) != file:
            raise BadRow(f"{self._file_by_imgid[row.imgid]} also has imgid {row.imgid}")
        if row.sentids and len(row.sentids) != len(row.captions):
            raise BadRow(f"{len(row.sentids)} ids for {len(row.captions)} captions")
        repeated = [sentid for sentid in row.sentids if sentid in self._sentids]
        if repeated or len(set(row.sentids)) < len(row.sentids):
            raise BadRow(f"an earlier caption also has sentid {(repeated or row.sentids)[0]}")

    def build_dataset_content(self, images_folder: Path | None, **source_facts: Any) -> dict[str, Any]:
        """Return the content of ``dataset.json``. ``source_facts`` describe the source; they are stored under ``imported``.

        Images and captions without ids are numbered in order. If the rows name no splits, splits are sampled, and photos that
        look similar get the same split. ``images_folder`` is the folder of the photos; None if the photos are not read.

        If ``skip_bad`` is set, ``import.failures.jsonl`` lists the bad rows. Otherwise raises UserError if there are any.
        """
        self._drop_incomplete_images("split", lambda image: image.split)
        self._drop_incomplete_images("imgid", lambda image: image.imgid)
        self._drop_incomplete_images("sentid", lambda image: image.captions[0][0])
        n_taken = sum(len(image.row_locations) for image in self._image_by_file.values())
        n_bad_rows = len(self.bad_rows.places_and_faults)
        assert n_taken + n_bad_rows == self.n_rows, "each row is taken or refused"
        self.bad_rows.raise_or_write_list(self._settings.out / "import.failures.jsonl", self.n_rows)
        log.info("%d rows read: %d taken, %d refused", self.n_rows, n_taken, n_bad_rows)
        if not self._image_by_file:
            raise UserError(f"all {self.n_rows} rows lack an image with a caption")
        has_splits = next(iter(self._image_by_file.values())).split is not None
        sampled = sample_missing_splits(self._settings, self.list_image_files(), has_splits, images_folder)
        entries: list[dict[str, Any]] = []
        n_captions = 0
        for index, (file, image) in enumerate(self._image_by_file.items()):
            entries.append(_build_entry(index if image.imgid is None else image.imgid, file, image, sampled, n_captions))
            n_captions += len(image.captions)
        return {**build_import_fields(self._settings, has_splits, n_bad_rows, source_facts), "images": entries}

    def _drop_incomplete_images(self, field_name: str, get: Callable[[_CollectedImage], Any]) -> None:
        """Remove images that lack a field, such as the split, if other images have it. Rows of removed images become bad rows.

        ``get`` returns the value of the field for an image; None for a missing value. ``field_name`` is for the message.
        """
        incomplete = {file: image for file, image in self._image_by_file.items() if get(image) is None}
        if len(incomplete) < len(self._image_by_file):
            for file, image in incomplete.items():
                for place in image.row_locations:
                    self.bad_rows.add(place, f"{file} has no {field_name}, although other images have one")
                del self._image_by_file[file]


def sample_missing_splits(
    settings: ImportSettings, files: Sequence[str], has_splits: bool, images_folder: Path | None
) -> dict[str, str]:
    """Return a sampled split for each file. If the imported data already has splits, return an empty dictionary.

    ``images_folder`` is the folder of the photos; None if the photos are not read. Raises UserError if ``has_splits`` and the
    settings give shares for ``val`` or ``test``.
    """
    if not has_splits:
        return sample_splits(
            files, _share_or_default(settings.val), _share_or_default(settings.test), settings.seed, images_folder
        )
    if (settings.val, settings.test) != (None, None):
        raise UserError("the source has splits, so none are sampled; leave --val and --test out")
    return {}


def build_import_fields(
    settings: ImportSettings, has_splits: bool, n_bad_rows: int, source_facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the keys of ``dataset.json`` besides ``images``.

    The key ``imported`` holds ``source_facts`` (descriptions of the source), the number ``n_bad_rows`` of bad rows and, for
    sampled splits, the shares and the seed. ``has_splits`` states whether the source has splits.
    """
    shares = {"val": _share_or_default(settings.val), "test": _share_or_default(settings.test), "seed": settings.seed}
    imported = {**source_facts, "splits": "given" if has_splits else shares, "bad_rows": n_bad_rows}
    return {"dataset": settings.name, "tokeniser": settings.tokeniser, "imported": imported}


def _share_or_default(share: float | None) -> float:
    return 0.1 if share is None else share


@lru_cache(maxsize=_CACHED_PATHS)
def normalize_image_path(name: str) -> str:
    """Return the normalised path of an image. Raises BadRow if the path names no file or leads out of the folder of images."""
    if _PLAIN_PATH_PATTERN.fullmatch(name):
        return name
    path = PurePosixPath(name)
    if not is_path_text(name) or not path.name:
        raise BadRow("names no image file")
    if path.is_absolute() or ".." in path.parts:
        raise BadRow(f"the file {name!r} is outside the folder of images")
    return path.as_posix()


def parse_split(name: str | None) -> str | None:
    """Return the split that a word such as ``val`` or ``dev`` names; None if ``name`` is None or blank.

    Raises BadRow if ``name`` names no split.
    """
    if name in SPLITS:
        return name
    if name is None or not name.strip():
        return None
    split = _SPLIT_BY_ALIAS.get(name.strip().lower())
    if split is None:
        raise BadRow(f"unknown split {name!r}; known: {', '.join(_SPLIT_BY_ALIAS)}")
    return split


def _build_entry(
    imgid: int, file: str, image: _CollectedImage, sampled_splits: dict[str, str], n_before: int
) -> dict[str, Any]:
    """Return an image as a JSON object for ``dataset.json``.

    ``sampled_splits`` maps files to splits, for images without a split. Captions without ids get the ids ``n_before``,
    ``n_before`` + 1 and so on: ``n_before`` is the number of captions of earlier images.
    """
    sentences = [
        build_caption_entry(n_before + k if sentid is None else sentid, imgid, raw, tokens)
        for k, (sentid, raw, tokens) in enumerate(image.captions)
    ]
    return build_image_entry(imgid, file, image.split or sampled_splits[file], image.cocoid, sentences)


def flatten_captions(values: Iterable[object]) -> tuple[str, ...]:
    """Return the captions of a row as texts; ``values`` are texts or lists of texts. Raises BadRow for any other value."""
    flat = [text for value in values for text in (value if isinstance(value, list) else (value,))]
    for text in flat:
        if text is not None and not isinstance(text, str):
            raise BadRow(f"the caption {text!r:.50} is not a text")
    return tuple(str(text or "") for text in flat)


def parse_column_options(options: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns that the user chose for each field, e.g. ``{"caption": ("title", "text")}``.

    ``options`` are the values of ``--column``, such as ``caption=title``. Raises UserError if a value has another form.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for text in options:
        field_name, is_pair, name = text.partition("=")
        if not (field_name and is_pair and name):
            raise UserError(f"--column {text}: FIELD=NAME is needed, e.g. --column file=image_name")
        columns[field_name] = (*columns.get(field_name, ()), name)
    return columns


_BAD_ROWS_KIND = text_kind("a list of rows that were left out", '{"place": ', within=10)


def check_import_output(settings: ImportSettings) -> None:
    """Raise UserError if ``settings.out`` has another data set, or an ``import.failures.jsonl`` without a list of bad rows."""
    check_dataset_output(settings.out, settings.name)
    check_output(settings.out / "import.failures.jsonl", _BAD_ROWS_KIND)


def write_imported_data(content: dict[str, Any], settings: ImportSettings, images: Path | None, inputs: list[Path]) -> Path:
    """Write the data set to the folder ``settings.out``, link ``images`` there, and return the path of the data set's file.

    ``content`` is in the layout of ``dataset.json``. Raises UserError if the folder has another data set.
    """
    check_dataset_name(settings.name)
    n_captions = sum(len(image["sentences"]) for image in content["images"])
    counts = Counter(image["split"] for image in content["images"]).items()
    written = write_dataset_content(content, settings.out, images, inputs, choose_dataset_format(n_captions))
    n_images, listed = len(content["images"]), ", ".join(f"{count} {split}" for split, count in counts)
    log.info("%s: %d images (%s) with %d captions", written, n_images, listed, n_captions)
    return written
