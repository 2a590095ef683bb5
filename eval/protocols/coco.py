"""The protocols ``cxc`` and ``eccv`` on the test set of MS-COCO, with right answers that people judged.

``cxc`` has the metrics of ``full``, with the right answers of Crisscrossed Captions (Parekh et al., "Crisscrossed Captions:
Extended Intramodal and Intermodal Semantic Similarity Judgments for MS-COCO", EACL 2021). ``eccv`` has mAP@R, R-Precision and
R@1 of ECCV Caption (Chun et al., ECCV 2022) for the queries in its annotations. The right answers of both protocols come from
the package eccv-caption. This package identifies images by ``cocoid`` and captions by their id in COCO, which is the
``sentid`` of the Karpathy split. Queries search the 5,000 test images, or the 25,000 captions in the package, five for each
test image.

With the judgement files of Crisscrossed Captions, ``cxc`` also has image-to-image (``i2i``) and text-to-text (``t2t``)
retrieval. An image queries all other test images; its right answers are the images that people judged to be similar. A caption
queries all other captions; its right answers are the captions that people judged to be similar, and the other captions of its
image. If b is a right answer to a, then a is a right answer to b. Embeddings are compared by their cosine (VSE-infinity, Chen
et al., CVPR 2021).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval import DEFAULT_KS
from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.answers import normalise_rows
from vse.eval.ranking.metrics import BestAnswers, Ints, MeasuredQueries, QueriesByDirection, compute_position_metrics
from vse.eval.ranking.ranks import ScoreBlocks, blocks_from_embeddings, check_finite, iter_caption_scores, shared_tensor
from vse.pipeline.errors import UserError, extra_install_command
from vse.pipeline.files.inputs import InputFile, wrap_read_errors

IMAGE_JUDGEMENT_FILE, CAPTION_JUDGEMENT_FILE = "sis_test.csv", "sts_test.csv"
MIN_IMAGE_PAIR_SCORE, MIN_CAPTION_PAIR_SCORE = 2.5, 3.0  # a pair is right from this score on; scores are from 0 to 5
_COCO_ID = re.compile(r"(?:.*[_:])?(\d{1,18})(?:\.jpg)?")


class SimilarPairs(NamedTuple):
    """The pairs of similar images and of similar captions in Crisscrossed Captions. Each pair is two COCO ids: (n_pairs, 2).

    ``sha256_by_file`` maps the names of the two files from which the pairs were read to their SHA-256.
    """

    image_pairs: Ints
    caption_pairs: Ints
    sha256_by_file: dict[str, str]


def read_similar_pairs(folder: Path) -> SimilarPairs:
    """Read the pairs of similar images (``sis_test.csv``) and captions (``sts_test.csv``) of Crisscrossed Captions.

    Two images are similar if the score in the file is at least 2.5, two captions if it is at least 3. Raises UserError
    if a file is missing, or if a row does not have two COCO ids and a score.
    """
    images, captions = InputFile(folder / IMAGE_JUDGEMENT_FILE), InputFile(folder / CAPTION_JUDGEMENT_FILE)
    return SimilarPairs(
        _read_right_pairs(images, ("image1", "image2"), MIN_IMAGE_PAIR_SCORE),
        _read_right_pairs(captions, ("caption1", "caption2"), MIN_CAPTION_PAIR_SCORE),
        {IMAGE_JUDGEMENT_FILE: images.sha256, CAPTION_JUDGEMENT_FILE: captions.sha256},
    )


def _read_right_pairs(file: InputFile, columns: tuple[str, str], threshold: float) -> Ints:
    """Return the pairs of different COCO ids (n_pairs, 2) whose score in a CSV file is at least ``threshold``.

    ``columns`` are the names of the two columns with the ids.
    """
    import pandas as pd

    with wrap_read_errors(file.path, "a CSV file with a header"):
        table = pd.read_csv(file.stream, dtype=str, keep_default_na=False, index_col=False)
    lacking = [column for column in (*columns, "agg_score") if column not in table]
    if lacking:
        raise UserError(f"{file.path}: has no column {' and no '.join(lacking)}; it is not a file of CxC")
    pairs = []
    for row, (first, second, score) in enumerate(zip(*(table[name] for name in (*columns, "agg_score")), strict=True), 1):
        one, other = _COCO_ID.fullmatch(first), _COCO_ID.fullmatch(second)
        if one is None or other is None or not re.fullmatch(r"\d+(\.\d*)?", score):
            cells = ", ".join(cell[:40] for cell in (first, second, score))
            raise UserError(f"{file.path}: row {row}: {cells}: not two COCO ids and a score")
        if float(score) >= threshold and one[1] != other[1]:
            pairs.append((int(one[1]), int(other[1])))
    return np.array(pairs, np.int64).reshape(-1, 2)


def rank_intramodal_queries(run: Embeddings, coco_ids: Ints, pairs: SimilarPairs, ks: Sequence[int]) -> QueriesByDirection:
    """Return the queries of image-to-image (``i2i``) and text-to-text (``t2t``) retrieval with their best answers.

    Queries and answers are row indices in ``run``. Ties count against the model. ``coco_ids`` (n_images,) has the COCO id of
    each image. The two members of a pair in ``pairs`` are right answers to each other. ``ks`` are the values of K in R@K.
    Raises UserError if ``run`` has no embeddings, or if no pair in ``pairs`` consists of two test images.
    """
    if run.images is None or run.captions is None:
        raise UserError("the pairs of CxC need embeddings of images and of captions, and the file has none")
    ids = coco_test_image_ids()
    images = find_rows(rows_by_id(coco_ids), ids, "image")
    i2i = _rank_other_rows(run.images[images], _collect_right_answers(rows_by_id(ids), pairs.image_pairs))
    if not i2i:
        raise UserError("no pair of images of CxC consists of two COCO test images: these are not the files of its test set")
    image_queries = images[np.array(sorted(i2i))]

    ids = coco_test_caption_ids()
    captions = find_rows(rows_by_id(run.caption_ids), ids, "caption")
    image_of_caption = run.image_of_caption()[captions]
    right = _collect_right_answers(rows_by_id(ids), pairs.caption_pairs)
    order = np.argsort(image_of_caption, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(image_of_caption[order])) + 1):
        for caption in own.tolist():
            right.setdefault(caption, set()).update(set(own.tolist()) - {caption})
    t2t = _rank_other_rows(run.captions[captions], {caption: answers for caption, answers in right.items() if answers})
    caption_queries = np.array(sorted(t2t))
    return {
        "i2i": measure_queries([i2i[row] for row in sorted(i2i)], image_queries, image_queries, images, ks),
        "t2t": measure_queries(
            [t2t[row] for row in sorted(t2t)], captions[caption_queries], image_of_caption[caption_queries], captions, ks
        ),
    }


def _collect_right_answers(rows: dict[int, int], pairs: Ints) -> dict[int, set[int]]:
    """Return a dict from the row of each query to the rows of its right answers.

    ``pairs`` (n, 2) has pairs of COCO ids. The members of a pair are right answers to each other. ``rows`` maps COCO ids to
    rows. A pair with an id that is not in ``rows`` is left out.
    """
    right: dict[int, set[int]] = {}
    for one, other in pairs.tolist():
        if one in rows and other in rows:
            right.setdefault(rows[one], set()).add(rows[other])
            right.setdefault(rows[other], set()).add(rows[one])
    return right


def _rank_other_rows(vectors: NDArray[np.float32], right: dict[int, set[int]]) -> dict[int, QueryRanking]:
    """Rank for each query all other rows of ``vectors`` (n, dim) by their cosine with the query.

    ``right`` maps the row of each query in ``vectors`` to the rows of its right answers. The result maps the same rows to the
    rankings.
    """
    check_finite("embeddings", shared_tensor(vectors))
    units = normalise_rows(shared_tensor(vectors))
    blocks = blocks_from_embeddings(units, units, torch.arange(len(units)))
    rankings = {}
    for rows in blocks.row_slices:
        queries = [row for row in range(rows.start, rows.stop) if row in right]
        if not queries:
            continue
        scores = blocks.score(rows, None).numpy()
        for row in queries:
            query_scores = scores[row - rows.start].copy()
            query_scores[row] = -np.inf
            rankings[row] = rank_answers(query_scores, np.array(sorted(right[row])))
    return rankings


def are_coco_protocols_available(coco_ids: Ints, caption_ids: Ints) -> bool:
    """Return whether the package eccv-caption is installed, and the ids include all COCO test images and captions."""
    if not find_spec("eccv_caption"):
        return False
    return bool(np.isin(coco_test_caption_ids(), caption_ids).all() and np.isin(coco_test_image_ids(), coco_ids).all())


def rank_coco_queries(
    protocol: str,
    coco_ids: Ints,
    caption_ids: Ints,
    i2t_blocks: ScoreBlocks,
    t2i_blocks: ScoreBlocks | None = None,
    ks: Sequence[int] = DEFAULT_KS,
) -> QueriesByDirection:
    """Return the queries of ``cxc`` or ``eccv`` in both directions, with their best answers. Ties count against the model.

    Parameters
    ----------
    protocol : ``cxc`` or ``eccv``
    coco_ids : (n_images,) COCO id of each image
    caption_ids : (n_captions,) COCO id of each caption
    i2t_blocks : scores of all pairs
    t2i_blocks : scores of all pairs for text-to-image retrieval; None if ``i2t_blocks`` serves both directions
    ks : the values of K in R@K of ``cxc``
    """
    images, captions = rows_by_id(coco_ids), rows_by_id(caption_ids)
    candidates = coco_test_caption_ids()
    columns = torch.from_numpy(find_rows(captions, candidates, "caption"))
    measure = partial(measure_queries, ks=ks) if protocol == "cxc" else _measure_eccv_queries

    queries, answers = _read_annotations(f"{protocol}_image_to_caption.json", images, "image", rows_by_id(candidates))
    rankings = []
    for span in i2t_blocks.row_slices:
        here = np.flatnonzero((queries >= span.start) & (queries < span.stop))
        scores = i2t_blocks.score(span, columns).numpy()
        rankings += [rank_answers(scores[queries[k] - span.start], answers[k]) for k in here]
    i2t = measure(rankings, queries, queries, columns.numpy())

    candidates = coco_test_image_ids()
    rows = find_rows(images, candidates, "image")
    queries, answers = _read_annotations(f"{protocol}_caption_to_image.json", captions, "caption", rows_by_id(candidates))
    rankings = []
    for part, scores in iter_caption_scores(t2i_blocks or i2t_blocks, queries):
        rankings += [rank_answers(scores[rows, n], answers[k]) for n, k in enumerate(part)]
    return {"i2t": i2t, "t2i": measure(rankings, queries, i2t_blocks.image_of_caption.numpy()[queries], rows)}


def find_right_positions(scores: NDArray[np.float32], right: Ints) -> Ints:
    """Return the 0-based positions (n_right,) of the right answers to a query among all candidates, in ascending order.

    ``scores`` (n_candidates,) has the score of each candidate. ``right`` (n_right,) has the index of each right answer in
    ``scores``, or -1 for a right answer that is not a candidate. The position of such an answer is n_candidates. At least one
    right answer must be a candidate. If scores are equal, wrong candidates come first.
    """
    present = right[right >= 0]
    right_scores = np.sort(scores[present])[::-1]
    wrong = scores.copy()
    wrong[present] = -np.inf
    ahead = np.sort(wrong[wrong >= right_scores[-1]])
    positions = np.full(len(right), len(scores))
    positions[: len(present)] = np.arange(len(present)) + len(ahead) - np.searchsorted(ahead, right_scores, side="left")
    return positions


def average_precision_at_r(positions: Ints) -> float:
    """Return AP@R from the positions of all R right answers to a query.

    AP@R is the sum of the precisions at the positions of the right answers among the first R candidates, divided by R.
    Musgrave et al., "A Metric Learning Reality Check", ECCV 2020, Eq. 1.
    """
    n_right = len(positions)
    precision = (1 + np.arange(n_right)) / (1 + positions)
    return float(precision[positions < n_right].sum() / n_right)


class QueryRanking(NamedTuple):
    """The positions of the right answers to one query in the ranked list of candidates, 0-based and ascending.

    ``best_right`` and ``best_wrong`` are the best right and the best wrong candidate, as indices in the unsorted candidates.
    ``right_score`` and ``wrong_score`` are the scores of these two candidates.
    """

    positions: Ints
    best_right: int
    right_score: float
    best_wrong: int
    wrong_score: float


def rank_answers(scores: NDArray[np.float32], right: Ints) -> QueryRanking:
    """Rank the candidates of one query by their ``scores`` (n_candidates,).

    ``right`` has the index of each right answer in ``scores``, or -1 for a right answer that is not a candidate.
    """
    present = right[right >= 0]
    wrong = scores.copy()
    wrong[present] = -np.inf
    best, best_wrong = int(present[scores[present].argmax()]), int(wrong.argmax())
    return QueryRanking(find_right_positions(scores, right), best, scores[best], best_wrong, wrong[best_wrong])


def _collect_best_answers(rankings: Sequence[QueryRanking], queries: Ints, candidates: Ints) -> BestAnswers:
    """Return the best right and the best wrong answer to each query, as rows of the split.

    ``rankings`` has the best answers as indices in ``candidates`` (n_candidates,), the rows of the candidates in the split.
    ``queries`` (n_queries,) has the rows of the queries.
    """
    positions, right, right_scores, wrong, wrong_scores = zip(*rankings, strict=True)
    ranks, right_rows, wrong_rows = np.array([one[0] for one in positions]), candidates[list(right)], candidates[list(wrong)]
    return BestAnswers(queries, ranks, right_rows, np.array(right_scores), wrong_rows, np.array(wrong_scores))


def measure_queries(
    rankings: Sequence[QueryRanking], queries: Ints, images: Ints, candidates: Ints, ks: Sequence[int]
) -> MeasuredQueries:
    """Return the ranked queries with R@K, Med r, mean r, nDCG@10, MRR and mAP.

    The rank of a query is the number of wrong answers before its first right answer.

    Parameters
    ----------
    rankings : the ranking of each query
    queries : (n_queries,) rows of the queries in the split
    images : (n_queries,) row of each query's image; for an image query, its own row
    candidates : (n_candidates,) rows of the candidates in the split
    ks : the values of K in R@K
    """
    wrong_before = np.concatenate([one.positions - np.arange(len(one.positions)) for one in rankings])
    query_of = np.repeat(np.arange(len(rankings)), [len(one.positions) for one in rankings])
    best = _collect_best_answers(rankings, queries, candidates)
    return replace(
        MeasuredQueries.from_ranks(best.ranks, images, ks, compute_position_metrics(query_of, wrong_before)), answers=best
    )


def _measure_eccv_queries(rankings: Sequence[QueryRanking], queries: Ints, images: Ints, candidates: Ints) -> MeasuredQueries:
    """Return the ranked queries with the metrics of ECCV Caption: mAP@R, R-Precision and R@1.

    ``rankings`` has the ranking of each query. ``queries``, ``images`` and ``candidates`` are the rows in the split of the
    queries, of their images and of the candidates.
    """
    positions_by_query = [one.positions for one in rankings]
    values = {
        "map_at_r": np.array([100 * average_precision_at_r(positions) for positions in positions_by_query]),
        "rprecision": np.array([100 * np.mean(positions < len(positions)) for positions in positions_by_query]),
        "r1": np.array([100.0 * (positions[0] == 0) for positions in positions_by_query]),
    }
    return MeasuredQueries(images, values, answers=_collect_best_answers(rankings, queries, candidates))


def _read_annotations(
    file_name: str, query_rows: dict[int, int], query_kind: str, candidate_rows: dict[int, int]
) -> tuple[Ints, list[Ints]]:
    """Read the right answers to each query from a file of the package eccv-caption.

    Return the rows of the queries in the split, ascending, and for each query the indices of its right answers among the
    candidates. The index is -1 for a right answer that is not a candidate; ECCV Caption has two such captions. ``query_rows``
    maps the ids of queries to rows, and ``candidate_rows`` maps the ids of candidates to indices. ``query_kind``, ``image`` or
    ``caption``, is for error messages.
    """
    content = {int(query): right for query, right in json.loads(_read_eccv_caption_file(file_name)).items()}
    rows = find_rows(query_rows, list(content), query_kind)
    answers = [np.array([candidate_rows.get(int(answer), -1) for answer in right]) for right in content.values()]
    order = np.argsort(rows)
    return rows[order], [answers[k] for k in order]


def coco_test_caption_ids() -> Ints:
    """Return the COCO ids (25000,) of the test captions in the package eccv-caption."""
    ids: Ints = np.load(BytesIO(_read_eccv_caption_file("coco_test_ids.npy")), allow_pickle=False)
    return ids


def coco_test_image_ids() -> Ints:
    """Return the COCO ids (5000,) of the test images in the package eccv-caption, ascending."""
    return np.array(sorted(int(image) for image in json.loads(_read_eccv_caption_file("original_image_to_caption.json"))))


def _read_eccv_caption_file(name: str) -> bytes:
    if not find_spec("eccv_caption"):
        raise UserError(f"the protocols cxc and eccv need a package: {extra_install_command('eccv')}")
    return (files("eccv_caption") / "data" / name).read_bytes()


def rows_by_id(ids: Ints) -> dict[int, int]:
    """Return a dict from each id to its row, the index in ``ids``."""
    return {int(id_): row for row, id_ in enumerate(ids)}


def find_rows(rows: dict[int, int], ids: Sequence[int] | Ints, kind: str) -> Ints:
    """Return the row of each id. ``rows`` maps ids to rows. Raises UserError if an id is not in ``rows``.

    ``kind``, ``image`` or ``caption``, is for the message.
    """
    try:
        return np.array([rows[int(id_)] for id_ in ids], np.int64)
    except KeyError as missing:
        raise UserError(
            f"the protocols cxc and eccv need all 5,000 test images of COCO, and {kind} {missing} is missing "
            "(images are identified by coco_ids, captions by caption_ids)"
        ) from None
