"""Captions as arrays, joined to their images' features by id, and the shuffled batches of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.features.reader import FeatureReader
from vse.pipeline.captions import PAD, Vocabulary
from vse.pipeline.dataset import Image
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """n pairs: features (n, dim), padded words (n, longest), lengths (n,) and image ids (n,)."""

    features: Tensor
    words: Tensor
    lengths: Tensor
    image_ids: Tensor


class Pairs:
    """All image-caption pairs of a split; pair k is caption k in file order with its image.

    Words of all captions lie in one flat array, so that a batch is padded without a loop over captions.
    Images that the extraction skipped are left out, with a warning.
    """

    def __init__(self, images: Sequence[Image], reader: FeatureReader, vocabulary: Vocabulary) -> None:
        skipped = reader.cache.skipped
        self.images = [image for image in images if image.imgid not in skipped]
        if len(self.images) < len(images):
            log.warning("%d images without features (skipped by the extraction) are left out", len(images) - len(self.images))
        if not self.images:
            raise UserError(f"{reader.cache.path}: no image of this split has features")
        self.captions = [caption for image in self.images for caption in image.captions]
        self.image_ids = np.asarray([image.imgid for image in self.images], np.int64)
        self.caption_image_ids = np.asarray([caption.imgid for caption in self.captions], np.int64)
        self._reader = reader
        self.image_rows = reader.positions(self.image_ids)
        self._caption_rows = np.repeat(self.image_rows, [len(image.captions) for image in self.images])
        encoded = [vocabulary.encode(caption.tokens) for caption in self.captions]
        self._lengths = np.asarray([len(words) for words in encoded], np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._words = np.concatenate([np.asarray(words, np.int64) for words in encoded])

    def __len__(self) -> int:
        return len(self.captions)

    def words(self, pairs: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Padded words (n, longest) and lengths (n,) of captions."""
        lengths = self._lengths[pairs]
        column = np.arange(lengths.max())
        inside = column < lengths[:, None]
        words = np.where(inside, self._words[np.minimum(self._starts[pairs][:, None] + column, len(self._words) - 1)], PAD)
        return torch.from_numpy(words), torch.from_numpy(lengths)

    def features(self, rows: NDArray[np.int64]) -> Tensor:
        """Features (n, dim) of rows of the cache, in float32; :class:`UserError` names an image whose are not finite."""
        found = torch.from_numpy(self._reader.rows(rows)).float()
        if not found.sum().isfinite():
            self._reader.refuse_not_finite(rows)  # or else the sum alone overflowed
        return found

    def batch(self, pairs: NDArray[np.int64]) -> Batch:
        """The pairs with these numbers."""
        words, lengths = self.words(pairs)
        image_ids = torch.from_numpy(self.caption_image_ids[pairs])
        return Batch(self.features(self._caption_rows[pairs]), words, lengths, image_ids)


def shuffled(n_pairs: int, batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Numbers of the pairs of each batch of an epoch: every pair once, in an order of (seed, epoch) alone.

    The last batch may be smaller; a last batch of one pair has no negatives and is left out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(n_pairs)
    for start in range(0, n_pairs, batch_size):
        batch = order[start : start + batch_size]
        if len(batch) > 1:
            yield batch
