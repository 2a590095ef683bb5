"""Regions against torchvision's own detections, and against a loop for the bottom-up recipe."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.ops import FrozenBatchNorm2d, box_iou

from tests.features.conftest import extracted_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import list_extractor_inputs
from vse.features.extractors.regions import RegionsExtractor, detect_boxes, set_map_strides
from vse.features.settings.images import RegionsConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

SMALL = RegionsConfig(
    name="small", model="fasterrcnn_resnet50_fpn", weights="random", shorter=48, longer=64, proposals=30,
    min_boxes=5, max_boxes=5, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def extractor() -> RegionsExtractor:
    return RegionsExtractor(SMALL)


def photographs(n: int = 3) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes = [(90, 60), (50, 80), (64, 64)]
    return [
        Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)).resize(sizes[k % 3], Image.Resampling.BICUBIC)
        for k in range(n)
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2"])
def test_detections_are_torchvision_s(model: str, extractor: RegionsExtractor, monkeypatch: pytest.MonkeyPatch) -> None:
    same = extractor if model == SMALL.model else RegionsExtractor(SMALL.model_copy(update={"model": model}))
    detector: Any = same.detector
    monkeypatch.setattr(detector.roi_heads, "score_thresh", 0.0)
    monkeypatch.setattr(detector.roi_heads, "detections_per_img", 5)
    for picture in photographs():
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        with torch.inference_mode():
            expected = detector([pixels.float() / 255])[0]
        found = same.compute_vectors([pixels])[0]
        np.testing.assert_allclose(found.scores, expected["scores"], rtol=1e-5)
        np.testing.assert_allclose(found.boxes, expected["boxes"], rtol=1e-4, atol=1e-3)


def test_a_detection_s_vector_is_the_box_head_s_of_the_final_box(extractor: RegionsExtractor) -> None:
    pixels = torch.from_numpy(np.array(photographs()[0])).permute(2, 0, 1)
    detector: Any = extractor.detector
    with torch.inference_mode():
        found, size = detect_boxes(detector, pixels, SMALL)
        images, _ = detector.transform([pixels.float() / 255])
        maps = detector.backbone(images.tensors)
        slow = [detector.roi_heads.box_head(detector.roi_heads.box_roi_pool(maps, [box[None]], [size])) for box in found.boxes]
    assert found.features.shape == (5, 1024)
    torch.testing.assert_close(found.features, torch.cat(slow), rtol=1e-4, atol=1e-4)


def slow_bottom_up(boxes: torch.Tensor, scores: torch.Tensor, overlap: float) -> list[float]:
    """For every class, from the best box down, drop what overlaps; a box's score is its highest among classes that keep it."""
    best = [0.0] * len(boxes)
    iou = box_iou(boxes, boxes)
    for column in scores.T:
        kept: list[int] = []
        for i in sorted(range(len(boxes)), key=lambda i: -float(column[i])):
            if all(iou[i, j] <= overlap for j in kept):
                kept.append(i)
                best[i] = max(best[i], float(column[i]))
    return best


def test_bottom_up_boxes_are_those_of_a_loop(extractor: RegionsExtractor) -> None:
    config = SMALL.model_copy(update={"selection": "bottom_up", "nms": 0.3, "score": 0.4, "min_boxes": 3, "max_boxes": 12})
    detector: Any = extractor.detector
    pixels = torch.from_numpy(np.array(photographs()[0])).permute(2, 0, 1)
    with torch.inference_mode():
        images, _ = detector.transform([pixels.float() / 255])
        maps = detector.backbone(images.tensors)
        boxes = detector.rpn(images, maps)[0][0]
        vectors = detector.roi_heads.box_head(detector.roi_heads.box_roi_pool(maps, [boxes], images.image_sizes))
        scores = detector.roi_heads.box_predictor(vectors)[0].softmax(-1)[:, 1:]
        found, _ = detect_boxes(detector, pixels, config)
    best = slow_bottom_up(boxes, scores, 0.3)
    order = sorted(range(len(best)), key=lambda i: -best[i])
    n = min(max(sum(value > 0.4 for value in best), 3), 12)
    np.testing.assert_allclose(found.scores, [best[i] for i in order[:n]], rtol=1e-5)
    np.testing.assert_allclose(found.features, vectors[order[:n]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("score", "expected"), [(0.0, 9), (1.0, 4)])
def test_the_number_of_boxes_follows_the_scores(score: float, expected: int, extractor: RegionsExtractor) -> None:
    config = SMALL.model_copy(update={"score": score, "min_boxes": 4, "max_boxes": 9})
    pixels = torch.from_numpy(np.array(photographs()[0])).permute(2, 0, 1)
    with torch.inference_mode():
        found, _ = detect_boxes(extractor.detector, pixels, config)
    assert len(found.boxes) == expected
    assert (found.scores.diff() <= 0).all(), "best first"


@pytest.mark.nightly
def test_the_first_picture_does_not_set_the_scale_of_the_others(extractor: RegionsExtractor) -> None:
    small, large = (torch.zeros(3, *size, dtype=torch.uint8) for size in ((30, 90), (64, 64)))
    large[:, 10:40, 20:50] = 200
    after_small = RegionsExtractor(SMALL)
    after_small.compute_vectors([small])
    np.testing.assert_array_equal(
        after_small.compute_vectors([large])[0].features, extractor.compute_vectors([large])[0].features
    )


def test_a_picture_without_a_box_is_one_region(extractor: RegionsExtractor, monkeypatch: pytest.MonkeyPatch) -> None:
    detector: Any = extractor.detector
    monkeypatch.setattr(detector.rpn, "score_thresh", 2.0)
    found = extractor.compute_vectors([torch.zeros(3, 60, 90, dtype=torch.uint8)])[0]
    np.testing.assert_allclose(found.boxes, [[0, 0, 90, 60]], atol=1e-4)
    assert found.features.shape == (1, 1024)


@pytest.mark.nightly
def test_regions_depend_on_no_batch_or_shard_and_lie_inside(extractor: RegionsExtractor, few: Path, tmp_path: Path) -> None:
    own_few = Path(shutil.copytree(few.parent, tmp_path / "data")) / few.name
    dataset = load_dataset_file(own_few)
    for image, picture in zip(dataset.images, photographs(len(dataset.images)), strict=True):
        picture.save(dataset.image_path(image), quality=95)
    one, five = (extracted_cache(own_few, extractor, tmp_path / str(n) / "demo_small.h5", n) for n in (1, 5))
    assert one.key == five.key
    rows = np.arange(len(one.ids))
    found = FeatureReader(one).read_padded_regions(rows)
    np.testing.assert_array_equal(found.features, FeatureReader(five, memory_gb=0).read_padded_regions(rows).features)
    items = list_extractor_inputs(dataset, "image")
    for k in (0, 7, 11):
        alone = extractor.extract([items[k]])
        np.testing.assert_array_equal(alone.features, found.features[k][found.mask[k]])
    with h5py.File(five.path) as file:
        boxes, sizes, offsets = (file[name][:] for name in ("boxes", "image_size", "offsets"))
        np.testing.assert_array_equal(file["features"][:], found.features[found.mask])
    np.testing.assert_array_equal(offsets, one.offsets)
    assert sizes[:3].tolist() == [[90, 60], [50, 80], [64, 64]]
    limits = np.repeat(sizes, np.diff(one.offsets), axis=0)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= limits).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


@pytest.mark.nightly
def test_weights_trained_with_frozen_norms_are_read_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained: Any = torchvision.models.get_model(SMALL.model, weights=None, weights_backbone=None, min_size=48, max_size=64)
    reference: Any = torchvision.models.detection.FasterRCNN(
        torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
            backbone_name="resnet50", weights=None, norm_layer=lambda n: FrozenBatchNorm2d(n, eps=0.0)
        ),
        num_classes=91, min_size=48, max_size=64, box_score_thresh=0.0, box_detections_per_img=5,
        rpn_post_nms_top_n_test=30,
    )  # fmt: skip
    state = {name: value for name, value in trained.state_dict().items() if not name.endswith("num_batches_tracked")}
    reference.load_state_dict(state)
    torch.save(reference.state_dict(), tmp_path / "fasterrcnn_resnet50_fpn.pth")
    config = SMALL.model_copy(update={"weights": "COCO_V1"})
    pixels = torch.from_numpy(np.array(photographs()[0])).permute(2, 0, 1)
    set_map_strides(reference.eval())
    with torch.inference_mode():
        expected = reference([pixels.float() / 255])[0]
    found = RegionsExtractor(config, weights_dir=tmp_path).compute_vectors([pixels])[0]
    np.testing.assert_allclose(found.scores, expected["scores"], rtol=1e-5)


def test_a_model_that_is_no_detector_is_refused() -> None:
    for model in ("resnet50", "retinanet_resnet50_fpn", "timm/resnet18"):
        with pytest.raises(UserError, match="is not a Faster R-CNN of torchvision"):
            RegionsExtractor(SMALL.model_copy(update={"model": model}))
