"""The protocols: which queries search which candidates, and what became of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.defaults import COCO_PROTOCOLS, PROTOCOLS
from vse.eval.files.embeddings import Embeddings
from vse.eval.protocols.coco import coco_fold, is_coco_test
from vse.eval.ranking.metrics import FOLD, RECALLS, Fold, Queries, fold_of, metrics
from vse.eval.ranking.ranks import Ranks, ranks_from_blocks
from vse.eval.ranking.sentences import sentence_ranks
from vse.eval.search.cross_check import check_against_candidates, check_against_search, check_sentences_against_search
from vse.pipeline.errors import UserError, did_you_mean

log = logging.getLogger(__name__)


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
    """What became of the queries of a protocol, fold by fold; all but ``1k`` have one.

    With ``cross_check`` FAISS searches the embeddings, too; scores of pairs it cannot search.
    """
    if protocol == "sentence":
        return [_sentences(run, cross_check)]
    if protocol in COCO_PROTOCOLS:
        return [coco_fold(protocol, _coco_ids(run), run.caption_ids, *run.score_blocks())]
    if protocol == "full":
        return [_fold(run, cross_check)]
    image_of_caption, folds = run.image_of_caption(), []
    for start in range(0, len(run.image_ids) // FOLD * FOLD, FOLD):
        captions = np.flatnonzero((image_of_caption >= start) & (image_of_caption < start + FOLD))
        folds.append(_fold(run.select(np.arange(start, start + FOLD), captions), cross_check=False))
    return folds


def _coco_ids(run: Embeddings) -> NDArray[np.int64]:
    return run.image_ids if run.coco_ids is None else run.coco_ids


def _sentences(run: Embeddings, cross_check: bool) -> Fold:
    assert run.captions is not None
    image_of_caption = run.image_of_caption()
    exact = sentence_ranks(torch.from_numpy(run.captions), torch.from_numpy(image_of_caption))
    if cross_check:
        recalls = check_sentences_against_search(run.captions, image_of_caption, exact, RECALLS)
        log.info("FAISS agrees with the exact ranks (R@1 %.1f s2s)", recalls["r1"])
    return {"s2s": Queries.ranked(exact.ranks, image_of_caption[exact.queries])}


def _fold(run: Embeddings, cross_check: bool) -> Fold:
    """The queries of all images and captions of a run, or of some consecutive images of it and all their captions."""
    image_of_caption = run.image_of_caption()
    ranks = ranks_from_blocks(*run.score_blocks())
    if cross_check and run.vectors is not None:
        _cross_check(run.vectors, image_of_caption, ranks, run.similarity)
    return fold_of(ranks, image_of_caption)


def _cross_check(
    vectors: tuple[NDArray[np.float32], NDArray[np.float32]],
    image_of_caption: NDArray[np.int64],
    ranks: Ranks,
    similarity: str,
) -> None:
    """Compare the exact ranks with a search by FAISS, and log that they agree."""
    images, captions = vectors
    if similarity == "cosine":
        recalls = check_against_search(images, captions, image_of_caption, ranks, RECALLS)
        log.info("FAISS agrees with the exact ranks (R@1 %.1f i2t, %.1f t2i)", recalls["i2t"]["r1"], recalls["t2i"]["r1"])
        return
    recalls = check_against_candidates(images, captions, image_of_caption, ranks, RECALLS, similarity)
    exact: dict[str, Any] = metrics(ranks)
    compared = ", ".join(
        f"{direction} {recalls[direction]['r1']:.1f}, exact {exact[direction]['r1']:.1f}" for direction in ("i2t", "t2i")
    )
    log.info("candidates of FAISS, re-ranked, do not contradict the exact ranks (R@1 %s)", compared)
