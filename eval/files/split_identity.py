"""The identity of the images of a split, and the names of published test splits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from vse.eval.options import published_folder
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.preset_files import read_yaml


class SplitIdentity(BaseModel):
    """The identity of the images of a split.

    Attributes
    ----------
    ids : kind of the hashed ids: ``coco_ids`` or ``image_ids``
    sha256 : SHA-256 of the sorted ids as a canonical JSON list
    name : name of the published test split with these images, e.g. ``karpathy``; None if it is unknown
    """

    ids: str
    sha256: str
    name: str | None = None


def split_identity_from_ids(dataset: str, kind: str, ids: NDArray[np.int64]) -> SplitIdentity:
    """Return the identity of the images with ``ids`` (n,). ``kind`` is ``image_ids`` or ``coco_ids``."""
    sha256 = sha256_json(sorted(ids.tolist()))
    return SplitIdentity(ids=kind, sha256=sha256, name=find_split_name(dataset, sha256))


def find_split_name(dataset: str, sha256: str) -> str | None:
    """Return the name of the published test split whose image ids have the hash ``sha256``; None if there is no such split.

    The folder in the environment variable ``VSE_PRESETS`` may define further names.
    """
    return next((name for name, known in _read_known_splits(dataset) if known == sha256), None)


def _read_known_splits(dataset: str) -> Iterator[tuple[str, str]]:
    user_folder = os.environ.get("VSE_PRESETS")
    for folder in [*([Path(user_folder, "published")] if user_folder else []), published_folder()]:
        path = folder / "splits.yaml"
        if not path.is_file():
            continue
        content = read_yaml(path) or {}
        splits = (content.get(dataset) or {}) if isinstance(content, dict) else None
        if not isinstance(splits, dict):
            raise UserError(f"{path}: names splits as DATASET: {{ NAME: SHA-256 }}")
        for name, hashes in splits.items():
            for sha256 in hashes if isinstance(hashes, list) else [hashes]:
                yield str(name), str(sha256)
