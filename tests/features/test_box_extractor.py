from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import roi_align

from vse.features.backbones.model_folder import hash_tensors
from vse.features.backbones.networks import LayerOutput, load_backbone
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import dataset_items
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge
from vse.features.extractors import boxes as box_extractor
from vse.features.extractors.boxes import BoxesExtractor, cells_per_pixel
from vse.features.extractors.cnn import normalize_pixels
from vse.features.extractors.proposals import edge_boxes, read_boxes, selective_search, suppress_non_ridges
from vse.features.settings import load_feature
from vse.features.settings.images import BoxesConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

VGG = BoxesConfig(
    name="vgg", model="vgg11", weights="random", map="features.19", layer="classifier.4", shorter=224, longer=224,
    normalize=False, dtype="float32", n_boxes=6,
)  # fmt: skip
TINY = BoxesConfig(
    name="tiny", model="squeezenet1_1", weights="random", map="features.1", layer="features.2", pool=8, grid=2, shorter=32,
    longer=48, dtype="float32", n_boxes=6,
)  # fmt: skip


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """Coarse noise: it has edges and plain areas."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.NEAREST)


@pytest.fixture
def boxes_file(demo: Path, tmp_path: Path) -> Path:
    """Two boxes for each picture of the demo, the second of them all of it."""
    content = {image.imgid: [[4, 8, 60.5, 100], [0, 0, 128, 128]] for image in load_dataset_file(demo).images}
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    return tmp_path / "boxes.json"


@pytest.mark.parametrize("boxes", ["edge_boxes", "selective_search"])
def test_without_opencv_boxes_are_proposed_by_no_edges_but_a_line_that_says_what_to_install(
    boxes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r"needs the package cv2: pip install 'vse-pipeline\[edgeboxes\]'$"):
        BoxesExtractor(TINY.model_copy(update={"boxes": boxes}))


def test_the_whole_picture_as_a_box_gives_what_the_network_gives(tmp_path: Path) -> None:
    """VGG's fc7 of a picture of the network's own size: 14 x 14 positions, pooled to 14 x 14, are themselves."""
    (tmp_path / "b.json").write_text(json.dumps({"0": [[0, 0, 224, 224]]}))
    config = VGG.model_copy(update={"boxes": str(tmp_path / "b.json")})
    extractor = BoxesExtractor(config)
    image = picture(224, 224)
    found = extractor.compute([extractor.prepare(image, 0)])[0]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    with torch.inference_mode():
        plain = LayerOutput(load_backbone(config), "classifier.4")(
            normalize_pixels(pixels, config.mean, config.std, torch.device("cpu"))
        )
    assert found.features.shape == (1, 4096)
    np.testing.assert_allclose(found.features, plain, rtol=1e-3, atol=1e-4)


def test_boxes_are_pooled_on_the_map_one_by_one(tmp_path: Path) -> None:
    boxes = [[3, 2, 30.5, 39], [10, 10, 20, 20], [0, 0, 60, 40]]
    (tmp_path / "b.json").write_text(json.dumps({"5": boxes}))
    config = TINY.model_copy(update={"boxes": str(tmp_path / "b.json"), "normalize": False, "chunk": 2})
    extractor = BoxesExtractor(config)
    found = extractor.compute([extractor.prepare(picture(), 5)])[0]
    model: Any = load_backbone(config)
    small = picture().resize((48, 32), Image.Resampling.BILINEAR)
    images = normalize_pixels(
        torch.from_numpy(np.array(small)).permute(2, 0, 1)[None], config.mean, config.std, torch.device("cpu")
    )
    with torch.inference_mode():
        layers = model.features[:2](images)
        for box, features in zip(boxes, found.features, strict=True):
            on_map = torch.tensor(box) * torch.tensor([48 / 60, 32 / 40] * 2) / 2  # the map's stride is 2
            pooled = roi_align(layers, [on_map[None]], 8, aligned=True)
            slow = torch.nn.functional.adaptive_avg_pool2d(model.features[2](pooled), 2).flatten()
            np.testing.assert_allclose(features, slow, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.boxes, boxes)


@pytest.mark.parametrize("source", ["edge_boxes", "selective_search", "rpn"])
def test_proposals_lie_inside_and_do_not_depend_on_batch_or_shard(source: str, few: Path, tmp_path: Path) -> None:
    """With three threads that propose at the same time, too."""
    config = TINY.model_copy(update={"boxes": source, "proposer_weights": "random", "workers": 3})
    extractor = BoxesExtractor(config)
    outs = [tmp_path / str(n) / "demo_tiny.h5" for n in (1, 4)]
    for out, n_shards in zip(outs, (1, 4), strict=True):
        extract_shards(few, extractor, out, n_shards)
        merge(few, out, n_shards)
    one, four = (verify_cache(out) for out in outs)
    rows = np.arange(12)
    found = FeatureReader(one).regions(rows)
    np.testing.assert_array_equal(found.features, FeatureReader(four).regions(rows).features)
    item = dataset_items(load_dataset_file(few), "image")[7]
    np.testing.assert_array_equal(extractor.extract([item]).features, found.features[7][found.mask[7]])
    boxes = np.concatenate([shard["boxes"].map() for shard in four.shards])
    scores = np.concatenate([shard["scores"].map() for shard in four.shards])
    assert four.offsets is not None
    first = np.isin(np.arange(1, len(scores)), four.offsets)
    assert (np.diff(scores)[~first] <= 0).all(), "best first"
    assert found.mask.sum(1).max() <= 6
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= 128).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


class OnGpu(torch.Tensor):
    """A tensor that numpy cannot read before it is copied to the processor, as those of a GPU."""

    def numpy(self) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_weights_are_hashed_wherever_they_are() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.float16)}
    assert hash_tensors({name: tensor.as_subclass(OnGpu) for name, tensor in tensors.items()}) == hash_tensors(tensors)


def test_the_proposal_network_is_hashed_before_it_moves_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY.model_copy(update={"boxes": "rpn", "proposer_weights": "random"})
    expected = BoxesExtractor(config).extra_hashes
    load, moves = box_extractor.load_detector, []

    def loaded(*arguments: object) -> torch.nn.Module:
        detector = load(*arguments)
        move, state = detector.to, detector.state_dict

        def to(*where: object) -> torch.nn.Module:
            moves.append(where)
            detector.state_dict = lambda: pytest.fail("hashed on the GPU")
            return move(*where)

        detector.to, detector.state_dict = to, state
        return detector

    monkeypatch.setattr(box_extractor, "load_detector", loaded)
    assert BoxesExtractor(config).extra_hashes == expected
    assert moves == [(torch.device("cpu"),)]


def test_edge_boxes_find_a_square() -> None:
    pixels = np.full((80, 100, 3), 230, np.uint8)
    pixels[20:60, 30:75] = (200, 30, 30)
    boxes, scores = edge_boxes(pixels, 20)
    assert scores[0] == scores.max()
    best = boxes[:5]
    overlap = [iou(box, (30, 20, 75, 60)) for box in best]
    assert max(overlap) > 0.6


def test_thin_edges_are_where_no_neighbour_across_them_is_stronger() -> None:
    """A ramp up and down along x has its ridge in the middle, and a flat image is one ridge."""
    row = np.asarray([0, 1, 3, 2, 1, 0], np.float32)
    edges = np.tile(row, (5, 1))
    flat = np.zeros((5, 6), np.float32)
    assert suppress_non_ridges(edges, flat).tolist() == [[0, 0, 3, 0, 0, 0]] * 5
    np.testing.assert_array_equal(
        suppress_non_ridges(edges.T.copy(), flat.T + np.float32(np.pi / 2)), suppress_non_ridges(edges, flat).T
    )
    np.testing.assert_array_equal(suppress_non_ridges(flat + 1, flat), flat + 1)


def test_edge_boxes_on_thin_edges_find_a_square_as_well() -> None:
    pixels = np.full((80, 100, 3), 230, np.uint8)
    pixels[20:60, 30:75] = (200, 30, 30)
    boxes, _ = edge_boxes(pixels, 20, thin=True)
    assert max(iou(box, (30, 20, 75, 60)) for box in boxes[:5]) > 0.6


def iou(a: Any, b: Any) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def test_selective_search_is_the_same_every_time() -> None:
    pixels = np.asarray(picture(120, 90))
    first, scores = selective_search(pixels, 30)
    for _ in range(3):
        np.testing.assert_array_equal(selective_search(pixels, 30)[0], first)
    assert scores[0] == 1


@pytest.mark.parametrize("method", [edge_boxes, selective_search])
def test_a_blank_picture_has_a_box(method: Callable[..., Any]) -> None:
    boxes, scores = method(np.zeros((20, 30, 3), np.uint8), 10)
    assert len(boxes) == len(scores) >= 1


def test_boxes_come_from_json_hdf5_or_a_cache(demo: Path, boxes_file: Path, tmp_path: Path) -> None:
    from_json = read_boxes(boxes_file)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["ids"] = list(from_json)
        file["offsets"] = np.arange(len(from_json) + 1) * 2
        file["boxes"] = np.concatenate(list(from_json.values()))
    config = TINY.model_copy(update={"boxes": str(boxes_file)})
    out = tmp_path / "f" / "demo_tiny.h5"
    extract_shards(demo, BoxesExtractor(config), out, 3)
    merge(demo, out, 3)
    for path in (tmp_path / "b.h5", out):
        found = read_boxes(path)
        assert found.keys() == from_json.keys()
        for identity, boxes in found.items():
            np.testing.assert_array_equal(boxes, from_json[identity])


def test_a_cache_of_given_boxes_is_refused_when_the_file_changed(demo: Path, boxes_file: Path, tmp_path: Path) -> None:
    config = TINY.model_copy(update={"boxes": str(boxes_file)})
    out = tmp_path / "f" / "demo_tiny.h5"
    extract_shards(demo, BoxesExtractor(config), out, 2)
    moved = boxes_file.rename(tmp_path / "moved.json")
    extract_shards(demo, BoxesExtractor(config.model_copy(update={"boxes": str(moved)})), out, 2)
    moved.write_text(moved.read_text().replace("60.5", "61.5"))
    with pytest.raises(UserError, match="content.boxes_sha256"):
        extract_shards(demo, BoxesExtractor(config.model_copy(update={"boxes": str(moved)})), out, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"0": [[1, 2, 3]]}', "b.json: not of the form"),
        ("[1]", "b.json: not of the form"),
        ('{"0": [[1, 2, 3, NaN]]}', "NaN is not a finite number"),
        ('{"0": [[1, 2, 3, 1e39]]}', "the boxes of image 0 are not rows of four numbers"),
        ('{"0": [[200, 2, 300, 4]]}', r"image 0: the box \[200.0, 2.0, 300.0, 4.0\] .* 128 x 128"),
        ('{"0": [[9, 9, 9, 20]]}', "does not overlap the image"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_boxes_are_one_line(content: str, message: str, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(UserError, match=message):
        extract_shards(demo, BoxesExtractor(TINY.model_copy(update={"boxes": str(tmp_path / "b.json")})), tmp_path / "x.h5", 1)
    assert not (tmp_path / "x.shards").exists()


def test_bad_settings_are_one_line(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    def line(*sets: str) -> str:
        options = [argument for setting in ("model=squeezenet1_1", *sets) for argument in ("--set", setting)]
        return fails(main, "boxes", "--dataset", demo, "--out", tmp_path / "x.h5", *options)

    assert "boxes: 'selective' is not edge_boxes, selective_search, rpn" in line("boxes=selective")
    assert "did you mean 'features.3'" in line("map=featurs.3")
    assert "does not come after the map" in line("map=features.9", "layer=features.2")
    assert "gone.json: no such file of boxes" in line("boxes=gone.json")
    assert "no such structured-edge model" in line("edge_model=gone.yml")


def test_an_image_may_have_no_box(demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {image.imgid: [[4, 8, 60, 100]] for image in load_dataset_file(demo).images if image.imgid not in (3, 40)}
    (tmp_path / "b.json").write_text(json.dumps({**content, 40: []}))
    out = tmp_path / "f" / "demo_tiny.h5"
    extract_shards(demo, BoxesExtractor(TINY.model_copy(update={"boxes": str(tmp_path / "b.json")})), out, 3)
    found = FeatureReader(open_cache(merge(demo, out, 3))).regions(np.arange(66))
    assert np.flatnonzero(found.mask.sum(1) == 0).tolist() == [3, 40]
    assert "2 images without a box" in caplog.text


@pytest.mark.parametrize("size", [(2000, 1), (900, 10)])
def test_a_sliver_is_a_bad_image(size: tuple[int, int], own_demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    picture(*size).save(own_demo.parent / "images" / "demo_000007.jpg")
    network = ["--set", "model=squeezenet1_1", "--set", "layer=features.2", "--set", "pool=8", "--set", "weights=random"]
    options = [*network, "--set", "boxes=edge_boxes", "--set", "shorter=32", "--set", "longer=48"]
    line = fails(main, "boxes", "--dataset", own_demo, "--out", tmp_path / "x.h5", *options, "--set", "map=features.0")
    assert f"demo_000007.jpg: {size[0]} x {size[1]} pixels" in line
    assert "--skip-bad" in line


def test_cells_of_a_map_that_is_cut_off_are_still_as_large() -> None:
    assert cells_per_pixel(37, 600) == cells_per_pixel(38, 600) == cells_per_pixel(14, 224) == 1 / 16
    assert cells_per_pixel(12, 36) == 1 / 3


def test_a_file_that_is_no_edge_model_is_refused(demo: Path, tmp_path: Path) -> None:
    for content in ('{"images": []}', "%YAML:1.0\n---\noptions: {stride: 2}\n", "x"):
        (tmp_path / "model.yml").write_text(content)
        with pytest.raises(UserError, match="model.yml: not a structured-edge model"):
            BoxesExtractor(TINY.model_copy(update={"edge_model": str(tmp_path / "model.yml")}))


def test_a_cache_of_regions_is_opened_with_its_boxes(demo: Path, boxes_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "f" / "demo_tiny.h5"
    extract_shards(demo, BoxesExtractor(TINY.model_copy(update={"boxes": str(boxes_file)})), out, 3)
    cache = open_cache(merge(demo, out, 3))
    assert cache.offsets.tolist() == list(range(0, 134, 2))
    assert cache.row_shape == (64 * 2 * 2,)


@pytest.mark.parametrize("source", ["edge_boxes", "rpn", "file"])
def test_training_images_may_have_fewer_boxes(source: str, few: Path, tmp_path: Path) -> None:
    """The first, which are the best; the others have all."""
    dataset = load_dataset_file(few)
    training = {image.imgid for image in dataset.split("train")}
    (tmp_path / "b.json").write_text(json.dumps({image.imgid: [[4, 8, 60, 100], [0, 0, 9, 9]] for image in dataset.images}))
    boxes = str(tmp_path / "b.json") if source == "file" else source
    whole = TINY.model_copy(update={"boxes": boxes, "proposer_weights": "random"})
    found = []
    for name, config in (("whole", whole), ("fewer", whole.model_copy(update={"train_boxes": 1}))):
        out = tmp_path / name / "demo_tiny.h5"
        extract_shards(few, BoxesExtractor(config, dataset=few), out, 2)
        found.append(open_cache(merge(few, out, 2)))
    one, other = (FeatureReader(cache).regions(np.arange(12)) for cache in found)
    for k, image_id in enumerate(found[0].ids.tolist()):
        n = 1 if image_id in training else int(one.mask[k].sum())
        assert other.mask[k].sum() == n
        np.testing.assert_allclose(other.features[k, :n], one.features[k, :n], atol=1e-5)
    assert one.mask.sum(1).min() > 1
    assert found[0].key != found[1].key


def test_whether_training_images_have_fewer_boxes_is_no_part_of_the_settings_of_before() -> None:
    assert "train_boxes" not in TINY.content()
    assert TINY.model_copy(update={"train_boxes": 50}).content()["train_boxes"] == 50
    with pytest.raises(UserError, match="every ground-truth box is needed"):
        load_feature("boxes_truth", sets=["train_boxes=5"])
