"""The data set of a run, compared by content with the one that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vse.features.cache import FeatureCache, open_cache
from vse.features.cache_data import data_sums, recorded_identity
from vse.pipeline.data_identity import DataIdentity, DataSums, data_differences
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.hdf5_files import open_hdf5, own_data
from vse.train.run.folder import RunFolder


def other_data(folder: RunFolder, record: Mapping[str, Any], cache: FeatureCache, dataset: Dataset) -> DataSums | None:
    """Return the sums of ``dataset`` if its contents differ from those of the run's data set; None if they do not.

    Both data sets have the same name. If a run records no sums, its own ``dataset.json`` and cache are read, if they are
    there unchanged. If not, ``dataset`` counts as another data set unless its SHA-256 is the one that the run records.
    """
    same_captions, same_cache = dataset.sha256 == record.get("captions_sha256"), cache.key == folder.evaluated()["key"]
    if same_captions and same_cache:
        return None
    now, trained_on = data_sums(cache, dataset), data_of_training(folder, record)
    if trained_on is None:
        return None if same_captions and "captions_sha256" in record else now
    recorded = recorded_identity(cache)
    if same_cache and recorded.captions is not None and recorded.sums.captions_sha256 == trained_on.captions_sha256:
        return None  # a subset, or other splits: the cache and the data set were compared before
    differing = set(now.differences(trained_on))
    if differing == {"photographs"} and (same_cache or _holds_same_photos(folder, cache)):
        return None
    return now if differing else None


def data_of_training(folder: RunFolder, record: Mapping[str, Any]) -> DataSums | None:
    """Return the sums of the data set that a run was trained on; None if they are not recorded, and it is not at hand."""
    if record.get("data") is not None:
        try:
            return DataSums.model_validate(record["data"])
        except ValidationError:
            raise UserError(f"{folder.record_file}: not the record of a run, its data are not sums; train again") from None
    place = record.get("captions")
    with suppress(UserError):
        own = load_dataset_file(folder.path / str(place))
        cache = open_cache(folder.feature_file())
        if own.sha256 == record.get("captions_sha256") and cache.key == folder.evaluated()["key"]:
            return data_sums(cache, own)
    return None


def identity_in(path: Path) -> DataIdentity | None:
    """Return the identity of the data that a file of embeddings or of phrase scores is of; None if it cannot be read."""
    names = ("image_ids", "caption_ids", "photo_hashes", "caption_hashes")
    with suppress(UserError), open_hdf5(path, "a file of embeddings") as file:
        stored = {name: data[:] for name in names if (data := own_data(file, name)) is not None}
        images, image_rows = np.unique(stored["image_ids"], return_index=True)
        captions, caption_rows = np.unique(stored["caption_ids"], return_index=True)
        photos, texts = stored.get("photo_hashes"), stored.get("caption_hashes")
        return DataIdentity(
            images,
            captions,
            None if photos is None else photos[image_rows],
            None if texts is None else texts[caption_rows],
        )
    return None


def _holds_same_photos(folder: RunFolder, cache: FeatureCache) -> bool:
    """Return whether the run's cache is there and unchanged, shares ids with ``cache`` and has the same data at these ids."""
    with suppress(UserError):
        own = open_cache(folder.feature_file())
        shared = np.isin(cache.ids, own.ids).any()
        return bool(
            own.key == folder.evaluated()["key"]
            and shared
            and not data_differences(recorded_identity(cache), recorded_identity(own))
        )
    return False
