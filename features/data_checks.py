"""Compare the data set of a cache with a ``dataset.json`` that is joined with it by id, and caches with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, open_cache, read_sources
from vse.features.cache.rows import Ids, items_of, text_rows_of
from vse.features.cache.shards import shards_folder
from vse.features.exchange.embeddings import backbone_of
from vse.features.extractors.proposals import boxes_sha256, holds_truths, truth_boxes
from vse.features.settings import EXTRACTORS
from vse.pipeline.dataset.columns import IdRows, caption_ids, image_ids
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.identity import (
    COMPARED_PHOTOS,
    COMPARED_PHOTOS_IF_CHANGED,
    DataChecksums,
    DataIdentity,
    Hashes,
    caption_hashes,
    data_differences,
    hash_available_photos,
    identity_of_images,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5
from vse.pipeline.files.writing import sha256_json

_NONE = np.empty(0, np.int64)


def check_data(cache: FeatureCache, dataset: Dataset) -> None:
    """Raise UserError if a cache is of a data set of another name, or of other contents at the same ids.

    The ids themselves are checked where rows are read. Some photographs are
    compared, evenly spread, as far as they are at hand. If ``dataset.json`` is not the file that the cache was made from, all
    captions that the cache records are compared, too, and so are the texts or the boxes of phrases that its rows stand for.
    """
    if cache.dataset != dataset.name:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    if differences := differences_of_cache(cache, dataset):
        raise UserError(
            f"{dataset.path}: the data set has changed since the cache was made, {cache.path}: {'; '.join(differences)}. Give "
            "the data set of the cache, or run the same vse-extract again: rows whose sources are the same are kept"
        )


def check_same_photos(cache: FeatureCache, other: FeatureCache) -> None:
    """Raise UserError if two caches of images are of different photographs or captions at the same ids."""
    if differences := data_differences(recorded_identity(other), recorded_identity(cache)):
        raise UserError(f"{other.path} and {cache.path} are of different data sets: {'; '.join(differences)}")


def check_boxes_of(path: Path, dataset: Dataset) -> None:
    """Raise UserError if boxes come from a cache of other photographs than a data set has at the same ids.

    The data sets may have different names. Other files of boxes hold ids alone, and are not checked.
    """
    if path.suffix != ".h5" or not shards_folder(path).is_dir():
        return
    recorded = replace(recorded_identity(open_cache(path)), caption_ids=_NONE, captions=None)
    photo_ids, photos = hash_available_photos(dataset, recorded, COMPARED_PHOTOS_IF_CHANGED)
    if differences := data_differences(DataIdentity(photo_ids, _NONE, photos), recorded):
        raise UserError(f"{path}: its boxes are those of another data set than {dataset.path}: {differences[0]}")


def differences_of_cache(cache: FeatureCache, dataset: Dataset) -> list[str]:
    """Return the differences between a data set and the one that a cache was made from; see :func:`check_data`."""
    recorded, changed = recorded_identity(cache), not is_recorded(cache, dataset)
    captions, of_captions = recorded.captions, recorded.caption_ids
    if changed and captions is not None:
        captions, of_captions = caption_hashes(dataset.images), caption_ids(dataset.images)
    most = COMPARED_PHOTOS_IF_CHANGED if changed else COMPARED_PHOTOS
    photo_ids, photos = hash_available_photos(dataset, recorded, most)
    ours = DataIdentity(photo_ids, of_captions, photos, captions)
    differences = data_differences(ours, recorded)
    if differences or not changed:
        return differences
    if cache.kind == "text" and made_by_extractor(cache):
        return source_differences(dataset, cache.ids, read_sources(cache), cache.provenance.get("config", {}))
    if holds_truths(cache) and boxes_sha256(truth_boxes(dataset)) != cache.provenance.get("boxes_sha256"):
        return ["the boxes of its phrases differ"]
    return []


def holds_texts_of(cache: FeatureCache, dataset: Dataset) -> bool:
    """Return whether a cache of captions or phrases holds the texts of a data set, and not those of another one."""
    return cache.dataset == dataset.name and not differences_of_cache(cache, dataset)


def is_recorded(cache: FeatureCache, dataset: Dataset) -> bool:
    """Return whether a cache records the SHA-256 of this very ``dataset.json``."""
    said = cache.provenance.get("data")
    return isinstance(said, Mapping) and bool(dataset.sha256) and said.get("sha256") == dataset.sha256


def recorded_identity(cache: FeatureCache) -> DataIdentity:
    """Return the identity of the data set that a cache was made from, as far as the cache records it."""
    names = ("caption_ids", "caption_hashes", "photo_hashes")
    with open_hdf5(cache.path, "a readable feature cache") as file:
        stored = {name: data[:] for name in names if (data := find_hdf5_dataset(file, name)) is not None}
    photos = stored.get("photo_hashes")
    if cache.kind == "image" and photos is None and made_by_extractor(cache):
        photos = read_sources(cache)
    return DataIdentity(
        image_ids=cache.ids if cache.kind == "image" else _NONE,
        caption_ids=_checked(cache.path, stored, "caption_ids", ()),
        photos=photos if cache.kind == "image" and photos is not None and photos.any() else None,
        captions=_checked(cache.path, stored, "caption_hashes", (8,)) if "caption_hashes" in stored else None,
    )


def data_sums(cache: FeatureCache, dataset: Dataset) -> DataChecksums:
    """Return the sums of a data set; that of the photographs covers the rows of ``cache``, and is None if it has no hashes."""
    photos = replace(recorded_identity(cache), caption_ids=_NONE, captions=None).checksums.photos_sha256
    identity = identity_of_images(dataset.images)
    splits = {split: sorted(image_ids(images).tolist()) for split, images in dataset.splits.items()}
    return identity.checksums.model_copy(update={"photos_sha256": photos, "splits_sha256": sha256_json(splits)})


def source_differences(dataset: Dataset, ids: Ids, sources: Hashes, config: Mapping[str, Any]) -> list[str]:
    """Return how the texts of a data set differ from the ``sources`` (n, 32) of the rows of a cache or shard of texts."""
    extractor, of = config.get("extractor"), text_rows_of(config)
    raw = isinstance(extractor, str) and extractor in EXTRACTORS and EXTRACTORS[extractor].reads_raw
    items = items_of(dataset, "text", raw, of)
    rows = IdRows(ids).find(np.asarray([item.id for item in items], np.int64))
    wrong = [
        item.id for item, row in zip(items, rows.tolist(), strict=True) if row >= 0 and (item.source() != sources[row]).any()
    ]
    return [f"{len(wrong)} of {int((rows >= 0).sum())} compared {of} differ, the first is id {wrong[0]}"] if wrong else []


def made_by_extractor(cache: FeatureCache) -> bool:
    """Return whether the sources of a cache's rows are photographs or texts, and not features of another program or model."""
    return "imported" not in cache.provenance and backbone_of(cache) is None


def _checked(path: Path, stored: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    values = stored.get(name, _NONE)
    if values.shape != (len(stored.get("caption_ids", _NONE)), *shape):
        raise UserError(f"{path}: its {name} are of shape {values.shape}; run the same vse-extract again")
    return values
