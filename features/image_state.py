"""The state of a data set's images, by which a workflow notices that some were replaced."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from vse.features.rows import Item, items_of
from vse.features.shards import read_record, read_rows, shard_path, shard_slice
from vse.pipeline.dataset import load_dataset_file
from vse.pipeline.image_files import BadImage


def images_sha256(dataset_file: Path, cache: Path, index: int, n_shards: int) -> str:
    """SHA-256 of the images of a shard, of their bytes in order.

    An image that has not changed since the shard was written (by the times of both files) is not read again, because the
    shard holds its SHA-256. Empty if there is no data set yet.
    """
    if not dataset_file.is_file():
        return ""
    status = dataset_file.stat()
    items = _items(dataset_file, status.st_mtime_ns, status.st_size)
    shard = shard_path(cache, index, n_shards)
    known: dict[int, bytes] = {}
    written = 0
    if read_record(shard) is not None:
        ids, sources = read_rows(shard, "ids", "sources")
        known = {identity: source.tobytes() for identity, source in zip(ids.tolist(), sources, strict=True)}
        written = shard.stat().st_mtime_ns
    digest = hashlib.sha256()
    for item in items[shard_slice(len(items), index, n_shards)]:
        digest.update(_source(item, known, written))
    return digest.hexdigest()


def _source(item: Item, known: dict[int, bytes], written: int) -> bytes:
    """SHA-256 of an image, from the shard if it has not changed since."""
    assert item.path is not None
    try:
        if item.id in known and item.path.stat().st_ctime_ns < written:
            return known[item.id]
        return item.source().tobytes()
    except (OSError, BadImage):
        return bytes(32)


@lru_cache(maxsize=4)
def _items(dataset_file: Path, mtime_ns: int, size: int) -> list[Item]:
    """The images of a data set; a changed file is read again."""
    return items_of(load_dataset_file(dataset_file), "image")
