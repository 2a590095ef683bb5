"""What a run is made from: caches and data sets that belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_FEATURE
from tests.train.conftest import COMMAND, assert_same, experiment, state
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.texts import TfidfConfig
from vse.train.cli import embed_main, train_main
from vse.train.experiment import ExperimentConfig
from vse.train.options import TrainInputs
from vse.train.run.folder import RunFolder
from vse.train.training import train


def test_a_cache_of_another_data_set_is_refused(
    cache: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    own_demo.write_text(own_demo.read_text().replace('"dataset": "demo"', '"dataset": "f8k"', 1))
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", tmp_path / "run")
    assert "holds features of 'demo'" in line
    assert not (tmp_path / "run").exists()


def test_validation_has_a_cache_of_its_own(bank: Path, cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    arguments = ["--features", bank, "--out", tmp_path / "run", *COMMAND]
    assert "demo_fc7.h5: no such feature cache" in fails(train_main, *arguments, "--set", "eval_feature=fc7")
    run = train(bank, experiment("eval_feature=tiny"), out=tmp_path / "run")
    assert RunFolder(run).record()["eval_features"]["name"] == "tiny"
    other = train(bank, experiment(), out=tmp_path / "other")
    assert_same(state(run)["model"], state(other)["model"])
    assert [row["rsum"] for row in state(run)["rows"]] != [row["rsum"] for row in state(other)["rows"]]
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run)])
    assert stop.value.code == 0
    assert "is not the cache that" in fails(embed_main, run, "--features", bank)


def test_caches_of_different_networks_do_not_go_together(
    bank: Path, demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    other = tmp_path / "demo_other.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"seed": 1})), other, 1)
    merge(demo, other, 1)
    line = fails(train_main, "--features", bank, "--eval-features", other, "--out", tmp_path / "run", *COMMAND)
    assert "by networks with different weights" in line


def test_a_cache_of_phrases_is_not_read_as_one_of_captions(
    cache: Path, demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    """Its ids are those of texts, which numbers of captions would match."""
    config = TfidfConfig(name="tfidf_phrases", min_count=2, of="phrases")
    out = tmp_path / "demo_tfidf_phrases.h5"
    extract_shards(demo, CaptionExtractor(config, fit_encoder(demo, config, encoder_path(out))), out, 1)
    merge(demo, out, 1)
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, "--caption-features", out)
    assert f"{out} holds " in line
    assert "; features of captions are needed" in line
    assert "of: captions" in line


def test_captions_are_read_from_the_cache_that_is_named(
    cache: Path, tfidf: Path, bank: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, "--set", "train.epochs=1"]
    line = fails(train_main, *arguments, "--set", "caption_feature=hglmm")
    assert "demo_hglmm.h5: no such feature cache; vsepp reads captions as 'hglmm': extract it, or name its cache with" in line
    line = fails(train_main, *arguments, "--caption-features", bank)
    assert "image rows of 3 x 256 float16; features of captions are needed" in line
    assert not (tmp_path / "run").exists()
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", inputs=TrainInputs(caption_features=tfidf))
    assert RunFolder(run).settings(ExperimentConfig).caption_feature == "tfidf"
    assert RunFolder(run).record()["caption_features"]["name"] == "tfidf"
