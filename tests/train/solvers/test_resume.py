"""A training that is stopped anywhere and resumed ends with the same bits, whatever its options."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import assert_same, experiment, state, weights
from vse.pipeline.errors import Interrupted
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing, Extras
from vse.train.solvers import adam
from vse.train.training import train

SHORT = ["train.epochs=2", "train.decay_after=1"]
STEPS = 16  # two epochs of eight

BRANCHES = [
    "model.image_encoder={name: branch, widths: [12, 6]}",
    "model.similarity=euclidean",
    "loss.name=top",
    "loss.same_image=mask",
    "train.sampling=neighbourhood",
]
ON_VECTORS = "model.caption_encoder={name: branch, widths: [10, 6]}"
ON_WORDS = "model.caption_encoder={name: gru, head: {widths: [10, 6]}}"
OPTIONS = {
    "max of hinges": [],
    "warm-up": ["warmup.epochs=1"],
    "order embeddings": ["model.similarity=order", "model.absolute=true", "loss.name=sum"],
    "bf16": ["train.precision=bf16"],
    "infonce, masked": ["loss.name=infonce", "loss.same_image=mask"],
    "infonce, temperature learned, several positives": ["loss={name: infonce, learned: true, same_image: positive}"],
    "sigmoid by blocks in bf16, MLP and residual heads": [
        "loss={name: sigmoid, block: 10, learning_rate: 0.1}",
        "model.image_encoder={name: residual, width: 9, dropout: 0.2}",
        "model.caption_encoder={name: mlp, hidden: [9], dropout: 0.2}",
        "caption_feature=tfidf",
        "train.precision=bf16",
    ],
    "features read from the disk": ["train.features_in_memory=false"],
    "pictures, threads": ["images.source=pictures", "images.workers=3"],
    "fine-tuning": ["images.source=pictures", "images.finetune=true", "images.workers=0", "train.learning_rate=1e-3"],
    "fine-tuning, trained batch norms": ["images.source=pictures", "images.finetune=true", "images.batch_norm=train"],
    "neighbourhood sampling": ["train.sampling=neighbourhood"],
    "neighbourhood sampling on top": ["train.sampling=neighbourhood_added", "loss.same_image=mask"],
    "branches with dropout, cached captions": [*BRANCHES, ON_VECTORS, "caption_feature=tfidf", "loss.lambda4=0.05"],
    "branches as in the authors' code, captions on the disk": [
        *BRANCHES,
        ON_VECTORS,
        "caption_feature=tfidf",
        *(f"model.{side}_encoder.batch_norm=after_first" for side in ("image", "caption")),
        *(f"model.{side}_encoder.batch_norm_momentum=0.9" for side in ("image", "caption")),
        "model.similarity.floor=1e-4",
        "loss.reduction=mean_topk",
        "train.clip=null",
        "train.features_in_memory=false",
    ],
    "branches on an LSTM, constraints on both sides": [
        *BRANCHES,
        ON_WORDS,
        "model.caption_encoder=lstm",
        "loss.lambda3=0.1",
        "loss.lambda4=0.1",
    ],
    "parts that wait, learning rates of their own": [
        "train.frozen={caption_encoder: 1, caption_encoder.words: 2}",
        "train.learning_rates={image_encoder: 1e-3, caption_encoder.words: 1e-4}",
        "train.decay_at=[1, 2]",
        "train.weight_decay=0.01",
    ],
    "AdamW, a cosine, a running mean of weights": [
        "train.optimizer=adamw",
        "train.weight_decay=0.1",
        "train.undecayed=[vectors, embeddings]",
        "train.schedule=cosine",
        "train.warmup_steps=5",
        "train.ema=0.9",
    ],
    "three batches an update, batch norms in a running mean": [
        *BRANCHES,
        ON_WORDS,
        "train.accumulate=3",
        "train.ema=0.9",
        "train.warmup_steps=2",
    ],
    "SRUs with dropout": ["model.caption_encoder={name: sru, layers: 2}", "loss.mirrored_positive=true"],
    "SRUs in bf16": ["model.caption_encoder={name: sru, layers: 2, states: last}", "train.precision=bf16"],
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


def train_with_stops(cache: Path, sets: list[str], out: Path, stops: list[int]) -> None:
    """Train, with a SIGTERM in each of these steps, counted over all; resume after each."""
    options: dict[str, Any] = {"existing": Existing(resume=True), "extras": Extras(log_negatives=listed(sets))}
    with pytest.MonkeyPatch.context() as patch:
        real, done = adam.Trainer.step, iter(range(10**6))

        def step(self: adam.Trainer, *arguments: object) -> object:
            if next(done) in stops:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(adam.Trainer, "step", step)
        for _ in stops:
            with suppress(Interrupted):
                train(cache, experiment(*sets), out=out, **options)
    train(cache, experiment(*sets), out=out, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("tfidf")
@pytest.mark.parametrize("name", OPTIONS)
def test_stopped_at_a_random_step(name: str, cache: Path, tmp_path: Path) -> None:
    stop, sets = random.Random(name).randrange(STEPS), [*SHORT, *OPTIONS[name]]
    train(cache, experiment(*sets), out=tmp_path / "whole", extras=Extras(log_negatives=listed(sets)))
    train_with_stops(cache, sets, tmp_path / "cut", [stop])
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert whole.best_file.read_bytes() == cut.best_file.read_bytes()
    if listed(sets):
        assert whole.negatives_file.read_bytes() == cut.negatives_file.read_bytes()


@pytest.mark.parametrize("stops", [[0], [7], [8], [23], [3, 4, 5]])
def test_a_crop_bank_stopped_at_the_seams(stops: list[int], bank: Path, tmp_path: Path) -> None:
    train(bank, experiment(), out=tmp_path / "whole", extras=Extras(log_negatives=3))
    train_with_stops(bank, [], tmp_path / "cut", stops)
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))


class Crash(Exception):
    pass


@pytest.mark.parametrize("epochs_done", [0, 2])
def test_a_crash_in_mid_epoch_costs_that_epoch_alone(
    epochs_done: int, run: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        steps, real = iter(range(10**6)), adam.Trainer.step

        def step(self: adam.Trainer, *arguments: object) -> object:
            if next(steps) == 8 * epochs_done + 3:
                raise Crash
            return real(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(adam.Trainer, "step", step)
        with pytest.raises(Crash):
            train(cache, experiment(), out=tmp_path / "cut")
    resumed = train(cache, experiment(), out=tmp_path / "cut", existing=Existing(resume=True))
    assert_same(state(run), state(resumed))
    assert_same(weights(run), weights(resumed))


def test_a_signal_in_validation_loses_no_step(run: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(adam.Trainer, "validate", lambda _: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted, match="stopped in epoch 1, step 8; --resume continues from there"):
            train(cache, experiment(), out=tmp_path / "cut")
    assert RunFolder(tmp_path / "cut").checkpoint()["step"] == 8
    train(cache, experiment(), out=tmp_path / "cut", existing=Existing(resume=True))
    assert_same(state(run), state(tmp_path / "cut"))


def test_a_run_is_saved_now_and_then_within_an_epoch(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    real = RunFolder.save_checkpoint

    def note(self: RunFolder, content: dict[str, object]) -> None:
        saved.append(int(str(content["step"])))
        real(self, content)

    monkeypatch.setattr(RunFolder, "save_checkpoint", note)
    train(cache, experiment("train.epochs=1", "train.save_minutes=1e-9"), out=tmp_path / "run")
    assert saved == [1, 2, 3, 4, 5, 6, 7, 8, 0]
