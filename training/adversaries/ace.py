"""Adversarial contrastive estimation (ACE): a generator learns to sample hard negatives from the complete training set."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from vse.features.backbones.networks import autocast
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
from vse.training.data.images import CachedImageFeatures
from vse.training.data.pairs import Pairs
from vse.training.kinds import BatchVectors, InputKind
from vse.training.losses.base import Batch, Cost, Indices, Objective, QueryScores
from vse.training.models.build import Model

_EMBEDDING_BATCH_SIZE = 1024  # number of items that are embedded at a time


class AceSettings(ReinforceSettings):
    """An adversary that samples negatives from all training items (Bose et al., ViGIL 2018, section 2, and ACL 2018).

    A query q is an image or a caption of the batch. A negative c', a caption or an image, is sampled from p(c | q). With the
    score s of the model and the positive c of q, the model minimises

        [margin - s(q, c) + s(q, c')]_+

    and the generator, which computes p, maximises this cost by REINFORCE. Each training step also computes the inner products
    of the queries with all candidates, and the embeddings of the sampled negatives.
    """

    name: Literal["ace"] = "ace"
    candidates: Literal["all", "batch"] | PositiveInt = Field(
        "all",
        description="candidates of p(c | q): all training items, those of the batch, or this number of random items per step",
    )
    table: Literal["model", "learnt"] = Field(
        "model", description="the vector c of each candidate in p(c | q): its embedding by the model, or a learned vector"
    )
    refresh: Literal["visited", "epoch"] = Field(
        "visited",
        description="when the stored embedding of an item is computed again: visited, whenever a batch contains the item; "
        "epoch, also at the start of every epoch",
    )
    in_batch: float = Field(
        0.5,
        ge=0,
        le=1,
        description="weight of the experiment's own loss, with the negatives of the batch; the cost of the sampled negatives "
        "has the weight 1 - in_batch",
    )
    reward: Literal["hinge", "score"] = Field(
        "hinge",
        description="reward of a sampled negative: hinge, its cost for the model; score, margin - s(q, c) + s(q, c'), a "
        "number below 0 if the sampled negative is too easy to cost anything",
    )
    pretraining_epochs: NonNegativeInt = Field(
        0,
        description="number of first epochs in which the generator learns, but the model minimises only the experiment's loss",
    )
    mask: Literal["pair", "image", "text"] = Field(
        "text",
        description="items that are never sampled as negatives: pair, the query's partner; image, also all captions of the "
        "query's image; text, also all captions with the text of a masked caption, and their images",
    )

    def build(self, opponent: Opponent) -> Adversary:
        model = opponent.model
        if model.embedding_kinds != (InputKind.VECTORS, InputKind.VECTORS):
            name = model.config.similarity.name
            raise UserError(
                f"adversary: ace samples single vectors, but {name!r} compares sets; the adversary compositional samples sets"
            )
        if not opponent.loss.is_ranking:
            raise UserError(f"adversary: ace requires a ranking loss, and {opponent.loss.name} is not one")
        if not isinstance(opponent.image_inputs, CachedImageFeatures):
            raise UserError("adversary: ace requires cached features, to embed negatives (images.source: cache)")
        return AceAdversary(self, opponent, opponent.image_inputs)


class AceAdversary(Adversary):
    """Two generators of negatives.

    ``captions`` : generator that samples captions as negatives for images.
    ``images`` : generator that samples images as negatives for captions.
    ``filled`` : True if the embeddings of all training items have been computed; saved with the weights.
    ``epoch`` : number of the epoch, from 1; saved with the weights.
    """

    def __init__(self, settings: AceSettings, opponent: Opponent, images: CachedImageFeatures) -> None:
        super().__init__()
        self.settings, self.loss = settings, opponent.loss
        self._precision, self._device = opponent.precision, opponent.device
        sizes = len(opponent.pairs.images), len(opponent.pairs)
        _check_memory(settings, sizes, opponent.model.dim, opponent.batch_size, self._device)
        negatives = FalseNegativeMasks(opponent.pairs, settings.mask)
        self.captions = _NegativeGenerator(sizes[1], opponent.model.dim, settings)
        self.images = _NegativeGenerator(sizes[0], opponent.model.dim, settings)
        self.captions.read_inputs, self.captions.mask_false_negatives = opponent.caption_inputs.read, negatives.mask_captions
        self.images.read_inputs, self.images.mask_false_negatives = images.read_images, negatives.mask_images
        self.register_buffer("filled", torch.zeros((), dtype=torch.bool))
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self._pretrains: bool | None = None  # whether this epoch is a pretraining epoch; None: not read from the device yet

    filled: Tensor
    epoch: Tensor

    def start_epoch(self, model: Model) -> None:
        self.epoch += 1
        self._pretrains = None
        if self.captions.embedded is None or (bool(self.filled) and self.settings.refresh == "visited"):
            return
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for generator, embed in ((self.images, model.embed_images), (self.captions, model.embed_captions)):
                assert generator.embedded is not None
                for start in range(0, len(generator.embedded), _EMBEDDING_BATCH_SIZE):
                    indices = np.arange(start, min(start + _EMBEDDING_BATCH_SIZE, len(generator.embedded)))
                    generator.embedded[indices] = self._embed_items(embed, generator, indices)
        self.filled.fill_(True)
        model.train(was_training)

    def compute_losses(self, batch: Batch, model: Model, objective: Objective, seed: int) -> AdversarialLosses:
        cost = objective(batch, seed)
        assert batch.pair_indices is not None
        assert cost.query_scores is not None
        if self.captions.embedded is not None and self.images.embedded is not None:
            self.images.embedded[batch.image_indices] = batch.image_embeddings[0].detach()
            self.captions.embedded[batch.pair_indices] = batch.caption_embeddings[0].detach()
        weights = self.loss.lambda1, self.loss.lambda2
        directions = [
            self._compute_direction_losses(batch, model, self.captions, cost.query_scores[0], batch.pair_indices),
            self._compute_direction_losses(batch, model, self.images, cost.query_scores[1], batch.image_indices),
        ]
        if self._pretrains is None:
            self._pretrains = 0 < int(self.epoch) <= self.settings.pretraining_epochs
        share = 1.0 if self._pretrains else self.settings.in_batch
        sampled = sum(weight * direction.model_cost for weight, direction in zip(weights, directions, strict=True))
        collapsed = sum(weights) * self.loss.margin * len(batch.image_indices)
        return AdversarialLosses(
            Cost(
                share * cost.value + (1 - share) * sampled,
                share * cost.collapsed_value + (1 - share) * collapsed,
                cost.query_scores,
            ),
            directions[0].adversary_loss + directions[1].adversary_loss,
            {name: (value + directions[1].metrics[name]) / 2 for name, value in directions[0].metrics.items()},
        )

    def _compute_direction_losses(
        self, batch: Batch, model: Model, generator: _NegativeGenerator, query_scores: QueryScores, batch_indices: Indices
    ) -> DirectionLosses:
        """Return the losses for images as queries and sampled captions as negatives, or the reverse.

        ``generator`` : generator of the negatives: ``self.captions`` if images are queries, else ``self.images``.
        ``query_scores`` : scores of the queries with the candidates of the batch.
        ``batch_indices`` : index of each caption (or image) of the batch among all training captions (or images).
        """
        samples_captions = generator is self.captions
        assert batch.pair_indices is not None
        queries, embed = (
            (batch.image_embeddings, model.embed_captions)
            if samples_captions
            else (batch.caption_embeddings, model.embed_images)
        )
        batch_embeddings = (batch.caption_embeddings if samples_captions else batch.image_embeddings)[0]
        indices, candidates = generator.choose_candidates(batch_indices, batch_embeddings.detach())
        logits = generator.inference(queries[0].detach(), candidates)
        false = generator.mask_false_negatives(batch.image_indices, batch.pair_indices, indices).to(logits.device)
        sample = sample_candidates(logits, false, self.settings.samples)

        def scores(chosen: Tensor) -> Tensor:
            if self.settings.candidates == "batch":
                negatives = batch_embeddings[chosen.flatten()]
            else:
                negatives = self._embed_items(embed, generator, indices[chosen.flatten().cpu().numpy()])
            rows = torch.arange(len(chosen), device=chosen.device).repeat_interleave(chosen.shape[1])
            columns = torch.arange(len(rows), device=chosen.device)
            if samples_captions:
                return model.similarity.score_pairs(queries, (negatives,), rows, columns).view_as(chosen)
            return model.similarity.score_pairs((negatives,), queries, columns, rows).view_as(chosen)

        positives = query_scores.scores.gather(1, query_scores.positive_columns[:, None])
        negatives = scores(sample.indices)
        margins = self.loss.margin - positives
        hinges = (margins + negatives).clamp(min=0) * sample.has_unmasked_candidate[:, None]
        lowest = 0 if self.settings.reward == "hinge" else -torch.inf
        rewards = (margins + negatives).detach().clamp(min=lowest) * sample.has_unmasked_candidate[:, None]
        likeliest_rewards = None
        if self.settings.baseline == "self_critical":
            with torch.no_grad():
                likeliest_rewards = (margins + scores(sample.likeliest_indices[:, None])).clamp(min=lowest)[:, 0]
        advantages = generator.baseline.subtract_and_update(rewards, likeliest_rewards)
        false_share = (logits.detach().softmax(1) * false).sum(1)
        return DirectionLosses(
            hinges.mean(1).sum(),
            reinforce_loss(sample, advantages, self.settings),
            compute_sampling_metrics(sample, hinges, false_share, negatives, query_scores),
        )

    def _embed_items(
        self, embed: Callable[..., BatchVectors], generator: _NegativeGenerator, indices: Indices
    ) -> Float[Tensor, "n dim"]:
        with autocast(self._precision, self._device):
            return embed(*generator.read_inputs(indices))[0]


class _NegativeGenerator(nn.Module):
    """A generator that samples images as negatives for captions, or captions as negatives for images.

    A query is compared with one vector for each candidate: the n training images (or captions), or those in the batch.

    ``embedded`` : (n, dim) embeddings of all training images (or captions); None if the settings require no such table.
    ``learnt`` : (n, dim) learned vectors of all training images (or captions); None if the settings require no such table.
    ``inference`` : network that computes the logits of candidates.
    ``baseline`` : baseline of the rewards.
    ``read_inputs`` : function that returns the model's inputs for the images (or captions) with the given indices.
    ``mask_false_negatives`` : function that marks candidates that match the query, see :class:`FalseNegativeMasks`.
    """

    embedded: Tensor | None
    read_inputs: Callable[[Indices], tuple[Tensor, ...]]
    mask_false_negatives: Callable[[Indices, Indices, Indices], Bool[Tensor, "n m"]]

    def __init__(self, n: int, dim: int, settings: AceSettings) -> None:
        super().__init__()
        self.n_items, self.candidate_pool = n, settings.candidates
        self.inference, self.baseline = CandidateLogits(dim, settings), RewardBaseline(settings)
        is_learnt, needs_table = settings.table == "learnt", settings.candidates != "batch"
        self.register_buffer("embedded", torch.zeros(n, dim) if needs_table and not is_learnt else None)
        self.learnt = nn.Parameter(torch.randn(n, dim) / dim**0.5) if needs_table and is_learnt else None

    def choose_candidates(
        self, batch_indices: Indices, batch_embeddings: Float[Tensor, "b dim"]
    ) -> tuple[Indices, Float[Tensor, "m dim"]]:
        """Return the indices of the candidates of a training step, and the candidates' vectors to compare with queries.

        With the setting ``candidates: batch``, both are those of the batch: ``batch_indices`` and ``batch_embeddings``.
        """
        if self.candidate_pool == "batch":
            return batch_indices, batch_embeddings
        table = self.embedded if self.learnt is None else self.learnt
        assert table is not None
        if self.candidate_pool == "all" or self.candidate_pool >= self.n_items:
            return np.arange(self.n_items), table
        indices = torch.randperm(self.n_items)[: self.candidate_pool]
        return indices.numpy(), table[indices.to(table.device)]


class FalseNegativeMasks:
    """Masks of false negatives: candidates that match the query.

    ``mask_kind`` decides which captions match an image: only the caption of the pair (``pair``), all captions of the image
    (``image``), or also captions of other images with the same text (``text``).
    """

    def __init__(self, pairs: Pairs, mask_kind: str) -> None:
        self._mask_kind, self._image_indices, self._text_indices = mask_kind, pairs.image_indices, pairs.text_indices
        self._captions_by_image = _IndicesByGroup(pairs.image_indices, len(pairs.images))
        self._captions_by_text = _IndicesByGroup(pairs.text_indices, int(pairs.text_indices.max()) + 1)

    def mask_captions(self, image_indices: Indices, pair_indices: Indices, candidate_indices: Indices) -> Bool[Tensor, "n m"]:
        """Return a mask: True where the caption ``candidate_indices[j]`` (column j) is a false negative for an image (row).

        The image of row k is ``image_indices[k]``. It belongs to the pair ``pair_indices[k]``.
        """
        rows = [self._captions_by_image[image] for image in image_indices.tolist()]
        if self._mask_kind == "pair":
            rows = [pair[None] for pair in pair_indices]
        if self._mask_kind == "text":
            rows = [
                np.concatenate([self._captions_by_text[text] for text in np.unique(self._text_indices[row]).tolist()])
                for row in rows
            ]
        return _membership_mask(rows, candidate_indices, len(self._image_indices))

    def mask_images(self, image_indices: Indices, pair_indices: Indices, candidate_indices: Indices) -> Bool[Tensor, "n m"]:
        """Return a mask: True where the image ``candidate_indices[j]`` (column j) is a false negative for a caption (row).

        The caption of row k belongs to the pair ``pair_indices[k]``. The image of this pair is ``image_indices[k]``.
        """
        rows = [image[None] for image in image_indices]
        if self._mask_kind == "text":
            rows = [self._image_indices[self._captions_by_text[text]] for text in self._text_indices[pair_indices].tolist()]
        return _membership_mask(rows, candidate_indices, int(self._image_indices.max()) + 1)


class _IndicesByGroup:
    """Arrays of indices by group: item ``[g]`` has the indices i with ``group_of[i] == g``."""

    def __init__(self, group_of: Indices, n_groups: int) -> None:
        self._sorted_indices = np.argsort(group_of, kind="stable")
        self._group_starts = np.searchsorted(group_of[self._sorted_indices], np.arange(n_groups + 1))

    def __getitem__(self, group: int) -> Indices:
        return self._sorted_indices[self._group_starts[group] : self._group_starts[group + 1]]


def _membership_mask(rows: list[Indices], indices: Indices, n_items: int) -> Bool[Tensor, "n m"]:
    """Return a mask that is True at (k, j) if ``rows[k]`` contains ``indices[j]``. All indices are below ``n_items``."""
    if np.array_equal(indices, np.arange(n_items)):
        mask = np.zeros((len(rows), n_items), bool)
        mask[np.repeat(np.arange(len(rows)), [len(row) for row in rows]), np.concatenate(rows)] = True
        return torch.from_numpy(mask)
    return torch.from_numpy(np.stack([np.isin(indices, row) for row in rows]))


def _check_memory(settings: AceSettings, sizes: tuple[int, int], dim: int, batch_size: int, device: torch.device) -> None:
    n_tables = 0 if settings.candidates == "batch" else sum(sizes)
    n_candidates = {"all": max(sizes), "batch": batch_size}.get(str(settings.candidates), settings.candidates)
    copies = 4 if settings.table == "learnt" else 1  # the gradient and Adam's two means
    needed = 4 * (n_tables * dim * copies + 5 * batch_size * int(n_candidates))
    memory = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if needed > 0.8 * memory:
        raise UserError(
            f"adversary: ace needs {needed / 1e9:.1f} GB for {max(sizes)} candidates, but the memory is {memory / 1e9:.1f} GB"
            "; --set adversary.candidates=10000 samples 10000 candidates for each step"
        )
