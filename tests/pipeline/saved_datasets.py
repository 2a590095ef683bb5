"""Save data sets like the library ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save(path: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]], image: str = "image") -> Path:
    """Save rows by split; the only name "" gives a data set without splits."""
    import datasets  # seconds, which only few tests need

    made = {}
    for name, rows in splits.items():
        made[name] = datasets.Dataset.from_list([dict(row) for row in rows]).cast_column(image, datasets.Image())
    (made[""] if "" in made else datasets.DatasetDict(made)).save_to_disk(str(path))
    return path
