"""The test set of MS-COCO with more right answers than its own captions: the protocols ``cxc`` and ``eccv``.

``cxc``: the metrics of ``full`` with the right answers that people judged to be right in Crisscrossed Captions (Parekh et
al., EACL 2021). ``eccv``: mAP@R, R-Precision and R@1 of ECCV Caption (Chun et al., ECCV 2022), for the queries that it
annotates. Both need whole rankings, and take the answers from the package eccv-caption, which names images by ``cocoid``
and captions by their number in COCO, which is the ``sentid`` of the Karpathy split. Its captions, five of each image, are
the candidates; a sixth or seventh is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.defaults import RECALLS
from vse.eval.ranking.best_answers import BestAnswers
from vse.eval.ranking.list_metrics import list_metrics
from vse.eval.ranking.metrics import Fold, Queries
from vse.eval.ranking.ranks import ScoreBlocks, scores_of_captions
from vse.pipeline.errors import UserError

Rows = NDArray[np.int64]


def is_coco_test(coco_ids: Rows, caption_ids: Rows) -> bool:
    """Whether all test images of COCO are here with their captions, and the package with the right answers is there."""
    if not find_spec("eccv_caption"):
        return False
    return bool(np.isin(coco_test_captions(), caption_ids).all() and np.isin(coco_test_images(), coco_ids).all())


def coco_fold(
    protocol: str,
    coco_ids: Rows,
    caption_ids: Rows,
    i2t_blocks: ScoreBlocks,
    t2i_blocks: ScoreBlocks | None = None,
    ks: Sequence[int] = RECALLS,
) -> Fold:
    """The queries of ``cxc`` or ``eccv``, with their best answers; ties count against the model.

    Parameters
    ----------
    coco_ids : (n_images,) number of each image in COCO
    caption_ids : (n_captions,) number of each caption in COCO
    i2t_blocks : their scores
    t2i_blocks : the scores of text-to-image, if they depend on the direction
    ks : the K of R@K of ``cxc``
    """
    images, captions = rows_by_id(coco_ids), rows_by_id(caption_ids)
    candidates = coco_test_captions()
    columns = torch.from_numpy(rows_of(captions, candidates, "caption"))
    measure = partial(ranked_queries, ks=ks) if protocol == "cxc" else _precisions

    asked, answers = _answers(f"{protocol}_image_to_caption.json", images, "image", rows_by_id(candidates))
    answered = []
    for start in range(0, len(coco_ids), i2t_blocks.rows):
        stop = min(start + i2t_blocks.rows, len(coco_ids))
        here = np.flatnonzero((asked >= start) & (asked < stop))
        scores = i2t_blocks.score(slice(start, stop), columns).numpy()
        answered += [answered_query(scores[asked[k] - start], answers[k]) for k in here]
    i2t = measure(answered, asked, asked, columns.numpy())

    candidates = coco_test_images()
    rows = rows_of(images, candidates, "image")
    asked, answers = _answers(f"{protocol}_caption_to_image.json", captions, "caption", rows_by_id(candidates))
    answered = []
    for part, scores in scores_of_captions(t2i_blocks or i2t_blocks, asked):
        answered += [answered_query(scores[rows, n], answers[k]) for n, k in enumerate(part)]
    return {"i2t": i2t, "t2i": measure(answered, asked, i2t_blocks.image_of_caption.numpy()[asked], rows)}


def right_positions(scores: NDArray[np.float32], right: Rows) -> Rows:
    """The 0-based positions of a query's right answers among all candidates, ascending.

    ``scores`` is (n_candidates,), ``right`` the rows of the right ones, one of them at least. A wrong one that scores as
    high comes before. Row -1 is no candidate and never found: its position is ``n_candidates``, after all.
    """
    there = right[right >= 0]
    goals = np.sort(scores[there])[::-1]
    wrong = scores.copy()
    wrong[there] = -np.inf
    likely = wrong[wrong >= goals[-1]]
    positions = np.full(len(right), len(scores))
    positions[: len(there)] = np.arange(len(there)) + len(likely) - np.searchsorted(np.sort(likely), goals, side="left")
    return positions


def average_precision_at_r(positions: Rows) -> float:
    """AP@R = 1/R sum over the right answers among the first R of the precision there, R being how many are right.

    Musgrave et al., "A Metric Learning Reality Check", ECCV 2020, Eq. 1.
    """
    n_right = len(positions)
    precision = (1 + np.arange(n_right)) / (1 + positions)
    return float(precision[positions < n_right].sum() / n_right)


class AnsweredQuery(NamedTuple):
    """A query's right positions, and its best right and wrong answers, by their numbers among the candidates."""

    positions: Rows
    right: int
    right_score: float
    wrong: int
    wrong_score: float


def answered_query(scores: NDArray[np.float32], right: Rows) -> AnsweredQuery:
    """What :func:`right_positions` and a look at the best answers say of a query."""
    there = right[right >= 0]
    wrong = scores.copy()
    wrong[there] = -np.inf
    best, best_wrong = int(there[scores[there].argmax()]), int(wrong.argmax())
    return AnsweredQuery(right_positions(scores, right), best, scores[best], best_wrong, wrong[best_wrong])


def _best(answered: Sequence[AnsweredQuery], asked: Rows, candidates: Rows) -> BestAnswers:
    """The best answers to the queries ``asked``, in rows of the split, of which the ``candidates`` are."""
    positions, right, right_scores, wrong, wrong_scores = zip(*answered, strict=True)
    ranks = np.array([of_query[0] for of_query in positions])
    return BestAnswers(
        asked, ranks, candidates[list(right)], np.array(right_scores), candidates[list(wrong)], np.array(wrong_scores)
    )


def ranked_queries(
    answered: Sequence[AnsweredQuery], asked: Rows, images: Rows, candidates: Rows, ks: Sequence[int]
) -> Queries:
    """Queries with the metrics of other protocols; a rank is the number of wrong answers before the first right one.

    Parameters
    ----------
    answered : the queries, whose answers are numbers among the candidates
    asked : (n_queries,) their rows
    images : (n_queries,) the rows of the images that they are or belong to
    candidates : (n_candidates,) the rows of the candidates
    ks : the K of R@K
    """
    wrong_before = np.concatenate([one.positions - np.arange(len(one.positions)) for one in answered])
    query_of = np.repeat(np.arange(len(answered)), [len(one.positions) for one in answered])
    best = _best(answered, asked, candidates)
    return replace(Queries.ranked(best.ranks, images, ks, list_metrics(query_of, wrong_before)), answers=best)


def _precisions(answered: Sequence[AnsweredQuery], asked: Rows, images: Rows, candidates: Rows) -> Queries:
    positions = [one.positions for one in answered]
    values = {
        "map_at_r": np.array([100 * average_precision_at_r(of_query) for of_query in positions]),
        "rprecision": np.array([100 * np.mean(of_query < len(of_query)) for of_query in positions]),
        "r1": np.array([100.0 * (of_query[0] == 0) for of_query in positions]),
    }
    return Queries(images, values, answers=_best(answered, asked, candidates))


def _answers(name: str, queries: dict[int, int], kind: str, candidates: dict[int, int]) -> tuple[Rows, list[Rows]]:
    """The rows of the queries of a file of right answers, ascending, and the rows of the answers to each.

    An answer that is no candidate has row -1: ECCV Caption judged two captions to be right that it does not rank.
    """
    content = {int(query): right for query, right in json.loads(_data(name)).items()}
    rows = rows_of(queries, list(content), kind)
    answers = [np.array([candidates.get(int(number), -1) for number in right]) for right in content.values()]
    order = np.argsort(rows)
    return rows[order], [answers[k] for k in order]


def coco_test_captions() -> Rows:
    """The numbers (25000,) of the captions that are searched."""
    ids: Rows = np.load(BytesIO(_data("coco_test_ids.npy")), allow_pickle=False)
    return ids


def coco_test_images() -> Rows:
    """The numbers (5000,) of the images that are searched."""
    return np.array(sorted(int(image) for image in json.loads(_data("original_image_to_caption.json"))))


def _data(name: str) -> bytes:
    if not find_spec("eccv_caption"):
        raise UserError("the protocols cxc and eccv need a package: pip install 'vse-pipeline[eccv]'")
    return (files("eccv_caption") / "data" / name).read_bytes()


def rows_by_id(ids: Rows) -> dict[int, int]:
    """The row of each id."""
    return {int(number): row for row, number in enumerate(ids)}


def rows_of(rows: dict[int, int], ids: Sequence[int] | Rows, kind: str) -> Rows:
    """The rows of some ids; :class:`UserError` names one, of a ``kind``, that is not among COCO's test set."""
    try:
        return np.array([rows[int(number)] for number in ids], np.int64)
    except KeyError as missing:
        raise UserError(
            f"the protocols cxc and eccv are of the 5,000 test images of COCO, and {kind} {missing} of it is not there "
            "(images go by coco_ids, captions by caption_ids)"
        ) from None
