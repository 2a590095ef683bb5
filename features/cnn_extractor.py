"""CNN features: one vector per image, per crop or per position (VSE++ paper, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vse.features.backbones import LayerOutput, autocast, load_backbone, weights_sha256
from vse.features.batch_norms import fold_batch_norms
from vse.features.cache import FeatureCache
from vse.features.crops import crops_of, normalized
from vse.features.extractors.cnn import CnnConfig
from vse.features.extractors.extractor import NetworkExtractor, Vectors
from vse.features.precision import rebuilt_precision
from vse.pipeline.errors import UserError
from vse.pipeline.input_files import reading

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
    with reading(cache.path, "a cache of a CNN's vectors, by its provenance"):
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
