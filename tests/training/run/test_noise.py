"""Training on wrong pairs that a noise file lists."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import COMMAND, Fails, assert_same, done, experiment, forget_captions, losses, weights
from tests.training.conftest import state as state_of
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path
from vse.features.settings.captions import TfidfConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.splits_and_noise import apply_noise, read_noise, write_noise
from vse.training.cli import embed_main, train_main
from vse.training.options import TrainInputs
from vse.training.training import train


def train_with(cache: Path, noise: Path | None, out: Path, *sets: str, name: str = "vsepp", **inputs: Any) -> Path:
    return train(cache, experiment(*sets, name=name), out=out, inputs=TrainInputs(noise=noise, **inputs))


def test_a_rate_of_0_trains_the_same_weights_bit_for_bit(run: Path, demo: Path, cache: Path, tmp_path: Path) -> None:
    noisy = train_with(cache, write_noise(demo, tmp_path / "noise.json", 0), tmp_path / "run")
    assert_same(weights(run), weights(noisy))
    assert losses(run) == losses(noisy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["caption", "image", "word"])
def test_training_with_noise_equals_training_on_a_data_set_with_these_captions(
    demo: Path, cache: Path, tmp_path: Path, kind: Any
) -> None:
    """The same model results from a data set whose captions are changed by hand."""
    noise = write_noise(demo, tmp_path / "noise.json", 0.5, kind)
    noisy = train_with(cache, noise, tmp_path / "noisy")
    other = train_with(
        forget_captions(copy_of(cache, tmp_path)), None, tmp_path / "other", captions=changed(demo, noise, tmp_path)
    )
    assert_same(weights(noisy), weights(other))
    assert losses(noisy) != losses(train_with(cache, None, tmp_path / "clean"))


def changed(demo: Path, noise: Path, folder: Path) -> Path:
    """A data set with the changes of a noise file."""
    clean = load_dataset_file(demo)
    content = json.loads(demo.read_text())
    for image, new in zip(content["images"], apply_noise(clean, read_noise(noise, clean)[0]).images, strict=True):
        captions = [{"raw": c.raw, "tokens": c.tokens, "sentid": c.sentid, "imgid": image["imgid"]} for c in new.captions]
        image.update(sentences=captions, sentids=[c.sentid for c in new.captions])
    (folder / "data").mkdir()
    (folder / "data" / "images").symlink_to(demo.parent / "images")
    (folder / "data" / "dataset.json").write_text(json.dumps(content))
    return folder / "data" / "dataset.json"


def copy_of(cache: Path, folder: Path) -> Path:
    shutil.copytree(cache.with_suffix(".shards"), folder / f"{cache.stem}.shards")
    return Path(shutil.copy(cache, folder / cache.name))


@pytest.mark.parametrize("solver", ["cca", "ridge"])
def test_closed_forms_are_fitted_to_the_wrong_pairs(demo: Path, cache: Path, tfidf: Path, tmp_path: Path, solver: str) -> None:
    """With all captions at wrong images nothing remains to be learned, so that the test recall falls."""
    noise = write_noise(demo, tmp_path / "noise.json", 1)
    sets = ["model.image_encoder=linear", "model.caption_encoder=linear", f"solver={solver}", "caption_feature=tfidf"]
    rsums = []
    for name, file in {"clean": None, "noisy": noise}.items():
        run = train_with(cache, file, tmp_path / name, *sets)
        done(eval_main, embedded(run), "--out", tmp_path / f"{name}.json", "--bootstrap", 0)
        rsums.append(json.loads((tmp_path / f"{name}.json").read_text())["protocols"]["full"]["rsum"])
    assert rsums[1] < rsums[0]


def embedded(run: Path) -> Path:
    done(embed_main, run)
    return run / "test.h5"


def test_wrong_words_are_encoded_by_the_encoder_of_the_cache(demo: Path, cache: Path, tfidf: Path, tmp_path: Path) -> None:
    """The same model results from a cache of the wrong captions, which the encoder of the right captions wrote."""
    noise = write_noise(demo, tmp_path / "noise.json", 0.2, "word")
    sets = ["model.caption_encoder=linear", "caption_feature=tfidf"]
    noisy = train_with(cache, noise, tmp_path / "run", *sets)
    dataset, config = changed(demo, noise, tmp_path), TfidfConfig(name="tfidf", min_count=2)
    images, captions = forget_captions(copy_of(cache, tmp_path)), tmp_path / "demo_tfidf.h5"
    shutil.copy(encoder_path(tfidf), encoder_path(captions))
    extract_shards(dataset, CaptionExtractor(config, encoder_path(captions)), captions, 1)
    merge_feature(dataset, captions, 1)
    assert_same(weights(noisy), weights(train_with(images, None, tmp_path / "other", *sets, captions=dataset)))


def test_the_noise_is_recorded_and_a_resume_with_other_noise_is_refused(
    demo: Path, cache: Path, tmp_path: Path, fails: Fails
) -> None:
    noise, other = (write_noise(demo, tmp_path / f"{seed}.json", 0.4, seed=seed) for seed in (0, 1))
    run = train_with(cache, noise, tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    assert record["noise"] == "caption 0.4 seed 0"
    assert (run / record["noise_file"]).resolve() == noise
    assert state_of(run)["identity"]["noise_sha256"] == record["noise_sha256"]
    given = ["--features", cache, *COMMAND, "--out", run]
    assert "--overwrite" in fails(train_main, *given, "--resume", "--noise", other)
    assert "--overwrite" in fails(train_main, *given, "--resume")
    done(train_main, *given, "--resume", "--noise", noise)
    done(eval_main, embedded(run), "--out", tmp_path / "result.json", "--bootstrap", 0)
    result = json.loads((tmp_path / "result.json").read_text())
    assert "noise: none -> caption 0.4 seed 0" in result["provenance"]["changed_settings"]


def test_noise_of_a_split_that_is_not_read_is_refused(demo: Path, cache: Path, tmp_path: Path, fails: Fails) -> None:
    content = json.loads(demo.read_text())
    train_images = [image for image in content["images"] if image["split"] == "train"]
    for image in train_images[:8]:
        image["split"] = "restval"
    other = demo.with_name("restval.json")
    other.write_text(json.dumps(content))
    noise = write_noise(other, tmp_path / "noise.json", 0.5)
    given = ["--features", cache, "--captions", other, *COMMAND, "--out", tmp_path / "run", "--noise", noise]
    assert "split 'restval'" in fails(train_main, *given, "--set", "train.restval=false")
    other.unlink()


def test_the_weights_of_the_last_epoch_are_embedded(cache: Path, tmp_path: Path, fails: Fails) -> None:
    """They equal those of a run that keeps the last epoch because it is validated after this epoch only."""
    run = train_with(cache, None, tmp_path / "run", "train.epochs=4")
    only_last = train_with(cache, None, tmp_path / "last", "train.epochs=4", "train.validate_every=4")
    done(embed_main, run, "--last-epoch")
    last, best = (read_embeddings(run / "test_last.h5"), read_embeddings(embedded(only_last)))
    assert last.vectors is not None
    assert best.vectors is not None
    for one, other in zip(last.vectors, best.vectors, strict=True):
        np.testing.assert_array_equal(one, other)
    assert json.loads(last.provenance)["training"]["selection"] == "last epoch"
    assert "epoch: best -> last" in json.loads(last.provenance)["changed_settings"]
    (run / "last.ckpt").unlink()
    assert "last.ckpt" in fails(embed_main, run, "--last-epoch")


def test_averaged_weights_of_the_last_epoch_are_embedded(cache: Path, tmp_path: Path) -> None:
    runs = [
        train_with(cache, None, tmp_path / str(every), "train.epochs=2", "train.ema=0.9", f"train.validate_every={every}")
        for every in (1, 2)
    ]
    done(embed_main, runs[0], "--last-epoch")
    first, second = read_embeddings(runs[0] / "test_last.h5"), read_embeddings(embedded(runs[1]))
    assert first.vectors is not None
    assert second.vectors is not None
    np.testing.assert_array_equal(first.vectors[0], second.vectors[0])


def test_options_without_a_meaning_are_refused(demo: Path, cache: Path, tfidf: Path, tmp_path: Path, fails: Fails) -> None:
    sets = ["model.image_encoder=linear", "model.caption_encoder=linear", "solver=cca", "caption_feature=tfidf"]
    closed = train_with(cache, None, tmp_path / "cca", *sets)
    assert "--last-epoch is for runs" in fails(embed_main, closed, "--last-epoch")
    assert "leave --last-epoch out" in fails(embed_main, closed, "--last-epoch", "--as-features", tmp_path / "x")
