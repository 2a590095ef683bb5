"""Base classes of image extractors, which decode images in threads ahead of time and compute vectors in batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vse.features.cache.rows import ExtractorInput, FeatureRows, Ids, sha256_bytes
from vse.features.settings.base import Extractor, ImageSettings, NetworkSettings
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, UnreadableArchive, decode_image, read_image_bytes
from vse.pipeline.progress import progress_bar

_Item = TypeVar("_Item")
_Loaded = TypeVar("_Loaded")


def load_in_threads(items: Sequence[_Item], load: Callable[[_Item], _Loaded], workers: int, ahead: int) -> Iterator[_Loaded]:
    """Yield ``load(item)`` for every item in order; ``workers`` threads load at most ``ahead`` items in advance.

    With 0 workers, the caller's thread loads the items. ``load`` should release the interpreter lock, as Pillow and NumPy do.
    """
    if workers == 0:
        yield from map(load, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        try:
            pending: list[Future[_Loaded]] = [pool.submit(load, item) for item in items[:ahead]]
            for k in range(len(items)):
                result = pending[k % ahead].result()
                if k + ahead < len(items):
                    pending[k % ahead] = pool.submit(load, items[k + ahead])
                yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_Prepared = TypeVar("_Prepared")


class UnsuitableImageSize(ValueError):
    """The error for an image that is so long and narrow that the scaled image is too large or small for the network."""


@dataclass(frozen=True)
class ImageVectors:
    """The vectors of one image.

    features : (dim,) vector of the image, or (n, dim) vectors of its crops, positions or regions
    boxes : (n, 4) boxes of the regions, x1, y1, x2, y2 in pixels of the image; None without regions
    scores : (n,) scores of the regions; None without regions
    image_size : width and height of the image; (0, 0) without regions
    """

    features: NDArray[np.generic]
    boxes: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    image_size: tuple[int, int] = (0, 0)


class ImageExtractor(Extractor, Generic[_Prepared]):
    """Base class of image extractors, which prepare single images in several threads and compute the vectors of batches.

    A subclass defines :meth:`prepare` and :meth:`compute_vectors`. Only one thread calls :meth:`compute_vectors`.
    """

    config: ImageSettings
    weights_sha256 = "none"  # for extractors without learned parameters
    batch_size: int = 1

    @abstractmethod
    def prepare(self, image: Image.Image, image_id: int) -> _Prepared:
        """Return the input of :meth:`compute_vectors` for one upright RGB image. The method must be thread-safe."""

    @abstractmethod
    def compute_vectors(self, batch: Sequence[_Prepared]) -> list[ImageVectors]:
        """Return the vectors of each image of a batch, given the results of :meth:`prepare`."""

    def extract(self, items: Sequence[ExtractorInput], skip_bad: bool = False) -> FeatureRows:
        from vse.features.backbones.device import wrap_memory_errors

        vectors: list[ImageVectors] = []
        kept: list[tuple[int, NDArray[np.uint8]]] = []
        skipped: list[dict[str, Any]] = []
        with progress_bar(total=len(items), desc=self.progress_label, unit="image") as progress:
            ahead = max(2 * self.batch_size, 4 * self.config.workers)
            for batch in self._split_into_batches(load_in_threads(items, self._load_image, self.config.workers, ahead)):
                readable = []
                for item, prepared, input_hash in batch:
                    if not isinstance(prepared, BadImage):
                        readable.append(prepared)
                        kept.append((item.id, input_hash))
                    elif skip_bad:
                        skipped.append({"id": item.id, "path": str(item.path), "reason": str(prepared)})
                    else:
                        raise BadImage(f"{prepared}; --skip-bad leaves such images out")
                if readable:
                    paths = [item.path for item, prepared, _ in batch if not isinstance(prepared, BadImage)]
                    with (
                        wrap_memory_errors(
                            "lower batch_size (cnn), chunk (boxes) or shorter with --set, or --set precision=bf16"
                        ),
                        _add_paths_to_errors(paths),
                    ):
                        vectors += [
                            replace(v, features=v.features.astype(self.config.dtype)) for v in self.compute_vectors(readable)
                        ]
                progress.update(len(batch))
        if not kept:
            raise UserError(f"all {len(items)} images are unreadable, the first:  {skipped[0]['reason']}")
        ids, input_hashes = zip(*kept, strict=True)
        return _move_vectors_to_rows(np.asarray(ids, np.int64), np.stack(input_hashes), vectors, skipped)

    def _load_image(self, item: ExtractorInput) -> tuple[ExtractorInput, _Prepared | BadImage, NDArray[np.uint8]]:
        assert item.path is not None
        try:
            content = read_image_bytes(item.path)
            image = decode_image(item.path, content)
            with _add_paths_to_errors([item.path]):
                return item, self.prepare(image, item.id), sha256_bytes(content)
        except UnreadableArchive:  # a fault of the disk or network, which --skip-bad must not turn into missing rows
            raise
        except BadImage as error:
            return item, error, np.zeros(32, np.uint8)
        except UnsuitableImageSize as error:
            return item, BadImage(f"{item.path}: {error}"), np.zeros(32, np.uint8)

    def _split_into_batches(
        self, items: Iterator[tuple[ExtractorInput, _Prepared | BadImage, NDArray[np.uint8]]]
    ) -> Iterator[list[tuple[ExtractorInput, _Prepared | BadImage, NDArray[np.uint8]]]]:
        while batch := list(islice(items, self.batch_size)):
            yield batch


class NetworkExtractor(ImageExtractor[_Prepared]):
    """Base class of extractors that run a network. Raises UserError if the network's library is missing."""

    config: NetworkSettings
    provenance: dict[str, Any]

    def __init__(self, config: NetworkSettings, device: str) -> None:
        from vse.features.backbones.device import (
            choose_precision,
            collect_library_versions,
            describe_device,
            keep_freed_memory,
            pick_device,
        )

        library = (
            {config.library.distribution: config.library.find_version(config.model)} if config.library is not None else {}
        )
        self.device = pick_device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.requested_precision = config.precision
        self.config = config.model_copy(update={"precision": choose_precision(self.device, config.precision, "images")})
        self.provenance = {
            "weights": config.weights,
            "seed": config.seed,
            "device": describe_device(self.device),
            "arithmetic": self.config.precision,
            "versions": {**collect_library_versions(), **library},
        }


@contextmanager
def _add_paths_to_errors(paths: Sequence[Path | None]) -> Iterator[None]:
    """Add the first of ``paths``, and the number of the other photographs, to an exception in the caller's ``with`` block."""
    try:
        yield
    except Exception as error:
        first, more = paths[0], f" and {len(paths) - 1} more photographs" if len(paths) > 1 else ""
        error.add_note(f"photograph {first}{more}")
        raise


def _move_vectors_to_rows(
    ids: Ids, input_hashes: NDArray[np.uint8], images: list[ImageVectors], skipped: Sequence[Mapping[str, Any]]
) -> FeatureRows:
    """Return the vectors of images as rows, and empty the list ``images``, so that no vector is in memory twice."""
    first = images[0]
    if first.boxes is None:
        features = np.empty((len(images), *first.features.shape), first.features.dtype)
        for k in range(len(images) - 1, -1, -1):
            features[k] = images.pop().features
        return FeatureRows(ids, features, input_hashes, skipped=skipped)
    counts = [len(image.features) for image in images]
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    boxes = np.concatenate([image.boxes for image in images if image.boxes is not None])
    scores = np.concatenate([image.scores for image in images if image.scores is not None])
    image_size = np.asarray([image.image_size for image in images], np.int32)
    features = np.empty((offsets[-1], *first.features.shape[1:]), first.features.dtype)
    for k in range(len(images) - 1, -1, -1):
        features[offsets[k] : offsets[k + 1]] = images.pop().features
    empty = {"images without a box": counts.count(0)}
    return FeatureRows(ids, features, input_hashes, offsets, boxes, scores, image_size, skipped, empty)
