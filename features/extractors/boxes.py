"""Vectors of given or proposed boxes, by ROI-align on a CNN (two-branch paper, section 4.3)."""

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

from vse.features.backbones.device import moved
from vse.features.backbones.networks import LayerOutput, autocast, load_backbone, module_named, weights_sha256
from vse.features.data_checks import check_boxes_of
from vse.features.extractors.cnn import as_tensor, normalized, scaled
from vse.features.extractors.images import NetworkExtractor, Vectors
from vse.features.extractors.proposals import (
    EdgeModel,
    Floats,
    boxes_sha256,
    edge_boxes,
    inside,
    opencv,
    read_boxes,
    selective_search,
    truth_boxes,
)
from vse.features.extractors.regions import load_detector, propose
from vse.features.settings.base import Job
from vse.features.settings.images import BoxesConfig, RegionsConfig
from vse.features.vision import torchvision
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import read_and_hash
from vse.pipeline.files.writing import sha256_json


@dataclass(frozen=True)
class ImageWithBoxes:
    """An image (3, height, width) uint8, scaled for the network, and its boxes in pixels of the original.

    ``original`` is the image before, for the proposal network that has yet to find the boxes, ``at_most`` so many.
    """

    pixels: Tensor
    boxes: Floats
    scores: Floats
    size: tuple[int, int]
    original: Tensor | None = None
    at_most: int | None = None


class BoxesExtractor(NetworkExtractor[ImageWithBoxes]):
    """A CNN that reads a whole image up to the layer ``map``, and from there on each of its boxes.

    Boxes are pooled on the map (ROI-align) to ``pool`` x ``pool``, the size that the map has for an image of the
    network's own input size, so the layers after it see what they were trained on: with VGG19 conv5_4's output, 14 x 14,
    then the last pooling and fc6, fc7. Images run one by one, so a box's vector depends on its image alone.
    """

    config: BoxesConfig

    @classmethod
    def from_job(cls, config: BoxesConfig, job: Job) -> Self:
        """Return the extractor with the network's weights and the boxes of the job's data set."""
        return cls(config, job.weights_dir, job.device, job.dataset)

    def __init__(
        self, config: BoxesConfig, weights_dir: Path | None = None, device: str = "auto", dataset: Path | None = None
    ) -> None:
        super().__init__(config, device)
        backbone = load_backbone(config, weights_dir, notes=self.notes)
        self.weights_sha256 = weights_sha256(backbone)
        self.network = LayerOutput(backbone, config.layer, config.grid).to(self.device).to(memory_format=torch.channels_last)
        module_named(backbone, config.map).register_forward_hook(lambda _, __, output: self._pooled(output))
        self._rois, self._input, self._dim = torch.zeros(1, 4), (1, 1), 0
        self._given: dict[int, Floats] | None = None
        self._edge_model: EdgeModel | None = None
        self._detector: nn.Module | None = None
        self._truths, self._few = False, frozenset[int]()
        self.extra = self._open_source(weights_dir, dataset)
        if config.boxes in ("edge_boxes", "selective_search"):
            self.notes = {**self.notes, "opencv": opencv().__version__}
        self._try_once()

    def prepare(self, image: Image.Image, image_id: int) -> ImageWithBoxes:
        """The image, scaled, and its boxes, unless the network finds them."""
        boxes, scores = self._boxes(image, image_id)
        size = scaled(image.size, self.config.shorter, self.config.longer)
        small = as_tensor(image.resize(size, Image.Resampling.BILINEAR))
        original = as_tensor(image) if self._detector is not None else None
        return ImageWithBoxes(small, boxes, scores, image.size, original, self._at_most(image_id))

    def compute(self, batch: Sequence[ImageWithBoxes]) -> list[Vectors]:
        """The vectors of each image's boxes."""
        return [self._vectors(self._proposed(item) if self._detector is not None else item) for item in batch]

    def _open_source(self, weights_dir: Path | None, dataset: Path | None) -> dict[str, str]:
        """Read what says where boxes are, of which images how many; returns the hashes of what was read."""
        config = self.config
        if config.from_file and dataset is not None:
            check_boxes_of(Path(config.boxes), load_dataset_file(dataset))
        if config.boxes != "phrases" and config.train_boxes is None:
            return self._open_proposals(weights_dir)
        if dataset is None:
            raise ValueError("which boxes are read depends on the data set, which is not given")
        loaded = load_dataset_file(dataset)
        if config.boxes == "phrases":
            self._given, self._truths = truth_boxes(loaded), True
            return {"boxes_sha256": boxes_sha256(self._given)}
        self._few = frozenset(image.imgid for image in loaded.images if image.split in ("train", "restval"))
        return {"train_ids_sha256": sha256_json(sorted(self._few)), **self._open_proposals(weights_dir)}

    def _open_proposals(self, weights_dir: Path | None) -> dict[str, str]:
        """Read what says where boxes are, other than a data set; returns the hashes of what was read."""
        config = self.config
        if config.from_file:
            self._given, sha256 = read_and_hash(Path(config.boxes), read_boxes)
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
            digest = weights_sha256(detector)
            self._detector = detector.to(self.device)
            return {"proposer_sha256": digest}
        return {}

    def _boxes(self, image: Image.Image, image_id: int) -> tuple[Floats, Floats]:
        """Boxes and scores; ground-truth boxes as the data set has them, all others cut off at the image's edges."""
        config, pixels = self.config, np.asarray(image)
        n_boxes = self._at_most(image_id)
        if self._given is not None:
            given = self._given.get(image_id, np.empty((0, 4), np.float32))[:n_boxes]
            boxes = inside(given, image.size, f"{config.boxes}: image {image_id}")
            return given if self._truths else boxes, np.ones(len(boxes), np.float32)
        if config.boxes == "edge_boxes":
            boxes, scores = edge_boxes(pixels, config.n_boxes, self._edge_model, config.thin_edges)
        elif config.boxes == "selective_search":
            boxes, scores = selective_search(pixels, config.n_boxes)
        else:
            return np.empty((0, 4), np.float32), np.empty(0, np.float32)
        return inside(boxes[:n_boxes], image.size, f"image {image_id}"), scores[:n_boxes]

    def _at_most(self, image_id: int) -> int | None:
        """How many boxes of an image are taken; None: all that there are."""
        return self.config.train_boxes if image_id in self._few else None

    def _proposed(self, item: ImageWithBoxes) -> ImageWithBoxes:
        """The same image with the boxes that the region-proposal network finds."""
        assert item.original is not None
        with torch.inference_mode():
            proposals = propose(self._detector, moved(item.original, self.device))
        height, width = proposals.size
        boxes = proposals.boxes.cpu().numpy() * np.asarray([item.size[0] / width, item.size[1] / height] * 2, np.float32)
        boxes, scores = np.clip(boxes, 0, np.asarray(item.size * 2, np.float32)), proposals.scores.cpu().numpy()
        if not len(boxes):
            boxes, scores = np.asarray([[0, 0, *item.size]], np.float32), np.zeros(1, np.float32)
        return replace(item, boxes=boxes[: item.at_most], scores=scores[: item.at_most], original=None)

    def _vectors(self, item: ImageWithBoxes) -> Vectors:
        config = self.config
        if not len(item.boxes):
            return Vectors(np.empty((0, self._dim), np.float32), item.boxes, item.scores, item.size)
        images = normalized(item.pixels[None], config.mean, config.std, self.device)
        self._input = (images.shape[2], images.shape[3])
        relative = (item.boxes / np.asarray(item.size * 2, np.float32)).clip(0, 1)
        parts = []
        for k in range(0, len(relative), config.chunk):
            self._rois = torch.from_numpy(relative[k : k + config.chunk]).to(self.device)
            with torch.inference_mode(), autocast(config.precision, self.device):
                parts.append(self.network(images).float())
        features = torch.cat(parts)
        if len(features) != len(relative):
            raise UserError(f"layer {config.layer!r} does not come after the map {config.map!r}")
        features = nn.functional.normalize(features, dim=1) if config.normalize else features
        return Vectors(features.cpu().numpy(), item.boxes, item.scores, item.size)

    def _pooled(self, output: Tensor) -> Tensor:
        """What the layers after the map read instead of it: the boxes, which are given as parts of the image's sides."""
        if output.ndim != 4:
            raise UserError(f"map {self.config.map!r} gives {output.ndim} axes; a layer with height and width is needed")
        (rows, columns), (height, width) = output.shape[2:], self._input
        down, across = cells_per_pixel(rows, height) * height, cells_per_pixel(columns, width) * width
        boxes = self._rois * self._rois.new_tensor([across, down, across, down])
        pooled: Tensor = torchvision.ops.roi_align(output.float(), [boxes], self.config.pool, aligned=True)
        return pooled.to(output.dtype)

    def _try_once(self) -> None:
        """Run a blank image with two boxes through, so that layers that do not fit are refused at once."""
        config, side = self.config, self.config.shorter
        boxes = np.asarray([[0, 0, side, side], [0, 0, side / 2, side / 2]], np.float32)
        try:
            blank = ImageWithBoxes(torch.zeros(3, side, side, dtype=torch.uint8), boxes, boxes[:, 0], (side, side))
            self._dim = self._vectors(blank).features.shape[1]
        except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise UserError(f"{config.model}, map {config.map!r}, layer {config.layer!r}: cannot be used ({reason})") from None


def cells_per_pixel(cells: int, pixels: int) -> float:
    """How many cells of a map an input pixel is: one over the map's stride.

    Strides are powers of two, but a map of 600 pixels at stride 16 has 37 cells, not 37.5: so the nearest power of two is
    taken, unless it is far off.
    """
    stride = 2.0 ** round(math.log2(pixels / cells))
    return 1 / stride if abs(pixels / cells / stride - 1) < 0.2 else cells / pixels
