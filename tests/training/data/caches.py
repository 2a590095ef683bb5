"""Caches of given features, and what HDF5 itself reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, shards_folder, write_shard
from vse.pipeline.files.writing import read_json, write_json
from vse.training.data.images import CachedImageFeatures

CPU = torch.device("cpu")
PLACES = {"mapped": 0.0, "in memory": 1.0}
Array = NDArray[Any]


def cached(cache: FeatureCache, where: str = "mapped", image_ids: Sequence[int] | None = None) -> CachedImageFeatures:
    ids = cache.ids if image_ids is None else np.asarray(image_ids, np.int64)
    return CachedImageFeatures(FeatureReader(cache, 0), ids, CPU, PLACES[where])


def rows_by_id(cache: FeatureCache) -> dict[int, Array]:
    with h5py.File(cache.path) as file:
        return dict(zip(file["ids"][:].tolist(), file["features"][:].astype(np.float32), strict=True))


def made_by_hand(folder: Path, features: Array, image_ids: Sequence[int], bank: bool = False) -> FeatureCache:
    """A cache of these features, in two shards: vectors, positions or a bank of crops."""
    ids = np.asarray(image_ids, np.int64)
    parts = np.array_split(np.arange(len(ids)), 2)
    crops = {"crops": "rc_bank"} if bank else {}
    return _merged(folder, ids, [FeatureRows(ids[part], features[part], _sources(len(part))) for part in parts], crops)


def regions_by_hand(folder: Path, sets: Sequence[Array], image_ids: Sequence[int]) -> FeatureCache:
    """A cache of sets (n_regions, dim) of any number of regions, in two shards."""
    ids = np.asarray(image_ids, np.int64)
    rows = []
    for part in np.array_split(np.arange(len(ids)), 2):
        own = [sets[k] for k in part]
        offsets = np.cumsum([0, *map(len, own)])
        boxes = np.zeros((offsets[-1], 4), np.float32)
        sizes = np.full((len(part), 2), 32, np.int32)
        rows.append(FeatureRows(ids[part], np.concatenate(own), _sources(len(part)), offsets, boxes, boxes[:, 0], sizes))
    return _merged(folder, ids, rows, {})


def _sources(n: int) -> NDArray[np.uint8]:
    return np.zeros((n, 32), np.uint8)


def _merged(folder: Path, ids: NDArray[np.int64], parts: Sequence[FeatureRows], config: dict[str, str]) -> FeatureCache:
    out = folder / "hand_made.h5"
    identity = CacheIdentity("hand", "made", "image", {"config": {"normalize": False, **config}})
    for index, rows in enumerate(parts):
        write_shard(shard_path(out, index, len(parts)), identity, rows)
    return open_cache(merge_shards(out, len(parts), folder / "dataset.json", ids))


def drop_checksums(path: Path) -> Path:
    """Make a cache like those from before manifests had checksums of blocks."""
    file = shards_folder(path) / "manifest.json"
    manifest = read_json(file)
    for entry in manifest["shards"]:
        entry.pop("xxh3_64", None)
    write_json(file, manifest)
    return path


def spoil(path: Path, image_id: int, value: float) -> None:
    """Put a value into the features of an image, without checksums; the last number of its last crop or region."""
    drop_checksums(path)
    for shard in sorted(shards_folder(path).glob("*.h5")):
        with h5py.File(shard, "r+") as file:
            for row in np.flatnonzero(file["ids"][:] == image_id):
                features = file["features"][:]
                last = int(file["offsets"][row + 1]) - 1 if "offsets" in file else row
                features[last].reshape(-1)[-1] = value
                file["features"][:] = features
