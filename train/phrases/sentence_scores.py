"""How well a sentence fits an image by its phrases: the mean of the scores of each phrase with its best region.

Two-branch paper (Wang et al., TPAMI 2018), section 5.6; with distances for scores it is -d_rp of Eq. 8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vse.pipeline.progress import progress_bar
from vse.train.models.build import Model
from vse.train.phrases.localisation_split import PhraseSplit

_IMAGES = 8  # whose regions are embedded and scored at once
_TEXTS = 2048  # embedded at once


def sentence_scores(
    model: Model, split: PhraseSplit, caption_of: Int[np.ndarray, " n_phrases"], n_captions: int
) -> Float[np.ndarray, "n_images n_captions"]:
    """Scores of all images of a split with all captions.

    Of an image with regions R and a caption with phrases P it is the mean over p in P of the maximum over r in R of s(r, p).
    A model that embeds is compared by distance, s(r, p) = -||r - p||, any other by its own score. Where an image has no
    region, or a caption no phrase, it is the lowest score of all others, so that neither is retrieved.

    ``caption_of`` is the number of each phrase's caption. Memory is that of the scores, and of 8 images with all texts.
    """
    model.eval()
    used, text_of = np.unique(split.pairs.text_of, return_inverse=True)
    n_phrases = torch.from_numpy(np.bincount(caption_of, minlength=n_captions))
    means = torch.zeros(len(split.pairs.image_ids), n_captions)
    with torch.inference_mode(), progress_bar(total=len(means), desc="sentences", unit="image") as bar:
        parts = np.split(used, range(_TEXTS, len(used), _TEXTS))
        texts = torch.cat([model.embed_captions(*split.texts.of(part))[0] for part in parts])
        for rows, best in _best_regions(model, split, texts):
            means[rows].index_add_(1, torch.from_numpy(caption_of), best[:, text_of])
            bar.update(len(best))
    means /= n_phrases.clamp(min=1)
    fits = torch.from_numpy(split.regions.candidates.counts > 0)[:, None] & (n_phrases > 0)
    means[~fits] = means[fits].min() if fits.any() else 0.0
    return means.numpy()


def _best_regions(model: Model, split: PhraseSplit, texts: Tensor) -> Iterator[tuple[slice, Float[Tensor, "n n_texts"]]]:
    """Some images that follow each other, and the score of each text with the best region of each; 0 without regions."""
    candidates = split.regions.candidates
    for start in range(0, len(candidates.starts), _IMAGES):
        rows = slice(start, min(start + _IMAGES, len(candidates.starts)))
        counts = candidates.counts[rows].tolist()
        first = int(candidates.starts[start])
        regions = np.arange(first, first + sum(counts))
        best = torch.zeros(len(counts), len(texts))
        if len(regions):
            scores = _scores(model, model.embed_images(split.regions.of(regions))[0], texts)
            for row, of_image in enumerate(torch.split(scores, counts)):
                if len(of_image):
                    best[row] = of_image.amax(0)
        yield rows, best


def _scores(model: Model, regions: Tensor, texts: Tensor) -> Float[Tensor, "n_regions n_texts"]:
    """Scores of all regions with all texts; of a model that embeds, -||r - p||."""
    if model.pairwise:
        scores: Tensor = model.similarity((regions,), (texts,))
        return scores.float().cpu()
    squares = regions.square().sum(1, keepdim=True) + texts.square().sum(1) - 2 * (regions @ texts.T)
    return -squares.clamp(min=0).sqrt().cpu()
