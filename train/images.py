"""What a model reads of images, in training and in evaluation: cached features, or pictures through a CNN.

In training each visit of a pair sees its image anew: a bank gives one of its crops, a picture a new random crop. Which one
depends on the seed, the epoch and the pair alone, so a resumed run and several processes see the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from vse.features.cnn import CnnExtractor
from vse.features.pictures import crops_of, decode, read_ahead
from vse.features.reader import FeatureReader

_BLOCK = 4096  # rows
_CROPS_AHEAD = 3  # batches of pictures that are decoded while one is computed

Numbers = NDArray[np.int64]


class TrainingImages(Protocol):
    """What the model reads of the images of pairs."""

    def of_pairs(self, batches: Sequence[Numbers], image_of: Numbers, seed: int, epoch: int) -> Iterator[Tensor]:
        """A tensor for each of ``batches``, which hold numbers of pairs; ``image_of`` has the image of every pair."""


class EvaluationImages(Protocol):
    """What the model reads of images that are embedded."""

    def of_images(self, images: Numbers) -> Tensor:
        """A tensor for the images with these numbers."""


class CachedImages:
    """Features of images by their number, in a device's memory if they fit, else read from the shards.

    Parameters
    ----------
    reader : of the cache
    image_ids : the images, in the order of their numbers
    device : where features are wanted
    memory_gb : how much may be kept, in units of 1e9 bytes; on a GPU, what is free there
    """

    def __init__(self, reader: FeatureReader, image_ids: Numbers, device: torch.device, memory_gb: float = 0) -> None:
        self._reader = reader
        self._rows = reader.positions(image_ids)
        self._device = device
        shape = reader.cache.row_shape
        self._n_crops = shape[0] if len(shape) == 2 else 0
        self._mean_is_unit = bool(reader.cache.provenance.get("config", {}).get("normalize"))
        needed = len(self._rows) * int(np.prod(shape)) * reader.cache.dtype.itemsize
        self._kept = self._loaded() if needed <= _room(device, memory_gb) else None

    def of_pairs(self, batches: Sequence[Numbers], image_of: Numbers, seed: int, epoch: int) -> Iterator[Tensor]:
        """Features (n, dim) of each batch; of a bank, a crop drawn for each pair."""
        crops = np.random.default_rng([seed, epoch, 1]).integers(max(1, self._n_crops), size=len(image_of))
        for pairs in batches:
            yield self._vectors(image_of[pairs], crops[pairs])

    def of_images(self, images: Numbers) -> Tensor:
        """Features (n, dim); of a bank, the mean over the crops, of unit length if its vectors are."""
        if not self._n_crops:
            return self._vectors(images, np.zeros_like(images))
        rows = self._rows[images]
        mean = self._checked(torch.from_numpy(self._reader.rows(rows)).float().mean(1), rows).to(self._device)
        return torch.nn.functional.normalize(mean, dim=1) if self._mean_is_unit else mean

    def _vectors(self, images: Numbers, crops: Numbers) -> Tensor:
        if self._kept is not None:
            which = images * self._n_crops + crops if self._n_crops else images
            return self._kept.index_select(0, torch.from_numpy(which).to(self._device)).float()
        rows = self._rows[images]
        found = self._reader.crops(rows, crops) if self._n_crops else self._reader.rows(rows)
        return self._checked(torch.from_numpy(found).float(), rows).to(self._device)

    def _loaded(self) -> Tensor:
        """All features, a row per image or per crop, in the type in which they are stored."""
        shape = self._reader.cache.row_shape
        dtype = torch.float16 if self._reader.cache.dtype == np.float16 else torch.float32
        kept = torch.empty(len(self._rows), *shape, dtype=dtype, device=self._device)
        for start in range(0, len(self._rows), _BLOCK):
            rows = self._rows[start : start + _BLOCK]
            kept[start : start + _BLOCK] = self._checked(torch.from_numpy(self._reader.rows(rows)), rows)
        return kept.view(-1, shape[-1])

    def _checked(self, features: Tensor, rows: Numbers) -> Tensor:
        if not features.sum(dtype=torch.float32).isfinite():
            self._reader.refuse_not_finite(rows)  # or else the sum alone overflowed
        return features


class Pictures:
    """Crops of pictures, read from their files by threads.

    Parameters
    ----------
    extractor : the CNN whose crops they are
    paths, image_ids : the pictures, in the order of their numbers
    random_crop : kind of random crops, see the feature settings
    workers : threads
    through : hand out the features of a frozen CNN instead of pixels
    """

    def __init__(
        self,
        extractor: CnnExtractor,
        paths: Sequence[Path],
        image_ids: Numbers,
        random_crop: str | None = None,
        workers: int = 2,
        through: bool = False,
    ) -> None:
        config = extractor.config
        kind = random_crop or config.random_crop
        self._random = config.model_copy(update={"crops": "rc_bank", "n_random": 1, "random_crop": kind})
        self._fixed = config.model_copy(update={"crops": "1c"}) if config.bank else config
        self._extractor = extractor
        self._paths, self._ids = paths, image_ids
        self._workers = workers
        self._through = through

    def of_pairs(self, batches: Sequence[Numbers], image_of: Numbers, seed: int, epoch: int) -> Iterator[Tensor]:
        """A random crop for each pair: pixels (n, 1, 3, crop, crop), or features (n, dim)."""
        visits = [int(pair) for pairs in batches for pair in pairs]

        def load(pair: int) -> Tensor:
            number = image_of[pair]
            picture = decode(self._paths[number])
            return crops_of(picture, self._random, int(self._ids[number]), (seed, epoch, pair))

        ahead = max(1, _CROPS_AHEAD * max((len(pairs) for pairs in batches), default=1))
        crops = read_ahead(visits, load, self._workers, ahead)
        for pairs in batches:
            pixels = [next(crops) for _ in pairs]
            yield self._seen(torch.stack(pixels) if pixels else self._none())

    def of_images(self, images: Numbers) -> UInt8[Tensor, "n n_crops 3 crop crop"]:
        """The fixed crops of pictures: the centre, or all ten."""

        def load(number: int) -> Tensor:
            return crops_of(decode(self._paths[number]), self._fixed, int(self._ids[number]))

        return torch.stack(list(read_ahead(images.tolist(), load, self._workers, 4 * self._workers + 1)))

    def _none(self) -> Tensor:
        return torch.empty(0, 1, 3, self._random.crop, self._random.crop, dtype=torch.uint8)

    def _seen(self, pixels: Tensor) -> Tensor:
        if not self._through:
            return pixels
        parts = [self._extractor.features(part).flatten(1) for part in torch.split(pixels, self._extractor.config.batch_size)]
        return torch.cat(parts)


def _room(device: torch.device, memory_gb: float) -> float:
    """Bytes that features may take."""
    if device.type == "cuda" and memory_gb > 0:
        return 0.8 * torch.cuda.mem_get_info(device)[0]
    return memory_gb * 1e9
