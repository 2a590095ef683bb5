"""The input of the solvers that match regions with phrases: the training phrases, and the split for validation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from vse.eval import DEFAULT_KS
from vse.eval.files.phrase_scores import MISSED_RANK, PhraseRanks, rank_phrases
from vse.eval.options import DEFAULT_IOU_THRESHOLD
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.dataset import Dataset, Image
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar
from vse.training.data.images import CachedFeatures, Indices
from vse.training.data.pairs import describe_cache_input, select_images_with_features
from vse.training.kinds import InputKind
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model
from vse.training.phrases.arrays import (
    CoordinateUse,
    PhraseArrays,
    RegionFeatures,
    RegionInputs,
    build_phrase_arrays,
    check_phrase_cache,
    compute_region_input_dim,
    find_truth_regions,
    flatten_ranges,
)
from vse.training.phrases.batches import PositiveRegionSettings
from vse.training.run.inputs import RunInputs
from vse.training.settings import SolverSettings, TrainConfig
from vse.training.solvers.base import Solver, TrainingTask

log = logging.getLogger(__name__)

_IMAGES_PER_BLOCK = 32  # images whose regions are embedded at once
_PAIRS_PER_BLOCK = 2**15  # pairs that are scored at once
_SCORED_IMAGES_PER_BLOCK = 8  # images whose regions are embedded and scored with all texts at once
_TEXTS_PER_BLOCK = 2048  # texts that are embedded at once


class PhraseInputs(Protocol):
    """An object that returns the vectors of phrases, such as :class:`vse.training.data.images.CachedFeatures`."""

    def read(self, indices: Indices) -> tuple[Tensor, ...]:
        """Return the model's inputs for the texts at ``indices``."""


@dataclass(frozen=True)
class PhraseSplit:
    """The phrases of a split, with the model's inputs for their texts and for the regions of their images."""

    phrases: PhraseArrays
    region_inputs: RegionInputs
    text_inputs: PhraseInputs

    @property
    def score_offsets(self) -> Int[np.ndarray, " n_phrases_and_one"]:
        """The start of each phrase's scores in an array of all scores of the split, and the length of this array.

        ``scores[offsets[k] : offsets[k + 1]]`` are the scores of phrase k with the candidate regions of its image.
        """
        counts = self.region_inputs.candidates.region_counts[self.phrases.image_indices]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def candidate_indices(self) -> Int[np.ndarray, " n"]:
        """The index of the candidate region for each score in an array of all scores, see :attr:`score_offsets`."""
        candidates, images = self.region_inputs.candidates, self.phrases.image_indices
        return flatten_ranges(candidates.region_starts[images], candidates.region_counts[images])[1]

    def rank_candidates(self, scores: Float[np.ndarray, " n"], iou: float = DEFAULT_IOU_THRESHOLD) -> PhraseRanks:
        """Return the rank (from 0) of the best right candidate for each phrase that has a ground-truth box.

        A candidate is right if its IoU with the ground-truth box is at least ``iou``. ``scores`` has the scores of all
        phrases, in the order of :attr:`score_offsets`.
        """
        located = self.phrases.true_box_mask
        rows = np.repeat(located, np.diff(self.score_offsets))
        counts = np.diff(self.score_offsets)[located]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        boxes = self.region_inputs.candidates.boxes[self.candidate_indices[rows]]
        return rank_phrases(scores[rows], boxes, offsets, self.phrases.truth_boxes[located], iou)

    def compute_recall_bound(self) -> float:
        """Return the percentage of phrases with a box for which at least one candidate is right. No R@K can be higher.

        A candidate is right if it overlaps the ground-truth box enough, see :meth:`rank_candidates`.
        """
        ranks = self.rank_candidates(np.zeros(int(self.score_offsets[-1]), np.float32)).ranks
        return float(100 * (ranks < MISSED_RANK).mean())

    def compute_random_rsum(self) -> float:
        """Return the ``rsum`` (the sum of R@1, R@5 and R@10) that random scores are expected to have.

        The k best candidates of a phrase are treated as k independent random draws, so the result is an approximation.
        """
        candidates = np.diff(self.score_offsets)[self.phrases.true_box_mask]
        ranks = self.rank_candidates(np.zeros(int(self.score_offsets[-1]), np.float32)).ranks
        right = candidates - np.minimum(ranks, candidates)  # if all scores are equal, wrong candidates rank before right ones
        share = right / np.maximum(candidates, 1)
        return float(sum(100 * (1 - (1 - share) ** k).mean() for k in DEFAULT_KS))


def compute_recalls(phrase_ranks: PhraseRanks) -> dict[str, float]:
    """Return R@1, R@5 and R@10 of phrases, in percent, and their sum ``rsum``."""
    found = {f"phrase_r{k}": float(100 * (phrase_ranks.ranks < k).mean()) for k in DEFAULT_KS}
    return {**found, "rsum": sum(found.values())}


def score_candidates(model: Model, split: PhraseSplit) -> Float[np.ndarray, " n"]:
    """Return the scores of each phrase with the candidate regions of its image, one phrase after the other."""
    model.eval()
    parts = [np.empty(0, np.float32)]
    with torch.inference_mode():
        for images, phrases in _iterate_image_blocks(split.phrases):
            candidates = split.region_inputs.candidates
            regions = flatten_ranges(candidates.region_starts[images], candidates.region_counts[images])[1]
            if not len(regions):
                continue
            texts, text_indices = np.unique(split.phrases.text_indices[phrases], return_inverse=True)
            of_phrases = split.phrases.image_indices[phrases]
            rows, columns = flatten_ranges(
                candidates.region_starts[of_phrases] - regions[0], candidates.region_counts[of_phrases]
            )
            embedded = model.embed_images(split.region_inputs.read(regions))[0]
            embedded_texts = model.embed_captions(*split.text_inputs.read(texts))[0]
            parts.append(score_embedded_pairs(model, embedded, embedded_texts, columns, text_indices[rows]))
    return np.concatenate(parts)


def score_embedded_pairs(
    model: Model, regions: Tensor, phrases: Tensor, rows: Int[np.ndarray, " n"], columns: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Return the scores of pairs: pair k is the embedded region ``rows[k]`` and the embedded phrase ``columns[k]``.

    The scores are inner products if the model compares single vectors.
    """
    parts = [np.empty(0, np.float32)]
    for start in range(0, len(rows), _PAIRS_PER_BLOCK):
        block = slice(start, start + _PAIRS_PER_BLOCK)
        block_rows, block_columns = (torch.from_numpy(indices[block]).to(regions.device) for indices in (rows, columns))
        if model.scores_every_pair:
            scores = model.score_pairs((regions,), (phrases,), block_rows, block_columns)
        else:
            scores = torch.linalg.vecdot(regions[block_rows], phrases[block_columns])
        parts.append(scores.float().cpu().numpy())
    return np.concatenate(parts)


def _iterate_image_blocks(phrases: PhraseArrays) -> Iterator[tuple[Indices, slice]]:
    """Yield blocks of consecutive images: the indices of the images, and the slice of their phrases in ``phrases``."""
    for start in range(0, len(phrases.image_ids), _IMAGES_PER_BLOCK):
        stop = min(start + _IMAGES_PER_BLOCK, len(phrases.image_ids))
        first, end = np.searchsorted(phrases.image_indices, [start, stop])
        if first < end:
            yield np.arange(start, stop), slice(int(first), int(end))


def compute_sentence_scores(
    model: Model, split: PhraseSplit, caption_indices: Int[np.ndarray, " n_phrases"], n_captions: int
) -> Float[np.ndarray, "n_images n_captions"]:
    """Return the scores of all images of a split with all captions (two-branch paper, section 5.6, Eq. 8).

    For an image with regions R and a caption with phrases P, the score is the mean over p in P of the maximum over r in R of
    s(r, p). If the model compares single vectors, s(r, p) = -||r - p||; otherwise s is the model's score. Pairs whose image
    has no region, or whose caption has no phrase, get the lowest score of all other pairs. ``caption_indices`` is the index of
    each phrase's caption.
    """
    model.eval()
    used, text_indices = np.unique(split.phrases.text_indices, return_inverse=True)
    n_phrases = torch.from_numpy(np.bincount(caption_indices, minlength=n_captions))
    means = torch.zeros(len(split.phrases.image_ids), n_captions)
    with torch.inference_mode(), progress_bar(total=len(means), desc="sentences", unit="image") as bar:
        parts = np.split(used, range(_TEXTS_PER_BLOCK, len(used), _TEXTS_PER_BLOCK))
        texts = torch.cat([model.embed_captions(*split.text_inputs.read(part))[0] for part in parts])
        for rows, best in _iterate_best_scores(model, split, texts):
            means[rows].index_add_(1, torch.from_numpy(caption_indices), best[:, text_indices])
            bar.update(len(best))
    means /= n_phrases.clamp(min=1)
    fits = torch.from_numpy(split.region_inputs.candidates.region_counts > 0)[:, None] & (n_phrases > 0)
    means[~fits] = means[fits].min() if fits.any() else 0.0
    return means.numpy()


def _iterate_best_scores(
    model: Model, split: PhraseSplit, texts: Tensor
) -> Iterator[tuple[slice, Float[Tensor, "n n_texts"]]]:
    """Yield the highest score that any region of an image (row) has with a text (column), in blocks of images.

    The slice selects the images of a block. An image without regions has zeros. The caller replaces them.
    """
    candidates = split.region_inputs.candidates
    for start in range(0, len(candidates.region_starts), _SCORED_IMAGES_PER_BLOCK):
        rows = slice(start, min(start + _SCORED_IMAGES_PER_BLOCK, len(candidates.region_starts)))
        counts = candidates.region_counts[rows].tolist()
        first = int(candidates.region_starts[start])
        regions = np.arange(first, first + sum(counts))
        best = torch.zeros(len(counts), len(texts))
        if len(regions):
            scores = _score_regions(model, model.embed_images(split.region_inputs.read(regions))[0], texts)
            for row, of_image in enumerate(torch.split(scores, counts)):
                if len(of_image):
                    best[row] = of_image.amax(0)
        yield rows, best


def _score_regions(model: Model, regions: Tensor, texts: Tensor) -> Float[Tensor, "n_regions n_texts"]:
    if model.scores_every_pair:
        scores: Tensor = model.similarity((regions,), (texts,))
        return scores.float().cpu()
    squares = regions.square().sum(1, keepdim=True) + texts.square().sum(1) - 2 * (regions @ texts.T)
    return -squares.clamp(min=0).sqrt().cpu()


class PhraseSettings(SolverSettings, PositiveRegionSettings):
    """The settings that all solvers for phrases share: positive regions of a phrase, and model inputs for a region."""

    accepts_words: ClassVar = False
    reads_phrases: ClassVar = True
    coordinates: CoordinateUse = Field(
        "none",
        description="use of the coordinates (x1, y1, x2, y2 and area of a box, relative to the image): none; appended to the "
        "vector of the region; or alone, instead of the vector, as a control experiment",
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
        bound = task.val_split.compute_recall_bound()
        log.info("validation: %.1f%% of the phrases with a box have a candidate of IoU >= 0.5", bound)

    @property
    def n_pairs(self) -> int:
        return len(self.task.train_split.phrases)

    def validate(self) -> dict[str, float]:
        val = self.task.val_split
        return compute_recalls(val.rank_candidates(score_candidates(self.model, val)))


def build_training_split(
    inputs: RunInputs, phrase_settings: PhraseSettings, train: TrainConfig, device: torch.device
) -> tuple[PhraseSplit, Int[np.ndarray, " n_pairs"]]:
    """Return the training phrases that have a box, and the index of each phrase's ground-truth region among all regions."""
    assert inputs.truth_cache is not None
    splits = ["train", "restval"] if train.restval else ["train"]
    images = _select_images_with_regions(inputs.dataset, splits, inputs.image_cache, inputs.truth_cache)
    phrases = build_phrase_arrays(inputs.dataset, images, only_with_box=True)
    memory_gb = train.memory_gb if train.features_in_memory and phrase_settings.coordinates != "alone" else 0.0
    truths = RegionFeatures(inputs.truth_cache, phrases.image_ids, device, memory_gb)
    candidates = RegionFeatures(inputs.image_cache, phrases.image_ids, device, memory_gb, truths.size_in_memory_gb)
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
    candidates = RegionFeatures(cache, phrases.image_ids, device)
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
    if not split.phrases.true_box_mask.any():
        raise UserError(f"{inputs.dataset.path}: no phrase of the split 'val' has a box, so nothing can be validated")
    return split


def open_phrase_features(
    cache: FeatureCache | None, device: torch.device, memory_gb: float = 0, used_gb: float = 0
) -> CachedFeatures:
    """Return the vectors in a cache of phrases.

    ``memory_gb`` limits their memory, in units of 1e9 bytes. Other features already use ``used_gb`` of this memory.
    """
    assert cache is not None, "words are refused before"
    return CachedFeatures(FeatureReader(cache, 0, mapped=False), cache.ids, device, memory_gb, used_gb)


def check_phrase_inputs(inputs: RunInputs) -> None:
    """Raise UserError if the cache of phrases does not fit the data set, or if there are no ground-truth regions."""
    assert inputs.caption_cache is not None
    check_phrase_cache(inputs.caption_cache, inputs.dataset)
    if inputs.truth_cache is None:
        raise UserError("solver: phrases requires ground-truth regions: name their feature (--set truth_feature=boxes_truth)")


def _select_images_with_regions(
    dataset: Dataset, splits: Sequence[str], cache: FeatureCache, truths: FeatureCache
) -> list[Image]:
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
    dim = compute_region_input_dim(candidates.dim, phrase_settings.coordinates)
    regions = InputSpec(InputKind.VECTORS, dim, f"the feature {candidates.feature!r}, region by region")
    return build_model(config, regions, describe_cache_input(phrases))
