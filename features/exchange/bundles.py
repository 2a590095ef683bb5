"""Bundles: caches of features to publish, every file of which is known by its SHA-256.

A bundle is a folder, or a tar archive of one, with the files of some caches of one data set under the names that they have in
``features/``, and ``bundle.json``, the list of them (``docs/formats.md``). The list bears a SHA-256 of its own, which names
the bundle. :mod:`vse.features.exchange.bundle_fetch` fetches them.
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

from vse.features.cache.feature_cache import FeatureCache, failures_path, verify_cache
from vse.features.cache.shards import fit_record_path, shards_folder
from vse.features.data_checks import check_data, recorded_identity
from vse.features.extractors.captions import encoder_path
from vse.pipeline.command import current_provenance
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.identity import data_differences
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_input, is_name
from vse.pipeline.files.outputs import OutputKind, check_output, may_replace_others
from vse.pipeline.files.writing import lock_for_writing, open_atomic, parse_json, sha256_file, sha256_json, write_json
from vse.pipeline.progress import progress_bar

FORMAT, VERSION = "vse-bundle", 1
LIST, DATASET, NOTES = "bundle.json", "dataset.json", "NOTES.txt"
TOP = "bundle"  # the folder in an archive
CHUNK = 1 << 20
_SHA256 = r"^[0-9a-f]{64}$"


class BundledFile(BaseModel):
    """A file of a bundle: its path in it, its size, its SHA-256."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    bytes: StrictInt = Field(ge=0)
    sha256: str = Field(pattern=_SHA256)


class BundledCache(BaseModel):
    """A cache of a bundle: its file, the feature that it holds, and its key."""

    model_config = ConfigDict(extra="allow", frozen=True)
    file: str
    feature: str
    key: str


class BundleList(BaseModel):
    """The list of a bundle; ``sha256`` is of all else in it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    format: Literal["vse-bundle"]
    version: Literal[1]
    dataset: str
    caches: list[BundledCache] = Field(min_length=1)
    files: list[BundledFile] = Field(min_length=1)
    sha256: str = Field(pattern=_SHA256)

    @property
    def n_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.bytes for file in self.files)

    def described(self) -> str:
        """What the bundle is, for a person."""
        features = ", ".join(cache.feature for cache in self.caches)
        return f"{features} of {self.dataset}: {len(self.files)} files, {self.n_bytes / 1e6:.1f} MB, sha256 {self.sha256}"


def cache_files(cache: FeatureCache) -> list[Path]:
    """The files of a cache: its shards with their records, their manifest, its encoder if it has one, and last itself."""
    shards = [shard["features"].path for shard in cache.shards]
    records = [shard.with_suffix(".json") for shard in shards]
    beside = [encoder_path(cache.path), fit_record_path(cache.path), failures_path(cache.path)]
    optional = [file for file in (*records, *beside) if file.is_file()]
    return [*shards, *optional, shards_folder(cache.path) / "manifest.json", cache.path]


def pack(caches: Sequence[Path], out: Path, with_dataset: bool = False, notes: Path | None = None) -> BundleList:
    """Write verified caches of one data set as a new bundle: the folder ``out``, or an archive if that ends in ``.tar``.

    Nothing is at ``out`` until the bundle is complete; one of the same files that is there is kept. :class:`UserError` if
    something else is there, if a cache is damaged, or if caches are of several data sets.

    Parameters
    ----------
    with_dataset : add the ``dataset.json`` that the caches name
    notes : a text for its readers, on the licence for example
    """
    opened = [verify_cache(path) for path in caches]
    sources = _sources(opened, with_dataset, notes)
    if not out.is_dir():
        check_output(out, OutputKind("a bundle", tarfile.is_tarfile), sources.values())
    with lock_for_writing(out):
        said = _content(opened, sources)
        if out.is_dir() or ((out.exists() or out.is_symlink()) and not may_replace_others()):
            return _kept(out, said)
        return _archived(out, said, sources) if out.suffix == ".tar" else _in_folder(out, said, sources)


def read_list(where: str, content: bytes) -> BundleList:
    """The list of a bundle, read from ``where``; :class:`UserError` if it is none, was changed, or names a file elsewhere."""
    try:
        said = parse_json(Path(where), content)
    except UserError as error:
        raise UserError(str(error).replace(str(Path(where)), where)) from None  # a path has no "//", and an address does
    if not isinstance(said, dict) or said.get("format") != FORMAT or said.get("version") != VERSION:
        raise UserError(f"{where}: not the list of a bundle of version {VERSION}")
    if said.get("sha256") != _sum_of(said):
        raise UserError(f"{where}: was changed after the bundle was packed (its sha256 is of another list)")
    try:
        listed = BundleList.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: not the list of a bundle: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    wrong = next(_wrong_paths(listed), None)
    if wrong is not None:
        raise UserError(f"{where}: not the list of a bundle: {wrong}")
    return listed


def _wrong_paths(listed: BundleList) -> Iterator[str]:
    """What is wrong with the names in a list: files that are of no cache of it, lead elsewhere, or are lacking."""
    counts = Counter(file.path for file in listed.files)
    names = [listed.dataset, *(cache.file for cache in listed.caches)]
    yield from (f"{name!r} is no name" for name in names if not is_name(name))
    yield from (f"{path!r} is listed twice" for path, count in counts.items() if count > 1)
    stems = [cache.file.removesuffix(".h5") for cache in listed.caches if cache.file.endswith(".h5")]
    own = {DATASET, NOTES}
    for stem in stems:
        own |= {f"{stem}.h5", f"{stem}.encoder.safetensors", f"{stem}.encoder.json", f"{stem}.h5.failures.jsonl"}
    folders = {f"{stem}.shards" for stem in stems}
    for path in counts:
        folder, _, name = path.rpartition("/")
        in_shards = folder in folders and is_name(name)
        if path not in own and not in_shards:
            yield f"{path!r} is no file of its caches"
    for cache in listed.caches:
        manifest = f"{cache.file.removesuffix('.h5')}.shards/manifest.json"
        yield from (f"{path!r} is not listed" for path in (cache.file, manifest) if path not in counts)


def _sources(caches: Sequence[FeatureCache], with_dataset: bool, notes: Path | None) -> dict[str, Path]:
    """The files of a bundle by their paths in it; the caches themselves are last of theirs."""
    first = caches[0]
    sources: dict[str, Path] = {}
    for cache in caches:
        if cache.dataset != first.dataset:
            raise UserError(
                f"{cache.path} is of {cache.dataset!r}, {first.path} of {first.dataset!r}; a bundle is of one data set"
            )
        if cache is not first and (differences := data_differences(recorded_identity(cache), recorded_identity(first))):
            raise UserError(f"{cache.path} and {first.path} are of different data sets: {'; '.join(differences)}")
        of_cache = {file.relative_to(cache.path.parent).as_posix(): file for file in cache_files(cache)}
        twice = next((path for path in of_cache if path in sources), None)
        if twice is not None:
            raise UserError(f"{of_cache[twice]} and {sources[twice]} would be one file of the bundle; give each cache once")
        sources |= of_cache
    if with_dataset:
        for cache in caches:
            check_data(cache, load_dataset_file(first.captions))
        sources[DATASET] = check_input(first.captions)
    if notes is not None:
        sources[NOTES] = check_input(notes)
    return sources


def _content(caches: Sequence[FeatureCache], sources: Mapping[str, Path]) -> dict[str, Any]:
    """The list of a bundle, for which all of its files are hashed."""
    files = []
    with progress_bar(desc="hash", total=_size(sources), unit="B", unit_scale=True) as bar:
        for path, source in sources.items():
            size = source.stat().st_size
            files.append({"path": path, "bytes": size, "sha256": sha256_file(source)})
            bar.update(size)
    by = current_provenance()
    said: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": caches[0].dataset,
        "caches": [
            {"file": one.path.name, "feature": one.feature, "kind": one.kind, "key": one.key, "holds": one.described()}
            for one in caches
        ],
        "files": files,
        "made": {name: by[name] for name in ("date", "code")},  # the command has names of the packer's folders
    }
    return {**said, "sha256": _sum_of(said)}


def _kept(out: Path, said: Mapping[str, Any]) -> BundleList:
    """The bundle that is there, if its list is the same but for its making; :class:`UserError` if not."""
    there = None
    with suppress(OSError, KeyError, tarfile.TarError, UserError):
        if out.is_dir():
            there = read_list(str(out / LIST), (out / LIST).read_bytes())
        else:
            with tarfile.open(out) as archive, archive.extractfile(f"{TOP}/{LIST}") or BytesIO() as stream:
                there = read_list(str(out), stream.read())
    new = BundleList.model_validate(said)
    if there is None or (there.dataset, there.caches, there.files) != (new.dataset, new.caches, new.files):
        raise UserError(f"{out}: is there already; remove it, or give another --out")
    return there


def _in_folder(out: Path, said: Mapping[str, Any], sources: Mapping[str, Path]) -> BundleList:
    """Write the bundle as a folder, which is renamed to ``out`` when all is in it."""
    listed, staged = BundleList.model_validate(said), out.with_name(f".{out.name}.packing")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        for file, source in _read(listed, sources, out):
            with open_atomic(staged / file.path) as stream:
                shutil.copyfileobj(source, stream, CHUNK)
                source.check(file)
        write_json(staged / LIST, said)
        staged.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return listed


def _archived(out: Path, said: Mapping[str, Any], sources: Mapping[str, Path]) -> BundleList:
    """Write the bundle as a tar archive, its list first."""
    listed, of_list = BundleList.model_validate(said), json.dumps(said, indent=1).encode()
    with open_atomic(out) as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(_member(LIST, len(of_list)), BytesIO(of_list))
        for file, source in _read(listed, sources, out):
            archive.addfile(_member(file.path, file.bytes), source)
            source.check(file)
    return listed


class _Source:
    """A file that is packed: what is read of it is hashed, so that it is what was listed."""

    def __init__(self, stream: BinaryIO, path: Path, bar: Any) -> None:
        self._stream, self._path, self._bar, self._digest = stream, path, bar, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._digest.update(chunk)
        self._bar.update(len(chunk))
        return chunk

    def check(self, file: BundledFile) -> None:
        """:class:`UserError` if the file that was read to its end is no longer what was listed."""
        if self._stream.read(1) or self._digest.hexdigest() != file.sha256:
            raise UserError(f"{self._path}: was written to while it was packed; run the command again")


def _read(listed: BundleList, sources: Mapping[str, Path], out: Path) -> Iterator[tuple[BundledFile, _Source]]:
    """The files of a bundle, each open for as long as it is packed."""
    with progress_bar(desc=f"pack {out.name}", total=listed.n_bytes, unit="B", unit_scale=True) as bar:
        for file in listed.files:
            with sources[file.path].open("rb") as stream:
                yield file, _Source(stream, sources[file.path], bar)


def _member(path: str, size: int) -> tarfile.TarInfo:
    """The head of a file in an archive, without a date, an owner or rights of its own."""
    member = tarfile.TarInfo(f"{TOP}/{path}")
    member.size, member.mode = size, 0o644
    return member


def _size(sources: Mapping[str, Path]) -> int:
    return sum(source.stat().st_size for source in sources.values())


def _sum_of(said: Mapping[str, Any]) -> str:
    """The SHA-256 of a list, of all but its own."""
    return sha256_json({name: value for name, value in said.items() if name != "sha256"})
