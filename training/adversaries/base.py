"""The base class of adversaries, and REINFORCE for adversaries that sample negatives from a categorical distribution.

A training step updates the weights of the model and of the adversary, and a checkpoint contains both.

For a query q, a candidate c is sampled from p(c | q) = softmax_c(f(q) . c), where f is a network of the adversary. The
reward of c is the model's cost for this negative. The gradient of the expected reward is
E[(reward - baseline) grad log p(c | q)] (Williams, 1992).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.training.data.images import TrainingImages
from vse.training.data.pairs import CaptionInputs, Pairs
from vse.training.losses.base import Batch, Cost, Loss, Objective, QueryScores
from vse.training.models.build import Model
from vse.training.models.encoders.base import xavier_linear
from vse.training.settings import AdversarySettings


@dataclass(frozen=True)
class Opponent:
    """The model that an adversary is trained against, with its loss, its data and its training settings."""

    model: Model
    loss: Loss
    pairs: Pairs
    image_inputs: TrainingImages
    caption_inputs: CaptionInputs
    batch_size: int
    precision: str
    device: torch.device


class AdversarialLosses(NamedTuple):
    """The loss that the model minimises, the loss that the adversary minimises, and metrics for the log of the run."""

    model_cost: Cost
    adversary_loss: Tensor
    metrics: dict[str, Tensor]


class Adversary(nn.Module):
    """A network that makes a batch harder and is trained against the model.

    A subclass that adds negatives to a batch overrides :meth:`add_candidates` and, if its loss is not minus the model's cost,
    also :meth:`compute_adversary_loss`. Any other subclass overrides :meth:`compute_losses`.
    """

    def compute_losses(self, batch: Batch, model: Model, objective: Objective, seed: int) -> AdversarialLosses:
        """Return the losses of model and adversary for a batch.

        ``objective(batch, seed)`` computes the cost that the model minimises. ``seed`` is the seed of random negatives.
        """
        harder = self.add_candidates(batch, model)
        cost = objective(harder, seed)
        return AdversarialLosses(cost, self.compute_adversary_loss(cost, harder), {})

    def add_candidates(self, batch: Batch, model: Model) -> Batch:
        """Return the batch with ``extra_negative_images`` and ``extra_negative_captions``. The default adds none."""
        return batch

    def compute_adversary_loss(self, cost: Cost, batch: Batch) -> Tensor:
        """Return the loss of the adversary. The default is minus the model's cost."""
        return -cost.value

    def start_epoch(self, model: Model) -> None:
        """Prepare for an epoch. The solver calls this method before the first step of each epoch."""


class ReinforceSettings(AdversarySettings):
    """The settings of an adversary that samples negatives and is trained by REINFORCE (Bose et al., ViGIL 2018, ACL 2018)."""

    architecture: Literal["linear", "mlp", "bilinear", "none"] = Field(
        "mlp",
        description="network f(q) of the logits f(q) . c: W q + b, or W' relu(W q + b) + b', or W q without b; none: no "
        "network, so the logits are scale q . c and nothing is learned",
    )
    hidden: PositiveInt = Field(512, description="number of units of the MLP's hidden layer")
    scale: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="factor of the term q . c of the logits, which makes near candidates likelier from the start; 0: all "
        "candidates start with similar probabilities",
    )
    samples: PositiveInt = Field(1, description="number of negatives sampled for each query")
    baseline: Literal["none", "moving_average", "self_critical"] = Field(
        "moving_average",
        description="baseline that is subtracted from rewards: none, their running mean, or the reward of the likeliest "
        "candidate",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the running mean of rewards")
    entropy_weight: float = Field(0.0, ge=0, description="weight of max(0, log entropy_of - H), H the entropy of p(. | q)")
    entropy_of: PositiveInt = Field(
        10, description="number n of candidates: a uniform choice among n or more candidates has no entropy penalty"
    )


class SampledCandidates(NamedTuple):
    """The s candidates sampled for each of n queries, and the likeliest candidate of each query.

    ``has_unmasked_candidate`` is False for a query whose candidates are all masked. The samples of such a query must not be
    used.
    """

    indices: Int[Tensor, "n s"]
    log_probabilities: Float[Tensor, "n s"]
    entropies: Float[Tensor, " n"]
    likeliest_indices: Int[Tensor, " n"]
    has_unmasked_candidate: Bool[Tensor, " n"]


class DirectionLosses(NamedTuple):
    """The losses of one direction (images as queries, or captions as queries), and metrics for the log of the run.

    ``model_cost`` : the model's cost for these queries.
    ``adversary_loss`` : the adversary's loss for these queries.
    """

    model_cost: Float[Tensor, ""]
    adversary_loss: Float[Tensor, ""]
    metrics: dict[str, Tensor]


def compute_sampling_metrics(
    sample: SampledCandidates, rewards: Tensor, masked_share: Tensor, scores: Float[Tensor, "n s"], query_scores: QueryScores
) -> dict[str, Tensor]:
    """Return metrics of the sampled negatives, as means over queries: ``entropy``, ``reward``, ``masked`` and ``harder``.

    ``masked`` is the mean of ``masked_share``. ``harder`` is the score of a sampled negative minus the score of the hardest
    negative of the batch.

    ``masked_share`` : probability p(c | q), summed over the masked candidates (false negatives), for each query.
    ``scores`` : scores of the sampled negatives.
    ``query_scores`` : scores of the queries with the candidates of the batch.
    """
    hardest = query_scores.scores.masked_fill(~query_scores.negative_mask, -torch.inf).amax(1)
    return {
        "entropy": sample.entropies.mean().detach(),
        "reward": rewards.mean().detach(),
        "masked": masked_share.mean().detach(),
        "harder": (scores.mean(1) - hardest).mean().detach(),
    }


class CandidateLogits(nn.Module):
    """A network that computes the logits f(q) . c + scale q . c of queries q (n, dim) and candidates c (m, dim).

    ``layers`` is the part f. It is None for the architecture ``none``, where f(q) = 0. ``scale`` is a constant setting.
    """

    def __init__(self, dim: int, settings: ReinforceSettings) -> None:
        super().__init__()
        self.scale = settings.scale
        self.layers: nn.Module | None = None
        if settings.architecture == "mlp":
            self.layers = nn.Sequential(xavier_linear(dim, settings.hidden), nn.ReLU(), xavier_linear(settings.hidden, dim))
        elif settings.architecture == "linear":
            self.layers = xavier_linear(dim, dim)
        elif settings.architecture == "bilinear":
            self.layers = nn.Linear(dim, dim, bias=False)
            nn.init.xavier_uniform_(self.layers.weight)

    def forward(self, queries: Float[Tensor, "n dim"], candidates: Float[Tensor, "m dim"]) -> Float[Tensor, "n m"]:
        scaled = self.scale * queries
        mapped = scaled if self.layers is None else self.layers(queries) + scaled
        return mapped.float() @ candidates.float().T


def sample_candidates(logits: Float[Tensor, "n m"], masked: Bool[Tensor, "n m"] | None, samples: int) -> SampledCandidates:
    """Sample ``samples`` candidates for each query from the softmax of its logits, with torch's default random generator.

    Candidates that are ``masked`` for a query are not sampled, unless all candidates are masked for the query.
    """
    has_unmasked_candidate = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if masked is not None:
        has_unmasked_candidate = ~masked.all(1)
        logits = logits.masked_fill(masked & has_unmasked_candidate[:, None], -torch.inf)
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    with torch.no_grad():
        indices = sample_by_inverse_cdf(p, torch.rand(len(p), samples, dtype=torch.float64, device=p.device))
    entropies = -(p * log_p.clamp(min=-1e4)).sum(1)
    return SampledCandidates(indices, log_p.gather(1, indices), entropies, p.detach().argmax(1), has_unmasked_candidate)


def sample_by_inverse_cdf(probabilities: Float[Tensor, "n m"], uniform: Float[Tensor, "n s"]) -> Int[Tensor, "n s"]:
    """Return samples from the categorical distribution in each row, given uniform random numbers in [0, 1).

    A sample is the column of the first candidate whose cumulative probability exceeds the random number. A candidate of
    probability 0 is never sampled. The result for a row with a NaN is the last candidate.
    """
    # In float32 the sum would lose the small probabilities of many candidates.
    cumulative = probabilities.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, below, right=True).clamp(max=probabilities.shape[1] - 1)


class RewardBaseline(nn.Module):
    """The baseline of REINFORCE, a number that is subtracted from each reward to reduce the variance of the gradient.

    ``mean`` : running mean of rewards, which starts at 0 and is thus too low.
    ``seen`` : total weight of the rewards in ``mean``; ``mean`` / ``seen`` is the corrected mean, as in Adam.
    """

    mean: Tensor
    seen: Tensor

    def __init__(self, settings: ReinforceSettings) -> None:
        super().__init__()
        self.kind, self.momentum = settings.baseline, settings.momentum
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    @torch.no_grad()
    def subtract_and_update(
        self, rewards: Float[Tensor, "n s"], likeliest_rewards: Float[Tensor, " n"] | None
    ) -> Float[Tensor, "n s"]:
        """Return rewards minus the baseline. If the baseline is a moving average, update it with these rewards.

        ``likeliest_rewards`` : reward of each query's likeliest candidate, used as the baseline; None: the moving average is
            used, or no baseline.
        """
        if self.kind == "none":
            return rewards
        if likeliest_rewards is not None:
            return rewards - likeliest_rewards[:, None]
        advantages = rewards - self.mean / self.seen.clamp(min=1e-12)  # Adam's correction of a mean that starts at 0
        self.mean.lerp_(rewards.mean(), 1 - self.momentum)
        self.seen.lerp_(torch.ones_like(self.seen), 1 - self.momentum)
        return advantages


def reinforce_loss(
    sample: SampledCandidates, advantages: Float[Tensor, "n s"], settings: ReinforceSettings
) -> Float[Tensor, ""]:
    """Return a loss whose gradient is minus the gradient of the expected reward, plus a penalty for a low entropy."""
    losses = -(advantages * sample.log_probabilities).mean(1)
    if settings.entropy_weight:
        floor = torch.log(torch.tensor(float(settings.entropy_of)))
        losses = losses + settings.entropy_weight * (floor - sample.entropies).clamp(min=0)
    return (losses * sample.has_unmasked_candidate).sum() / sample.has_unmasked_candidate.sum().clamp(min=1)
