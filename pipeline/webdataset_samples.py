"""The samples of a WebDataset archive: consecutive members whose names have one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from vse.pipeline.archives import ArchiveMember, member_fault
from vse.pipeline.imported_rows import BadRow
from vse.pipeline.plain_text import printable
from vse.pipeline.unpacked_photos import MOST_BYTES

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
