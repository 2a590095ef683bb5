"""The protocols ``judged-expert``, ``judged-crowd`` and ``judged-qrels``, whose right answers come from people's judgements.

The module also has the protocols of language pairs: with ``en:de``, English captions query German captions.

The candidates are the images and the captions that were judged at least once. A pair of an image and a caption is right if
people's grade for the pair is high enough. If nobody judged a pair of an image and its own caption, this pair is right and has
the highest grade. Other pairs without a judgement count as wrong in R@1, R-Precision, mAP@R and nDCG@10, so these metrics are
lower bounds. bpref ignores pairs without a judgement. judged@10 is the share of the first ten answers that were judged.

Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 2002 (nDCG); Buckley and Voorhees,
"Retrieval evaluation with incomplete information", SIGIR 2004 (bpref); Musgrave et al., "A Metric Learning Reality Check",
ECCV 2020 (mAP@R); Kendall, "The treatment of ties in ranking problems", Biometrika 1945 (tau-b); Stuart, "The estimation and
comparison of strengths of association in contingency tables", Biometrika 1953 (tau-c). Hessel et al., "CLIPScore", EMNLP
2021, report tau of scores and judgements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.judgements import Judgements
from vse.eval.files.split import Embeddings, select_language
from vse.eval.protocols.result_content import mean_and_std_over_seeds
from vse.eval.ranking.answers import normalise_rows
from vse.eval.ranking.metrics import BestAnswers, Floats, Ints, MeasuredQueries, QueriesByDirection
from vse.eval.ranking.ranks import blocks_from_embeddings, iter_caption_scores, ranks_from_blocks, shared_tensor
from vse.eval.ranking.statistics import compute_percentile_interval
from vse.pipeline.dataset.languages import parse_languages
from vse.pipeline.errors import UserError

_DEPTH = 10  # number of candidates that nDCG@10 and judged@10 count
_UNJUDGED = -1  # the grade of a pair without judgement


class JudgedRanking(NamedTuple):
    """The ranking of the candidates for one query: the grades of the candidates, the best-scoring candidate first.

    grades : (n_candidates,) grade of each candidate; -1 for a candidate without a judgement
    is_own : (n_candidates,) whether the candidate is the query's own caption or image
    best_right, best_wrong : the best right and the best wrong candidate, as indices in the unsorted candidates
    right_score, wrong_score : scores of these two candidates; ``wrong_score`` is -inf if no candidate is wrong
    """

    grades: Ints
    is_own: NDArray[np.bool_]
    best_right: int
    best_wrong: int
    right_score: float
    wrong_score: float


def rank_judged_queries(run: Embeddings, judgements: Judgements) -> QueriesByDirection:
    """Return the ranked queries of each direction, with their metrics and best answers.

    The candidates are the judged captions and images. Only queries with a right answer among the candidates are returned. If
    scores are equal, candidates with a lower grade come first. Raises UserError if a direction has no such query.
    """
    candidates = _JudgedCandidates(run, judgements)
    directions = {}
    for name, ranked in (("i2t", candidates.rank_captions()), ("t2i", candidates.rank_images())):
        rows, queries = [], []
        for row, query in ranked:
            rows.append(row)
            queries.append(query)
        if not queries:
            raise UserError(f"the judgements {judgements.kind} have no right answer to any query of {name}")
        directions[name] = candidates.build_measured_queries(name, np.array(rows), queries)
    return directions


class _JudgedCandidates:
    """The judged images and captions of a split, as rows ``images`` and ``captions``, and the grades of all their pairs."""

    def __init__(self, run: Embeddings, judgements: Judgements) -> None:
        self._run, self._min_right_grade = run, judgements.min_right_grade
        image_rows, caption_rows, known = _find_judged_rows(run, judgements)
        grades = judgements.grades[known]
        self.images, images = np.unique(image_rows, return_inverse=True)
        self.captions, captions = np.unique(caption_rows, return_inverse=True)
        self._image_of_caption = run.image_of_caption()
        own = self.images[:, None] == self._image_of_caption[self.captions]
        self._grades = np.full(own.shape, _UNJUDGED, np.int64)
        self._grades[images, captions] = grades
        self._grades[own & (self._grades == _UNJUDGED)] = max(grades.max(initial=0), judgements.min_right_grade)
        self._own = own

    def rank_captions(self) -> Iterator[tuple[int, JudgedRanking]]:
        """Rank the captions for each image that has a right caption. Yield the index in ``images`` and the ranking."""
        blocks, _ = self._run.score_blocks()
        columns = torch.from_numpy(self.captions)
        for span in blocks.row_slices:
            here = np.flatnonzero((self.images >= span.start) & (self.images < span.stop))
            scores = blocks.score(span, columns).cpu().numpy()
            for image in here.tolist():
                if (self._grades[image] >= self._min_right_grade).any():
                    yield (
                        image,
                        self._rank_candidates(scores[self.images[image] - span.start], self._grades[image], self._own[image]),
                    )

    def rank_images(self) -> Iterator[tuple[int, JudgedRanking]]:
        """Rank the images for each caption that has a right image. Yield the index in ``captions`` and the ranking."""
        i2t, t2i = self._run.score_blocks()
        for part, scores in iter_caption_scores(t2i or i2t, self.captions):
            for n, caption in enumerate(part.tolist()):
                if (self._grades[:, caption] >= self._min_right_grade).any():
                    yield (
                        caption,
                        self._rank_candidates(scores[self.images, n], self._grades[:, caption], self._own[:, caption]),
                    )

    def _rank_candidates(self, scores: NDArray[np.floating], grades: Ints, own: NDArray[np.bool_]) -> JudgedRanking:
        order = np.lexsort((grades, -scores))
        right = grades[order] >= self._min_right_grade
        first_right, first_wrong = int(order[right.argmax()]), int(order[right.argmin()])
        wrong_score = float(scores[first_wrong]) if not right.all() else -np.inf
        return JudgedRanking(grades[order], own[order], first_right, first_wrong, float(scores[first_right]), wrong_score)

    def build_measured_queries(self, direction: str, rows: Ints, queries: list[JudgedRanking]) -> MeasuredQueries:
        """Return ranked queries with their metrics; ``rows`` has the index of each query in ``images`` or ``captions``."""
        of_queries, of_answers = (self.images, self.captions) if direction == "i2t" else (self.captions, self.images)
        values = [_compute_metrics(query, self._min_right_grade) for query in queries]
        query_rows = of_queries[rows]
        answers = BestAnswers(
            query_rows,
            np.array([np.argmax(query.grades >= self._min_right_grade) for query in queries]),
            of_answers[[query.best_right for query in queries]],
            np.array([query.right_score for query in queries]),
            of_answers[[query.best_wrong for query in queries]],
            np.array([query.wrong_score for query in queries]),
        )
        return MeasuredQueries(
            query_rows if direction == "i2t" else self._image_of_caption[query_rows],
            {name: np.array([of_query[name] for of_query in values]) for name in values[0]},
            answers=answers,
        )


def _compute_metrics(query: JudgedRanking, min_right_grade: int) -> dict[str, float]:
    right, judged = query.grades >= min_right_grade, query.grades != _UNJUDGED
    n_right = int(right.sum())
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    values = {
        "r1": right[0],
        "r1_own": query.is_own[0],
        "rprecision": right[:n_right].mean(),
        "map_at_r": precision[:n_right][right[:n_right]].sum() / n_right,
        "ndcg10": _ndcg(query.grades),
        "bpref": _bpref(right, judged & ~right),
        "judged10": judged[:_DEPTH].mean(),
    }
    return {name: 100 * float(value) for name, value in values.items()}


def _ndcg(grades: Ints) -> float:
    """Return nDCG@10 with grades as gains: the sum of grade / log2(2 + p) over p < 10 (from 0), divided by its maximum."""
    gains = np.maximum(grades, 0)
    best = np.sort(gains)[::-1][:_DEPTH]
    discounts = 1 / np.log2(np.arange(len(best)) + 2)
    return float((gains[:_DEPTH] * discounts).sum() / (best * discounts).sum())


def _bpref(right: NDArray[np.bool_], wrong: NDArray[np.bool_]) -> float:
    """Return bpref: the mean over right answers of 1 - min(n, R) / min(N, R).

    n is the number of judged wrong answers before the right answer. N is the number of all judged wrong answers, and R is the
    number of all right answers. If n is 0, the right answer counts 1.
    """
    n_right, n_wrong = int(right.sum()), int(wrong.sum())
    before = np.minimum(np.cumsum(wrong)[right], n_right)
    return float(np.mean(1 - before / max(1, min(n_wrong, n_right))))


N_CORRELATION_SAMPLES = 200  # bootstrap samples of tau, which takes longer than a mean
CORRELATION_NAMES = ("tau_b", "tau_c")


def correlate_with_ratings(seeds: Sequence[Embeddings], judgements: Judgements) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Kendall's tau-b and tau-c of image-to-text scores and ratings, in percent, and their 95% intervals.

    tau is (P - Q) / D. Take any two of the n ratings, with the scores of their judged pairs. P counts the cases in which
    scores and ratings have the same order, and Q the cases with opposite orders. If only the scores are equal, the case
    counts in T; if only the ratings are equal, it counts in U. D of tau-b is sqrt((P + Q + T)(P + Q + U)). D of tau-c is
    n^2 (m - 1) / 2m. m is the number of different scores or of different ratings, whichever is smaller.

    As in CLIPScore, the ratings of all raters are used, and own pairs (an image with its own caption) are left out. With
    several seeds, tau is a mean and a standard deviation. The bootstrap resamples images. Both dictionaries are empty if all
    ratings are equal, or if there are no ratings.
    """
    rated = [_RatedPairs.from_judgements(run, judgements) for run in seeds]
    first = rated[0]
    if len(np.unique(first.ratings)) < 2:
        return {}, {}
    whole = [one.correlate(slice(None)) for one in rated]
    rng = np.random.default_rng(0)
    order = np.argsort(first.images, kind="stable")
    of_image = np.split(order, np.flatnonzero(np.diff(first.images[order])) + 1)
    samples: dict[str, list[float]] = {name: [] for name in CORRELATION_NAMES}
    for _ in range(N_CORRELATION_SAMPLES):
        pairs = np.concatenate([of_image[k] for k in rng.integers(0, len(of_image), len(of_image))])
        drawn = [one.correlate(pairs) for one in rated]
        for name, values in samples.items():
            values.append(float(np.mean([one[name] for one in drawn])))
    return mean_and_std_over_seeds(whole), {
        name: compute_percentile_interval(np.array(values)) for name, values in samples.items()
    }


class _RatedPairs(NamedTuple):
    """The judged pairs without own pairs (an image with its own caption).

    For each pair, ``images`` (n,) has the row of the image, ``scores`` (n,) the score and ``ratings`` (n, n_raters) the
    ratings.
    """

    images: Ints
    scores: Floats
    ratings: Floats

    @classmethod
    def from_judgements(cls, run: Embeddings, judgements: Judgements) -> _RatedPairs:
        images, captions, known = _find_judged_rows(run, judgements)
        foreign = run.image_of_caption()[captions] != images
        images, captions, ratings = images[foreign], captions[foreign], judgements.ratings[known][foreign]
        blocks, _ = run.score_blocks()
        scores = np.empty(len(images))
        columns, column = np.unique(captions, return_inverse=True)
        for span in blocks.row_slices:
            here = np.flatnonzero((images >= span.start) & (images < span.stop))
            of_span = blocks.score(span, torch.from_numpy(columns)).cpu().numpy()
            scores[here] = of_span[images[here] - span.start, column[here]]
        return cls(images, scores, ratings)

    def correlate(self, pairs: Ints | slice) -> dict[str, float]:
        from scipy.stats import kendalltau

        ratings = self.ratings[pairs]
        scores = np.repeat(self.scores[pairs], ratings.shape[1])
        tau = {name: kendalltau(scores, ratings.ravel(), variant=name[-1]).statistic for name in CORRELATION_NAMES}
        return {name: 100 * float(value) for name, value in tau.items()}


def _find_judged_rows(run: Embeddings, judgements: Judgements) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the image rows and the caption rows of judged pairs in ``run``, and a mask (n_pairs,) over all judged pairs.

    A judged pair is left out, and False in the mask, if its image or its caption is not in ``run``.
    """
    rows = []
    for ids, wanted in ((run.image_ids, judgements.image_ids), (run.caption_ids, judgements.caption_ids)):
        row_of = {int(id_): row for row, id_ in enumerate(ids)}
        rows.append(np.array([row_of.get(id_, -1) for id_ in wanted.tolist()], np.int64))
    known = (rows[0] >= 0) & (rows[1] >= 0)
    return rows[0][known], rows[1][known], known


def parse_language_pairs(texts: Sequence[str]) -> list[str]:
    """Return the protocols for pairs of languages. The pair ``en:de`` gives the protocols ``en:de`` and ``de:en``.

    Raises UserError if a text is not a pair of two languages.
    """
    protocols: list[str] = []
    for text in texts:
        languages = parse_languages(text.replace(":", ","), "--pairs") if text.count(":") == 1 else []
        if len(languages) != 2:
            raise UserError(f"--pairs {text}: give two languages, such as en:de")
        protocols += [":".join(languages), ":".join(reversed(languages))]
    return list(dict.fromkeys(protocols))


def rank_language_pair(embeddings: Embeddings, protocol: str, ks: Sequence[int]) -> QueriesByDirection:
    """Return the ranked queries of a protocol such as ``en:de`` (English captions query German captions).

    The queries are under the direction ``t2t``. Only the captions of images with captions in all languages of the file are
    used. Raises UserError if the file has no embeddings of captions, or no captions in one of the two languages.
    """
    if embeddings.captions is None:
        raise UserError(f"the protocol {protocol} needs caption embeddings, and the file has none")
    source = Path(protocol)  # errors name the protocol in place of a file; the caller adds the file
    queries, answers = (select_language(source, embeddings, language) for language in protocol.split(":"))
    assert queries.captions is not None
    assert answers.captions is not None
    candidates = normalise_rows(shared_tensor(answers.captions))
    query_rows, image_of_answer = queries.image_of_caption(), torch.from_numpy(answers.image_of_caption())
    units = normalise_rows(shared_tensor(queries.captions))
    # ranks_from_blocks allows one query per image, so each pass ranks one caption of every image.
    order = np.argsort(query_rows, kind="stable")
    counts = np.bincount(query_rows)
    number_in_image = np.empty_like(query_rows)
    number_in_image[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(query_rows), np.int64)
    for number in range(int(counts.max())):
        chosen = np.flatnonzero(number_in_image == number)
        vectors = torch.zeros(len(counts), units.shape[1])
        vectors[torch.from_numpy(query_rows[chosen])] = units[torch.from_numpy(chosen)]
        blocks = blocks_from_embeddings(vectors, candidates, image_of_answer)
        ranks[chosen] = ranks_from_blocks(blocks).i2t[query_rows[chosen]]
    return {"t2t": MeasuredQueries.from_ranks(ranks, query_rows, ks)}
