"""What a cache is made from, and how it is told when that changed: field by field, image by image, byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.conftest import TINY_FEATURE
from tests.features.conftest import Edit, Fails, extracted_cache, succeed
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.shards import shard_path
from vse.features.cli import extract_main as main
from vse.features.extraction import extract_shards, merge_feature, verify_inputs
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import Extractor, FeatureSettings
from vse.features.settings.captions import HglmmConfig, MeanVectorConfig, TextConfig, TfidfConfig
from vse.features.settings.images import BoxesConfig, RegionsConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

CONFIGS: dict[str, FeatureSettings] = {
    "cnn": TINY_FEATURE,
    "regions": RegionsConfig(name="x"),
    "boxes": BoxesConfig(name="x", model="vgg19", map="features.35"),
    "tfidf": TfidfConfig(name="x"),
    "mean_vector": MeanVectorConfig(name="x"),
    "hglmm": HglmmConfig(name="x"),
    "text": TextConfig(name="x", model="sentence-transformers/all-MiniLM-L6-v2"),
}
OTHER: dict[str, Any] = {
    "model": "vgg11", "layer": "features", "map": "features.1", "weights": "x.pth", "weights_sha256": "0" * 64,
    "dtype": "float32", "precision": "bf16", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resize_mode": "shorter",
    "crops": "10c", "random_crop": "plain", "selection": "bottom_up", "boxes": "selective_search", "proposer": "y",
    "interpolation": "bicubic",
    "proposer_weights": "z", "edge_model": "m.yml.gz", "nms": 0.3, "score": 0.3, "max_words": 7, "words": "w.txt",
    "scale": 2.0, "pca": 7, "pca_captions": 7, "resize": 40, "mixtures": ["gaussian", "hybrid"],
    "pooling": "mean", "prompt": "query: ", "max_length": 16, "revision": "v1", "of": "phrases", "stop_words": "drop",
    "train_boxes": 50, "layers": ("features.1",), "trained_on": ["coco"], "splits": ["val", "test"],
}  # fmt: skip
ONLY_HOW = {"batch_size", "batch_tokens", "workers", "compile", "chunk", "revision", "trained_on"} | {
    *("weights", "weights_sha256", "seed", "proposer_weights", "edge_model", "words")
}
"""Settings that cannot change a vector, or whose effect is known by the hash of weights, words or files."""


class Named(Extractor):
    """An extractor that is never run: only its identity is asked for."""

    def __init__(self, config: Any, weights_sha256: str = "w", version: int = 1) -> None:
        self.config, self.weights_sha256, self.version = config, weights_sha256, version  # type: ignore[misc]

    def extract(self, items: Any, skip_bad: bool = False) -> Any:
        raise NotImplementedError


def flipped(config: FeatureSettings, field: str) -> FeatureSettings:
    value = getattr(config, field)
    other = OTHER[field] if field in OTHER else not value if isinstance(value, bool) else value + 1
    assert other != value, field
    return config.model_copy(update={field: other})


@pytest.mark.parametrize("name", list(EXTRACTORS))
def test_every_setting_that_determines_the_vectors_changes_the_key(name: str, demo: Path) -> None:
    dataset, config = load_dataset_file(demo), CONFIGS[name]
    before = Named(config).build_cache_identity(dataset)
    for field in set(type(config).model_fields) - {"name", "extractor"}:
        after = Named(flipped(config, field)).build_cache_identity(dataset)
        if field in ONLY_HOW and (name, field) not in {("hglmm", "seed"), ("mean_vector", "seed")}:
            assert before.sha256 == after.sha256, field
        else:
            assert before.sha256 != after.sha256, field
            assert before.content["config"].get(field) != after.content["config"][field], field


def test_whatever_else_determines_the_content_is_refused_by_its_name(own_cache: Path, edit: Edit) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    before, extractor, newer = dataset.read_text(), CnnExtractor(TINY_FEATURE), CnnExtractor(TINY_FEATURE)
    newer.version = 99  # type: ignore[misc]
    other_weights = CnnExtractor(TINY_FEATURE.model_copy(update={"seed": 1}))
    for other, message in ((other_weights, "content.weights_sha256: "), (newer, "content.extractor_version: 2 -> 99")):
        with pytest.raises(UserError, match=message):
            extract_shards(dataset, other, own_cache, 3)
    changes: dict[str, list[Callable[[Any], object]]] = {
        "content.requested_ids_sha256: ": [
            lambda content: content["images"].pop(),
            lambda content: content["images"].insert(0, content["images"].pop()),
        ],
        "dataset: demo -> other": [lambda content: content.update(dataset="other")],
    }
    for message, change in ((message, change) for message, of_message in changes.items() for change in of_message):
        dataset.write_text(before)
        with pytest.raises(UserError, match=message):
            extract_shards(edit(dataset, change), extractor, own_cache, 3)


def test_a_changed_image_is_named_and_its_shard_alone_is_made_again(own_cache: Path) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    picture = dataset.parent / "images" / "demo_000040.jpg"
    whole, key = picture.read_bytes(), open_cache(own_cache).key
    picture.unlink()
    for content in (whole + b"!", whole):
        with pytest.raises(UserError, match=r"shard-00001-of-00003.h5 was made from another image 40 .*delete that shard"):
            extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
        picture.write_bytes(content)
        shard_path(own_cache, 1, 3).unlink()
        assert (extracted_cache(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3).key == key) == (content == whole)
        picture.write_bytes(whole + b"?")


def test_verify_hashes_sources_again(own_cache: Path, fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    def verify(*arguments: str) -> str:
        succeed(main, "verify", own_cache, *arguments)
        return capsys.readouterr().out

    assert "sources unchanged" in verify()
    picture = own_cache.parent.parent / "data" / "images" / "demo_000007.jpg"
    picture.write_bytes(picture.read_bytes() + b"!")
    assert "was made from another image 7" in fails(main, "verify", own_cache)
    assert "sources not checked" in verify("--no-sources")
    (own_cache.parent.parent / "data" / "dataset.json").unlink()
    assert "sources not at hand" in verify()


def test_a_cache_keeps_the_hash_of_each_image(cache: Path, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    with h5py.File(cache) as file:
        stored = [row.tobytes() for row in file["sources"][:]]
    assert stored == [hashlib.sha256(dataset.image_path(image).read_bytes()).digest() for image in dataset.images]


def test_each_part_of_a_cache_repairs_exactly_what_was_broken(own_cache: Path) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    paths = [shard_path(own_cache, k, 3) for k in range(3)]
    before = [path.read_bytes() for path in paths]

    def flip() -> None:
        content = bytearray(before[1])
        content[len(content) // 2] ^= 4
        paths[1].write_bytes(content)

    for spoil in (
        flip,
        lambda: paths[1].write_bytes(before[1][:-100]),
        lambda: paths[1].write_bytes(before[0]),
        paths[1].unlink,
        paths[1].with_suffix(".json").unlink,
    ):
        times = [path.stat().st_mtime_ns for path in paths]
        spoil()
        with pytest.raises(UserError, match="shard-00001-of-00003"):
            merge_feature(dataset, own_cache, 3)
        extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
        assert [path.read_bytes() for path in paths] == before
        assert [paths[k].stat().st_mtime_ns for k in (0, 2)] == [times[k] for k in (0, 2)]
    assert verify_cache(merge_feature(dataset, own_cache, 3))


def test_ids_of_the_cache_that_are_not_the_shards_are_found(own_cache: Path) -> None:
    with h5py.File(own_cache, "r+") as file:
        file["ids"][...] = np.roll(file["ids"][:], 1)
    with pytest.raises(UserError, match="the shards' ids are not the cache's ids"):
        verify_cache(own_cache)


def test_a_cache_knows_the_devices_of_its_shards(own_cache: Path, edit: Edit, caplog: pytest.LogCaptureFixture) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    before = open_cache(own_cache)
    assert (before.provenance["device"], before.provenance["arithmetic"]) == ("cpu", "fp32")
    record = shard_path(own_cache, 1, 3).with_suffix(".json")
    edit(record, lambda content: content["notes"].update(device="cuda (Test 9000)"))
    after = open_cache(merge_feature(dataset, own_cache, 3))
    assert after.provenance["device"] == "cpu, cuda (Test 9000)"
    assert after.key == before.key
    assert "its shards were computed on several devices (cpu, cuda (Test 9000))" in caplog.text


def test_a_feature_of_some_splits_has_the_rows_of_their_images_alone(demo: Path, cache: Path, tmp_path: Path) -> None:
    config, out = TINY_FEATURE.model_copy(update={"splits": ["test", "val"]}), tmp_path / "demo_some.h5"
    extract_shards(demo, CnnExtractor(config), out, 2)
    some, every = FeatureReader(open_cache(merge_feature(demo, out, 2))), FeatureReader(open_cache(cache))
    ids = [image.imgid for image in load_dataset_file(demo).images if image.split in ("val", "test")]
    assert some.cache.ids.tolist() == ids
    np.testing.assert_array_equal(some.read_rows(some.find_rows(ids)), every.read_rows(every.find_rows(ids)))
    assert verify_inputs(some.cache) == "unchanged"
    with pytest.raises(UserError, match="48 of 66 images have no features"):
        some.find_rows(every.cache.ids)


def test_a_split_that_the_data_set_lacks_is_named(demo: Path, tmp_path: Path) -> None:
    config = TINY_FEATURE.model_copy(update={"splits": ["restval"]})
    with pytest.raises(UserError, match="no images in split 'restval'; it has train, val, test"):
        extract_shards(demo, CnnExtractor(config), tmp_path / "x.h5", 1)
