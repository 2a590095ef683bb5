"""The extractor ``regions``: the boxes that a Faster R-CNN finds, each with the output of the detector's box head.

The boxes are the detections or, with ``selection: bottom_up``, the proposals, as in the bottom-up attention features (Anderson
et al., CVPR 2018) of SCAN and its successors. Non-maximum suppression runs in each class. The score of a proposal is its
highest score in the classes that keep the proposal.
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
from vse.features.backbones.networks import autocast, hash_weights, load_backbone
from vse.features.extractors.cnn import compute_scaled_size, image_to_tensor
from vse.features.extractors.images import ImageVectors, NetworkExtractor
from vse.features.libraries import import_torchvision
from vse.features.settings.images import RegionsConfig
from vse.pipeline.errors import UserError, did_you_mean

torchvision = import_torchvision()

MIN_BOX_SIDE = 1e-2  # pixels of the network's input


@dataclass(frozen=True)
class ProposalNetworkOutput:
    """The output of the region-proposal network for one image.

    feature_maps : feature maps by name
    boxes : (n, 4) boxes, x1, y1, x2, y2 in pixels of the network's input
    scores : (n,) objectness of the boxes
    input_size : height and width of the network's input
    """

    feature_maps: dict[str, Tensor]
    boxes: Tensor
    scores: Tensor
    input_size: tuple[int, int]


@dataclass(frozen=True)
class BoxesWithVectors:
    """Selected boxes of an image.

    boxes : (n, 4), x1, y1, x2, y2 in pixels of the network's input
    scores : (n,) scores of the boxes
    features : (n, dim) vectors of the boxes
    """

    boxes: Tensor
    scores: Tensor
    features: Tensor


class RegionsExtractor(NetworkExtractor[Tensor]):
    """A Faster R-CNN that finds boxes in image files and computes their vectors.

    Images are computed one by one, because padding in a batch would change the features of smaller images.
    """

    config: RegionsConfig

    def __init__(self, config: RegionsConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        super().__init__(config, device)
        self.detector = load_detector(config, weights_dir, self.provenance)
        self.weights_sha256 = hash_weights(self.detector)
        self.detector = self.detector.to(self.device)

    def prepare(self, image: Image.Image, image_id: int) -> Tensor:
        """Return the image as (3, height, width) uint8; the detector scales it.

        Raises :class:`UnsuitableImageSize` if the image is too narrow or large.
        """
        compute_scaled_size(image.size, self.config.shorter, self.config.longer)
        return image_to_tensor(image)

    def compute_vectors(self, batch: Sequence[Tensor]) -> list[ImageVectors]:
        """Return the boxes of each image in pixels, clipped to the image, best first, with scores and vectors."""
        return [self._find_regions(pixels) for pixels in batch]

    def _find_regions(self, pixels: Tensor) -> ImageVectors:
        height, width = pixels.shape[1:]
        with torch.inference_mode(), autocast(self.config.precision, self.device):
            found, size = detect_boxes(self.detector, move_tensor(pixels, self.device), self.config)
        scale = torch.tensor([width / size[1], height / size[0]] * 2, device=found.boxes.device)
        boxes = torchvision.ops.clip_boxes_to_image(found.boxes.float() * scale, (height, width))
        features = found.features.float()
        features = nn.functional.normalize(features, dim=1) if self.config.normalize else features
        return ImageVectors(features.cpu().numpy(), boxes.cpu().numpy(), found.scores.float().cpu().numpy(), (width, height))


def load_detector(config: RegionsConfig, weights_dir: Path | None = None, notes: dict[str, Any] | None = None) -> nn.Module:
    """Load the Faster R-CNN of ``config`` with its weights, in evaluation mode, on the CPU.

    ``notes`` receives the name and hash of the weights file. Raises UserError if torchvision has no such model, or if the
    weights are missing.
    """
    options: dict[str, Any] = {
        "weights_backbone": None,
        "min_size": config.shorter,
        "max_size": config.longer,
        "rpn_pre_nms_top_n_test": max(1000, config.proposals),
        "rpn_post_nms_top_n_test": config.proposals,
    }
    known = [name for name in torchvision.models.list_models(torchvision.models.detection) if name.startswith("fasterrcnn")]
    if config.model not in known:
        raise UserError(f"{config.model!r} is not a Faster R-CNN of torchvision{did_you_mean(config.model, known)}")
    detector = load_backbone(config, weights_dir, torchvision.models.detection, notes, **options)
    if config.model == "fasterrcnn_resnet50_fpn" and config.weights != "random":
        for module in detector.modules():  # its weights were trained with batch norms without an epsilon
            if isinstance(module, nn.BatchNorm2d):
                module.eps = torch.finfo(torch.float32).tiny  # changes no variance; torch 2.11 refuses 0
    set_map_strides(detector)
    return detector


def set_map_strides(detector: Any) -> None:
    """Run the detector's backbone once on 256 x 256 pixels, to set the strides of the feature maps.

    torchvision computes the strides from the first image and keeps them; a small first image would give wrong strides.
    """
    with torch.inference_mode():
        maps = detector.backbone(torch.zeros(1, 3, 256, 256))
        detector.roi_heads.box_roi_pool(maps, [torch.zeros(1, 4)], [(256, 256)])


def propose_boxes(detector: Any, pixels: Tensor) -> ProposalNetworkOutput:
    """Return the boxes that the region-proposal network finds in an image (3, height, width), 0-255, best first."""
    images, _ = detector.transform([pixels.float() / 255])
    maps = detector.backbone(images.tensors)
    rpn, levels = detector.rpn, list(maps.values())
    objectness, deltas = rpn.head(levels)
    n_anchors = [level[0].numel() for level in objectness]
    scores, shifts = torchvision.models.detection.rpn.concat_box_prediction_layers(objectness, deltas)
    boxes = rpn.box_coder.decode(shifts, rpn.anchor_generator(images, levels)).view(1, -1, 4)
    kept, values = rpn.filter_proposals(boxes, scores, images.image_sizes, n_anchors)
    return ProposalNetworkOutput(maps, kept[0], values[0], images.image_sizes[0])


def detect_boxes(detector: Any, pixels: Tensor, config: RegionsConfig) -> tuple[BoxesWithVectors, tuple[int, int]]:
    """Return the boxes of one image (3, height, width), best first, and the height and width of the network's input.

    The result has the boxes with scores above ``config.score``, but at least ``min_boxes`` and at most ``max_boxes`` boxes. If
    the detector finds no box, the only box is the complete image.
    """
    proposed = propose_boxes(detector, pixels)
    proposals, size, heads = proposed.boxes, proposed.input_size, detector.roi_heads

    def compute_vectors(boxes: Tensor) -> Tensor:
        features: Tensor = heads.box_head(heads.box_roi_pool(proposed.feature_maps, [boxes], [size]))
        return features

    if len(proposals) == 0:
        return _build_whole_image_box(size, proposals, compute_vectors), size
    features = compute_vectors(proposals)
    logits, deltas = heads.box_predictor(features)
    scores = logits.float().softmax(-1)[:, 1:]  # without the background
    if config.selection == "bottom_up":
        best = _compute_scores_after_nms(proposals, scores, config.nms)
        order = _find_best_boxes(best, config)
        selected = BoxesWithVectors(proposals[order], best[order], features[order])
    else:
        regressed = heads.box_coder.decode(deltas.float(), [proposals])[:, 1:]
        boxes, best = _suppress_boxes_by_class(torchvision.ops.clip_boxes_to_image(regressed, size), scores, config)
        order = _find_best_boxes(best, config)
        selected = BoxesWithVectors(boxes[order], best[order], compute_vectors(boxes[order]) if len(order) else features[:0])
    return (selected if len(order) else _build_whole_image_box(size, proposals, compute_vectors)), size


def _compute_scores_after_nms(
    boxes: Float[Tensor, "n 4"], scores: Float[Tensor, "n classes"], overlap: float
) -> Float[Tensor, " n"]:
    """Return each box's highest score in the classes that keep the box after non-maximum suppression; 0 if no class does."""
    best = torch.zeros(len(boxes), device=boxes.device)
    for class_scores in scores.T:
        kept = torchvision.ops.nms(boxes, class_scores, overlap)
        best[kept] = torch.maximum(best[kept], class_scores[kept])
    return best


def _suppress_boxes_by_class(
    boxes: Float[Tensor, "n classes 4"], scores: Float[Tensor, "n classes"], config: RegionsConfig
) -> tuple[Float[Tensor, "m 4"], Float[Tensor, " m"]]:
    """Return the boxes of all classes after non-maximum suppression within each class, best first, and their scores.

    Only boxes with higher scores can suppress a box. Suppression therefore starts with the best boxes, and is repeated with
    more boxes until ``max_boxes`` remain or all boxes were used.
    """
    n_classes = scores.shape[1]
    order = scores.flatten().argsort(descending=True, stable=True)
    n_candidates = 64 * config.max_boxes
    while True:
        best = order[:n_candidates]
        candidates, values, classes = boxes.flatten(0, 1)[best], scores.flatten()[best], best % n_classes
        large = torchvision.ops.remove_small_boxes(candidates, MIN_BOX_SIDE)
        kept = large[torchvision.ops.batched_nms(candidates[large], values[large], classes[large], config.nms)]
        if len(kept) >= config.max_boxes or n_candidates >= len(order):
            return candidates[kept], values[kept]
        n_candidates *= 4


def _find_best_boxes(scores: Tensor, config: RegionsConfig) -> Tensor:
    order = scores.argsort(descending=True, stable=True)
    above = int((scores > config.score).sum())
    return order[: min(max(above, config.min_boxes), config.max_boxes)]


def _build_whole_image_box(
    size: tuple[int, int], like: Tensor, compute_vectors: Callable[[Tensor], Tensor]
) -> BoxesWithVectors:
    box = like.new_tensor([[0, 0, size[1], size[0]]])
    return BoxesWithVectors(box, like.new_zeros(1), compute_vectors(box))
