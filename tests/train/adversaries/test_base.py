"""The second player of a training: candidates, an objective and an optimiser of its own, saved and resumed with the model."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.train.adversaries.conftest import SCAN
from tests.train.conftest import assert_same, experiment, state
from vse.pipeline.errors import Interrupted, UserError
from vse.train.adversaries import ADVERSARIES
from vse.train.adversaries.base import Adversary, Opponent
from vse.train.experiment import ExperimentConfig
from vse.train.losses.base import Batch, Cost
from vse.train.models.build import Model
from vse.train.models.encoders.base import unit_length
from vse.train.run.folder import RunFolder
from vse.train.run.processes import Processes
from vse.train.run.resume import Existing
from vse.train.settings import AdversarySettings
from vse.train.solvers import adam
from vse.train.training import train


class ToyAdversarySettings(AdversarySettings):
    """Captions that nobody wrote: learnt vectors, and each image pushed in a learnt direction."""

    name: Literal["toy"] = "toy"
    n_captions: int = 3

    def build(self, opponent: Opponent) -> Adversary:
        return ToyAdversary(opponent.model.dim, self.n_captions)


class ToyAdversary(Adversary):
    def __init__(self, dim: int, n_captions: int) -> None:
        super().__init__()
        self.captions = nn.Parameter(torch.randn(n_captions, dim))
        self.push = nn.Parameter(0.1 * torch.randn(dim))

    def candidates(self, batch: Batch, model: Model) -> Batch:
        images = unit_length(batch.images[0] + self.push)
        return replace(batch, more_images=(images,), more_captions=(unit_length(self.captions),))

    def objective(self, cost: Cost, batch: Batch) -> Tensor:
        return 0.01 * self.push.square().sum() - cost.loss


@pytest.fixture(autouse=True)
def line() -> Iterator[None]:
    """The line in the registry."""
    ADVERSARIES.add(ToyAdversarySettings)
    yield
    ADVERSARIES.remove("toy")


def toy(*sets: str) -> ExperimentConfig:
    return experiment("adversary={name: toy, learning_rate: 0.01}", "loss=sum", "train.epochs=2", *sets)


def test_both_players_move_by_their_own_objective_in_one_step(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two full backward passes of two copies would move them, each with the other standing still."""
    real, checked = adam.Trainer.step, []

    def step(self: adam.Trainer, batch: Any, seen: Any, objective: Any) -> Any:
        model, adversary = (copy.deepcopy(player) for player in (self.model, self.adversary))
        optimizers = []
        for player, optimizer in ((model, self.optimizer), (adversary, self.adversary_optimizer)):
            slow = torch.optim.Adam(player.parameters(), lr=optimizer.param_groups[0]["lr"])
            slow_state = copy.deepcopy(optimizer.state_dict())
            if player is adversary:
                slow.load_state_dict(slow_state)
            optimizers.append(slow)
        first_step = not self.optimizer.state
        for which in (0, 1):
            images, captions = model.embed_images(*seen), model.embed_captions(*self.task.captions.read(batch))
            pairs = adversary.candidates(Batch(images, captions, self.pairs.image_of[batch], batch), model)
            cost = objective(pairs, 0)
            loss = cost.loss if which == 0 else adversary.objective(cost, pairs)
            players = (model, adversary)
            for player in players:
                player.zero_grad()
            loss.backward()
            if which == 0:
                nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip or torch.inf)
                gradients = {name: weight.grad for name, weight in model.named_parameters()}
            else:
                optimizers[1].step()
        result = real(self, batch, seen, objective)
        for name, weight in self.model.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-7)
        if first_step:  # the model's groups differ from the copy's, so its first step alone is compared
            slow = torch.optim.Adam(model.parameters(), lr=self.optimizer.param_groups[0]["lr"])
            for name, weight in model.named_parameters():
                weight.grad = gradients[name]
            slow.step()
            for one, other in zip(self.model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        for one, other in zip(self.adversary.parameters(), adversary.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        checked.append(first_step)
        return result

    monkeypatch.setattr(adam.Trainer, "step", step)
    train(cache, toy(), out=tmp_path / "run")
    assert checked == [True] + [False] * 15


def test_its_candidates_are_negatives_of_every_query(cache: Path, tmp_path: Path) -> None:
    """Of 8 images in a batch and 3 captions of nobody, at a learning rate that moves nothing, with hinges that all count."""
    sets = ["train.epochs=1", "train.learning_rate=1e-12", "loss.margin=50", "train.batch_size=8", "loss.same_image=keep"]
    plain, more = (
        train(cache, one, out=tmp_path / str(k)) for k, one in enumerate((experiment("loss=sum", *sets), toy(*sets)))
    )
    losses = [state(run)["rows"][0]["loss"] for run in (plain, more)]
    assert losses[0] == pytest.approx(50 * (7 + 7), rel=0.02)
    assert losses[1] == pytest.approx(50 * (7 + 3 + 7 + 8), rel=0.02)


def test_it_makes_the_loss_higher_than_one_that_does_not_learn(cache: Path, tmp_path: Path) -> None:
    still = train(cache, toy("adversary.learning_rate=1e-12"), out=tmp_path / "still")
    learning = train(cache, toy("adversary.learning_rate=0.1"), out=tmp_path / "learning")
    assert state(learning)["rows"][-1]["loss"] > 1.05 * state(still)["rows"][-1]["loss"]


PLAYERS = {
    "toy": ["adversary={name: toy, learning_rate: 0.01}"],
    "ace": ["adversary={name: ace, samples: 2, entropy_weight: 0.1}"],
    "ace with a pool and vectors of its own": [
        "adversary={name: ace, candidates: 30, table: learnt, baseline: self_critical}"
    ],
    "ace renewed every epoch, moved every third step": ["adversary={name: ace, refresh: epoch, every: 3, clip: 0.5}"],
    "compositional": [*SCAN, "adversary={name: compositional, sides: both, entropy_weight: 0.1}"],
}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path, ExperimentConfig], Path]:
    """Train with a player without a stop, once. Read only."""
    folder = tmp_path_factory.mktemp("whole")

    def run(player: str, features: Path, settings: ExperimentConfig) -> Path:
        out = folder / player
        return out if out.exists() else train(features, settings, out=out)

    return run


@pytest.mark.parametrize(
    "stop_after", [pytest.param(3, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.slow), 11]
)
@pytest.mark.parametrize("player", PLAYERS)
def test_its_state_is_saved_and_resumed_bit_for_bit(
    cache: Path,
    positions: Path,
    whole_runs: Callable[[str, Path, ExperimentConfig], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    player: str,
    stop_after: int,
) -> None:
    """Stopped in the middle of an epoch, and at the end of one."""
    settings = experiment(*PLAYERS[player], "loss=sum", "train.epochs=2")
    features = positions if player == "compositional" else cache
    whole = whole_runs(player, features, settings)
    with monkeypatch.context() as patch:
        real, steps = adam.Trainer.step, iter(range(1, 99))

        def step(self: adam.Trainer, *arguments: object) -> object:
            if next(steps) == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(adam.Trainer, "step", step)
        with pytest.raises(Interrupted, match="stopped in epoch"):
            train(features, settings, out=tmp_path / "cut")
    cut = train(features, settings, out=tmp_path / "cut", existing=Existing(resume=True))
    assert_same(state(whole), state(cut))
    assert state(cut)["adversary"].keys()


def test_the_model_that_is_used_has_no_adversary(cache: Path, tmp_path: Path) -> None:
    plain, against = train(cache, experiment(), out=tmp_path / "a"), train(cache, toy(), out=tmp_path / "b")
    assert RunFolder(plain).best_weights().keys() == RunFolder(against).best_weights().keys()


def test_an_unknown_one_and_several_processes_are_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"adversary: unknown adversary 'tooy' \(did you mean 'toy'"):
        experiment("adversary=tooy")
    monkeypatch.setattr("vse.train.training.join_processes", lambda device: Alone(0, 2))
    with pytest.raises(UserError, match="an adversary requires a single process"):
        train(cache, toy(), out=tmp_path / "run")


class Alone(Processes):
    """One of two processes, of which the other never answers."""

    def broadcast(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass
