"""The extractor ``boxes``: vectors of given or proposed boxes, by ROI-align on a CNN (Wang et al., TPAMI 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vse.features.backbones.device import move_tensor
from vse.features.backbones.networks import TruncatedNetwork, autocast, find_module, hash_weights, load_backbone
from vse.features.data_checks import check_box_photos
from vse.features.extractors.cnn import compute_scaled_size, image_to_tensor, normalize_pixels
from vse.features.extractors.images import ImageVectors, NetworkExtractor
from vse.features.extractors.proposals import (
    EdgeModel,
    Floats,
    collect_truth_boxes,
    find_edge_boxes,
    hash_boxes,
    import_opencv,
    read_boxes,
    run_selective_search,
)
from vse.features.extractors.regions import load_detector, propose_boxes
from vse.features.libraries import import_torchvision
from vse.features.settings.base import ExtractionArguments
from vse.features.settings.images import BoxesConfig, RegionsConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.images import clip_boxes
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import read_and_hash
from vse.pipeline.files.writing import sha256_json

torchvision = import_torchvision()


@dataclass(frozen=True)
class ImageWithBoxes:
    """An image, scaled for the network, and its boxes.

    pixels : (3, height, width) uint8
    boxes : (n, 4) float32, x1, y1, x2, y2 in pixels of the original image
    scores : (n,) float32
    image_size : width and height of the original image
    original_pixels : (3, height, width) uint8, input of the region-proposal network; None without such a network
    max_proposals : maximum number of proposals that are kept; None: all
    """

    pixels: Tensor
    boxes: Floats
    scores: Floats
    image_size: tuple[int, int]
    original_pixels: Tensor | None = None
    max_proposals: int | None = None


class BoxesExtractor(NetworkExtractor[ImageWithBoxes]):
    """A CNN that computes vectors of boxes: its first layers read the complete image, its later layers read each box.

    The first layers end with the layer ``map`` (a setting). ROI-align pools each box on the output of this layer to ``pool`` x
    ``pool`` cells. The later layers must accept this size. For example, after conv5_4 of VGG19, an image of 224 x 224 pixels
    has 14 x 14 cells. Images run one by one, so the vectors of an image do not depend on other images.

    With the setting ``layers`` instead of ``map``, all layers read the complete image. Each box is pooled on the output of
    each layer in ``layers`` and averaged over its cells. The vector of a box concatenates these averages.
    """

    config: BoxesConfig

    @classmethod
    def from_arguments(cls, config: BoxesConfig, arguments: ExtractionArguments) -> Self:
        return cls(config, arguments.weights_dir, arguments.device, arguments.dataset)

    def __init__(
        self, config: BoxesConfig, weights_dir: Path | None = None, device: str = "auto", dataset: Path | None = None
    ) -> None:
        super().__init__(config, device)
        backbone = load_backbone(config, weights_dir, notes=self.provenance)
        self.weights_sha256 = hash_weights(backbone)
        self._maps: list[Tensor] = []
        for layer in config.layers:
            find_module(backbone, layer).register_forward_hook(lambda _, __, output: self._maps.append(output))
        network = TruncatedNetwork(backbone, config.layers[-1] if config.layers else config.layer, config.grid)
        self.network = network.to(self.device).to(memory_format=torch.channels_last)
        if config.map is not None:
            find_module(backbone, config.map).register_forward_hook(lambda _, __, output: self._pool_boxes(output))
        self._relative_boxes, self._input_size, self._dim = torch.zeros(1, 4), (1, 1), 0
        self._given_boxes: dict[int, Floats] | None = None
        self._edge_model: EdgeModel | None = None
        self._detector: nn.Module | None = None
        self._has_truth_boxes, self._limited_ids = False, frozenset[int]()
        self.extra_hashes = self._load_and_hash_sources(weights_dir, dataset)
        if config.boxes in ("edge_boxes", "selective_search"):
            self.provenance = {**self.provenance, "opencv": import_opencv().__version__}
        self._try_blank_image()

    def prepare(self, image: Image.Image, image_id: int) -> ImageWithBoxes:
        """Return the scaled image and its boxes. :meth:`compute_vectors` adds the boxes of a region-proposal network later."""
        boxes, scores = self._find_boxes(image, image_id)
        size = compute_scaled_size(image.size, self.config.shorter, self.config.longer)
        small = image_to_tensor(image.resize(size, Image.Resampling.BILINEAR))
        original = image_to_tensor(image) if self._detector is not None else None
        return ImageWithBoxes(small, boxes, scores, image.size, original, self._find_box_limit(image_id))

    def compute_vectors(self, batch: Sequence[ImageWithBoxes]) -> list[ImageVectors]:
        return [
            self._compute_image_vectors(self._add_proposals(item) if self._detector is not None else item) for item in batch
        ]

    def _load_and_hash_sources(self, weights_dir: Path | None, dataset: Path | None) -> dict[str, str]:
        """Load the given boxes, or the model that proposes boxes; return the hashes of the loaded files or boxes, by name.

        If training images have a limit of boxes (the setting ``train_boxes``), their ids are also read from ``dataset`` and
        hashed.
        """
        config = self.config
        if config.has_box_file and dataset is not None:
            check_box_photos(Path(config.boxes), load_dataset_file(dataset))
        if config.boxes != "phrases" and config.train_boxes is None:
            return self._load_and_hash_proposer(weights_dir)
        if dataset is None:
            raise ValueError("these boxes depend on the data set, but no data set was given")
        loaded = load_dataset_file(dataset)
        if config.boxes == "phrases":
            self._given_boxes, self._has_truth_boxes = collect_truth_boxes(loaded), True
            return {"boxes_sha256": hash_boxes(self._given_boxes)}
        self._limited_ids = frozenset(image.imgid for image in loaded.images if image.split in ("train", "restval"))
        return {"train_ids_sha256": sha256_json(sorted(self._limited_ids)), **self._load_and_hash_proposer(weights_dir)}

    def _load_and_hash_proposer(self, weights_dir: Path | None) -> dict[str, str]:
        config = self.config
        if config.has_box_file:
            self._given_boxes, sha256 = read_and_hash(Path(config.boxes), read_boxes)
            return {"boxes_sha256": sha256}
        if config.boxes == "edge_boxes" and config.edge_model is not None:
            self._edge_model, sha256 = read_and_hash(Path(config.edge_model), EdgeModel)
            return {"edge_model_sha256": sha256}
        if config.boxes == "rpn":
            proposer = RegionsConfig(
                name=config.name, model=config.proposer, weights=config.proposer_weights, seed=config.seed,
                shorter=config.shorter, longer=config.longer, proposals=config.n_boxes,
            )  # fmt: skip
            detector = load_detector(proposer, weights_dir)
            digest = hash_weights(detector)
            self._detector = detector.to(self.device)
            return {"proposer_sha256": digest}
        return {}

    def _find_boxes(self, image: Image.Image, image_id: int) -> tuple[Floats, Floats]:
        """Return boxes (n, 4) and scores (n,) of an image, clipped to the image except for ground-truth boxes.

        Both are empty if a region-proposal network finds the boxes, because it runs later.
        """
        config, pixels = self.config, np.asarray(image)
        n_boxes = self._find_box_limit(image_id)
        if self._given_boxes is not None:
            given = self._given_boxes.get(image_id, np.empty((0, 4), np.float32))[:n_boxes]
            boxes = clip_boxes(given, image.size, f"{config.boxes}: image {image_id}")
            return given if self._has_truth_boxes else boxes, np.ones(len(boxes), np.float32)
        if config.boxes == "edge_boxes":
            boxes, scores = find_edge_boxes(pixels, config.n_boxes, self._edge_model, config.thin_edges)
        elif config.boxes == "selective_search":
            boxes, scores = run_selective_search(pixels, config.n_boxes)
        else:
            return np.empty((0, 4), np.float32), np.empty(0, np.float32)
        return clip_boxes(boxes[:n_boxes], image.size, f"image {image_id}"), scores[:n_boxes]

    def _find_box_limit(self, image_id: int) -> int | None:
        """Return the setting ``train_boxes``, the limit of boxes, if it applies to this image; None: no limit."""
        return self.config.train_boxes if image_id in self._limited_ids else None

    def _add_proposals(self, item: ImageWithBoxes) -> ImageWithBoxes:
        """Return the image with the boxes of the region-proposal network or, if it finds none, one box around the image."""
        assert item.original_pixels is not None
        with torch.inference_mode():
            proposals = propose_boxes(self._detector, move_tensor(item.original_pixels, self.device))
        height, width = proposals.input_size
        boxes = proposals.boxes.cpu().numpy() * np.asarray(
            [item.image_size[0] / width, item.image_size[1] / height] * 2, np.float32
        )
        boxes, scores = np.clip(boxes, 0, np.asarray(item.image_size * 2, np.float32)), proposals.scores.cpu().numpy()
        if not len(boxes):
            boxes, scores = np.asarray([[0, 0, *item.image_size]], np.float32), np.zeros(1, np.float32)
        return replace(item, boxes=boxes[: item.max_proposals], scores=scores[: item.max_proposals], original_pixels=None)

    def _compute_image_vectors(self, item: ImageWithBoxes) -> ImageVectors:
        config = self.config
        if not len(item.boxes):
            return ImageVectors(np.empty((0, self._dim), np.float32), item.boxes, item.scores, item.image_size)
        images = normalize_pixels(item.pixels[None], config.mean, config.std, self.device)
        self._input_size = (images.shape[2], images.shape[3])
        relative = (item.boxes / np.asarray(item.image_size * 2, np.float32)).clip(0, 1)
        with torch.inference_mode(), autocast(config.precision, self.device):
            features = self._average_layers(images, relative) if config.layers else self._run_later_layers(images, relative)
        features = nn.functional.normalize(features, dim=1) if config.normalize else features
        return ImageVectors(features.cpu().numpy(), item.boxes, item.scores, item.image_size)

    def _run_later_layers(self, images: Tensor, relative_boxes: Floats) -> Tensor:
        """Return the vector of each box by the layers after ``map``: (n_boxes, dim).

        ``relative_boxes`` are x1, y1, x2, y2 as fractions of the image's width and height.
        """
        config, parts = self.config, []
        for k in range(0, len(relative_boxes), config.chunk):
            self._relative_boxes = torch.from_numpy(relative_boxes[k : k + config.chunk]).to(self.device)
            parts.append(self.network(images).float())
        features = torch.cat(parts)
        if len(features) != len(relative_boxes):
            raise UserError(f"layer {config.layer!r} does not come after the map {config.map!r}; choose a later layer")
        return features

    def _average_layers(self, images: Tensor, relative_boxes: Floats) -> Tensor:
        """Average each box over the cells of each of the ``layers``; return the averages, (n_boxes, channels of all layers).

        ``relative_boxes`` are x1, y1, x2, y2 as fractions of the image's width and height.
        """
        self._relative_boxes = torch.from_numpy(relative_boxes).to(self.device)
        self._maps.clear()
        self.network(images)
        if len(self._maps) != len(self.config.layers):
            raise UserError(f"layers {', '.join(self.config.layers)}: list them in the order in which the network runs them")
        return torch.cat([self._pool_boxes(output).float().mean((2, 3)) for output in self._maps], 1)

    def _pool_boxes(self, output: Tensor) -> Tensor:
        """Return the pooled cells of the boxes ``self._relative_boxes`` on a feature map: (n_boxes, channels, pool, pool).

        A hook on the layer ``map`` replaces the layer's output by this result, so that the later layers read it.
        """
        if output.ndim != 4:
            names = self.config.map or ", ".join(self.config.layers)
            raise UserError(f"{names}: the output has {output.ndim} axes; a layer with height and width is needed")
        (rows, columns), (height, width) = output.shape[2:], self._input_size
        down, across = compute_cells_per_pixel(rows, height) * height, compute_cells_per_pixel(columns, width) * width
        boxes = self._relative_boxes * self._relative_boxes.new_tensor([across, down, across, down])
        pooled: Tensor = torchvision.ops.roi_align(output.float(), [boxes], self.config.pool, aligned=True)
        return pooled.to(output.dtype)

    def _try_blank_image(self) -> None:
        """Compute the vectors of two boxes of a blank image. Raises UserError if the layers do not fit together."""
        config, side = self.config, self.config.shorter
        boxes = np.asarray([[0, 0, side, side], [0, 0, side / 2, side / 2]], np.float32)
        try:
            blank = ImageWithBoxes(torch.zeros(3, side, side, dtype=torch.uint8), boxes, boxes[:, 0], (side, side))
            self._dim = self._compute_image_vectors(blank).features.shape[1]
        except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            chosen = f"layers {', '.join(config.layers)}" if config.layers else f"map {config.map!r}, layer {config.layer!r}"
            raise UserError(f"{config.model}, {chosen}: cannot be used ({reason})") from None


def compute_cells_per_pixel(cells: int, pixels: int) -> float:
    """Return the number of a feature map's cells per input pixel along one side, the inverse of the map's stride.

    The stride, pixels per cell, is rounded to the nearest power of two if it changes by less than 20%. For example, a side of
    600 pixels has 37 cells at stride 16, although 600 / 37 is 16.2.
    """
    stride = 2.0 ** round(math.log2(pixels / cells))
    return 1 / stride if abs(pixels / cells / stride - 1) < 0.2 else cells / pixels
