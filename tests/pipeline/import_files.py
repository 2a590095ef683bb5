"""Write photos, tables and archives for tests of imports."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image


def photo_bytes(shade: int = 0, kind: str = "JPEG") -> bytes:
    """Return the bytes of a small photo, which depend on the shade."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (shade % 256, shade // 256 % 256, 77)).save(stream, kind)
    return stream.getvalue()


def write_photos(folder: Path, names: Iterable[str]) -> Path:
    """Write different photos under these names and return their folder."""
    for shade, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(photo_bytes(shade))
    return folder


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as a table in the format of the suffix; formats with lists keep lists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    else:
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0].keys(), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def write_tar(path: Path, members: Mapping[str, bytes] | Sequence[tuple[str, bytes]]) -> Path:
    """Write an archive of files in their order; a name may occur twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
