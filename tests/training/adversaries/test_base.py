from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.training.adversaries.conftest import SCAN
from tests.training.conftest import Patch, assert_same, experiment, state, train_with_stops
from vse.pipeline.errors import UserError
from vse.training.adversaries import ADVERSARIES
from vse.training.adversaries.base import (
    Adversary,
    Opponent,
    ReinforceSettings,
    RewardBaseline,
    reinforce_loss,
    sample_by_inverse_cdf,
    sample_candidates,
)
from vse.training.experiment import ExperimentConfig
from vse.training.losses.base import Batch, Cost
from vse.training.models.build import Model
from vse.training.models.encoders.base import l2_normalize
from vse.training.processes.group import ProcessGroup
from vse.training.run.folder import RunFolder
from vse.training.settings import AdversarySettings
from vse.training.solvers import retrieval
from vse.training.training import train


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

    def add_candidates(self, batch: Batch, model: Model) -> Batch:
        images = l2_normalize(batch.image_embeddings[0] + self.push)
        return replace(batch, extra_negative_images=(images,), extra_negative_captions=(l2_normalize(self.captions),))

    def compute_adversary_loss(self, cost: Cost, batch: Batch) -> Tensor:
        return 0.01 * self.push.square().sum() - cost.value


@pytest.fixture(autouse=True)
def line() -> Iterator[None]:
    """The line in the registry."""
    ADVERSARIES.add(ToyAdversarySettings)
    yield
    ADVERSARIES.remove("toy")


def toy(*sets: str) -> ExperimentConfig:
    return experiment("adversary={name: toy, learning_rate: 0.01}", "loss=sum", "train.epochs=2", *sets)


def test_both_players_move_by_their_own_objective_in_one_step(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    real, checked = retrieval.RetrievalTrainer.step, []

    def step(self: retrieval.RetrievalTrainer, batch: Any, seen: Any, objective: Any) -> Any:
        model, adversary = (copy.deepcopy(player) for player in (self.model, self.adversary))
        slow = torch.optim.Adam(adversary.parameters(), lr=self.adversary_optimizer.param_groups[0]["lr"])
        slow.load_state_dict(copy.deepcopy(self.adversary_optimizer.state_dict()))

        def losses() -> tuple[Tensor, Tensor]:
            images, captions = model.embed_images(*seen), model.embed_captions(*self.task.caption_inputs.read(batch))
            pairs = adversary.add_candidates(Batch(images, captions, self.pairs.image_indices[batch], batch), model)
            cost = objective(pairs, 0)
            return cost.value, adversary.compute_adversary_loss(cost, pairs)

        losses()[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), self.settings.clip or torch.inf)
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        adversary.zero_grad()
        losses()[1].backward()
        slow.step()
        result = real(self, batch, seen, objective)
        for name, weight in self.model.named_parameters():
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-7)
        for one, other in zip(self.adversary.parameters(), adversary.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        checked.append(1)
        return result

    monkeypatch.setattr(retrieval.RetrievalTrainer, "step", step)
    train(cache, toy(), out=tmp_path / "run")
    assert len(checked) == 16


def test_candidates_are_negatives_of_every_query_and_no_part_of_the_model(cache: Path, tmp_path: Path) -> None:
    sets = ["train.epochs=1", "train.learning_rate=1e-12", "loss.margin=50", "train.batch_size=8", "loss.same_image=keep"]
    configs = (experiment("loss=sum", *sets), toy(*sets))
    runs = [train(cache, config, out=tmp_path / str(k)) for k, config in enumerate(configs)]
    losses = [state(run)["rows"][0]["loss"] for run in runs]
    assert losses[0] == pytest.approx(50 * (7 + 7), rel=0.02)
    assert losses[1] == pytest.approx(50 * (7 + 3 + 7 + 8), rel=0.02)
    plain, against = (RunFolder(run).read_best_weights() for run in runs)
    assert plain.keys() == against.keys()


def test_it_makes_the_loss_higher_than_one_that_does_not_learn(cache: Path, tmp_path: Path) -> None:
    still = train(cache, toy("adversary.learning_rate=1e-12"), out=tmp_path / "still")
    learning = train(cache, toy("adversary.learning_rate=0.1"), out=tmp_path / "learning")
    assert state(learning)["rows"][-1]["loss"] > 1.05 * state(still)["rows"][-1]["loss"]


PLAYERS = {
    "ace with a pool and vectors of its own": [
        "adversary={name: ace, samples: 2, entropy_weight: 0.1, candidates: 30, table: learnt, baseline: self_critical}"
    ],
    "ace renewed every epoch, moved every third step": ["adversary={name: ace, refresh: epoch, every: 3, clip: 0.5}"],
    "compositional": [*SCAN, "adversary={name: compositional, sides: both, entropy_weight: 0.1}"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("player", PLAYERS)
def test_its_state_is_saved_and_resumed_bit_for_bit(cache: Path, positions: Path, tmp_path: Path, player: str) -> None:
    settings = experiment(*PLAYERS[player], "loss=sum", "train.epochs=2", "train.batch_size=60")
    features = positions if player == "compositional" else cache
    whole = train(features, settings, out=tmp_path / "whole")
    cut = train_with_stops(features, settings, tmp_path / "cut", [3, 6])
    assert_same(state(whole), state(cut))
    assert state(cut)["adversary"].keys()


def test_an_unknown_one_and_several_processes_are_refused(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(UserError, match=r"adversary: unknown adversary 'tooy' \(did you mean 'toy'"):
        experiment("adversary=tooy")
    monkeypatch.setattr("vse.training.training.join_processes", lambda *_: Alone(0, 2))
    with pytest.raises(UserError, match="adversary: a single process is required"):
        train(cache, toy(), out=tmp_path / "run")


class Alone(ProcessGroup):
    """One of two processes, of which the other never answers."""

    def broadcast(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass


def settings(**changes: Any) -> ReinforceSettings:
    return ReinforceSettings(name="any", **changes)


LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[False, False, True, False], [False, True, False, False]])


def test_candidates_are_drawn_as_often_as_their_probability_says() -> None:
    torch.manual_seed(0)
    expected = LOGITS.masked_fill(MASK, -torch.inf).softmax(1)
    drawn = sample_candidates(LOGITS, MASK, 40_000)
    for numbers, p in zip(drawn.indices, expected, strict=True):
        shares = torch.bincount(numbers, minlength=4) / len(numbers)
        assert (shares - p).abs().max() < 4 * 0.5 / math.sqrt(len(numbers))
        assert not shares[p == 0].any()
    torch.testing.assert_close(drawn.log_probabilities.exp(), expected.gather(1, drawn.indices))
    assert drawn.likeliest_indices.tolist() == [1, 0]
    entropy = [-sum(p * math.log(p) for p in row if p) for row in expected.tolist()]
    assert drawn.entropies.tolist() == pytest.approx(entropy)


def test_every_one_of_566_000_candidates_can_be_drawn() -> None:
    p = torch.randn(1, 566_000, generator=torch.Generator().manual_seed(0)).softmax(1)
    exact = p[0].numpy().astype(np.longdouble)
    ends = exact.cumsum()
    middles = ((ends - exact / 2) / ends[-1]).astype(np.float64)
    assert torch.equal(sample_by_inverse_cdf(p, torch.from_numpy(middles)[None])[0], torch.arange(566_000))


def test_a_query_whose_candidates_are_all_masked_counts_nowhere() -> None:
    mask = torch.tensor([[True] * 4, [False] * 4])
    logits = LOGITS.clone().requires_grad_()
    drawn = sample_candidates(logits, mask, 2)
    assert drawn.has_unmasked_candidate.tolist() == [False, True]
    (gradient,) = torch.autograd.grad(
        reinforce_loss(drawn, torch.ones(2, 2), settings(entropy_weight=1.0, entropy_of=4)), logits
    )
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert gradient[1].any()


@pytest.mark.parametrize(("k", "acts"), [(2, False), (4, True)])
def test_the_entropy_term_holds_the_entropy_of_a_uniform_choice_of_k(k: int, acts: bool) -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -20.0]], requires_grad=True)  # the entropy of three
    drawn = sample_candidates(logits, None, 1)
    loss = reinforce_loss(drawn, torch.zeros(1, 1), settings(entropy_weight=2.0, entropy_of=k))
    assert loss.item() == pytest.approx(2 * max(0.0, math.log(k) - math.log(3)), abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool((gradient[0, 3] < 0).item()) == acts


def test_advantages_are_rewards_less_a_baseline() -> None:
    baseline = RewardBaseline(settings(baseline="moving_average", momentum=0.9))
    assert baseline.subtract_and_update(torch.tensor([[1.0], [3.0]]), None).tolist() == [[1.0], [3.0]]
    assert baseline.subtract_and_update(torch.tensor([[5.0]]), None).item() == pytest.approx(5 - 2)
    assert baseline.subtract_and_update(torch.tensor([[0.0]]), None).item() == pytest.approx(-(0.9 * 2 + 5) / 1.9)
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(RewardBaseline(settings(baseline="none")).subtract_and_update(rewards, None), rewards)
    advantages = RewardBaseline(settings(baseline="self_critical")).subtract_and_update(rewards, torch.tensor([1.0, 5.0]))
    assert advantages.tolist() == [[0, 1], [-2, -1]]
