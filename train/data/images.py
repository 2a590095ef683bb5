"""What a model reads of images, in training and in evaluation: cached features, or photos through a CNN.

In training each visit of a pair sees its image afresh: a bank gives one of its crops, a photo a new random crop. Which one
depends on the seed, the epoch and the pair alone, so a resumed run and several processes see the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from pydantic import Field, model_validator
from torch import Tensor

from vse.features.cnn_extractor import CnnExtractor
from vse.features.crops import crops_of
from vse.features.extractors.cnn import CnnConfig
from vse.features.read_ahead import read_ahead
from vse.pipeline.config import Settings
from vse.pipeline.dataset import Dataset, Image
from vse.pipeline.errors import UserError
from vse.pipeline.image_files import decode
from vse.train.data.cached import CachedFeatures, Numbers
from vse.train.kinds import Encoded, whole_sets

_CROPS_AHEAD = 3  # batches of photos that are decoded while one is computed


class ImagesConfig(Settings):
    """What a training step sees of an image: its cached features, or a random crop through the CNN that made the cache."""

    source: Literal["cache", "pictures"] = Field(
        "cache", description="cache: the cached vector, or a random one of a crop bank; pictures: a new random crop each time"
    )
    finetune: bool = Field(False, description="train the CNN too (source: pictures)")
    random_crop: Literal["resized", "plain"] | None = Field(
        None, description="kind of random crops, as in a feature's settings; none: as the cache's own settings say"
    )
    batch_norm: Literal["frozen", "train"] = Field(
        "frozen", description="whether a fine-tuned CNN keeps its batch norms' statistics; its dropout is always off"
    )
    gradient_checkpointing: bool = Field(False, description="compute the CNN twice instead of keeping its activations")
    workers: int = Field(2, ge=0, description="threads that decode photos ahead")

    @model_validator(mode="after")
    def _fits(self) -> ImagesConfig:
        if self.finetune and self.source != "pictures":
            raise ValueError("finetune needs source: pictures")
        if self.batch_norm == "train" and self.gradient_checkpointing:
            raise ValueError("batch_norm: train does not go with gradient_checkpointing, which would count each batch twice")
        return self


class TrainingImages(Protocol):
    """What the model reads of the images of pairs."""

    def of_pairs(self, batches: Sequence[Numbers], image_of: Numbers, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """The images of each of ``batches``, which hold numbers of pairs; ``image_of`` has the image of every pair."""


class EvaluationImages(Protocol):
    """What the model reads of images that are embedded."""

    def of_images(self, images: Numbers) -> tuple[Tensor, ...]:
        """The images with these numbers."""


class CachedImages(CachedFeatures):
    """Cached features of images."""

    def of_pairs(self, batches: Sequence[Numbers], image_of: Numbers, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """Features of each batch; of a bank, a crop drawn for each pair."""
        crops = np.random.default_rng([seed, epoch, 1]).integers(max(1, self.n_crops), size=len(image_of))
        for pairs in batches:
            yield self.of(image_of[pairs], crops[pairs])

    def of_images(self, images: Numbers) -> tuple[Tensor, ...]:
        """Features; of a bank, the mean over the crops."""
        return self.of(images)


class PhotoCrops:
    """Crops of photos, read from their files by threads.

    Parameters
    ----------
    extractor : the CNN whose crops they are
    paths, image_ids : the photos, in the order of their numbers
    random_crop : kind of random crops, see the feature settings
    workers : threads
    through : hand out the features of a frozen CNN instead of pixels
    config : how photos are prepared; by default as the CNN's
    """

    def __init__(
        self,
        extractor: CnnExtractor,
        paths: Sequence[Path],
        image_ids: Numbers,
        random_crop: str | None = None,
        workers: int = 2,
        through: bool = False,
        config: CnnConfig | None = None,
    ) -> None:
        config = config or extractor.config
        kind = random_crop or config.random_crop
        self._random = config.model_copy(update={"crops": "rc_bank", "n_random": 1, "random_crop": kind})
        self._fixed = config.model_copy(update={"crops": "1c"}) if config.bank else config
        self._extractor = extractor
        self._paths, self._ids = paths, image_ids
        self._workers = workers
        self._through = through

    def of_pairs(self, batches: Sequence[Numbers], image_of: Numbers, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """A random crop for each pair: pixels (n, 1, 3, crop, crop), or features (n, dim), or sets of them and their mask."""
        visits = [int(pair) for pairs in batches for pair in pairs]

        def load(pair: int) -> Tensor:
            number = image_of[pair]
            photo = decode(self._paths[number])
            return crops_of(photo, self._random, int(self._ids[number]), (seed, epoch, pair))

        ahead = max(1, _CROPS_AHEAD * max((len(pairs) for pairs in batches), default=1))
        crops = read_ahead(visits, load, self._workers, ahead)
        for pairs in batches:
            pixels = [next(crops) for _ in pairs]
            yield self._seen(torch.stack(pixels) if pixels else self._none())

    def of_images(self, images: Numbers) -> tuple[UInt8[Tensor, "n n_crops 3 crop crop"]]:
        """The fixed crops of photos: the centre, or all ten."""

        def load(number: int) -> Tensor:
            return crops_of(decode(self._paths[number]), self._fixed, int(self._ids[number]))

        return (torch.stack(list(read_ahead(images.tolist(), load, self._workers, 4 * self._workers + 1))),)

    def _none(self) -> Tensor:
        return torch.empty(0, 1, 3, self._random.crop, self._random.crop, dtype=torch.uint8)

    def _seen(self, pixels: Tensor) -> Encoded:
        if not self._through:
            return (pixels,)
        parts = [self._extractor.features(part) for part in torch.split(pixels, self._extractor.config.batch_size)]
        return whole_sets(torch.cat(parts)) if self._extractor.config.positions else (torch.cat(parts).flatten(1),)


def photo_crops(
    extractor: CnnExtractor,
    dataset: Dataset,
    images: Sequence[Image],
    settings: ImagesConfig,
    through: bool = False,
    config: CnnConfig | None = None,
) -> PhotoCrops:
    """The photos of ``images``, as a CNN reads them, or as ``config`` has them prepared."""
    if not dataset.pictures:
        raise UserError(f"{dataset.path}: a data set without photos (its features were imported)")
    paths = [dataset.image_path(image) for image in images]
    ids = np.asarray([image.imgid for image in images], np.int64)
    return PhotoCrops(extractor, paths, ids, settings.random_crop, settings.workers, through, config)
