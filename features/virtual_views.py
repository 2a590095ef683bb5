"""The file of a feature cache: ids, sources and provenance, and virtual views of the arrays of its shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from vse.features.rows import Ids
from vse.features.shards import PER_ROW, RAGGED, Shard, joined_notes, read_rows, shards_folder, write_attributes
from vse.pipeline.files import sha256_json
from vse.pipeline.hdf5_files import open_hdf5, required_data

ARRAYS = ("features", *RAGGED, *PER_ROW)


def virtual_views(
    cache: Path,
    shards: Sequence[Shard],
    dataset_file: Path,
    skipped: Sequence[int],
    said: Mapping[str, Any],
    known: Mapping[str, NDArray[Any]],
) -> tuple[bytes, str]:
    """Return the bytes of a cache file, and its key: of the identity, the ids that are there and their sources."""
    folder, identity = shards_folder(cache), shards[0].identity
    files = [folder / shard.file for shard in shards]
    ids, sources = (np.concatenate(parts) for parts in zip(*(read_rows(f, "ids", "sources") for f in files), strict=True))
    digests = {
        "ids_sha256": sha256_json(ids.tolist()),
        "sources_sha256": hashlib.sha256(sources.tobytes()).hexdigest(),
    }
    key = sha256_json([identity.key, digests])
    counts = {name: sum(shard.counts.get(name, 0) for shard in shards) for shard in shards for name in shard.counts}
    buffer = BytesIO()
    with h5py.File(buffer, "w") as file:
        write_attributes(file, identity, key)
        file.attrs["captions"] = Path(os.path.relpath(dataset_file, cache.parent)).as_posix()
        provenance = {**identity.content, **joined_notes(shards), **digests, "counts": counts, **said}
        file.attrs["provenance"] = json.dumps(provenance, sort_keys=True)
        file.create_dataset("ids", data=ids)
        file.create_dataset("sources", data=sources)
        file.create_dataset("skipped_ids", data=np.asarray(skipped, np.int64))
        for name, values in known.items():
            file.create_dataset(name, data=values)
        with open_hdf5(files[0], "a readable shard") as first:
            names = [name for name in ARRAYS if name in first]
            if "offsets" in first:
                file.create_dataset("offsets", data=joined_offsets([read_rows(f, "offsets")[0] for f in files]))
        for name in names:
            _virtual_view(file, name, files)
    return buffer.getvalue(), key


def _virtual_view(file: h5py.File, name: str, shards: Sequence[Path]) -> None:
    shapes = []
    for path in shards:
        with open_hdf5(path, "a readable shard") as shard:
            data = required_data(shard, name)
            shapes.append(data.shape)
            dtype = data.dtype
    row_shape = max(shapes)[1:]  # a shard without rows may not know it
    layout = h5py.VirtualLayout(shape=(sum(shape[0] for shape in shapes), *row_shape), dtype=dtype)
    start = 0
    for path, shape in zip(shards, shapes, strict=True):
        if shape[0]:
            layout[start : start + shape[0]] = h5py.VirtualSource(f"{path.parent.name}/{path.name}", name, shape=shape)
        start += shape[0]
    file.create_virtual_dataset(name, layout, fillvalue=np.nan if dtype.kind == "f" else -1)


def joined_offsets(parts: Sequence[Ids]) -> Ids:
    """Return the offsets of the rows of several shards one after the other, from 0."""
    counts = np.concatenate([np.diff(part) for part in parts])
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
