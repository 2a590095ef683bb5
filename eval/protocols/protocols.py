"""The protocols for embeddings and scores of pairs: the queries of each protocol, and the ranks of their right answers.

``full`` searches the complete split, and ``1k`` searches each fold of 1,000 images. In ``sentence`` and ``sentence-1k``
captions query captions. Other modules describe ``cxc`` and ``eccv`` (:mod:`vse.eval.protocols.coco`), ``choices``
(:mod:`vse.eval.protocols.choices`), and protocols such as ``judged-expert`` and ``en:de`` (:mod:`vse.eval.protocols.judged`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval import DEFAULT_KS
from vse.eval.files.embeddings import Embeddings, check_same_split, experiment_name, parse_provenance, read_embeddings
from vse.eval.files.judgements import Judgements
from vse.eval.files.phrase_scores import PhraseScores
from vse.eval.files.split import MATRIX_NAMES, ROW_FIELDS, select_language
from vse.eval.options import COCO_PROTOCOLS, FOLDED_PROTOCOLS, N_CROSS_CHECK_QUERIES, N_IMAGES_PER_FOLD, PROTOCOLS
from vse.eval.protocols.choices import ChoiceSet, rank_choices
from vse.eval.protocols.coco import SimilarPairs, are_coco_protocols_available, rank_coco_queries, rank_intramodal_queries
from vse.eval.protocols.judged import parse_language_pairs, rank_judged_queries, rank_language_pair
from vse.eval.ranking.answers import find_best_answers, find_sentence_answers
from vse.eval.ranking.metrics import DIRECTIONS, MeasuredQueries, QueriesByDirection, build_fold
from vse.eval.ranking.ranks import ranks_from_blocks, shared_tensor
from vse.eval.search.cross_check import (
    Agreement,
    check_against_candidates,
    check_against_search,
    check_sentences_against_search,
    log_agreement,
)
from vse.pipeline.dataset.dataset import parse_fold
from vse.pipeline.dataset.identity import check_all_same_data
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.hdf5 import check_same_attributes

_EmbeddingsOrScores = TypeVar("_EmbeddingsOrScores", Embeddings, PhraseScores)
_JUDGED_REASON = "its right answers are judged, not only the captions of the image"  # a reason not to compare ranks with FAISS
_CHOICES_REASON = "each image has its own captions to choose from"
_LANGUAGES_REASON = "FAISS does not search captions by captions of another language"
_SHARED_ATTRIBUTES = ("experiment", "similarity")  # attributes that all seeds of a model share


class RankingOptions(NamedTuple):
    """Options for the ranking of the queries of a protocol.

    Attributes
    ----------
    cross_check : whether to compare the ranks with a FAISS search
    max_compared : number of queries of each direction, in all folds together, that are compared with FAISS; 0 for all queries
    find_answers : whether to find the best answers to each query; this scores all pairs once more
    recall_ks : the values of K in R@K
    similar_pairs : pairs of similar images and of similar captions in Crisscrossed Captions, for the directions ``i2i`` and
        ``t2t`` of ``cxc``
    judgements : the judgements of each protocol of :mod:`vse.eval.protocols.judged`, e.g. ``judged-expert``
    choices : the caption choices of each protocol of :mod:`vse.eval.protocols.choices`
    """

    cross_check: bool = True
    max_compared: int = N_CROSS_CHECK_QUERIES
    find_answers: bool = False
    recall_ks: Sequence[int] = DEFAULT_KS
    similar_pairs: SimilarPairs | None = None
    judgements: Mapping[str, Judgements] = MappingProxyType({})
    choices: Mapping[str, ChoiceSet] = MappingProxyType({})


DEFAULT_RANKING_OPTIONS = RankingOptions()


class ProtocolQueries(NamedTuple):
    """The ranked queries of a protocol, fold by fold, and the comparison of each fold's ranks with a FAISS search.

    ``no_comparison_reason`` is the reason why ranks were not compared; blank if ranks were compared.
    """

    folds: list[QueriesByDirection]
    agreements: list[Agreement]
    no_comparison_reason: str = ""


def read_seed_embeddings(files: Sequence[Path]) -> list[Embeddings]:
    """Read the embeddings of one model, a file per seed. Raises UserError if the files differ in split or experiment."""
    return check_and_unify_embeddings(files, [read_embeddings(path) for path in files])


def check_and_unify_embeddings(files: Sequence[Path], seed_embeddings: Sequence[Embeddings]) -> list[Embeddings]:
    """Check that embeddings belong to seeds of one model on one split; return them, all with the same ``experiment`` name.

    If no file has an experiment name, the name of the first file is used. Raises UserError if the check fails.
    """
    return check_and_unify_seeds(files, seed_embeddings, check_same_split, _SHARED_ATTRIBUTES)


def check_and_unify_seeds(
    files: Sequence[Path],
    seed_data: Sequence[_EmbeddingsOrScores],
    check_same: Callable[[Path, _EmbeddingsOrScores, Path, _EmbeddingsOrScores, Sequence[str]], None],
    attributes: Sequence[str],
) -> list[_EmbeddingsOrScores]:
    """Check that embeddings or phrase scores belong to seeds of one model; return them, all with one ``experiment`` name.

    ``check_same`` raises UserError if two seeds have different queries, or different values of one of ``attributes``.
    UserError is also raised if the seeds have different training data, or if a file or a seed is given twice.
    """
    first_path, first = next(
        ((path, data) for path, data in zip(files, seed_data, strict=True) if data.experiment), (files[0], seed_data[0])
    )
    experiment = experiment_name(first_path, first)
    first_of_fold: dict[str | None, tuple[Path, _EmbeddingsOrScores]] = {_get_fold(first): (first_path, first)}
    path_of_seed: dict[tuple[str | None, int], Path] = {}
    for path, data in zip(files, seed_data, strict=True):
        fold = _get_fold(data)
        check_same(*first_of_fold.setdefault(fold, (path, data)), path, data, attributes)
        check_same_attributes(first_path, first, path, data, ("dataset", "split", *attributes))
        if data.trained_on != first.trained_on:
            raise UserError(f"{path} and {first_path} belong to models that were trained on different data sets")
        if list(files).count(path) > 1:
            raise UserError(f"{path} is given twice; a seed counts once")
        if data.seed is not None and path_of_seed.setdefault((fold, data.seed), path) != path:
            raise UserError(f"{path} and {path_of_seed[fold, data.seed]} have the same seed {data.seed}")
    _check_folds(files, seed_data)
    check_all_same_data([(path, data.identity) for path, data in zip(files, seed_data, strict=True)])
    return [replace(data, experiment=experiment) for data in seed_data]


def _get_fold(data: Embeddings | PhraseScores) -> str | None:
    return data.fold if isinstance(data, Embeddings) else None


def _check_folds(files: Sequence[Path], seed_data: Sequence[Embeddings] | Sequence[PhraseScores]) -> None:
    """Raise UserError if files belong to several folds that do not form one complete cross-validation.

    Each fold must have the same number of files.
    """
    counts = Counter(map(_get_fold, seed_data))
    if len(counts) == 1:
        return
    path, fold = files[0], parse_fold(_get_fold(seed_data[0]) or "")
    names = [f"{number} of {fold.n_folds}" for number in range(fold.n_folds)] if fold else []
    if set(counts) - set(names):
        raise UserError(
            f"{path}: the other files are of folds of another cross-validation, or of no fold; evaluate them apart"
        )
    if len({counts[name] for name in names}) > 1:
        there = ", ".join(f"{counts[name]} of fold {name}" for name in names)
        raise UserError(f"{path}: a cross-validation needs equally many files of each fold, and these are {there}")


def group_folds(seed_embeddings: Sequence[Embeddings]) -> list[list[Embeddings]]:
    """Group embeddings into complete test sets, one list for each seed.

    For a cross-validation, the list of a seed has the embeddings of every test fold. Otherwise it has a single element.
    """
    by_fold: dict[str | None, list[Embeddings]] = {}
    for embeddings in seed_embeddings:
        by_fold.setdefault(embeddings.fold, []).append(embeddings)
    numbers = {fold: parsed.number for fold in by_fold if fold is not None and (parsed := parse_fold(fold))}
    ordered = sorted(by_fold, key=lambda fold: numbers.get(fold or "", 0))
    return [list(parts) for parts in zip(*(by_fold[fold] for fold in ordered), strict=True)]


def join_fold_ids(parts: Sequence[Embeddings]) -> Embeddings:
    """Return embeddings with the ids and hashes of a complete test set.

    ``parts`` has the embeddings of one seed for every fold of a cross-validation. A single part is returned unchanged. For
    several folds, the object has the joined ids and hashes, but neither vectors nor scores. Its split is called e.g. ``test of
    5 folds``, so that nobody takes its metrics for the metrics of the split ``test``.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    rows: dict[str, Any] = dict.fromkeys(MATRIX_NAMES)
    for name in ROW_FIELDS:
        values = [getattr(part, name) for part in parts]
        rows[name] = None if any(value is None for value in values) else np.concatenate(values)
    return replace(first, split=f"{first.split} of {len(parts)} folds", fold=None, **rows)


def select_languages_of_seeds(
    files: Sequence[Path], seed_embeddings: Sequence[Embeddings], language: str | None
) -> list[Embeddings]:
    """Return the embeddings of each seed with only the captions in ``language``; unchanged if ``language`` is None."""
    if language is None:
        return list(seed_embeddings)
    return [select_language(path, one, language) for path, one in zip(files, seed_embeddings, strict=True)]


def select_protocols(
    files: Sequence[Path],
    seed_embeddings: Sequence[Embeddings],
    protocol: str | Sequence[str],
    language_pairs: Sequence[str] = (),
) -> list[str]:
    """Return the names of the protocols to evaluate. Raises UserError if a named protocol does not apply to a file.

    ``protocol`` may be ``auto``: the protocols that apply to all seeds or, if there are ``language_pairs`` such as ``en:de``,
    only these pairs.
    """
    if language_pairs:
        pairs = parse_language_pairs(language_pairs)
        others = [name for name in list_protocol_names(protocol) if name != "auto"]
        return [*(select_protocols(files, seed_embeddings, others) if others else []), *pairs]
    names, selected = list_protocol_names(protocol), []
    for path, embeddings in zip(files, seed_embeddings, strict=False):
        try:
            selected.append(resolve_protocols(embeddings, names))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return [name for name in selected[0] if all(name in others for others in selected)]


def rank_queries_of_seeds(
    files: Sequence[Path],
    seed_embeddings: Sequence[Embeddings],
    protocol: str,
    options: RankingOptions = DEFAULT_RANKING_OPTIONS,
) -> list[ProtocolQueries]:
    """Return the ranked queries of a protocol for each seed; for a cross-validation, each item has the queries of all folds.

    Each query searches the images or captions of its own fold. Raises UserError, with the name of the file, if a file cannot
    be ranked.
    """
    queries: dict[int, ProtocolQueries] = {}
    for path, embeddings in zip(files, seed_embeddings, strict=False):
        try:
            queries[id(embeddings)] = rank_queries(embeddings, protocol, options)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return [_join_queries(parts, [queries[id(part)] for part in parts]) for parts in group_folds(seed_embeddings)]


def _join_queries(parts: Sequence[Embeddings], queries: Sequence[ProtocolQueries]) -> ProtocolQueries:
    """Join the queries of the test folds of a cross-validation; ``parts`` has the embeddings of each of these folds.

    The images of all folds are numbered consecutively, in the order of ``parts``.
    """
    folds: list[QueriesByDirection] = []
    n_images = 0
    for part, of_part in zip(parts, queries, strict=True):
        for fold in of_part.folds:
            folds.append({name: replace(one, image_rows=one.image_rows + n_images) for name, one in fold.items()})
        n_images += len(part.image_ids)
    agreements = [agreement for of_part in queries for agreement in of_part.agreements]
    return ProtocolQueries(folds, agreements, queries[0].no_comparison_reason)


def list_protocol_names(protocol: str | Sequence[str]) -> list[str]:
    """Return one or several names of protocols as a list. Raises UserError for an unknown name or an empty list."""
    names = [protocol] if isinstance(protocol, str) else list(protocol)
    for name in names or [""]:
        if name not in ("auto", *PROTOCOLS):
            raise UserError(f"unknown protocol {name!r}{did_you_mean(name, ('auto', *PROTOCOLS))}")
    return names


def resolve_protocols(embeddings: Embeddings, names: Sequence[str]) -> list[str]:
    """Return the named protocols in a fixed order, and replace ``auto`` by the protocols that it stands for.

    ``auto`` stands for several protocols: ``full``; ``1k``, if there are at least 1,000 images and each has a caption; and
    ``cxc`` and ``eccv``, if the test set of COCO is included and the package eccv-caption is installed. Raises UserError if a
    protocol does not apply.
    """
    n_images, n_captioned = len(embeddings.image_ids), len(np.unique(embeddings.image_of_caption()))
    for name in FOLDED_PROTOCOLS:
        if name in names and n_images < N_IMAGES_PER_FOLD:
            raise UserError(f"the protocol {name} needs {N_IMAGES_PER_FOLD} images, there are {n_images}")
    if "1k" in names and n_captioned < n_images:
        raise UserError(f"the protocol 1k needs images with captions, and {n_images - n_captioned} have none")
    for name in ("sentence", "sentence-1k"):
        if name in names and embeddings.captions is None:
            raise UserError(f"the protocol {name} needs caption embeddings, and the file has none")
    if "auto" in names:
        names = [*names, "full", *(["1k"] if n_images >= N_IMAGES_PER_FOLD and n_captioned == n_images else [])]
        if are_coco_protocols_available(_get_coco_ids(embeddings), embeddings.caption_ids):
            names += COCO_PROTOCOLS
    return [name for name in PROTOCOLS if name in names]


def rank_queries(embeddings: Embeddings, protocol: str, options: RankingOptions = DEFAULT_RANKING_OPTIONS) -> ProtocolQueries:
    """Return the ranked queries of a protocol. ``1k`` and ``sentence-1k`` have a fold per 1,000 images, others a single fold.

    With ``options.cross_check``, ranks are compared with a FAISS search. This is not possible for files with scores of pairs,
    nor for protocols with judged answers, choices or pairs of languages.
    """
    if protocol in options.judgements:
        fold = rank_judged_queries(embeddings, options.judgements[protocol])
        return ProtocolQueries([_replace_rows_by_ids(embeddings, fold)], [], _JUDGED_REASON)
    if protocol in options.choices:
        fold = rank_choices(embeddings, options.choices[protocol])
        return ProtocolQueries([_replace_rows_by_ids(embeddings, fold)], [], _CHOICES_REASON)
    if ":" in protocol:
        fold = rank_language_pair(embeddings, protocol, options.recall_ks)
        return ProtocolQueries([_replace_rows_by_ids(embeddings, fold)], [], _LANGUAGES_REASON)
    if protocol in COCO_PROTOCOLS:
        fold = rank_coco_queries(
            protocol, _get_coco_ids(embeddings), embeddings.caption_ids, *embeddings.score_blocks(), ks=options.recall_ks
        )
        if protocol == "cxc" and options.similar_pairs is not None:
            fold = {
                **fold,
                **rank_intramodal_queries(embeddings, _get_coco_ids(embeddings), options.similar_pairs, options.recall_ks),
            }
        return ProtocolQueries([_replace_rows_by_ids(embeddings, fold)], [], _JUDGED_REASON)
    rank_fold = _rank_sentences if protocol.startswith("sentence") else partial(_rank_pairs, find_answers=options.find_answers)
    n_folds = len(embeddings.image_ids) // N_IMAGES_PER_FOLD if protocol in FOLDED_PROTOCOLS else 1
    max_compared = -(-options.max_compared // n_folds) if options.cross_check else None
    parts = _split_into_folds(embeddings) if protocol in FOLDED_PROTOCOLS else [embeddings]
    ranked = [rank_fold(part, max_compared, options.recall_ks) for part in parts]
    folds, agreements = [fold for fold, _ in ranked], [agreement for _, agreement in ranked if agreement is not None]
    if agreements:
        log_agreement(protocol, agreements)
        return ProtocolQueries(folds, agreements)
    reason = "FAISS does not search scores of pairs" if options.cross_check else "--no-cross-check"
    return ProtocolQueries(folds, [], reason)


def _get_coco_ids(embeddings: Embeddings) -> NDArray[np.int64]:
    return embeddings.image_ids if embeddings.coco_ids is None else embeddings.coco_ids


def _split_into_folds(embeddings: Embeddings) -> Iterator[Embeddings]:
    """Yield folds of 1,000 consecutive images with their captions; fewer than 1,000 images at the end are left out."""
    image_of_caption = embeddings.image_of_caption()
    for start in range(0, len(embeddings.image_ids) // N_IMAGES_PER_FOLD * N_IMAGES_PER_FOLD, N_IMAGES_PER_FOLD):
        captions = np.flatnonzero((image_of_caption >= start) & (image_of_caption < start + N_IMAGES_PER_FOLD))
        yield embeddings.select(np.arange(start, start + N_IMAGES_PER_FOLD), captions)


def _rank_sentences(
    embeddings: Embeddings, max_compared: int | None, ks: Sequence[int]
) -> tuple[QueriesByDirection, Agreement | None]:
    assert embeddings.captions is not None
    image_of_caption = embeddings.image_of_caption()
    exact = find_sentence_answers(shared_tensor(embeddings.captions), torch.from_numpy(image_of_caption))
    fold = {"s2s": replace(MeasuredQueries.from_ranks(exact.ranks, image_of_caption[exact.queries], ks), answers=exact)}
    if max_compared is None:
        return _replace_rows_by_ids(embeddings, fold), None
    agreement = check_sentences_against_search(embeddings.captions, image_of_caption, exact, DEFAULT_KS, max_compared)
    return _replace_rows_by_ids(embeddings, fold), agreement


def _rank_pairs(
    embeddings: Embeddings, max_compared: int | None, ks: Sequence[int], find_answers: bool
) -> tuple[QueriesByDirection, Agreement | None]:
    image_of_caption = embeddings.image_of_caption()
    # A shortlist has only the scores that determine the rank of each image's best caption. Other captions have no rank.
    is_complete = "shortlist" not in parse_provenance(embeddings)
    ranks = ranks_from_blocks(*embeddings.score_blocks(), with_caption_ranks=is_complete)
    fold, vectors = build_fold(ranks, image_of_caption, ks), embeddings.vectors
    if find_answers:
        best = find_best_answers(*embeddings.score_blocks(), ranks)
        fold = _replace_rows_by_ids(
            embeddings, {direction: replace(queries, answers=best[direction]) for direction, queries in fold.items()}
        )
    if max_compared is None or vectors is None:
        return fold, None
    if embeddings.similarity == "cosine":
        return fold, check_against_search(*vectors, image_of_caption, ranks, DEFAULT_KS, max_compared)
    return fold, check_against_candidates(*vectors, image_of_caption, ranks, DEFAULT_KS, embeddings.similarity, max_compared)


def _replace_rows_by_ids(embeddings: Embeddings, fold: QueriesByDirection) -> QueriesByDirection:
    ids = {"image": embeddings.image_ids, "caption": embeddings.caption_ids}
    replaced = {}
    for name, queries in fold.items():
        query_ids, candidate_ids = ids[DIRECTIONS[name].query_kind], ids[DIRECTIONS[name].candidate_kind]
        replaced[name] = replace(queries, answers=queries.answers and queries.answers.with_ids(query_ids, candidate_ids))
    return replaced
