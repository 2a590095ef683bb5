"""What adversaries that draw negatives share: a categorical distribution, and REINFORCE to train it.

Of a query q the candidate c is drawn with p(c | q) = softmax_c(f(q) . c), and rewarded by what it costs the model. The
gradient of the expected reward is E[(reward - baseline) grad log p(c | q)] (Williams, 1992).

What all adversaries share: weights of their own, updated in the same step as the model, saved and resumed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.train.data.captions import CaptionInputs
from vse.train.data.images import TrainingImages
from vse.train.data.pairs import Pairs
from vse.train.losses.base import Batch, Cost, Loss, Objective, Ranking
from vse.train.models.build import Model
from vse.train.models.encoders.base import xavier_linear
from vse.train.settings import AdversarySettings


@dataclass(frozen=True)
class Opponent:
    """What an adversary plays against.

    model, loss : the experiment's
    pairs, images, captions : what is trained on
    batch_size, precision, device : of a training step
    """

    model: Model
    loss: Loss
    pairs: Pairs
    images: TrainingImages
    captions: CaptionInputs
    batch_size: int
    precision: str
    device: torch.device


class Round(NamedTuple):
    """What both players make of a batch.

    cost : what the model minimises
    loss : what the adversary minimises
    measures : scalars that a run logs, as means over an epoch
    """

    cost: Cost
    loss: Tensor
    measures: dict[str, Tensor]


class Adversary(nn.Module):
    """A network that makes a batch harder and is trained against the model.

    One that adds candidates for all queries has :meth:`candidates`, and :meth:`objective` if that is not minus the model's
    loss; one that does more has a :meth:`play` of its own.
    """

    def play(self, batch: Batch, model: Model, objective: Objective, seed: int) -> Round:
        """Both players' objectives for a batch, which ``objective``, with ``seed``, gives the cost of."""
        harder = self.candidates(batch, model)
        cost = objective(harder, seed)
        return Round(cost, self.objective(cost, harder), {})

    def candidates(self, batch: Batch, model: Model) -> Batch:
        """The batch with further candidates, see ``more_images`` and ``more_captions`` of a batch."""
        return batch

    def objective(self, cost: Cost, batch: Batch) -> Tensor:
        """What the adversary minimises: minus the model's loss, unless it says otherwise."""
        return -cost.loss

    def start_epoch(self, model: Model) -> None:
        """Called before the first step of an epoch."""


class ReinforceSettings(AdversarySettings):
    """Settings of an adversary that draws negatives (Bose et al., ViGIL 2018; options as in Bose et al., ACL 2018)."""

    architecture: Literal["linear", "mlp", "bilinear"] = Field(
        "mlp", description="f(q) of the logits f(q) . c: W q + b, or W' relu(W q + b) + b', or W q without b"
    )
    hidden: PositiveInt = Field(512, description="units of the MLP's hidden layer")
    scale: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="what is added to the logits from the start, so many times q . c, so that near candidates are likelier; "
        "0: nothing, all candidates start alike",
    )
    samples: PositiveInt = Field(1, description="negatives drawn for each query")
    baseline: Literal["none", "moving_average", "self_critical"] = Field(
        "moving_average",
        description="what is subtracted from rewards: nothing, their running mean, or the reward of the likeliest candidate",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="of the running mean of rewards")
    entropy_weight: float = Field(0.0, ge=0, description="weight of max(0, log entropy_of - H), H the entropy of p(. | q)")
    entropy_of: PositiveInt = Field(10, description="of so many candidates a uniform choice has the entropy that H is held at")


class Drawn(NamedTuple):
    """Candidates drawn for n queries: their numbers (n, s), log p of each (n, s), the entropies and the likeliest ones (n,).

    A query that has no candidate draws number 0, and counts nowhere: ``possible`` (n,) is False.
    """

    numbers: Int[Tensor, "n s"]
    log_probabilities: Float[Tensor, "n s"]
    entropies: Float[Tensor, " n"]
    likeliest: Int[Tensor, " n"]
    possible: Bool[Tensor, " n"]


class Turn(NamedTuple):
    """One direction of a round: what the model and the adversary minimise, and what a run logs."""

    cost: Float[Tensor, ""]
    loss: Float[Tensor, ""]
    measures: dict[str, Tensor]


def measured(
    drawn: Drawn, rewards: Tensor, masked_share: Tensor, scores: Float[Tensor, "n s"], ranking: Ranking
) -> dict[str, Tensor]:
    """Means over queries: entropy, reward, probability of what is masked, and how far drawn negatives exceed the hardest."""
    hardest = ranking.scores.masked_fill(~ranking.negatives, -torch.inf).amax(1)
    return {
        "entropy": drawn.entropies.mean().detach(),
        "reward": rewards.mean().detach(),
        "masked": masked_share.mean().detach(),
        "harder": (scores.mean(1) - hardest).mean().detach(),
    }


class Inference(nn.Module):
    """f(q): from queries (n, dim) to what candidates (m, dim) are compared with; its logits are (n, m)."""

    def __init__(self, dim: int, settings: ReinforceSettings) -> None:
        super().__init__()
        self.scale = settings.scale
        if settings.architecture == "mlp":
            self.layers: nn.Module = nn.Sequential(
                xavier_linear(dim, settings.hidden), nn.ReLU(), xavier_linear(settings.hidden, dim)
            )
        else:
            self.layers = xavier_linear(dim, dim)
            if settings.architecture == "bilinear":
                self.layers = nn.Linear(dim, dim, bias=False)
                nn.init.xavier_uniform_(self.layers.weight)

    def forward(self, queries: Float[Tensor, "n dim"], candidates: Float[Tensor, "m dim"]) -> Float[Tensor, "n m"]:
        asked: Tensor = self.layers(queries)
        return (asked + self.scale * queries).float() @ candidates.float().T


def draw(logits: Float[Tensor, "n m"], masked: Bool[Tensor, "n m"] | None, samples: int) -> Drawn:
    """Draw candidates that are not ``masked`` by their softmax, with torch's default generator."""
    possible = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if masked is not None:
        possible = ~masked.all(1)
        logits = logits.masked_fill(masked & possible[:, None], -torch.inf)
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    with torch.no_grad():
        numbers = numbers_at(p, torch.rand(len(p), samples, dtype=torch.float64, device=p.device))
    entropies = -(p * log_p.clamp(min=-1e4)).sum(1)
    return Drawn(numbers, log_p.gather(1, numbers), entropies, p.detach().argmax(1), possible)


def numbers_at(probabilities: Float[Tensor, "n m"], uniform: Float[Tensor, "n s"]) -> Int[Tensor, "n s"]:
    """Return the first candidate of each row whose cumulative probability exceeds a ``uniform`` number from [0, 1).

    The sum is in float64: in float32 the steps of many candidates are lost, and these would never be drawn. A candidate of
    probability 0 is never returned. A row with a NaN returns its last candidate.
    """
    cumulative = probabilities.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True).clamp(max=probabilities.shape[1] - 1)


class Baseline(nn.Module):
    """What rewards are compared with; the running mean is kept with the adversary's weights."""

    mean: Tensor
    seen: Tensor

    def __init__(self, settings: ReinforceSettings) -> None:
        super().__init__()
        self.kind, self.momentum = settings.baseline, settings.momentum
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    @torch.no_grad()
    def forward(self, rewards: Float[Tensor, "n s"], of_likeliest: Float[Tensor, " n"] | None) -> Float[Tensor, "n s"]:
        """Rewards minus the baseline; then the running mean takes in these rewards."""
        if self.kind == "none":
            return rewards
        if of_likeliest is not None:
            return rewards - of_likeliest[:, None]
        advantages = rewards - self.mean / self.seen.clamp(min=1e-12)  # Adam's correction of a mean that starts at 0
        self.mean.lerp_(rewards.mean(), 1 - self.momentum)
        self.seen.lerp_(torch.ones_like(self.seen), 1 - self.momentum)
        return advantages


def surrogate(drawn: Drawn, advantages: Float[Tensor, "n s"], settings: ReinforceSettings) -> Float[Tensor, ""]:
    """What the adversary minimises: its gradient is minus that of the expected reward, plus that of the entropy term."""
    of_queries = -(advantages * drawn.log_probabilities).mean(1)
    if settings.entropy_weight:
        floor = torch.log(torch.tensor(float(settings.entropy_of)))
        of_queries = of_queries + settings.entropy_weight * (floor - drawn.entropies).clamp(min=0)
    return (of_queries * drawn.possible).sum() / drawn.possible.sum().clamp(min=1)
