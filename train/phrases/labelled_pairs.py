"""Batches of positive and negative pairs for the similarity network, and their loss (two-branch, Algorithm 1 and Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vse.train.data.cached import Numbers
from vse.train.losses.base import Cost
from vse.train.losses.pair_loss import PairLoss
from vse.train.models.similarities.base import Similarity
from vse.train.phrases.batch_sampling import CandidateSampler, Near


@dataclass(frozen=True)
class LabelledBatch:
    """Regions and phrases that are embedded, and pairs of them.

    regions : (n_regions,) numbers of regions, each once
    texts : (n_texts,) numbers of texts, each once
    region_of_pair, text_of_pair : (n_pairs,) the rows of each pair in these
    labels : (n_pairs,) 1 of a positive pair, -1 of a negative one
    """

    regions: Int[np.ndarray, " n_regions"]
    texts: Int[np.ndarray, " n_texts"]
    region_of_pair: Int[np.ndarray, " n_pairs"]
    text_of_pair: Int[np.ndarray, " n_pairs"]
    labels: Int[np.ndarray, " n_pairs"]


class PairSampler(CandidateSampler):
    """Positive and negative pairs of a batch (Algorithm 1, steps 2 and 3, for the similarity network)."""

    def batch(self, batch: Numbers, rng: np.random.Generator) -> LabelledBatch:
        """The pairs of some pairs of the training set, given by their numbers."""
        positive, negative = self.near(batch, rng)
        rows, regions = np.arange(len(batch)), self.truth_of[batch]
        if self.settings.positives == "augmented":
            rows, regions = np.concatenate([rows, positive.rows]), np.concatenate([regions, positive.regions])
        wrong = negative if self.settings.negatives == "all" else _one_for_each(rows, negative, len(batch), rng)
        embedded, of_region = np.unique(np.concatenate([regions, wrong.regions]), return_inverse=True)
        of_pair = self.pairs.text_of[batch][np.concatenate([rows, wrong.rows])]
        texts, of_text = np.unique(of_pair, return_inverse=True)
        return LabelledBatch(embedded, texts, of_region, of_text, np.repeat([1, -1], [len(rows), len(wrong.rows)]))


def _one_for_each(rows: Numbers, negative: Near, n_rows: int, rng: np.random.Generator) -> Near:
    """For each positive pair a random negative of the same phrase (step 3), so that a batch has as many of both.

    If a phrase has no negative candidate, that of a phrase of the batch which has one, drawn at random; none if none has.
    """
    having = np.unique(negative.rows)
    if not len(having):
        return negative
    others = having[rng.integers(0, len(having), len(rows))]
    asked = np.where(np.isin(rows, having), rows, others)
    starts = np.searchsorted(negative.rows, asked)
    counts = np.bincount(negative.rows, minlength=n_rows)[asked]
    return Near(asked, negative.regions[starts + rng.integers(0, counts)])


def pair_cost(
    batch: LabelledBatch,
    regions: Float[Tensor, "n_regions dim"],
    phrases: Float[Tensor, "n_texts dim"],
    similarity: Similarity,
    loss: PairLoss,
) -> Cost:
    """The loss of a batch of labelled pairs (two-branch paper, Eq. 7), and what it would be if all scores were 0."""
    device = regions.device
    rows, columns, labels = (
        torch.from_numpy(numbers).to(device) for numbers in (batch.region_of_pair, batch.text_of_pair, batch.labels)
    )
    scores = similarity.of_pairs((regions,), (phrases,), rows, columns)
    with torch.no_grad():
        collapsed = loss.cost(torch.zeros_like(scores), labels.float())
    return Cost(loss.cost(scores, labels.float()), collapsed)
