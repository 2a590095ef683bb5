"""Region features: the boxes that a Faster R-CNN finds, and the vector of its box head for each.

The default keeps the detector's own detections. ``selection: bottom_up`` keeps its proposals instead, each with the
highest score that a class gives it after a suppression class by class, which is how the bottom-up attention features
(Anderson et al., CVPR 2018) were made that SCAN and its successors read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from vse.features.backbones.device import move_tensor
from vse.features.backbones.networks import autocast, load_backbone, weights_sha256
from vse.features.extractors.cnn import image_to_tensor, scaled_size
from vse.features.extractors.images import ImageVectors, NetworkExtractor
from vse.features.settings.images import RegionsConfig
from vse.features.vision import torchvision
from vse.pipeline.errors import UserError, did_you_mean

SMALLEST = 1e-2  # sides of a box, in pixels of the network's input


@dataclass(frozen=True)
class Proposals:
    """Feature maps, boxes (n, 4) and their objectness (n,), and the height and width of the network's input."""

    maps: dict[str, Tensor]
    boxes: Tensor
    scores: Tensor
    size: tuple[int, int]


@dataclass(frozen=True)
class ScoredBoxes:
    """Boxes (n, 4) of an image, xyxy in pixels of the network's input, scores (n,), and vectors (n, dim)."""

    boxes: Tensor
    scores: Tensor
    features: Tensor


class RegionsExtractor(NetworkExtractor[Tensor]):
    """A Faster R-CNN ready to turn image files into boxes and their vectors.

    Images run one by one: side by side, each would be padded to the largest, and its features would depend on its
    neighbours.
    """

    config: RegionsConfig

    def __init__(self, config: RegionsConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        super().__init__(config, device)
        self.detector = load_detector(config, weights_dir)
        self.weights_sha256 = weights_sha256(self.detector)
        self.detector = self.detector.to(self.device)

    def prepare(self, image: Image.Image, image_id: int) -> Tensor:
        """The image as (3, height, width) uint8; the detector itself scales it."""
        scaled_size(image.size, self.config.shorter, self.config.longer)
        return image_to_tensor(image)

    def compute(self, batch: Sequence[Tensor]) -> list[ImageVectors]:
        """Boxes in pixels of each image, inside it, best first, with their scores and vectors."""
        return [self._regions(pixels) for pixels in batch]

    def _regions(self, pixels: Tensor) -> ImageVectors:
        height, width = pixels.shape[1:]
        with torch.inference_mode(), autocast(self.config.precision, self.device):
            kept, size = detect(self.detector, move_tensor(pixels, self.device), self.config)
        scale = torch.tensor([width / size[1], height / size[0]] * 2, device=kept.boxes.device)
        boxes = torchvision.ops.clip_boxes_to_image(kept.boxes.float() * scale, (height, width))
        features = kept.features.float()
        features = nn.functional.normalize(features, dim=1) if self.config.normalize else features
        return ImageVectors(features.cpu().numpy(), boxes.cpu().numpy(), kept.scores.float().cpu().numpy(), (width, height))


def load_detector(config: RegionsConfig, weights_dir: Path | None = None) -> nn.Module:
    """The Faster R-CNN of ``config`` with its weights, in evaluation mode, on the CPU."""
    options: dict[str, Any] = {
        "weights_backbone": None,
        "min_size": config.shorter,
        "max_size": config.longer,
        "rpn_pre_nms_top_n_test": max(1000, config.proposals),
        "rpn_post_nms_top_n_test": config.proposals,
    }
    known = [name for name in torchvision.models.list_models(torchvision.models.detection) if name.startswith("fasterrcnn")]
    if config.model not in known:
        raise UserError(f"{config.model!r} is no Faster R-CNN of torchvision{did_you_mean(config.model, known)}")
    detector = load_backbone(config, weights_dir, torchvision.models.detection, **options)
    if config.model == "fasterrcnn_resnet50_fpn" and config.weights != "random":
        for module in detector.modules():  # its weights were trained with batch norms that add nothing to the variance
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 0.0
    fix_scales(detector)
    return detector


def fix_scales(detector: Any) -> None:
    """Let the detector learn the strides of its maps from an image of 256 x 256, which all of them divide.

    torchvision takes them from the first image it sees, wrongly if that one is small, and keeps them for all others.
    """
    with torch.inference_mode():
        maps = detector.backbone(torch.zeros(1, 3, 256, 256))
        detector.roi_heads.box_roi_pool(maps, [torch.zeros(1, 4)], [(256, 256)])


def propose(detector: Any, pixels: Tensor) -> Proposals:
    """What the region-proposal network finds in one image (3, height, width), 0-255, best first."""
    images, _ = detector.transform([pixels.float() / 255])
    maps = detector.backbone(images.tensors)
    rpn, levels = detector.rpn, list(maps.values())
    objectness, deltas = rpn.head(levels)
    n_anchors = [level[0].numel() for level in objectness]
    scores, shifts = torchvision.models.detection.rpn.concat_box_prediction_layers(objectness, deltas)
    boxes = rpn.box_coder.decode(shifts, rpn.anchor_generator(images, levels)).view(1, -1, 4)
    kept, values = rpn.filter_proposals(boxes, scores, images.image_sizes, n_anchors)
    return Proposals(maps, kept[0], values[0], images.image_sizes[0])


def detect(detector: Any, pixels: Tensor, config: RegionsConfig) -> tuple[ScoredBoxes, tuple[int, int]]:
    """The boxes of one image (3, height, width), best first, and the height and width of the network's input.

    As many as score more than ``config.score``, within ``min_boxes`` and ``max_boxes``; the whole image if there is
    no box at all.
    """
    proposed = propose(detector, pixels)
    proposals, size, heads = proposed.boxes, proposed.size, detector.roi_heads

    def vectors(boxes: Tensor) -> Tensor:
        features: Tensor = heads.box_head(heads.box_roi_pool(proposed.maps, [boxes], [size]))
        return features

    if len(proposals) == 0:
        return _whole_image(size, proposals, vectors), size
    features = vectors(proposals)
    logits, deltas = heads.box_predictor(features)
    scores = logits.float().softmax(-1)[:, 1:]  # without the background
    if config.selection == "bottom_up":
        best = _highest_kept(proposals, scores, config.nms)
        order = _kept(best, config)
        kept = ScoredBoxes(proposals[order], best[order], features[order])
    else:
        regressed = heads.box_coder.decode(deltas.float(), [proposals])[:, 1:]
        boxes, best = _suppressed(torchvision.ops.clip_boxes_to_image(regressed, size), scores, config)
        order = _kept(best, config)
        kept = ScoredBoxes(boxes[order], best[order], vectors(boxes[order]) if len(order) else features[:0])
    return (kept if len(order) else _whole_image(size, proposals, vectors)), size


def _highest_kept(boxes: Float[Tensor, "n 4"], scores: Float[Tensor, "n classes"], overlap: float) -> Float[Tensor, " n"]:
    """For each box the highest of its class scores that survives the suppression within the class, 0 if none does."""
    best = torch.zeros(len(boxes), device=boxes.device)
    for of_class in scores.T:
        kept = torchvision.ops.nms(boxes, of_class, overlap)
        best[kept] = torch.maximum(best[kept], of_class[kept])
    return best


def _suppressed(
    boxes: Float[Tensor, "n classes 4"], scores: Float[Tensor, "n classes"], config: RegionsConfig
) -> tuple[Float[Tensor, "m 4"], Float[Tensor, " m"]]:
    """Boxes of all classes after the suppression within each, best first.

    Suppression goes from the best down, so it is done on ever more of the best, until they give ``max_boxes``.
    """
    n_classes = scores.shape[1]
    order = scores.flatten().argsort(descending=True, stable=True)
    take = 64 * config.max_boxes
    while True:
        best = order[:take]
        candidates, values, classes = boxes.flatten(0, 1)[best], scores.flatten()[best], best % n_classes
        large = torchvision.ops.remove_small_boxes(candidates, SMALLEST)
        kept = large[torchvision.ops.batched_nms(candidates[large], values[large], classes[large], config.nms)]
        if len(kept) >= config.max_boxes or take >= len(order):
            return candidates[kept], values[kept]
        take *= 4


def _kept(scores: Tensor, config: RegionsConfig) -> Tensor:
    """Positions of the boxes to keep, best first."""
    order = scores.argsort(descending=True, stable=True)
    above = int((scores > config.score).sum())
    return order[: min(max(above, config.min_boxes), config.max_boxes)]


def _whole_image(size: tuple[int, int], like: Tensor, vectors: Callable[[Tensor], Tensor]) -> ScoredBoxes:
    box = like.new_tensor([[0, 0, size[1], size[0]]])
    return ScoredBoxes(box, like.new_zeros(1), vectors(box))
