"""Embeddings of a model as feature caches of images and of captions, on which another model trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache
from vse.features.cache.rows import Identity, Ids, Kind, Rows
from vse.features.cache.shards import check_cache_out, feature_at, shard_path, shard_slice, shards_folder, write_shard
from vse.features.exchange.arrays import SHARD_BYTES, row_hashes
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import is_path
from vse.pipeline.files.writing import lock_for_writing, sha256_json

SIDES: dict[Kind, str] = {"image": "images", "text": "captions"}


@dataclass(frozen=True)
class Backbone:
    """The model whose embeddings a cache holds.

    Attributes
    ----------
    sha256 : of its weights, or of the files that another program wrote; the caches of both sides share it
    experiment : what it is called
    said : what else is known of it, e.g. its seed
    run : its run folder, if it is one of ours
    """

    sha256: str
    experiment: str
    said: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None


def cache_paths(out: Path) -> dict[Kind, Path]:
    """``features/demo_vsepp-0`` -> ``features/demo_vsepp-0_images.h5`` and ``features/demo_vsepp-0_captions.h5``."""
    if out.suffix == ".h5":
        raise UserError(f"{out}: is the beginning of the names of two caches, so leave .h5 out")
    return {kind: out.with_name(f"{out.name}_{side}.h5") for kind, side in SIDES.items()}


def captions_beside(images: Path) -> Path:
    """The cache of captions that is written together with that of images."""
    return images.with_name(f"{images.name.removesuffix('_images.h5')}_captions.h5")


def backbone_of(cache: FeatureCache) -> Backbone | None:
    """The model whose embeddings a cache holds; None of any other feature."""
    said, sha256, run = (cache.provenance.get(name) for name in ("backbone", "backbone_sha256", "backbone_run"))
    if not isinstance(said, dict) or not isinstance(sha256, str):
        return None
    place = cache.path.parent / str(run) if is_path(run) else None
    return Backbone(sha256, str(said.get("experiment")), said, place)


def write_backbone_cache(
    out: Path,
    dataset: Dataset,
    kind: Kind,
    backbone: Backbone,
    ids: Ids,
    vectors: Callable[[Ids], NDArray[np.float32]],
    skipped: Mapping[int, str],
) -> Path:
    """Write the embeddings of one side as a cache of vectors in float32; returns ``out``.

    A cache that is there, of the same data set and feature, is replaced.

    Parameters
    ----------
    ids : (n,) images or captions of the data set, in the order of its file
    vectors : those of some of them, (m, dim)
    skipped : which of them have none, and why
    """
    content = {
        "backbone": {"experiment": backbone.experiment, **backbone.said},
        "backbone_sha256": backbone.sha256,
        "requested_ids_sha256": sha256_json(ids.tolist()),
        "extractor_version": 1,
    }
    identity = Identity(dataset.name, feature_at(out, dataset.name), kind, content)
    notes = {} if backbone.run is None else {"backbone_run": Path(os.path.relpath(backbone.run, out.parent)).as_posix()}
    there = np.asarray([i for i in ids.tolist() if i not in skipped], np.int64)
    n_shards = min(len(ids), max(1, -(-len(there) * vectors(there[:1]).nbytes // SHARD_BYTES)))
    check_cache_out(out, dataset.name, identity.feature, [dataset.path])
    with lock_for_writing(out):
        out.unlink(missing_ok=True)
        for old in shards_folder(out).glob("shard-*"):
            old.unlink()
        for index in range(n_shards):
            wanted = ids[shard_slice(len(ids), index, n_shards)]
            own = np.asarray([i for i in wanted.tolist() if i not in skipped], np.int64)
            made = vectors(own)
            left_out = [{"id": i, "path": "", "reason": skipped[i]} for i in wanted.tolist() if i in skipped]
            rows = Rows(own, made, row_hashes(made) if len(made) else np.empty((0, 32), np.uint8), skipped=left_out)
            write_shard(shard_path(out, index, n_shards), identity, rows, notes)
        return open_cache(merge_shards(out, n_shards, dataset.path, ids, dataset=dataset)).path
