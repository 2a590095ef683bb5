"""A run put to use: its settings, its caches and its data set, found where they lie and checked against its record.

The data set of a run, compared by content with the one that it was trained on.

Images that a model is tested on must not be among those that it was trained on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from vse.features.backbones.device import pick_device
from vse.features.cache.feature_cache import FeatureCache, open_cache, read_sources
from vse.features.cache.shards import shards_folder
from vse.features.data_checks import check_data, data_sums, recorded_identity
from vse.features.exchange.embeddings import captions_cache_path, read_backbone
from vse.features.extractors.captions import encoder_path
from vse.features.settings import has_auto_precision
from vse.pipeline.command import current_provenance
from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.columns import IdRows, image_ids
from vse.pipeline.dataset.dataset import Dataset, Image, load_dataset_file
from vse.pipeline.dataset.duplicates import same_images
from vse.pipeline.dataset.identity import DataChecksums, DataIdentity, caption_hashes, data_differences
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5
from vse.pipeline.presets.presets import list_changes
from vse.train.experiment import ExperimentConfig, changed_settings
from vse.train.models.build import Model
from vse.train.options import RunFiles
from vse.train.run.folder import RunFolder


def other_data(folder: RunFolder, record: Mapping[str, Any], cache: FeatureCache, dataset: Dataset) -> DataChecksums | None:
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
    if same_cache and recorded.captions is not None and recorded.checksums.captions_sha256 == trained_on.captions_sha256:
        return None  # a subset, or other splits: the cache and the data set were compared before
    differing = set(now.differences(trained_on))
    if differing == {"photographs"} and (same_cache or _holds_same_photos(folder, cache)):
        return None
    return now if differing else None


def data_of_training(folder: RunFolder, record: Mapping[str, Any]) -> DataChecksums | None:
    """Return the sums of the data set that a run was trained on; None if they are not recorded, and it is not at hand."""
    if record.get("data") is not None:
        try:
            return DataChecksums.model_validate(record["data"])
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
        stored = {name: data[:] for name in names if (data := find_hdf5_dataset(file, name)) is not None}
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


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """The settings and the record of a run, the data set and caches that its model reads, and the device.

    ``other_data`` has the checksums of the data set if it has the name of the training data but other contents.
    ``training_data`` has the checksums of the training data, if they are known.
    """

    folder: RunFolder
    experiment: ExperimentConfig
    record: dict[str, Any]
    dataset: Dataset
    cache: FeatureCache
    caption_cache: FeatureCache | None
    device: torch.device
    other_data: DataChecksums | None
    training_data: DataChecksums | None

    @property
    def trained_on(self) -> str | None:
        """The data set that it was trained on, if that is another one than the one that it reads.

        ``demo-1a2b3c4d`` if both are called ``demo``: the digits stand for the contents of the one that it was trained on.
        """
        name = str(self.record["dataset"])
        if name != self.dataset.name:
            return name
        if self.other_data is None:
            return None
        known = self.training_data.short if self.training_data else str(self.record.get("captions_sha256", "other"))[:8]
        return f"{name}-{known}"

    @property
    def data_label(self) -> str:
        """The name of the data set in file names, with digits of its checksum if the training data has the same name."""
        return self.dataset.name if self.other_data is None else f"{self.dataset.name}-{self.other_data.short}"

    def hashes(self, images: Sequence[Image]) -> dict[str, Any]:
        """Return ``photo_hashes`` (n_images, 32), if they are known, and ``caption_hashes`` (n_captions, 8) of some images."""
        known = recorded_identity(self.cache)
        rows = IdRows(known.image_ids).find(image_ids(images))
        photos = None if known.photos is None or (rows < 0).any() else known.photos[rows]
        return {"photo_hashes": photos, "caption_hashes": caption_hashes(images)}

    def words_of(self, text: str) -> list[str]:
        """Tokenise a new text with the tokeniser of the training captions."""
        return find_tokeniser(self.record.get("tokeniser", DEFAULT_TOKENISER), self.folder.record_file)(text)

    @property
    def inputs(self) -> list[Path]:
        """All that was read of it, or may be: no output may be one of these files, or lie in one of these folders."""
        caches = [cache for cache in (self.cache, self.caption_cache) if cache is not None]
        of_caches = [path for cache in caches for path in (cache.path, shards_folder(cache.path), encoder_path(cache.path))]
        return [
            *self.folder.files,
            self.folder.code_folder,
            *of_caches,
            self.dataset.path,
            self.dataset.path.parent / "images",
        ]

    def provenance(self, out: Path) -> dict[str, Any]:
        """Return the provenance of a file that this run writes."""
        caches = [cache for cache in (self.cache, self.caption_cache) if cache is not None]
        state = unfinished_state(self.record)
        return {
            "features": {cache.feature: cache.key for cache in caches},
            "config": self.experiment.model_dump(mode="json"),
            "changed_settings": changed_settings(self.experiment, self.record["dataset"]),
            "captions": os.path.relpath(self.dataset.path, out.parent),
            "best_epoch": self.record.get("best_epoch"),
            "versions": self.record.get("versions", {}),
            "trained": self.record.get("made", {}),
            "embedded": current_provenance(),
            "cost": run_cost(self),
            **({} if state is None else {"unfinished": state}),
        }


def run_cost(run: OpenedRun) -> dict[str, Any]:
    """Return the cost of a run: seconds of extraction and training, MB of caches and weights.

    None is what is not known: of imported features how long they took, for example.
    """
    caches = [cache for cache in (run.cache, run.caption_cache) if cache is not None]
    trained = run.record["features"]
    if "eval_features" in run.record:
        with suppress(UserError):
            caches.append(open_cache(run.folder.path / str(trained["path"])))
    seconds = {cache.feature: cache.seconds for cache in caches}
    sizes = {cache.feature: round(cache.n_bytes / 1e6, 3) for cache in caches}
    best = run.folder.best_file
    return {
        "extraction_s": {str(trained["name"]): None, **seconds},
        "cache_mb": {str(trained["name"]): None, **sizes},
        "train_s": run.record.get("train_seconds"),
        "model_mb": round(best.stat().st_size / 1e6, 3) if best.is_file() else None,
    }


def open_run(run: Path, places: RunFiles = RunFiles(), device: str = "auto", unfinished: bool = False) -> OpenedRun:
    """Open a run; ``places`` are where its caches and data set were moved, or those of another data set.

    :class:`UserError` if its training did not finish, unless ``unfinished`` ones will do.
    """
    folder = RunFolder(run)
    experiment, record = folder.settings(ExperimentConfig), folder.record()
    folder.content(folder.config_file)
    if (state := unfinished_state(record)) and not unfinished:
        raise UserError(
            f"{run}: its training did not finish (state: {state}); continue it with vse-train --resume, or take the best "
            "weights so far with --unfinished"
        )
    if "files" not in record:
        log.info("%s: has no checksums of its files, so they are not checked for changes", folder.record_file)
    cache = _alike(places.features or folder.feature_file(), folder.evaluated(), folder)
    trained_on = folder.caption_feature_file()
    if trained_on is not None and places.features is not None and read_backbone(cache) is not None:
        trained_on = captions_cache_path(places.features)
    if places.caption_features is not None and trained_on is None:
        raise UserError(f"{run} reads captions as words, not from a cache; leave --caption-features out")
    caption_file = places.caption_features or trained_on
    caption_cache = None
    if caption_file is not None:
        caption_cache = _alike(caption_file, record["caption_features"], folder, "--caption-features")
    dataset = load_dataset_file(places.captions or cache.captions)
    check_data(cache, dataset)
    others = other_data(folder, record, cache, dataset) if dataset.name == record["dataset"] else None
    if others is not None:
        log.warning("%s: not the data set of this name that %s was trained on", dataset.path, folder.path)
    training_data = None if others is None else data_of_training(folder, record)
    device_used = pick_device(device)
    opened = OpenedRun(folder, experiment, record, dataset, cache, caption_cache, device_used, others, training_data)
    cut_by = record.get("tokeniser", DEFAULT_TOKENISER)
    if opened.trained_on is not None and dataset.tokeniser != cut_by:
        log.warning("%s: words were cut by %s, those of the training by %s", dataset.path, dataset.tokeniser, cut_by)
    return opened


def load_best(folder: RunFolder, model: Model) -> str:
    """Give a model the best weights of its run, for evaluation; returns the SHA-256 of their file."""
    weights, sha256 = folder.read_best()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{folder.best_file}: not weights of this run's model ({str(error).splitlines()[-1].strip()})"
        ) from None
    model.eval()
    return sha256


def unfinished_state(record: Mapping[str, Any]) -> str | None:
    """Return the state of a run if its training did not finish, e.g. ``running`` or ``collapsed``; None if it did."""
    state = record.get("state", "unknown")
    return None if state == "finished" else str(state)


def _alike(file: Path, trained_on: Mapping[str, Any], folder: RunFolder, option: str = "--features") -> FeatureCache:
    """Open the cache in ``file``, if the run was trained with it or with one of the same extractor."""
    if not file.exists():
        place = os.path.normpath(file)
        raise UserError(f"{folder.path}: no feature cache {place}, with which it was trained; if it was moved, give {option}")
    cache = open_cache(file)
    if cache.key == trained_on["key"]:
        return cache
    extractor = trained_on.get("extractor") or _extractor_at(folder.path / str(trained_on["path"]), str(trained_on["key"]))
    differs = ["its key differs"] if extractor is None else list_changes(extractor, cache.extractor)
    in_precision = len(differs) == 1 and differs[0].startswith("config.precision: ")
    if in_precision and has_auto_precision(cache.feature, cache.dataset):
        log.info("%s: computed on a machine with another precision than that of the training (%s)", cache.path, differs[0])
    elif differs:
        raise UserError(
            f"{cache.path} is not the cache that {folder.path} is evaluated with, nor made by the same extractor "
            f"({'; '.join(differs[:4])}); extract it with the settings of that one, or train again"
        )
    log.info("%s: of other rows than %s was trained with, by the same extractor", cache.path, folder.path)
    if "imported" in cache.provenance:
        log.warning("%s: is imported, so the network that computed it is not checked", cache.path)
    return cache


def _extractor_at(path: Path, key: str) -> Mapping[str, Any] | None:
    """Return the extractor of the cache that a run was trained with, if the cache is still there."""
    try:
        cache = open_cache(path)
    except UserError:
        return None
    return cache.extractor if cache.key == key else None


def images_trained_on(
    folder: RunFolder, restval: bool, cache: FeatureCache, tested: Dataset, split: str, allowed: bool = False
) -> int:
    """Return the number of images of a split that a run was trained on. Raises UserError if not 0, unless ``allowed``.

    The run's own training split is accepted. This function compares the images of another data set, or of a ``dataset.json``
    with other splits. It compares their numbers on Flickr or in MS-COCO, and the checksums of their files in the caches. If
    the run's own data set is missing, the log mentions it.

    Parameters
    ----------
    folder, restval : the run, and whether it was trained on the split ``restval``, too
    cache, tested, split : what it is tested on
    """
    evaluated = folder.evaluated()
    try:
        own_cache = cache if cache.key == evaluated["key"] else open_cache(folder.feature_file())
        own = load_dataset_file(own_cache.captions)
    except UserError as error:
        level = logging.INFO if tested.name == folder.record()["dataset"] else logging.WARNING
        log.log(level, "%s: cannot check whether it was trained on images of %s (%s)", folder.path, tested.path, error)
        return 0
    if own.sha256 == tested.sha256:
        return 0
    splits = ("train", "restval") if restval else ("train",)
    learned = [image for image in own.images if image.split in splits]
    shared = same_images(tested.split(split), learned, _sums(cache), _sums(own_cache))
    if not shared:
        return 0
    image, twin = shared[0]
    message = (
        f"{folder.path}: was trained on {len(shared)} of the {len(tested.split(split))} images of split {split!r} of "
        f"{tested.path}; {image.file} is {twin.file} in split {twin.split!r} of {own.path}"
    )
    if not allowed:
        raise UserError(
            f"{message}. Metrics on these images are meaningless. --allow-leak accepts them, and the result records it"
        )
    log.warning("%s", message)
    return len(shared)


def _sums(cache: FeatureCache) -> dict[int, bytes]:
    """SHA-256 of the image files that a cache was made from, by image id; none of rows that were not made from image files."""
    if "imported" in cache.provenance or read_backbone(cache) is not None:
        return {}
    return {imgid: row.tobytes() for imgid, row in zip(cache.ids.tolist(), read_sources(cache), strict=True)}
