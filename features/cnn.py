"""CNN features: one vector per image, extracted shard by shard (VSE++ paper, section 3)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import vse
from vse.features import cache
from vse.features.backbones import LayerOutput, load_backbone, weights_sha256
from vse.features.hardware import pick_device
from vse.features.pictures import BadImage, Crops, normalized, read_ahead
from vse.pipeline.config import FeatureConfig
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import sha256_json

EXTRACTOR_VERSION = 1
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_VERSIONS = {
    "vse": vse.__version__,
    "torch": torch.__version__,
    "torchvision": torchvision.__version__,
    "pillow": PIL.__version__,
}
log = logging.getLogger(__name__)


class CnnExtractor:
    """A CNN ready to turn image files into vectors, by one feature preset.

    Parameters
    ----------
    config : the preset
    weights_dir : folder whose ``<model>.pth`` or ``.safetensors`` stands in for a download
    device : ``auto`` takes a GPU if there is one
    """

    def __init__(self, config: FeatureConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        if config.crop > config.resize:
            raise UserError(f"feature {config.name!r}: crop {config.crop} is larger than resize {config.resize}")
        self.config = config
        self.device = pick_device(device)
        backbone = load_backbone(config, weights_dir)
        self.weights_sha256 = weights_sha256(backbone)
        network = LayerOutput(backbone, config.layer, config.grid)
        self.network = network.to(self.device).to(memory_format=torch.channels_last)
        self._try_once()

    def _try_once(self) -> None:
        """Run one blank image through, so that a layer or a size that does not fit the model is said at once."""
        config = self.config
        try:
            self.features(torch.zeros(1, 1, 3, config.crop, config.crop, dtype=torch.uint8))
        except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UserError(f"{config.model}, layer {config.layer!r}, crop {config.crop}: cannot be used ({reason})") from None

    def identity(self, dataset: Dataset) -> cache.Identity:
        """All that determines the vectors of ``dataset``."""
        content = {
            "config": self.config.content(),
            "weights_sha256": self.weights_sha256,
            "requested_ids_sha256": sha256_json(image_ids(dataset).tolist()),
            "extractor_version": EXTRACTOR_VERSION,
        }
        return cache.Identity(dataset.name, self.config.name, "image", content)

    def features(self, pixels: Tensor) -> Float[Tensor, "n_images dim"]:
        """Vectors of images given as crops (n_images, n_crops, 3, crop, crop), uint8: the mean over the crops."""
        with torch.inference_mode(), self._autocast():
            output = self.network(normalized(pixels.flatten(0, 1), self.config, self.device))
        vectors = output.float().view(*pixels.shape[:2], -1).mean(1)
        return torch.nn.functional.normalize(vectors, dim=1) if self.config.normalize else vectors

    def extract(self, paths: Sequence[Path], skip_bad: bool = False) -> tuple[NDArray[np.generic], list[tuple[int, str]]]:
        """Vectors of the readable images in order, and (position, reason) of the others.

        Without ``skip_bad`` the first unreadable image raises :class:`BadImage`.
        """
        rows: list[NDArray[np.generic]] = []
        skipped: list[tuple[int, str]] = []
        with tqdm(total=len(paths), desc=f"extract {self.config.name}", unit="image", disable=None) as progress:
            for batch in self._batches(read_ahead(paths, self.config)):
                for item in batch:
                    if item.error is not None and not skip_bad:
                        raise BadImage(f"{item.error}; --skip-bad leaves such images out")
                    if item.error is not None:
                        skipped.append((item.position, str(item.error)))
                good = [item.pixels for item in batch if item.pixels is not None]
                if good:
                    pixels = torch.stack(good)
                    pixels = pixels.pin_memory() if self.device.type == "cuda" else pixels
                    rows.append(self.features(pixels).cpu().numpy().astype(self.config.dtype))
                progress.update(len(batch))
        return (np.concatenate(rows) if rows else np.empty((0, 0), self.config.dtype)), skipped

    def _batches(self, items: Iterator[Crops]) -> Iterator[list[Crops]]:
        n_images = max(1, self.config.batch_size // (10 if self.config.crops == "10c" else 1))
        batch: list[Crops] = []
        for item in items:
            batch.append(item)
            if len(batch) == n_images:
                yield batch
                batch = []
        if batch:
            yield batch

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = _AUTOCAST.get(self.config.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


def image_ids(dataset: Dataset) -> cache.Ids:
    """Ids of all images in file order: the rows of an image feature."""
    return np.asarray([image.imgid for image in dataset.images], np.int64)


def extract_shards(
    dataset_file: Path,
    config: FeatureConfig,
    out: Path,
    n_shards: int,
    only: int | None = None,
    skip_bad: bool = False,
    weights_dir: Path | None = None,
    device: str = "auto",
) -> Path:
    """Make the shards of an image feature, or ``only`` one of them, that are not finished yet.

    Without ``skip_bad`` a finished shard that left images out is made again: they may be readable by now.
    Returns the folder of the shards, or the one shard; :func:`merge` joins them to the cache ``out``.
    """
    dataset = load_dataset_file(dataset_file)
    if not 1 <= n_shards <= len(dataset.images):
        raise UserError(f"{n_shards} shards for {len(dataset.images)} images")
    if only is not None and not 0 <= only < n_shards:
        raise UserError(f"shard {only} is not one of 0-{n_shards - 1}")
    extractor = CnnExtractor(config, weights_dir, device)
    identity = extractor.identity(dataset)
    for index in range(n_shards) if only is None else [only]:
        path = cache.shard_path(out, index, n_shards)
        finished = cache.finished_shard(path, identity)
        if finished is not None and (skip_bad or not finished.skipped):
            log.info("%s: finished, kept", path)
            continue
        images = dataset.images[cache.shard_slice(len(dataset.images), index, n_shards)]
        features, failures = extractor.extract([dataset.image_path(image) for image in images], skip_bad)
        skipped = [
            {"id": images[k].imgid, "path": str(dataset.image_path(images[k])), "reason": reason} for k, reason in failures
        ]
        if len(skipped) == len(images):
            raise UserError(f"{path}: not one of its {len(images)} images can be read, the first: {skipped[0]['reason']}")
        left_out = {item["id"] for item in skipped}
        ids = np.asarray([image.imgid for image in images if image.imgid not in left_out], np.int64)
        notes = {"weights": config.weights, "seed": config.seed, "versions": _VERSIONS}
        cache.write_shard(path, identity, ids, features, skipped, notes)
    return cache.shards_folder(out) if only is None else cache.shard_path(out, only, n_shards)


def merge(dataset_file: Path, out: Path, n_shards: int) -> Path:
    """Join the finished shards of an image feature to the cache ``out``."""
    return cache.merge_shards(out, n_shards, dataset_file, image_ids(load_dataset_file(dataset_file)))
