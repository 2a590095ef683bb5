"""Captions as arrays with the images they belong to, and the shuffled batches of an epoch."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.features.cache import FeatureCache
from vse.pipeline.captions import PAD, Vocabulary
from vse.pipeline.dataset import Dataset, Image
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)


class Pairs:
    """All image-caption pairs of some images; pair k is caption k in their order, with its image.

    Words of all captions lie in one flat array, so that a batch is padded without a loop over captions.

    Attributes
    ----------
    images, captions : what the pairs are made of
    image_ids : (n_images,)
    image_of : (n_pairs,) the number of each caption's image
    """

    def __init__(self, images: Sequence[Image], vocabulary: Vocabulary) -> None:
        self.images, self.vocabulary = images, vocabulary
        self.captions = [caption for image in images for caption in image.captions]
        self.image_ids = np.asarray([image.imgid for image in images], np.int64)
        self.image_of = np.repeat(np.arange(len(images)), [len(image.captions) for image in images])
        words, lengths = array("i"), array("i")
        for caption in self.captions:
            encoded = vocabulary.encode(caption.tokens)
            words.extend(encoded)
            lengths.append(len(encoded))
        self._lengths = np.asarray(lengths, np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._words = np.asarray(words)

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def caption_image_ids(self) -> NDArray[np.int64]:
        """The id of each caption's image."""
        return self.image_ids[self.image_of]

    def words(self, pairs: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Padded words (n, longest) and lengths (n,) of captions."""
        lengths = self._lengths[pairs]
        column = np.arange(lengths.max(initial=1))
        inside = column < lengths[:, None]
        words = np.where(inside, self._words[np.minimum(self._starts[pairs][:, None] + column, len(self._words) - 1)], PAD)
        return torch.from_numpy(words.astype(np.int64)), torch.from_numpy(lengths)


def images_of(dataset: Dataset, splits: Sequence[str], cache: FeatureCache) -> list[Image]:
    """Images of some splits that have features; those that the extraction skipped are left out, with a warning."""
    images = [image for split in splits for image in dataset.split(split)]
    kept = [image for image in images if image.imgid not in cache.skipped]
    if len(kept) < len(images):
        log.warning("%d images without features (skipped by the extraction) are left out", len(images) - len(kept))
    if not kept:
        raise UserError(f"{cache.path}: no image of this split has features")
    return kept


def shuffled(n_pairs: int, batch_size: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Numbers of the pairs of each batch of an epoch: every pair once, in an order of (seed, epoch) alone.

    The last batch may be smaller; a last batch of one pair has no negatives and is left out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(n_pairs)
    batches = [order[start : start + batch_size] for start in range(0, n_pairs, batch_size)]
    return [batch for batch in batches if len(batch) > 1]
