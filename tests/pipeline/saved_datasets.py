"""Save data sets like the library ``datasets``; a small replacement reads them where it is not installed."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

INSTALLED = find_spec("datasets") is not None
Row = Mapping[str, Any]


class Image:
    """The type of an image column."""

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class Dataset:
    """Rows whose images are returned undecoded once their column is cast to undecoded images."""

    def __init__(self, rows: Sequence[Row], image: str) -> None:
        names = rows[0].keys()
        self.features = {name: Image() if name == image else "value" for name in names}
        self._rows = rows

    def cast_column(self, name: str, kind: Image) -> Dataset:
        made = Dataset(self._rows, name)
        made.features[name] = kind
        return made

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        assert all(not kind.decode for kind in self.features.values() if isinstance(kind, Image)), "an image is decoded"
        return iter(self._rows)


class DatasetDict(dict[str, Dataset]):
    """Data sets by split."""


def load_from_disk(path: str) -> Dataset | DatasetDict:
    """Load a data set that :func:`save` wrote."""
    content = json.loads(next(Path(path).glob("dataset_*.json")).read_text())
    image, rows_of = content["image"], content["rows"]
    splits = DatasetDict({name: Dataset([_read(row) for row in rows], image) for name, rows in rows_of.items()})
    return splits.get("", splits)


def _read(row: dict[str, Any]) -> Row:
    stored = {"bytes": lambda text: None if text is None else base64.b64decode(text), "path": lambda text: text}
    return {
        name: {key: stored[key](value[key]) for key in stored} if isinstance(value, dict) else value
        for name, value in row.items()
    }


def _written(row: Row) -> Row:
    def text(content: bytes | None) -> str | None:
        return None if content is None else base64.b64encode(content).decode()

    return {
        name: {**value, "bytes": text(value["bytes"])} if isinstance(value, dict) else value for name, value in row.items()
    }


def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``datasets`` importable, by the replacement if it is not installed."""
    if not INSTALLED:
        module = ModuleType("datasets")
        vars(module).update(Image=Image, Dataset=Dataset, DatasetDict=DatasetDict, load_from_disk=load_from_disk)
        monkeypatch.setitem(sys.modules, "datasets", module)


def save(path: Path, splits: Mapping[str, Sequence[Row]], image: str = "image") -> Path:
    """Save rows by split; the only name "" gives a data set without splits."""
    if INSTALLED:
        import datasets

        made = {}
        for name, rows in splits.items():
            whole = datasets.Dataset.from_list([dict(row) for row in rows])
            made[name] = whole.cast_column(image, datasets.Image())
        (made[""] if "" in made else datasets.DatasetDict(made)).save_to_disk(str(path))
        return path
    path.mkdir(parents=True)
    rows_of = {name: [_written(row) for row in rows] for name, rows in splits.items()}
    name = "dataset_info.json" if "" in splits else "dataset_dict.json"
    (path / name).write_text(json.dumps({"image": image, "rows": rows_of}))
    return path
