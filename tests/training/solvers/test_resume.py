from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from tests.training.conftest import (
    Crash,
    Log,
    Patch,
    assert_same,
    experiment,
    interrupted,
    losses,
    state,
    train_with_stops,
    weights,
)
from tests.training.phrases.some_regions import Caches, small
from vse.pipeline.errors import Interrupted
from vse.training.losses import LOSSES
from vse.training.losses.base import Batch, Cost, Loss, Objective
from vse.training.models.similarities.base import Similarity
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers import epochs, retrieval
from vse.training.training import train

pytestmark = pytest.mark.sampled(1)
SHORT = ["train.epochs=2", "train.decay_after=1"]
STEPS = 16  # two epochs of eight

BRANCHES = ["model.image_encoder={name: branch, widths: [12, 6]}", "model.similarity=euclidean", "loss.name=top"]
BRANCHES += ["loss.same_image=mask", "train.sampling=neighbourhood"]
ON_VECTORS = ["model.caption_encoder={name: branch, widths: [10, 6]}", "caption_feature=tfidf"]
ON_WORDS = "model.caption_encoder={name: gru, head: {widths: [10, 6]}}"
OPTIONS = {
    "warm-up, neighbourhood sampling on top": [
        *("warmup.epochs=1", "train.sampling=neighbourhood_added", "loss.same_image=mask")
    ],
    "order embeddings in bf16": ["model.similarity=order", "model.absolute=true", "loss.name=sum", "train.precision=bf16"],
    "infonce, temperature learned, several positives": ["loss={name: infonce, learned: true, same_image: positive}"],
    "sigmoid by blocks in bf16, MLP and residual heads": [
        "loss={name: sigmoid, block: 10, learning_rate: 0.1}",
        "model.image_encoder={name: residual, width: 9, dropout: 0.2}",
        "model.caption_encoder={name: mlp, hidden: [9], dropout: 0.2}",
        *("caption_feature=tfidf", "train.precision=bf16"),
    ],
    "pictures, threads": ["images.source=pictures", "images.workers=3"],
    "fine-tuning, trained batch norms": [
        *("images.source=pictures", "images.finetune=true", "images.batch_norm=train", "train.learning_rate=1e-3")
    ],
    "branches as in the authors' code, captions on the disk": [
        *(*BRANCHES, *ON_VECTORS),
        *(f"model.{side}_encoder.batch_norm=after_first" for side in ("image", "caption")),
        *(f"model.{side}_encoder.batch_norm_momentum=0.9" for side in ("image", "caption")),
        *("model.similarity.floor=1e-4", "loss.reduction=mean_topk", "train.clip=null", "train.features_in_memory=false"),
        "loss.lambda4=0.05",
    ],
    "branches on an LSTM, constraints on both sides": [
        *(*BRANCHES, ON_WORDS, "model.caption_encoder=lstm", "loss.lambda3=0.1", "loss.lambda4=0.1")
    ],
    "parts that wait, learning rates of their own": [
        "train.frozen={caption_encoder: 1, caption_encoder.words: 2}",
        "train.learning_rates={image_encoder: 1e-3, caption_encoder.words: 1e-4}",
        *("train.decay_at=[1, 2]", "train.weight_decay=0.01"),
    ],
    "SRUs with dropout in bf16, AdamW, a cosine, a running mean of weights": [
        *("model.caption_encoder={name: sru, layers: 2}", "train.precision=bf16"),
        *("train.optimizer=adamw", "train.weight_decay=0.1", "train.undecayed=[vectors, embeddings]"),
        *("train.schedule=cosine", "train.warmup_steps=5", "train.ema=0.9"),
    ],
    "three batches an update, batch norms in a running mean": [
        *(*BRANCHES, ON_WORDS, "train.accumulate=3", "train.ema=0.9", "train.warmup_steps=2")
    ],
    "a transformer that waits, with dropout": [
        "model.caption_encoder={name: bert, model: tiny, frozen_layers: 1, gradient_checkpointing: true}",
        "train.frozen={caption_encoder.network: 1}",
        "train.learning_rates={caption_encoder.network: 1e-3}",
    ],
    "similarity network": [*BRANCHES, ON_WORDS, "model.similarity={name: network, widths: [5]}", "loss.name=logistic"],
}


def listed(sets: list[str]) -> int:
    """How many hard negatives are listed: a loss of single pairs finds none, and one by blocks keeps no scores."""
    return 0 if "loss.name=logistic" in sets or any("block" in setting for setting in sets) else 3


@pytest.mark.slow
@pytest.mark.usefixtures("tfidf")
@pytest.mark.parametrize("name", OPTIONS)
def test_stopped_at_a_random_step(name: str, cache: Path, tmp_path: Path) -> None:
    stop, sets = random.Random(name).randrange(STEPS), [*SHORT, *OPTIONS[name]]
    options = TrainOptions(log_negatives=listed(sets))
    train(cache, experiment(*sets), out=tmp_path / "whole", options=options)
    train_with_stops(cache, experiment(*sets), tmp_path / "cut", [stop], options=options)
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert whole.best_weights_file.read_bytes() == cut.best_weights_file.read_bytes()
    if listed(sets):
        assert whole.negatives_file.read_bytes() == cut.negatives_file.read_bytes()


@pytest.mark.nightly
def test_a_crop_bank_stopped_at_the_seams(bank: Path, tmp_path: Path) -> None:
    options = TrainOptions(log_negatives=3)
    whole = train(bank, experiment(), out=tmp_path / "whole", options=options)
    train_with_stops(bank, experiment(), tmp_path / "cut", [0, 3, 4, 5, 7, 8, 23], options=options)
    assert_same(state(whole), state(tmp_path / "cut"))


def test_a_crash_in_mid_epoch_costs_that_epoch_alone(run: Path, cache: Path, tmp_path: Path) -> None:
    with interrupted(8 * 2 + 3, crash=True), pytest.raises(Crash):
        train(cache, experiment(), out=tmp_path / "cut")
    resumed = train(cache, experiment(), out=tmp_path / "cut", options=TrainOptions(resume=True))
    assert_same(state(run), state(resumed))
    assert_same(weights(run), weights(resumed))


def test_a_signal_in_validation_loses_no_step(run: Path, cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(retrieval.RetrievalTrainer, "validate", lambda _: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted, match="stopped in epoch 1, step 8; --resume continues from there"):
            train(cache, experiment(), out=tmp_path / "cut")
    assert RunFolder(tmp_path / "cut").read_checkpoint()["step"] == 8
    train(cache, experiment(), out=tmp_path / "cut", options=TrainOptions(resume=True))
    assert_same(state(run), state(tmp_path / "cut"))


@pytest.mark.parametrize(
    ("first", "minutes", "steps"),
    [(1.0, 1e-9, [1, 2, 3, 4, 5, 6, 7, 8, 0] * 2), (1e-9, 10.0, [1, 0, 0]), (1.0, 10.0, [0, 0])],
    ids=["always", "the first soon", "after epochs"],
)
def test_a_run_is_saved_now_and_then_within_an_epoch(
    first: float, minutes: float, steps: list[int], cache: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    saved: list[int] = []
    real = RunFolder.save_checkpoint

    def note(self: RunFolder, content: dict[str, object]) -> None:
        saved.append(int(str(content["step"])))
        real(self, content)

    monkeypatch.setattr(RunFolder, "save_checkpoint", note)
    monkeypatch.setattr(epochs, "_FIRST_SAVE_MINUTES", first)
    train(cache, experiment("train.epochs=2", f"train.save_minutes={minutes}"), out=tmp_path / "run")
    assert saved == steps


def test_a_run_without_a_checkpoint_starts_again_and_says_so(cache: Path, tmp_path: Path, caplog: Log) -> None:
    with interrupted(3, crash=True), pytest.raises(Crash):
        train(cache, experiment("train.epochs=1"), out=tmp_path / "run")
    train(cache, experiment("train.epochs=1"), out=tmp_path / "run", options=TrainOptions(resume=True))
    assert "ended before its first checkpoint. Training starts from the beginning" in caplog.text


class Attraction(Loss):
    """The mean, or the sum, of 1 - s over the pairs of a batch: each pair by itself."""

    is_ranking: ClassVar = False
    name: Literal["attraction"] = "attraction"

    @property
    def is_mean_over_queries(self) -> bool:
        return self.reduction == "mean_topk"

    def build_objective(self, similarity: Similarity, compiled: bool = False, scale: nn.Module | None = None) -> Objective:
        def cost(batch: Batch, seed: int) -> Cost:
            pairs = torch.arange(len(batch.image_indices))
            costs = 1 - similarity.score_pairs(batch.image_embeddings, batch.caption_embeddings, pairs, pairs)
            loss = costs.mean() if self.is_mean_over_queries else costs.sum()
            return Cost(loss, torch.zeros_like(loss))

        return cost


@pytest.fixture
def attraction() -> Iterator[None]:
    LOSSES.add(Attraction)
    yield
    LOSSES.remove("attraction")


def assert_near(a: Any, b: Any) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("attraction")
@pytest.mark.parametrize(("size", "accumulate", "reduction"), [(16, 2, "sum"), (25, 4, "mean_topk")])
def test_several_batches_are_one_large_batch(size: int, accumulate: int, reduction: str, cache: Path, tmp_path: Path) -> None:
    sets = ["loss.name=attraction", f"loss.reduction={reduction}", "train.epochs=2", "train.learning_rate=1e-3"]
    large = [*sets, f"train.batch_size={size * accumulate}"]
    small = [*sets, f"train.batch_size={size}", f"train.accumulate={accumulate}"]
    one, several = (state(train(cache, experiment(*s), out=tmp_path / str(k))) for k, s in enumerate((large, small)))
    assert_near(one["model"], several["model"])
    for weight, parts in one["optimizer"]["state"].items():
        assert_near(parts, several["optimizer"]["state"][weight])
    if reduction == "sum":
        assert [row["loss"] for row in one["rows"]] == pytest.approx([row["loss"] for row in several["rows"]])


def test_negatives_are_those_of_each_batch_by_itself(cache: Path, tmp_path: Path) -> None:
    sets = ["loss.name=sum", "train.batch_size=6", "train.epochs=1", "train.learning_rate=1e-12"]
    configs = {str(k): experiment(*sets, f"train.accumulate={k}") for k in (1, 4)}
    one, four = (losses(train(cache, config, out=tmp_path / k))[0] for k, config in configs.items())
    assert one == pytest.approx(four, rel=1e-5)


@pytest.mark.parametrize("phrases", [False, True])
def test_every_few_batches_and_those_left_make_an_update(phrases: bool, cache: Path, caches: Caches, tmp_path: Path) -> None:
    def steps(name: str, *sets: str) -> tuple[int, int]:
        features, config = (caches.candidates, small) if phrases else (cache, experiment)
        found = state(train(features, config("train.epochs=1", *sets), out=tmp_path / name))
        return int(found["optimizer"]["state"][0]["step"]), len(found["rows"])

    each, _ = steps("each")
    assert each > 2
    assert steps("three", "train.accumulate=3") == (-(-each // 3), 1)
    assert steps("all", "train.accumulate=1000") == (1, 1)


def test_a_signal_waits_for_the_update_at_hand(cache: Path, tmp_path: Path) -> None:
    config, resume = experiment("train.accumulate=3", "train.epochs=1"), TrainOptions(resume=True)
    whole = state(train(cache, config, out=tmp_path / "whole"))
    for stop, saved in ((0, 3), (1, 6), (1, 8)):  # the steps of an update are 0 to 2; the last update has two
        with interrupted(stop), pytest.raises(Interrupted, match=f"stopped in epoch 1, step {saved}"):
            train(cache, config, out=tmp_path / "cut", options=resume)
        assert RunFolder(tmp_path / "cut").read_checkpoint()["step"] == saved
    train(cache, config, out=tmp_path / "cut", options=resume)
    assert_same(whole, state(tmp_path / "cut"))
