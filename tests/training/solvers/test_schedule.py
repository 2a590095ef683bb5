from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.conftest import COMMAND, Fails, Log, Patch, assert_same, experiment, state, table, weights
from vse.training.cli import train_main
from vse.training.kinds import InputKind
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model
from vse.training.models.encoders.linear import BranchSettings
from vse.training.settings import TrainConfig
from vse.training.solvers import retrieval
from vse.training.solvers.optimisation import OPTIMIZERS, AveragedWeights, Schedule
from vse.training.training import train
from vse.training.use.model import load_run

RATE = 0.01


def model() -> Model:
    config = ModelConfig(dim=4, word_dim=3)
    return build_model(config, InputSpec(InputKind.VECTORS, 5, "images"), InputSpec(InputKind.WORDS, 7, "captions"))


def schedule(**settings: Any) -> tuple[Schedule, Model, torch.optim.Adam]:
    made = model()
    found = Schedule(TrainConfig.model_validate({"learning_rate": RATE, **settings}), made)
    return found, made, torch.optim.Adam(found.build_parameter_groups())


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
        found.set_learning_rates(optimizer, epoch)
        assert found.learning_rate(epoch) == pytest.approx(RATE * factor)
        now = rates(made, optimizer)
        assert now["image_encoder.linear.weight"] == pytest.approx(RATE * factor)
        assert now["caption_encoder.words.weight"] == pytest.approx(0.3 * factor)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_cosine_falls_over_all_updates_after_the_warm_up(warmup: int) -> None:
    own = {"caption_encoder": 0.3}
    found, made, optimizer = schedule(epochs=2, schedule="cosine", warmup_steps=warmup, learning_rates=own, decay_at=[1])
    for number in range(10):
        epoch, update = divmod(number, 5)
        found.set_learning_rates(optimizer, epoch, update, 5)
        done = (number - warmup) / (10 - warmup)
        factor = (number + 1) / warmup if number < warmup else 0.5 + 0.5 * math.cos(math.pi * done)
        assert found.learning_rate(epoch, update, 5) == pytest.approx(RATE * factor)
        now = rates(made, optimizer)
        assert now["image_encoder.linear.weight"] == pytest.approx(RATE * factor)
        assert now["caption_encoder.words.weight"] == pytest.approx(0.3 * factor)


def test_names_of_parts_give_rates_and_a_warm_up_may_last_beyond_an_epoch() -> None:
    found, _, _ = schedule(epochs=3, decay_at=[2], warmup_steps=4)
    factors = [found.learning_rate_factor(epoch, update, 3) for epoch in range(3) for update in range(3)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.1, 0.1, 0.1])
    found, made, optimizer = schedule(learning_rates={"caption_encoder.words": 0.5, "caption_encoder": 0.25})
    found.set_learning_rates(optimizer, 0)
    expected = {"image_encoder": RATE, "caption_encoder": 0.25, "caption_encoder.words": 0.5}
    for name, rate in rates(made, optimizer).items():
        assert rate == expected[max((part for part in expected if name.startswith(part)), key=len)], name


def test_rows_have_their_last_rate_and_an_endless_warm_up_a_warning(cache: Path, tmp_path: Path, caplog: Log) -> None:
    with caplog.at_level(logging.WARNING):
        train(cache, experiment("train.epochs=1", "train.warmup_steps=8"), out=tmp_path / "run")
    assert "train.warmup_steps: all 8 updates are warm-up" in caplog.text
    run = train(cache, experiment("train.schedule=cosine", "train.warmup_steps=4"), out=tmp_path / "cosine")
    expected = [2e-4 * (1 + math.cos(math.pi * (done - 4) / 20)) / 2 for done in (7, 15, 23)]
    assert [float(row["learning_rate"]) for row in table(run)] == pytest.approx(expected)


IMAGE = ["image_encoder.linears.0", "image_encoder.linears.1", "image_encoder.batch_norm"]
UNDECAYED: dict[str, list[str]] = {
    "words": ["caption_encoder.words.weight"],
    "embeddings": ["caption_encoder.words.weight"],
    "biases": [*(f"{name}.bias" for name in IMAGE), *(f"caption_encoder.recurrent.bias_{of}_l0" for of in ("ih", "hh"))],
    "norms": ["image_encoder.batch_norm.weight", "image_encoder.batch_norm.bias"],
}
UNDECAYED["vectors"] = [*UNDECAYED["biases"], "image_encoder.batch_norm.weight"]


@pytest.mark.parametrize("kinds", [*([kind] for kind in UNDECAYED), [], ["words", "vectors"]])
def test_weights_that_do_not_decay_are_named_by_their_kinds(kinds: list[str]) -> None:
    torch.manual_seed(0)
    branch = BranchSettings(widths=[6, 4])
    inputs = InputSpec(InputKind.VECTORS, 5, "images"), InputSpec(InputKind.WORDS, 7, "captions")
    made = build_model(ModelConfig(dim=4, word_dim=3, image_encoder=branch), *inputs)
    settings = TrainConfig.model_validate({"weight_decay": 0.5, "undecayed": kinds, "learning_rates": {"image_encoder": 0.1}})
    decay_of = {
        id(w): group["weight_decay"] for group in Schedule(settings, made).build_parameter_groups() for w in group["params"]
    }
    found = {name for name, weight in made.named_parameters() if not decay_of[id(weight)]}
    assert found == {name for kind in kinds for name in UNDECAYED[kind]}
    assert set(decay_of.values()) <= {0.0, 0.5}


def test_parts_wait_without_gradients_and_what_is_frozen_for_good_stays_so() -> None:
    found, made, _ = schedule(frozen={"caption_encoder": 2, "caption_encoder.words": "always"})
    caption, words = made.caption_encoder, made.caption_encoder.words
    for epoch, trained in enumerate([False, False, True]):
        found.freeze_scheduled_parts(epoch)
        made.train()
        assert made.image_encoder.training
        assert made.image_encoder.linear.weight.requires_grad
        assert caption.recurrent.training == trained
        assert {weight.requires_grad for weight in caption.recurrent.parameters()} == {trained}
        assert not words.training
        assert not words.weight.requires_grad
    made = model()
    made.freeze("image_encoder")
    found = Schedule(TrainConfig(frozen={"image_encoder": 1}), made)
    for epoch in range(2):
        found.freeze_scheduled_parts(epoch)
        assert not made.image_encoder.linear.weight.requires_grad
    assert not made.train().image_encoder.training


def test_a_frozen_part_changes_only_when_its_epochs_are_over(cache: Path, tmp_path: Path) -> None:
    frozen = "train.frozen={caption_encoder: 2, image_encoder: 0}"
    runs = [train(cache, experiment(f"train.epochs={n}", frozen), out=tmp_path / str(n)) for n in (1, 2, 3)]
    one, two, three = (state(run)["model"] for run in runs)
    for name in one:
        assert torch.equal(one[name], two[name]) == name.startswith("caption_encoder"), name
        assert not torch.equal(two[name], three[name]), name
    assert [float(row["learning_rate"]) for row in table(runs[2])] == pytest.approx([2e-4, 2e-4, 2e-5])


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "train.frozen={caption_encoder.word: 1}",
            "the model has no part 'caption_encoder.word' (did you mean 'caption_encoder.words'",
        ),
        ("train.learning_rates={cnn: 1e-5}", "train.learning_rates: the model has no part 'cnn'"),
        ("train.frozen={image_encoder: 1, caption_encoder: always}", "no part of the model is left to train in epoch 1"),
        ("train.frozen={image_encoder: -1}", "greater than or equal to 0"),
        ("train.learning_rates={image_encoder: 0}", "greater than 0"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(setting: str, line: str, cache: Path, tmp_path: Path, fails: Fails) -> None:
    assert line in fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, "--set", setting)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def slow_mean(history: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """The first of the history are the weights before any update."""
    means = copied(history[0])
    for t, now in enumerate(history[1:], 1):
        left = min(decay, (1 + t) / (10 + t))
        for name, mean in means.items():
            means[name] = left * mean + (1 - left) * now[name] if mean.is_floating_point() else now[name]
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


AVERAGED = ["train.ema=0.7", "train.learning_rate=0.01", "model.image_encoder={name: branch, widths: [12, 16]}"]


def test_a_run_validates_the_mean_and_keeps_it_as_the_best(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    seen: list[dict[str, Tensor]] = []
    real = retrieval.RetrievalTrainer.validate

    def watched(self: retrieval.RetrievalTrainer) -> dict[str, float]:
        seen.append(copied(self.model.state_dict()))
        return real(self)

    monkeypatch.setattr(retrieval.RetrievalTrainer, "validate", watched)
    run = train(cache, experiment(*AVERAGED), out=tmp_path / "run")
    last: dict[str, Any] = state(run)
    best = max(range(3), key=lambda epoch: last["rows"][epoch]["rsum"])
    assert_same(weights(run), seen[best])
    assert_same(seen[-1], last["averaged"]["weights"])
    assert any(not torch.equal(last["model"][name], mean) for name, mean in seen[-1].items())
    assert "image_encoder.batch_norm.running_mean" in seen[-1]
    kept = load_run(run, "val", device="cpu").model.state_dict()
    assert_same(copied(kept), seen[best])


def test_the_training_itself_is_the_same_with_the_mean_and_without(cache: Path, tmp_path: Path) -> None:
    plain = state(train(cache, experiment(*AVERAGED[1:], "train.epochs=2"), out=tmp_path / "plain"))
    averaged = state(train(cache, experiment(*AVERAGED, "train.epochs=2"), out=tmp_path / "averaged"))
    assert_same(plain["model"], averaged["model"])
    assert_same(plain["optimizer"], averaged["optimizer"])
    assert "averaged" not in plain


TORCH = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def trained(optimizer: Any, n_steps: int, state: dict[str, Any] | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights and state after steps on a fixed problem, of two groups of weights that learn at their own rates."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(7, 5)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1}]
    made = optimizer(groups, lr=0.01, fused=True)
    if state is not None:
        made.load_state_dict(deepcopy(state))  # whose tensors it takes
    for _ in range(n_steps):
        made.zero_grad(set_to_none=True)
        model(inputs).square().sum().backward()
        made.step()
    assert all(weight.requires_grad and weight.grad_fn is None for weight in model.parameters())
    return list(model.parameters()), made.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_torch_s_own_to_the_bit_and_continue_from_their_state(name: str) -> None:
    ours, our_state = trained(OPTIMIZERS[name], 4)
    theirs, their_state = trained(TORCH[name], 4)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    torch.testing.assert_close(our_state["state"], their_state["state"], rtol=0, atol=0)
    assert our_state["param_groups"] == their_state["param_groups"]
    _, state = trained(TORCH[name], 3)
    ours, _ = trained(OPTIMIZERS[name], 2, state)
    theirs, _ = trained(TORCH[name], 2, state)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
