"""Pack feature caches into a bundle for publication, and read the list of a bundle.

A bundle is a folder, or a tar archive of a folder. It holds the files of some caches of one data set, and a list of the files,
``bundle.json`` (``docs/formats.md``), with the SHA-256 of each file and of the list itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from vse.features.cache.feature_cache import FeatureCache, skipped_images_path, verify_cache
from vse.features.cache.shards import fit_duration_path, shards_folder
from vse.features.data_checks import check_belongs_to_dataset, read_data_identity
from vse.features.extractors.captions import encoder_path
from vse.pipeline.command import current_provenance
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.identity import describe_data_differences
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_input, is_valid_name
from vse.pipeline.files.outputs import OutputKind, check_output, may_replace_other_kinds
from vse.pipeline.files.writing import lock_for_writing, open_atomic, parse_json, sha256_file, sha256_json, write_json
from vse.pipeline.progress import progress_bar

BUNDLE_FORMAT, BUNDLE_VERSION = "vse-bundle", 1
BUNDLE_LIST_FILE_NAME, NOTES_FILE_NAME = "bundle.json", "NOTES.txt"
DATASET_FILE_NAMES = ("dataset.json", "dataset.parquet")  # a bundle has at most one of them
ARCHIVE_FOLDER = "bundle"  # folder of all files in an archive
CHUNK_BYTES = 1 << 20  # size of one read
_SHA256_PATTERN = r"^[0-9a-f]{64}$"


class BundledFile(BaseModel):
    """An entry of a bundle's list: the path of a file in the bundle, its size in bytes and its SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    bytes: StrictInt = Field(ge=0)
    sha256: str = Field(pattern=_SHA256_PATTERN)


class BundledCache(BaseModel):
    """An entry of a bundle's list: the path of a cache file, its feature, and its key (the hash that identifies the cache)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    file: str
    feature: str
    key: str


class BundleList(BaseModel):
    """The content of ``bundle.json``, which lists the files of a bundle of caches. ``sha256`` hashes all other fields."""

    model_config = ConfigDict(extra="allow", frozen=True)
    format: Literal["vse-bundle"]
    version: Literal[1]
    dataset: str
    caches: list[BundledCache] = Field(min_length=1)
    files: list[BundledFile] = Field(min_length=1)
    sha256: str = Field(pattern=_SHA256_PATTERN)

    @property
    def n_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def describe(self) -> str:
        """Return a description of the bundle for a person: features, data set, number and size of files, SHA-256."""
        features = ", ".join(cache.feature for cache in self.caches)
        return f"{features} of {self.dataset}: {len(self.files)} files, {self.n_bytes / 1e6:.1f} MB, sha256 {self.sha256}"


def list_cache_files(cache: FeatureCache) -> list[Path]:
    """Return the files of a cache. The last files are the manifest and the cache file, which refer to the other files."""
    shards = [shard["features"].path for shard in cache.shard_arrays]
    records = [shard.with_suffix(".json") for shard in shards]
    others = [encoder_path(cache.path), fit_duration_path(cache.path), skipped_images_path(cache.path)]
    optional = [file for file in (*records, *others) if file.is_file()]
    return [*shards, *optional, shards_folder(cache.path) / "manifest.json", cache.path]


def pack_bundle(caches: Sequence[Path], out: Path, with_dataset: bool = False, notes: Path | None = None) -> BundleList:
    """Verify caches of one data set and write them as a bundle: a folder, or an archive if ``out`` ends in ``.tar``.

    ``out`` appears only when the bundle is complete. An existing bundle of the same files is kept. Raises UserError if ``out``
    is another file or folder, if a cache is damaged, or if the caches belong to several data sets.

    with_dataset : True to add the data set file to which the caches refer
    notes : text file to add, for example on the licence; None: no such file
    """
    verified = [verify_cache(path) for path in caches]
    sources = _collect_bundle_files(verified, with_dataset, notes)
    if not out.is_dir():
        check_output(out, OutputKind("a bundle", tarfile.is_tarfile), sources.values())
    with lock_for_writing(out):
        content = _build_bundle_list(verified, sources)
        if out.is_dir() or ((out.exists() or out.is_symlink()) and not may_replace_other_kinds()):
            return _check_existing_bundle(out, content)
        return _write_archive(out, content, sources) if out.suffix == ".tar" else _write_folder(out, content, sources)


def parse_bundle_list(location: str, content: bytes) -> BundleList:
    """Return the list of a bundle from the bytes of ``bundle.json``. Raises UserError if the list is not valid or was changed.

    ``location`` is the path or address of the list, for messages.
    """
    try:
        entries = parse_json(Path(location), content)
    except UserError as error:
        # Path has turned the "//" of an address into "/".
        raise UserError(str(error).replace(str(Path(location)), location)) from None
    if not isinstance(entries, dict) or entries.get("format") != BUNDLE_FORMAT or entries.get("version") != BUNDLE_VERSION:
        raise UserError(f"{location}: not the list of a bundle of version {BUNDLE_VERSION}")
    if entries.get("sha256") != _hash_list_entries(entries):
        raise UserError(f"{location}: was changed after the bundle was packed (its sha256 differs)")
    try:
        bundle = BundleList.model_validate(entries)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{location}: not the list of a bundle: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    path_error = next(_find_path_errors(bundle), None)
    if path_error is not None:
        raise UserError(f"{location}: not the list of a bundle: {path_error}")
    return bundle


def _find_path_errors(bundle: BundleList) -> Iterator[str]:
    """Yield a message on each path in a bundle's list that is invalid, listed twice, or missing.

    A path that does not belong to a cache, and is neither the data set nor the notes, is also an error.
    """
    counts = Counter(file.path for file in bundle.files)
    names = [bundle.dataset, *(cache.file for cache in bundle.caches)]
    yield from (f"{name!r} is not a valid name" for name in names if not is_valid_name(name))
    yield from (f"{path!r} is listed twice" for path, count in counts.items() if count > 1)
    stems = [cache.file.removesuffix(".h5") for cache in bundle.caches if cache.file.endswith(".h5")]
    known = {*DATASET_FILE_NAMES, NOTES_FILE_NAME}
    for stem in stems:
        known |= {f"{stem}.h5", f"{stem}.encoder.safetensors", f"{stem}.encoder.json", f"{stem}.h5.failures.jsonl"}
    folders = {f"{stem}.shards" for stem in stems}
    for path in counts:
        folder, _, name = path.rpartition("/")
        in_shards = folder in folders and is_valid_name(name)
        if path not in known and not in_shards:
            yield f"{path!r} is not a file of its caches"
    for cache in bundle.caches:
        manifest = f"{cache.file.removesuffix('.h5')}.shards/manifest.json"
        yield from (f"{path!r} is not listed" for path in (cache.file, manifest) if path not in counts)


def _collect_bundle_files(caches: Sequence[FeatureCache], with_dataset: bool, notes: Path | None) -> dict[str, Path]:
    """Return the files to pack, by their paths in the bundle. Each cache file comes after its shards."""
    first = caches[0]
    sources: dict[str, Path] = {}
    for cache in caches:
        if cache.dataset != first.dataset:
            raise UserError(
                f"{cache.path} is of {cache.dataset!r}, {first.path} of {first.dataset!r}; a bundle holds one data set"
            )
        if cache is not first and (
            differences := describe_data_differences(read_data_identity(cache), read_data_identity(first))
        ):
            raise UserError(f"{cache.path} and {first.path} are of different data sets: {'; '.join(differences)}")
        files = {file.relative_to(cache.path.parent).as_posix(): file for file in list_cache_files(cache)}
        duplicate = next((path for path in files if path in sources), None)
        if duplicate is not None:
            both = f"{files[duplicate]} and {sources[duplicate]}"
            raise UserError(f"{both} would be the same file of the bundle; give each cache once")
        sources |= files
    if with_dataset:
        for cache in caches:
            check_belongs_to_dataset(cache, load_dataset_file(first.dataset_file))
        sources[DATASET_FILE_NAMES[first.dataset_file.suffix == ".parquet"]] = check_input(first.dataset_file)
    if notes is not None:
        sources[NOTES_FILE_NAME] = check_input(notes)
    return sources


def _build_bundle_list(caches: Sequence[FeatureCache], sources: Mapping[str, Path]) -> dict[str, Any]:
    files = []
    sizes = {path: source.stat().st_size for path, source in sources.items()}
    with progress_bar(desc="hash", total=sum(sizes.values()), unit="B", unit_scale=True) as bar:
        for path, size in sizes.items():
            files.append({"path": path, "bytes": size, "sha256": sha256_file(sources[path])})
            bar.update(size)
    origin = current_provenance()
    content: dict[str, Any] = {
        "format": BUNDLE_FORMAT,
        "version": BUNDLE_VERSION,
        "dataset": caches[0].dataset,
        "caches": [
            {"file": one.path.name, "feature": one.feature, "kind": one.kind, "key": one.key, "holds": one.describe()}
            for one in caches
        ],
        "files": files,
        "made": {name: origin[name] for name in ("date", "code")},  # not the command: it would publish names of local folders
    }
    return {**content, "sha256": _hash_list_entries(content)}


def _check_existing_bundle(out: Path, content: Mapping[str, Any]) -> BundleList:
    existing = None
    with suppress(OSError, KeyError, tarfile.TarError, UserError):
        if out.is_dir():
            existing = parse_bundle_list(str(out / BUNDLE_LIST_FILE_NAME), (out / BUNDLE_LIST_FILE_NAME).read_bytes())
        else:
            with (
                tarfile.open(out) as archive,
                archive.extractfile(f"{ARCHIVE_FOLDER}/{BUNDLE_LIST_FILE_NAME}") or BytesIO() as stream,
            ):
                existing = parse_bundle_list(str(out), stream.read())
    new = BundleList.model_validate(content)
    if existing is None or (existing.dataset, existing.caches, existing.files) != (new.dataset, new.caches, new.files):
        raise UserError(f"{out}: exists already; remove it, or give another --out")
    return existing


def _write_folder(out: Path, content: Mapping[str, Any], sources: Mapping[str, Path]) -> BundleList:
    bundle, staging_folder = BundleList.model_validate(content), out.with_name(f".{out.name}.packing")
    try:
        shutil.rmtree(staging_folder, ignore_errors=True)
        for file, source in _open_source_files(bundle, sources, out):
            with open_atomic(staging_folder / file.path) as stream:
                shutil.copyfileobj(source, stream, CHUNK_BYTES)
                source.check_content(file)
        write_json(staging_folder / BUNDLE_LIST_FILE_NAME, content)
        staging_folder.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging_folder, ignore_errors=True)
    return bundle


def _write_archive(out: Path, content: Mapping[str, Any], sources: Mapping[str, Path]) -> BundleList:
    bundle, list_bytes = BundleList.model_validate(content), json.dumps(content, indent=1).encode()
    with open_atomic(out) as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(_build_tar_header(BUNDLE_LIST_FILE_NAME, len(list_bytes)), BytesIO(list_bytes))
        for file, source in _open_source_files(bundle, sources, out):
            archive.addfile(_build_tar_header(file.path, file.bytes), source)
            source.check_content(file)
    return bundle


class _HashingReader:
    """A readable file that hashes its content as it is read, to find out whether the file changes while it is packed."""

    def __init__(self, stream: BinaryIO, path: Path, bar: Any) -> None:
        self._stream, self._path, self._bar, self._digest = stream, path, bar, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._digest.update(chunk)
        self._bar.update(len(chunk))
        return chunk

    def check_content(self, file: BundledFile) -> None:
        """Raise UserError if the file has more bytes, or another hash, than its entry ``file`` in the bundle's list."""
        if self._stream.read(1) or self._digest.hexdigest() != file.sha256:
            raise UserError(f"{self._path}: was written to while it was packed; run the command again")


def _open_source_files(
    bundle: BundleList, sources: Mapping[str, Path], out: Path
) -> Iterator[tuple[BundledFile, _HashingReader]]:
    with progress_bar(desc=f"pack {out.name}", total=bundle.n_bytes, unit="B", unit_scale=True) as bar:
        for file in bundle.files:
            with sources[file.path].open("rb") as stream:
                yield file, _HashingReader(stream, sources[file.path], bar)


def _build_tar_header(path: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(f"{ARCHIVE_FOLDER}/{path}")
    header.size, header.mode = size, 0o644
    return header


def _hash_list_entries(content: Mapping[str, Any]) -> str:
    return sha256_json({name: value for name, value in content.items() if name != "sha256"})
