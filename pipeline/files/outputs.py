"""Decide whether a command may replace an existing file (:func:`check_output`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import resolve_target

if TYPE_CHECKING:
    import h5py

_may_replace_other_kinds: ContextVar[bool] = ContextVar("_may_replace_other_kinds", default=False)


@dataclass(frozen=True)
class OutputKind:
    """A kind of output file, such as a report.

    name : the name of the kind in messages, such as ``a report``
    recognises : a function that returns whether the file at a path is of this kind; an exception stands for False
    """

    name: str
    recognises: Callable[[Path], bool]

    def recognises_file_at(self, path: Path) -> bool:
        try:
            return path.is_file() and self.recognises(path)
        except Exception:  # libraries raise many kinds of errors for a file of another format
            return False


@contextmanager
def allow_replacing_other_kinds(allowed: bool = True) -> Iterator[None]:
    """Allow outputs in the ``with`` block to replace files of other kinds, as ``--force`` does.

    With ``allowed=False`` nothing changes.
    """
    token = _may_replace_other_kinds.set(allowed or _may_replace_other_kinds.get())
    try:
        yield
    finally:
        _may_replace_other_kinds.reset(token)


def may_replace_other_kinds() -> bool:
    """Return whether an output may replace a file of another kind than its own, as with ``--force``."""
    return _may_replace_other_kinds.get()


def check_output(out: Path, kind: OutputKind, inputs: Iterable[Path] = ()) -> None:
    """Check whether a command may write the file ``out``, before the command starts to work.

    A new file may be written. An existing file may be replaced if it is of the same ``kind`` or, with ``--force``, if it is a
    plain file. Raises UserError for any other existing file. Even with ``--force``, raises UserError if the existing file is
    one of the ``inputs``, also through a link, or lies in an input folder.
    """
    target = resolve_target(out)
    if not target.exists():
        return
    for path in inputs:
        with suppress(OSError, RuntimeError):
            if path.samefile(target) or (path.is_dir() and target.resolve().is_relative_to(path.resolve())):
                raise UserError(f"{out}: output is also an input; name another file to write")
    if not may_replace_other_kinds() and not kind.recognises_file_at(target):
        raise UserError(f"{out}: exists and is not {kind.name}; name another file to write, or replace it with --force")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError if the content is not a JSON object."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def json_kind(name: str, *keys: str) -> OutputKind:
    """Return the kind of JSON files that hold an object with these ``keys``. Messages call this kind ``name``."""
    return OutputKind(name, lambda path: set(keys) <= read_json_object(path).keys())


def hdf5_kind(name: str, recognises: Callable[[h5py.File], bool]) -> OutputKind:
    """Return the kind of HDF5 files for which ``recognises`` returns True. Messages call this kind ``name``."""

    def recognises_path(path: Path) -> bool:
        import h5py  # lazy, so that commands start quickly

        with h5py.File(path, "r", locking=False) as file:
            return recognises(file)

    return OutputKind(name, recognises_path)


def text_kind(name: str, marker: str, within: int = 4096) -> OutputKind:
    """Return the kind of files with the text ``marker`` in their first ``within`` bytes. Messages call this kind ``name``."""
    return OutputKind(name, lambda path: marker.encode() in read_first_bytes(path, within))


def bytes_kind(name: str, start: bytes, complete: bool) -> OutputKind:
    """Return the kind of files that begin with the bytes ``start``. If ``complete``, no further bytes may follow."""
    return OutputKind(name, lambda path: read_first_bytes(path, len(start) + complete) == start)


def csv_kind(name: str, *columns: str) -> OutputKind:
    """Return the kind of CSV files whose header has all these ``columns``."""

    def recognises(path: Path) -> bool:
        return set(columns) <= set(read_first_bytes(path, 2**16).decode().splitlines()[0].split(","))

    return OutputKind(name, recognises)


def read_first_bytes(path: Path, n_bytes: int) -> bytes:
    """Return the first ``n_bytes`` bytes of a file."""
    with path.open("rb") as stream:
        return stream.read(n_bytes)
