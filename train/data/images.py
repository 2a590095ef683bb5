"""What a model reads of images, in training and in evaluation: cached features, or photos through a CNN.

In training each visit of a pair sees its image afresh: a bank gives one of its crops, a photo a new random crop. Which one
depends on the seed, the epoch and the pair alone, so a resumed run and several processes see the same.

Cached features by number, in a device's memory if they fit, else read from the shards.
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

from vse.features.backbones.device import moved
from vse.features.cache.reader import FeatureReader
from vse.features.extractors.cnn import CnnExtractor, crops_of
from vse.features.extractors.images import read_ahead
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import Dataset, Image
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.train.kinds import Encoded, Kind, kind_of_rows, whole_sets
from vse.train.settings import ImagesConfig

_BLOCK = 4096  # rows
Numbers = NDArray[np.int64]


class CachedFeatures:
    """Features of images or captions by their number: vectors, or sets of vectors with their mask.

    An image without a region, whose set would be empty, has one vector of zeros instead.

    Parameters
    ----------
    reader : of the cache
    ids : the images or captions, in the order of their numbers
    device : where features are wanted
    memory_gb : how much may be kept, in units of 1e9 bytes; on a GPU, if it is not 0, what is free there
    taken_gb : how much of that others have taken

    Attributes
    ----------
    kind : vectors or sets; of a bank of crops, vectors
    n_crops : how many crops a bank keeps of each image; 0 if it is none
    gb_kept : how much is in memory, in units of 1e9 bytes
    """

    def __init__(
        self, reader: FeatureReader, ids: Numbers, device: torch.device, memory_gb: float = 0, taken_gb: float = 0
    ) -> None:
        cache = reader.cache
        self._reader = reader
        self._rows = reader.positions(ids)
        self._device = device
        self.kind = kind_of_rows(cache.row_kind)
        self.n_crops = cache.row_shape[0] if cache.row_kind == "crops" else 0
        self._mean_is_unit = bool(cache.provenance.get("config", {}).get("normalize"))
        if cache.offsets is not None:
            self._counts = np.diff(cache.offsets)[self._rows]
        else:
            self._counts = np.full(len(self._rows), int(np.prod(cache.row_shape[:-1])))
        self._starts = np.cumsum(self._counts) - self._counts
        needed = int(self._counts.sum()) * cache.dim * cache.dtype.itemsize
        self._kept = self._loaded() if needed <= free_room(device, memory_gb, taken_gb) else None
        self.gb_kept = 0.0 if self._kept is None else 1e-9 * needed

    def of(self, numbers: Numbers, crops: Numbers | None = None) -> Encoded:
        """The features with these numbers: (vectors (n, dim),), or (vectors (n, longest, dim), mask (n, longest)).

        Of a bank of crops, those of ``crops`` (n,), or the mean over all, of unit length if its vectors are.
        """
        return self._sets(numbers) if self.kind == Kind.SETS else (self._vectors(numbers, crops),)

    def _vectors(self, numbers: Numbers, crops: Numbers | None) -> Tensor:
        if self.n_crops and crops is None:
            return self._mean(numbers)
        crops = np.zeros_like(numbers) if crops is None else crops
        if self._kept is not None:
            which = numbers * self.n_crops + crops if self.n_crops else numbers
            return self._kept.index_select(0, torch.from_numpy(which).to(self._device)).float()
        rows = self._rows[numbers]
        vectors = self._reader.crops(rows, crops) if self.n_crops else self._reader.rows(rows)
        return moved(self._checked(torch.from_numpy(vectors).float(), rows), self._device)

    def _mean(self, numbers: Numbers) -> Tensor:
        rows = self._rows[numbers]
        mean = moved(self._checked(torch.from_numpy(self._reader.rows(rows)).float().mean(1), rows), self._device)
        return torch.nn.functional.normalize(mean, dim=1) if self._mean_is_unit else mean

    def _sets(self, numbers: Numbers) -> Encoded:
        if self._kept is None:
            rows = self._rows[numbers]
            sets = self._reader.sets(rows)
            vectors = moved(self._checked(torch.from_numpy(sets.features).float(), rows), self._device)
            mask = torch.from_numpy(sets.mask).to(self._device)
        else:
            starts, counts = (torch.from_numpy(part[numbers]).to(self._device) for part in (self._starts, self._counts))
            column = torch.arange(int(max(1, self._counts[numbers].max(initial=1))), device=self._device)
            mask = column < counts[:, None]
            which = (starts[:, None] + column).clamp(max=len(self._kept) - 1)
            vectors = self._kept.index_select(0, which.flatten()).float().view(*mask.shape, self._kept.shape[1])
            vectors = vectors * mask[:, :, None]
        mask[:, 0] = True  # an empty set is one vector of zeros
        return vectors, mask

    def _loaded(self) -> Tensor:
        """All features, a row per vector, in the type in which they are stored."""
        cache = self._reader.cache
        dtype = torch.float16 if cache.dtype == np.float16 else torch.float32
        n_vectors = int(self._counts.sum())
        kept = torch.zeros(max(1, n_vectors), cache.dim, dtype=dtype, device=self._device)  # one, to have what padding copies
        for start in range(0, len(self._rows), _BLOCK):
            rows = self._rows[start : start + _BLOCK]
            if cache.offsets is None:
                vectors = self._reader.rows(rows).reshape(-1, cache.dim)
            else:
                sets = self._reader.regions(rows)
                vectors = sets.features[sets.mask]
            first = self._starts[start]
            kept[first : first + len(vectors)] = self._checked(torch.from_numpy(vectors), rows)
        return kept

    def _checked(self, features: Tensor, rows: Numbers) -> Tensor:
        if not features.sum(dtype=torch.float32).isfinite():
            self._reader.refuse_not_finite(rows)  # or else the sum alone overflowed
        return features


def free_room(device: torch.device, memory_gb: float, taken_gb: float = 0) -> float:
    """Bytes that features may take: of ``memory_gb``, what is not taken; on a GPU, unless that is 0, 80% of what is free."""
    if device.type == "cuda" and memory_gb > 0:
        return 0.8 * torch.cuda.mem_get_info(device)[0]
    return max(0.0, memory_gb - taken_gb) * 1e9


_CROPS_AHEAD = 3  # batches of photos that are decoded while one is computed


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
            photo = decode_image(self._paths[number])
            return crops_of(photo, self._random, int(self._ids[number]), (seed, epoch, pair))

        ahead = max(1, _CROPS_AHEAD * max((len(pairs) for pairs in batches), default=1))
        crops = read_ahead(visits, load, self._workers, ahead)
        for pairs in batches:
            pixels = [next(crops) for _ in pairs]
            yield self._seen(torch.stack(pixels) if pixels else self._none())

    def of_images(self, images: Numbers) -> tuple[UInt8[Tensor, "n n_crops 3 crop crop"]]:
        """The fixed crops of photos: the centre, or all ten."""

        def load(number: int) -> Tensor:
            return crops_of(decode_image(self._paths[number]), self._fixed, int(self._ids[number]))

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
    if not dataset.has_image_files:
        raise UserError(f"{dataset.path}: a data set without photos (its features were imported)")
    paths = [dataset.image_path(image) for image in images]
    ids = np.asarray([image.imgid for image in images], np.int64)
    return PhotoCrops(extractor, paths, ids, settings.random_crop, settings.workers, through, config)
