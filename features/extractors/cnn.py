"""The extractor ``cnn``: one vector per image, per crop or per position (VSE++ paper, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vse.features.backbones.device import choose_query_precision, move_tensor
from vse.features.backbones.networks import TruncatedNetwork, autocast, fold_batch_norms, hash_weights, load_backbone
from vse.features.backbones.weight_files import add_weights_hint, find_weights_setting
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import RegionBoxes
from vse.features.extractors.images import ImageVectors, NetworkExtractor, UnsuitableImageSize
from vse.features.settings.images import CnnConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import MAX_PIXELS
from vse.pipeline.files.inputs import wrap_read_errors

MIN_SCALED_SIDE = 16  # pixels; a shorter side has no complete cell in a feature map of stride 16

RESAMPLING_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

ChannelValues = tuple[float, float, float]  # red, green, blue


def cut_crops(
    image: Image.Image, config: CnnConfig, image_id: int = 0, extra_seeds: tuple[int, ...] = ()
) -> UInt8[Tensor, "n_crops 3 crop crop"]:
    """Resize ``image`` and cut its crops according to ``config.crops``.

    Ten crops are the four corners and the centre, then their mirror images. Random crops depend on ``config.crop_seed``,
    ``image_id`` and ``extra_seeds``, such as the number of an epoch.
    """
    if config.crops == "rc_bank" and config.random_crop == "resized":
        return _stack_views(
            [_cut_random_resized_crop(image, config, rng) for rng in _build_crop_generators(config, image_id, extra_seeds)]
        )
    width, height = _compute_resized_size(image.size, config)
    small = np.asarray(image.resize((width, height), RESAMPLING_FILTERS[config.interpolation]))
    right, bottom = width - config.crop, height - config.crop
    if config.crops == "rc_bank":
        views = []
        for rng in _build_crop_generators(config, image_id, extra_seeds):
            top, left = int(rng.integers(bottom + 1)), int(rng.integers(right + 1))
            views.append(_mirror_at_random(_cut_square(small, top, left, config.crop), rng))
        return _stack_views(views)
    centre = round(bottom / 2), round(right / 2)
    if config.crops == "1c":
        return _stack_views([_cut_square(small, *centre, config.crop)])
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), centre]
    views = [_cut_square(small, top, left, config.crop) for top, left in corners]
    return _stack_views([*views, *(view[:, ::-1] for view in views)])


def compute_centre_crop_box(size: tuple[int, int], config: CnnConfig) -> tuple[float, float, float, float]:
    """Return the box x1, y1, x2, y2 of the centre crop in pixels of an image of width and height ``size``."""
    width, height = _compute_resized_size(size, config)
    top, left = round((height - config.crop) / 2), round((width - config.crop) / 2)
    x, y = size[0] / width, size[1] / height
    return left * x, top * y, (left + config.crop) * x, (top + config.crop) * y


def compute_scaled_size(size: tuple[int, int], shorter: int, longer: int | None = None) -> tuple[int, int]:
    """Return the width and height to which an image of width and height ``size`` is scaled.

    The shorter side becomes ``shorter``. If the longer side would then exceed ``longer``, the longer side becomes ``longer``
    instead. Raises :class:`UnsuitableImageSize` if the result has more than ``MAX_PIXELS`` pixels or a side below
    ``MIN_SCALED_SIDE``.
    """
    scale = shorter / min(size)
    if longer is not None:
        scale = min(scale, longer / max(size))
    at_least = shorter if longer is None else 1
    width, height = (max(at_least, round(side * scale)) for side in size)
    if width * height > MAX_PIXELS or min(width, height) < MIN_SCALED_SIDE:
        raise UnsuitableImageSize(f"{size[0]} x {size[1]} pixels would be scaled to {width} x {height} for the network")
    return width, height


def image_to_tensor(image: Image.Image) -> UInt8[Tensor, "3 height width"]:
    """Return an image's pixels, 0-255, as a tensor."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalize_pixels(
    pixels: Tensor, mean: ChannelValues, std: ChannelValues, device: torch.device
) -> Float[Tensor, "n 3 height width"]:
    """Return pixels 0-255 minus the mean, divided by the standard deviation, on ``device`` in channels-last memory format."""
    images = move_tensor(pixels, device).to(torch.float32, memory_format=torch.channels_last)
    shift = torch.tensor(mean, device=device).view(3, 1, 1) * 255
    scale = torch.tensor(std, device=device).view(3, 1, 1) * 255
    return (images - shift) / scale


def _compute_resized_size(size: tuple[int, int], config: CnnConfig) -> tuple[int, int]:
    if config.resize_mode == "square":
        return config.resize, config.resize
    width, height = compute_scaled_size(size, config.resize)
    if config.resize_mode == "library":
        width, height = (config.resize * side // min(size) for side in size)
    return width, height


def _build_crop_generators(config: CnnConfig, image_id: int, extra_seeds: tuple[int, ...]) -> list[np.random.Generator]:
    """Return one random generator per crop, so that the first crops do not depend on the number of crops."""
    seeds = np.random.SeedSequence([config.crop_seed, image_id, *extra_seeds]).spawn(config.n_random)
    return [np.random.default_rng(seed) for seed in seeds]


def _cut_random_resized_crop(image: Image.Image, config: CnnConfig, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Cut a random box with 8 to 100% of the area and aspect ratio 3/4 to 4/3, and scale it to crop x crop.

    After ten boxes that do not fit into the image, a box in the centre is cut instead.
    """
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
    crop = image.resize((config.crop, config.crop), RESAMPLING_FILTERS[config.interpolation], box=box)
    return _mirror_at_random(np.asarray(crop), rng)


def _mirror_at_random(view: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    return view[:, ::-1] if rng.random() < 0.5 else view


def _cut_square(pixels: NDArray[np.uint8], top: int, left: int, side: int) -> NDArray[np.uint8]:
    return pixels[top : top + side, left : left + side]


def _stack_views(views: Sequence[NDArray[np.uint8]]) -> Tensor:
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)


_CPU_CROPS_AT_ONCE = 2  # the outputs of layers for more crops exceed the memory that glibc keeps (keep_freed_memory)


class CnnExtractor(NetworkExtractor[Tensor]):
    """A CNN that computes the vectors of image files with the settings of a feature preset.

    config : settings of the preset
    weights_dir : folder whose ``<model>.pth`` or ``.safetensors`` replaces a download
    device : ``auto``, or a device of torch
    """

    version = 2
    config: CnnConfig

    def __init__(self, config: CnnConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        super().__init__(config, device)
        self.batch_size = max(1, config.batch_size // config.n_crops)
        backbone = load_backbone(config, weights_dir, notes=self.provenance)
        self.weights_sha256 = hash_weights(backbone)
        network = TruncatedNetwork(backbone, config.layer, config.grid, config.positions)
        self.network = network.to(self.device).to(memory_format=torch.channels_last)
        self._try_blank_image()
        if config.fold_batch_norm:
            noise = torch.rand(2, 3, config.crop, config.crop, generator=torch.Generator().manual_seed(0)) - 0.5
            fold_batch_norms(self.network, noise.to(self.device, memory_format=torch.channels_last))
        self._forward = torch.compile(self.network) if config.compile else self.network

    def _try_blank_image(self) -> None:
        """Run the network on a black crop. Raises UserError if the layer or the size of crops does not suit the network."""
        config = self.config
        self._forward = self.network
        try:
            self.compute_features(torch.zeros(1, 1, 3, config.crop, config.crop, dtype=torch.uint8))
        except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UserError(f"{config.model}, layer {config.layer!r}, crop {config.crop}: cannot be used ({reason})") from None

    def prepare(self, image: Image.Image, image_id: int) -> Tensor:
        """Return the crops of one image, (n_crops, 3, crop, crop) uint8."""
        return cut_crops(image, self.config, image_id)

    def compute_vectors(self, batch: Sequence[Tensor]) -> list[ImageVectors]:
        return [ImageVectors(features) for features in self.compute_features(torch.stack(list(batch))).cpu().numpy()]

    def compute_features(self, pixels: Tensor) -> Float[Tensor, "n_images *shape dim"]:
        """Compute the vectors of images, given as crops (n_images, n_crops, 3, crop, crop) uint8.

        The result is the mean over the crops, (n_images, dim) or, with the setting ``positions``, (n_images, n_positions,
        dim). If the crops are not averaged (``is_crop_bank``), the result has a vector per crop, (n_images, n_crops, dim).
        """
        config, crops = self.config, pixels.flatten(0, 1)
        at_once = max(_CPU_CROPS_AT_ONCE, torch.get_num_threads()) if self.device.type == "cpu" else len(crops)
        with torch.inference_mode(), autocast(config.precision, self.device):
            images = (normalize_pixels(some, config.mean, config.std, self.device) for some in torch.split(crops, at_once))
            output = torch.cat([self._forward(some) for some in images])
        vectors = output.float().view(*pixels.shape[:2], *output.shape[1:])
        vectors = vectors if config.is_crop_bank else vectors.mean(1)
        return torch.nn.functional.normalize(vectors, dim=-1) if config.normalize else vectors


def read_cnn_config(cache: FeatureCache, allow_positions: bool = False, **changes: object) -> CnnConfig:
    """Return the settings of the CNN that computed a cache. The values ``changes`` replace recorded settings.

    Raises UserError if no CNN computed the cache, or if the cache has a vector per position and ``allow_positions`` is False.
    """
    provenance = cache.provenance
    settings = provenance.get("config", {})
    if settings.get("extractor") != "cnn" or (settings.get("positions") and not allow_positions):
        raise UserError(f"{cache.path}: its features are not vectors of a CNN, so no CNN can be run on the images")
    with wrap_read_errors(cache.path, "a cache of a CNN's vectors, by its provenance"):
        weights = {"weights": provenance["weights"], "seed": provenance.get("seed", 0)}
        return CnnConfig.model_validate({"name": cache.feature, **weights, **settings, **changes})


def rebuild_cnn_extractor(
    cache: FeatureCache,
    weights_dir: Path | None = None,
    device: str = "auto",
    random_weights: bool = False,
    allow_positions: bool = False,
    trainable: bool = False,
) -> CnnExtractor:
    """Load the CNN that computed a cache.

    The file of weights is found by its SHA-256 (:mod:`vse.features.backbones.weight_files`). A bf16 CNN computes in fp32 on a
    device without bf16. Raises UserError if no CNN computed the cache, or if the CNN's weights are missing or have changed.

    weights_dir : folder whose files replace downloads of weights
    random_weights : True for random weights, if the caller will load trained weights; batch norms are not folded
    allow_positions : True to accept a cache with one vector per position
    trainable : True for a CNN that the caller will train; batch norms are not folded
    """
    changes: dict[str, object] = {"fold_batch_norm": False} if random_weights or trainable else {}
    changes |= (
        {"weights": "random"} if random_weights else find_weights_setting(cache.provenance, cache.model_folder, weights_dir)
    )
    config = read_cnn_config(cache, allow_positions, **changes)
    config = config.model_copy(update={"precision": choose_query_precision(config.precision)})
    try:
        extractor = CnnExtractor(config, weights_dir, device)
    except UserError as error:
        raise add_weights_hint(cache.provenance, config.model, error) from None
    if not random_weights:
        _check_weights(cache, config, extractor.weights_sha256)
    return extractor


def load_cnn_weights(cache: FeatureCache, weights_dir: Path | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights of the CNN that computed a cache, and a dictionary with the name and hash of the weights file.

    Raises UserError if the weights are missing or have changed.
    """
    notes: dict[str, Any] = {}
    weights = find_weights_setting(cache.provenance, cache.model_folder, weights_dir)
    config = read_cnn_config(cache, allow_positions=True, **weights)
    try:
        network = load_backbone(config, weights_dir, notes=notes)
    except UserError as error:
        raise add_weights_hint(cache.provenance, config.model, error) from None
    _check_weights(cache, config, hash_weights(network))
    return network.state_dict(), notes


def _check_weights(cache: FeatureCache, config: CnnConfig, sha256: str) -> None:
    if sha256 != cache.provenance.get("weights_sha256"):
        error = UserError(
            f"{cache.path} was computed with other weights of {config.model} than the current ones (the SHA-256 differs)"
        )
        raise add_weights_hint(cache.provenance, config.model, error)


class VectorBoxes:
    """The boxes that the vectors of a cache describe in the photos.

    The cache has the regions of a detector, or a vector for each position of a CNN's grid. The boxes of positions divide the
    centre crop into a grid, row by row. They are approximate, because neighbouring positions may share cells of the CNN's
    feature map. Raises UserError if the cache records neither boxes nor positions.
    """

    def __init__(self, cache: FeatureCache) -> None:
        self._boxes: RegionBoxes | None = None
        self._grid_config: CnnConfig | None = None
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
                self._grid_config, self._side = grid, side
                return
        raise UserError(f"{cache.path}: does not record the positions of its {cache.feature} in the photos")

    def find_boxes(self, size: tuple[int, int], image_id: int | None = None) -> Float[np.ndarray, "n 4"]:
        """Return the boxes x1, y1, x2, y2 of an image's vectors, in pixels of its photo of width and height ``size``.

        The boxes of a grid depend only on ``size``. For a cache of regions, the result has the boxes of the image
        ``image_id``; it is empty if the cache lacks this image.
        """
        if self._grid_config is None:
            return self._scale_regions(size, image_id)
        x1, y1, x2, y2 = compute_centre_crop_box(size, self._grid_config)
        n = self._side
        x, y = (np.linspace(start, end, n + 1) for start, end in ((x1, x2), (y1, y2)))
        return np.asarray([(x[j], y[i], x[j + 1], y[i + 1]) for i in range(n) for j in range(n)])

    def _scale_regions(self, size: tuple[int, int], image_id: int | None) -> NDArray[np.float64]:
        """Return the recorded boxes of an image, scaled from the recorded width and height to ``size``."""
        row = None if image_id is None else self._rows.get(image_id)
        if row is None or self._boxes is None:
            return np.empty((0, 4))
        first, end = self._boxes.offsets[row : row + 2].tolist()
        with np.errstate(divide="ignore", invalid="ignore"):  # an image of size 0 x 0 has boxes of NaN
            scale = np.tile(np.asarray(size) / self._boxes.image_size[row], 2)
            return np.asarray(self._boxes.boxes[first:end] * scale, np.float64)
