"""Pairs of images and captions, and the splits that they form together with the inputs of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.dataset.columns import caption_counts, caption_ids, coco_ids, image_ids, select_images
from vse.pipeline.dataset.dataset import Caption, Dataset, Image
from vse.pipeline.errors import UserError
from vse.train.data.captions import CaptionInputs
from vse.train.data.images import EvaluationImages

log = logging.getLogger(__name__)


class Pairs:
    """All image-caption pairs of some images: pair k is caption k with its image, of the index ``image_of[k]``."""

    def __init__(self, images: Sequence[Image]) -> None:
        self.images = images
        self.image_ids = image_ids(images)
        self.image_of = np.repeat(np.arange(len(images)), caption_counts(images))

    def __len__(self) -> int:
        return len(self.image_of)

    @cached_property
    def captions(self) -> list[Caption]:
        """All captions, created at the first access, because a search for images needs none."""
        return [caption for image in self.images for caption in image.captions]

    @property
    def caption_image_ids(self) -> NDArray[np.int64]:
        return self.image_ids[self.image_of]

    @property
    def caption_ids(self) -> NDArray[np.int64]:
        return caption_ids(self.images)

    @property
    def coco_ids(self) -> NDArray[np.int64] | None:
        """The MS-COCO ids of the images (n_images,), or None if some have none."""
        return coco_ids(self.images)

    @cached_property
    def text_of(self) -> NDArray[np.int64]:
        """The index of each caption's text (n_pairs,); captions with the same words have the same index."""
        indices: dict[tuple[str, ...], int] = {}
        return np.asarray([indices.setdefault(tuple(c.tokens), len(indices)) for c in self.captions], np.int64)


@dataclass(frozen=True)
class Split:
    """The pairs of a split, and the inputs of a model for them."""

    pairs: Pairs
    images: EvaluationImages
    captions: CaptionInputs

    def first(self, n_images: int) -> Split:
        """Return the first images of the split, with all their captions."""
        return (
            self
            if n_images >= len(self.pairs.images)
            else Split(Pairs(self.pairs.images[:n_images]), self.images, self.captions)
        )


def images_of(dataset: Dataset, splits: Sequence[str], cache: FeatureCache, captioned: bool = False) -> Sequence[Image]:
    """Return the images of some splits that have features and, with ``captioned``, captions; warn about the others."""
    of_splits = [dataset.split(split) for split in splits]
    images = of_splits[0] if len(of_splits) == 1 else list(chain.from_iterable(of_splits))
    kept = select_images(images, ~np.isin(image_ids(images), list(cache.skipped)))
    if len(kept) < len(images):
        log.warning("%d images without features (skipped by the extraction) are left out", len(images) - len(kept))
    if not kept:
        raise UserError(f"{cache.path}: no image of this split has features")
    if captioned:
        n_images, kept = len(kept), select_images(kept, caption_counts(kept) > 0)
        if len(kept) < n_images:
            log.warning("%d images without captions are left out", n_images - len(kept))
        if not kept:
            raise UserError(f"{dataset.path}: no image of the split {' or '.join(splits)} has a caption")
    return kept
