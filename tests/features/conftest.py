"""Tiny text encoders and phrases, read only; caches of given rows; and calls of a command that must succeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import succeeds
from tests.features.drawn_phrases import drawn_phrases
from tests.features.tiny_text import add_tiny_clip, tiny_bert
from vse.features.cache.feature_cache import FeatureCache, merge_shards, verify_cache
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, shard_slice, write_shard
from vse.features.extraction import extract_shards, merge_feature
from vse.features.settings.base import Extractor

Fails = Callable[..., str]
Edit = Callable[..., Path]
succeed = succeeds


def sets(*settings: str) -> list[str]:
    return [argument for setting in settings for argument in ("--set", setting)]


def write_cache(out: Path, parts: Sequence[FeatureRows], content: Mapping[str, Any] | None = None) -> Path:
    """Write a cache of the data set ``demo`` whose shards have these rows."""
    for k, rows in enumerate(parts):
        identity = CacheIdentity("demo", out.stem.removeprefix("demo_"), "image", content or {})
        write_shard(shard_path(out, k, len(parts)), identity, rows)
    return merge_shards(out, len(parts), out.parent / "dataset.json", np.concatenate([rows.ids for rows in parts]))


def shard_parts(n_rows: int, n_shards: int) -> list[NDArray[np.int64]]:
    """The numbers of the rows of each shard."""
    return [np.arange(n_rows)[shard_slice(n_rows, k, n_shards)] for k in range(n_shards)]


def as_sources(n_images: int) -> NDArray[np.uint8]:
    return np.zeros((n_images, 32), np.uint8)


def extracted_cache(dataset: Path, extractor: Extractor, out: Path, n_shards: int = 1) -> FeatureCache:
    """Extract a cache in shards, and verify it."""
    extract_shards(dataset, extractor, out, n_shards)
    return verify_cache(merge_feature(dataset, out, n_shards))


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert") / "tiny")


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny OpenCLIP model, which the library knows by this name."""
    return add_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_phrases(tmp_path_factory.mktemp("drawn") / "data")
