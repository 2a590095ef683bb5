from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_iou, roi_align

from tests.features.conftest import Fails, extracted_cache, sets
from vse.features.backbones.networks import TruncatedNetwork, load_backbone
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import list_extractor_inputs
from vse.features.cli import extract_main as main
from vse.features.extraction import extract_shards
from vse.features.extractors.boxes import BoxesExtractor, compute_cells_per_pixel
from vse.features.extractors.cnn import normalize_pixels
from vse.features.extractors.proposals import find_edge_boxes, read_boxes, run_selective_search, suppress_non_ridges
from vse.features.settings import load_feature_preset
from vse.features.settings.images import BoxesConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

RESNET = BoxesConfig(
    name="resnet", model="resnet18", weights="random", map="layer1", layer="avgpool", pool=16, shorter=64, longer=64,
    normalize=False, dtype="float32", n_boxes=6,
)  # fmt: skip
TINY = BoxesConfig(
    name="tiny", model="squeezenet1_1", weights="random", map="features.1", layer="features.2", pool=8, grid=2, shorter=32,
    longer=48, dtype="float32", n_boxes=6,
)  # fmt: skip


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.NEAREST)


def normalized(image: Image.Image, config: BoxesConfig) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    return normalize_pixels(pixels, config.mean, config.std, torch.device("cpu"))


def given(folder: Path, content: object, config: BoxesConfig = TINY) -> BoxesConfig:
    """The settings that read these boxes, or this text, from a file."""
    (folder / "b.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return config.model_copy(update={"boxes": str(folder / "b.json")})


@pytest.fixture
def boxes_file(demo: Path, tmp_path: Path) -> Path:
    """Two boxes for each picture of the demo, the second of them all of it."""
    content = {image.imgid: [[4, 8, 60.5, 100], [0, 0, 128, 128]] for image in load_dataset_file(demo).images}
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    return tmp_path / "boxes.json"


def test_without_opencv_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r"needs the package cv2: pip install"):
        BoxesExtractor(TINY)


def test_the_whole_picture_as_a_box_gives_what_the_network_gives(tmp_path: Path) -> None:
    """At a map of 16 x 16 cells, a box that is the whole picture and is pooled to 16 x 16 cells is the map itself."""
    config = given(tmp_path, {"0": [[0, 0, 64, 64]]}, RESNET)
    extractor = BoxesExtractor(config)
    image = picture(64, 64)
    found = extractor.compute_vectors([extractor.prepare(image, 0)])[0]
    with torch.inference_mode():
        plain = TruncatedNetwork(load_backbone(config), "avgpool")(normalized(image, config))
    assert found.features.shape == (1, 512)
    np.testing.assert_allclose(found.features, plain, rtol=1e-3, atol=1e-4)


def test_boxes_are_pooled_on_the_map_one_by_one(tmp_path: Path) -> None:
    boxes = [[3, 2, 30.5, 39], [10, 10, 20, 20], [0, 0, 60, 40]]
    config = given(tmp_path, {"5": boxes}, TINY.model_copy(update={"normalize": False, "chunk": 2}))
    extractor = BoxesExtractor(config)
    found = extractor.compute_vectors([extractor.prepare(picture(), 5)])[0]
    model: Any = load_backbone(config)
    with torch.inference_mode():
        layers = model.features[:2](normalized(picture().resize((48, 32), Image.Resampling.BILINEAR), config))
        for box, features in zip(boxes, found.features, strict=True):
            on_map = torch.tensor(box) * torch.tensor([48 / 60, 32 / 40] * 2) / 2  # the map's stride is 2
            pooled = roi_align(layers, [on_map[None]], 8, aligned=True)
            slow = torch.nn.functional.adaptive_avg_pool2d(model.features[2](pooled), 2).flatten()
            np.testing.assert_allclose(features, slow, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.boxes, boxes)


LEVELS = TINY.model_copy(update={"map": None, "layers": ("features.1", "features.4"), "normalize": False})


def test_a_vector_joins_the_means_of_a_box_on_several_layers(tmp_path: Path) -> None:
    boxes = [[3, 2, 30.5, 39], [10, 10, 20, 20], [0, 0, 60, 40]]
    extractor = BoxesExtractor(given(tmp_path, {"5": boxes}, LEVELS))
    found = extractor.compute_vectors([extractor.prepare(picture(), 5)])[0]
    model: Any = load_backbone(LEVELS)
    with torch.inference_mode():
        fine = model.features[:2](normalized(picture().resize((48, 32), Image.Resampling.BILINEAR), LEVELS))
        coarse = model.features[2:5](fine)
        on_input = torch.tensor(boxes) * torch.tensor([48 / 60, 32 / 40] * 2)
        means = [
            roi_align(output, [on_input / stride], 8, aligned=True).mean((2, 3)) for output, stride in ((fine, 2), (coarse, 4))
        ]
    assert found.features.shape == (3, 64 + 128)
    np.testing.assert_allclose(found.features, torch.cat(means, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("source", ["edge_boxes", "selective_search", "rpn"])
def test_proposals_lie_inside_and_do_not_depend_on_batch_or_shard(source: str, few: Path, tmp_path: Path) -> None:
    config = TINY.model_copy(update={"boxes": source, "proposer_weights": "random", "workers": 3})
    extractor = BoxesExtractor(config)
    one, four = (extracted_cache(few, extractor, tmp_path / str(n) / "demo_tiny.h5", n) for n in (1, 4))
    rows = np.arange(12)
    found = FeatureReader(one).read_padded_regions(rows)
    np.testing.assert_array_equal(found.features, FeatureReader(four).read_padded_regions(rows).features)
    item = list_extractor_inputs(load_dataset_file(few), "image")[7]
    np.testing.assert_array_equal(extractor.extract([item]).features, found.features[7][found.mask[7]])
    boxes = np.concatenate([shard["boxes"].map_to_memory() for shard in four.shard_arrays])
    scores = np.concatenate([shard["scores"].map_to_memory() for shard in four.shard_arrays])
    assert four.offsets is not None
    first = np.isin(np.arange(1, len(scores)), four.offsets)
    assert (np.diff(scores)[~first] <= 0).all(), "best first"
    assert found.mask.sum(1).max() <= 6
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= 128).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


@pytest.mark.parametrize("thin", [False, True])
def test_edge_boxes_find_a_square(thin: bool) -> None:
    pixels = np.full((80, 100, 3), 230, np.uint8)
    pixels[20:60, 30:75] = (200, 30, 30)
    boxes, scores = find_edge_boxes(pixels, 20, thin=thin)
    assert scores[0] == scores.max()
    assert box_iou(torch.from_numpy(boxes[:5]).float(), torch.tensor([[30.0, 20, 75, 60]])).max() > 0.6


def test_thin_edges_are_where_no_neighbour_across_them_is_stronger() -> None:
    row = np.asarray([0, 1, 3, 2, 1, 0], np.float32)
    edges = np.tile(row, (5, 1))
    flat = np.zeros((5, 6), np.float32)
    assert suppress_non_ridges(edges, flat).tolist() == [[0, 0, 3, 0, 0, 0]] * 5
    np.testing.assert_array_equal(
        suppress_non_ridges(edges.T.copy(), flat.T + np.float32(np.pi / 2)), suppress_non_ridges(edges, flat).T
    )
    np.testing.assert_array_equal(suppress_non_ridges(flat + 1, flat), flat + 1)


def test_selective_search_is_the_same_every_time_and_a_blank_picture_has_a_box() -> None:
    first, scores = run_selective_search(np.asarray(picture(120, 90)), 30)
    np.testing.assert_array_equal(run_selective_search(np.asarray(picture(120, 90)), 30)[0], first)
    assert scores[0] == 1
    for method in (find_edge_boxes, run_selective_search):
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
    assert extracted_cache(demo, BoxesExtractor(config), out, 3).row_shape == (64 * 2 * 2,)
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
    config = config.model_copy(update={"boxes": str(moved)})
    extract_shards(demo, BoxesExtractor(config), out, 2)
    moved.write_text(moved.read_text().replace("60.5", "61.5"))
    with pytest.raises(UserError, match="content.boxes_sha256"):
        extract_shards(demo, BoxesExtractor(config), out, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"0": [[1, 2, 3]]}', "b.json: not of the form"),
        ('{"0": [[1, 2, 3, 1e39]]}', "the boxes of image 0 are not rows of four numbers"),
        ('{"0": [[200, 2, 300, 4]]}', r"image 0: the box \[200.0, 2.0, 300.0, 4.0\] .* 128 x 128"),
        ('{"0": [[9, 9, 9, 20]]}', "does not overlap the image"),
    ],
)
def test_bad_boxes_are_one_line(content: str, message: str, demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        extract_shards(demo, BoxesExtractor(given(tmp_path, content)), tmp_path / "x.h5", 1)
    assert not (tmp_path / "x.shards").exists()


def test_bad_settings_are_one_line(demo: Path, tmp_path: Path, fails: Fails) -> None:
    def line(*settings: str) -> str:
        options = sets("model=squeezenet1_1", *settings)
        return fails(main, "boxes", "--dataset", demo, "--out", tmp_path / "x.h5", *options)

    assert "boxes: 'selective' is not edge_boxes, selective_search, rpn" in line("boxes=selective")
    assert "did you mean 'features.3'" in line("map=featurs.3")
    assert "does not come after the map" in line("map=features.9", "layer=features.2")
    assert "give either map" in line("layers=[features.1,features.4]")
    assert "in the order in which the network runs them" in line("map=null", "layers=[features.4,features.1]")
    assert "gone.json: no such file of boxes" in line("boxes=gone.json")
    assert "no such structured-edge model" in line("edge_model=gone.yml")
    for content in ('{"images": []}', "%YAML:1.0\n---\noptions: {stride: 2}\n", "x"):
        (tmp_path / "model.yml").write_text(content)
        assert "model.yml: not a structured-edge model" in line(f"edge_model={tmp_path / 'model.yml'}")
    with pytest.raises(UserError, match="every ground-truth box is needed"):
        load_feature_preset("boxes_truth", sets=["train_boxes=5"])


def test_an_image_may_have_no_box(demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {image.imgid: [[4, 8, 60, 100]] for image in load_dataset_file(demo).images if image.imgid not in (3, 40)}
    extractor = BoxesExtractor(given(tmp_path, {**content, 40: []}))
    found = FeatureReader(extracted_cache(demo, extractor, tmp_path / "f" / "demo_tiny.h5", 3)).read_padded_regions(
        np.arange(66)
    )
    assert np.flatnonzero(found.mask.sum(1) == 0).tolist() == [3, 40]
    assert "2 images without a box" in caplog.text


def test_a_sliver_is_a_bad_image(own_demo: Path, tmp_path: Path, fails: Fails) -> None:
    picture(900, 10).save(own_demo.parent / "images" / "demo_000007.jpg")
    network = ["model=squeezenet1_1", "map=features.0", "layer=features.2", "pool=8", "weights=random"]
    options = sets(*network, "boxes=edge_boxes", "shorter=32", "longer=48")
    line = fails(main, "boxes", "--dataset", own_demo, "--out", tmp_path / "x.h5", *options)
    assert "demo_000007.jpg: 900 x 10 pixels" in line
    assert "--skip-bad" in line


def test_cells_of_a_map_that_is_cut_off_are_still_as_large() -> None:
    assert compute_cells_per_pixel(37, 600) == compute_cells_per_pixel(38, 600) == compute_cells_per_pixel(14, 224) == 1 / 16
    assert compute_cells_per_pixel(12, 36) == 1 / 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", ["edge_boxes", "file"])
def test_training_images_may_have_fewer_boxes(source: str, few: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(few)
    training = {image.imgid for image in dataset.split("train")}
    boxes = {image.imgid: [[4, 8, 60, 100], [0, 0, 9, 9]] for image in dataset.images}
    whole = given(tmp_path, boxes) if source == "file" else TINY.model_copy(update={"boxes": source})
    configs = {"whole": whole, "fewer": whole.model_copy(update={"train_boxes": 1})}
    extractors = {name: BoxesExtractor(config, dataset=few) for name, config in configs.items()}
    found = [extracted_cache(few, extractors[name], tmp_path / name / "demo_tiny.h5", 2) for name in configs]
    one, other = (FeatureReader(cache).read_padded_regions(np.arange(12)) for cache in found)
    for k, image_id in enumerate(found[0].ids.tolist()):
        n = 1 if image_id in training else int(one.mask[k].sum())
        assert other.mask[k].sum() == n
        np.testing.assert_allclose(other.features[k, :n], one.features[k, :n], atol=1e-5)
    assert one.mask.sum(1).min() > 1
    assert found[0].key != found[1].key
