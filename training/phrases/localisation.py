"""Score phrases with the candidate boxes of their images, compute R@K of the phrases, and score sentences with images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vse.eval.options import DEFAULT_IOU_THRESHOLD, DEFAULT_KS
from vse.eval.ranking.localisation import MISSED_RANK, PhraseRanks, rank_phrases
from vse.pipeline.progress import progress_bar
from vse.training.data.images import Indices
from vse.training.models.build import Model
from vse.training.phrases.arrays import PhraseArrays, RegionInputs, flatten_ranges

_IMAGES_PER_BLOCK = 32  # images whose regions are embedded at once
_PAIRS_PER_BLOCK = 2**15  # pairs that are scored at once
_SCORED_IMAGES_PER_BLOCK = 8  # images whose regions are embedded and scored with all texts at once
_TEXTS_PER_BLOCK = 2048  # texts that are embedded at once


class PhraseInputs(Protocol):
    """Vectors of phrases, as inputs of a model. One implementation is :class:`vse.training.data.images.CachedFeatures`."""

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
        """The start of each phrase's scores in an array of all scores, and the length of this array.

        ``scores[offsets[k] : offsets[k + 1]]`` are the scores of phrase k with the candidates of its image.
        """
        counts = self.region_inputs.candidates.region_counts[self.phrases.image_indices]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def candidate_indices(self) -> Int[np.ndarray, " n"]:
        """The index of the candidate that belongs to each score, among the candidates of all images."""
        candidates, images = self.region_inputs.candidates, self.phrases.image_indices
        return flatten_ranges(candidates.region_starts[images], candidates.region_counts[images])[1]

    def rank_candidates(self, scores: Float[np.ndarray, " n"], iou: float = DEFAULT_IOU_THRESHOLD) -> PhraseRanks:
        """Return the rank (from 0) of the best right candidate for each phrase that has a ground-truth box.

        A candidate is right if its IoU with the ground-truth box is at least ``iou``. ``scores`` has the scores of all
        phrases, in the order of :attr:`score_offsets`.
        """
        located = self.phrases.has_box_mask
        rows = np.repeat(located, np.diff(self.score_offsets))
        counts = np.diff(self.score_offsets)[located]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        boxes = self.region_inputs.candidates.boxes[self.candidate_indices[rows]]
        return rank_phrases(scores[rows], boxes, offsets, self.phrases.truth_boxes[located], iou)

    def recall_bound(self) -> float:
        """Return the percentage of phrases with a box that have a right candidate. No R@K can exceed it."""
        ranks = self.rank_candidates(np.zeros(int(self.score_offsets[-1]), np.float32)).ranks
        return float(100 * (ranks < MISSED_RANK).mean())

    def expected_random_rsum(self) -> float:
        """Return the ``rsum`` (:func:`compute_recalls`) that random scores are expected to have.

        The k best candidates of a phrase are treated as k independent random draws, so the result is an approximation.
        """
        candidates = np.diff(self.score_offsets)[self.phrases.has_box_mask]
        ranks = self.rank_candidates(np.zeros(int(self.score_offsets[-1]), np.float32)).ranks
        right = candidates - np.minimum(ranks, candidates)  # if all scores are equal, wrong candidates rank before right ones
        share = right / np.maximum(candidates, 1)
        return float(sum(100 * (1 - (1 - share) ** k).mean() for k in DEFAULT_KS))


def compute_recalls(outcome: PhraseRanks) -> dict[str, float]:
    """Return R@1, R@5 and R@10 of phrases, in percent, and their sum ``rsum``."""
    found = {f"phrase_r{k}": float(100 * (outcome.ranks < k).mean()) for k in DEFAULT_KS}
    return {**found, "rsum": sum(found.values())}


def score_candidates(model: Model, split: PhraseSplit) -> Float[np.ndarray, " n"]:
    """Return the scores of each phrase with the candidates of its image, in the order of :attr:`PhraseSplit.score_offsets`."""
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
    """Yield the highest score of each image's regions with each text, in blocks of consecutive images.

    An image without regions gets zeros, as placeholders.
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
