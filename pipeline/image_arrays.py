"""Ids and counts of images and of their captions as arrays; of columns they are read without making an image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.captioned_image import Image
from vse.pipeline.dataset_columns import ImageColumns

Numbers = NDArray[np.int64]


def image_ids(images: Sequence[Image]) -> Numbers:
    """The ids of the images (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.imgids
    return np.asarray([image.imgid for image in images], np.int64)


def caption_ids(images: Sequence[Image]) -> Numbers:
    """The ids of their captions (n_captions,), in their order."""
    if isinstance(images, ImageColumns):
        return images.sentids
    return np.asarray([caption.sentid for image in images for caption in image.captions], np.int64)


def caption_counts(images: Sequence[Image]) -> Numbers:
    """How many captions each image has (n_images,)."""
    if isinstance(images, ImageColumns):
        return images.caption_counts
    return np.asarray([len(image.captions) for image in images], np.int64)


def coco_ids(images: Sequence[Image]) -> Numbers | None:
    """The images' numbers in MS-COCO (n_images,), if all have one."""
    if isinstance(images, ImageColumns):
        return images.cocoids
    numbers = [image.cocoid for image in images if image.cocoid is not None]
    return np.asarray(numbers, np.int64) if len(numbers) == len(images) else None


def images_where(images: Sequence[Image], keep: NDArray[np.bool_]) -> Sequence[Image]:
    """The images that ``keep`` (n_images,) is true of."""
    return images.where(keep) if isinstance(images, ImageColumns) else list(compress(images, keep))
