"""Check that a cache belongs to a data set, and that two caches of images belong to the same data set.

Two data sets may use the same ids for different images or captions. The functions therefore compare hashes of photographs,
captions and phrases, and boxes of phrases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache, open_cache, read_input_hashes
from vse.features.cache.rows import Ids, find_text_unit, list_extractor_inputs
from vse.features.cache.shards import ShardRecord, shards_folder
from vse.features.exchange.embeddings import read_backbone
from vse.features.extractors.proposals import collect_truth_boxes, has_truth_boxes, hash_boxes
from vse.features.settings import find_extractor_settings
from vse.pipeline.dataset.columns import IdIndex, caption_ids, image_ids
from vse.pipeline.dataset.dataset import Dataset
from vse.pipeline.dataset.identity import (
    N_PHOTOS_COMPARED,
    N_PHOTOS_COMPARED_IF_DATASET_CHANGED,
    DataChecksums,
    DataIdentity,
    Hashes,
    build_identity,
    describe_data_differences,
    hash_available_photos,
    hash_captions,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5
from vse.pipeline.files.writing import sha256_json

_NO_IDS = np.empty(0, np.int64)


def check_belongs_to_dataset(cache: FeatureCache, dataset: Dataset) -> None:
    """Check that the features in a cache belong to a data set. Raises UserError if names or contents differ.

    An evenly spread sample of the existing photographs is compared. If ``dataset.json`` has changed since the cache was
    written, the sample is larger, and all recorded captions are compared, too. For a cache of texts, all texts are then
    compared; for a cache of ground-truth boxes, all boxes. Ids that the cache lacks are not reported here, but when their
    rows are read.

    If the data set is a fold of a cross-validation, the cache may also belong to the complete data set (its parent). Only
    caption vectors of a fitted encoder must belong to the fold: an encoder of the complete data set may have been fitted to
    test captions of this fold.
    """
    if cache.dataset not in (dataset.name, dataset.parent):
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    if differences := describe_dataset_differences(cache, dataset):
        raise UserError(
            f"{dataset.path}: the data set has changed since {cache.path} was made: {'; '.join(differences)}. Give the data "
            "set of the cache, or run the same vse-extract again, which keeps unchanged rows"
        )
    if dataset.fold and _has_fitted_encoder(cache) and not is_from_dataset_file(cache, dataset):
        raise UserError(
            f"{cache.path}: its encoder was fitted to other training captions than those of fold {dataset.fold}, and they may "
            f"contain test captions of this fold; extract {cache.feature} from {dataset.path}, to a file of its own"
        )


def check_same_photos(cache: FeatureCache, other: FeatureCache) -> None:
    """Check that two caches of images belong to the same data set, by their photographs and captions. Raises UserError."""
    if differences := describe_data_differences(read_data_identity(other), read_data_identity(cache)):
        raise UserError(f"{other.path} and {cache.path} are of different data sets: {'; '.join(differences)}")


def check_box_photos(path: Path, dataset: Dataset) -> None:
    """Check that the boxes in a cache belong to the photographs of a data set. Raises UserError if photographs differ.

    The names of the data sets may differ. A file of boxes that is not a cache holds no hashes and is not checked.
    """
    if path.suffix != ".h5" or not shards_folder(path).is_dir():
        return
    recorded = replace(read_data_identity(open_cache(path)), caption_ids=_NO_IDS, caption_hashes=None)
    photo_ids, photos = hash_available_photos(dataset, recorded, N_PHOTOS_COMPARED_IF_DATASET_CHANGED)
    if differences := describe_data_differences(DataIdentity(photo_ids, _NO_IDS, photos), recorded):
        raise UserError(f"{path}: its boxes belong to another data set than {dataset.path}: {differences[0]}")


def describe_dataset_differences(cache: FeatureCache, dataset: Dataset) -> list[str]:
    """Return messages about the differences between a data set and the data set of a cache; an empty list if there are none.

    A sample of photographs is compared. If ``dataset.json`` has changed, all captions, texts and ground-truth boxes
    are compared, too.
    """
    recorded, changed = read_data_identity(cache), not is_from_dataset_file(cache, dataset)
    captions, ids_of_captions = recorded.caption_hashes, recorded.caption_ids
    if changed and captions is not None:
        captions, ids_of_captions = hash_captions(dataset.images), caption_ids(dataset.images)
    max_photos = N_PHOTOS_COMPARED_IF_DATASET_CHANGED if changed else N_PHOTOS_COMPARED
    photo_ids, photos = hash_available_photos(dataset, recorded, max_photos)
    current = DataIdentity(photo_ids, ids_of_captions, photos, captions)
    differences = describe_data_differences(current, recorded)
    if differences or not changed:
        return differences
    if cache.kind == "text" and has_input_hashes(cache):
        return describe_text_differences(dataset, cache.ids, read_input_hashes(cache), cache.provenance.get("config", {}))
    if has_truth_boxes(cache) and hash_boxes(collect_truth_boxes(dataset)) != cache.provenance.get("boxes_sha256"):
        return ["the boxes of its phrases differ"]
    return []


def belongs_to_dataset(cache: FeatureCache, dataset: Dataset) -> bool:
    """Return whether the rows of a cache were computed from the images or texts of this data set."""
    return cache.dataset in (dataset.name, dataset.parent) and not describe_dataset_differences(cache, dataset)


def is_from_dataset_file(cache: FeatureCache, dataset: Dataset) -> bool:
    """Return whether ``dataset.json`` still has the SHA-256 that the cache recorded when it was computed."""
    data = cache.provenance.get("data")
    return isinstance(data, Mapping) and bool(dataset.sha256) and data.get("sha256") == dataset.sha256


def _has_fitted_encoder(cache: FeatureCache) -> bool:
    config = cache.provenance.get("config")
    extractor = find_extractor_settings(config.get("extractor")) if isinstance(config, Mapping) else None
    return extractor is not None and extractor.fits_encoder


def read_data_identity(cache: FeatureCache) -> DataIdentity:
    """Return the ids and hashes of photographs and captions that a cache records about its data set."""
    names = ("caption_ids", "caption_hashes", "photo_hashes")
    with open_hdf5(cache.path, "a readable feature cache") as file:
        stored = {name: data[:] for name in names if (data := find_hdf5_dataset(file, name)) is not None}
    photos = stored.get("photo_hashes")
    if cache.kind == "image" and photos is None and has_input_hashes(cache):
        photos = read_input_hashes(cache)
    return DataIdentity(
        image_ids=cache.ids if cache.kind == "image" else _NO_IDS,
        caption_ids=_get_caption_array(cache.path, stored, "caption_ids", ()),
        photo_hashes=photos if cache.kind == "image" and photos is not None and photos.any() else None,
        caption_hashes=_get_caption_array(cache.path, stored, "caption_hashes", (8,)) if "caption_hashes" in stored else None,
    )


def compute_data_checksums(cache: FeatureCache, dataset: Dataset) -> DataChecksums:
    """Return the checksums of the photographs, captions and splits of a data set.

    The checksum of photographs is computed from the hashes in ``cache``; None if the cache records no hashes of photographs.
    """
    recorded = read_data_identity(cache)
    photos = replace(recorded, caption_ids=_NO_IDS, caption_hashes=None).checksums.photos_sha256
    if is_from_dataset_file(cache, dataset) and recorded.caption_hashes is not None:
        identity = replace(recorded, image_ids=image_ids(dataset.images), photo_hashes=None)
    else:
        identity = build_identity(dataset.images)
    splits = {split: sorted(image_ids(images).tolist()) for split, images in dataset.splits.items()}
    return identity.checksums.model_copy(update={"photos_sha256": photos, "splits_sha256": sha256_json(splits)})


def is_current_text_shard(record: ShardRecord, dataset: Dataset) -> bool:
    """Return whether a shard holds vectors of texts, and ``dataset.json`` still has the SHA-256 that the shard recorded."""
    return record.identity.kind == "text" and bool(dataset.sha256) and record.dataset_sha256 == dataset.sha256


def describe_text_differences(
    dataset: Dataset, ids: Ids, input_hashes: Hashes, config: Mapping[str, Any], text_slice: slice = slice(None)
) -> list[str]:
    """Return a list with a message if texts of a data set differ from the texts of a cache or shard, else an empty list.

    ids : (n,) ids of the rows of the cache or shard
    input_hashes : (n, 32) hashes of the texts of these rows
    config : recorded settings of the extractor
    text_slice : indices of the data set's texts to compare; by default all texts
    """
    extractor, text_unit = find_extractor_settings(config.get("extractor")), find_text_unit(config)
    raw = extractor is not None and extractor.reads_raw_text
    items = list_extractor_inputs(dataset, "text", raw, text_unit, text_slice)
    rows = IdIndex(ids).find_rows(np.asarray([item.id for item in items], np.int64))
    wrong = [
        item.id for item, row in zip(items, rows, strict=True) if row >= 0 and (item.hash_input() != input_hashes[row]).any()
    ]
    n_compared = int((rows >= 0).sum())
    return [f"{len(wrong)} of {n_compared} compared {text_unit} differ, the first is id {wrong[0]}"] if wrong else []


def has_input_hashes(cache: FeatureCache) -> bool:
    """Return whether a cache records hashes of photographs or texts.

    Caches of imported features, or of embeddings by a trained model, record hashes of their vectors instead.
    """
    return "imported" not in cache.provenance and read_backbone(cache) is None


def _get_caption_array(path: Path, stored: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the array ``name``, with a row per caption, of the arrays ``stored`` in a cache; an empty array if it is missing.

    Raises UserError, which names the cache ``path``, unless the shape of the array is (n_captions, *shape).
    """
    values = stored.get(name, _NO_IDS)
    if values.shape != (len(stored.get("caption_ids", _NO_IDS)), *shape):
        raise UserError(f"{path}: its {name} are of shape {values.shape}; run the same vse-extract again")
    return values
