"""Learning rates, their decay, and parts that wait: what a training changes in which epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import COMMAND, experiment, table
from vse.pipeline.errors import UserError
from vse.train.cli import train_main
from vse.train.kinds import Kind
from vse.train.models.build import Input, Model, ModelConfig, build_model
from vse.train.models.encoders.mlp import BranchSettings
from vse.train.run.folder import RunFolder
from vse.train.settings import TrainConfig
from vse.train.solvers.optimisation import Schedule
from vse.train.training import train

RATE = 0.01


def model() -> Model:
    config = ModelConfig(dim=4, word_dim=3)
    return build_model(config, Input(Kind.VECTORS, 5, "images"), Input(Kind.WORDS, 7, "captions"))


def schedule(**settings: Any) -> tuple[Schedule, Model, torch.optim.Adam]:
    made = model()
    found = Schedule(TrainConfig.model_validate({"learning_rate": RATE, **settings}), made)
    return found, made, torch.optim.Adam(found.groups())


def rates(made: Model, optimizer: torch.optim.Adam) -> dict[str, float]:
    """The learning rate of every weight, by its name."""
    rate_of = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    return {name: rate_of[id(weight)] for name, weight in made.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"decay_after": 2}, [1, 1, 0.1, 0.1, 0.01]),
        ({"decay_at": [1, 4], "decay": 0.5}, [1, 0.5, 0.5, 0.5, 0.25]),
        ({"decay_at": [2, 3], "decay_after": 1}, [1, 1, 0.1, 0.01, 0.01]),
    ],
)
def test_learning_rates_decay_after_every_few_epochs_or_after_named_ones(settings: Any, expected: list[float]) -> None:
    found, made, optimizer = schedule(learning_rates={"caption_encoder": 0.3}, **settings)
    for epoch, factor in enumerate(expected):
        found.set_rates(optimizer, epoch)
        assert found.rate(epoch) == pytest.approx(RATE * factor)
        now = rates(made, optimizer)
        assert now["image_encoder.linear.weight"] == pytest.approx(RATE * factor)
        assert now["caption_encoder.words.weight"] == pytest.approx(0.3 * factor)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_cosine_falls_over_all_updates_after_the_warm_up(warmup: int) -> None:
    own = {"caption_encoder": 0.3}
    found, made, optimizer = schedule(epochs=2, schedule="cosine", warmup_steps=warmup, learning_rates=own, decay_at=[1])
    for number in range(10):
        epoch, update = divmod(number, 5)
        found.set_rates(optimizer, epoch, update, 5)
        done = (number - warmup) / (10 - warmup)
        factor = (number + 1) / warmup if number < warmup else 0.5 + 0.5 * math.cos(math.pi * done)
        assert found.rate(epoch, update, 5) == pytest.approx(RATE * factor)
        now = rates(made, optimizer)
        assert now["image_encoder.linear.weight"] == pytest.approx(RATE * factor)
        assert now["caption_encoder.words.weight"] == pytest.approx(0.3 * factor)


def test_a_warm_up_goes_with_steps_and_over_the_end_of_an_epoch() -> None:
    found, _, _ = schedule(epochs=3, decay_at=[2], warmup_steps=4)
    factors = [found.factor(epoch, update, 3) for epoch in range(3) for update in range(3)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.1, 0.1, 0.1])


def test_a_warm_up_that_never_ends_is_warned_of(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(cache, experiment("train.epochs=1", "train.warmup_steps=8"), out=tmp_path / "run")
    assert "train.warmup_steps: all 8 updates are warm-up" in caplog.text


def test_the_learning_rate_of_a_row_is_that_of_the_last_update(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.schedule=cosine", "train.warmup_steps=4"), out=tmp_path / "run")
    expected = [2e-4 * (1 + math.cos(math.pi * (done - 4) / 20)) / 2 for done in (7, 15, 23)]
    assert [float(row["learning_rate"]) for row in table(run)] == pytest.approx(expected)


def test_the_narrowest_name_gives_a_weight_its_learning_rate() -> None:
    found, made, optimizer = schedule(learning_rates={"caption_encoder.words": 0.5, "caption_encoder": 0.25})
    found.set_rates(optimizer, 0)
    expected = {"image_encoder": RATE, "caption_encoder": 0.25, "caption_encoder.words": 0.5}
    for name, rate in rates(made, optimizer).items():
        assert rate == expected[max((part for part in expected if name.startswith(part)), key=len)], name


def test_word_embeddings_do_not_decay_whatever_their_learning_rate() -> None:
    for own in ({}, {"caption_encoder": 0.5}):
        _, made, optimizer = schedule(learning_rates=own, weight_decay=0.1)
        undecayed = [w for group in optimizer.param_groups if group["weight_decay"] == 0 for w in group["params"]]
        assert [id(weight) for weight in undecayed] == [id(made.caption_encoder.words.weight)]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(made.parameters()))


IMAGE = ["image_encoder.linears.0", "image_encoder.linears.1", "image_encoder.batch_norm"]
UNDECAYED: dict[str, list[str]] = {
    "words": ["caption_encoder.words.weight"],
    "embeddings": ["caption_encoder.words.weight"],
    "biases": [
        *(f"{name}.bias" for name in IMAGE),
        *(f"caption_encoder.recurrent.bias_{of}_l0" for of in ("ih", "hh")),
    ],
    "norms": ["image_encoder.batch_norm.weight", "image_encoder.batch_norm.bias"],
}
UNDECAYED["vectors"] = [*UNDECAYED["biases"], "image_encoder.batch_norm.weight"]


@pytest.mark.parametrize("kinds", [*([kind] for kind in UNDECAYED), [], ["words", "vectors"]])
def test_weights_that_do_not_decay_are_named_by_their_kinds(kinds: list[str]) -> None:
    torch.manual_seed(0)
    branch = BranchSettings(widths=[6, 4])
    inputs = Input(Kind.VECTORS, 5, "images"), Input(Kind.WORDS, 7, "captions")
    made = build_model(ModelConfig(dim=4, word_dim=3, image_encoder=branch), *inputs)
    settings = TrainConfig.model_validate({"weight_decay": 0.5, "undecayed": kinds, "learning_rates": {"image_encoder": 0.1}})
    decay_of = {id(w): group["weight_decay"] for group in Schedule(settings, made).groups() for w in group["params"]}
    found = {name for name, weight in made.named_parameters() if not decay_of[id(weight)]}
    assert found == {name for kind in kinds for name in UNDECAYED[kind]}
    assert set(decay_of.values()) <= {0.0, 0.5}


def test_a_part_waits_without_gradients_and_in_evaluation_mode() -> None:
    found, made, _ = schedule(frozen={"caption_encoder": 2, "caption_encoder.words": "always"})
    caption, words = made.caption_encoder, made.caption_encoder.words
    for epoch, trained in enumerate([False, False, True]):
        found.start_epoch(epoch)
        made.train()
        assert made.image_encoder.training
        assert made.image_encoder.linear.weight.requires_grad
        assert caption.recurrent.training == trained
        assert {weight.requires_grad for weight in caption.recurrent.parameters()} == {trained}
        assert not words.training
        assert not words.weight.requires_grad


def test_what_a_run_has_frozen_for_good_stays_so() -> None:
    made = model()
    made.freeze("image_encoder")
    found = Schedule(TrainConfig(frozen={"image_encoder": 1}), made)
    for epoch in range(2):
        found.start_epoch(epoch)
        assert not made.image_encoder.linear.weight.requires_grad
    assert not made.train().image_encoder.training


def test_a_frozen_part_changes_only_when_its_epochs_are_over(cache: Path, tmp_path: Path) -> None:
    def after(epochs: int) -> dict[str, torch.Tensor]:
        sets = [f"train.epochs={epochs}", "train.frozen={caption_encoder: 2, image_encoder: 0}"]
        found: dict[str, torch.Tensor] = RunFolder(train(cache, experiment(*sets), out=tmp_path / str(epochs))).checkpoint()[
            "model"
        ]
        return found

    one, two, three = after(1), after(2), after(3)
    for name in one:
        waits = name.startswith("caption_encoder")
        assert torch.equal(one[name], two[name]) == waits, name
        assert not torch.equal(two[name], three[name]), name
    assert [float(row["learning_rate"]) for row in table(tmp_path / "3")] == pytest.approx([2e-4, 2e-4, 2e-5])


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("train.frozen={caption_encoder.word: 1}", "train.frozen: the model has no part 'caption_encoder.word'"),
        ("train.learning_rates={cnn: 1e-5}", "train.learning_rates: the model has no part 'cnn'"),
        ("train.frozen={image_encoder: 1, caption_encoder: always}", "no part of the model is left to train in epoch 1"),
        ("train.frozen={image_encoder: -1}", "greater than or equal to 0"),
        ("train.learning_rates={image_encoder: 0}", "greater than 0"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    setting: str, line: str, cache: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert line in fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, "--set", setting)


def test_the_nearest_part_is_suggested() -> None:
    with pytest.raises(UserError, match=r"did you mean .*caption_encoder\.words"):
        schedule(frozen={"caption_encoder.word": 1})
