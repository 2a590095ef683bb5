"""The description of a feature: everything that a cache records about its vectors, except the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt

from vse.features.cache.arrays import BlockChecker
from vse.features.cache.feature_cache import ROW_HASH_NAMES, FeatureCache
from vse.features.cache.rows import FeatureKind

_DATA_NOTES = {"counts", "data", "upper_bound"}  # entries of the provenance that describe the rows, not the feature


class FeatureDescription(BaseModel):
    """The extractor of a feature, and the shape and type of its rows.

    A training run records the descriptions of its features, so that these features can be computed for new photos and captions
    without the caches.

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
        """Return the feature as a cache without rows.

        ``path`` is the cache file of the feature. It may be missing: messages name it, and a fitted encoder lies next to it.
        For a packed model, ``path`` is the file with the description, and ``model_folder`` the folder with the encoder.
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
