from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import TINY_FEATURE
from tests.training.conftest import COMMAND, Fails, Log, assert_same, done, experiment, options, state, weights
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.extractors.cnn import CnnExtractor
from vse.features.settings.captions import TfidfConfig
from vse.pipeline.dataset.captions import SPECIAL_TOKENS
from vse.pipeline.files.writing import sha256_file
from vse.training.cli import embed_main, train_main
from vse.training.experiment import ExperimentConfig
from vse.training.options import TrainInputs, TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.training import train
from vse.training.use.model import load_run
from vse.training.use.search import RunSearchOptions, search_run


def test_other_caches_are_refused(cache: Path, own_demo: Path, tmp_path: Path, fails: Fails, bank: Path, demo: Path) -> None:
    own_demo.write_text(own_demo.read_text().replace('"dataset": "demo"', '"dataset": "f8k"', 1))
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", tmp_path / "run")
    assert "holds features of 'demo'" in line
    assert not (tmp_path / "run").exists()
    other = tmp_path / "demo_other.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"seed": 1})), other, 1)
    merge_feature(demo, other, 1)
    line = fails(train_main, "--features", bank, "--eval-features", other, "--out", tmp_path / "run", *COMMAND)
    assert "by networks with different weights" in line
    config = TfidfConfig(name="tfidf_phrases", min_count=2, of="phrases")
    out = tmp_path / "demo_tfidf_phrases.h5"
    extract_shards(demo, CaptionExtractor(config, fit_encoder(demo, config, encoder_path(out))), out, 1)
    merge_feature(demo, out, 1)
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, "--caption-features", out)
    assert f"{out} holds " in line
    assert "; features of captions are needed" in line
    assert "of: captions" in line


def test_validation_has_a_cache_of_its_own(bank: Path, cache: Path, tmp_path: Path, fails: Fails) -> None:
    arguments = ["--features", bank, "--out", tmp_path / "run", *COMMAND]
    assert "demo_fc7.h5: no such feature cache" in fails(train_main, *arguments, "--set", "eval_feature=fc7")
    run = train(bank, experiment("eval_feature=tiny"), out=tmp_path / "run")
    assert RunFolder(run).read_record()["eval_features"]["name"] == "tiny"
    other = train(bank, experiment(), out=tmp_path / "other")
    assert_same(state(run)["model"], state(other)["model"])
    assert [row["rsum"] for row in state(run)["rows"]] != [row["rsum"] for row in state(other)["rows"]]
    done(embed_main, run)
    assert "is not the cache that" in fails(embed_main, run, "--features", bank)


def test_captions_are_read_from_the_named_cache(cache: Path, tfidf: Path, bank: Path, tmp_path: Path, fails: Fails) -> None:
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, "--set", "train.epochs=1"]
    line = fails(train_main, *arguments, "--set", "caption_feature=hglmm")
    assert "demo_hglmm.h5: no such feature cache; vsepp reads captions as 'hglmm': extract it, or name its cache with" in line
    line = fails(train_main, *arguments, "--caption-features", bank)
    assert "image rows of 3 x 256 float16; features of captions are needed" in line
    assert not (tmp_path / "run").exists()
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", inputs=TrainInputs(caption_features=tfidf))
    assert RunFolder(run).read_settings(ExperimentConfig).caption_feature == "tfidf"
    assert RunFolder(run).read_record()["caption_features"]["name"] == "tfidf"


KNOWN = ("red", "circle", "a")
SETS = ["train.epochs=1", "train.learning_rate=1e-12"]  # so that a run ends as it starts


def glove(path: Path, dim: int = 8, scale: float = 3.0) -> Path:
    """Vectors of some words of the demo, and of others."""
    rng = np.random.default_rng(0)
    lines = [" ".join([word, *map(str, rng.normal(scale=scale, size=dim))]) for word in (*KNOWN, "zebra")]
    path.write_text("\n".join(lines) + "\n")
    return path


def vectors(path: Path) -> dict[str, Tensor]:
    rows = [line.split(" ") for line in path.read_text().splitlines()]
    return {word: torch.tensor([float(number) for number in numbers]) for word, *numbers in rows}


def embeddings(run: Path) -> dict[str, Tensor]:
    """The word embeddings of a run by word."""
    table = weights(run)["caption_encoder.words.weight"]
    return dict(zip(RunFolder(run).read_vocabulary().words, table, strict=True))


def setting(name: str, file: Path, more: str = "") -> str:
    return f"model.caption_encoder={{name: {name}, words: {file}{more}}}"


@pytest.mark.parametrize("name", ["gru", "lstm", "sru"])
def test_known_words_start_from_vectors_and_others_at_their_scale(name: str, cache: Path, tmp_path: Path, caplog: Log) -> None:
    file = glove(tmp_path / "glove.txt")
    with caplog.at_level(logging.INFO):
        run = train(cache, experiment(*SETS, setting(name, file)), out=tmp_path / "run")
    expected, found = vectors(file), embeddings(run)
    for word in KNOWN:
        torch.testing.assert_close(found[word], expected[word])
    others = torch.stack([vector for word, vector in found.items() if word not in KNOWN])
    start = torch.stack([expected[word] for word in KNOWN])
    assert others.std().item() == pytest.approx(start.std(correction=0).item(), rel=0.2)
    assert others.mean().abs().item() < 0.2 * others.std().item()
    n_words = len(found) - len(SPECIAL_TOKENS)
    assert f"glove.txt: has vectors of 3 of {n_words} words; the other {n_words - 3} are initialised at random" in caplog.text


def test_a_run_takes_the_file_that_an_option_names_and_needs_it_no_more(cache: Path, tmp_path: Path) -> None:
    file = glove(tmp_path / "glove.txt")
    run = train(cache, experiment(*SETS), out=tmp_path / "run", inputs=TrainInputs(words=file))
    torch.testing.assert_close(embeddings(run)["red"], vectors(file)["red"])
    record = RunFolder(run).read_record()
    assert record["words_sha256"] == sha256_file(file)
    assert (run / record["words"]).resolve() == file.resolve()
    file.unlink()
    assert load_run(run, "test").model.dim == 16
    assert len(search_run(run, "a red circle", RunSearchOptions(k=3))) == 3


@pytest.mark.parametrize("trained", [True, False])
def test_words_from_a_file_are_trained_or_not(trained: bool, cache: Path, tmp_path: Path) -> None:
    file = glove(tmp_path / "glove.txt")
    more = "" if trained else ", train_words: false"
    run = train(cache, experiment("train.epochs=1", setting("sru", file, more)), out=tmp_path / "run")
    assert torch.equal(embeddings(run)["red"], vectors(file)["red"]) != trained


def test_train_words_concerns_words_from_a_file_alone(cache: Path, tmp_path: Path) -> None:
    fixed = "model.caption_encoder={name: gru, train_words: false}"
    runs = (train(cache, experiment(f"train.epochs={n}", fixed), out=tmp_path / str(n)) for n in (1, 2))
    one, two = map(embeddings, runs)
    assert not torch.equal(one["red"], two["red"])


def test_a_run_is_known_by_what_is_in_the_file_not_by_its_place(cache: Path, tmp_path: Path, fails: Fails) -> None:
    file = glove(tmp_path / "glove.txt")
    run = train(cache, experiment(*SETS, setting("gru", file)), out=tmp_path / "run")
    before = state(run)
    file = file.rename(tmp_path / "moved.txt")
    train(cache, experiment(*SETS, setting("gru", file)), out=run, options=TrainOptions(resume=True))
    assert_same(state(run), before)
    arguments = ["--features", cache, "--out", run, "--resume", *COMMAND, *options(*SETS)]
    glove(file, scale=2.0)
    assert "words_sha256: " in fails(train_main, *arguments, "--words", file, "--set", "model.caption_encoder.name=gru")
    assert "words_sha256: " in fails(train_main, *arguments, "--set", "model.caption_encoder.name=gru")


def test_what_does_not_fit_is_refused_in_a_line(cache: Path, tmp_path: Path, tfidf: Path, fails: Fails) -> None:
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, "--words"]
    line = fails(train_main, *arguments, glove(tmp_path / "long.txt", dim=9))
    assert "long.txt: vectors of 9 numbers, but model.word_dim is 8; --set model.word_dim=9" in line
    assert "gone.txt: no such file of word vectors" in fails(train_main, *arguments, tmp_path / "gone.txt")
    (tmp_path / "other.txt").write_text("zebra " + " ".join("12345678") + "\n")
    assert "no word of the captions has a vector" in fails(train_main, *arguments, tmp_path / "other.txt")
    line = fails(train_main, *arguments, glove(tmp_path / "glove.txt"), "--caption-features", tfidf)
    assert "word vectors are for encoders of words" in line
    base = train(cache, experiment(*SETS), out=tmp_path / "base")
    line = fails(train_main, *arguments, tmp_path / "glove.txt", "--start-from", base)
    assert "the word embeddings are already loaded from" in line
    assert not (tmp_path / "run").exists()
