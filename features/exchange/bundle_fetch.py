"""Check and fetch bundles of caches from a folder, a tar archive, or an http address of either."""

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
from vse.features.exchange.bundles import (
    ARCHIVE_FOLDER,
    BUNDLE_LIST_FILE_NAME,
    CHUNK_BYTES,
    DATASET_FILE_NAMES,
    NOTES_FILE_NAME,
    BundledFile,
    BundleList,
    parse_bundle_list,
)
from vse.pipeline.dataset.downloads import download, download_unverified, fetch_file_size, open_url, read_url
from vse.pipeline.errors import UserError
from vse.pipeline.files.archives import ARCHIVE_ERRORS, open_archive, unpack_member
from vse.pipeline.files.inputs import check_input
from vse.pipeline.files.outputs import may_replace_other_kinds
from vse.pipeline.files.writing import lock_for_writing, open_atomic, remove_temporary_files, sha256_file
from vse.pipeline.progress import progress_bar

log = logging.getLogger(__name__)
_MAX_LIST_BYTES = 50_000_000


def check_bundle(source: str, sha256: str | None = None) -> BundleList:
    """Compare every file of a bundle of caches with the hash in the bundle's list, ``bundle.json``, and return the list.

    No file is stored. Raises UserError, which names the first fault. ``sha256`` is the required SHA-256 of the list; None: any
    list.
    """
    with TemporaryDirectory() as folder, _open_source(source, Path(folder)) as bundle_source:
        bundle = _load_bundle_list(bundle_source, sha256)
        with progress_bar(desc="check", total=bundle.n_bytes, unit="B", unit_scale=True) as bar:
            bundle_source.check_files(bundle, bar)
    return bundle


def fetch_features(source: str, out: Path, out_data: Path | None = None, sha256: str | None = None) -> list[Path]:
    """Fetch the caches of a bundle into the folder ``out``; return the paths of the caches.

    Each file is compared with the list of the bundle (``bundle.json``) before it gets its final name. A cache file appears
    after its shards. After an interruption, a second call continues. Existing files with the listed bytes are kept. Raises
    UserError if a file of the bundle is damaged or missing, if a different file of the same name exists, or if the server is
    out of reach.

    source : path or http address of a folder or a ``.tar`` archive
    out_data : folder for the bundle's data set file; by default ``data/<dataset>`` next to the folder ``out``
    sha256 : required SHA-256 of the list; None: any list
    """
    with ExitStack() as stack:
        bundle_source = stack.enter_context(_open_source(source, out))
        bundle = _load_bundle_list(bundle_source, sha256)
        out_data = out.absolute().parent / "data" / bundle.dataset if out_data is None else out_data
        others = {
            **{name: out_data / name for name in DATASET_FILE_NAMES},
            NOTES_FILE_NAME: out / f"{bundle.dataset}_{NOTES_FILE_NAME}",
        }
        targets = {file.path: others.get(file.path, out / file.path) for file in bundle.files}
        cache_files = {cache.file for cache in bundle.caches}
        for name in cache_files:
            stack.enter_context(lock_for_writing(out / name))
        remove_temporary_files(out)
        missing = _find_missing_files(bundle, targets)
        staging_folder = out / f".bundle-{bundle.sha256[:16]}"
        if missing:
            bundle_source.fetch_files(missing, staging_folder)
        if len(missing) == len(bundle.files):
            _check_caches(bundle, staging_folder)
        for file in sorted(missing, key=lambda file: file.path in cache_files):
            _move_file(staging_folder / file.path, targets[file.path])
        _check_caches(bundle, out)
        shutil.rmtree(staging_folder, ignore_errors=True)
    return [out / cache.file for cache in bundle.caches]


@runtime_checkable
class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class DamagedBundle(UserError):
    """The error for a bundle in which a file is missing or differs from the bundle's list."""


class _BundleSource(ABC):
    """Base class of bundles in a folder, in an archive or at an address. ``location`` is the path or address."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")

    @abstractmethod
    def read_bundle_list(self) -> bytes:
        """Return the bytes of ``bundle.json``."""

    @abstractmethod
    def fetch_files(self, files: list[BundledFile], staging_folder: Path) -> None:
        """Write files to ``staging_folder`` and compare each with its hash in the list. Files of an earlier call are kept."""

    @abstractmethod
    def check_files(self, bundle: BundleList, bar: Any) -> None:
        """Compare all files of the bundle with their size and hash in the list, and update the progress ``bar``.

        Raises DamagedBundle if a file differs.
        """

    def check_size_and_hash(self, file: BundledFile, n_bytes: int, sha256: str) -> None:
        """Raise DamagedBundle if a file has another size or hash than its entry in the list."""
        if n_bytes != file.bytes:
            sizes = f"{n_bytes} bytes, but its list has {file.bytes}"
            raise DamagedBundle(f"{self.location}/{file.path}: {sizes}; it was truncated or replaced")
        if sha256 != file.sha256:
            raise DamagedBundle(f"{self.location}/{file.path}: its bytes differ from the list (sha256 differs)")


class _FolderSource(_BundleSource):
    def read_bundle_list(self) -> bytes:
        return check_input(Path(self.location, BUNDLE_LIST_FILE_NAME)).read_bytes()

    def fetch_files(self, files: list[BundledFile], staging_folder: Path) -> None:
        with _open_fetch_progress(files) as bar:
            for file in files:
                target = staging_folder / file.path
                if not _is_intact(file, target):
                    with self._open_bundled_file(file) as source, open_atomic(target) as stream:
                        self.check_size_and_hash(file, *_copy_and_hash(source, bar, file.bytes, stream))

    def check_files(self, bundle: BundleList, bar: Any) -> None:
        for file in bundle.files:
            with self._open_bundled_file(file) as source:
                self.check_size_and_hash(file, *_copy_and_hash(source, bar, file.bytes))

    def _open_bundled_file(self, file: BundledFile) -> IO[bytes]:
        return check_input(Path(self.location, file.path)).open("rb")


class _ArchiveSource(_BundleSource):
    """A bundle in the local archive ``path``. For a download, ``location`` is the address of the archive."""

    def __init__(self, location: str, path: Path) -> None:
        super().__init__(location)
        self._path = path

    def read_bundle_list(self) -> bytes:
        with self._open_members() as members:
            for name, source in members:
                if name == BUNDLE_LIST_FILE_NAME:
                    return source.read(_MAX_LIST_BYTES)
        raise UserError(f"{self.location}: has no {ARCHIVE_FOLDER}/{BUNDLE_LIST_FILE_NAME}, so it is not a bundle")

    def fetch_files(self, files: list[BundledFile], staging_folder: Path) -> None:
        if all(_is_intact(file, staging_folder / file.path) for file in files):
            return
        shutil.rmtree(staging_folder, ignore_errors=True)
        try:
            unpack_member(self._path, ARCHIVE_FOLDER, staging_folder, max_bytes=self._path.stat().st_size)
        except UserError as error:
            raise DamagedBundle(str(error)) from None
        with _open_fetch_progress(files) as bar:
            for file in files:
                if not (staging_folder / file.path).is_file():
                    raise DamagedBundle(f"{self.location}: has no {ARCHIVE_FOLDER}/{file.path}, which its list names")
                with (staging_folder / file.path).open("rb") as source:
                    self.check_size_and_hash(file, *_copy_and_hash(source, bar, file.bytes))

    def check_files(self, bundle: BundleList, bar: Any) -> None:
        wanted = {file.path: file for file in bundle.files}
        with self._open_members() as members:
            for name, source in members:
                if (file := wanted.pop(name, None)) is not None:
                    self.check_size_and_hash(file, *_copy_and_hash(source, bar, file.bytes))
        if wanted:
            raise DamagedBundle(f"{self.location}: has no {ARCHIVE_FOLDER}/{next(iter(wanted))}, which its list names")

    @contextmanager
    def _open_members(self) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
        path = check_input(self._path)
        try:
            with open_archive(path) as members:
                files = (
                    (member.name.removeprefix(f"{ARCHIVE_FOLDER}/"), member.open()) for member in members if member.is_file
                )
                yield ((name, source) for name, source in files if source is not None)
        except ARCHIVE_ERRORS as error:
            raise DamagedBundle(f"{self.location}: a damaged archive, or not a zip or tar ({error})") from None


class _UrlSource(_BundleSource):
    def read_bundle_list(self) -> bytes:
        return read_url(f"{self.location}/{BUNDLE_LIST_FILE_NAME}", _MAX_LIST_BYTES)

    def fetch_files(self, files: list[BundledFile], staging_folder: Path) -> None:
        for file in files:
            if not _is_intact(file, staging_folder / file.path):
                download(self._build_url(file), staging_folder / file.path, file.sha256, file.bytes)

    def check_files(self, bundle: BundleList, bar: Any) -> None:
        for file in bundle.files:
            with open_url(self._build_url(file)) as source:
                self.check_size_and_hash(file, *_copy_and_hash(source, bar, file.bytes))

    def _build_url(self, file: BundledFile) -> str:
        return f"{self.location}/{quote(file.path)}"


@contextmanager
def _open_source(source: str, out: Path) -> Iterator[_BundleSource]:
    """Open the bundle at a path or an address, and yield an object that reads it.

    An archive at an address is first downloaded into the folder ``out``. The downloaded archive is removed after success, or
    if it is damaged. After another error it stays, so that a second call can continue.
    """
    if not source.startswith(("http://", "https://")):
        if "://" in source:
            raise UserError(f"{source}: neither a folder, a .tar archive nor an http:// or https:// address")
        yield _FolderSource(source) if Path(source).is_dir() else _ArchiveSource(source, Path(source))
    elif not (name := urlsplit(source).path.rpartition("/")[2]).endswith(".tar"):
        yield _UrlSource(source)
    else:
        archive = out / f".{name}"
        with lock_for_writing(archive):
            try:
                yield _ArchiveSource(source, download_unverified(source, archive, fetch_file_size(source)))
            except DamagedBundle:
                archive.unlink()
                raise
        archive.unlink()


def _load_bundle_list(source: _BundleSource, sha256: str | None) -> BundleList:
    bundle = parse_bundle_list(f"{source.location}/{BUNDLE_LIST_FILE_NAME}", source.read_bundle_list())
    if sha256 is not None and bundle.sha256 != sha256.lower():
        raise UserError(f"{source.location}: another bundle, its list has the sha256 {bundle.sha256}")
    log.info("%s: %s", source.location, bundle.describe())
    return bundle


def _find_missing_files(bundle: BundleList, targets: Mapping[str, Path]) -> list[BundledFile]:
    missing = []
    for file in bundle.files:
        target = targets[file.path]
        if not (target.exists() or target.is_symlink()):
            missing.append(file)
        elif not _is_intact(file, target):
            if not (may_replace_other_kinds() and target.is_file()):
                raise UserError(
                    f"{target}: exists and is another file than the bundle's; remove it, or fetch to another folder"
                )
            missing.append(file)
    return missing


def _is_intact(file: BundledFile, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == file.bytes and sha256_file(path) == file.sha256


def _check_caches(bundle: BundleList, folder: Path) -> None:
    for entry in bundle.caches:
        cache = open_cache(folder / entry.file)
        if (cache.dataset, cache.feature, cache.key) != (bundle.dataset, entry.feature, entry.key):
            raise UserError(f"{folder / entry.file}: not the cache that the bundle's list names; it was packed wrongly")


def _move_file(path: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise UserError(f"cannot write {target}: {error.strerror or error}") from error
        with path.open("rb") as source, open_atomic(target) as stream:
            shutil.copyfileobj(source, stream, CHUNK_BYTES)
        path.unlink()


def _copy_and_hash(source: _Readable, bar: Any, max_bytes: int, target: IO[bytes] | None = None) -> tuple[int, str]:
    """Copy ``source`` to ``target`` (None: only read it), and update the progress ``bar``.

    Return the number of bytes and their SHA-256. Copying stops as soon as more than ``max_bytes`` bytes were read.
    """
    digest, n_bytes = hashlib.sha256(), 0
    while n_bytes <= max_bytes and (chunk := source.read(CHUNK_BYTES)):
        digest.update(chunk)
        n_bytes += len(chunk)
        bar.update(len(chunk))
        if target is not None:
            target.write(chunk)
    return n_bytes, digest.hexdigest()


def _open_fetch_progress(files: list[BundledFile]) -> Any:
    return progress_bar(desc="fetch", total=sum(file.bytes for file in files), unit="B", unit_scale=True)
