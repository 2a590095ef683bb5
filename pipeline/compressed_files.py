"""Compressed files that a library opens itself: checked against the limit on decoded bytes before that."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from vse.pipeline.arrow_files import check_arrow
from vse.pipeline.decoded_limit import check_stream, check_zip
from vse.pipeline.input_files import reading
from vse.pipeline.parquet_files import check_parquet

_CHECKS: dict[bytes, Callable[[Path], None]] = {
    b"PAR1": check_parquet,
    b"ARROW1": check_arrow,
    b"\xff\xff\xff\xff": check_arrow,
    b"PK": check_zip,
    b"\x1f\x8b": check_stream,
    b"\xfd7zXZ": check_stream,
    b"BZh": check_stream,
}


def check_file(path: Path) -> None:
    """Raise UserError if a file decodes to more bytes than it may; the beginning of its content says how it is compressed."""
    with path.open("rb") as stream:
        start = stream.read(6)
    check = next((check for magic, check in _CHECKS.items() if start.startswith(magic)), None)
    if check is not None and (check is not check_zip or zipfile.is_zipfile(path)):
        with reading(path, "a file that can be decoded"):
            check(path)
