"""Files written atomically: the only functions by which this project writes anything."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vse.pipeline.errors import UserError
from vse.pipeline.input_files import check_input, reading

_LARGEST = 2**63 - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@contextmanager
def written(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Write ``path`` atomically: yield a temporary file in its folder, which is flushed to disk and renamed at the end.

    On any error, a full disk among them, the temporary file is removed and ``path`` stays as it was.
    ``sync=False`` leaves the flush to the system, for many small files that count only once a later file is written.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if sync:
            _remove_orphans(path)
        handle, name = tempfile.mkstemp(prefix=f"{_temporary_prefix(path)}{os.getpid()}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, 0o666 & ~_umask())
            yield stream
            stream.flush()
            if sync:
                os.fsync(handle)
        os.replace(temporary, path)
        if sync:
            _fsync_folder(path.parent)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def check_out(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Check an output path before any work: :class:`UserError` if it is a folder, or also one of the ``inputs``."""
    if out.is_dir():
        raise UserError(f"cannot write {out}: it is a folder")
    if os.path.realpath(out) in map(os.path.realpath, inputs):  # which take a link to itself, unlike Path.resolve
        raise UserError(f"{out}: output is also an input; name another file to write")


def write_bytes(path: Path, content: bytes | memoryview, sync: bool = True) -> Path:
    """Write ``content``, atomically, as :func:`written` does; returns ``path``."""
    with written(path, sync) as stream:
        stream.write(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` as UTF-8, atomically; returns ``path``."""
    return write_bytes(path, text.encode())


def write_json(path: Path, content: object) -> Path:
    """Write ``content`` as indented JSON, atomically; NaN is refused. Returns ``path``."""
    return write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Read a JSON file, each object through ``object_hook``; :class:`UserError` if it is missing or not JSON."""
    check_input(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return parse_json(path, content, object_hook)


def parse_json(path: Path, content: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The content of a JSON file that was read from ``path``; :class:`UserError` if it is not JSON.

    Nor is what Python alone takes for JSON: NaN, infinities, numbers that become infinite, integers beyond 64 bits, and half a
    surrogate pair, which is no text.
    """
    with reading(path, "valid JSON"):
        text = content.decode()
        parsed = json.loads(text, object_hook=object_hook, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed


def _integer(text: str) -> int:
    """An integer of JSON; :class:`ValueError` if no array could hold it."""
    number = int(text)
    if abs(number) > _LARGEST:
        raise ValueError(f"the integer {text} is beyond 64 bits")
    return number


def _finite(text: str) -> float:
    """A number of JSON; :class:`ValueError` if it is none, or too large."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(content: object) -> str:
    """SHA-256 of ``content`` as canonical JSON (sorted keys, no blanks)."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _temporary_prefix(path: Path) -> str:
    """Prefix of this machine's temporary files for ``path``; the writer's process id follows."""
    return f".{path.name}.{socket.gethostname()}-"


def _remove_orphans(path: Path) -> None:
    """Remove temporary files of killed processes on this machine; those of running ones and of other machines stay."""
    prefix = _temporary_prefix(path)
    for orphan in path.parent.glob(f"{glob.escape(prefix)}*.tmp"):
        process = orphan.name.removeprefix(prefix).partition(".")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            orphan.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
