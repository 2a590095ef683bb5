"""On a machine with several GPUs: which one no other command computes on.

Each command holds a lock on a file that stands for its GPU, in the folder for temporary files. The system frees a lock when
the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


class GpuLeases:
    """The GPUs that this process has taken; ``uuids`` name those of the machine that it sees, by their numbers."""

    def __init__(self, uuids: Sequence[str], folder: Path | None = None) -> None:
        self._files = [(folder or Path(tempfile.gettempdir())) / f"vse-gpu-{uuid}.lock" for uuid in uuids]
        self._held: dict[int, int] = {}

    def take(self, number: int) -> bool:
        """Take one GPU; whether no other process had taken it."""
        if number in self._held:
            return True
        file = self._files[number]
        try:
            descriptor = os.open(file, os.O_RDONLY if file.exists() else os.O_RDONLY | os.O_CREAT, 0o644)
        except OSError as error:  # e.g. a folder that nobody may write to: GPUs are then shared as they come
            log.warning("%s: %s; other commands may compute on the same GPU", file, error.strerror)
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._held[number] = descriptor
        return True

    def first_free(self) -> int:
        """The number of the GPU that this process has, or of the first that no other has, which is taken.

        If all are taken, one is shared, and a line says so.
        """
        if self._held:
            return min(self._held)
        free = next((number for number in range(len(self._files)) if self.take(number)), None)
        if free is not None:
            return free
        shared = os.getpid() % len(self._files)
        log.warning("all %d GPUs are in use by other commands; this one shares GPU %d", len(self._files), shared)
        return shared

    def release(self) -> None:
        """Give all back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
