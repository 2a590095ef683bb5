"""Remember the SHA-256 of large files, so that an unchanged file is not read again.

The file ``.known_files.json`` in the folder of the files has the size, the modification time, the inode and the SHA-256 of
each file. The user may delete it at any time.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import FileState, InputFile
from vse.pipeline.files.writing import read_json, write_json

_RECORD_NAME = ".known_files.json"


def set_remembered_sha256(file: InputFile, version: int = 0) -> bool:
    """Set ``file.sha256`` to the remembered hash; return False if no hash is remembered or the file may have changed.

    ``version`` is the version of the caller's checks of the content; 0 if the caller checks nothing. A hash that was
    remembered with another version is ignored, so that the caller checks the file again.
    """
    entry = _read_record(file.path.parent).get(file.path.name)
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
        return False
    if {**_describe_state(file.state), "version": version, "sha256": entry["sha256"]} != entry:
        return False
    file.__dict__["sha256"] = entry["sha256"]
    return True


def remember_sha256(file: InputFile, version: int = 0) -> None:
    """Remember the SHA-256 of an open file, unless the file was written just now or its folder is not writable.

    ``version`` is the version of the checks that the content has passed; 0 if the content is not checked.
    """
    entry = {**_describe_state(file.state), "version": version, "sha256": file.sha256}
    if file.state.detects_writes_after(time.time_ns()) and not file.has_changed:
        with suppress(UserError):
            write_json(file.path.parent / _RECORD_NAME, {**_read_record(file.path.parent), file.path.name: entry})


def _read_record(folder: Path) -> dict[str, Any]:
    with suppress(UserError):
        content = read_json(folder / _RECORD_NAME)
        if isinstance(content, dict):
            return content
    return {}


def _describe_state(state: FileState) -> dict[str, int]:
    return {"size": state.size, "mtime_ns": state.mtime_ns, "inode": state.inode}
