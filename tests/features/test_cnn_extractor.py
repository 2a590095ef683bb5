from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_FEATURE
from vse.features.cache.feature_cache import failures_path, open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import dataset_items
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.images import CnnConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

SETTINGS = ["model=squeezenet1_1", "layer=features.2", "grid=2", "resize=32", "crop=32", "batch_size=8"]
COMMAND = [argument for setting in SETTINGS for argument in ("--set", setting)]


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


@pytest.mark.parametrize("crops", ["1c", "10c"])
@pytest.mark.parametrize("normalize", [True, False])
def test_features_are_those_of_a_plain_loop(demo: Path, crops: str, normalize: bool) -> None:
    config = TINY_FEATURE.model_copy(update={"crops": crops, "normalize": normalize, "resize": 36, "dtype": "float32"})
    items = dataset_items(load_dataset_file(demo), "image")[:5]
    found = CnnExtractor(config).extract(items)
    assert found.ids.tolist() == [item.id for item in items]
    np.testing.assert_allclose(found.features, [slow_feature(item.path, config) for item in items], rtol=1e-4, atol=1e-5)


def test_a_bank_of_ten_crops_keeps_what_ten_crops_average(demo: Path) -> None:
    items = dataset_items(load_dataset_file(demo), "image")[:5]
    config = TINY_FEATURE.model_copy(update={"resize": 36, "dtype": "float32", "normalize": False})
    bank = CnnExtractor(config.model_copy(update={"crops": "10c_bank"})).extract(items).features
    mean = CnnExtractor(config.model_copy(update={"crops": "10c"})).extract(items).features
    centre = CnnExtractor(config).extract(items).features
    assert bank.shape == (5, 10, mean.shape[1])
    np.testing.assert_allclose(bank.mean(1), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bank[:, 4], centre, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["resized", "plain"])
def test_a_bank_of_random_crops_depends_on_the_image_alone(kind: str, demo: Path, tmp_path: Path) -> None:
    """The same bank in one shard, in three, in another batch, and for an image on its own."""
    config = TINY_FEATURE.model_copy(
        update={"crops": "rc_bank", "n_random": 3, "random_crop": kind, "resize": 40, "dtype": "float32"}
    )
    found = []
    for n_shards, batch_size in ((1, 8), (3, 5)):
        out = tmp_path / str(n_shards) / "demo_tiny.h5"
        extract_shards(demo, CnnExtractor(config.model_copy(update={"batch_size": batch_size})), out, n_shards)
        cache = open_cache(merge(demo, out, n_shards))
        assert cache.row_shape == (3, 512 // 2)
        found.append(FeatureReader(cache).rows(np.arange(66)))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    item = dataset_items(load_dataset_file(demo), "image")[40]
    np.testing.assert_allclose(CnnExtractor(config).extract([item]).features[0], found[0][40], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found[0], axis=2), 1, rtol=1e-5)
    assert np.abs(found[0][:, 0] - found[0][:, 1]).max() > 0.01


def test_positions_are_the_grid_before_it_is_flattened(demo: Path) -> None:
    items = dataset_items(load_dataset_file(demo), "image")[:3]
    config = TINY_FEATURE.model_copy(update={"dtype": "float32", "normalize": False, "grid": 3})
    flat = CnnExtractor(config).extract(items).features
    positions = CnnExtractor(config.model_copy(update={"positions": True})).extract(items).features
    assert positions.shape == (3, 9, flat.shape[1] // 9)
    np.testing.assert_array_equal(positions.transpose(0, 2, 1).reshape(3, -1), flat)


def test_settings_that_do_not_go_together_are_one_line(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    common = ["cnn", "--dataset", demo, "--out", tmp_path / "x.h5", *COMMAND]
    assert "keep one vector per crop" in fails(main, *common, "--set", "positions=true", "--set", "crops=rc_bank")
    assert "Input should be '1c', '10c', '10c_bank' or 'rc_bank'" in fails(main, *common, "--set", "crops=12c")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_compiled_network_gives_the_same_vectors(backend: str, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``aot_eager`` traces the network but compiles no machine code, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    items = dataset_items(load_dataset_file(demo), "image")[:10]
    config = TINY_FEATURE.model_copy(update={"dtype": "float32"})
    plain = CnnExtractor(config).extract(items).features
    compiled = CnnExtractor(config.model_copy(update={"compile": True})).extract(items).features
    np.testing.assert_allclose(compiled, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16"])
def test_autocast_stays_close_to_float32(demo: Path, precision: str) -> None:
    items = dataset_items(load_dataset_file(demo), "image")[:4]
    config = TINY_FEATURE.model_copy(update={"dtype": "float32"})
    full = CnnExtractor(config).extract(items).features
    half = CnnExtractor(config.model_copy(update={"precision": precision})).extract(items).features
    assert (np.sum(full * half, axis=1) > 0.999).all()


def test_a_finished_shard_is_kept_and_a_missing_one_is_made(own_cache: Path) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    shards = sorted(own_cache.with_suffix(".shards").glob("*.h5"))
    before = [shard.stat().st_mtime_ns for shard in shards]
    content = shards[1].read_bytes()
    shards[1].unlink()
    extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
    after = [shard.stat().st_mtime_ns for shard in shards]
    assert (after[0], after[2]) == (before[0], before[2])
    assert shards[1].read_bytes() == content


def test_one_shard_can_be_made_alone(demo: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo_tiny.h5"
    made = extract_shards(demo, CnnExtractor(TINY_FEATURE), out, 3, only=2)
    assert made.read_bytes() == sorted(cache.with_suffix(".shards").glob("*.h5"))[2].read_bytes()
    assert not out.exists()


def spoil(dataset: Path, number: int, how: str) -> Path:
    picture = dataset.parent / "images" / f"demo_{number:06d}.jpg"
    if how == "missing":
        picture.unlink()
    else:
        picture.write_bytes(picture.read_bytes()[:300])
    return picture


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_bad_image_stops_the_extraction(how: str, own_demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    picture = spoil(own_demo, 40, how)
    out = tmp_path / "f" / "demo_fc7.h5"
    line = fails(main, "cnn", "--dataset", own_demo, "--out", out, "--shards", 3, *COMMAND)
    assert str(picture) in line
    assert "--skip-bad" in line
    assert not out.exists()
    assert len(list((tmp_path / "f").rglob("*"))) == 3, "the folder, the first shard and its record"


def test_skip_bad_leaves_images_out_and_lists_them(own_demo: Path, tmp_path: Path) -> None:
    spoil(own_demo, 3, "missing")
    cut = spoil(own_demo, 40, "truncated")
    out = tmp_path / "demo_tiny.h5"
    extract_shards(own_demo, CnnExtractor(TINY_FEATURE), out, 3, skip_bad=True)
    found = open_cache(merge(own_demo, out, 3))
    assert found.skipped == {3, 40}
    assert found.ids.tolist() == [k for k in range(66) if k not in (3, 40)]
    lines = [json.loads(line) for line in failures_path(out).read_text().splitlines()]
    assert [line["id"] for line in lines] == [3, 40]
    assert lines[1]["path"] == str(cut)
    assert "runcated" in lines[1]["reason"]


def test_what_skip_bad_left_out_is_not_taken_for_whole_without_it(own_demo: Path, tmp_path: Path) -> None:
    picture = own_demo.parent / "images" / "demo_000040.jpg"
    whole = picture.read_bytes()
    spoil(own_demo, 40, "truncated")
    out = tmp_path / "demo_tiny.h5"
    extract_shards(own_demo, CnnExtractor(TINY_FEATURE), out, 3, skip_bad=True)
    with pytest.raises(UserError, match="demo_000040.jpg"):
        extract_shards(own_demo, CnnExtractor(TINY_FEATURE), out, 3)
    picture.write_bytes(whole)
    extract_shards(own_demo, CnnExtractor(TINY_FEATURE), out, 3)
    assert open_cache(merge(own_demo, out, 3)).ids.tolist() == list(range(66))
    assert not failures_path(out).exists()


def test_bad_usage_is_one_line(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "x.h5"
    assert "did you mean 'fc7'" in fails(main, "cnn", "--dataset", demo, "--feature", "fc8")
    assert "did you mean 'crop'" in fails(main, "cnn", "--dataset", demo, "--out", out, "--set", "crop5=10c")
    assert "shard 9 is not one of 0-3" in fails(main, "cnn", "--dataset", demo, "--out", out, "--shard", 9)
    assert "No such command 'cnm'" in fails(main, "cnm")
    assert "crop 64 is larger than resize 32" in fails(
        main, "cnn", "--dataset", demo, "--out", out, *COMMAND, "--set", "crop=64"
    )
