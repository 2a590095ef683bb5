"""From an image file to the crops that a CNN reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from vse.pipeline.config import FeatureConfig
from vse.pipeline.errors import UserError

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 100_000_000  # a picture with more is taken for a decompression bomb


class BadImage(UserError):
    """An image file that is missing or cannot be decoded."""


@dataclass(frozen=True)
class Crops:
    """The crops of one image, (n_crops, 3, crop, crop) uint8, or the reason why there are none."""

    position: int
    pixels: torch.Tensor | None
    error: BadImage | None = None


def decode(path: Path) -> Image.Image:
    """Open an image as upright RGB; :class:`BadImage` says why not."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise BadImage(f"{path}: {picture.width} x {picture.height} pixels are too many")
            picture.load()
            return ImageOps.exif_transpose(picture).convert("RGB")
    except FileNotFoundError:
        raise BadImage(f"{path}: no such image file") from None
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # a broken file can raise anything: struct.error from its EXIF, SyntaxError from its header
        raise BadImage(f"{path}: not a readable image ({error})") from None


def crops_of(picture: Image.Image, config: FeatureConfig) -> torch.Tensor:
    """Resize ``picture`` and cut its crops: (1, 3, crop, crop) or, for ten crops, (10, 3, crop, crop), uint8.

    The ten crops are the four corners and the centre, then their mirrors.
    """
    if config.resize_mode == "square":
        width = height = config.resize
    else:
        scale = config.resize / min(picture.size)
        width, height = (max(config.resize, round(side * scale)) for side in picture.size)
    small = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
    crop, right, bottom = config.crop, width - config.crop, height - config.crop
    corners = [(round(bottom / 2), round(right / 2))]
    if config.crops == "10c":
        corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), *corners]
    views = [small[top : top + crop, left : left + crop] for top, left in corners]
    if config.crops == "10c":
        views += [view[:, ::-1] for view in views]
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)


def normalized(pixels: Tensor, config: FeatureConfig, device: torch.device) -> Float[Tensor, "n 3 crop crop"]:
    """Pixels 0-255 (n, 3, crop, crop) as the network's input: minus the mean, over the standard deviation, channels last."""
    images = pixels.to(device, non_blocking=True).to(torch.float32, memory_format=torch.channels_last)
    mean = torch.tensor(config.mean, device=device).view(3, 1, 1) * 255
    std = torch.tensor(config.std, device=device).view(3, 1, 1) * 255
    return (images - mean) / std


def read_ahead(paths: Sequence[Path], config: FeatureConfig) -> Iterator[Crops]:
    """Crops of every path in order, decoded by ``config.workers`` threads a few batches ahead.

    Pillow and numpy release the interpreter lock while they decode and resize, so threads are enough.
    """

    def load(position: int) -> Crops:
        try:
            return Crops(position, crops_of(decode(paths[position]), config))
        except BadImage as error:
            return Crops(position, None, error)

    if config.workers == 0:
        yield from map(load, range(len(paths)))
        return
    ahead = 2 * config.batch_size
    with ThreadPoolExecutor(config.workers) as pool:
        try:
            waiting: list[Future[Crops]] = [pool.submit(load, k) for k in range(min(ahead, len(paths)))]
            for k in range(len(paths)):
                result = waiting[k % ahead].result()
                if k + ahead < len(paths):
                    waiting[k % ahead] = pool.submit(load, k + ahead)
                yield result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
