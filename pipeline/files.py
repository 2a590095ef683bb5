"""Files that are whole or not there: the one way this project writes anything."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vse.pipeline.errors import UserError


@contextmanager
def written(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """A temporary file in ``path``'s folder, to write to; at the end it is flushed to disk and renamed to ``path``.

    On any error, a full disk among them, the temporary file is removed and ``path`` stays as it was.
    ``sync=False`` leaves the flush to the system, for many small files that a later file vouches for.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if sync:
            _remove_orphans(path)
        handle, name = tempfile.mkstemp(prefix=f"{_mine(path)}{os.getpid()}.", suffix=".tmp", dir=path.parent)
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
    """:class:`UserError` if ``out`` is a folder, or one of the files that it is to be made from; before any work."""
    if out.is_dir():
        raise UserError(f"cannot write {out}: it is a folder")
    if out.resolve() in {path.resolve() for path in inputs}:
        raise UserError(f"{out} would be overwritten, which is what it is to be made from; name another file to write")


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
    """Content of a JSON file, each object through ``object_hook``; :class:`UserError` if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=object_hook)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(content: object) -> str:
    """SHA-256 of ``content`` as canonical JSON (sorted keys, no blanks)."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _mine(path: Path) -> str:
    """How the names of this machine's temporary files for ``path`` begin; the writer's process number follows."""
    return f".{path.name}.{socket.gethostname()}-"


def _remove_orphans(path: Path) -> None:
    """Remove the temporary files of writers on this machine that were killed; another's, or a living one's, stay."""
    mine = _mine(path)
    for left in path.parent.glob(f"{glob.escape(mine)}*.tmp"):
        process = left.name.removeprefix(mine).partition(".")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            left.unlink(missing_ok=True)
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
