"""Write files atomically (:func:`open_atomic`), and lock them against other writers (:func:`lock_for_writing`).

Locks are advisory. The system frees a lock when its process ends.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import math
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, forget_input, wrap_read_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
_NO_LOCKS_ERRNOS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_READ_ONLY_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}
_LOCKED_ERRNOS = {errno.EAGAIN, errno.EACCES}
_MAX_INTEGER = 2**63 - 1  # the largest integer in JSON files
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_SURROGATE_PATTERN = re.compile(r"\\u[dD][89a-fA-F]")
_ABANDONED_AFTER_SECONDS = 24 * 3600  # seconds without a change, for the temporary files of other machines
_FILE_KIND_BY_TEST = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISLNK: "a symbolic link that leads in a circle",
}
_ITEMS_PER_HASH_UPDATE = 10_000
_lock_count_by_file: dict[Path, int] = {}  # the number of nested locks that this process holds on each lock file


def _machine_id() -> str:
    """Return a name of the machine, boot and container. Two processes with the same name have different process ids."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return f"{socket.gethostname()}.{sha256(' '.join(facts).encode()).hexdigest()[:8]}"


MACHINE_ID = _machine_id()


def try_lock(handle: int) -> bool:
    """Lock an open file; return False if another process has locked it. Raises OSError if the file system has no locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED_ERRNOS:
            return False
        raise
    return True


def _is_locked(path: Path) -> bool:
    """Return whether a process has locked a file; True if the file system has no locks."""
    handle = os.open(path, os.O_RDWR)
    try:
        return not try_lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)


@contextmanager
def lock_for_writing(path: Path, folder: bool = False) -> Iterator[None]:
    """Lock the file ``path`` against other writers during the ``with`` block; with ``folder``, ``path`` is a folder.

    The lock file, ``.<name>.lock`` next to ``path`` or ``.lock`` in the folder, is removed at the end. A process may lock the
    same path several times. On a file system without locks a warning is logged. Raises UserError, which names the machine and
    the process, if another process holds the lock.
    """
    lock_file = (path / ".lock" if folder else path.with_name(f".{path.name}.lock")).absolute()
    if lock_file in _lock_count_by_file:
        _lock_count_by_file[lock_file] += 1
        try:
            yield
        finally:
            _lock_count_by_file[lock_file] -= 1
        return
    created = _create_folders(path, lock_file.parent)
    handle = None
    try:
        handle = _acquire_lock(path, lock_file)
        if handle is not None:
            _lock_count_by_file[lock_file] = 1
        yield
    finally:
        _lock_count_by_file.pop(lock_file, None)
        if handle is not None:
            with suppress(OSError):
                lock_file.unlink()
            os.close(handle)
        for empty in created:
            with suppress(OSError):
                empty.rmdir()


def _create_folders(path: Path, folder: Path) -> list[Path]:
    """Create ``folder`` and all parents; return the new folders, the innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return missing


def _acquire_lock(path: Path, lock_file: Path) -> int | None:
    """Return the file descriptor of the locked ``lock_file``; None if the file system has no locks or is read-only."""
    while True:
        try:
            handle = os.open(lock_file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            if error.errno == errno.EACCES and _remove_foreign_lock(path, lock_file):
                continue
            if error.errno in _READ_ONLY_ERRNOS:  # the write itself will raise the error for the user
                return None
            raise UserError(f"cannot write {path}: {lock_file.name}: {error.strerror or error}") from None
        try:
            if not try_lock(handle):
                raise _locked_error(path, handle)
            if _is_same_file(lock_file, handle):
                os.ftruncate(handle, 0)
                started = datetime.now(UTC).isoformat(timespec="seconds")
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} (since {started})\n".encode(), 0)
                return handle
        except OSError as error:
            os.close(handle)
            if error.errno not in _NO_LOCKS_ERRNOS:
                raise UserError(f"cannot write {path}: {lock_file.name}: {error.strerror or error}") from None
            lock_file.unlink(missing_ok=True)
            log.warning("%s: this file system has no locks; make sure that no other process writes there meanwhile", path)
            return None
        except UserError:
            os.close(handle)
            raise
        os.close(handle)  # the last holder has removed the lock file meanwhile


def _remove_foreign_lock(path: Path, lock_file: Path) -> bool:
    """Remove the lock file of another user's killed process; return False if the removal fails.

    Raises UserError if the process still holds the lock.
    """
    try:
        handle = os.open(lock_file, os.O_RDONLY)
    except OSError:
        return False
    try:
        if not try_lock(handle):
            raise _locked_error(path, handle)
        lock_file.unlink()
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _is_same_file(lock_file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock_file), os.fstat(handle))
    except FileNotFoundError:
        return False


def _locked_error(path: Path, handle: int) -> UserError:
    text = os.pread(handle, 300, 0).decode(errors="replace").strip()
    holder = text if text.startswith("process ") and text.isprintable() else "another process"
    return UserError(f"{path}: {holder} is writing it; wait until it has ended, or name another place")


@contextmanager
def open_atomic(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Write ``path`` atomically: yield a temporary file, then flush it to disk and rename it to ``path``.

    After any error, such as a full disk, ``path`` is unchanged. Only a plain file is replaced, or the target of a symbolic
    link. With ``sync=False`` the system decides when to flush; use this for many small files that are only valid once a later
    file is written. Raises UserError if the file cannot be written.
    """
    target = resolve_target(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if sync:
            _remove_abandoned_files(target.parent, f".{glob.escape(target.name)}.*.tmp")
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.{MACHINE_ID}-{os.getpid()}.", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "w+b") as stream:
            with suppress(OSError):  # on a file system without locks, the file name has the process id of the writer
                try_lock(handle)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(handle, 0o666 & ~mask)
            yield stream
            stream.flush()
            if sync:
                os.fsync(handle)
        os.replace(temporary, target)
        forget_input(path)
        if sync:
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def remove_temporary_files(folder: Path, recursive: bool = False) -> None:
    """Remove the temporary files of killed writers from a folder, and from its sub-folders if ``recursive``."""
    _remove_abandoned_files(folder, "**/.*.tmp" if recursive else ".*.tmp")


def write_bytes(path: Path, content: bytes | memoryview, sync: bool = True) -> Path:
    """Write ``content`` so that no partial file remains after an error; return ``path``.

    With ``sync=False`` the system decides when to flush the file to disk (:func:`open_atomic`).
    """
    with open_atomic(path, sync) as stream:
        stream.write(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write ``text`` as UTF-8 atomically; return ``path``."""
    return write_bytes(path, text.encode())


def write_json(path: Path, content: object) -> Path:
    """Write ``content`` as indented JSON atomically; return ``path``. Raises ValueError for NaN."""
    return write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file (:func:`parse_json`). Raises UserError for a missing file."""
    file = InputFile(path)
    try:
        content = file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return parse_json(path, content)


def parse_json(path: Path, content: bytes) -> Any:
    """Parse the content of a JSON file; ``path`` names the file in messages.

    Raises UserError if the content is not JSON, or has values that only Python accepts: NaN, infinities, numbers that become
    infinite, integers beyond 64 bits, and texts with one half of a surrogate pair.
    """
    with wrap_read_errors(path, "valid JSON"):
        if not _may_have_large_numbers(content):
            with suppress(ValueError):  # the parser below has better messages, and accepts deeper nesting
                return import_module("pydantic_core").from_json(content, allow_inf_nan=False)
        text = content.decode()
        parsed = json.loads(
            text,
            parse_int=_parse_integer,
            parse_float=_parse_finite_number,
            parse_constant=_parse_finite_number,
        )
        if _SURROGATE_PATTERN.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed


def _may_have_large_numbers(content: bytes) -> bool:
    """Return whether a JSON file may have an integer beyond 64 bits or a number that becomes infinite.

    Such a number has 19 digits in a row, or an exponent of three digits. The result is also True if a text has them.
    """
    pattern = content.translate(_DIGITS_TO_ZERO, delete=b"+")
    return any(large in pattern for large in (b"0" * 19, b"0e000", b"0E000"))


def _parse_integer(text: str) -> int:
    number = int(text)
    if abs(number) > _MAX_INTEGER:
        raise ValueError(f"the integer {text} is beyond 64 bits")
    return number


def _parse_finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(content: object) -> str:
    """Return the SHA-256 of ``content`` as canonical JSON (sorted keys, no spaces) in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_json_list(items: Sequence[object]) -> str:
    """Return the SHA-256 of a long list as canonical JSON (:func:`sha256_json`), without the complete JSON in memory."""
    digest = hashlib.sha256(b"[")
    for start in range(0, len(items), _ITEMS_PER_HASH_UPDATE):
        some = json.dumps(items[start : start + _ITEMS_PER_HASH_UPDATE], sort_keys=True, separators=(",", ":"))
        digest.update((some[1:-1] if start == 0 else f",{some[1:-1]}").encode())
    digest.update(b"]")
    return digest.hexdigest()


def resolve_target(path: Path) -> Path:
    """Return the file that a write to ``path`` replaces: ``path``, or the target of a link.

    Raises UserError if a folder, or anything else that is not a plain file, is there.
    """
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        mode = os.lstat(target).st_mode
    except OSError:  # nothing exists yet, or the write will raise the error
        return path if not path.is_symlink() else Path(os.path.realpath(path))
    except ValueError as error:
        raise UserError(f"cannot write {path}: {error}") from None
    kind = next((kind for is_kind, kind in _FILE_KIND_BY_TEST.items() if is_kind(mode)), None)
    if kind is not None:
        raise UserError(f"cannot write {path}: it is {kind}; name another file to write")
    return target


def _remove_abandoned_files(folder: Path, pattern: str) -> None:
    for temporary in folder.glob(pattern):
        with suppress(OSError):
            if _is_abandoned(temporary):
                temporary.unlink(missing_ok=True)


def _is_abandoned(temporary: Path) -> bool:
    """Return whether the process that wrote the temporary file has ended, so that the file can be removed.

    A process on another machine counts as ended if the file has not changed for a day and is not locked.
    """
    name, separator, rest = temporary.name.partition(f".{MACHINE_ID}-")
    if name and separator:
        try:
            os.kill(int(rest.partition(".")[0]), 0)
        except ProcessLookupError:
            return True
        except (ValueError, OverflowError):
            return False
        return False
    is_ours = temporary.name.rpartition("-")[2].partition(".")[0].isdigit()
    idle = time.time() - temporary.lstat().st_mtime
    return is_ours and temporary.is_file() and idle > _ABANDONED_AFTER_SECONDS and not _is_locked(temporary)
