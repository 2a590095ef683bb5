"""Import WebDataset archives: tar files with photos ``<key>.jpg`` and captions ``<key>.txt`` or ``<key>.json``.

The photos are unpacked, or they stay in the archives and get an index (:mod:`vse.pipeline.files.photo_archives`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vse.pipeline.dataset.preparation import check_dataset_name
from vse.pipeline.errors import UserError, did_you_mean, to_printable_line
from vse.pipeline.files.archives import ARCHIVE_ERRORS, ArchiveMember, find_member_fault, is_remote
from vse.pipeline.files.inputs import error_reason
from vse.pipeline.files.photo_archives import MAX_PHOTO_BYTES
from vse.pipeline.files.writing import lock_for_writing, parse_json
from vse.pipeline.imports.photos import ARCHIVE_SUFFIXES, PhotoPositionRecorder, PhotoWriter, SourceArchive, find_archives
from vse.pipeline.imports.rows import (
    BadRow,
    ImportedRow,
    ImportSettings,
    RowCollector,
    flatten_captions,
    log,
    write_imported_data,
)
from vse.pipeline.imports.tables import build_imported_row, choose_columns
from vse.pipeline.progress import progress_bar

PHOTO_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
IN_PLACE_FORMAT = "webdataset-in-place"  # the format whose photos stay in the archives
KEY_END_RULES = ("first-dot", "last-dot")
_CAPTION_EXTENSIONS = ("txt", "json")
_USED_EXTENSIONS = (*PHOTO_EXTENSIONS, *_CAPTION_EXTENSIONS)
_MAX_TEXT_BYTES = 1_000_000
_MAX_LOGGED_KINDS = 5  # kinds of unread members in the log


@dataclass
class Sample:
    """A sample: consecutive members (files) of an archive whose names begin with the same key.

    bytes_by_extension : the content of each member that was read
    member_by_extension : the same members, with their positions in the archive
    unread_paths : the paths of members with a known extension after a second dot, such as ``a.b.jpg`` for the key ``a``; these
        members are not read
    fault : a message about the first member that is not usable; None without such a member
    """

    key: str
    bytes_by_extension: dict[str, bytes] = field(default_factory=dict)
    member_by_extension: dict[str, ArchiveMember] = field(default_factory=dict)
    unread_paths: list[PurePosixPath] = field(default_factory=list)
    fault: str | None = None

    @property
    def first_member_name(self) -> str:
        """The name of the first member that was read; if none was read, the path of an unread member, or else the key."""
        names = (member.name for member in self.member_by_extension.values())
        return next(names, str(next(iter(self.unread_paths), self.key)))

    @property
    def photo_extension(self) -> str:
        """The extension of the photo's name. Raises BadRow if the sample has no photo."""
        for extension in PHOTO_EXTENSIONS:
            if extension in self.bytes_by_extension:
                return extension
        raise BadRow(f"no photo ({', '.join(PHOTO_EXTENSIONS)}){self.build_unread_hint()}")

    def build_unread_hint(self) -> str:
        """Return a remark for the end of an error message: a member such as ``a.b.jpg`` is not read, because the key is ``a``.

        Returns an empty text if the sample has no such member.
        """
        if not self.unread_paths:
            return ""
        name = str(self.unread_paths[0])
        return f"; member {name!r} is the field {self.unread_paths[0].name.partition('.')[2]!r} of this key and is not read"

    def check_members(self) -> None:
        """Raise BadRow if a member is not usable, or if the sample seems to hold several samples.

        If the key ends at the first dot, ``a.b.jpg`` and ``a.b.txt`` are unread members of the sample ``a``. Such a pair is
        probably a sample ``a.b`` of its own.
        """
        if self.fault:
            raise BadRow(self.fault)
        extensions: dict[PurePosixPath, set[str]] = {}
        for path in self.unread_paths:
            extensions.setdefault(path.with_suffix(""), set()).add(path.suffix[1:].lower())
        pairs = (stem for stem, each in extensions.items() if each & set(PHOTO_EXTENSIONS) and each & set(_CAPTION_EXTENSIONS))
        pair = next(pairs, None)
        if pair is None:
            return
        first = next(str(path) for path in self.unread_paths if path.with_suffix("") == pair)
        others = [path for path in self.unread_paths if path.with_suffix("") != pair]
        other = next(map(str, [*others, *(member.name for member in self.member_by_extension.values())]), None)
        both = f"member {first!r} has" if other is None else f"members {first!r} and {other!r} have"
        raise BadRow(f"{both} the key {self.key}, which ends at the first dot; --key-until last-dot ends it at the last one")


class SampleReader:
    """A reader of the samples of archives. It counts the members (files) that no sample uses, such as ``a.cls``.

    ``key_until`` states where a key ends in a file name: ``first-dot`` or ``last-dot``.
    """

    def __init__(self, key_until: str) -> None:
        self._key_until = key_until
        self._n_unread_by_extension: Counter[str] = Counter()

    def read_samples(self, members: Iterable[ArchiveMember]) -> Iterator[Sample]:
        """Yield the samples in the order of ``members``.

        A sample with neither photo nor caption is left out, unless a member is faulty or has a name like ``a.b.jpg``.
        """
        sample = Sample("")
        for member in members:
            path = PurePosixPath(member.name)
            fault = find_member_fault(member, path)
            if member.is_folder and fault is None:
                continue
            stem, dot, extension = path.name.partition(".") if self._key_until == "first-dot" else path.name.rpartition(".")
            if fault is None and (not dot or path.name.startswith(".")):
                self._n_unread_by_extension["without a key"] += 1  # also inside a sample: macOS puts "._a.txt" before "a.txt"
                continue
            key = (path.parent / (stem or path.name)).as_posix()
            if key != sample.key:
                yield from self._yield_if_used(sample)
                sample = Sample(key)
            self._add_member(sample, member, path, extension.lower(), fault)
        yield from self._yield_if_used(sample)

    @property
    def n_unread_members(self) -> int:
        return self._n_unread_by_extension.total()

    def describe_unread_members(self) -> str:
        """Return a text with the number of members that are not read, by extension, such as ``12 *.cls, 3 *.npy``."""
        counts = [f"{count} {extension}" for extension, count in self._n_unread_by_extension.most_common(_MAX_LOGGED_KINDS)]
        others = len(self._n_unread_by_extension) - len(counts)
        return to_printable_line(", ".join([*counts, *([f"{others} other kinds"] if others else [])]))

    def _yield_if_used(self, sample: Sample) -> Iterator[Sample]:
        """Yield ``sample`` unless :meth:`read_samples` leaves it out. Count photos after the first as unread."""
        photos = [extension for extension in sample.bytes_by_extension if extension in PHOTO_EXTENSIONS]
        self._n_unread_by_extension.update(f"*.{extension}" for extension in photos[1:])
        if sample.bytes_by_extension or sample.unread_paths or sample.fault:
            yield sample

    def _add_member(
        self, sample: Sample, member: ArchiveMember, path: PurePosixPath, extension: str, fault: str | None
    ) -> None:
        if fault is None and extension not in _USED_EXTENSIONS:
            self._n_unread_by_extension[f"*.{extension}"] += 1
            if extension.rpartition(".")[2] in _USED_EXTENSIONS:
                sample.unread_paths.append(path)
            return
        max_bytes = MAX_PHOTO_BYTES if extension in PHOTO_EXTENSIONS else _MAX_TEXT_BYTES
        if fault is None and member.size > max_bytes:
            fault = f"has {member.size} bytes, more than {max_bytes}"
        if fault is None and extension in sample.member_by_extension:
            before = sample.member_by_extension[extension].name
            fault = "occurs twice" if before == member.name else f"has the same key and extension as member {before!r}"
        if fault is not None:
            sample.fault = sample.fault or f"member {member.name!r} {fault}"
            return
        stream = member.open()
        assert stream is not None, "a plain file can be read"
        with stream:
            sample.bytes_by_extension[extension], sample.member_by_extension[extension] = stream.read(max_bytes), member


_SPLIT_PREFIXES = ("train", "val", "valid", "validation", "dev", "test")


def import_webdataset(
    sources: Sequence[str], settings: ImportSettings, key_until: str | None = None, in_place: bool = False
) -> Path:
    """Import WebDataset archives: write ``dataset.json`` and the photos, and return the path of ``dataset.json``.

    ``sources`` are paths or URLs of archives or folders. With ``in_place``, the photos stay in the archives, and an index of
    their positions is written; a URL requires ``in_place``. ``dataset.json`` is the same in both cases.

    A sample has a photo and captions: the lines of a ``.txt``, or a list or object in a ``.json``. The object may also have
    the split and ids. Otherwise the name of the archive or of a folder may begin with the split (``train-0001.tar``,
    ``test/0.tar``). An interrupted import continues.

    As in WebDataset itself, a key ends at the first dot of a file name: ``a.b.jpg`` is the field ``b.jpg`` of the sample
    ``a``. This is ``key_until="first-dot"``, the default. With ``last-dot`` a key ends at the last dot. A second sample with
    the same key, and a sample with a member whose path leads out of the archive, are bad rows. A log line reports the number
    of unread members.
    """
    check_dataset_name(settings.name)
    key_until = key_until or KEY_END_RULES[0]
    if key_until not in KEY_END_RULES:
        raise UserError(f"--key-until {key_until}: unknown{did_you_mean(key_until, KEY_END_RULES)}")
    url = next(filter(is_remote, sources), None)
    if url is not None and not in_place:
        raise UserError(
            f"{url}: photos at a URL are read in place (--format {IN_PLACE_FORMAT}); to unpack them, download the archives"
        )
    archives = [archive for source in sources for archive in find_archives(source)]
    if not archives:
        raise UserError(f"{sources[0]}: has no archive with a name in {', '.join(ARCHIVE_SUFFIXES)}")
    if in_place and (compressed := next((archive for archive in archives if archive.is_compressed), None)):
        raise UserError(
            f"{compressed}: compressed, and photos can be read in place from .tar archives only; decompress it, or unpack the "
            "photos with --format webdataset"
        )
    for folder, count in Counter(archive.folder for archive in archives).items():
        if count > 1:
            same = " and ".join(str(archive) for archive in archives if archive.folder == folder)
            raise UserError(f"{same}: two archives have the same name; give a folder that contains all of them, or rename one")
    collector = RowCollector(settings)
    sizes = [archive.size for archive in archives]
    with lock_for_writing(settings.out, folder=True), progress_bar(
        desc="index photos" if in_place else "unpack photos", total=sum(sizes), unit="B", unit_scale=True
    ) as bar:  # fmt: skip
        photos = PhotoPositionRecorder(settings.out, collector) if in_place else PhotoWriter(settings.out, collector)
        reader = SampleReader(key_until)
        seen: dict[str, str] = {}
        for archive, size in zip(archives, sizes, strict=True):
            _add_samples_of_archive(archive, reader, seen, collector, photos, settings)
            bar.update(size)
        if reader.n_unread_members:
            log.warning("%d members are not read: %s", reader.n_unread_members, reader.describe_unread_members())
        unread = {"members_not_read": reader.n_unread_members} if reader.n_unread_members else {}
        if isinstance(photos, PhotoPositionRecorder) and collector.can_succeed:
            photos.write()
        content = collector.build_dataset_content(
            photos.images_folder, format="webdataset", files=[archive.name for archive in archives], **unread
        )
        local = [archive.file for archive in archives if isinstance(archive.file, Path)]
        return write_imported_data(content, settings, None, local)


def _add_samples_of_archive(
    archive: SourceArchive,
    reader: SampleReader,
    seen: dict[str, str],
    collector: RowCollector,
    photos: PhotoWriter | PhotoPositionRecorder,
    settings: ImportSettings,
) -> None:
    split = _find_split(archive.folder)
    try:
        with archive.open(in_place=isinstance(photos, PhotoPositionRecorder)) as members:
            for sample in reader.read_samples(members):
                place, file = f"{archive}: {sample.key}", f"{archive.folder}/{sample.key}"
                try:
                    sample.check_members()
                    if file in seen:
                        both = f"members {seen[file]!r} and {sample.first_member_name!r}"
                        raise BadRow(f"an earlier sample also has the key {sample.key} ({both})")
                    seen[file] = sample.first_member_name
                    row, extension = _build_photo_row(place, file, sample, split, settings.columns)
                    content, member = sample.bytes_by_extension[extension], sample.member_by_extension[extension]
                    if isinstance(photos, PhotoPositionRecorder):
                        photos.add(row, content, archive, member)
                    else:
                        photos.add(row, content)
                except BadRow as reason:
                    collector.add_bad_row(place, reason)
        if not archive.is_complete():
            collector.add_bad_row(str(archive), "a damaged archive: its end is missing")
    except (*ARCHIVE_ERRORS, OSError) as error:
        collector.add_bad_row(str(archive), f"a damaged archive, or not one ({error_reason(error)})")


def _find_split(archive_path: str) -> str | None:
    """Return the split at the beginning of the name of the archive, or else of a parent folder; None without a split."""
    *parents, name = archive_path.lower().split("/")
    for part in (name, *parents[::-1]):
        for split in _SPLIT_PREFIXES:
            if part == split or part.startswith((f"{split}-", f"{split}_", f"{split}.")):
                return split
    return None


def _build_photo_row(
    place: str, file: str, sample: Sample, split: str | None, columns: Mapping[str, tuple[str, ...]]
) -> tuple[ImportedRow, str]:
    """Return the row of a sample, and the extension of its photo."""
    extension, parts = sample.photo_extension, sample.bytes_by_extension
    values: dict[str, list[Any]] = {}
    if "json" in parts:
        try:
            parsed = parse_json(Path(place), parts["json"])
            content = parsed if isinstance(parsed, dict) else {"caption": parsed}
            chosen = choose_columns(Path(place), content, columns, ())
            values = {field: [content[name] for name in names] for field, names in chosen.items()}
        except UserError as error:
            raise BadRow(str(error).removeprefix(f"{Path(place)}: ")) from None
    if "txt" in parts:
        try:
            values["caption"] = [line for line in parts["txt"].decode("utf-8-sig").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise BadRow("its text is not UTF-8") from None
    if not flatten_captions(values.get("caption", [])):
        raise BadRow(f"no caption (txt, json){sample.build_unread_hint()}")
    return build_imported_row(place, {"split": [split], **values, "file": [f"{file}.{extension}"]}), extension
