"""The description of a feature: everything that a cache records about its vectors, except the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt

from vse.features.cache.arrays import BlockChecker
from vse.features.cache.feature_cache import ROW_HASH_NAMES, FeatureCache
from vse.features.cache.rows import FeatureKind

_DATA_NOTES = {"counts", "data", "upper_bound"}  # facts on the rows of one data set


class FeatureDescription(BaseModel):
    """A feature that a model reads: its extractor, and the form of its rows.

    A run records the description, so that it can compute the feature of new photos and captions without the cache.

    row_shape : shape of a row or, with ``is_ragged``, of one of its vectors
    is_ragged : whether rows have different numbers of vectors
    """

    model_config = ConfigDict(frozen=True)
    dataset: str
    feature: str
    kind: FeatureKind
    key: str
    dtype: Literal["float16", "float32"]
    row_shape: tuple[PositiveInt, ...]
    is_ragged: bool
    provenance: dict[str, Any]

    def build_cache(self, path: Path, model_folder: Path | None = None) -> FeatureCache:
        """Return a cache without rows.

        ``path`` is the file that names the feature. ``model_folder`` is the folder of a packed model; None for a run.
        """
        return FeatureCache(
            path=path,
            dataset=self.dataset,
            feature=self.feature,
            kind=self.kind,
            key=self.key,
            provenance=self.provenance,
            dataset_file=path.with_name("dataset.json"),
            ids=np.empty(0, np.int64),
            offsets=np.zeros(1, np.int64) if self.is_ragged else None,
            row_shape=self.row_shape,
            dtype=np.dtype(self.dtype),
            shard_arrays=(),
            skipped_ids=frozenset(),
            block_checker=BlockChecker([]),
            model_folder=model_folder,
        )


def describe_feature(cache: FeatureCache) -> FeatureDescription:
    """Return the description of the feature in a cache."""
    left_out = {*ROW_HASH_NAMES, *_DATA_NOTES}
    return FeatureDescription.model_validate(
        {
            **{name: getattr(cache, name) for name in ("dataset", "feature", "kind", "key", "row_shape")},
            "dtype": cache.dtype.name,
            "is_ragged": cache.offsets is not None,
            "provenance": {name: value for name, value in cache.provenance.items() if name not in left_out},
        }
    )
