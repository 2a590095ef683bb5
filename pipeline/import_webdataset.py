"""Archives of the WebDataset layout as a data set: members ``<key>.jpg`` with ``<key>.txt`` or ``<key>.json`` beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vse.pipeline.archives import BROKEN, opened_archive
from vse.pipeline.caption_tables import columns_read, row_of
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files import parse_json
from vse.pipeline.imported_rows import BadRow, GatheredRows, ImportedRow, ImportSettings, log, texts
from vse.pipeline.imported_write import check_name, write_imported_data
from vse.pipeline.input_files import check_input, reason_of
from vse.pipeline.locks import only_writer
from vse.pipeline.progress import progress_bar
from vse.pipeline.unpacked_photos import UnpackedPhotos
from vse.pipeline.webdataset_samples import KEY_ENDS, Sample, SampleReader

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
    with only_writer(settings.out, folder=True), progress_bar(
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
        with opened_archive(archive) as members:
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
