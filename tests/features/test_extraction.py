"""What a cache is made from, and how it is told when that changed: field by field, image by image, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.conftest import TINY_FEATURE
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.shards import read_finished_shard, read_record, shard_path, shards_folder
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import Extractor, FeatureSettings
from vse.features.settings.images import BoxesConfig, CnnConfig, RegionsConfig
from vse.features.settings.texts import HglmmConfig, MeanVectorConfig, TextConfig, TfidfConfig
from vse.pipeline import progress
from vse.pipeline.dataset import dataset as dataset_module
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files import inputs as input_files

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
    "train_boxes": 50,
}  # fmt: skip
ONLY_HOW = {"batch_size", "batch_tokens", "workers", "compile", "chunk", "revision"} | {
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


FIELDS = [(name, field) for name, config in CONFIGS.items() for field in type(config).model_fields]
FIELDS = [(name, field) for name, field in FIELDS if field not in ("name", "extractor")]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_setting_that_determines_the_vectors_changes_the_key(name: str, field: str, demo: Path) -> None:
    dataset, config = load_dataset_file(demo), CONFIGS[name]
    before, after = Named(config).identity(dataset), Named(flipped(config, field)).identity(dataset)
    if field in ONLY_HOW and (name, field) not in {("hglmm", "seed"), ("mean_vector", "seed")}:
        assert before.key == after.key
    else:
        assert before.key != after.key
        assert before.content["config"].get(field) != after.content["config"][field]


def test_every_extractor_is_looked_at() -> None:
    assert set(CONFIGS) == set(EXTRACTORS)


CONTENT_FIELDS = [f for f in CnnConfig.model_fields if f not in ONLY_HOW | {"name", "extractor"}]


@pytest.mark.parametrize("field", CONTENT_FIELDS)
def test_a_shard_of_another_setting_is_refused_by_its_name(field: str, demo: Path, cache: Path) -> None:
    made = read_record(shard_path(cache, 0, 3))
    asked = Named(flipped(TINY_FEATURE, field), made.identity.content["weights_sha256"], CnnExtractor.version)
    with pytest.raises(UserError, match=rf"config\.{field}: .* -> "):
        read_finished_shard(shard_path(cache, 0, 3), asked.identity(load_dataset_file(demo)))


@pytest.mark.parametrize("field", ["batch_size", "workers"])
def test_how_it_is_made_makes_no_shard_stale(field: str, demo: Path, cache: Path) -> None:
    extractor = CnnExtractor(flipped(TINY_FEATURE, field))
    assert read_finished_shard(shard_path(cache, 0, 3), extractor.identity(load_dataset_file(demo))) is not None


def changed(demo: Path, what: str) -> tuple[Extractor, Callable[[Any], None]]:
    """An extractor, and a change of the data set, that differ from those of the cache in one thing."""
    nothing: Callable[[Any], None] = lambda content: None  # noqa: E731
    if what == "weights":
        return CnnExtractor(TINY_FEATURE.model_copy(update={"seed": 1})), nothing
    if what == "version":
        extractor = CnnExtractor(TINY_FEATURE)
        extractor.version = 99  # type: ignore[misc]
        return extractor, nothing
    if what == "ids":
        return CnnExtractor(TINY_FEATURE), lambda content: content["images"].pop()
    if what == "order":
        return CnnExtractor(TINY_FEATURE), lambda content: content["images"].insert(0, content["images"].pop())
    assert what == "name of the data set"
    return CnnExtractor(TINY_FEATURE), lambda content: content.update(dataset="other")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "content.weights_sha256: "),
        ("version", "content.extractor_version: 2 -> 99"),
        ("ids", "content.requested_ids_sha256: "),
        ("order", "content.requested_ids_sha256: "),
        ("name of the data set", "dataset: demo -> other"),
    ],
)
def test_whatever_else_determines_the_content_is_refused_by_its_name(
    what: str, message: str, own_cache: Path, edit: Callable[..., Path]
) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    extractor, change = changed(dataset, what)
    with pytest.raises(UserError, match=message):
        extract_shards(edit(dataset, change), extractor, own_cache, 3)


def test_nothing_changed_changes_nothing(own_cache: Path) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    files = sorted(shards_folder(own_cache).iterdir())
    key = open_cache(own_cache).key
    before = {path: path.read_bytes() for path in files}
    times = {path: path.stat().st_mtime_ns for path in files if path.name.startswith("shard")}
    extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
    merge(dataset, own_cache, 3)
    assert open_cache(own_cache).key == key
    assert {path: path.read_bytes() for path in files} == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("how", ["one byte", "gone"])
def test_a_changed_image_is_named_and_its_shard_alone_is_made_again(how: str, own_cache: Path) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    picture = dataset.parent / "images" / "demo_000040.jpg"
    whole = picture.read_bytes()
    key = open_cache(own_cache).key
    if how == "gone":
        picture.unlink()
    else:
        picture.write_bytes(whole + b"!")
    with pytest.raises(UserError, match=r"shard-00001-of-00003.h5 was made from another image 40 .*delete that shard"):
        extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
    if how == "one byte":
        shard_path(own_cache, 1, 3).unlink()
        extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
        assert open_cache(merge(dataset, own_cache, 3)).key != key
        picture.write_bytes(whole)
        shard_path(own_cache, 1, 3).unlink()
        extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
        assert open_cache(merge(dataset, own_cache, 3)).key == key


def test_verify_hashes_the_sources_again(
    own_cache: Path, fails: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(own_cache), *arguments])
        assert stop.value.code == 0
        return capsys.readouterr().out

    assert "sources unchanged" in verify()
    picture = own_cache.parent.parent / "data" / "images" / "demo_000007.jpg"
    picture.write_bytes(picture.read_bytes() + b"!")
    assert "was made from another image 7" in fails(main, "verify", own_cache)
    assert "sources not checked" in verify("--no-sources")
    (own_cache.parent.parent / "data" / "dataset.json").unlink()
    assert "sources not at hand" in verify()


def test_a_cache_keeps_the_hash_of_each_image(cache: Path, demo: Path) -> None:
    import hashlib

    dataset = load_dataset_file(demo)
    with h5py.File(cache) as file:
        stored = [row.tobytes() for row in file["sources"][:]]
    assert stored == [hashlib.sha256(dataset.image_path(image).read_bytes()).digest() for image in dataset.images]


def test_each_part_of_a_cache_repairs_exactly_what_was_broken(own_cache: Path) -> None:
    """Flip, cut, lose and swap shards and records; a second run makes those alone again, and the same bytes."""
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
            merge(dataset, own_cache, 3)
        extract_shards(dataset, CnnExtractor(TINY_FEATURE), own_cache, 3)
        assert [path.read_bytes() for path in paths] == before
        assert [paths[k].stat().st_mtime_ns for k in (0, 2)] == [times[k] for k in (0, 2)]
    assert verify_cache(merge(dataset, own_cache, 3))


def test_a_wrong_row_count_is_named(own_cache: Path) -> None:
    manifest = shards_folder(own_cache) / "manifest.json"
    content = json.loads(manifest.read_text())
    content["shards"][1]["rows"] -= 1
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match="shard-00001-of-00003.h5: features are .* which differs from the manifest"):
        open_cache(own_cache)


def test_ids_of_the_cache_that_are_not_the_shards_are_found(own_cache: Path) -> None:
    with h5py.File(own_cache, "r+") as file:
        file["ids"][...] = np.roll(file["ids"][:], 1)
    with pytest.raises(UserError, match="the shards' ids are not the cache's ids"):
        verify_cache(own_cache)


def test_shards_of_several_devices_are_joined_with_a_line_and_the_cache_knows_them(
    own_cache: Path, edit: Callable[[Path, Callable[[Any], None]], Path], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = own_cache.parent.parent / "data" / "dataset.json"
    before = open_cache(own_cache)
    assert (before.provenance["device"], before.provenance["arithmetic"]) == ("cpu", "fp32")
    record = shard_path(own_cache, 1, 3).with_suffix(".json")
    edit(record, lambda content: content["notes"].update(device="cuda (Test 9000)"))
    after = open_cache(merge(dataset, own_cache, 3))
    assert after.provenance["device"] == "cpu, cuda (Test 9000)"
    assert after.key == before.key
    assert "its shards were computed on several devices (cpu, cuda (Test 9000))" in caplog.text


def test_a_log_says_which_shard_of_how_many_and_how_far_it_is(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    settings = ["model=squeezenet1_1", "layer=features.2", "weights=random", "resize=32", "crop=32", "batch_size=2"]
    options = [text for setting in settings for text in ("--set", setting)]
    with pytest.raises(SystemExit, match="0"):
        main(["cnn", "--dataset", str(few), "--out", str(tmp_path / "x.h5"), "--shards", "3", "--shard", "1", *options])
    log = capsys.readouterr().err
    assert "extract fc7, shard 2 of 3: 4 rows\n" in log
    assert "extract fc7, shard 2 of 3: 2 of 4, " in log
    assert "\r" not in log


@pytest.mark.parametrize("options", [[], ["--shard", "1"]], ids=["all shards", "one shard"])
def test_an_extraction_reads_the_data_set_once(
    options: list[str], own_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "COARSEST_CLOCK", 0)  # as if the file had been written long ago
    command = ["tfidf", "--dataset", str(own_demo), "--set", "min_count=1", "--shards", "3", "--out", str(tmp_path / "x.h5")]
    if options:
        with pytest.raises(SystemExit):
            main(["fit", "--feature", "tfidf", *command[1:5], *command[7:]])
    read: list[Path] = []
    parse = dataset_module.parse_json
    monkeypatch.setattr(dataset_module, "parse_json", lambda path, *given: (read.append(path), parse(path, *given))[1])
    with pytest.raises(SystemExit) as stop:
        main([*command, *options])
    assert stop.value.code == 0
    assert read == [own_demo]
