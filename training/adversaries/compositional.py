"""The compositional adversary, which composes a negative image from regions of the batch, one region for each word."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from vse.pipeline.errors import UserError
from vse.training.adversaries.base import (
    AdversarialLosses,
    Adversary,
    CandidateLogits,
    DirectionLosses,
    Opponent,
    ReinforceSettings,
    RewardBaseline,
    compute_sampling_metrics,
    reinforce_loss,
    sample_candidates,
)
from vse.training.kinds import InputKind
from vse.training.losses.base import Batch, Cost, Objective, QueryScores
from vse.training.models.build import Model


class CompositionalSettings(ReinforceSettings):
    """An adversary that composes a negative image I' for each caption T (Bose et al., ViGIL at NeurIPS 2018, section 3).

    For each word e_l of T, a region v'_l is sampled from P_l(v | e_1, ..., e_m) = softmax_v(f(e_l) . v) with a network f, over
    all regions v of the batch except those of T's own image I. They form I' = {v'_1, ..., v'_m}. With the model's scores S,

        min_phi max_theta  S(I, T) - E[S(I', T)]     (Eq. 1)

    The weights theta of the model are trained by the gradient through the sampled regions. The weights phi of the adversary
    are trained by REINFORCE with the reward S(I', T). The words e_l are states of a bidirectional GRU, so each depends on all
    words. S is the experiment's similarity. In the paper, S is the similarity of SCAN with attention i2t (regions attend to
    words) and aggregation avg. But the paper's table compares the adversary with a SCAN of attention t2i.
    """

    name: Literal["compositional"] = "compositional"
    sides: Literal["images", "captions", "both"] = Field(
        "images",
        description="negatives to compose: images (from regions, for captions), captions (from words, for images), or both",
    )
    form: Literal["difference", "hinge"] = Field(
        "difference",
        description="cost that the model minimises: S(I', T) - S(I, T) (Eq. 1), or [margin - S(I, T) + S(I', T)]_+, which is "
        "then also the reward",
    )
    weight: float = Field(1.0, gt=0, description="weight of the adversary's cost (see form) in the model's loss")
    in_batch: float = Field(
        1.0, ge=0, description="weight of the experiment's own loss, with the negatives of the batch; 0: the adversary alone"
    )

    def build(self, opponent: Opponent) -> Adversary:
        if opponent.model.embedding_kinds != (InputKind.SETS, InputKind.SETS):
            name = opponent.model.config.similarity.name
            raise UserError(
                f"adversary: compositional samples regions, but {name!r} compares single vectors; use the adversary ace"
            )
        if not opponent.loss.is_ranking:
            raise UserError(f"adversary: compositional requires a ranking loss, and {opponent.loss.name} is not one")
        return CompositionalAdversary(self, opponent)


class CompositionalAdversary(Adversary):
    """The networks that compose negative images or negative captions.

    ``inferences`` : network that computes the logits, by the kind of composed negatives (``images`` or ``captions``).
    ``baselines`` : baseline of the rewards, by the same kinds.
    """

    def __init__(self, settings: CompositionalSettings, opponent: Opponent) -> None:
        super().__init__()
        self.settings, self.loss = settings, opponent.loss
        sides = ("images", "captions") if settings.sides == "both" else (settings.sides,)
        self.inferences = nn.ModuleDict({side: CandidateLogits(opponent.model.dim, settings) for side in sides})
        self.baselines = nn.ModuleDict({side: RewardBaseline(settings) for side in sides})
        self._text_indices = torch.from_numpy(opponent.pairs.text_indices)

    def compute_losses(self, batch: Batch, model: Model, objective: Objective, seed: int) -> AdversarialLosses:
        cost = objective(batch, seed)
        assert cost.query_scores is not None
        with torch.autocast(batch.image_embeddings[0].device.type, enabled=False):
            directions = [
                self._compute_direction_losses(batch, model, side, cost.query_scores[1 if side == "images" else 0])
                for side in self.inferences
            ]
        weight, in_batch = self.settings.weight, self.settings.in_batch
        margin = self.loss.margin if self.settings.form == "hinge" else 0.0
        return AdversarialLosses(
            Cost(
                in_batch * cost.value + weight * sum(direction.model_cost for direction in directions),
                in_batch * cost.collapsed_value + weight * margin * len(batch.image_indices) * len(directions),
                cost.query_scores,
            ),
            torch.stack([direction.adversary_loss for direction in directions]).sum(),
            {name: torch.stack([each.metrics[name] for each in directions]).mean() for name in directions[0].metrics},
        )

    def _compute_direction_losses(
        self, batch: Batch, model: Model, composed_kind: str, query_scores: QueryScores
    ) -> DirectionLosses:
        """Return the losses for composed negatives of one kind, ``images`` or ``captions``."""
        (parts, part_mask), (queries, query_mask) = (
            (batch.image_embeddings, batch.caption_embeddings)
            if composed_kind == "images"
            else (batch.caption_embeddings, batch.image_embeddings)
        )
        words = queries.detach()[query_mask]  # (n_words, dim), the words of all queries one after the other
        query = query_mask.nonzero()[:, 0]
        false = self._mask_false_negatives(batch).to(parts.device)[query]
        logits = self.inferences[composed_kind](words, parts.detach().flatten(0, 1)).unflatten(1, part_mask.shape)
        logits = logits.masked_fill(~part_mask, -torch.inf)
        sample = sample_candidates(logits.flatten(1), false[:, :, None].expand_as(logits).flatten(1), self.settings.samples)

        def scores(indices: Int[Tensor, "n_words s"]) -> Float[Tensor, "n s"]:
            columns = []
            for chosen in indices.unbind(1):
                composed = parts.new_zeros(*query_mask.shape, parts.shape[2])
                composed[query_mask] = parts.flatten(0, 1)[chosen]
                sides = (
                    ((composed, query_mask), batch.caption_embeddings)
                    if composed_kind == "images"
                    else (batch.image_embeddings, (composed, query_mask))
                )
                columns.append(model.similarity.score_pairs(*sides, *[torch.arange(len(query_mask), device=parts.device)] * 2))
            return torch.stack(columns, 1)

        has_unmasked_candidate = ~false.new_zeros(len(query_mask)).index_put_((query,), ~sample.has_unmasked_candidate)
        positives = query_scores.scores.gather(1, query_scores.positive_columns[:, None])
        composed = scores(sample.indices)
        rewards, costs = self._rewards(positives, composed), self._costs(positives, composed)
        likeliest_rewards = None
        if self.settings.baseline == "self_critical":
            with torch.no_grad():
                likeliest_rewards = self._rewards(positives, scores(sample.likeliest_indices[:, None]))[:, 0]
        baseline = self.baselines[composed_kind]
        assert isinstance(baseline, RewardBaseline)
        advantages = baseline.subtract_and_update(rewards.detach(), likeliest_rewards)
        query_sample = sample._replace(  # the probability of a composition is the product of the probabilities of its samples
            log_probabilities=torch.zeros_like(rewards).index_add(0, query, sample.log_probabilities),
            entropies=rewards.new_zeros(len(query_mask)).index_add(0, query, sample.entropies) / query_mask.sum(1),
            has_unmasked_candidate=has_unmasked_candidate,
        )
        false_share = (logits.detach().flatten(1).softmax(1).view_as(logits).sum(2) * false).sum(1)
        return DirectionLosses(
            (costs.mean(1) * has_unmasked_candidate).sum(),
            reinforce_loss(query_sample, advantages, self.settings),
            compute_sampling_metrics(sample, rewards, false_share, composed, query_scores),
        )

    def _rewards(self, positives: Float[Tensor, "n 1"], composed: Float[Tensor, "n s"]) -> Float[Tensor, "n s"]:
        return composed if self.settings.form == "difference" else self._costs(positives, composed)

    def _costs(self, positives: Float[Tensor, "n 1"], composed: Float[Tensor, "n s"]) -> Float[Tensor, "n s"]:
        difference = composed - positives
        return difference if self.settings.form == "difference" else (self.loss.margin + difference).clamp(min=0)

    def _mask_false_negatives(self, batch: Batch) -> Bool[Tensor, "n n"]:
        """Return a mask that is True at (i, j) if the pairs i and j of the batch have the same image or the same text."""
        image_indices, text_indices = torch.from_numpy(batch.image_indices), self._text_indices[batch.pair_indices]
        return (image_indices[:, None] == image_indices) | (text_indices[:, None] == text_indices)
