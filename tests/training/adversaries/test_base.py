from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.adversaries.conftest import SCAN
from tests.training.conftest import Patch, assert_same, experiment, state, train_with_stops
from vse.pipeline.errors import UserError
from vse.training.adversaries import ADVERSARIES
from vse.training.adversaries.base import (
    Adversary,
    Baseline,
    CandidateLogits,
    Opponent,
    ReinforceSettings,
    SampledCandidates,
    find_quantiles,
    reinforce_loss,
    sample_candidates,
)
from vse.training.experiment import ExperimentConfig
from vse.training.losses.base import Batch, Cost
from vse.training.models.build import Model
from vse.training.models.encoders.base import unit_length
from vse.training.run.folder import RunFolder
from vse.training.run.processes import Processes
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
        images = unit_length(batch.images[0] + self.push)
        return replace(batch, extra_negative_images=(images,), extra_negative_captions=(unit_length(self.captions),))

    def adversary_loss(self, cost: Cost, batch: Batch) -> Tensor:
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
            pairs = adversary.add_candidates(Batch(images, captions, self.pairs.image_of[batch], batch), model)
            cost = objective(pairs, 0)
            loss = cost.value if which == 0 else adversary.adversary_loss(cost, pairs)
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

    monkeypatch.setattr(retrieval.RetrievalTrainer, "step", step)
    train(cache, toy(), out=tmp_path / "run")
    assert checked == [True] + [False] * 15


def test_candidates_are_negatives_of_every_query_and_no_part_of_the_model(cache: Path, tmp_path: Path) -> None:
    sets = ["train.epochs=1", "train.learning_rate=1e-12", "loss.margin=50", "train.batch_size=8", "loss.same_image=keep"]
    configs = (experiment("loss=sum", *sets), toy(*sets))
    runs = [train(cache, config, out=tmp_path / str(k)) for k, config in enumerate(configs)]
    losses = [state(run)["rows"][0]["loss"] for run in runs]
    assert losses[0] == pytest.approx(50 * (7 + 7), rel=0.02)
    assert losses[1] == pytest.approx(50 * (7 + 3 + 7 + 8), rel=0.02)
    plain, against = train(cache, experiment(), out=tmp_path / "a"), train(cache, toy(), out=tmp_path / "b")
    assert RunFolder(plain).best_weights().keys() == RunFolder(against).best_weights().keys()


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
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train with a player without a stop, once. Read only."""
    folder = tmp_path_factory.mktemp("whole")

    def run(player: str, features: Path, settings: ExperimentConfig) -> Path:
        out = folder / player
        return out if out.exists() else train(features, settings, out=out)

    return run


STOPS = [*((player, 10) for player in PLAYERS), pytest.param("toy", 7, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("player", "stop_after"), STOPS)
def test_its_state_is_saved_and_resumed_bit_for_bit(
    cache: Path, positions: Path, whole_runs: Callable[..., Path], tmp_path: Path, player: str, stop_after: int
) -> None:
    settings = experiment(*PLAYERS[player], "loss=sum", "train.epochs=2")
    features = positions if player == "compositional" else cache
    whole = whole_runs(player, features, settings)
    cut = train_with_stops(features, settings, tmp_path / "cut", [stop_after])
    assert_same(state(whole), state(cut))
    assert state(cut)["adversary"].keys()


def test_an_unknown_one_and_several_processes_are_refused(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(UserError, match=r"adversary: unknown adversary 'tooy' \(did you mean 'toy'"):
        experiment("adversary=tooy")
    monkeypatch.setattr("vse.training.training.join_processes", lambda device: Alone(0, 2))
    with pytest.raises(UserError, match="an adversary requires a single process"):
        train(cache, toy(), out=tmp_path / "run")


class Alone(Processes):
    """One of two processes, of which the other never answers."""

    def broadcast(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass


def settings(**changes: Any) -> ReinforceSettings:
    return ReinforceSettings(name="any", **changes)


LOGITS = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[False, False, True, False], [False, True, False, False]])


def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
    """The softmax over what is not masked, number by number."""
    weights = [
        [0.0 if out else math.exp(x) for x, out in zip(row, hidden, strict=True)]
        for row, hidden in zip(logits.tolist(), mask.tolist(), strict=True)
    ]
    return torch.tensor([[w / sum(row) for w in row] for row in weights], dtype=torch.float64)


def test_candidates_are_drawn_as_often_as_their_probability_says() -> None:
    torch.manual_seed(0)
    expected = probabilities(LOGITS, MASK)
    drawn = sample_candidates(LOGITS, MASK, 40_000)
    for numbers, p in zip(drawn.indices, expected, strict=True):
        shares = torch.bincount(numbers, minlength=4) / len(numbers)
        assert (shares - p).abs().max() < 4 * 0.5 / math.sqrt(len(numbers))
        assert not shares[p == 0].any()
    torch.testing.assert_close(drawn.log_probabilities.exp(), expected.gather(1, drawn.indices))
    assert drawn.likeliest_index.tolist() == [1, 0]
    entropy = [-sum(p * math.log(p) for p in row if p) for row in expected.tolist()]
    assert drawn.entropies.tolist() == pytest.approx(entropy)


def test_every_one_of_566_000_candidates_can_be_drawn() -> None:
    p = torch.randn(1, 566_000, generator=torch.Generator().manual_seed(0)).softmax(1)
    exact = p[0].numpy().astype(np.longdouble)
    ends = exact.cumsum()
    middles = ((ends - exact / 2) / ends[-1]).astype(np.float64)
    assert torch.equal(find_quantiles(p, torch.from_numpy(middles)[None])[0], torch.arange(566_000))


def test_a_query_whose_candidates_are_all_masked_counts_nowhere() -> None:
    mask = torch.tensor([[True] * 4, [False] * 4])
    logits = LOGITS.clone().requires_grad_()
    drawn = sample_candidates(logits, mask, 2)
    assert drawn.has_unmasked.tolist() == [False, True]
    (gradient,) = torch.autograd.grad(
        reinforce_loss(drawn, torch.ones(2, 2), settings(entropy_weight=1.0, entropy_of=4)), logits
    )
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert gradient[1].any()


def enumerated(logits: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """The mean of the reinforce_loss's gradient over all that can be drawn, each as often as its probability says."""
    p = logits.detach().log_softmax(1).exp()
    total = torch.zeros_like(logits)
    for numbers in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        chosen = torch.tensor(numbers)[:, None]
        log_p = logits.log_softmax(1)
        drawn = SampledCandidates(
            chosen, log_p.gather(1, chosen), torch.zeros(len(logits)), chosen[:, 0], torch.ones(len(logits)).bool()
        )
        loss = reinforce_loss(drawn, rewards.gather(1, chosen) - baseline, settings())
        total += p.gather(1, chosen).prod() * torch.autograd.grad(loss, logits)[0]
    return total


@given(
    logits=st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    baseline=st.floats(-2, 2),
)
def test_the_expected_gradient_is_that_of_the_expected_reward(logits: list[list[float]], seed: int, baseline: float) -> None:
    given_logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(given_logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected_reward = (given_logits.softmax(1) * rewards).sum(1).mean()
    (exact,) = torch.autograd.grad(-expected_reward, given_logits)
    torch.testing.assert_close(enumerated(given_logits, rewards, baseline), exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("k", "acts"), [(2, False), (4, True)])
def test_the_entropy_term_holds_the_entropy_of_a_uniform_choice_of_k(k: int, acts: bool) -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -20.0]], requires_grad=True)  # the entropy of three
    drawn = sample_candidates(logits, None, 1)
    loss = reinforce_loss(drawn, torch.zeros(1, 1), settings(entropy_weight=2.0, entropy_of=k))
    assert loss.item() == pytest.approx(2 * max(0.0, math.log(k) - math.log(3)), abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert bool((gradient[0, 3] < 0).item()) == acts


def test_advantages_are_rewards_less_a_baseline() -> None:
    baseline = Baseline(settings(baseline="moving_average", momentum=0.9))
    assert baseline.subtract_from(torch.tensor([[1.0], [3.0]]), None).tolist() == [[1.0], [3.0]]
    assert baseline.subtract_from(torch.tensor([[5.0]]), None).item() == pytest.approx(5 - 2)
    assert baseline.subtract_from(torch.tensor([[0.0]]), None).item() == pytest.approx(-(0.9 * 2 + 5) / 1.9)
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(Baseline(settings(baseline="none")).subtract_from(rewards, None), rewards)
    advantages = Baseline(settings(baseline="self_critical")).subtract_from(rewards, torch.tensor([1.0, 5.0]))
    assert advantages.tolist() == [[0, 1], [-2, -1]]


@pytest.mark.parametrize("architecture", ["linear", "mlp", "bilinear"])
def test_logits_are_products_of_what_the_network_makes_of_queries(architecture: str) -> None:
    torch.manual_seed(0)
    queries, candidates = torch.randn(3, 5), torch.randn(4, 5)
    network = CandidateLogits(5, settings(architecture=architecture, hidden=7))
    logits = network(queries, candidates)
    slow = [[torch.dot(network.layers(query), candidate).item() for candidate in candidates] for query in queries]
    torch.testing.assert_close(logits, torch.tensor(slow))
    n_weights = {"linear": 5 * 5 + 5, "mlp": 5 * 7 + 7 + 7 * 5 + 5, "bilinear": 5 * 5}[architecture]
    assert sum(weight.numel() for weight in network.parameters()) == n_weights
