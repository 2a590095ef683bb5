"""Check and fetch bundles of caches (:mod:`vse.features.exchange.bundles`) from a folder, an archive or an address."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Protocol, runtime_checkable
from urllib.parse import quote, urlsplit

from vse.features.cache.feature_cache import open_cache
from vse.features.exchange.bundles import CHUNK, DATASET, LIST, NOTES, TOP, BundledFile, BundleList, read_list
from vse.pipeline.dataset.downloads import download, download_unverified, open_url, read_url, remote_size
from vse.pipeline.errors import UserError
from vse.pipeline.files.archives import ARCHIVE_ERRORS, open_archive, unpack
from vse.pipeline.files.inputs import check_input
from vse.pipeline.files.outputs import may_replace_others
from vse.pipeline.files.writing import clear_temporaries, lock_for_writing, open_atomic, sha256_file
from vse.pipeline.progress import progress_bar

log = logging.getLogger(__name__)
_MOST_BYTES = 50_000_000  # of a list


def check_bundle(source: str, sha256: str | None = None) -> BundleList:
    """Read every file of a bundle and compare it with its list; nothing is kept. :class:`UserError` names what is wrong.

    ``sha256`` is that of the list, if it is known from elsewhere, so that no other list will do.
    """
    with TemporaryDirectory() as folder, _opened(source, Path(folder)) as bundle:
        listed = _list_of(bundle, sha256)
        with progress_bar(desc="check", total=listed.n_bytes, unit="B", unit_scale=True) as bar:
            bundle.check(listed, bar)
    return listed


def fetch_features(source: str, out: Path, out_data: Path | None = None, sha256: str | None = None) -> list[Path]:
    """Fetch the caches of a bundle into the folder ``out``; returns their paths.

    Each file is compared with the list before it has its name, and a cache itself comes after its shards. A second call takes
    what has arrived, as long as the list is the same; files that are there already are kept. :class:`UserError` if a file is
    damaged, lacking or another one than is there, or if the server cannot be reached.

    Parameters
    ----------
    source : a folder, a ``.tar`` archive, or the http:// or https:// address of either
    out_data : where the bundle's ``dataset.json`` goes, if it has one; by default ``../data/<dataset>`` from ``out``
    sha256 : of the list, if it is known from elsewhere
    """
    with ExitStack() as at_end:
        bundle = at_end.enter_context(_opened(source, out))
        listed = _list_of(bundle, sha256)
        places = _places(listed, out, out.absolute().parent / "data" / listed.dataset if out_data is None else out_data)
        heads = {cache.file for cache in listed.caches}
        for name in heads:
            at_end.enter_context(lock_for_writing(out / name))
        clear_temporaries(out)
        lacking = _lacking(listed, places)
        staged = out / f".bundle-{listed.sha256[:16]}"
        if lacking:
            bundle.fetch(lacking, staged)
        if len(lacking) == len(listed.files):
            _check_caches(listed, staged)
        for file in sorted(lacking, key=lambda file: file.path in heads):
            _move(staged / file.path, places[file.path])
        _check_caches(listed, out)
        shutil.rmtree(staged, ignore_errors=True)
    return [out / cache.file for cache in listed.caches]


@runtime_checkable
class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class DamagedBundle(UserError):
    """A bundle whose files are not those of its list."""


class _Bundle(ABC):
    """Where a bundle lies; ``where`` is what messages call it."""

    def __init__(self, where: str) -> None:
        self.where = where.rstrip("/")

    @abstractmethod
    def list_bytes(self) -> bytes:
        """The bytes of its list."""

    @abstractmethod
    def fetch(self, files: list[BundledFile], staged: Path) -> None:
        """Put files into the folder ``staged``, each compared with its entry; what is there already and sound is kept."""

    @abstractmethod
    def check(self, listed: BundleList, bar: Any) -> None:
        """Compare all files with their entries."""

    def compare(self, file: BundledFile, n_bytes: int, sha256: str) -> None:
        """:class:`DamagedBundle` if a file is not as listed."""
        if n_bytes != file.bytes:
            lengths = f"{n_bytes} bytes, and the list says {file.bytes}"
            raise DamagedBundle(f"{self.where}/{file.path}: {lengths}; it was cut or replaced")
        if sha256 != file.sha256:
            raise DamagedBundle(f"{self.where}/{file.path}: its bytes are not those of the list (sha256 differs)")


class _Folder(_Bundle):
    def list_bytes(self) -> bytes:
        return check_input(Path(self.where, LIST)).read_bytes()

    def fetch(self, files: list[BundledFile], staged: Path) -> None:
        with _progress(files) as bar:
            for file in files:
                target = staged / file.path
                if not _is_sound(file, target):
                    with self._open(file) as source, open_atomic(target) as stream:
                        self.compare(file, *_digest(source, bar, file.bytes, stream))

    def check(self, listed: BundleList, bar: Any) -> None:
        for file in listed.files:
            with self._open(file) as source:
                self.compare(file, *_digest(source, bar, file.bytes))

    def _open(self, file: BundledFile) -> IO[bytes]:
        return check_input(Path(self.where, file.path)).open("rb")


class _Archive(_Bundle):
    def __init__(self, where: str, path: Path) -> None:
        super().__init__(where)
        self._path = path

    def list_bytes(self) -> bytes:
        with self._members() as members:
            for name, source in members:
                if name == LIST:
                    return source.read(_MOST_BYTES)
        raise UserError(f"{self.where}: has no {TOP}/{LIST}, so it is no bundle")

    def fetch(self, files: list[BundledFile], staged: Path) -> None:
        if all(_is_sound(file, staged / file.path) for file in files):
            return
        shutil.rmtree(staged, ignore_errors=True)
        try:
            unpack(self._path, TOP, staged, max_bytes=self._path.stat().st_size)
        except UserError as error:
            raise DamagedBundle(str(error)) from None
        with _progress(files) as bar:
            for file in files:
                if not (staged / file.path).is_file():
                    raise DamagedBundle(f"{self.where}: has no {TOP}/{file.path}, which its list names")
                with (staged / file.path).open("rb") as source:
                    self.compare(file, *_digest(source, bar, file.bytes))

    def check(self, listed: BundleList, bar: Any) -> None:
        wanted = {file.path: file for file in listed.files}
        with self._members() as members:
            for name, source in members:
                if (file := wanted.pop(name, None)) is not None:
                    self.compare(file, *_digest(source, bar, file.bytes))
        if wanted:
            raise DamagedBundle(f"{self.where}: has no {TOP}/{next(iter(wanted))}, which its list names")

    @contextmanager
    def _members(self) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
        """The plain files of the archive by their paths in the bundle, in its order."""
        path = check_input(self._path)
        try:
            with open_archive(path) as members:
                files = ((member.name.removeprefix(f"{TOP}/"), member.open()) for member in members if member.is_file)
                yield ((name, source) for name, source in files if source is not None)
        except ARCHIVE_ERRORS as error:
            raise DamagedBundle(f"{self.where}: a damaged archive, or not a zip or tar ({error})") from None


class _Address(_Bundle):
    def list_bytes(self) -> bytes:
        return read_url(f"{self.where}/{LIST}", _MOST_BYTES)

    def fetch(self, files: list[BundledFile], staged: Path) -> None:
        for file in files:
            if not _is_sound(file, staged / file.path):
                download(self._address(file), staged / file.path, file.sha256, file.bytes)

    def check(self, listed: BundleList, bar: Any) -> None:
        for file in listed.files:
            with open_url(self._address(file)) as source:
                self.compare(file, *_digest(source, bar, file.bytes))

    def _address(self, file: BundledFile) -> str:
        return f"{self.where}/{quote(file.path)}"


@contextmanager
def _opened(source: str, out: Path) -> Iterator[_Bundle]:
    """The bundle at a place; an archive at an address is downloaded beside ``out`` first, and removed after success."""
    if not source.startswith(("http://", "https://")):
        if "://" in source:
            raise UserError(f"{source}: neither a folder, a .tar archive nor an http:// or https:// address")
        yield _Folder(source) if Path(source).is_dir() else _Archive(source, Path(source))
    elif not (name := urlsplit(source).path.rpartition("/")[2]).endswith(".tar"):
        yield _Address(source)
    else:
        arrived = out / f".{name}"
        with lock_for_writing(arrived):
            try:
                yield _Archive(source, download_unverified(source, arrived, remote_size(source)))
            except DamagedBundle:
                arrived.unlink()
                raise
        arrived.unlink()


def _list_of(bundle: _Bundle, sha256: str | None) -> BundleList:
    listed = read_list(f"{bundle.where}/{LIST}", bundle.list_bytes())
    if sha256 is not None and listed.sha256 != sha256.lower():
        raise UserError(f"{bundle.where}: another bundle, its list has the sha256 {listed.sha256}")
    log.info("%s: %s", bundle.where, listed.described())
    return listed


def _places(listed: BundleList, out: Path, out_data: Path) -> dict[str, Path]:
    """Where each file goes."""
    others = {DATASET: out_data / DATASET, NOTES: out / f"{listed.dataset}_{NOTES}"}
    return {file.path: others.get(file.path, out / file.path) for file in listed.files}


def _lacking(listed: BundleList, places: Mapping[str, Path]) -> list[BundledFile]:
    """The files that are not in their places yet; :class:`UserError` if another one is."""
    lacking = []
    for file in listed.files:
        place = places[file.path]
        if not (place.exists() or place.is_symlink()):
            lacking.append(file)
        elif not _is_sound(file, place):
            if not (may_replace_others() and place.is_file()):
                raise UserError(
                    f"{place}: is there and is another file than the bundle's; remove it, or fetch to another folder"
                )
            lacking.append(file)
    return lacking


def _is_sound(file: BundledFile, path: Path) -> bool:
    """Whether a file is there and is the listed one."""
    return path.is_file() and path.stat().st_size == file.bytes and sha256_file(path) == file.sha256


def _check_caches(listed: BundleList, folder: Path) -> None:
    """:class:`UserError` if a cache does not open, or is not the one that the list says."""
    for entry in listed.caches:
        cache = open_cache(folder / entry.file)
        if (cache.dataset, cache.feature, cache.key) != (listed.dataset, entry.feature, entry.key):
            raise UserError(f"{folder / entry.file}: not the cache that the bundle's list names; it was packed wrongly")


def _move(path: Path, place: Path) -> None:
    """Give a file that is complete its name."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise UserError(f"cannot write {place}: {error.strerror or error}") from error
        with path.open("rb") as source, open_atomic(place) as stream:
            shutil.copyfileobj(source, stream, CHUNK)
        path.unlink()


def _digest(source: _Readable, bar: Any, expected: int, stream: IO[bytes] | None = None) -> tuple[int, str]:
    """Return size and SHA-256 of a file, which is also written to ``stream``; stop if it has more bytes than ``expected``."""
    digest, n_bytes = hashlib.sha256(), 0
    while n_bytes <= expected and (chunk := source.read(CHUNK)):
        digest.update(chunk)
        n_bytes += len(chunk)
        bar.update(len(chunk))
        if stream is not None:
            stream.write(chunk)
    return n_bytes, digest.hexdigest()


def _progress(files: list[BundledFile]) -> Any:
    return progress_bar(desc="fetch", total=sum(file.bytes for file in files), unit="B", unit_scale=True)
