"""Batches of region-phrase pairs with sampled negatives, and their losses (two-branch paper, Algorithm 1, Eqs. 6 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from vse.eval.files.phrase_scores import rowwise_iou
from vse.pipeline.presets.schema import Settings
from vse.training.data.images import Indices
from vse.training.losses.base import Cost, PairLoss, QueryScores
from vse.training.losses.ranking import RankingLoss, add_neighbourhood_cost, find_neighbours
from vse.training.models.similarities.base import Scores, Similarity
from vse.training.phrases.arrays import (
    KeyedSets,
    PhraseArrays,
    RegionFeatures,
    flatten_ranges,
    pad_lists,
    sample_mask_per_row,
    sample_one_per_row,
)


class PositiveRegionSettings(Settings):
    """The settings that decide which regions are positive for a phrase (two-branch paper, section 4.1)."""

    positives: Literal["truth", "augmented"] = Field(
        "augmented",
        description="positive regions of a phrase: truth, the ground-truth region; augmented, also candidates that overlap it",
    )
    positive_iou: float = Field(0.7, gt=0, le=1, description="least IoU of augmented positives with the ground-truth region")


class SamplingSettings(PositiveRegionSettings):
    """The settings that decide which candidate regions are used as negatives (two-branch paper, Algorithm 1)."""

    negative_iou: float = Field(
        0.3, gt=0, le=1, description="IoU with the ground-truth region below which candidates are negatives"
    )
    neighbours: bool = Field(
        False,
        description="neighbourhood sampling, for losses of triplets: if a region has a single phrase in the batch, add a "
        "second one, and if a phrase has a single region, add a second region",
    )
    negatives: Literal["balanced", "all"] = Field(
        "balanced", description="negatives for losses of pairs: one for each positive pair, or every negative candidate"
    )
    candidates: PositiveInt | None = Field(
        None,
        description="number of an image's candidates that may be negatives, sampled for each batch; null: all",
    )


@dataclass(frozen=True)
class BatchCandidates:
    """The positive candidate regions for the pairs of a batch, or the negative ones.

    ``pair_rows`` : (n,) position in the batch of each candidate's pair, in ascending order.
    ``region_indices`` : (n,) index of each candidate among all regions.
    """

    pair_rows: Int[np.ndarray, " n"]
    region_indices: Int[np.ndarray, " n"]


class CandidateSampler:
    """A sampler of positive and negative candidate regions for training pairs of a phrase and its ground-truth box.

    ``pairs`` : phrases of the pairs, with their boxes.
    ``candidates`` : candidate regions of the training images.
    ``truth_indices`` : (n_pairs,) index of each pair's ground-truth region among all regions.
    ``settings`` : settings of the sampling, such as the least IoU of a positive candidate.
    """

    def __init__(
        self,
        pairs: PhraseArrays,
        candidates: RegionFeatures,
        truth_indices: Int[np.ndarray, " n_pairs"],
        settings: SamplingSettings,
    ) -> None:
        self.pairs, self.candidates, self.truth_indices, self.settings = pairs, candidates, truth_indices, settings

    def find_positives_and_negatives(
        self, batch: Indices, rng: np.random.Generator
    ) -> tuple[BatchCandidates, BatchCandidates]:
        """Return the positive and the negative candidates of a batch of pairs.

        The IoU with the ground-truth box of the pair decides whether a candidate is positive, negative or neither. If
        ``settings.candidates`` is set, only a random sample of each image's candidates can be negative.
        """
        images = self.pairs.image_indices[batch]
        rows, regions = flatten_ranges(self.candidates.region_starts[images], self.candidates.region_counts[images])
        overlaps = rowwise_iou(self.pairs.truth_boxes[batch][rows], self.candidates.boxes[regions])
        positive = overlaps >= self.settings.positive_iou
        negative = (overlaps < self.settings.negative_iou) & self._sample_candidate_mask(images, rows, regions, rng)
        return BatchCandidates(rows[positive], regions[positive]), BatchCandidates(rows[negative], regions[negative])

    def _sample_candidate_mask(
        self, images: Indices, rows: Indices, regions: Indices, rng: np.random.Generator
    ) -> Bool[np.ndarray, " n"]:
        """Return a mask that is True for randomly sampled candidates. All pairs of an image have the same sample.

        ``images`` : index of the image of each pair of the batch.
        ``rows``, ``regions`` : for each element of the mask, position of a pair in the batch, and index of a candidate.
        """
        if self.settings.candidates is None:
            return np.ones(len(rows), bool)
        different = np.unique(images)
        image_rows, all_regions = flatten_ranges(
            self.candidates.region_starts[different], self.candidates.region_counts[different]
        )
        return np.isin(regions, all_regions[sample_mask_per_row(image_rows, self.settings.candidates, rng)])


@dataclass(frozen=True)
class TripletBatch:
    """Regions and texts to embed, and the triplets (query, positive, negative) among them.

    ``region_indices`` and ``text_indices`` hold the index of each region and text in the data set, without repetition. Below,
    regions and texts are given as positions in these two arrays.

    ``query_regions``, ``positive_texts`` : region and text of each positive pair whose query is the region.
    ``negative_text_mask`` : mask of the texts that are negatives for each query region.
    ``query_texts``, ``positive_regions`` : text and region of each positive pair whose query is the text.
    ``negative_regions`` : negative regions for each query text, from the image of the pair, padded to one length.
    ``negative_region_mask`` : mask of ``negative_regions``, False at the padding.
    ``pair_regions``, ``pair_texts`` : region and text of each positive pair of the batch.
    ``pair_truths`` : index in the data set, not a position, of each positive pair's ground-truth region.
    """

    region_indices: Int[np.ndarray, " n_regions"]
    text_indices: Int[np.ndarray, " n_texts"]
    query_regions: Int[np.ndarray, " n_queries"]
    positive_texts: Int[np.ndarray, " n_queries"]
    negative_text_mask: Bool[np.ndarray, "n_queries n_texts"]
    query_texts: Int[np.ndarray, " m_queries"]
    positive_regions: Int[np.ndarray, " m_queries"]
    negative_regions: Int[np.ndarray, "m_queries longest"]
    negative_region_mask: Bool[np.ndarray, "m_queries longest"]
    pair_regions: Int[np.ndarray, " n_pairs"]
    pair_texts: Int[np.ndarray, " n_pairs"]
    pair_truths: Int[np.ndarray, " n_pairs"]

    @property
    def n_triplets(self) -> int:
        """The number of triplets. The loss may use only the triplets with the highest costs."""
        return int(self.negative_text_mask.sum() + self.negative_region_mask.sum())


class TripletSampler(CandidateSampler):
    """A sampler of triplets for the embedding network (two-branch paper, Algorithm 1, steps 2 and 3).

    A text that may describe a pair's region is not a negative for the pair. Such a text belongs to a phrase with the
    ground-truth box of the pair's phrase, or in the same coreference chain (the phrases of an image that mention one object).
    """

    def __init__(
        self,
        pairs: PhraseArrays,
        candidates: RegionFeatures,
        truth_indices: Int[np.ndarray, " n_pairs"],
        settings: SamplingSettings,
    ) -> None:
        super().__init__(pairs, candidates, truth_indices, settings)
        self._texts_by_chain = KeyedSets(pairs.chain_indices, pairs.text_indices)
        self._truth_numbers = np.unique(truth_indices, return_inverse=True)[1]
        self._texts_by_truth = KeyedSets(self._truth_numbers, pairs.text_indices)

    def sample(self, batch: Indices, rng: np.random.Generator) -> TripletBatch:
        positive, negative = self.find_positives_and_negatives(batch, rng)
        text_indices, truth_indices = self.pairs.text_indices[batch], self.truth_indices[batch]
        all_rows = np.arange(len(batch))
        regions = self._choose_positive_regions(truth_indices, positive, rng)
        nothing = np.empty(0, np.int64)
        # Rows of the batch whose region gets a second text, or whose text gets a second region.
        (rows_with_second_text, second_texts), (rows_with_second_region, second_regions) = [(nothing, nothing)] * 2
        if self.settings.neighbours:
            rows_with_second_text, second_texts = self._sample_second_texts(batch, regions, rng)
            rows_with_second_region, second_regions = self._sample_second_regions(
                text_indices, regions, truth_indices, positive, rng
            )
        region_rows = np.concatenate([all_rows, rows_with_second_text])
        text_rows = np.concatenate([all_rows, rows_with_second_region])
        query_regions, positive_texts = regions[region_rows], np.concatenate([text_indices, second_texts])
        query_texts, positive_regions = text_indices[text_rows], np.concatenate([regions, second_regions])
        texts, embedded = np.unique(positive_texts), np.unique(np.concatenate([positive_regions, negative.region_indices]))
        negatives = np.searchsorted(embedded, negative.region_indices)
        negative_regions, negative_region_mask = pad_lists(negative.pair_rows, negatives, len(batch))
        return TripletBatch(
            region_indices=embedded,
            text_indices=texts,
            query_regions=np.searchsorted(embedded, query_regions),
            positive_texts=np.searchsorted(texts, positive_texts),
            negative_text_mask=self._mask_negative_texts(batch[region_rows], texts),
            query_texts=np.searchsorted(texts, query_texts),
            positive_regions=np.searchsorted(embedded, positive_regions),
            negative_regions=negative_regions[text_rows],
            negative_region_mask=negative_region_mask[text_rows],
            pair_regions=np.searchsorted(embedded, np.concatenate([query_regions, second_regions])),
            pair_texts=np.searchsorted(texts, np.concatenate([positive_texts, text_indices[rows_with_second_region]])),
            pair_truths=truth_indices[np.concatenate([region_rows, rows_with_second_region])],
        )

    def _choose_positive_regions(self, truth_indices: Indices, positive: BatchCandidates, rng: np.random.Generator) -> Indices:
        """Return the index of a positive region for each pair (two-branch paper, Algorithm 1, step 2).

        The region is the ground truth or, with ``positives: augmented``, a random choice among the ground truth and the
        candidates ``positive``.
        """
        if self.settings.positives == "truth":
            return truth_indices
        rows = np.concatenate([np.arange(len(truth_indices)), positive.pair_rows])
        chosen: Indices = np.concatenate([truth_indices, positive.region_indices])[
            sample_one_per_row(rows, len(truth_indices), rng)
        ]
        return chosen

    def _sample_second_texts(self, batch: Indices, regions: Indices, rng: np.random.Generator) -> tuple[Indices, Indices]:
        """Sample a second text for each region of the batch that has a single text (two-branch paper, Algorithm 1, 3c i).

        The second text is another text for the same object, from the phrase's coreference chain. For each region with
        such a text, returns the position of the region's first pair in the batch, and the index of the second text.
        """
        rows = _find_single_partner_rows(regions, self.pairs.text_indices[batch])
        others = self._texts_by_chain.sample_other_values(
            self.pairs.chain_indices[batch[rows]], self.pairs.text_indices[batch[rows]], rng
        )
        return rows[others >= 0], others[others >= 0]

    def _sample_second_regions(
        self,
        text_indices: Indices,
        regions: Indices,
        truth_indices: Indices,
        positive: BatchCandidates,
        rng: np.random.Generator,
    ) -> tuple[Indices, Indices]:
        """Sample a second region for each text of the batch that has a single region (two-branch paper, Algorithm 1, 3c ii).

        For each text with another positive region, returns the position of the text's first pair in the batch, and the index
        of the second region. With ``positives: truth``, the results are empty.
        """
        single_rows = _find_single_partner_rows(text_indices, regions)
        if self.settings.positives == "truth":
            return single_rows[:0], single_rows[:0]
        rows = np.concatenate([np.arange(len(truth_indices)), positive.pair_rows])
        positives = np.concatenate([truth_indices, positive.region_indices])
        is_other = positives != regions[rows]
        rows, positives = rows[is_other], positives[is_other]
        chosen = sample_one_per_row(rows, len(truth_indices), rng)[single_rows]
        return single_rows[chosen >= 0], positives[chosen[chosen >= 0]]

    def _mask_negative_texts(self, pairs: Indices, texts: Indices) -> Bool[np.ndarray, "n m"]:
        """Return a mask that is True where a text (column) is a negative for the region of a pair (row)."""
        in_chain = self._texts_by_chain.contain(self.pairs.chain_indices[pairs][:, None], texts[None])
        of_same_box = self._texts_by_truth.contain(self._truth_numbers[pairs][:, None], texts[None])
        negatives: Bool[np.ndarray, "n m"] = ~(in_chain | of_same_box)
        return negatives


def compute_triplet_cost(
    batch: TripletBatch,
    regions: Float[Tensor, "n_regions dim"],
    phrases: Float[Tensor, "n_texts dim"],
    similarity: Similarity,
    loss: RankingLoss,
) -> Cost:
    """Return the loss of a batch of triplets (two-branch paper, Eq. 6), and its loss if all embeddings were equal.

    ``regions``, ``phrases`` : embeddings of the regions and texts of ``batch``.
    ``loss`` : ``lambda1`` is the weight of triplets whose query is a region, ``lambda2`` of triplets whose query is a
        phrase. ``lambda3`` and ``lambda4`` are the weights of the neighbourhood constraints among regions and among phrases.
    """
    device = regions.device
    query_scores = _select_query_scores(batch, similarity((regions,), (phrases,)), device)
    total = loss.total_cost(*query_scores)
    with torch.no_grad():
        cost = Cost(total, loss.collapsed_cost(*query_scores), query_scores)
    of_region, of_text, of_truth = map(torch.from_numpy, (batch.pair_regions, batch.pair_texts, batch.pair_truths))
    for weight, side, items, partners in (
        (loss.lambda3, regions, of_region, of_text),
        (loss.lambda4, phrases, of_text, of_truth),
    ):
        if not weight:
            continue
        found = find_neighbours(items, partners, device)
        if side is regions:  # regions with the same ground-truth box show the same object, so they are no negatives
            truths = of_truth.to(device)[found.first_pair]
            found = found._replace(is_outside=found.is_outside & (truths[:, None] != truths[None]))
        cost = add_neighbourhood_cost(cost, weight, (side[items.to(device)[found.first_pair]],), found, similarity, loss)
    return cost


def _select_query_scores(batch: TripletBatch, scores: Scores, device: torch.device) -> tuple[QueryScores, QueryScores]:
    """Return the scores of each query region with all texts, and of each query text with its positive and negative regions."""
    i2t, t2i = scores if isinstance(scores, tuple) else (scores, scores)

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    region_scores = QueryScores(
        i2t[to_device(batch.query_regions)], to_device(batch.positive_texts), to_device(batch.negative_text_mask)
    )
    candidates = to_device(np.concatenate([batch.positive_regions[:, None], batch.negative_regions], 1))
    negatives = torch.nn.functional.pad(to_device(batch.negative_region_mask), (1, 0))
    texts = to_device(batch.query_texts)
    return region_scores, QueryScores(t2i[candidates, texts[:, None]], torch.zeros_like(texts), negatives)


def _find_single_partner_rows(items: Indices, partners: Indices) -> Indices:
    """Return the first position of each item that occurs with a single partner only, in ascending order.

    Pair k consists of ``items[k]`` and ``partners[k]``: a region and a text, or a text and a region.
    """
    items_of_pairs = np.unique(np.stack([items, partners], 1), axis=0)[:, 0]
    different_items, n_partners = np.unique(items_of_pairs, return_counts=True)
    same_items, first_rows = np.unique(items, return_index=True)
    assert np.array_equal(same_items, different_items)
    return np.sort(first_rows[n_partners == 1])


@dataclass(frozen=True)
class LabelledBatch:
    """Regions and phrases to embed, and labelled pairs of a region and a phrase.

    ``region_indices``, ``text_indices`` : indices of regions and of texts in the data set, without repetition.
    ``pair_regions``, ``pair_texts`` : position of each pair's region and text in these arrays.
    ``labels`` : 1 for a positive pair, -1 for a negative pair.
    """

    region_indices: Int[np.ndarray, " n_regions"]
    text_indices: Int[np.ndarray, " n_texts"]
    pair_regions: Int[np.ndarray, " n_pairs"]
    pair_texts: Int[np.ndarray, " n_pairs"]
    labels: Int[np.ndarray, " n_pairs"]


class PairSampler(CandidateSampler):
    """A sampler of positive and negative pairs for the similarity network (two-branch paper, Algorithm 1, steps 2 and 3)."""

    def sample(self, batch: Indices, rng: np.random.Generator) -> LabelledBatch:
        positive, negative = self.find_positives_and_negatives(batch, rng)
        rows, regions = np.arange(len(batch)), self.truth_indices[batch]
        if self.settings.positives == "augmented":
            rows, regions = np.concatenate([rows, positive.pair_rows]), np.concatenate([regions, positive.region_indices])
        wrong = (
            negative if self.settings.negatives == "all" else _sample_negative_per_positive(rows, negative, len(batch), rng)
        )
        embedded, of_region = np.unique(np.concatenate([regions, wrong.region_indices]), return_inverse=True)
        of_pair = self.pairs.text_indices[batch][np.concatenate([rows, wrong.pair_rows])]
        texts, of_text = np.unique(of_pair, return_inverse=True)
        return LabelledBatch(embedded, texts, of_region, of_text, np.repeat([1, -1], [len(rows), len(wrong.pair_rows)]))


def _sample_negative_per_positive(
    rows: Indices, negative: BatchCandidates, n_rows: int, rng: np.random.Generator
) -> BatchCandidates:
    """Return a random negative candidate for each positive pair (two-branch paper, Algorithm 1, step 3).

    ``rows`` : for each positive pair, the position of its phrase in the batch.
    ``negative`` : negative candidates of the phrases.
    ``n_rows`` : number of phrases of the batch.

    A phrase without negative candidates is replaced by a random phrase of the batch that has some. If no phrase of the batch
    has a negative candidate, the result is empty.
    """
    rows_with_negatives = np.unique(negative.pair_rows)
    if not len(rows_with_negatives):
        return negative
    others = rows_with_negatives[rng.integers(0, len(rows_with_negatives), len(rows))]
    source_rows = np.where(np.isin(rows, rows_with_negatives), rows, others)
    starts = np.searchsorted(negative.pair_rows, source_rows)
    counts = np.bincount(negative.pair_rows, minlength=n_rows)[source_rows]
    return BatchCandidates(source_rows, negative.region_indices[starts + rng.integers(0, counts)])


def compute_pair_cost(
    batch: LabelledBatch,
    regions: Float[Tensor, "n_regions dim"],
    phrases: Float[Tensor, "n_texts dim"],
    similarity: Similarity,
    loss: PairLoss,
) -> Cost:
    """Return the loss of a batch of labelled pairs (two-branch paper, Eq. 7), and its loss if all scores were 0."""
    device = regions.device
    rows, columns, labels = (
        torch.from_numpy(indices).to(device) for indices in (batch.pair_regions, batch.pair_texts, batch.labels)
    )
    scores = similarity.score_pairs((regions,), (phrases,), rows, columns)
    with torch.no_grad():
        collapsed = loss.cost(torch.zeros_like(scores), labels.float())
    return Cost(loss.cost(scores, labels.float()), collapsed)
