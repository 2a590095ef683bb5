"""The protocols: which queries search which candidates, and what became of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.defaults import COCO_PROTOCOLS, CROSS_CHECK_QUERIES, FOLD, FOLDED_PROTOCOLS, PROTOCOLS, RECALLS
from vse.eval.files.embeddings import Embeddings
from vse.eval.protocols.coco import JudgedPairs, coco_fold, intramodal_fold, is_coco_test
from vse.eval.ranking.answers import best_answers
from vse.eval.ranking.metrics import Fold, Queries, build_fold
from vse.eval.ranking.ranks import ranks_from_blocks, shared_tensor
from vse.eval.ranking.sentences import sentence_ranks
from vse.eval.search.cross_check import (
    BY_SEARCH,
    Agreement,
    check_against_candidates,
    check_against_search,
    check_sentences_against_search,
)
from vse.pipeline.errors import UserError, did_you_mean

log = logging.getLogger(__name__)


class AskedOfQueries(NamedTuple):
    """What is wanted of queries besides their ranks.

    answers : their best answers; images and captions are then scored once more
    ks : the K of R@K
    pairs : of the protocol ``cxc`` the directions ``i2i`` and ``t2t``, too, by these judgements
    cross_checked : of how many queries of each direction the ranks are compared with a search by FAISS, drawn at random; of
        folds as many of each; 0 for all
    """

    answers: bool = False
    ks: Sequence[int] = RECALLS
    pairs: JudgedPairs | None = None
    cross_checked: int = CROSS_CHECK_QUERIES


NOTHING_MORE = AskedOfQueries()


class ProtocolQueries(NamedTuple):
    """What became of the queries of a protocol, fold by fold, and how these folds were checked; why not, if they were not."""

    folds: list[Fold]
    agreements: list[Agreement]
    unchecked: str = ""


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
    for name in FOLDED_PROTOCOLS:
        if name in asked and n_images < FOLD:
            raise UserError(f"the protocol {name} needs {FOLD} images, there are {n_images}")
    if "1k" in asked and n_asking < n_images:
        raise UserError(f"the protocol 1k needs images with captions, and {n_images - n_asking} have none")
    for name in ("sentence", "sentence-1k"):
        if name in asked and run.captions is None:
            raise UserError(f"the protocol {name} needs caption embeddings, and the file has none")
    if "auto" in asked:
        asked = [*asked, "full", *(["1k"] if n_images >= FOLD and n_asking == n_images else [])]
        if is_coco_test(_coco_ids(run), run.caption_ids):
            asked += COCO_PROTOCOLS
    return [name for name in PROTOCOLS if name in asked]


def queries_of(
    run: Embeddings, protocol: str, cross_check: bool = True, asked: AskedOfQueries = NOTHING_MORE
) -> ProtocolQueries:
    """What became of the queries of a protocol; all but ``1k`` and ``sentence-1k`` have one fold.

    With ``cross_check`` FAISS searches the embeddings of each fold for some queries, too; scores of pairs it cannot search.
    ``asked`` is what is wanted besides.
    """
    if protocol in COCO_PROTOCOLS:
        fold = coco_fold(protocol, _coco_ids(run), run.caption_ids, *run.score_blocks(), ks=asked.ks)
        if protocol == "cxc" and asked.pairs is not None:
            fold = {**fold, **intramodal_fold(run, _coco_ids(run), asked.pairs, asked.ks)}
        return ProtocolQueries([_named(run, fold)], [], "its right answers are no captions' own images")
    of_fold = _sentences if protocol.startswith("sentence") else partial(_both_directions, answers=asked.answers)
    n_folds = len(run.image_ids) // FOLD if protocol in FOLDED_PROTOCOLS else 1
    checked = -(-asked.cross_checked // n_folds) if cross_check else None
    done = [of_fold(part, checked, asked.ks) for part in (_thousands(run) if protocol in FOLDED_PROTOCOLS else [run])]
    folds, agreements = [fold for fold, _ in done], [agreement for _, agreement in done if agreement is not None]
    if agreements:
        _log_agreement(protocol, agreements)
        return ProtocolQueries(folds, agreements)
    return ProtocolQueries(folds, [], "FAISS does not search scores of pairs" if cross_check else "--no-cross-check")


def _coco_ids(run: Embeddings) -> NDArray[np.int64]:
    return run.image_ids if run.coco_ids is None else run.coco_ids


def _thousands(run: Embeddings) -> Iterator[Embeddings]:
    """Consecutive folds of 1,000 images with their captions; what is left of the last thousand is left out."""
    image_of_caption = run.image_of_caption()
    for start in range(0, len(run.image_ids) // FOLD * FOLD, FOLD):
        captions = np.flatnonzero((image_of_caption >= start) & (image_of_caption < start + FOLD))
        yield run.select(np.arange(start, start + FOLD), captions)


def _sentences(run: Embeddings, checked: int | None, ks: Sequence[int]) -> tuple[Fold, Agreement | None]:
    """The captions of a run, or of a fold of it, that query its other captions; so many are ``checked``, None for none."""
    assert run.captions is not None
    image_of_caption = run.image_of_caption()
    exact = sentence_ranks(shared_tensor(run.captions), torch.from_numpy(image_of_caption))
    fold = {"s2s": replace(Queries.from_ranks(exact.ranks, image_of_caption[exact.queries], ks), answers=exact.answers)}
    if checked is None:
        return _named(run, fold), None
    return _named(run, fold), check_sentences_against_search(run.captions, image_of_caption, exact, RECALLS, checked)


def _both_directions(run: Embeddings, checked: int | None, ks: Sequence[int], answers: bool) -> tuple[Fold, Agreement | None]:
    """The queries of all images and captions of a run, or of a fold of it, of which so many are ``checked``."""
    image_of_caption = run.image_of_caption()
    ranks = ranks_from_blocks(*run.score_blocks(), own_ranks=True)
    fold, vectors = build_fold(ranks, image_of_caption, ks), run.vectors
    if answers:
        best = best_answers(*run.score_blocks(), ranks)
        fold = _named(run, {direction: replace(queries, answers=best[direction]) for direction, queries in fold.items()})
    if checked is None or vectors is None:
        return fold, None
    if run.similarity == "cosine":
        return fold, check_against_search(*vectors, image_of_caption, ranks, RECALLS, checked)
    return fold, check_against_candidates(*vectors, image_of_caption, ranks, RECALLS, run.similarity, checked)


def _named(run: Embeddings, fold: Fold) -> Fold:
    """The fold with the ids of ``run`` in its answers, which had rows of it."""
    ids = {"i": run.image_ids, "t": run.caption_ids, "s": run.caption_ids}
    return {
        direction: replace(
            queries, answers=queries.answers and queries.answers.with_ids(ids[direction[0]], ids[direction[-1]])
        )
        for direction, queries in fold.items()
    }


def _log_agreement(protocol: str, agreements: Sequence[Agreement]) -> None:
    """Say in a line that FAISS agrees with the exact ranks, of how many queries; R@1 are theirs, means over the folds."""
    said = []
    for direction in agreements[0].recalls:
        found, exact = (
            np.mean([of_fold[direction]["r1"] for of_fold in recalls])
            for recalls in ([agreement.recalls for agreement in agreements], [agreement.exact for agreement in agreements])
        )
        n_queries = sum(agreement.queries[direction] for agreement in agreements)
        beside = "" if agreements[0].against == BY_SEARCH else f", exact {exact:.1f}"
        said.append(f"{direction} {found:.1f}{beside} of {n_queries:,} queries")
    what = "agrees with" if agreements[0].against == BY_SEARCH else "finds candidates that, re-ranked, do not contradict"
    log.info("%s: FAISS %s the exact ranks (R@1 %s)", protocol, what, "; ".join(said))
