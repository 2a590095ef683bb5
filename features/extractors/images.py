"""Base classes of an extractor's code: items in, rows out; images are read ahead by threads and computed in batches.

Loads items in order, by threads that run ahead of whoever reads them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vse.features.cache.rows import Ids, Item, Rows, sha256_bytes
from vse.features.settings.base import Extractor, ImageSettings, NetworkSettings
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, decode_image, read_image_bytes
from vse.pipeline.progress import progress_bar

_Item = TypeVar("_Item")
_Loaded = TypeVar("_Loaded")


def read_ahead(items: Sequence[_Item], load: Callable[[_Item], _Loaded], workers: int, ahead: int) -> Iterator[_Loaded]:
    """``load`` of every item in order, by ``workers`` threads that are ``ahead`` items ahead at most.

    Pillow and numpy release the interpreter lock while they decode and resize, so threads are enough.
    """
    if workers == 0:
        yield from map(load, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting: list[Future[_Loaded]] = [pool.submit(load, item) for item in items[:ahead]]
            for k in range(len(items)):
                result = waiting[k % ahead].result()
                if k + ahead < len(items):
                    waiting[k % ahead] = pool.submit(load, items[k + ahead])
                yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_Prepared = TypeVar("_Prepared")


class UnfitSize(ValueError):
    """An image so long and narrow that what a network should read of it is too large or too small."""


@dataclass(frozen=True)
class Vectors:
    """What an image extractor made of one image: ``features`` of the image or, with ``boxes``, of each region."""

    features: NDArray[np.generic]
    boxes: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    image_size: tuple[int, int] = (0, 0)


class ImageExtractor(Extractor, Generic[_Prepared]):
    """An extractor that reads images: they are decoded and prepared ahead by threads, then computed in batches."""

    config: ImageSettings
    weights_sha256 = "none"  # nothing is learnt, unless a subclass says so
    batch_size: int = 1

    @abstractmethod
    def prepare(self, image: Image.Image, image_id: int) -> _Prepared:
        """What is computed on, of one image, upright and RGB; called by several threads."""

    @abstractmethod
    def compute(self, batch: Sequence[_Prepared]) -> list[Vectors]:
        """The vectors of each image of a batch."""

    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of ``items``; see :meth:`Extractor.extract`."""
        from vse.features.backbones.device import memory_guard

        vectors: list[Vectors] = []
        kept: list[tuple[int, NDArray[np.uint8]]] = []
        skipped: list[dict[str, Any]] = []
        with progress_bar(total=len(items), desc=self.described, unit="image") as progress:
            ahead = max(2 * self.batch_size, 4 * self.config.workers)
            for batch in self._batches(read_ahead(items, self._load, self.config.workers, ahead)):
                good = []
                for item, prepared, source in batch:
                    if not isinstance(prepared, BadImage):
                        good.append(prepared)
                        kept.append((item.id, source))
                    elif skip_bad:
                        skipped.append({"id": item.id, "path": str(item.path), "reason": str(prepared)})
                    else:
                        raise BadImage(f"{prepared}; --skip-bad leaves such images out")
                if good:
                    with memory_guard("lower batch_size (cnn), chunk (boxes) or shorter with --set, or --set precision=bf16"):
                        vectors += [replace(v, features=v.features.astype(self.config.dtype)) for v in self.compute(good)]
                progress.update(len(batch))
        if not kept:
            raise UserError(f"not one of {len(items)} images can be read, the first: {skipped[0]['reason']}")
        ids, sources = zip(*kept, strict=True)
        return _rows(np.asarray(ids, np.int64), np.stack(sources), vectors, skipped)

    def _load(self, item: Item) -> tuple[Item, _Prepared | BadImage, NDArray[np.uint8]]:
        assert item.path is not None
        try:
            content = read_image_bytes(item.path)
            return item, self.prepare(decode_image(item.path, content), item.id), sha256_bytes(content)
        except BadImage as error:
            return item, error, np.zeros(32, np.uint8)
        except UnfitSize as error:
            return item, BadImage(f"{item.path}: {error}"), np.zeros(32, np.uint8)

    def _batches(
        self, items: Iterator[tuple[Item, _Prepared | BadImage, NDArray[np.uint8]]]
    ) -> Iterator[list[tuple[Item, _Prepared | BadImage, NDArray[np.uint8]]]]:
        batch = []
        for item in items:
            batch.append(item)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch:
            yield batch


class NetworkExtractor(ImageExtractor[_Prepared]):
    """An extractor that runs a network on ``device``; :class:`UserError` if the network's library is not installed."""

    config: NetworkSettings
    notes: dict[str, Any]

    def __init__(self, config: NetworkSettings, device: str) -> None:
        from vse.features.backbones.device import describe_device, pick_device, versions
        from vse.features.backbones.precision import precision_on

        library = {config.library.distribution: config.library.version(config.model)} if config.library is not None else {}
        self.device = pick_device(device)
        self.asked_precision = config.precision
        self.config = config.model_copy(update={"precision": precision_on(self.device, config.precision, "images")})
        self.notes = {
            "weights": config.weights,
            "seed": config.seed,
            "device": describe_device(self.device),
            "arithmetic": self.config.precision,
            "versions": {**versions(), **library},
        }


def _rows(ids: Ids, sources: NDArray[np.uint8], made: list[Vectors], skipped: Sequence[Mapping[str, Any]]) -> Rows:
    """The vectors of images as rows; ``made`` is emptied meanwhile, so that the vectors are not held twice."""
    first = made[0]
    if first.boxes is None:
        features = np.empty((len(made), *first.features.shape), first.features.dtype)
        for k in range(len(made) - 1, -1, -1):
            features[k] = made.pop().features
        return Rows(ids, features, sources, skipped=skipped)
    counts = [len(vectors.features) for vectors in made]
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    boxes = np.concatenate([vectors.boxes for vectors in made if vectors.boxes is not None])
    scores = np.concatenate([vectors.scores for vectors in made if vectors.scores is not None])
    image_size = np.asarray([vectors.image_size for vectors in made], np.int32)
    features = np.empty((offsets[-1], *first.features.shape[1:]), first.features.dtype)
    for k in range(len(made) - 1, -1, -1):
        features[offsets[k] : offsets[k + 1]] = made.pop().features
    empty = {"images without a box": counts.count(0)}
    return Rows(ids, features, sources, offsets, boxes, scores, image_size, skipped, empty)
