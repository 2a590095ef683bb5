"""The crops of an image that a CNN reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vse.features.extractors.cnn import CnnConfig
from vse.features.extractors.extractor import UnfitSize
from vse.features.hardware import moved
from vse.pipeline.image_files import MAX_PIXELS

MIN_SIDE = 16  # the stride of the maps that regions are read from

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

Mean = tuple[float, float, float]


def crops_of(
    image: Image.Image, config: CnnConfig, image_id: int = 0, visit: tuple[int, ...] = ()
) -> UInt8[Tensor, "n_crops 3 crop crop"]:
    """Resize ``image`` and cut its crops, as ``config.crops`` says.

    Ten crops are the four corners and the centre, then their mirrors. Random crops depend on ``config.crop_seed``,
    ``image_id`` and ``visit`` alone.
    """
    if config.crops == "rc_bank" and config.random_crop == "resized":
        return _stacked([_random_resized(image, config, rng) for rng in _rngs(config, image_id, visit)])
    width, height = _resized(image.size, config)
    small = np.asarray(image.resize((width, height), RESAMPLING[config.interpolation]))
    right, bottom = width - config.crop, height - config.crop
    if config.crops == "rc_bank":
        views = []
        for rng in _rngs(config, image_id, visit):
            top, left = int(rng.integers(bottom + 1)), int(rng.integers(right + 1))
            views.append(_mirrored(_cut(small, top, left, config.crop), rng))
        return _stacked(views)
    centre = _centre(width, height, config.crop)
    if config.crops == "1c":
        return _stacked([_cut(small, *centre, config.crop)])
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), centre]
    views = [_cut(small, top, left, config.crop) for top, left in corners]
    return _stacked([*views, *(view[:, ::-1] for view in views)])


def centre_crop(size: tuple[int, int], config: CnnConfig) -> tuple[float, float, float, float]:
    """Where the centre crop lies in an image of this width and height: x1, y1, x2, y2 in its pixels."""
    width, height = _resized(size, config)
    top, left = _centre(width, height, config.crop)
    x, y = size[0] / width, size[1] / height
    return left * x, top * y, (left + config.crop) * x, (top + config.crop) * y


def scaled(size: tuple[int, int], shorter: int, longer: int | None = None) -> tuple[int, int]:
    """Width and height whose shorter side is ``shorter``, or whose longer side is ``longer`` if it would be more.

    :class:`UnfitSize` if that is more than ``MAX_PIXELS`` in all, or a side less than ``MIN_SIDE``.
    """
    scale = shorter / min(size)
    if longer is not None:
        scale = min(scale, longer / max(size))
    at_least = shorter if longer is None else 1
    width, height = (max(at_least, round(side * scale)) for side in size)
    if width * height > MAX_PIXELS or min(width, height) < MIN_SIDE:
        raise UnfitSize(f"{size[0]} x {size[1]} pixels, of which the network would see {width} x {height}")
    return width, height


def as_tensor(image: Image.Image) -> UInt8[Tensor, "3 height width"]:
    """An image's pixels, 0-255."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalized(pixels: Tensor, mean: Mean, std: Mean, device: torch.device) -> Float[Tensor, "n 3 height width"]:
    """Pixels 0-255 (n, 3, height, width) as the network's input: minus the mean, over the deviation, channels last."""
    images = moved(pixels, device).to(torch.float32, memory_format=torch.channels_last)
    shift = torch.tensor(mean, device=device).view(3, 1, 1) * 255
    scale = torch.tensor(std, device=device).view(3, 1, 1) * 255
    return (images - shift) / scale


def _resized(size: tuple[int, int], config: CnnConfig) -> tuple[int, int]:
    """Width and height to which an image is resized before it is cut."""
    if config.resize_mode == "square":
        return config.resize, config.resize
    width, height = scaled(size, config.resize)
    if config.resize_mode == "library":
        width, height = (config.resize * side // min(size) for side in size)
    return width, height


def _centre(width: int, height: int, crop: int) -> tuple[int, int]:
    """Top and left of the centre crop."""
    return round((height - crop) / 2), round((width - crop) / 2)


def _rngs(config: CnnConfig, image_id: int, visit: tuple[int, ...]) -> list[np.random.Generator]:
    """A generator per random crop, so that more crops leave the first ones as they are."""
    seeds = np.random.SeedSequence([config.crop_seed, image_id, *visit]).spawn(config.n_random)
    return [np.random.default_rng(seed) for seed in seeds]


def _random_resized(image: Image.Image, config: CnnConfig, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A box of 8 to 100% of the area and of an aspect of 3/4 to 4/3, scaled to crop x crop; the centre if none fits."""
    width, height = image.size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            break
    else:
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    box = (left, top, left + w, top + h)
    return _mirrored(np.asarray(image.resize((config.crop, config.crop), RESAMPLING[config.interpolation], box=box)), rng)


def _mirrored(view: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    return view[:, ::-1] if rng.random() < 0.5 else view


def _cut(pixels: NDArray[np.uint8], top: int, left: int, side: int) -> NDArray[np.uint8]:
    return pixels[top : top + side, left : left + side]


def _stacked(views: Sequence[NDArray[np.uint8]]) -> Tensor:
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)
