"""Files written atomically: the only functions by which this project writes anything.

One writer at a time: advisory locks that the system frees when their process ends, however it ends.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, forget_input, wrap_read_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_TAKEN = {errno.EAGAIN, errno.EACCES}
_held: dict[Path, int] = {}  # how often this process has each lock file


def _place() -> str:
    """Where process ids have this process's meaning: the machine, since it was started, and its container."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
    return f"{socket.gethostname()}.{sha256(' '.join(facts).encode()).hexdigest()[:8]}"


MACHINE_ID = _place()


def try_lock(handle: int) -> bool:
    """Lock an open file for this process alone; False if another one has it. Raises OSError if locks do not work there."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def is_locked(path: Path) -> bool:
    """Whether a process has a file locked, as far as this file system tells."""
    handle = os.open(path, os.O_RDWR)
    try:
        return not try_lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)


@contextmanager
def lock_for_writing(path: Path, folder: bool = False) -> Iterator[None]:
    """In this block no other process that asks for it writes ``path``, a file, or a ``folder``.

    :class:`UserError` names the machine and the process that does. The lock is one on the file ``.<name>.lock`` beside the
    file, or ``.lock`` in the folder, which is removed at the end; after a kill it stays, and hinders nobody. Where the file
    system has no locks a warning says so. A process may ask again for what it has.
    """
    file = (path / ".lock" if folder else path.with_name(f".{path.name}.lock")).absolute()
    if file in _held:
        _held[file] += 1
        try:
            yield
        finally:
            _held[file] -= 1
        return
    made = _made_folders(path, file.parent)
    handle = None
    try:
        handle = _acquired(path, file)
        if handle is not None:
            _held[file] = 1
        yield
    finally:
        _held.pop(file, None)
        if handle is not None:
            with suppress(OSError):
                file.unlink()
            os.close(handle)
        for empty in made:
            with suppress(OSError):
                empty.rmdir()


def _made_folders(path: Path, folder: Path) -> list[Path]:
    """Make a folder; returns those that were not there, the innermost first, which are removed if they stay empty."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return missing


def _acquired(path: Path, file: Path) -> int | None:
    """The open and locked lock file; None where there are no locks, or nothing can be written in any case."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            if error.errno == errno.EACCES and _removed(path, file):
                continue
            if error.errno in _READ_ONLY:  # said by what cannot be written then
                return None
            raise UserError(f"cannot write {path}: {file.name}: {error.strerror or error}") from None
        try:
            if not try_lock(handle):
                raise UserError(f"{path}: {_holder(handle)} is writing it; wait until that has ended, or name another place")
            if _is_still(file, handle):
                os.ftruncate(handle, 0)
                started = datetime.now(UTC).isoformat(timespec="seconds")
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} (since {started})\n".encode(), 0)
                return handle
        except OSError as error:
            os.close(handle)
            if error.errno not in _UNSUPPORTED:
                raise UserError(f"cannot write {path}: {file.name}: {error.strerror or error}") from None
            file.unlink(missing_ok=True)
            log.warning("%s: this file system has no locks; take care that nothing else writes there meanwhile", path)
            return None
        except UserError:
            os.close(handle)
            raise
        os.close(handle)  # it was removed by its last holder meanwhile


def _removed(path: Path, file: Path) -> bool:
    """Remove the lock file of a killed process of another user, which cannot be written; False if that is not possible."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        if not try_lock(handle):
            raise UserError(f"{path}: {_holder(handle)} is writing it; wait until that has ended, or name another place")
        file.unlink()
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _is_still(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """Who wrote into the lock file."""
    text = os.pread(handle, 300, 0).decode(errors="replace").strip()
    return text if text.startswith("process ") and text.isprintable() else "another process"


_LARGEST = 2**63 - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ABANDONED = 24 * 3600  # seconds without a change after which a temporary file of a writer elsewhere counts as abandoned
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISLNK: "a symbolic link that leads in a circle",
}


@contextmanager
def open_atomic(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Write ``path`` atomically: yield a temporary file in its folder, which is flushed to disk and renamed at the end.

    On any error, a full disk among them, the temporary file is removed and ``path`` stays as it was. Only a plain file is
    replaced; a symbolic link stays, and the file that it leads to is written.
    ``sync=False`` leaves the flush to the system, for many small files that count only once a later file is written.
    """
    target = resolve_target(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if sync:
            _remove_orphans(target.parent, f".{glob.escape(target.name)}.*.tmp")
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.{MACHINE_ID}-{os.getpid()}.", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as stream:
            with suppress(OSError):  # where there are no locks the name says who writes it
                try_lock(handle)
            os.fchmod(handle, 0o666 & ~_umask())
            yield stream
            stream.flush()
            if sync:
                os.fsync(handle)
        os.replace(temporary, target)
        forget_input(path)
        if sync:
            _fsync_folder(target.parent)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def clear_temporaries(folder: Path, recursive: bool = False) -> None:
    """Remove temporary files of killed writers from a folder, and from its sub-folders if ``recursive``.

    Temporary files of living writers stay.
    """
    _remove_orphans(folder, "**/.*.tmp" if recursive else ".*.tmp")


def write_bytes(path: Path, content: bytes | memoryview, sync: bool = True) -> Path:
    """Write ``content``, atomically, as :func:`open_atomic` does; returns ``path``."""
    with open_atomic(path, sync) as stream:
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
    return read_json_and_sha256(path, object_hook)[0]


def read_json_and_sha256(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> tuple[Any, str]:
    """What :func:`read_json` reads, and the SHA-256 of the bytes that were read."""
    file = InputFile(path)
    try:
        content = file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return parse_json(path, content, object_hook), file.sha256


def parse_json(path: Path, content: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The content of a JSON file that was read from ``path``; :class:`UserError` if it is not JSON.

    Nor is what Python alone takes for JSON: NaN, infinities, numbers that become infinite, integers beyond 64 bits, and half a
    surrogate pair, which is no text.
    """
    with wrap_read_errors(path, "valid JSON"):
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


def resolve_target(path: Path) -> Path:
    """Return the file that writing to ``path`` replaces, behind symbolic links.

    Raises UserError if no plain file can be there.
    """
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        mode = os.lstat(target).st_mode
    except OSError:  # there is nothing yet, or what is wrong is said when it is written
        return path if not path.is_symlink() else Path(os.path.realpath(path))
    except ValueError as error:
        raise UserError(f"cannot write {path}: {error}") from None
    kind = next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), None)
    if kind is not None:
        raise UserError(f"cannot write {path}: it is {kind}; name another file to write")
    return target


def _remove_orphans(folder: Path, pattern: str) -> None:
    """Remove temporary files of killed processes; those of running ones stay, wherever these run."""
    for temporary in folder.glob(pattern):
        with suppress(OSError):
            if _is_abandoned(temporary):
                temporary.unlink(missing_ok=True)


def _is_abandoned(temporary: Path) -> bool:
    """Whether nobody writes a temporary file any more, which of a writer elsewhere (another machine, container) is only known
    after a day without a change.
    """
    before, at, rest = temporary.name.partition(f".{MACHINE_ID}-")
    if before and at:
        try:
            os.kill(int(rest.partition(".")[0]), 0)
        except ProcessLookupError:
            return True
        except (ValueError, OverflowError):
            return False
        return False
    is_ours = temporary.name.rpartition("-")[2].partition(".")[0].isdigit()
    idle = time.time() - temporary.lstat().st_mtime
    return is_ours and temporary.is_file() and idle > _ABANDONED and not is_locked(temporary)


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
