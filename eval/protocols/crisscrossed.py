"""Image-to-image and text-to-text retrieval on COCO's test set, by the judgements of Crisscrossed Captions (CxC).

An image queries all other test images; right are those that people judged to be as similar as
:mod:`vse.eval.files.judged_pairs` asks for, and an image without any is no query. A caption queries all other captions;
right are those judged so, and the other captions of its image. A judgement counts in both directions. Both sides are compared
by the cosine of their embeddings, and nothing is a candidate for itself. These are the rules by which VSE-infinity was
evaluated (Chen et al., CVPR 2021), which compares by the inner product of unit vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings
from vse.eval.files.judged_pairs import JudgedPairs
from vse.eval.protocols.coco import (
    AnsweredQuery,
    Rows,
    answered_query,
    coco_test_captions,
    coco_test_images,
    ranked_queries,
    rows_by_id,
    rows_of,
)
from vse.eval.ranking.metrics import Fold, Queries
from vse.eval.ranking.ranks import blocks_from_embeddings, check_finite, shared_tensor
from vse.eval.ranking.sentences import unit_rows
from vse.pipeline.errors import UserError


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
