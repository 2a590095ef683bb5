"""Adversarial contrastive estimation (ACE): a generator learns to sample hard negatives from the complete training set."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vse.features.backbones.device import move_tensor
from vse.features.backbones.networks import autocast
from vse.pipeline.errors import UserError
from vse.training.adversaries.base import (
    AdversarialLosses,
    Adversary,
    Baseline,
    CandidateLogits,
    DirectionLosses,
    Opponent,
    ReinforceSettings,
    reinforce_loss,
    sample_candidates,
    sampling_metrics,
)
from vse.training.data.images import CachedImages
from vse.training.data.pairs import Pairs
from vse.training.kinds import Encoded, Kind
from vse.training.losses.base import Batch, Cost, Indices, Objective, Ranking
from vse.training.models.build import Model

_BLOCK = 1024  # items that are embedded together for the tables


class AceSettings(ReinforceSettings):
    """Negatives sampled from all training items (Bose et al., ViGIL 2018, section 2; Bose, Ling and Cao, ACL 2018).

    For each query q, an image or a caption of the batch, a negative c' of the other side is sampled from p(c | q). With the
    score s of the model and the positive c of q, the model minimises

        [margin - s(q, c) + s(q, c')]_+

    and the generator maximises it by REINFORCE. In addition to a usual step, a step computes the inner products of the queries
    with all candidates, and embeds the sampled negatives.
    """

    name: Literal["ace"] = "ace"
    candidates: Literal["all", "batch"] | PositiveInt = Field(
        "all",
        description="candidates of p(c | q): all training items, those of the batch, or this number of random items per step",
    )
    table: Literal["model", "learnt"] = Field(
        "model", description="vectors of candidates in p(c | q): their embeddings by the model, or a learned vector for each"
    )
    refresh: Literal["visited", "epoch"] = Field(
        "visited",
        description="update of the model's embeddings, which are all computed at the start: visited, when a batch has the "
        "item; epoch, all at the start of every epoch",
    )
    in_batch: float = Field(
        0.5,
        ge=0,
        le=1,
        description="weight of the experiment's own loss, with the negatives of the batch, in the model's loss",
    )
    mask: Literal["pair", "image", "text"] = Field(
        "text",
        description="items that are never sampled: pair, the query's partner; image, also all captions of its image; text, "
        "also all captions with the same text as one of these, and all images with such a caption",
    )

    def build(self, opponent: Opponent) -> Adversary:
        model = opponent.model
        if model.gives != (Kind.VECTORS, Kind.VECTORS):
            name = model.config.similarity.name
            raise UserError(
                f"adversary: ace samples single vectors, but {name!r} compares sets; the adversary compositional samples sets"
            )
        if not opponent.loss.ranks:
            raise UserError(f"adversary: ace requires a ranking loss, and {opponent.loss.name} is not one")
        if not isinstance(opponent.images, CachedImages):
            raise UserError("adversary: ace requires cached features, to embed negatives (images.source: cache)")
        return Ace(self, opponent, opponent.images)


class Ace(Adversary):
    """Two generators of negatives: one samples captions for images as queries, the other images for captions as queries."""

    def __init__(self, settings: AceSettings, opponent: Opponent, images: CachedImages) -> None:
        super().__init__()
        self.settings, self.loss = settings, opponent.loss
        self._precision, self._device = opponent.precision, opponent.device
        sizes = len(opponent.pairs.images), len(opponent.pairs)
        _check_memory(settings, sizes, opponent.model.dim, opponent.batch_size, self._device)
        negatives = FalseNegatives(opponent.pairs, settings.mask)
        self.captions = _Side(sizes[1], opponent.model.dim, settings)
        self.images = _Side(sizes[0], opponent.model.dim, settings)
        self.captions.inputs, self.captions.false = opponent.captions.read, negatives.captions
        self.images.inputs, self.images.false = images.read_images, negatives.images
        self.register_buffer("filled", torch.zeros((), dtype=torch.bool))

    filled: Tensor

    def start_epoch(self, model: Model) -> None:
        if self.captions.embedded is None or (bool(self.filled) and self.settings.refresh == "visited"):
            return
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for side, embed in ((self.images, model.embed_images), (self.captions, model.embed_captions)):
                assert side.embedded is not None
                for start in range(0, len(side.embedded), _BLOCK):
                    indices = np.arange(start, min(start + _BLOCK, len(side.embedded)))
                    side.embedded[indices] = self._embed(embed, side, indices)
        self.filled.fill_(True)
        model.train(was_training)

    def compute_losses(self, batch: Batch, model: Model, objective: Objective, seed: int) -> AdversarialLosses:
        cost = objective(batch, seed)
        assert batch.pair_of is not None
        assert cost.rankings is not None
        if self.captions.embedded is not None and self.images.embedded is not None:
            self.images.embedded[batch.image_of] = batch.images[0].detach()
            self.captions.embedded[batch.pair_of] = batch.captions[0].detach()
        weights = self.loss.lambda1, self.loss.lambda2
        turns = [
            self._direction_losses(batch, model, self.captions, cost.rankings[0], batch.pair_of),
            self._direction_losses(batch, model, self.images, cost.rankings[1], batch.image_of),
        ]
        share = self.settings.in_batch
        drawn = sum(weight * turn.cost for weight, turn in zip(weights, turns, strict=True))
        collapsed = sum(weights) * self.loss.margin * len(batch.image_of)
        return AdversarialLosses(
            Cost(share * cost.loss + (1 - share) * drawn, share * cost.collapsed + (1 - share) * collapsed, cost.rankings),
            turns[0].loss + turns[1].loss,
            {name: (turns[0].measures[name] + turns[1].measures[name]) / 2 for name in turns[0].measures},
        )

    def _direction_losses(self, batch: Batch, model: Model, side: _Side, ranking: Ranking, own: Indices) -> DirectionLosses:
        """Return the losses for negatives of ``side`` (images or captions) and the batch's items of the other side as queries.

        ``ranking`` holds the scores of these queries within the batch, and ``own`` the indices of the batch's items of
        ``side``.
        """
        to_captions = side is self.captions
        assert batch.pair_of is not None
        queries, embed = (batch.images, model.embed_captions) if to_captions else (batch.captions, model.embed_images)
        in_batch = (batch.captions if to_captions else batch.images)[0]
        indices, candidates = side.candidates(own, in_batch.detach())
        logits = side.inference(queries[0].detach(), candidates)
        false = side.false(batch.image_of, batch.pair_of, indices).to(logits.device)
        drawn = sample_candidates(logits, false, self.settings.samples)

        def scores(chosen: Tensor) -> Tensor:
            if self.settings.candidates == "batch":
                negatives = in_batch[chosen.flatten()]
            else:
                negatives = self._embed(embed, side, indices[chosen.flatten().cpu().numpy()])
            rows = torch.arange(len(chosen), device=chosen.device).repeat_interleave(chosen.shape[1])
            columns = torch.arange(len(rows), device=chosen.device)
            if to_captions:
                return model.similarity.score_pairs(queries, (negatives,), rows, columns).view_as(chosen)
            return model.similarity.score_pairs((negatives,), queries, columns, rows).view_as(chosen)

        positives = ranking.scores.gather(1, ranking.positives[:, None])
        negatives = scores(drawn.indices)
        hinges = (self.loss.margin - positives + negatives).clamp(min=0) * drawn.possible[:, None]
        of_likeliest = None
        if self.settings.baseline == "self_critical":
            with torch.no_grad():
                of_likeliest = (self.loss.margin - positives + scores(drawn.likeliest[:, None])).clamp(min=0)[:, 0]
        advantages = side.baseline(hinges.detach(), of_likeliest)
        false_share = (logits.detach().softmax(1) * false).sum(1)
        return DirectionLosses(
            hinges.mean(1).sum(),
            reinforce_loss(drawn, advantages, self.settings),
            sampling_metrics(drawn, hinges, false_share, negatives, ranking),
        )

    def _embed(self, embed: Callable[..., Encoded], side: _Side, indices: Indices) -> Float[Tensor, "n dim"]:
        with autocast(self._precision, self._device):
            return embed(*(move_tensor(part, self._device) for part in side.inputs(indices)))[0]


class _Side(nn.Module):
    """The candidates of one side (images or captions), and the generator that samples them for queries of the other side.

    ``embedded`` holds the model's embeddings of all items (n, dim), or is None if the generator does not read them. ``inputs``
    returns the model's inputs for the items with some indices. ``false`` returns a mask of the false negatives among
    candidates.
    """

    embedded: Tensor | None
    inputs: Callable[[Indices], tuple[Tensor, ...]]
    false: Callable[[Indices, Indices, Indices], Bool[Tensor, "n m"]]

    def __init__(self, n: int, dim: int, settings: AceSettings) -> None:
        super().__init__()
        self.n, self.kind = n, settings.candidates
        self.inference, self.baseline = CandidateLogits(dim, settings), Baseline(settings)
        learnt, in_batch = settings.table == "learnt", settings.candidates == "batch"
        self.register_buffer("embedded", None if learnt or in_batch else torch.zeros(n, dim))
        self.learnt = nn.Parameter(torch.randn(n, dim) / dim**0.5) if learnt and not in_batch else None

    def candidates(self, own: Indices, in_batch: Tensor) -> tuple[Indices, Float[Tensor, "m dim"]]:
        """Return the indices of the candidates of a step, and the vectors by which the generator compares them with a query.

        ``own`` and ``in_batch`` are the indices and the embeddings of the batch's items of this side.
        """
        if self.kind == "batch":
            return own, in_batch
        table = self.embedded if self.learnt is None else self.learnt
        assert table is not None
        if self.kind == "all" or self.kind >= self.n:
            return np.arange(self.n), table
        pool = torch.randperm(self.n)[: self.kind]
        return pool.numpy(), table[pool.to(table.device)]


class FalseNegatives:
    """Masks of the false negatives: candidates that fit a query, though they are not its partner in the batch."""

    def __init__(self, pairs: Pairs, mask: str) -> None:
        self._mask, self._image_of, self._text_of = mask, pairs.image_of, pairs.text_of
        self._of_image = _Groups(pairs.image_of, len(pairs.images))
        self._of_text = _Groups(pairs.text_of, int(pairs.text_of.max()) + 1)

    def captions(self, image_of: Indices, pair_of: Indices, indices: Indices) -> Bool[Tensor, "n m"]:
        """Return a mask of the false negatives among the captions ``indices``, with images as queries.

        The query of each row is the image ``image_of`` of the pair ``pair_of``.
        """
        rows = [self._of_image[image] for image in image_of.tolist()]
        if self._mask == "pair":
            rows = [pair[None] for pair in pair_of]
        if self._mask == "text":
            rows = [np.concatenate([self._of_text[text] for text in np.unique(self._text_of[row]).tolist()]) for row in rows]
        return _mask(rows, indices, len(self._image_of))

    def images(self, image_of: Indices, pair_of: Indices, indices: Indices) -> Bool[Tensor, "n m"]:
        """Return a mask of the false negatives among the images ``indices``, with captions as queries.

        The query of each row is the caption of the pair ``pair_of``, whose own image is ``image_of``.
        """
        rows = [image[None] for image in image_of]
        if self._mask == "text":
            rows = [self._image_of[self._of_text[text]] for text in self._text_of[pair_of].tolist()]
        return _mask(rows, indices, int(self._image_of.max()) + 1)


class _Groups:
    def __init__(self, group_of: Indices, n: int) -> None:
        self._order = np.argsort(group_of, kind="stable")
        self._starts = np.searchsorted(group_of[self._order], np.arange(n + 1))

    def __getitem__(self, group: int) -> Indices:
        return self._order[self._starts[group] : self._starts[group + 1]]


def _mask(rows: list[Indices], indices: Indices, n: int) -> Bool[Tensor, "n m"]:
    """Return a mask (n_queries, n_candidates) that is True where ``rows[query]`` contains the index of the candidate.

    ``indices`` are the candidates, out of ``n`` items.
    """
    if np.array_equal(indices, np.arange(n)):
        mask = np.zeros((len(rows), n), bool)
        mask[np.repeat(np.arange(len(rows)), [len(row) for row in rows]), np.concatenate(rows)] = True
        return torch.from_numpy(mask)
    return torch.from_numpy(np.stack([np.isin(indices, row) for row in rows]))


def _check_memory(settings: AceSettings, sizes: tuple[int, int], dim: int, batch_size: int, device: torch.device) -> None:
    n_tables = 0 if settings.candidates == "batch" else sum(sizes)
    n_candidates = {"all": max(sizes), "batch": batch_size}.get(str(settings.candidates), settings.candidates)
    copies = 4 if settings.table == "learnt" else 1  # the gradient and Adam's two means
    needed = 4 * (n_tables * dim * copies + 5 * batch_size * int(n_candidates))
    there = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if needed > 0.8 * there:
        raise UserError(
            f"adversary: ace needs {needed / 1e9:.1f} GB for {max(sizes)} candidates, but the memory is {there / 1e9:.1f} GB; "
            "--set adversary.candidates=10000 samples 10000 candidates for each step"
        )
