"""The crops of an image that a CNN reads.

CNN features: one vector per image, per crop or per position (VSE++ paper, section 3).

Where on its photograph each vector of an image's set lies: the boxes of regions, or the cells of a CNN's grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vse.features.backbones.device import moved
from vse.features.backbones.networks import LayerOutput, autocast, fold_batch_norms, load_backbone, weights_sha256
from vse.features.backbones.precision import rebuilt_precision
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import RegionBoxes
from vse.features.extractors.images import NetworkExtractor, UnfitSize, Vectors
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import MAX_PIXELS
from vse.pipeline.files.inputs import wrap_read_errors

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


_AT_ONCE = 4  # crops on a processor; the outputs of layers for more are memory that the system clears first each time


class CnnExtractor(NetworkExtractor[Tensor]):
    """A CNN ready to turn image files into vectors, by one feature preset.

    Parameters
    ----------
    config : the preset
    weights_dir : folder whose ``<model>.pth`` or ``.safetensors`` stands in for a download
    device : ``auto`` takes a GPU if there is one
    """

    version = 2
    config: CnnConfig

    def __init__(self, config: CnnConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        super().__init__(config, device)
        self.batch_size = max(1, config.batch_size // config.n_crops)
        backbone = load_backbone(config, weights_dir, notes=self.notes)
        self.weights_sha256 = weights_sha256(backbone)
        network = LayerOutput(backbone, config.layer, config.grid, config.positions)
        self.network = network.to(self.device).to(memory_format=torch.channels_last)
        self._try_once()
        if config.fold_batch_norm:
            noise = torch.rand(2, 3, config.crop, config.crop, generator=torch.Generator().manual_seed(0)) - 0.5
            fold_batch_norms(self.network, noise.to(self.device, memory_format=torch.channels_last))
        self._forward = torch.compile(self.network) if config.compile else self.network

    def _try_once(self) -> None:
        """Run one blank image through, so that a layer or a size that does not fit the model is refused at once."""
        config = self.config
        self._forward = self.network
        try:
            self.features(torch.zeros(1, 1, 3, config.crop, config.crop, dtype=torch.uint8))
        except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UserError(f"{config.model}, layer {config.layer!r}, crop {config.crop}: cannot be used ({reason})") from None

    def prepare(self, image: Image.Image, image_id: int) -> Tensor:
        """The crops of one image, (n_crops, 3, crop, crop) uint8."""
        return crops_of(image, self.config, image_id)

    def compute(self, batch: Sequence[Tensor]) -> list[Vectors]:
        """The vectors of each image of a batch."""
        return [Vectors(features) for features in self.features(torch.stack(list(batch))).cpu().numpy()]

    def features(self, pixels: Tensor) -> Float[Tensor, "n_images *shape dim"]:
        """Vectors of images given as crops (n_images, n_crops, 3, crop, crop), uint8.

        (n_images, dim), the mean over the crops; a bank keeps them apart, (n_images, n_crops, dim); with
        ``positions``, (n_images, n_positions, dim).
        """
        config, crops = self.config, pixels.flatten(0, 1)
        at_once = max(_AT_ONCE, torch.get_num_threads()) if self.device.type == "cpu" else len(crops)
        with torch.inference_mode(), autocast(config.precision, self.device):
            images = (normalized(some, config.mean, config.std, self.device) for some in torch.split(crops, at_once))
            output = torch.cat([self._forward(some) for some in images])
        vectors = output.float().view(*pixels.shape[:2], *output.shape[1:])
        vectors = vectors if config.bank else vectors.mean(1)
        return torch.nn.functional.normalize(vectors, dim=-1) if config.normalize else vectors


def cnn_config(cache: FeatureCache, positions: bool = False, **changed: object) -> CnnConfig:
    """The settings of the CNN that made a cache, some of them ``changed``; :class:`UserError` if there was none.

    A cache with a vector for each position is refused unless the caller can do with ``positions``.
    """
    made = cache.provenance
    settings = made.get("config", {})
    if settings.get("extractor") != "cnn" or (settings.get("positions") and not positions):
        raise UserError(f"{cache.path}: its features are not vectors of a CNN, so none can be run on the images")
    with wrap_read_errors(cache.path, "a cache of a CNN's vectors, by its provenance"):
        weights = {"weights": made["weights"], "seed": made.get("seed", 0)}
        return CnnConfig.model_validate({"name": cache.feature, **weights, **settings, **changed})


def rebuild_extractor(
    cache: FeatureCache,
    weights_dir: Path | None = None,
    device: str = "auto",
    trained: bool = False,
    positions: bool = False,
    trainable: bool = False,
) -> CnnExtractor:
    """The CNN that made a cache; :class:`UserError` if there was none or its weights are no longer available.

    With ``trained`` its weights are random, because the caller is about to replace them. With either this or ``trainable``
    its batch norms are not folded. ``positions`` as for :func:`cnn_config`. A network of bf16 computes in fp32 on a device
    without bf16.
    """
    changed: dict[str, object] = {"fold_batch_norm": False} if trained or trainable else {}
    config = cnn_config(cache, positions, **changed, **({"weights": "random"} if trained else {}))
    config = config.model_copy(update={"precision": rebuilt_precision(config.precision)})
    extractor = CnnExtractor(config, weights_dir, device)
    if not trained and extractor.weights_sha256 != cache.provenance.get("weights_sha256"):
        raise UserError(
            f"{cache.path} was made with other weights of {config.model} than those found now (their SHA-256 differ)"
        )
    return extractor


class Places:
    """Boxes of the vectors of the sets in a cache; :class:`UserError` if it does not say where they lie.

    Regions have boxes of their own. A grid of positions divides the centre crop, from left to right and
    then downwards; where the network's map is no multiple of it, cells of the map beyond the edge of a position count in both.
    """

    def __init__(self, cache: FeatureCache) -> None:
        self._boxes: RegionBoxes | None = None
        self._grid: CnnConfig | None = None
        self._side = 0
        self._rows = {int(identity): row for row, identity in enumerate(cache.ids)}
        config = cache.provenance.get("config", {})
        if cache.offsets is not None:
            self._boxes = RegionBoxes(cache)
            return
        if config.get("extractor") == CnnConfig.model_fields["extractor"].default and config.get("positions") is True:
            with wrap_read_errors(cache.path, "a cache of a CNN's positions, by its provenance"):
                grid = CnnConfig(name=cache.feature, **config)
            side = math.isqrt(cache.row_shape[0])
            if grid.crops == "1c" and cache.row_shape[0] == side**2 and grid.grid in (side, "all"):
                self._grid, self._side = grid, side
                return
        raise UserError(f"{cache.path}: does not say where on the photos its {cache.feature} lie")

    def of(self, size: tuple[int, int], image_id: int | None = None) -> Float[np.ndarray, "n 4"]:
        """The boxes x1, y1, x2, y2 of an image's vectors, in pixels of its photo of this width and height.

        A grid lies alike on any photo of a size; regions are those of the image ``image_id``, none if the cache lacks it.
        """
        if self._grid is None:
            return self._regions(size, image_id)
        x1, y1, x2, y2 = centre_crop(size, self._grid)
        n = self._side
        x, y = (np.linspace(start, end, n + 1) for start, end in ((x1, x2), (y1, y2)))
        return np.asarray([(x[j], y[i], x[j + 1], y[i + 1]) for i in range(n) for j in range(n)])

    def _regions(self, size: tuple[int, int], image_id: int | None) -> NDArray[np.float64]:
        """Those of a row, scaled to the photo if that is of another size than the cache says."""
        row = None if image_id is None else self._rows.get(image_id)
        if row is None or self._boxes is None:
            return np.empty((0, 4))
        first, end = self._boxes.offsets[row : row + 2].tolist()
        with np.errstate(divide="ignore", invalid="ignore"):  # an image of no size has boxes that are no numbers
            scale = np.tile(np.asarray(size) / self._boxes.image_size[row], 2)
            return np.asarray(self._boxes.boxes[first:end] * scale, np.float64)
