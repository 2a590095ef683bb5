"""Updates: which optimiser makes them, and of how many batches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from tests.train.conftest import assert_same, experiment, state
from tests.train.phrases.some_regions import Caches, small
from vse.pipeline.errors import Interrupted
from vse.train.losses import LOSSES
from vse.train.losses.base import Batch, Cost, Loss, Objective
from vse.train.losses.hinges import TopOfHinges
from vse.train.models.similarities.base import Similarity
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing
from vse.train.solvers import adam
from vse.train.training import train


class Attraction(Loss):
    """The mean, or the sum, of 1 - s over the pairs of a batch: each pair by itself."""

    ranks: ClassVar = False
    name: Literal["attraction"] = "attraction"

    @property
    def averages(self) -> bool:
        return self.reduction == "mean_topk"

    def objective(self, similarity: Similarity, compiled: bool = False, weights: nn.Module | None = None) -> Objective:
        def cost(batch: Batch, seed: int) -> Cost:
            pairs = torch.arange(len(batch.image_of))
            costs = 1 - similarity.score_pairs(batch.images, batch.captions, pairs, pairs)
            loss = costs.mean() if self.averages else costs.sum()
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
@pytest.mark.parametrize("reduction", ["mean_topk", "sum"])
@pytest.mark.parametrize(("size", "accumulate"), [(16, 2), (8, 4), (25, 4)])
def test_several_batches_of_independent_pairs_are_one_large_batch(
    size: int, accumulate: int, reduction: str, cache: Path, tmp_path: Path
) -> None:
    """240 pairs: of 25 the last update of an epoch has two batches, one of them short."""
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
    """A batch of two pairs has one negative for a query, however many batches make an update."""
    sets = ["loss.name=sum", "train.batch_size=2", "train.epochs=1", "train.learning_rate=1e-12"]
    one, four = (
        state(train(cache, experiment(*sets, f"train.accumulate={k}"), out=tmp_path / str(k)))["rows"][0]["loss"]
        for k in (1, 4)
    )
    assert one == pytest.approx(four, rel=1e-5)


def test_a_mean_of_the_highest_hinges_says_that_it_is_one() -> None:
    assert TopOfHinges(reduction="mean_topk").averages
    assert not any(LOSSES[name]().averages for name in LOSSES)


@pytest.mark.parametrize("phrases", [False, True])
def test_there_is_an_update_for_every_few_batches_and_for_those_that_are_left(
    phrases: bool, cache: Path, caches: Caches, tmp_path: Path
) -> None:
    def steps(name: str, *sets: str) -> tuple[int, int]:
        if phrases:
            found = state(train(caches.candidates, small("train.epochs=1", *sets), out=tmp_path / name))
        else:
            found = state(train(cache, experiment("train.epochs=1", *sets), out=tmp_path / name))
        return int(found["optimizer"]["state"][0]["step"]), len(found["rows"])

    each, _ = steps("each")
    assert each > 2
    assert steps("three", "train.accumulate=3") == (-(-each // 3), 1)
    assert steps("all", "train.accumulate=1000") == (1, 1)


@pytest.mark.parametrize(("stop", "saved"), [(0, 3), (2, 3), (4, 6), (6, 8), (7, 8)])
def test_a_signal_waits_for_the_update_at_hand(
    stop: int, saved: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["train.accumulate=3", "train.epochs=1"]
    whole = state(train(cache, experiment(*sets), out=tmp_path / "whole"))
    with monkeypatch.context() as patch:
        real, done = adam.Trainer.step, iter(range(100))

        def step(self: adam.Trainer, *arguments: Any) -> Any:
            if next(done) == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)

        patch.setattr(adam.Trainer, "step", step)
        with pytest.raises(Interrupted, match=f"stopped in epoch 1, step {saved}"):
            train(cache, experiment(*sets), out=tmp_path / "cut")
    assert RunFolder(tmp_path / "cut").checkpoint()["step"] == saved
    train(cache, experiment(*sets), out=tmp_path / "cut", existing=Existing(resume=True))
    assert_same(whole, state(tmp_path / "cut"))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_weight_decay_is_added_to_gradients_by_adam_and_taken_from_weights_by_adamw(
    optimizer: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update against the equations of Kingma and Ba and of Loshchilov and Hutter, from the gradient that it had."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    clipped = nn.utils.clip_grad_norm_

    def watched(weights: Any, bound: float) -> Any:
        norm = clipped(weights, bound)
        weight = trainers[0].model.image_encoder.linear.weight
        seen.append((weight.detach().clone(), weight.grad.clone()))
        return norm

    trainers: list[adam.Trainer] = []
    real = adam.Trainer.step

    def step(self: adam.Trainer, *arguments: Any) -> Any:
        trainers.append(self)
        return real(self, *arguments)

    monkeypatch.setattr(adam.Trainer, "step", step)
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", watched)
    rate, decay = 0.01, 0.3
    sets = ["train.batch_size=240", "train.epochs=1", f"train.learning_rate={rate}", f"train.weight_decay={decay}"]
    run = train(cache, experiment(*sets, f"train.optimizer={optimizer}"), out=tmp_path / "run")
    ((weight, gradient),) = seen
    if optimizer == "adam":
        gradient = gradient + decay * weight
    else:
        weight = weight - rate * decay * weight
    expected = weight - rate * gradient / (gradient.abs() + 1e-8)  # the first update: both means are those of one gradient
    torch.testing.assert_close(state(run)["model"]["image_encoder.linear.weight"], expected)
