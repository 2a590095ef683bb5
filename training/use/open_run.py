"""Open a trained run: check its settings, caches and data set, and compare the data set with the training data."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from vse.features.backbones.device import pick_device
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.shards import shards_folder
from vse.features.data_checks import check_belongs_to_dataset, compute_data_checksums, read_data_identity
from vse.features.exchange.embeddings import captions_cache_path, read_backbone
from vse.features.extractors.captions import encoder_path
from vse.features.settings import has_auto_precision
from vse.pipeline.command import current_provenance
from vse.pipeline.dataset.captions import DEFAULT_TOKENISER, find_tokeniser, unicode_words
from vse.pipeline.dataset.columns import IdIndex, count_captions_per_image, image_ids
from vse.pipeline.dataset.dataset import Dataset, Image, load_dataset_file
from vse.pipeline.dataset.identity import DataChecksums, DataIdentity, describe_data_differences, hash_captions
from vse.pipeline.dataset.photo_folder import build_empty_photo_folder, open_photo_folder
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import find_hdf5_dataset, open_hdf5
from vse.pipeline.files.writing import sha256_json
from vse.pipeline.presets.presets import list_setting_changes
from vse.training.experiment import ExperimentConfig, list_changed_settings
from vse.training.models.build import Model
from vse.training.options import RunInputOptions
from vse.training.run.folder import RunFolder
from vse.training.run.inputs import find_training_dataset_file
from vse.training.run.packed import open_model_folder

log = logging.getLogger(__name__)


def compute_checksums_if_different(
    folder: RunFolder, record: Mapping[str, Any], cache: FeatureCache, dataset: Dataset
) -> DataChecksums | None:
    """Return the checksums of ``dataset`` if its contents differ from the training data of a run; otherwise return None.

    ``dataset`` has the name of the training data. ``cache`` is its image cache. ``record`` has the content of ``run.json``.
    A subset of the training data does not count as different. If the checksums of the training data are unknown, only the
    SHA-256 of ``dataset.json`` is compared.
    """
    same_captions = dataset.sha256 == record.get("captions_sha256")
    same_cache = cache.key == folder.read_eval_cache_record()["key"]
    if same_captions and same_cache:
        return None
    checksums, of_training = compute_data_checksums(cache, dataset), find_training_checksums(folder, record)
    if of_training is None:
        return None if same_captions and "captions_sha256" in record else checksums
    recorded = read_data_identity(cache)
    if (
        same_cache
        and recorded.caption_hashes is not None
        and recorded.checksums.captions_sha256 == of_training.captions_sha256
    ):
        return None  # a subset, or other splits: the cache and the data set were compared before
    differing = set(checksums.list_differences(of_training))
    if differing == {"photographs"} and (same_cache or _holds_same_photos(folder, cache)):
        return None
    return checksums if differing else None


def find_training_checksums(folder: RunFolder, record: Mapping[str, Any]) -> DataChecksums | None:
    """Return the checksums of a run's training data, from the record of the run or computed from the data files.

    Returns None if the record has no checksums, and the data set or the image cache is missing or has changed.
    """
    if record.get("data") is not None:
        try:
            return DataChecksums.model_validate(record["data"])
        except ValidationError:
            raise UserError(f"{folder.record_file}: not the record of a run, its data are not sums; train again") from None
    with suppress(UserError):
        dataset = load_dataset_file(folder.path / str(record.get("captions")))
        cache = open_cache(folder.image_cache_file())
        if dataset.sha256 == record.get("captions_sha256") and cache.key == folder.read_eval_cache_record()["key"]:
            return compute_data_checksums(cache, dataset)
    return None


def read_recorded_identity(path: Path) -> DataIdentity | None:
    """Return the ids and hashes of data that are recorded in a file of embeddings or phrase scores; None if unreadable."""
    names = ("image_ids", "caption_ids", "photo_hashes", "caption_hashes")
    with suppress(UserError), open_hdf5(path, "a file of embeddings") as file:
        stored = {name: data[:] for name in names if (data := find_hdf5_dataset(file, name)) is not None}
        images, image_rows = np.unique(stored["image_ids"], return_index=True)
        captions, caption_rows = np.unique(stored["caption_ids"], return_index=True)
        photos, texts = stored.get("photo_hashes"), stored.get("caption_hashes")
        return DataIdentity(
            images, captions, None if photos is None else photos[image_rows], None if texts is None else texts[caption_rows]
        )
    return None


def _holds_same_photos(folder: RunFolder, cache: FeatureCache) -> bool:
    """Return whether ``cache`` and the run's own image cache have the same photos and captions for their common ids.

    Returns False if the own cache has changed, or if the caches have no image in common.
    """
    with suppress(UserError):
        own = open_cache(folder.image_cache_file())
        shared = np.isin(cache.ids, own.ids).any()
        return bool(
            own.key == folder.read_eval_cache_record()["key"]
            and shared
            and not describe_data_differences(read_data_identity(cache), read_data_identity(own))
        )
    return False


@dataclass(frozen=True)
class OpenedRun:
    """The settings, the record and the inputs of a run.

    ``image_cache``, ``dataset`` : image features and data set that the run reads now, by default those of the training.
    ``caption_cache`` : caption features; None for captions as words or tokens.
    ``other_data_checksums`` : checksums of ``dataset`` if it has the name of the training data but other contents; else None.
    ``training_checksums`` : checksums of the training data if ``other_data_checksums`` is not None; None if unknown.
    """

    folder: RunFolder
    experiment: ExperimentConfig
    record: dict[str, Any]
    dataset: Dataset
    image_cache: FeatureCache
    caption_cache: FeatureCache | None
    device: torch.device
    other_data_checksums: DataChecksums | None
    training_checksums: DataChecksums | None

    @property
    def other_training_data_name(self) -> str | None:
        """The name of the training data. None if the run now reads the training data (:attr:`dataset` is the same data set).

        The name includes a checksum if the training data and :attr:`dataset` differ but have the same name.
        """
        name = str(self.record["dataset"])
        if name != self.dataset.name:
            return name
        if self.other_data_checksums is None:
            return None
        recorded = str(self.record.get("captions_sha256", "other"))[:8]
        return f"{name}-{self.training_checksums.short_hash if self.training_checksums else recorded}"

    @property
    def dataset_label(self) -> str:
        """The name of :attr:`dataset` for file names, followed by a checksum if other training data has the same name."""
        checksums = self.other_data_checksums
        return self.dataset.name if checksums is None else f"{self.dataset.name}-{checksums.short_hash}"

    def find_photo_and_caption_hashes(self, images: Sequence[Image]) -> dict[str, Any]:
        """Return the hashes of image files and captions: ``photo_hashes`` (n_images, 32), ``caption_hashes`` (n_captions, 8).

        ``photo_hashes`` is None if the hash of an image file is not known.
        """
        identity = read_data_identity(self.image_cache)
        rows = IdIndex(identity.image_ids).find_rows(image_ids(images))
        photos = None if identity.photo_hashes is None or (rows < 0).any() else identity.photo_hashes[rows]
        return {"photo_hashes": photos, "caption_hashes": hash_captions(images)}

    def split_into_words(self, text: str) -> list[str]:
        """Split a new text into words with the tokeniser of the training.

        A data set without captions, such as a folder of photos, may choose its own tokeniser for the texts of searches.
        """
        return find_tokeniser(self._query_tokeniser, self.folder.record_file)(text)

    def list_unicode_words(self, text: str) -> list[str]:
        """Return the words of a text for messages, with all letters. The default tokeniser would read ``über`` as ``ber``."""
        return unicode_words(text) if self._query_tokeniser == DEFAULT_TOKENISER else self.split_into_words(text)

    @property
    def _query_tokeniser(self) -> str:
        is_album_with_tokeniser = (
            self.dataset.tokeniser != DEFAULT_TOKENISER and not count_captions_per_image(self.dataset.images).any()
        )
        return self.dataset.tokeniser if is_album_with_tokeniser else str(self.record.get("tokeniser", DEFAULT_TOKENISER))

    @property
    def input_paths(self) -> list[Path]:
        """All files and folders that the run reads. No command may write its output there."""
        caches = [cache for cache in (self.image_cache, self.caption_cache) if cache is not None]
        cache_files = [path for cache in caches for path in (cache.path, shards_folder(cache.path), encoder_path(cache.path))]
        return [
            *self.folder.output_files,
            self.folder.code_folder,
            *cache_files,
            *self.dataset.input_paths,
        ]

    def _list_word_vectors_without_file(self) -> list[str]:
        """Return a line ``<setting>: file -> <other vectors>`` for each setting whose word vectors do not come from a file.

        Papers that use word vectors read them from a file (``--words``). Without a file, a caption feature uses vectors that
        were trained on the captions, and a caption encoder trains random vectors, even with ``train_words: false``.
        """
        lines = []
        if self.caption_cache is not None and (vectors := self.caption_cache.provenance.get("word_vectors")):
            lines.append(f"{self.caption_cache.feature}.words: file -> {vectors}")
        encoder = self.experiment.model.caption_encoder
        if getattr(encoder, "train_words", True) is False and self.record.get("words_sha256") is None:
            lines.append("model.caption_encoder.words: file -> random vectors that are trained")
        return lines

    def build_provenance(self, out: Path) -> dict[str, Any]:
        """Return the provenance for an output file ``out`` of this run: settings, features, data set, programs and costs."""
        caches = [cache for cache in (self.image_cache, self.caption_cache) if cache is not None]
        state = find_unfinished_state(self.record)
        return {
            "features": {cache.feature: cache.key for cache in caches},
            "config": self.experiment.model_dump(mode="json"),
            "changed_settings": [
                *list_changed_settings(self.experiment, self.record["dataset"]),
                *self._list_word_vectors_without_file(),
                *([f"noise: none -> {self.record['noise']}"] if "noise" in self.record else []),
            ],
            "captions": os.path.relpath(self.dataset.path, out.parent),
            "best_epoch": self.record.get("best_epoch"),
            "versions": self.record.get("versions", {}),
            "trained": self.record.get("made", {}),
            "embedded": current_provenance(),
            "training": {
                **{name: self.record[name] for name in ("processor", "precision", "noise") if name in self.record},
                "epochs": self.record.get("epochs") if self.experiment.solver.uses_loss else None,
            },
            "cost": compute_run_cost(self),
            **({} if state is None else {"unfinished": state}),
        }


def compute_run_cost(run: OpenedRun) -> dict[str, Any]:
    """Return the costs of a run: the seconds of extraction and training, and the MB of caches and weights.

    Costs that are not known are None.
    """
    caches = [cache for cache in (run.image_cache, run.caption_cache) if cache is not None]
    trained = run.record["features"]
    if "eval_features" in run.record:
        with suppress(UserError):
            caches.append(open_cache(run.folder.path / str(trained["path"])))
    seconds = {cache.feature: cache.extraction_seconds for cache in caches}
    sizes = {cache.feature: round(cache.n_bytes / 1e6, 3) for cache in caches}
    best = run.folder.best_weights_file
    return {
        "extraction_s": {str(trained["name"]): None, **seconds},
        "cache_mb": {str(trained["name"]): None, **sizes},
        "train_s": run.record.get("train_seconds"),
        "model_mb": round(best.stat().st_size / 1e6, 3) if best.is_file() else None,
    }


def open_run(
    run: Path, files: RunInputOptions = RunInputOptions(), device: str = "auto", allow_unfinished: bool = False
) -> OpenedRun:
    """Open a run or a packed model, and check its input files.

    ``files`` : options with input files that replace the files that the run names. Raises UserError if the files do not fit
    each other. Also raises UserError if the training did not finish, unless ``allow_unfinished`` is set.
    """
    folder = open_model_folder(run)
    experiment, record = folder.read_settings(ExperimentConfig), folder.read_record()
    folder.read_file_with_sha256(folder.config_file)
    if (state := find_unfinished_state(record)) and not allow_unfinished:
        raise UserError(
            f"{run}: its training did not finish (state: {state}); continue it with vse-train --resume, or take the best "
            "weights so far with --allow-unfinished"
        )
    if files.images is not None or (folder.is_packed and files.features is None):
        return _open_without_cache(folder, experiment, record, files, device)
    if "files" not in record:
        log.info("%s: has no checksums of its files, so they are not checked for changes", folder.record_file)
    cache = _open_compatible_cache(files.features or folder.image_cache_file(), folder.read_eval_cache_record(), folder)
    caption_file = folder.caption_cache_file()
    if caption_file is not None and files.features is not None and read_backbone(cache) is not None:
        caption_file = captions_cache_path(files.features)
    if files.caption_features is not None and caption_file is None:
        raise UserError(f"{run} reads captions as words, not from a cache; leave --caption-features out")
    caption_file = files.caption_features or caption_file
    caption_cache = None
    if folder.is_packed and files.caption_features is None:
        caption_cache = _build_caption_feature(folder, record)
    elif caption_file is not None:
        caption_cache = _open_compatible_cache(caption_file, record["caption_features"], folder, "--caption-features")
    dataset = load_dataset_file(files.captions or find_training_dataset_file(folder, record, cache))
    check_belongs_to_dataset(cache, dataset)
    other_checksums, of_training = None, None
    if dataset.name == record["dataset"]:
        other_checksums = compute_checksums_if_different(folder, record, cache, dataset)
    if other_checksums is not None:
        of_training = find_training_checksums(folder, record)
        log.warning("%s: not the data set of this name that %s was trained on", dataset.path, folder.path)
    inputs = dataset, cache, caption_cache, pick_device(device)
    opened = OpenedRun(folder, experiment, record, *inputs, other_checksums, of_training)
    tokeniser = record.get("tokeniser", DEFAULT_TOKENISER)
    if (
        opened.other_training_data_name is not None
        and dataset.tokeniser != tokeniser
        and count_captions_per_image(dataset.images).any()
    ):
        log.warning("%s: words were cut by %s, those of the training by %s", dataset.path, dataset.tokeniser, tokeniser)
    return opened


def _open_without_cache(
    folder: RunFolder, experiment: ExperimentConfig, record: dict[str, Any], files: RunInputOptions, device: str
) -> OpenedRun:
    """Open a run to search a folder of photos, or open a packed model without data. The features are not cached."""
    for name in ("features", "captions", "caption_features"):
        if getattr(files, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {getattr(files, name)}: does not go with --images, a folder of photos; leave one out")
    tokeniser = str(record.get("tokeniser", DEFAULT_TOKENISER))
    data = build_empty_photo_folder(folder.path, tokeniser)
    cache = folder.build_rowless_cache(folder.read_eval_cache_record())
    if files.images is not None:
        data = open_photo_folder(files.images, tokeniser)
        cache = replace(cache, dataset=data.name, key=sha256_json([cache.key, data.sha256]))
    captions = _build_caption_feature(folder, record)
    return OpenedRun(folder, experiment, record, data, cache, captions, pick_device(device), None, None)


def _build_caption_feature(folder: RunFolder, record: Mapping[str, Any]) -> FeatureCache | None:
    return folder.build_rowless_cache(record["caption_features"]) if "caption_features" in record else None


def load_weights(folder: RunFolder, model: Model, last_epoch: bool = False) -> str:
    """Load the weights of a run into a model in evaluation mode, and return the SHA-256 of the file of the weights.

    These are the best weights or, with ``last_epoch``, the weights of the last epoch. Raises UserError if the weights are
    missing, damaged or of another model.
    """
    file = folder.checkpoint_file if last_epoch else folder.best_weights_file
    weights, sha256 = folder.read_last_weights_with_sha256() if last_epoch else folder.read_best_weights_with_sha256()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{file}: weights of another model ({str(error).splitlines()[-1].strip()})") from None
    model.eval()
    return sha256


def find_unfinished_state(record: Mapping[str, Any]) -> str | None:
    """Return the state of an unfinished training, e.g. ``running`` or ``collapsed``, or None if the training finished."""
    state = record.get("state", "unknown")
    return None if state == "finished" else str(state)


def _open_compatible_cache(
    file: Path, cache_record: Mapping[str, Any], folder: RunFolder, option: str = "--features"
) -> FeatureCache:
    """Open a cache for a run: the run's own cache, or another cache that the same extractor computed.

    Raises UserError if a different extractor computed the cache.

    ``file`` : file of the cache to open.
    ``cache_record`` : entry of the run's own cache in ``run.json``.
    ``option`` : command-line option that sets ``file``, for error messages.
    """
    if not file.exists():
        place = os.path.normpath(file)
        raise UserError(f"{folder.path}: its feature cache {place} is missing; if it was moved, add {option}")
    cache = open_cache(file)
    if cache.key == cache_record["key"]:
        return cache
    own_path, own_key = folder.path / str(cache_record["path"]), str(cache_record["key"])
    extractor = cache_record.get("extractor") or _read_extractor_identity(own_path, own_key)
    differs = ["its key differs"] if extractor is None else list_setting_changes(extractor, cache.extractor_identity)
    with_precision = len(differs) == 1 and differs[0].startswith("config.precision: ")
    if with_precision and has_auto_precision(cache.feature, cache.dataset):
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


def _read_extractor_identity(path: Path, key: str) -> Mapping[str, Any] | None:
    try:
        cache = open_cache(path)
    except UserError:
        return None
    return cache.extractor_identity if cache.key == key else None
