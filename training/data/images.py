"""Images as inputs of a model, in training and in evaluation: cached features, crops of photos, or CNN features of crops.

In training, an image can have another crop for each caption and epoch. The crop comes from a bank (a cache with the
features of several crops of each image), or is cut from a photo at random. The crop depends only on the seed, the epoch and
the pair, so a resumed run and several processes read the same crops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image as PhotoImage
from torch import Tensor

from vse.features.backbones.device import move_tensor
from vse.features.cache.reader import FeatureReader
from vse.features.extractors.cnn import CnnExtractor, cut_crops
from vse.features.extractors.images import load_in_threads
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import Dataset, Image
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, UnreadableArchive, decode_image
from vse.pipeline.progress import progress_bar
from vse.training.kinds import BatchVectors, InputKind, add_full_mask, to_input_kind
from vse.training.settings import ImagesConfig

log = logging.getLogger(__name__)
Indices = NDArray[np.int64]
_BLACK_PHOTO_SIDE = 256  # pixels
_VECTORS_PER_READ = 4096
_MAX_BATCHES_AHEAD = 3  # batches of photos that are decoded in advance during a step


class CachedFeatures:
    """Cached features of images or captions, by index: vectors, or sets of vectors with their mask.

    If the memory suffices, the features are kept in GPU memory, or in memory maps of the cache files, which all processes
    share. Otherwise they are read from the files in each batch. The set of an image without a region has one zero vector.

    Parameters
    ----------
    reader : reader of the cache
    ids : ids of the images or captions, in the order of their indices
    device : device of the features
    memory_gb : limit on features in memory maps, in units of 1e9 bytes; 0: the files are read in each batch
    used_gb : part of ``memory_gb`` that other features already use

    Attributes
    ----------
    kind : vectors or sets; vectors for a bank (a cache with the features of several crops of each image)
    n_crops : number of crops of each image in a bank; 0 if the cache is not a bank
    size_in_memory_gb : size of the features in GPU memory or in memory maps, in units of 1e9 bytes
    """

    def __init__(
        self, reader: FeatureReader, ids: Indices, device: torch.device, memory_gb: float = 0, used_gb: float = 0
    ) -> None:
        cache = reader.cache
        self._cache_rows = reader.find_rows(ids)
        self._device = device
        self.kind = to_input_kind(cache.row_kind)
        self.n_crops = cache.row_shape[0] if cache.row_kind == "crops" else 0
        self._mean_has_unit_length = bool(cache.provenance.get("config", {}).get("normalize"))
        if cache.offsets is not None:
            self._vector_counts = np.diff(cache.offsets)[self._cache_rows]
            self._cache_starts = cache.offsets[self._cache_rows]
        else:
            vectors_per_row = int(np.prod(cache.row_shape[:-1]))
            self._vector_counts = np.full(len(self._cache_rows), vectors_per_row)
            self._cache_starts = self._cache_rows * vectors_per_row
        self._vector_starts = np.cumsum(self._vector_counts) - self._vector_counts
        self._n_vectors = int(self._vector_counts.sum())
        needed = self._n_vectors * cache.dim * cache.dtype.itemsize
        self._in_memory = 0 < needed <= compute_memory_budget(device, memory_gb, used_gb)
        self.size_in_memory_gb = 1e-9 * needed if self._in_memory else 0.0
        self._reader = reader
        if self._in_memory:
            self._reader = FeatureReader(cache, 0, mapped=True)
            self._reader.read_ahead()
        self._vectors_on_gpu = self._load_all_vectors() if self._in_memory and device.type != "cpu" else None

    def read(self, indices: Indices, crops: Indices | None = None) -> BatchVectors:
        """Return the features at these indices: (vectors (n, dim),), or (vectors (n, longest, dim), mask (n, longest)).

        For a bank of crops, ``crops`` (n,) selects the crop of each image. Without ``crops``, return the mean over all crops.
        The mean has unit length if the vectors have unit length.
        """
        return self._read_sets(indices) if self.kind == InputKind.SETS else (self._read_vectors(indices, crops),)

    def _read_vectors(self, indices: Indices, crops: Indices | None) -> Tensor:
        if self.n_crops and crops is None:
            rows = self._cache_rows[indices]
            mean = torch.from_numpy(self._reader.read_rows(rows)).float().mean(1)
            mean = move_tensor(self._check_finite(mean, rows), self._device)
            return torch.nn.functional.normalize(mean, dim=1) if self._mean_has_unit_length else mean
        crops = np.zeros_like(indices) if crops is None else crops
        if self._in_memory:
            return self._take_vectors(torch.from_numpy(indices * self.n_crops + crops if self.n_crops else indices))
        rows = self._cache_rows[indices]
        vectors = self._reader.read_crops(rows, crops) if self.n_crops else self._reader.read_rows(rows)
        return move_tensor(self._check_finite(torch.from_numpy(vectors).float(), rows), self._device)

    def _read_sets(self, indices: Indices) -> BatchVectors:
        if not self._in_memory:
            rows = self._cache_rows[indices]
            sets = self._reader.read_sets(rows)
            vectors = move_tensor(self._check_finite(torch.from_numpy(sets.features).float(), rows), self._device)
            mask = torch.from_numpy(sets.mask).to(self._device)
        else:
            starts, counts = (
                torch.from_numpy(part[indices]).to(self._device) for part in (self._vector_starts, self._vector_counts)
            )
            column = torch.arange(int(max(1, self._vector_counts[indices].max(initial=1))), device=self._device)
            mask = column < counts[:, None]
            vector_indices = (starts[:, None] + column).clamp(max=self._n_vectors - 1)
            vectors = self._take_vectors(vector_indices.flatten()).view(*mask.shape, self._reader.cache.dim)
            vectors = vectors * mask[:, :, None]
        mask[:, 0] = True  # an empty set becomes one vector of zeros
        return vectors, mask

    def _take_vectors(self, indices: Tensor) -> Tensor:
        """Return vectors from memory, in float32. ``indices`` count from 0 over the vectors of all images or captions."""
        if self._vectors_on_gpu is not None:
            return self._vectors_on_gpu.index_select(0, indices.to(self._device)).float()
        return self._read_mapped_vectors(indices.numpy()).float()

    def _read_mapped_vectors(self, indices: Indices) -> Tensor:
        rows = np.searchsorted(self._vector_starts, indices, side="right") - 1
        vectors = self._reader.read_vectors(self._cache_starts[rows] + indices - self._vector_starts[rows])
        return self._check_finite(torch.from_numpy(vectors), self._cache_rows[rows])

    def _load_all_vectors(self) -> Tensor:
        parts = np.split(np.arange(self._n_vectors), range(_VECTORS_PER_READ, self._n_vectors, _VECTORS_PER_READ))
        first = self._read_mapped_vectors(parts[0])
        loaded = torch.empty(self._n_vectors, first.shape[1], dtype=first.dtype, device=self._device)
        for part in parts:
            loaded[part[0] : part[-1] + 1] = self._read_mapped_vectors(part)
        return loaded

    def _check_finite(self, features: Tensor, rows: Indices) -> Tensor:
        """Return ``features`` unchanged. Raises UserError, with the cache row, if a feature is infinite or NaN."""
        if not features.sum(dtype=torch.float32).isfinite():
            self._reader.check_rows_finite(rows)  # raises nothing if all features are finite and only their sum overflowed
        return features


def compute_memory_budget(device: torch.device, memory_gb: float, used_gb: float = 0) -> float:
    """Return the number of bytes of memory that further cached features may use on a device.

    On a CPU this is (``memory_gb`` - ``used_gb``) * 1e9, and at least 0; ``used_gb`` is the memory of other features. On a
    GPU it is 80% of the free memory, or 0 if ``memory_gb`` is 0.
    """
    if device.type == "cuda" and memory_gb > 0:
        return 0.8 * torch.cuda.mem_get_info(device)[0]
    return max(0.0, memory_gb - used_gb) * 1e9


class TrainingImages(Protocol):
    """The images of pairs, as inputs of a model in training."""

    def read_batches(
        self, batches: Sequence[Indices], image_indices: Indices, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the images of each batch of pairs, one image for each pair.

        ``batches`` : indices of the pairs of each batch.
        ``image_indices`` : (n_pairs,) index of the image of each training pair.
        ``seed``, ``epoch`` : seed and index of the epoch (from 0); they determine random crops.
        """


class EvaluationImages(Protocol):
    """Images as inputs of a model in evaluation."""

    def read_images(self, images: Indices) -> tuple[Tensor, ...]:
        """Return the images with these indices."""


class CachedImageFeatures(CachedFeatures):
    """Cached features of images."""

    def read_batches(
        self, batches: Sequence[Indices], image_indices: Indices, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, ...]]:
        crops = np.random.default_rng([seed, epoch, 1]).integers(max(1, self.n_crops), size=len(image_indices))
        for pairs in batches:
            yield self.read(image_indices[pairs], crops[pairs])

    def read_images(self, images: Indices) -> tuple[Tensor, ...]:
        return self.read(images)


class PhotoCrops:
    """Crops of photos, which threads read from files.

    ``extractor`` : the CNN that reads the crops.
    ``paths``, ``image_ids`` : file and id of each photo, in the order of the indices of photos.
    ``random_crop`` : kind of random crops in training; None: the kind that ``config`` sets.
    ``workers`` : number of threads.
    ``as_features`` : whether to return features that the frozen CNN computes, instead of pixels.
    ``config`` : preparation of the photos, such as the size of a crop; None: the settings of ``extractor``.
    """

    def __init__(
        self,
        extractor: CnnExtractor,
        paths: Sequence[Path],
        image_ids: Indices,
        random_crop: str | None = None,
        workers: int = 2,
        as_features: bool = False,
        config: CnnConfig | None = None,
    ) -> None:
        config = config or extractor.config
        kind = random_crop or config.random_crop
        self._random_crop_config = config.model_copy(update={"crops": "rc_bank", "n_random": 1, "random_crop": kind})
        self._fixed_crop_config = config.model_copy(update={"crops": "1c"}) if config.is_crop_bank else config
        self._extractor = extractor
        self._paths, self._image_ids = paths, image_ids
        self._workers = workers
        self._returns_features = as_features

    def read_batches(
        self, batches: Sequence[Indices], image_indices: Indices, seed: int, epoch: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield a random crop for each pair of each batch: pixels (n, 1, 3, crop, crop), or features of the CNN."""
        visits = [int(pair) for pairs in batches for pair in pairs]

        def load(pair: int) -> Tensor:
            index = image_indices[pair]
            photo = decode_image(self._paths[index])
            return cut_crops(photo, self._random_crop_config, int(self._image_ids[index]), (seed, epoch, pair))

        ahead = max(1, _MAX_BATCHES_AHEAD * max((len(pairs) for pairs in batches), default=1))
        crops = load_in_threads(visits, load, self._workers, ahead)
        for pairs in batches:
            pixels = [next(crops) for _ in pairs]
            nothing = torch.empty(0, 1, 3, self._random_crop_config.crop, self._random_crop_config.crop, dtype=torch.uint8)
            yield self._to_model_inputs(torch.stack(pixels) if pixels else nothing)

    def read_images(self, images: Indices) -> tuple[UInt8[Tensor, "n n_crops 3 crop crop"]]:
        """Return the fixed crops of photos: the centre crop, or ten crops (centre and corners, also mirrored)."""

        def load(index: int) -> Tensor:
            return cut_crops(decode_image(self._paths[index]), self._fixed_crop_config, int(self._image_ids[index]))

        return (torch.stack(list(load_in_threads(images.tolist(), load, self._workers, 4 * self._workers + 1))),)

    def _to_model_inputs(self, pixels: Tensor) -> BatchVectors:
        if not self._returns_features:
            return (pixels,)
        parts = [self._extractor.compute_features(part) for part in torch.split(pixels, self._extractor.config.batch_size)]
        return add_full_mask(torch.cat(parts)) if self._extractor.config.positions else (torch.cat(parts).flatten(1),)


def compute_photo_features(extractor: CnnExtractor, crops: UInt8[Tensor, "n n_crops 3 crop crop"]) -> BatchVectors:
    """Compute the features of photos from their crops, in the form in which a model reads them from the extractor's cache.

    If the extractor stores the vectors of several crops of a photo, a model reads their mean.
    """
    vectors, config = extractor.compute_features(crops), extractor.config
    if config.row_kind == "sets":
        return add_full_mask(vectors)
    if config.row_kind == "vectors":
        return (vectors,)
    mean = vectors.mean(1)
    return (torch.nn.functional.normalize(mean, dim=1) if config.normalize else mean,)


class PhotoFeatures:
    """Features of photos without a cache, computed on access.

    A damaged photo is replaced by a black photo, and a warning names its file.

    ``paths``, ``image_ids`` : file and id of each photo, in the order of the indices of photos.
    ``load_extractor`` : function that loads the CNN, called at the first access.
    """

    def __init__(self, paths: Sequence[Path], image_ids: Indices, load_extractor: Callable[[], CnnExtractor]) -> None:
        self._paths, self._image_ids, self._load_extractor = paths, image_ids, load_extractor

    def read_images(self, images: Indices) -> BatchVectors:
        """Return the features of the photos with these indices."""
        extractor, config = self._extractor, self._extractor.config
        batch, parts = extractor.batch_size, []
        crops = load_in_threads(images.tolist(), self._load_crops, config.workers, 4 * config.workers + batch)
        with progress_bar(total=len(images), desc=f"features of {len(self._paths)} photos", unit="image") as progress:
            for size in [batch] * (len(images) // batch) + [len(images) % batch] * (len(images) % batch > 0):
                parts.append(compute_photo_features(extractor, torch.stack([next(crops) for _ in range(size)])))
                progress.update(size)
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    @cached_property
    def _extractor(self) -> CnnExtractor:
        return self._load_extractor()

    def _load_crops(self, index: int) -> Tensor:
        try:
            photo = decode_image(self._paths[index])
        except UnreadableArchive:
            raise
        except BadImage as error:
            log.warning("%s; it counts as a black photo", error)
            photo = PhotoImage.new("RGB", (_BLACK_PHOTO_SIDE, _BLACK_PHOTO_SIDE))
        return self._extractor.prepare(photo, int(self._image_ids[index]))


def build_photo_crops(
    extractor: CnnExtractor,
    dataset: Dataset,
    images: Sequence[Image],
    settings: ImagesConfig,
    as_features: bool = False,
    config: CnnConfig | None = None,
) -> PhotoCrops:
    """Return the crops of the photos of some images. Raises UserError if the data set has no photos.

    ``settings`` has the kind of random crops and the number of threads. ``as_features`` requests features of the frozen CNN
    instead of pixels. ``config`` is the preparation of photos, such as the size of a crop; None: that of ``extractor``.
    """
    if not dataset.has_image_files:
        raise UserError(f"{dataset.path}: this data set has no photos (its features were imported)")
    paths = [dataset.image_path(image) for image in images]
    ids = np.asarray([image.imgid for image in images], np.int64)
    return PhotoCrops(extractor, paths, ids, settings.random_crop, settings.workers, as_features, config)
