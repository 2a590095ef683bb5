"""The input of the solvers that match regions with phrases: the training phrases, and a split for validation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field

from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.dataset import Dataset, Image
from vse.pipeline.errors import UserError
from vse.training.data.images import CachedFeatures
from vse.training.data.pairs import describe_cache_input, select_images_with_features
from vse.training.kinds import InputKind
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model
from vse.training.phrases.arrays import (
    BoxFeatures,
    CoordinateUse,
    RegionInputs,
    build_phrase_arrays,
    check_phrase_cache,
    find_truth_regions,
    region_input_dim,
)
from vse.training.phrases.batches import PositiveRegionSettings
from vse.training.phrases.localisation import PhraseInputs, PhraseSplit, compute_recalls, score_candidates
from vse.training.run.inputs import RunInputs
from vse.training.settings import SolverSettings, TrainConfig
from vse.training.solvers.base import Solver, TrainingTask

log = logging.getLogger(__name__)


class PhraseSettings(SolverSettings, PositiveRegionSettings):
    """The settings that all solvers for phrases share: the positive regions, and the inputs for a region."""

    accepts_words: ClassVar = False
    reads_phrases: ClassVar = True
    coordinates: CoordinateUse = Field(
        "none",
        description="x1, y1, x2, y2 and the area of a box, relative to its image: appended to the vector of its region, or "
        "read alone, a control that does not use the image",
    )


@dataclass(frozen=True, kw_only=True)
class PhraseTask(TrainingTask):
    """The input of a solver for phrases.

    ``train_split`` : training phrases, which all have a ground-truth box.
    ``truth_indices`` : (n_pairs,) index of each training phrase's ground-truth region in ``train_split.region_inputs``.
    ``val_split`` : phrases for validation.
    """

    train_split: PhraseSplit
    truth_indices: Int[np.ndarray, " n_pairs"]
    val_split: PhraseSplit


class PhraseSolver(Solver):
    """A solver that matches regions with phrases."""

    task: PhraseTask

    def __init__(self, task: PhraseTask) -> None:
        if task.processes.size > 1:
            raise UserError(f"solver: phrases require a single process, not {task.processes.size}")
        if task.settings.validate_fold is not None:
            raise UserError("train.validate_fold: candidates are ranked within their image, not within a fold")
        super().__init__(task)
        log.info("validation: %.1f%% of the phrases with a box have a candidate of IoU >= 0.5", task.val_split.recall_bound())

    @property
    def n_pairs(self) -> int:
        return len(self.task.train_split.phrases)

    def validate(self) -> dict[str, float]:
        val = self.task.val_split
        return compute_recalls(val.rank_candidates(score_candidates(self.model, val)))


def build_training_split(
    inputs: RunInputs, phrase_settings: PhraseSettings, train: TrainConfig, device: torch.device
) -> tuple[PhraseSplit, Int[np.ndarray, " n_pairs"]]:
    """Return the training phrases that have a box, and the index of each phrase's ground-truth region in the region inputs."""
    assert inputs.truth_cache is not None
    splits = ["train", "restval"] if train.restval else ["train"]
    images = _images_with_regions(inputs.dataset, splits, inputs.image_cache, inputs.truth_cache)
    phrases = build_phrase_arrays(inputs.dataset, images, located=True)
    memory_gb = train.memory_gb if train.features_in_memory and phrase_settings.coordinates != "alone" else 0.0
    truths = BoxFeatures(inputs.truth_cache, phrases.image_ids, device, memory_gb)
    candidates = BoxFeatures(inputs.image_cache, phrases.image_ids, device, memory_gb, truths.size_in_memory_gb)
    regions = RegionInputs(candidates, truths, phrase_settings.coordinates, device)
    truth_indices = len(candidates) + find_truth_regions(phrases, truths, str(inputs.truth_cache.path))
    used_gb = truths.size_in_memory_gb + candidates.size_in_memory_gb
    texts = open_phrase_features(inputs.caption_cache, device, memory_gb, used_gb)
    return PhraseSplit(phrases, regions, texts), truth_indices


def build_evaluation_split(
    dataset: Dataset,
    images: Sequence[Image],
    cache: FeatureCache,
    texts: PhraseInputs,
    phrase_settings: PhraseSettings,
    device: torch.device,
) -> PhraseSplit:
    """Return all phrases of some images, with the candidate boxes in ``cache``."""
    phrases = build_phrase_arrays(dataset, images)
    candidates = BoxFeatures(cache, phrases.image_ids, device)
    return PhraseSplit(phrases, RegionInputs(candidates, None, phrase_settings.coordinates, device), texts)


def build_validation_split(
    inputs: RunInputs, phrase_settings: PhraseSettings, train: TrainConfig, device: torch.device
) -> PhraseSplit:
    """Return the phrases of the validation split. Raises :class:`UserError` if no phrase has a box."""
    images = select_images_with_features(inputs.dataset, ["val"], inputs.eval_image_cache)[: train.validate_images]
    split = build_evaluation_split(
        inputs.dataset,
        images,
        inputs.eval_image_cache,
        open_phrase_features(inputs.caption_cache, device),
        phrase_settings,
        device,
    )
    if not split.phrases.has_box_mask.any():
        raise UserError(f"{inputs.dataset.path}: no phrase of the split 'val' has a box, so nothing can be validated")
    return split


def open_phrase_features(
    cache: FeatureCache | None, device: torch.device, memory_gb: float = 0, used_gb: float = 0
) -> CachedFeatures:
    """Return the vectors in a cache of phrases; for the parameters see :class:`vse.training.data.images.CachedFeatures`."""
    assert cache is not None, "words are refused before"
    return CachedFeatures(FeatureReader(cache, 0, mapped=False), cache.ids, device, memory_gb, used_gb)


def check_phrase_inputs(inputs: RunInputs) -> None:
    """Raise UserError if the cache of phrases does not fit the data set, or if there are no ground-truth regions."""
    assert inputs.caption_cache is not None
    check_phrase_cache(inputs.caption_cache, inputs.dataset)
    if inputs.truth_cache is None:
        raise UserError("solver: phrases requires ground-truth regions: name their feature (--set truth_feature=boxes_truth)")


def _images_with_regions(dataset: Dataset, splits: Sequence[str], cache: FeatureCache, truths: FeatureCache) -> list[Image]:
    images = select_images_with_features(dataset, splits, cache)
    kept = [image for image in images if image.imgid not in truths.skipped_ids]
    if len(kept) < len(images):
        log.warning("%d images without ground-truth regions (skipped by the extraction) are left out", len(images) - len(kept))
    return kept


def build_phrase_model(
    config: ModelConfig, phrase_settings: PhraseSettings, candidates: FeatureCache, phrases: FeatureCache | None
) -> Model:
    """Return the model that scores regions with phrases."""
    assert phrases is not None, "words are refused before"
    dim = region_input_dim(candidates.dim, phrase_settings.coordinates)
    regions = InputSpec(InputKind.VECTORS, dim, f"the feature {candidates.feature!r}, region by region")
    return build_model(config, regions, describe_cache_input(phrases))
