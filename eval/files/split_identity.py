"""Which images a split has: a hash of their ids, and the name that ``config/published/splits.yaml`` gives to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from vse.eval.defaults import published_folder
from vse.pipeline.errors import UserError
from vse.pipeline.files import sha256_json
from vse.pipeline.preset_files import read_yaml

if TYPE_CHECKING:  # tables read results, and do without torch
    from vse.eval.files.embeddings import Embeddings


class SplitIdentity(BaseModel):
    """The images of a split.

    Attributes
    ----------
    ids : what the images were known by: ``coco_ids`` or ``image_ids``
    sha256 : of the sorted ids as a canonical JSON list
    name : what this split of the data set is called, e.g. ``karpathy``; None if it is not known
    """

    ids: str
    sha256: str
    name: str | None = None


def split_identity(run: Embeddings) -> SplitIdentity:
    """The identity of the split that embeddings or scores are of."""
    ids, values = ("image_ids", run.image_ids) if run.coco_ids is None else ("coco_ids", run.coco_ids)
    return identity_of(run.dataset, ids, values)


def identity_of(dataset: str, ids: str, values: NDArray[np.int64]) -> SplitIdentity:
    """The identity of the images of a data set whose ``ids``, which are ``image_ids`` or ``coco_ids``, are ``values`` (n,)."""
    sha256 = sha256_json(sorted(values.tolist()))
    return SplitIdentity(ids=ids, sha256=sha256, name=split_name(dataset, sha256))


def split_name(dataset: str, sha256: str) -> str | None:
    """The name of a data set's split by the hash of its ids; a folder of presets (``VSE_PRESETS``) may name further ones."""
    return next((name for name, known in _named_splits(dataset) if known == sha256), None)


def _named_splits(dataset: str) -> Iterator[tuple[str, str]]:
    """Name and hash of each split of a data set that has a name."""
    own = os.environ.get("VSE_PRESETS")
    for folder in [*([Path(own, "published")] if own else []), published_folder()]:
        path = folder / "splits.yaml"
        if not path.is_file():
            continue
        splits = _mapping(path, read_yaml(path)).get(dataset)
        for name, hashes in _mapping(path, splits).items():
            for sha256 in hashes if isinstance(hashes, list) else [hashes]:
                yield str(name), str(sha256)


def _mapping(path: Path, content: Any) -> dict[str, Any]:
    if content is not None and not isinstance(content, dict):
        raise UserError(f"{path}: names splits as DATASET: {{ NAME: SHA-256 }}")
    return content or {}
