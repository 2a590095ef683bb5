"""A running mean of weights: its values, what it is of, and that it is what a run validates and keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.conftest import assert_same, experiment, state, weights
from vse.train.solvers import adam
from vse.train.solvers.optimisation import AveragedWeights
from vse.train.training import train
from vse.train.use.model import load_run


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def slow_mean(history: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """The mean number by number; the first of the history are the weights before any update."""
    means = copied(history[0])
    for t, now in enumerate(history[1:], 1):
        left = min(decay, (1 + t) / (10 + t))
        for name, mean in means.items():
            for place in range(mean.numel()):
                before, weight = mean.view(-1)[place].item(), now[name].view(-1)[place].item()
                mean.view(-1)[place] = left * before + (1 - left) * weight if mean.is_floating_point() else weight
    return means


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.99])
def test_the_mean_is_that_of_its_definition_with_statistics_and_counts_of_a_batch_norm(decay: float) -> None:
    model = network()
    averaged, history = AveragedWeights(model, decay), [copied(model.state_dict())]
    for _ in range(6):
        model(torch.randn(5, 3))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight))
        averaged.update()
        history.append(copied(model.state_dict()))
    assert int(averaged.weights["1.num_batches_tracked"]) == 6
    for name, mean in slow_mean(history, decay).items():
        torch.testing.assert_close(averaged.weights[name], mean)


def test_the_model_has_the_mean_for_a_while_and_then_its_own_weights_to_the_bit() -> None:
    model = network()
    averaged = AveragedWeights(model, 0.5)
    with torch.no_grad():
        model[0].weight.add_(1)
    averaged.update()
    own = copied(model.state_dict())
    with averaged.in_place():
        assert_same(copied(model.state_dict()), averaged.weights)
    assert_same(copied(model.state_dict()), own)
    assert not torch.equal(own["0.weight"], averaged.weights["0.weight"])


def test_it_continues_from_its_state() -> None:
    model = network()
    first = AveragedWeights(model, 0.9)
    for _ in range(3):
        first.update()
    with torch.no_grad():
        model[0].weight.mul_(2)
    second = AveragedWeights(model, 0.9)
    second.restore(first.state())
    for averaged in (first, second):
        averaged.update()
    assert_same(first.state(), second.state())


SETS = ["train.ema=0.7", "train.learning_rate=0.01", "model.image_encoder={name: branch, widths: [12, 16]}"]


def test_a_run_validates_the_mean_and_keeps_it_as_the_best(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    real = adam.Trainer.validate

    def watched(self: adam.Trainer) -> dict[str, float]:
        seen.append(copied(self.model.state_dict()))
        return real(self)

    monkeypatch.setattr(adam.Trainer, "validate", watched)
    run = train(cache, experiment(*SETS), out=tmp_path / "run")
    last: dict[str, Any] = state(run)
    best = max(range(3), key=lambda epoch: last["rows"][epoch]["rsum"])
    assert_same(weights(run), seen[best])
    assert_same(seen[-1], last["averaged"]["weights"])
    assert any(not torch.equal(last["model"][name], mean) for name, mean in seen[-1].items())
    assert "image_encoder.batch_norm.running_mean" in seen[-1]
    kept = load_run(run, "val", device="cpu").model.state_dict()
    assert_same(copied(kept), seen[best])


def test_the_training_itself_is_the_same_with_the_mean_and_without(cache: Path, tmp_path: Path) -> None:
    plain = state(train(cache, experiment(*SETS[1:], "train.epochs=2"), out=tmp_path / "plain"))
    averaged = state(train(cache, experiment(*SETS, "train.epochs=2"), out=tmp_path / "averaged"))
    assert_same(plain["model"], averaged["model"])
    assert_same(plain["optimizer"], averaged["optimizer"])
    assert "averaged" not in plain
