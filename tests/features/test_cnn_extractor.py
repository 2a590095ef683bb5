from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_FEATURE
from tests.features.conftest import Fails, extracted_cache, sets
from vse.features.cache.feature_cache import open_cache, skipped_images_path
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import list_extractor_inputs
from vse.features.cli import extract_main as main
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor, cut_crops
from vse.features.extractors.images import load_in_threads
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

COMMAND = sets("model=squeezenet1_1", "layer=features.2", "grid=2", "resize=32", "crop=32", "batch_size=8")


def slow_feature(path: Path, config: CnnConfig) -> np.ndarray:
    """One image at a time, one crop at a time, with nothing of ours but the network."""
    extractor = CnnExtractor(config)
    size, crop = config.resize, config.crop
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR), np.float32) / 255
    if config.crops == "1c":
        places = [((size - crop) // 2, (size - crop) // 2, False)]
    else:
        far = size - crop
        corners = [(0, 0), (0, far), (far, 0), (far, far), (far // 2, far // 2)]
        places = [(top, left, flip) for flip in (False, True) for top, left in corners]
    total = 0
    for top, left, flip in places:
        view = pixels[top : top + crop, left : left + crop]
        view = (view[:, ::-1] if flip else view) - np.asarray(config.mean, np.float32)
        image = torch.from_numpy(np.ascontiguousarray((view / np.asarray(config.std, np.float32)).transpose(2, 0, 1)))
        with torch.inference_mode():
            total = total + extractor.network(image[None])[0].numpy()
    mean = total / len(places)
    return mean / np.linalg.norm(mean) if config.normalize else mean


@pytest.mark.parametrize(("crops", "normalize"), [("1c", False), ("10c", True)])
def test_features_are_those_of_a_plain_loop(demo: Path, crops: str, normalize: bool) -> None:
    config = TINY_FEATURE.model_copy(update={"crops": crops, "normalize": normalize, "resize": 36, "dtype": "float32"})
    items = list_extractor_inputs(load_dataset_file(demo), "image")[:5]
    found = CnnExtractor(config).extract(items)
    assert found.ids.tolist() == [item.id for item in items]
    np.testing.assert_allclose(found.features, [slow_feature(item.path, config) for item in items], rtol=1e-4, atol=1e-5)


def test_a_bank_of_ten_crops_keeps_what_ten_crops_average(demo: Path) -> None:
    items = list_extractor_inputs(load_dataset_file(demo), "image")[:5]
    config = TINY_FEATURE.model_copy(update={"resize": 36, "dtype": "float32", "normalize": False})
    bank = CnnExtractor(config.model_copy(update={"crops": "10c_bank"})).extract(items).features
    mean = CnnExtractor(config.model_copy(update={"crops": "10c"})).extract(items).features
    centre = CnnExtractor(config).extract(items).features
    assert bank.shape == (5, 10, mean.shape[1])
    np.testing.assert_allclose(bank.mean(1), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bank[:, 4], centre, rtol=1e-4, atol=1e-5)


def test_a_bank_of_random_crops_depends_on_the_image_alone(few: Path, tmp_path: Path) -> None:
    config = TINY_FEATURE.model_copy(update={"crops": "rc_bank", "n_random": 3, "resize": 40, "dtype": "float32"})
    found = []
    for n_shards, batch_size in ((1, 8), (3, 5)):
        out = tmp_path / str(n_shards) / "demo_tiny.h5"
        cache = extracted_cache(few, CnnExtractor(config.model_copy(update={"batch_size": batch_size})), out, n_shards)
        assert cache.row_shape == (3, 512 // 2)
        found.append(FeatureReader(cache).read_rows(np.arange(12)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    item = list_extractor_inputs(load_dataset_file(few), "image")[7]
    np.testing.assert_allclose(CnnExtractor(config).extract([item]).features[0], found[0][7], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found[0], axis=2), 1, rtol=1e-5)
    assert np.abs(found[0][:, 0] - found[0][:, 1]).max() > 0.01


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_network_gives_the_same_vectors(backend: str, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``aot_eager`` traces the network but compiles no machine code, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    items = list_extractor_inputs(load_dataset_file(demo), "image")[:10]
    config = TINY_FEATURE.model_copy(update={"dtype": "float32"})
    plain = CnnExtractor(config).extract(items).features
    compiled = CnnExtractor(config.model_copy(update={"compile": True})).extract(items).features
    np.testing.assert_allclose(compiled, plain, rtol=1e-4, atol=1e-5)


def test_autocast_stays_close_to_float32(demo: Path) -> None:
    items = list_extractor_inputs(load_dataset_file(demo), "image")[:4]
    config = TINY_FEATURE.model_copy(update={"dtype": "float32"})
    full = CnnExtractor(config).extract(items).features
    half = CnnExtractor(config.model_copy(update={"precision": "bf16"})).extract(items).features
    assert (np.sum(full * half, axis=1) > 0.999).all()


@pytest.fixture
def spoilt(few: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    dataset = Path(shutil.copytree(few.parent, tmp_path / "data")) / few.name
    missing, cut = (dataset.parent / "images" / f"demo_{number:06d}.jpg" for number in (3, 5))
    missing.rename(dataset.parent / "3.jpg")
    cut.write_bytes(cut.read_bytes()[:300])
    return dataset, missing, cut


def test_a_bad_image_stops_the_extraction(spoilt: tuple[Path, Path, Path], tmp_path: Path, fails: Fails) -> None:
    dataset, missing, cut = spoilt
    out = tmp_path / "f" / "demo_fc7.h5"
    for picture, n_files in ((missing, 0), (cut, 3)):  # the folder, the first shard and its record
        line = fails(main, "cnn", "--dataset", dataset, "--out", out, "--shards", 3, *COMMAND)
        assert str(picture) in line
        assert "--skip-bad" in line
        assert not out.exists()
        assert len(list((tmp_path / "f").rglob("*"))) == n_files
        if picture == missing:
            (dataset.parent / "3.jpg").rename(missing)


def test_skip_bad_lists_images_that_the_next_extraction_reads(
    spoilt: tuple[Path, Path, Path], tmp_path: Path, few: Path
) -> None:
    dataset, missing, cut = spoilt
    out = tmp_path / "demo_tiny.h5"
    extract_shards(dataset, CnnExtractor(TINY_FEATURE), out, 3, skip_bad=True)
    found = open_cache(merge_feature(dataset, out, 3))
    assert found.skipped_ids == {3, 5}
    assert found.ids.tolist() == [k for k in range(12) if k not in (3, 5)]
    lines = [json.loads(line) for line in skipped_images_path(out).read_text().splitlines()]
    assert [line["id"] for line in lines] == [3, 5]
    assert lines[1]["path"] == str(cut)
    assert "runcated" in lines[1]["reason"]
    for picture in (missing, cut):
        with pytest.raises(UserError, match=picture.name):
            extract_shards(dataset, CnnExtractor(TINY_FEATURE), out, 3)
        shutil.copy(few.parent / "images" / picture.name, picture)
    assert extracted_cache(dataset, CnnExtractor(TINY_FEATURE), out, 3).ids.tolist() == list(range(12))
    assert not skipped_images_path(out).exists()


def test_bad_usage_is_one_line(demo: Path, tmp_path: Path, fails: Fails) -> None:
    out = tmp_path / "x.h5"
    assert "did you mean 'fc7'" in fails(main, "cnn", "--dataset", demo, "--feature", "fc8")
    assert "did you mean 'crop'" in fails(main, "cnn", "--dataset", demo, "--out", out, "--set", "crop5=10c")
    assert "shard 9 is not one of 0-1" in fails(main, "cnn", "--dataset", demo, "--out", out, *COMMAND, "--shard", 9)
    assert "No such command 'cnm'" in fails(main, "cnm")
    assert "unknown setting 'extractor'" in fails(main, "cnn", "--dataset", demo, "--out", out, "--set", "extractor=regions")
    common = ["cnn", "--dataset", demo, "--out", out, *COMMAND]
    assert "crop 64 is larger than resize 32" in fails(main, *common, "--set", "crop=64")
    assert "keep one vector per crop" in fails(main, *common, *sets("positions=true", "crops=rc_bank"))
    assert "Input should be '1c', '10c', '10c_bank' or 'rc_bank'" in fails(main, *common, "--set", "crops=12c")


def config(**changes: object) -> CnnConfig:
    return TINY_FEATURE.model_copy(update=changes)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_shorter_side_resize_keeps_the_shape() -> None:
    image = noise(100, 50)
    small = pixels(image.resize((80, 40), Image.Resampling.BILINEAR))
    found = cut_crops(image, config(resize=40, crop=32, resize_mode="shorter"))
    assert torch.equal(found[0], small[:, 4:36, 24:56])


def slow_random_crops(image: Image.Image, settings: CnnConfig, image_id: int) -> list[torch.Tensor]:
    side, small = settings.crop, image.resize((settings.resize, settings.resize), Image.Resampling.BILINEAR)
    views = []
    for seed in np.random.SeedSequence([settings.crop_seed, image_id]).spawn(settings.n_random):
        rng = np.random.default_rng(seed)
        top, left = (int(rng.integers(settings.resize - side + 1)) for _ in range(2))
        view = small.crop((left, top, left + side, top + side))
        views.append(pixels(view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view))
    return views


def test_plain_random_crops_are_those_of_a_loop() -> None:
    image, settings = noise(70, 50), config(resize=40, crop=32, crops="rc_bank", random_crop="plain", n_random=6)
    expected = slow_random_crops(image, settings, 7)
    assert len({view.numpy().tobytes() for view in expected}) == 6
    assert torch.equal(cut_crops(image, settings, 7), torch.stack(expected))


@pytest.mark.parametrize("kind", ["plain", "resized"])
def test_random_crops_depend_on_the_image_s_id_and_the_seed_alone(kind: str) -> None:
    image = noise(70, 50)
    settings = config(resize=40, crop=32, crops="rc_bank", random_crop=kind, n_random=4)
    first = cut_crops(image, settings, 7)
    assert torch.equal(cut_crops(image, settings, 7), first)
    assert torch.equal(cut_crops(image, settings.model_copy(update={"n_random": 9}), 7)[:4], first), "more leave the first"
    assert not torch.equal(cut_crops(image, settings, 8), first)
    assert not torch.equal(cut_crops(image, settings.model_copy(update={"crop_seed": 1}), 7), first)


def test_resized_random_crops_cover_8_to_100_percent_and_are_mirrored_half_the_time() -> None:
    across, down = np.meshgrid(np.arange(200), np.arange(100))
    image = Image.fromarray(np.stack([across, down, 0 * across], axis=2).astype(np.uint8))
    crops = cut_crops(image, config(crop=32, crops="rc_bank", n_random=300), 0).double()
    left, right = crops[:, 0, 16, 0], crops[:, 0, 16, -1]
    height, width = crops[:, 1, -1, 16] - crops[:, 1, 0, 16], (right - left).abs()
    area, aspect = width * height / (31 / 32) ** 2 / 20_000, width / height
    assert 0.06 < area.min() < 0.12
    assert 0.45 < area.max() <= 1
    assert aspect.quantile(0.05) > 0.7
    assert aspect.quantile(0.95) < 1.42
    assert 0.4 < (right < left).double().mean() < 0.6


def test_a_random_crop_of_a_sliver_has_the_size_of_the_others() -> None:
    for size in ((400, 10), (10, 400), (1, 1)):
        assert cut_crops(noise(*size), config(crop=32, crops="rc_bank", n_random=3), 0).shape == (3, 3, 32, 32)


@pytest.mark.parametrize(("workers", "ahead"), [(0, 4), (1, 1), (3, 4), (3, 100)])
def test_load_in_threads_keeps_the_order(workers: int, ahead: int) -> None:
    assert list(load_in_threads(range(40), lambda k: k * k, workers, ahead)) == [k * k for k in range(40)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_an_item_is_raised_in_its_turn(workers: int) -> None:
    results = load_in_threads([4, 2, 0, 1], lambda k: 8 // k, workers, ahead=3)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(ZeroDivisionError):
        next(results)
