"""One writer at a time: advisory locks that the system frees when their process ends, however it ends."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from vse.pipeline.errors import UserError

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


PLACE = _place()


def lock(handle: int) -> bool:
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
        return not lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)


@contextmanager
def only_writer(path: Path, folder: bool = False) -> Iterator[None]:
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
            if not lock(handle):
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
        if not lock(handle):
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
