"""What every extractor shares: shards that are made once, images that are read ahead, sources that are remembered."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import PIL
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image as Picture
from tqdm import tqdm

import vse
from vse.features import cache, shards
from vse.features.crops import UnfitSize, read_ahead
from vse.features.hardware import pick_device
from vse.features.shards import Identity, Ids, Rows, sha256_bytes
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.feature_config import FeatureSettings, NetworkSettings
from vse.pipeline.files import sha256_json
from vse.pipeline.image_files import BadImage, decode, read_bytes

VERSIONS = {
    "vse": vse.__version__,
    "torch": torch.__version__,
    "torchvision": torchvision.__version__,
    "pillow": PIL.__version__,
}
_Prepared = TypeVar("_Prepared")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """One row to be made: an image (``path``) or a caption (``tokens``)."""

    id: int
    path: Path | None = None
    tokens: tuple[str, ...] = ()

    def source(self) -> NDArray[np.uint8]:
        """SHA-256 of what the row is made from: the image file's bytes, or the words with blanks between them."""
        return sha256_bytes(read_bytes(self.path) if self.path is not None else " ".join(self.tokens).encode())


def items_of(dataset: Dataset, kind: Literal["image", "text"]) -> list[Item]:
    """The rows of a feature of ``dataset``: all images, or all captions, in file order."""
    if kind == "image":
        return [Item(image.imgid, dataset.image_path(image)) for image in dataset.images]
    return [Item(caption.sentid, tokens=caption.tokens) for image in dataset.images for caption in image.captions]


def ids_of(items: Sequence[Item]) -> Ids:
    """Ids of rows, in order."""
    return np.asarray([item.id for item in items], np.int64)


class Extractor(ABC):
    """One feature, ready to be computed.

    ``weights_sha256`` stands for all that was learnt (a network's weights, a fitted encoder), ``version`` is raised
    when the code makes other vectors than before, ``extra`` names other files that were read, by their hashes,
    and ``notes`` tell where things came from.
    """

    kind: ClassVar[Literal["image", "text"]]
    version: ClassVar[int] = 1
    config: FeatureSettings
    weights_sha256: str
    extra: Mapping[str, str] = MappingProxyType({})
    notes: Mapping[str, Any] = MappingProxyType({})

    def identity(self, dataset: Dataset) -> Identity:
        """All that determines the vectors of ``dataset``, beside the images or captions themselves."""
        content = {
            "config": self.config.content(),
            "weights_sha256": self.weights_sha256,
            "requested_ids_sha256": sha256_json(ids_of(items_of(dataset, self.kind)).tolist()),
            "extractor_version": self.version,
            **self.extra,
        }
        return Identity(dataset.name, self.config.name, self.kind, content)

    @abstractmethod
    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of ``items``, in order.

        With ``skip_bad`` unreadable images are left out and listed; else the first raises :class:`BadImage`.
        """


@dataclass(frozen=True)
class Vectors:
    """What an image extractor found in one image: ``features`` of the image or, with ``boxes``, of each region."""

    features: NDArray[np.generic]
    boxes: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    image_size: tuple[int, int] = (0, 0)


class ImageExtractor(Extractor, Generic[_Prepared]):
    """An extractor that reads pictures: they are decoded and prepared ahead by threads, then computed in batches."""

    kind = "image"
    config: NetworkSettings
    batch_size: int = 1

    def __init__(self, config: NetworkSettings, device: str) -> None:
        self.config = config
        self.device = pick_device(device)
        library = {"timm": "timm", "open_clip": "open_clip_torch"}.get(config.model.partition("/")[0])
        versions = {**VERSIONS, **({library: metadata.version(library)} if library else {})}
        self.notes = {"weights": config.weights, "seed": config.seed, "versions": versions}

    @abstractmethod
    def prepare(self, picture: Picture.Image, image_id: int) -> _Prepared:
        """What the network reads of one picture; called by several threads."""

    @abstractmethod
    def compute(self, batch: Sequence[_Prepared]) -> list[Vectors]:
        """The vectors of each picture of a batch."""

    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of ``items``; see :meth:`Extractor.extract`."""
        found: list[Vectors] = []
        kept: list[tuple[int, NDArray[np.uint8]]] = []
        skipped: list[dict[str, Any]] = []
        with tqdm(total=len(items), desc=f"extract {self.config.name}", unit="image", disable=None) as progress:
            for batch in self._batches(read_ahead(items, self._load, self.config.workers, 2 * self.batch_size)):
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
                    found += [replace(v, features=v.features.astype(self.config.dtype)) for v in self.compute(good)]
                progress.update(len(batch))
        if not kept:
            raise UserError(f"not one of {len(items)} images can be read, the first: {skipped[0]['reason']}")
        ids, sources = zip(*kept, strict=True)
        return _rows(np.asarray(ids, np.int64), np.stack(sources), found, skipped)

    def _load(self, item: Item) -> tuple[Item, _Prepared | BadImage, NDArray[np.uint8]]:
        assert item.path is not None
        try:
            content = read_bytes(item.path)
            return item, self.prepare(decode(item.path, content), item.id), sha256_bytes(content)
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


def extract_shards(
    dataset_file: Path, extractor: Extractor, out: Path, n_shards: int, only: int | None = None, skip_bad: bool = False
) -> Path:
    """Make the shards of a feature, or ``only`` one of them, that are not finished yet.

    Without ``skip_bad`` a finished shard that left images out is made again: they may be readable by now.
    A finished shard whose images or captions changed since is refused.
    Returns the folder of the shards, or the one shard; :func:`merge` joins them to the cache ``out``.
    """
    dataset = load_dataset_file(dataset_file)
    if extractor.kind == "image" and not dataset.pictures:
        raise UserError(f"{dataset_file}: a data set without pictures (its features were imported)")
    items = items_of(dataset, extractor.kind)
    if not 1 <= n_shards <= len(items):
        raise UserError(f"{n_shards} shards for {len(items)} rows")
    if only is not None and not 0 <= only < n_shards:
        raise UserError(f"shard {only} is not one of 0-{n_shards - 1}")
    identity = extractor.identity(dataset)
    for index in range(n_shards) if only is None else [only]:
        path = shards.shard_path(out, index, n_shards)
        mine = items[shards.shard_slice(len(items), index, n_shards)]
        finished = shards.finished_shard(path, identity)
        if finished is not None and (skip_bad or not finished.skipped):
            changed = changed_source(mine, *shards.read_rows(path, "ids", "sources"))
            if changed is not None:
                raise UserError(f"{path} was made from another {changed}; delete that shard to make it anew")
            log.info("%s: finished, kept", path)
            continue
        shards.write_shard(path, identity, extractor.extract(mine, skip_bad), extractor.notes)
    return shards.shards_folder(out) if only is None else shards.shard_path(out, only, n_shards)


def merge(dataset_file: Path, out: Path, n_shards: int) -> Path:
    """Join the finished shards of a feature to the cache ``out``."""
    first = shards.read_record(shards.shard_path(out, 0, n_shards))
    kind = first.identity.kind if first is not None else "image"
    path = cache.merge_shards(out, n_shards, dataset_file, ids_of(items_of(load_dataset_file(dataset_file), kind)))
    for what, count in cache.open_cache(path).provenance["counts"].items():
        if count:
            log.warning("%s: %d %s", path, count, what)
    return path


def changed_source(items: Sequence[Item], ids: Ids, sources: NDArray[np.uint8]) -> str | None:
    """What changed since rows with these ``ids`` were made: the first image or caption whose hash differs, or None."""
    by_id = {item.id: item for item in items}
    for identity, source in zip(ids.tolist(), sources, strict=True):
        item = by_id.get(identity)
        if item is None:
            return f"data set: it has no id {identity}"
        what = f"image {identity} ({item.path})" if item.path is not None else f"caption {identity}"
        try:
            if not np.array_equal(item.source(), source):
                return f"{what}: its SHA-256 differs"
        except BadImage as error:
            return f"{what}: {error}"
    return None


def verify_sources(found: cache.FeatureCache) -> str:
    """Hash again what a cache was made from: ``unchanged``, or why that cannot be told; :class:`UserError` if it changed."""
    if not found.captions.is_file():
        return f"not at hand ({found.captions} is not there)"
    dataset = load_dataset_file(found.captions)
    if "imported" in found.provenance:
        return "not at hand (imported features)"
    kind: Literal["image", "text"] = "image" if found.kind == "image" else "text"
    changed = changed_source(items_of(dataset, kind), found.ids, cache.read_sources(found))
    if changed is not None:
        raise UserError(f"{found.path} was made from another {changed}")
    return "unchanged"


def _rows(ids: Ids, sources: NDArray[np.uint8], found: list[Vectors], skipped: Sequence[Mapping[str, Any]]) -> Rows:
    """What was found in images; ``found`` is emptied on the way, so that the vectors are not held twice."""
    first = found[0]
    if first.boxes is None:
        features = np.empty((len(found), *first.features.shape), first.features.dtype)
        for k in range(len(found) - 1, -1, -1):
            features[k] = found.pop().features
        return Rows(ids, features, sources, skipped=skipped)
    counts = [len(vectors.features) for vectors in found]
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    boxes = np.concatenate([vectors.boxes for vectors in found if vectors.boxes is not None])
    scores = np.concatenate([vectors.scores for vectors in found if vectors.scores is not None])
    image_size = np.asarray([vectors.image_size for vectors in found], np.int32)
    features = np.empty((offsets[-1], *first.features.shape[1:]), first.features.dtype)
    for k in range(len(found) - 1, -1, -1):
        features[offsets[k] : offsets[k + 1]] = found.pop().features
    empty = {"images without a box": counts.count(0)}
    return Rows(ids, features, sources, offsets, boxes, scores, image_size, skipped, empty)
