"""Archives of the WebDataset layout as a data set: members ``<key>.jpg`` with ``<key>.txt`` or ``<key>.json`` beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from vse.pipeline.archives import BROKEN, ArchiveMember, member_fault, opened_archive
from vse.pipeline.caption_tables import columns_read, row_of
from vse.pipeline.errors import UserError
from vse.pipeline.files import parse_json
from vse.pipeline.imported_rows import BadRow, GatheredRows, ImportedRow, ImportSettings, texts
from vse.pipeline.imported_write import check_name, write_imported_data
from vse.pipeline.input_files import check_input, reason_of
from vse.pipeline.locks import only_writer
from vse.pipeline.progress import progress_bar
from vse.pipeline.unpacked_photos import MOST_BYTES, UnpackedPhotos

ARCHIVES = (".tar", ".tar.gz", ".tgz")
_PHOTOS = ("jpg", "jpeg", "png", "webp")
_SPLITS = ("train", "val", "valid", "validation", "dev", "test")
_MOST_TEXT = 1_000_000
_BLOCK = 512
_Sample = dict[str, bytes]


def archives_in(source: Path) -> list[Path]:
    """The archives in a folder and the folders in it, in the order of their names; a file is itself."""
    paths = source.rglob("*") if source.is_dir() else [source]
    return sorted(path for path in paths if path.name.lower().endswith(ARCHIVES) and path.is_file())


def import_webdataset(sources: Sequence[Path], settings: ImportSettings) -> Path:
    """Write ``dataset.json`` and the photos of all samples of WebDataset archives; returns its path.

    A sample has a photo and its captions: the lines of its ``.txt``, or what its ``.json`` has, a list or an object. That may
    also give split and ids; else an archive or its folder may be called after a split (``train-0001.tar``, ``test/0.tar``).
    Nothing is written that an archive's member names outside of its folder. An import that was stopped goes on where it was:
    photos that are there are compared, not written again.
    """
    check_name(settings.name)
    archives = [(source, path) for source in sources for path in archives_in(source)]
    if not archives:
        raise UserError(f"{sources[0]}: no archive in it; {', '.join(ARCHIVES)} are read")
    folders = [_folder(source, path) for source, path in archives]
    if len(set(folders)) < len(folders):
        raise UserError("two archives have the same name; give the folder in which all of them lie")
    gathered = GatheredRows(settings)
    sizes = [check_input(path).stat().st_size for _, path in archives]
    with only_writer(settings.out, folder=True), progress_bar(
        desc="unpack photos", total=sum(sizes), unit="B", unit_scale=True
    ) as bar:  # fmt: skip
        photos = UnpackedPhotos(settings.out, gathered)
        for (_, archive), folder, size in zip(archives, folders, sizes, strict=True):
            _add_archive(archive, folder, gathered, photos, settings)
            bar.update(size)
        content = gathered.content(format="webdataset", files=[path.name for _, path in archives])
        return write_imported_data(content, settings, None, [path for _, path in archives])


def _folder(source: Path, archive: Path) -> str:
    """Where the photos of an archive go: after its name and, in a folder, the folders in which it lies."""
    relative = archive.relative_to(source) if source.is_dir() else Path(archive.name)
    return relative.with_name(relative.name.split(".")[0]).as_posix()


def _add_archive(archive: Path, folder: str, gathered: GatheredRows, photos: UnpackedPhotos, settings: ImportSettings) -> None:
    seen: set[str] = set()
    split = _split_of(folder)
    try:
        with opened_archive(archive) as members:
            for key, sample, fault in _samples(members):
                place = f"{archive}: {key}"
                try:
                    if fault:
                        raise BadRow(fault)
                    photos.once(seen, key)
                    photos.add(*_row(place, f"{folder}/{key}", sample, split, settings.columns))
                except BadRow as reason:
                    gathered.refuse(place, reason)
        if not _has_end(archive):
            gathered.refuse(str(archive), "a damaged archive: it is cut off")
    except (*BROKEN, OSError) as error:
        gathered.refuse(str(archive), f"a damaged archive, or not one ({reason_of(error)})")


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
            if part == split or part.startswith((f"{split}-", f"{split}_")):
                return split
    return None


def _samples(members: Iterable[ArchiveMember]) -> Iterator[tuple[str, _Sample, str | None]]:
    """Each key with the content of its members by their ending, and what is wrong with one of these, if something is."""
    key, fault = "", None
    sample: _Sample = {}
    for member in members:
        if member.is_folder and member_fault(member, PurePosixPath(member.name)) is None:
            continue
        path = PurePosixPath(member.name)
        stem, _, end = path.name.partition(".")
        this = (path.parent / stem).as_posix()
        if this != key:
            if sample or fault:
                yield key, sample, fault
            key, sample, fault = this, {}, None
        fault = fault or _read(member, path, end.lower(), sample)
    if sample or fault:
        yield key, sample, fault


def _read(member: ArchiveMember, path: PurePosixPath, end: str, sample: _Sample) -> str | None:
    """Add the content of a member to its sample, if it is of use; returns what is wrong with it."""
    wrong = member_fault(member, path)
    if wrong is not None:
        return f"member {member.name!r} {wrong}"
    if end not in (*_PHOTOS, "txt", "json"):
        return None
    most = MOST_BYTES if end in _PHOTOS else _MOST_TEXT
    if member.size > most:
        return f"member {member.name!r} has {member.size} bytes, more than {most}"
    if end in sample:
        return f"member {member.name!r} is there twice"
    stream = member.open()
    assert stream is not None, "a plain file can be read"
    with stream:
        sample[end] = stream.read(most)
    return None


def _row(
    place: str, file: str, sample: _Sample, split: str | None, columns: Mapping[str, tuple[str, ...]]
) -> tuple[ImportedRow, bytes]:
    """The row of a sample, and its photo; :class:`BadRow` if one of them is missing or cannot be read."""
    end = next((end for end in _PHOTOS if end in sample), None)
    if end is None:
        raise BadRow(f"no photo ({', '.join(_PHOTOS)})")
    said: dict[str, list[Any]] = {}
    if "json" in sample:
        try:
            parsed = parse_json(Path(place), sample["json"])
            content = parsed if isinstance(parsed, dict) else {"caption": parsed}
            chosen = columns_read(Path(place), content, columns, ())
            said = {what: [content[name] for name in names] for what, names in chosen.items()}
        except UserError as error:
            raise BadRow(str(error).removeprefix(f"{Path(place)}: ")) from None
    if "txt" in sample:
        try:
            said["caption"] = [line for line in sample["txt"].decode("utf-8-sig").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise BadRow("its text is not UTF-8") from None
    if not texts(said.get("caption", [])):
        raise BadRow("no caption (txt, json)")
    return row_of(place, {"split": [split], **said, "file": [f"{file}.{end}"]}), sample[end]
