from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from huggingface_hub import constants

from tests.conftest import TINY_FEATURE
from tests.features.tiny_text import OTHERS, tiny_bert
from tests.training.conftest import Capture, Fails, Patch, done, experiment, printed
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.cnn import CnnExtractor
from vse.features.extractors.text import TextExtractor
from vse.features.settings.captions import TextConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.demo import create_demo
from vse.training.cli import embed_main, search_main
from vse.training.options import TrainInputs
from vse.training.training import train


class Trained(NamedTuple):
    """A run, the caches of another data set that it can read, and the folder around its text encoder."""

    run: Path
    images: Path
    captions: Path
    weights_dir: Path


EXPERIMENTS = {"vectors": ("vsepp", "own", []), "tokens": ("scan_t2i_avg", "tokens", ["model.caption_encoder=linear"])}


@pytest.fixture(scope="module", params=list(EXPERIMENTS))
def trained(
    request: pytest.FixtureRequest, demo: Path, cache: Path, positions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """VSE++ on vectors of captions, or SCAN on the states of their tokens, by a tiny BERT that stands in for a download."""
    preset, pooling, sets = EXPERIMENTS[request.param]
    folder = tmp_path_factory.mktemp("text")
    tiny_bert(folder / "weights" / "tiny")
    encoder = TextExtractor(TextConfig(name="bert", model="tests/tiny", pooling=pooling), folder / "weights")
    shapes = create_demo(folder / "data", 17, seed=5, name="shapes")
    made = {}
    for data in (demo, shapes):
        name = load_dataset_file(data).name
        made[name] = folder / f"{name}_bert.h5"
        extract_shards(data, encoder, made[name], 2)
        merge_feature(data, made[name], 2)
    changes = {"name": "positions", "positions": True} if pooling == "tokens" else {}
    grid = CnnExtractor(TINY_FEATURE.model_copy(update=changes))
    images = folder / f"shapes_{grid.config.name}.h5"
    extract_shards(shapes, grid, images, 1)
    merge_feature(shapes, images, 1)
    config = experiment("caption_feature=bert", "train.epochs=2", *sets, name=preset)
    trained_on = positions if pooling == "tokens" else cache
    run = train(trained_on, config, out=folder / "run", inputs=TrainInputs(caption_features=made["demo"]))
    return Trained(run, images, made["shapes"], folder / "weights")


def embedded(path: Path) -> dict[str, np.ndarray]:
    """What an embeddings file has of each direction or side."""
    with h5py.File(path) as file:
        return {name: file[name][:] for name in ("images", "captions", "scores", "scores_i2t", "scores_t2i") if name in file}


@pytest.mark.sampled(1)
def test_another_data_set_is_read_through_the_encoder_of_the_cache(trained: Trained, tmp_path: Path) -> None:
    start = [embed_main, trained.run, "--features", trained.images]
    done(*start, "--caption-features", trained.captions, "--out", tmp_path / "cached.h5")
    done(*start, "--weights-dir", trained.weights_dir, "--out", tmp_path / "encoded.h5")
    cached, encoded = embedded(tmp_path / "cached.h5"), embedded(tmp_path / "encoded.h5")
    assert cached.keys() == encoded.keys()
    for name, values in cached.items():
        np.testing.assert_allclose(encoded[name], values, atol=2e-3)  # where rounding to float16 falls otherwise


def test_a_text_finds_images_as_the_same_caption_does(trained: Trained, tmp_path: Path, demo: Path, capsys: Capture) -> None:
    done(embed_main, trained.run, "--out", tmp_path / "test.h5")
    found = embedded(tmp_path / "test.h5")
    scores = next((found[name] for name in ("scores_t2i", "scores") if name in found), None)
    if scores is None:
        scores = found["images"] @ found["captions"].T
    images = load_dataset_file(demo).split("test")
    captions = [caption for image in images for caption in image.captions]
    for k in (0, len(captions) // 2):
        lines, _ = printed(capsys, trained.run, captions[k].raw, "-k", 5, "--weights-dir", trained.weights_dir)
        np.testing.assert_allclose([float(line[1]) for line in lines], np.sort(scores[:, k])[::-1][:5], atol=2e-3)


def test_any_writing_is_searched_for(trained: Trained, capsys: Capture, fails: Fails, monkeypatch: Patch) -> None:
    monkeypatch.setenv("VSE_WEIGHTS_DIR", str(trained.weights_dir))
    lines, _ = printed(capsys, trained.run, "собака на траве!", "-k", 2)
    assert len(lines) == 2
    assert "no word to search for" in fails(search_main, trained.run, "  ")


def test_without_the_encoder_one_line_says_so(trained: Trained, tmp_path: Path, fails: Fails, monkeypatch: Patch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for command in ([search_main, trained.run, "a dog"], [embed_main, trained.run, "--features", trained.images]):
        line = fails(*command)
        assert "cannot get tests/tiny from the Hugging Face hub" in line
        assert "--weights-dir" in line


@pytest.mark.parametrize(
    ("change", "said"), [({"seed": 1}, "other weights"), ({"words": OTHERS}, "another tokenizer"), ({}, None)], ids=str
)
def test_another_encoder_of_that_name_is_refused(
    change: dict[str, object], said: str | None, trained: Trained, tmp_path: Path, fails: Fails
) -> None:
    tiny_bert(tmp_path / "tiny", **change)  # type: ignore[arg-type]
    line = [search_main, trained.run, "a dog", "--weights-dir", tmp_path]
    if said is None:
        done(*line)
    else:
        assert f"was computed with {said} of tests/tiny" in fails(*line)


def test_what_was_written_is_read_and_not_its_words(trained: Trained, tmp_path: Path) -> None:
    content = json.loads((trained.images.parent / "data" / "dataset.json").read_text())
    for image in content["images"]:
        for sentence in image["sentences"]:
            sentence["tokens"] = ["nothing"]
            sentence.pop("phrases", None)
    (tmp_path / "images").symlink_to(trained.images.parent / "data" / "images")
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    start = [embed_main, trained.run, "--features", trained.images, "--weights-dir", trained.weights_dir]
    done(*start, "--out", tmp_path / "one.h5")
    done(*start, "--captions", tmp_path / "dataset.json", "--out", tmp_path / "other.h5")
    one, other = embedded(tmp_path / "one.h5"), embedded(tmp_path / "other.h5")
    for name, values in one.items():
        np.testing.assert_array_equal(other[name], values)
