"""Archives of the WebDataset layout as a data set: members ``<key>.jpg`` with ``<key>.txt`` or ``<key>.json`` beside them.

The samples of a WebDataset archive: consecutive members whose names have one key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vse.pipeline.errors import UserError, did_you_mean, printable
from vse.pipeline.files.archives import ARCHIVE_ERRORS, ArchiveMember, member_fault, open_archive
from vse.pipeline.files.inputs import check_input, error_reason
from vse.pipeline.files.writing import lock_for_writing, parse_json
from vse.pipeline.imports.photos import MOST_BYTES, UnpackedPhotos
from vse.pipeline.imports.rows import (
    BadRow,
    GatheredRows,
    ImportedRow,
    ImportSettings,
    check_name,
    log,
    texts,
    write_imported_data,
)
from vse.pipeline.imports.tables import columns_read, row_of
from vse.pipeline.progress import progress_bar

PHOTOS = ("jpg", "jpeg", "png", "webp")
KEY_ENDS = ("first-dot", "last-dot")
_CAPTIONS = ("txt", "json")
_READ = (*PHOTOS, *_CAPTIONS)
_MOST_TEXT = 1_000_000
_SHOWN = 5  # kinds of members that are not read, in the log


@dataclass
class Sample:
    """Consecutive members with one key.

    content, names : the bytes and the name of each member that is read, by its ending
    longer : members that are not read because their ending has a dot, although its last part is that of a photo or caption,
        such as ``a.b.jpg`` in the sample ``a``
    fault : the first fault of a member
    """

    key: str
    content: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    longer: list[PurePosixPath] = field(default_factory=list)
    fault: str | None = None

    @property
    def first_name(self) -> str:
        """The name of a member."""
        return next(iter(self.names.values()), str(next(iter(self.longer), self.key)))

    @property
    def photo(self) -> str:
        """The ending of the photo; :class:`BadRow` if there is none."""
        for end in PHOTOS:
            if end in self.content:
                return end
        raise BadRow(f"no photo ({', '.join(PHOTOS)}){self.not_read()}")

    def not_read(self) -> str:
        """Return the end of a message that names a member with a longer ending."""
        if not self.longer:
            return ""
        name = str(self.longer[0])
        return f"; member {name!r} is the field {self.longer[0].name.partition('.')[2]!r} of this key, and is not read"

    def check(self) -> None:
        """Raise :class:`BadRow` if a member is faulty, or if the members would be several samples up to the last dot."""
        if self.fault:
            raise BadRow(self.fault)
        ends: dict[PurePosixPath, set[str]] = {}
        for path in self.longer:
            ends.setdefault(path.with_suffix(""), set()).add(path.suffix[1:].lower())
        pair = next((stem for stem, each in ends.items() if _is_pair(each)), None)
        if pair is None:
            return
        first = next(str(path) for path in self.longer if path.with_suffix("") == pair)
        others = [path for path in self.longer if path.with_suffix("") != pair]
        other = next(map(str, [*others, *self.names.values()]), None)
        both = f"member {first!r} has" if other is None else f"members {first!r} and {other!r} have"
        raise BadRow(f"{both} the key {self.key}, which ends at the first dot; --key-until last-dot ends it at the last one")


class SampleReader:
    """Reads samples whose key ends at the first dot of a file name, as in WebDataset itself, or at the last one."""

    def __init__(self, key_until: str) -> None:
        self._key_until = key_until
        self._not_read: Counter[str] = Counter()

    def samples(self, members: Iterable[ArchiveMember]) -> Iterator[Sample]:
        """Yield the samples of an archive in its order, without those of which no member would be read."""
        sample = Sample("")
        for member in members:
            path = PurePosixPath(member.name)
            fault = member_fault(member, path)
            if member.is_folder and fault is None:
                continue
            stem, dot, end = path.name.partition(".") if self._key_until == "first-dot" else path.name.rpartition(".")
            if fault is None and (not dot or path.name.startswith(".")):
                self._not_read["without a key"] += 1  # also inside a sample: macOS puts "._a.txt" before "a.txt"
                continue
            key = (path.parent / (stem or path.name)).as_posix()
            if key != sample.key:
                yield from self._finished(sample)
                sample = Sample(key)
            self._add(sample, member, path, end.lower(), fault)
        yield from self._finished(sample)

    @property
    def n_not_read(self) -> int:
        """The number of members that were not read so far."""
        return self._not_read.total()

    def counts(self) -> str:
        """Return the number of members that were not read, by their ending."""
        counts = [f"{count} {end}" for end, count in self._not_read.most_common(_SHOWN)]
        others = len(self._not_read) - len(counts)
        return printable(", ".join([*counts, *([f"{others} other kinds"] if others else [])]))

    def _finished(self, sample: Sample) -> Iterator[Sample]:
        self._not_read.update(f"*.{end}" for end in [end for end in sample.content if end in PHOTOS][1:])
        if sample.content or sample.longer or sample.fault:
            yield sample

    def _add(self, sample: Sample, member: ArchiveMember, path: PurePosixPath, end: str, fault: str | None) -> None:
        """Read a member into its sample, or note its fault, or count it as not read."""
        if fault is None and end not in _READ:
            self._not_read[f"*.{end}"] += 1
            if end.rpartition(".")[2] in _READ:
                sample.longer.append(path)
            return
        most = MOST_BYTES if end in PHOTOS else _MOST_TEXT
        if fault is None and member.size > most:
            fault = f"has {member.size} bytes, more than {most}"
        if fault is None and end in sample.names:
            before = sample.names[end]
            fault = "is there twice" if before == member.name else f"has the key and the ending of member {before!r}"
        if fault is not None:
            sample.fault = sample.fault or f"member {member.name!r} {fault}"
            return
        stream = member.open()
        assert stream is not None, "a plain file can be read"
        with stream:
            sample.content[end], sample.names[end] = stream.read(most), member.name


def _is_pair(ends: Collection[str]) -> bool:
    """Return whether endings are those of a photo and of its captions."""
    return any(end in ends for end in PHOTOS) and any(end in ends for end in _CAPTIONS)


ARCHIVES = (".tar", ".tar.gz", ".tgz")
_SPLITS = ("train", "val", "valid", "validation", "dev", "test")
_BLOCK = 512


def archives_in(source: Path) -> list[Path]:
    """The archives in a folder and the folders in it, in the order of their names; a file is itself."""
    paths = source.rglob("*") if source.is_dir() else [source]
    return sorted(path for path in paths if path.name.lower().endswith(ARCHIVES) and path.is_file())


def import_webdataset(sources: Sequence[Path], settings: ImportSettings, key_until: str = "first-dot") -> Path:
    """Write ``dataset.json`` and the photos of all samples of WebDataset archives; returns its path.

    A sample has a photo and its captions: the lines of its ``.txt``, or what its ``.json`` has, a list or an object. That may
    also give split and ids; else an archive or its folder may be called after a split (``train-0001.tar``, ``test/0.tar``).
    Nothing is written that an archive's member names outside of its folder. An import that was stopped goes on where it was:
    photos that are there are compared, not written again.

    As in WebDataset itself, a key ends at the first dot of a member's file name: ``a.b.jpg`` is the field ``b.jpg`` of the
    sample ``a``. With ``key_until="last-dot"`` it ends at the last one. Two samples with one key are refused. Members that
    are not read are counted.
    """
    check_name(settings.name)
    if key_until not in KEY_ENDS:
        raise UserError(f"--key-until {key_until}: unknown{did_you_mean(key_until, KEY_ENDS)}")
    archives = [(source, path) for source in sources for path in archives_in(source)]
    if not archives:
        raise UserError(f"{sources[0]}: no archive in it; {', '.join(ARCHIVES)} are read")
    folders = [_folder(source, path) for source, path in archives]
    for folder, count in Counter(folders).items():
        if count > 1:
            same = " and ".join(str(path) for at, (_, path) in zip(folders, archives, strict=True) if at == folder)
            raise UserError(
                f"{same}: two archives have the same name; give the folder in which all of them lie, or rename one"
            )
    gathered = GatheredRows(settings)
    sizes = [check_input(path).stat().st_size for _, path in archives]
    with lock_for_writing(settings.out, folder=True), progress_bar(
        desc="unpack photos", total=sum(sizes), unit="B", unit_scale=True
    ) as bar:  # fmt: skip
        photos = UnpackedPhotos(settings.out, gathered)
        reader = SampleReader(key_until)
        seen: dict[str, str] = {}
        for (_, archive), folder, size in zip(archives, folders, sizes, strict=True):
            _add_archive(archive, folder, reader, seen, gathered, photos, settings)
            bar.update(size)
        if reader.n_not_read:
            log.warning("%d members are not read: %s", reader.n_not_read, reader.counts())
        not_read = {"members_not_read": reader.n_not_read} if reader.n_not_read else {}
        content = gathered.content(format="webdataset", files=[path.name for _, path in archives], **not_read)
        return write_imported_data(content, settings, None, [path for _, path in archives])


def _folder(source: Path, archive: Path) -> str:
    """Return the folder for the photos of an archive: its name, below the folders in which it lies in ``source``."""
    relative = archive.relative_to(source) if source.is_dir() else Path(archive.name)
    ending = max((ending for ending in ARCHIVES if relative.name.lower().endswith(ending)), key=len)
    return relative.with_name(relative.name[: -len(ending)] or relative.name).as_posix()


def _add_archive(
    archive: Path,
    folder: str,
    reader: SampleReader,
    seen: dict[str, str],
    gathered: GatheredRows,
    photos: UnpackedPhotos,
    settings: ImportSettings,
) -> None:
    """Take the samples of an archive; ``seen`` has a member of each sample that was taken or refused."""
    split = _split_of(folder)
    try:
        with open_archive(archive) as members:
            for sample in reader.samples(members):
                place, file = f"{archive}: {sample.key}", f"{folder}/{sample.key}"
                try:
                    sample.check()
                    if file in seen:
                        raise BadRow(f"{sample.key} is there already (members {seen[file]!r} and {sample.first_name!r})")
                    seen[file] = sample.first_name
                    photos.add(*_row(place, file, sample, split, settings.columns))
                except BadRow as reason:
                    gathered.refuse(place, reason)
        if not _has_end(archive):
            gathered.refuse(str(archive), "a damaged archive: it is cut off")
    except (*ARCHIVE_ERRORS, OSError) as error:
        gathered.refuse(str(archive), f"a damaged archive, or not one ({error_reason(error)})")


def _has_end(archive: Path) -> bool:
    """Whether a tar file ends with the zeros that all writers put there; without them a cut between members is silent."""
    if archive.suffix != ".tar":
        return True  # compressed: a cut is an error
    with archive.open("rb") as stream:
        stream.seek(-min(_BLOCK, archive.stat().st_size), 2)
        return not any(stream.read(_BLOCK))


def _split_of(folder: str) -> str | None:
    """The split after which an archive, or the folder in which it lies, is called."""
    *parents, name = folder.lower().split("/")
    for part in (name, *parents[::-1]):
        for split in _SPLITS:
            if part == split or part.startswith((f"{split}-", f"{split}_", f"{split}.")):
                return split
    return None


def _row(
    place: str, file: str, sample: Sample, split: str | None, columns: Mapping[str, tuple[str, ...]]
) -> tuple[ImportedRow, bytes]:
    """The row of a sample, and its photo; :class:`BadRow` if one of them is missing or cannot be read."""
    end, parts = sample.photo, sample.content
    said: dict[str, list[Any]] = {}
    if "json" in parts:
        try:
            parsed = parse_json(Path(place), parts["json"])
            content = parsed if isinstance(parsed, dict) else {"caption": parsed}
            chosen = columns_read(Path(place), content, columns, ())
            said = {what: [content[name] for name in names] for what, names in chosen.items()}
        except UserError as error:
            raise BadRow(str(error).removeprefix(f"{Path(place)}: ")) from None
    if "txt" in parts:
        try:
            said["caption"] = [line for line in parts["txt"].decode("utf-8-sig").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise BadRow("its text is not UTF-8") from None
    if not texts(said.get("caption", [])):
        raise BadRow(f"no caption (txt, json){sample.not_read()}")
    return row_of(place, {"split": [split], **said, "file": [f"{file}.{end}"]}), parts[end]
