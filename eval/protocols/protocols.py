"""The protocols: which queries search which candidates, and what became of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings
from vse.eval.protocols.coco import COCO_PROTOCOLS, coco_fold, is_coco_test
from vse.eval.ranking.metrics import FOLD, RECALLS, Fold, Queries, fold_of, metrics
from vse.eval.ranking.ranks import (
    Ranks,
    ScoreBlocks,
    blocks_from_embeddings,
    blocks_from_scores,
    ranks_from_embeddings,
    ranks_from_scores,
)
from vse.eval.ranking.sentences import sentence_ranks
from vse.eval.search.top_k import check_against_candidates, check_against_search, check_sentences_against_search
from vse.pipeline.errors import UserError, did_you_mean

log = logging.getLogger(__name__)
PROTOCOLS = ("1k", "full", "sentence", *COCO_PROTOCOLS)


def named_protocols(asked: str | Sequence[str]) -> list[str]:
    """One or several protocols as a list; :class:`UserError` if there is no such protocol, or none is named."""
    names = [asked] if isinstance(asked, str) else list(asked)
    for name in names or [""]:
        if name not in ("auto", *PROTOCOLS):
            raise UserError(f"unknown protocol {name!r}{did_you_mean(name, ('auto', *PROTOCOLS))}")
    return names


def protocols_of(run: Embeddings, asked: Sequence[str]) -> list[str]:
    """The protocols asked for, ``auto`` among them, in their order; :class:`UserError` if a run cannot serve one.

    ``auto`` is ``full``; ``1k`` if there are 1,000 images and each has a caption; and ``cxc`` and ``eccv`` of the test
    set of COCO, if their package is installed.
    """
    n_images, n_asking = len(run.image_ids), len(np.unique(run.image_of_caption()))
    if "1k" in asked and n_images < FOLD:
        raise UserError(f"the protocol 1k needs {FOLD} images, there are {n_images}")
    if "1k" in asked and n_asking < n_images:
        raise UserError(f"the protocol 1k needs images with captions, and {n_images - n_asking} have none")
    if "sentence" in asked and run.captions is None:
        raise UserError("the protocol sentence needs caption embeddings, and the file has none")
    if "auto" in asked:
        asked = [*asked, "full", *(["1k"] if n_images >= FOLD and n_asking == n_images else [])]
        if is_coco_test(_coco_ids(run), run.caption_ids):
            asked += COCO_PROTOCOLS
    return [name for name in PROTOCOLS if name in asked]


def queries_of(run: Embeddings, protocol: str, cross_check: bool = True) -> list[Fold]:
    """What became of the queries of a protocol, fold by fold; all but ``1k`` have one. ``cross_check`` asks FAISS, too."""
    image_of_caption = run.image_of_caption()
    if protocol == "sentence":
        return [_sentences(run, image_of_caption, cross_check)]
    if protocol in COCO_PROTOCOLS:
        return [coco_fold(protocol, _coco_ids(run), run.caption_ids, _score_blocks(run))]
    if protocol == "full":
        return [_fold(run, image_of_caption, slice(0, len(run.image_ids)), slice(0, len(image_of_caption)), cross_check)]
    folds = []
    for start in range(0, len(run.image_ids) // FOLD * FOLD, FOLD):
        captions = np.flatnonzero((image_of_caption >= start) & (image_of_caption < start + FOLD))
        folds.append(_fold(run, image_of_caption, slice(start, start + FOLD), captions, cross_check=False))
    return folds


def _coco_ids(run: Embeddings) -> NDArray[np.int64]:
    return run.image_ids if run.coco_ids is None else run.coco_ids


def _score_blocks(run: Embeddings) -> ScoreBlocks:
    """The scores of a run some image rows at a time."""
    image_of_caption = torch.from_numpy(run.image_of_caption())
    if run.scores is not None:
        return blocks_from_scores(torch.from_numpy(run.scores), image_of_caption)
    assert run.images is not None
    assert run.captions is not None
    images, captions = torch.from_numpy(run.images), torch.from_numpy(run.captions)
    return blocks_from_embeddings(images, captions, image_of_caption, run.similarity)


def _sentences(run: Embeddings, image_of_caption: NDArray[np.int64], cross_check: bool) -> Fold:
    assert run.captions is not None
    found = sentence_ranks(torch.from_numpy(run.captions), torch.from_numpy(image_of_caption))
    if cross_check:
        recalls = check_sentences_against_search(run.captions, image_of_caption, found, RECALLS)
        log.info("FAISS agrees with the exact ranks (R@1 %.1f s2s)", recalls["r1"])
    return {"s2s": Queries.ranked(found.ranks, image_of_caption[found.queries])}


def _fold(
    run: Embeddings, image_of_caption: NDArray[np.int64], images: slice, captions: slice | NDArray[np.int64], cross_check: bool
) -> Fold:
    """The queries among some rows of a run, which are consecutive images and all their captions."""
    ranks = _ranks(run, images, captions, image_of_caption[captions] - images.start, cross_check)
    return fold_of(ranks, image_of_caption[captions])


def _ranks(
    run: Embeddings, images: slice, captions: slice | NDArray[np.int64], image_of_caption: NDArray[np.int64], cross_check: bool
) -> Ranks:
    if run.scores is not None:
        return ranks_from_scores(torch.from_numpy(run.scores[images][:, captions]), torch.from_numpy(image_of_caption))
    assert run.images is not None
    assert run.captions is not None
    left, right = run.images[images], run.captions[captions]
    ranks = ranks_from_embeddings(
        torch.from_numpy(left), torch.from_numpy(right), torch.from_numpy(image_of_caption), run.similarity
    )
    if cross_check and run.similarity == "cosine":
        found = check_against_search(left, right, image_of_caption, ranks, RECALLS)
        log.info("FAISS agrees with the exact ranks (R@1 %.1f i2t, %.1f t2i)", found["i2t"]["r1"], found["t2i"]["r1"])
    elif cross_check:
        found = check_against_candidates(left, right, image_of_caption, ranks, RECALLS, run.similarity)
        exact: dict[str, Any] = metrics(ranks)
        compared = ", ".join(
            f"{direction} {found[direction]['r1']:.1f}, exact {exact[direction]['r1']:.1f}" for direction in ("i2t", "t2i")
        )
        log.info("candidates of FAISS, re-ranked, do not contradict the exact ranks (R@1 %s)", compared)
    return ranks
