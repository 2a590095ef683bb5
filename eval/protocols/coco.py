"""The test set of MS-COCO with more right answers than its own captions: the protocols ``cxc`` and ``eccv``.

``cxc``: the metrics of ``full`` with the right answers that people judged to be right in Crisscrossed Captions (Parekh et
al., EACL 2021). ``eccv``: mAP@R, R-Precision and R@1 of ECCV Caption (Chun et al., ECCV 2022), for the queries that it
annotates. Both need whole rankings, and take the answers from the package eccv-caption, which names images by ``cocoid``
and captions by their number in COCO, which is the ``sentid`` of the Karpathy split. Its captions, five of each image, are
the candidates; a sixth or seventh is left out.

Pairs of images and pairs of captions that people judged: the files of Crisscrossed Captions (CxC).

Parekh et al., "Crisscrossed Captions: Extended Intramodal and Intermodal Semantic Similarity Judgments for MS-COCO", EACL
2021.

Image-to-image and text-to-text retrieval on COCO's test set, by the judgements of Crisscrossed Captions (CxC).

An image queries all other test images; right are those that people judged to be as similar as
:mod:`vse.eval.protocols.coco` asks for, and an image without any is no query. A caption queries all other captions;
right are those judged so, and the other captions of its image. A judgement counts in both directions. Both sides are compared
by the cosine of their embeddings, and nothing is a candidate for itself. These are the rules by which VSE-infinity was
evaluated (Chen et al., CVPR 2021), which compares by the inner product of unit vectors.
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

from vse.eval.defaults import RECALLS
from vse.eval.files.embeddings import Embeddings
from vse.eval.ranking.answers import BestAnswers
from vse.eval.ranking.metrics import Fold, Queries, position_metrics
from vse.eval.ranking.ranks import ScoreBlocks, blocks_from_embeddings, caption_scores, check_finite, shared_tensor
from vse.eval.ranking.sentences import unit_rows
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import InputFile, wrap_read_errors

IMAGE_FILE, CAPTION_FILE = "sis_test.csv", "sts_test.csv"
IMAGE_THRESHOLD, CAPTION_THRESHOLD = 2.5, 3.0  # the score, of 0 to 5, from which on a pair is right
_NUMBER = re.compile(r"(?:.*[_:])?(\d{1,18})(?:\.jpg)?")


class JudgedPairs(NamedTuple):
    """Pairs (n, 2) of COCO's numbers that are right, each in one order, and the SHA-256 of the files that they are from."""

    images: NDArray[np.int64]
    captions: NDArray[np.int64]
    files: dict[str, str]


def read_judged_pairs(folder: Path) -> JudgedPairs:
    """The right pairs of ``sis_test.csv`` (images) and ``sts_test.csv`` (captions), which CxC publishes.

    A pair of images is right from a score of 2.5 on, one of captions from 3. Something paired with itself is left out.
    :class:`UserError` names a file that is missing, or a row that is none of theirs.
    """
    images, captions = InputFile(folder / IMAGE_FILE), InputFile(folder / CAPTION_FILE)
    return JudgedPairs(
        _pairs(images, ("image1", "image2"), IMAGE_THRESHOLD),
        _pairs(captions, ("caption1", "caption2"), CAPTION_THRESHOLD),
        {IMAGE_FILE: images.sha256, CAPTION_FILE: captions.sha256},
    )


def _pairs(file: InputFile, columns: tuple[str, str], threshold: float) -> NDArray[np.int64]:
    import pandas as pd

    with wrap_read_errors(file.path, "a CSV file with a header"):
        table = pd.read_csv(file.stream, dtype=str, keep_default_na=False, index_col=False)
    lacking = [column for column in (*columns, "agg_score") if column not in table]
    if lacking:
        raise UserError(f"{file.path}: has no column {' and no '.join(lacking)}; it is no file of CxC")
    pairs = []
    for row, (first, second, score) in enumerate(zip(*(table[name] for name in (*columns, "agg_score")), strict=True), 1):
        one, other = _NUMBER.fullmatch(first), _NUMBER.fullmatch(second)
        if one is None or other is None or not re.fullmatch(r"\d+(\.\d*)?", score):
            said = ", ".join(cell[:40] for cell in (first, second, score))
            raise UserError(f"{file.path}: row {row}: {said}: not two numbers of COCO and a score")
        if float(score) >= threshold and one[1] != other[1]:
            pairs.append((int(one[1]), int(other[1])))
    return np.array(pairs, np.int64).reshape(-1, 2)


def intramodal_fold(run: Embeddings, coco_ids: Rows, pairs: JudgedPairs, ks: Sequence[int]) -> Fold:
    """The queries of both tasks, ``i2i`` and ``t2t``, with their best answers in rows of ``run``.

    Ties count against the model.

    ``coco_ids`` (n_images,) are the images' numbers in COCO, ``ks`` the K of R@K. :class:`UserError` if the run has no
    embeddings of images and captions, or if no pair is of test images.
    """
    if run.images is None or run.captions is None:
        raise UserError("the pairs of CxC need embeddings of images and of captions, and the file has none")
    numbers = coco_test_images()
    images = rows_of(rows_by_id(coco_ids), numbers, "image")
    right = _right(rows_by_id(numbers), pairs.images)
    i2i = _searched(run.images[images], right)
    if not i2i:
        raise UserError("no pair of images of CxC is of two test images of COCO: these are not the files of its test set")
    asked = images[np.array(sorted(i2i))]

    numbers = coco_test_captions()
    captions = rows_of(rows_by_id(run.caption_ids), numbers, "caption")
    of_caption = run.image_of_caption()[captions]
    right = _right(rows_by_id(numbers), pairs.captions)
    order = np.argsort(of_caption, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(of_caption[order])) + 1):
        for caption in own.tolist():
            right.setdefault(caption, set()).update(set(own.tolist()) - {caption})
    t2t = _searched(run.captions[captions], {caption: some for caption, some in right.items() if some})
    return {
        "i2i": _queries(i2i, asked, asked, images, ks),
        "t2t": _queries(t2t, captions[np.array(sorted(t2t))], of_caption[np.array(sorted(t2t))], captions, ks),
    }


def _right(places: dict[int, int], pairs: NDArray[np.int64]) -> dict[int, set[int]]:
    """For each candidate the others that were judged to be right, in both directions; other numbers are left out."""
    right: dict[int, set[int]] = {}
    for one, other in pairs.tolist():
        if one in places and other in places:
            right.setdefault(places[one], set()).add(places[other])
            right.setdefault(places[other], set()).add(places[one])
    return right


def _searched(vectors: NDArray[np.float32], right: dict[int, set[int]]) -> dict[int, AnsweredQuery]:
    """What those of some vectors (n, dim) that have right answers get among all others, a block of rows at a time."""
    check_finite("embeddings", shared_tensor(vectors))
    units = unit_rows(shared_tensor(vectors))
    blocks = blocks_from_embeddings(units, units, torch.arange(len(units)))
    found = {}
    for start in range(0, len(units), blocks.rows):
        rows = range(start, min(start + blocks.rows, len(units)))
        asked = [row for row in rows if row in right]
        scores = blocks.score(slice(rows.start, rows.stop), None).numpy() if asked else None
        for row in asked:
            assert scores is not None
            of_query = scores[row - start].copy()
            of_query[row] = -np.inf
            found[row] = answered_query(of_query, np.array(sorted(right[row])))
    return found


def _queries(found: dict[int, AnsweredQuery], asked: Rows, images: Rows, candidates: Rows, ks: Sequence[int]) -> Queries:
    return ranked_queries([found[row] for row in sorted(found)], asked, images, candidates, ks)


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
    for part, scores in caption_scores(t2i_blocks or i2t_blocks, asked):
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
    return replace(Queries.from_ranks(best.ranks, images, ks, position_metrics(query_of, wrong_before)), answers=best)


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
