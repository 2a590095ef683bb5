"""The evaluation of a model: :func:`evaluate_files` turns files of embeddings, scores or phrase scores into a result file.

A call of ``vse-eval FILE.h5`` passes through these files:

1. ``eval/cli.py`` reads the options (``eval/options.py``) and calls :func:`evaluate_files` here.
2. ``eval/protocols/protocols.py`` reads the files, one per seed. It selects the protocols, and ranks the queries of each.
3. ``eval/files/embeddings.py`` reads and checks a file, and returns it as the class in ``eval/files/split.py``.
4. ``eval/ranking/ranks.py`` computes scores, and the rank of the right answer to each query.
5. ``eval/ranking/metrics.py`` turns ranks into recalls and the other metrics.
6. ``eval/search/cross_check.py`` compares the ranks with a FAISS search.
7. ``eval/ranking/statistics.py`` computes the 95% intervals of the metrics.
8. ``eval/protocols/result_content.py`` combines the seeds, builds the result and formats the printed lines.

With ``--out``, :func:`evaluate_files` writes the result. ``eval/ranking/hubness.py`` adds statistics of hubs
if the protocol ``full`` is evaluated. Further modules are for ensembles (``ensemble.py``), the COCO protocols (``coco.py``),
judgements (``judged.py``) and phrase scores (``phrase_evaluation.py``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vse.eval.files.embeddings import Embeddings, experiment_name, require_complete_scores
from vse.eval.files.judgements import Judgements, read_judgement_files
from vse.eval.files.query_files import (
    FoldAnswers,
    check_query_table_path,
    check_trec_folder,
    write_query_table,
    write_trec_files,
)
from vse.eval.files.results import RESULT_KIND, UNSAVED_RESULT_PATH
from vse.eval.files.split import split_identity
from vse.eval.options import DEFAULT_IOU_THRESHOLD, FOLDED_PROTOCOLS, JUDGED_PREFIX, TREC_DEPTH, AllEvaluateOptions
from vse.eval.protocols.choices import ChoiceSet, read_choice_sets
from vse.eval.protocols.coco import SimilarPairs, read_similar_pairs
from vse.eval.protocols.compression import measure_compression
from vse.eval.protocols.correction import correct_seed_scores
from vse.eval.protocols.ensemble import (
    MemberFile,
    PhraseWeight,
    build_ensemble,
    choose_phrase_weight,
    find_phrase_member,
    load_ensemble_outline,
    read_members_per_seed,
    save_ensemble,
)
from vse.eval.protocols.judged import correlate_with_ratings
from vse.eval.protocols.phrase_evaluation import are_phrase_score_files, evaluate_phrases
from vse.eval.protocols.protocols import (
    ProtocolQueries,
    RankingOptions,
    check_and_unify_embeddings,
    group_folds,
    join_fold_ids,
    list_protocol_names,
    rank_queries_of_seeds,
    read_seed_embeddings,
    select_languages_of_seeds,
    select_protocols,
)
from vse.eval.protocols.result_content import build_result, list_unfinished_runs, mean_and_std_over_seeds
from vse.eval.ranking.hubness import diagnose_hubs, mean_cosine, measure_hubs
from vse.eval.ranking.metrics import QueriesByDirection, average_metrics, compute_fold_metrics
from vse.eval.ranking.statistics import chance_recall, compute_intervals
from vse.eval.search.approximate import measure_index_recalls, measure_reranked_search
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import write_json

log = logging.getLogger(__name__)
_MIN_DIAGNOSED_IMAGES = 100  # with fewer images, one candidate may often be first by chance


def evaluate_files(
    files: Sequence[Path],
    out: Path | None,
    protocol: str | Sequence[str] = "auto",
    options: AllEvaluateOptions = AllEvaluateOptions(),
) -> dict[str, Any]:
    """Evaluate one model, which has a file per seed, or an ensemble; return the content of the result file.

    With several seeds each metric is a dict with the mean and the sample standard deviation, ``{"mean": ..., "std": ...}``.
    The 95% intervals are in ``ci95``. Raises UserError if an option does not apply to the files, e.g. ``iou`` to embeddings.

    Parameters
    ----------
    out : the result file; if None, no file is written, and paths in the result are relative to the working directory
    protocol : names of protocols; ``auto`` selects ``full`` and, if they apply to the files, ``1k``, ``cxc`` and ``eccv``
    """
    started = time.perf_counter()
    options.check_combinations()
    if out is not None:
        check_output(out, RESULT_KIND, files)
    place = UNSAVED_RESULT_PATH if out is None else out
    phrases = are_phrase_score_files(files, protocol, options.iou)
    if phrases and options.first_embeddings_option:
        raise UserError(f"{files[0]}: {options.first_embeddings_option} does not apply to phrase scores; leave it out")
    if phrases:
        iou = DEFAULT_IOU_THRESHOLD if options.iou is None else options.iou
        content = evaluate_phrases(files, place, iou, options.n_bootstrap_samples, options.allow_unfinished)
    else:
        _check_query_outputs(options, [*files, place])
        content = _evaluate_model(_read_model(files, place, protocol, options), place, protocol, options, started)
    if out is not None:
        write_json(out, content)
    return content


def evaluate_arrays(
    name: str,
    embeddings: Embeddings,
    protocol: str | Sequence[str] = "auto",
    options: AllEvaluateOptions = AllEvaluateOptions(),
) -> dict[str, Any]:
    """Evaluate embeddings in memory, and return the content of a result file. Error messages use ``name`` as the file name."""
    started = time.perf_counter()
    if options.ensemble:
        raise UserError(f"{name}: an ensemble needs several files of embeddings; leave --ensemble out")
    _check_query_outputs(options, [UNSAVED_RESULT_PATH])
    path = Path(name)
    model = _EvaluatedModel([path], check_and_unify_embeddings([path], [embeddings]), [[(path, embeddings)]])
    return _evaluate_model(model, UNSAVED_RESULT_PATH, protocol, options, started)


def _check_query_outputs(options: AllEvaluateOptions, other_files: Sequence[Path]) -> None:
    """Raise UserError if ``--per-query`` or ``--trec`` would replace one of ``other_files``, or a file of another format."""
    if options.per_query is not None:
        check_query_table_path(options.per_query, other_files)
    if options.trec is not None:
        check_trec_folder(options.trec, other_files)


class _EvaluatedModel(NamedTuple):
    """A model to evaluate: the embeddings of each seed, and a file name of each seed for error messages.

    ``seed_members`` has the input files of each seed: all members of an ensemble, or the single file of the seed.
    """

    seed_files: Sequence[Path]
    seed_embeddings: Sequence[Embeddings]
    seed_members: Sequence[list[MemberFile]]
    phrase_weight: PhraseWeight | None = None

    @property
    def input_members(self) -> list[MemberFile]:
        return [member for members in self.seed_members for member in members]


def _read_model(
    files: Sequence[Path], out: Path, protocol: str | Sequence[str], options: AllEvaluateOptions
) -> _EvaluatedModel:
    """Read the seeds of one model. With ``options.ensemble``, read the members, and build the ensemble of each seed.

    The ensembles are also written to ``options.save``, if it is not None.
    """
    if not options.ensemble:
        seed_embeddings = read_seed_embeddings(files)
        return _EvaluatedModel(files, seed_embeddings, [[member] for member in zip(files, seed_embeddings, strict=True)])
    compares_captions = any(name.startswith("sentence") for name in list_protocol_names(protocol))
    outline = None if options.experiment is None else load_ensemble_outline(options.experiment)
    members = read_members_per_seed(files, outline)
    first_files = [path for (path, _), *_ in members]
    weight = choose_phrase_weight(members, options.alpha)
    ensembles = [build_ensemble(of_seed, compares_captions, outline, weight.alpha if weight else None) for of_seed in members]
    seed_embeddings = check_and_unify_embeddings(first_files, ensembles)
    if options.save is not None:
        save_ensemble(options.save, seed_embeddings, [out, *files])
    return _EvaluatedModel(first_files, seed_embeddings, members, weight)


def _evaluate_model(
    model: _EvaluatedModel, out: Path, protocol: str | Sequence[str], options: AllEvaluateOptions, started: float
) -> dict[str, Any]:
    """Evaluate a model under each protocol, and return the content of the result file ``out``.

    The answers to each query are written if ``options`` name a file for them. ``started`` is the time at which the evaluation
    started, by ``time.perf_counter``.
    """
    inputs = [run for _, run in model.input_members]
    seeds = select_languages_of_seeds(model.seed_files, model.seed_embeddings, options.language)
    model = model._replace(seed_embeddings=seeds)
    option = options.model_copy(update={"k": ()}).first_embeddings_option
    if option is not None:
        for path, run in model.input_members:
            require_complete_scores(path, run, option)
    languages = seeds[0].languages
    if languages is not None and "," in languages and not options.pairs:
        log.warning("captions in %s are evaluated together; --language evaluates one language", languages.replace(",", ", "))
    correction: dict[str, Any] | None = None
    if options.correct is not None:
        bank = options.bank or "train"
        seeds, correction = correct_seed_scores(model.seed_files, model.seed_embeddings, options.correct, bank, out)
        model = model._replace(seed_embeddings=seeds)
    whole = join_fold_ids(group_folds(model.seed_embeddings)[0])
    unfinished = list_unfinished_runs(inputs, out, options.allow_unfinished)
    if correction is None:
        for path, run in zip(model.seed_files, model.seed_embeddings, strict=True):
            _warn_of_unnormalised_captions(path, run)
    if options.choices is not None and list_protocol_names(protocol) != ["auto"]:
        raise UserError("--choices evaluates only the choices: leave --protocol out")
    choices = read_choice_sets(options.choices, whole, out)
    names = list(choices) or select_protocols(model.seed_files, model.seed_embeddings, protocol, options.pairs)
    searches = _measure_approximate_searches(model.seed_files[0], model.seed_embeddings[0], options)
    pairs = None if options.cxc is None else read_similar_pairs(options.cxc)
    if pairs is not None and "cxc" not in names:
        raise UserError(f"{options.cxc}: --cxc needs the protocol cxc, and it is not evaluated here (--protocol cxc)")
    judgements = read_judgement_files(options, model.seed_files[0], whole)
    measured, answers = _measure_protocols(model, [*names, *judgements], options, pairs, judgements, choices)
    if "full" in measured["protocols"]:
        measured["hubness"] = _measure_hubs_and_warn(model, inputs, measured["protocols"]["full"])
    content = {
        "split_identity": split_identity(whole).model_dump(),
        "data": whole.identity.checksums.model_dump(),
        "n_images": len(whole.image_ids),
        "n_captions": len(whole.caption_ids),
        "seeds": [run.seed for run in model.seed_embeddings],
        **measured,
        **({"bootstrap": {"over": "images", "samples": options.n_bootstrap_samples}} if options.n_bootstrap_samples else {}),
        **searches,
    }
    if pairs is not None:
        content["cxc"] = pairs.sha256_by_file
    if options.language is not None:
        content["language"] = options.language
    if correction is not None:
        content["correction"] = correction
    if options.compress:
        codecs, samples = options.compress, options.n_bootstrap_samples
        content["compression"] = measure_compression(model.seed_files, model.seed_embeddings, codecs, options.rescore, samples)
    if judgements:
        content["judgements"] = {
            name: {"file": os.path.relpath(one.path, out.parent), **one.facts} for name, one in judgements.items()
        }
    if choices:
        content["choices"] = {name: dict(one.facts) for name, one in choices.items()}
    if options.ensemble:
        content["ensemble"] = [
            {"experiment": experiment_name(path, run), "seed": run.seed} for path, run in model.input_members
        ]
    if model.phrase_weight:
        content["combination"] = model.phrase_weight.build_result_entry(find_phrase_member(model.seed_members[0]))
    if options.per_query is not None:
        write_query_table(options.per_query, answers)
    if options.trec is not None:
        write_trec_files(options.trec, model.seed_embeddings, TREC_DEPTH if options.trec_depth is None else options.trec_depth)
    return build_result(whole, inputs, out, unfinished, content, round(time.perf_counter() - started, 2))


def _measure_protocols(
    model: _EvaluatedModel,
    protocols: Sequence[str],
    options: AllEvaluateOptions,
    pairs: SimilarPairs | None,
    judgements: Mapping[str, Judgements],
    choices: Mapping[str, ChoiceSet],
) -> tuple[dict[str, Any], list[FoldAnswers]]:
    """Return the metrics of each protocol, and the best answers to each query.

    The dict has the metrics under ``protocols``, and the comparison of the ranks with FAISS under ``cross_check``. The list of
    answers is empty unless ``options.per_query`` is set. ``pairs`` are the similar pairs of the protocol ``cxc``, or None.
    ``judgements`` and ``choices`` have the data of ``judged-...`` and ``choices...``, by protocol.
    """
    with_answers = options.per_query is not None
    ranking = RankingOptions(
        options.cross_check, options.cross_checked, with_answers, options.recall_ks, pairs, judgements, choices
    )
    metrics: dict[str, Any] = {}
    checks: dict[str, Any] = {}
    answers: list[FoldAnswers] = []
    test_sets = group_folds(model.seed_embeddings)
    for name in protocols:
        queries = rank_queries_of_seeds(model.seed_files, model.seed_embeddings, name, ranking)
        folds = [of_seed.folds for of_seed in queries]
        checks[name] = _build_cross_check_entry(queries)
        per_seed = [
            _compute_protocol_metrics(join_fold_ids(parts), name, of_seed)
            for parts, of_seed in zip(test_sets, folds, strict=True)
        ]
        metrics[name] = mean_and_std_over_seeds(per_seed)
        if options.n_bootstrap_samples:
            metrics[name]["ci95"] = compute_intervals(folds, options.n_bootstrap_samples)
        if name in judgements:
            _add_correlation(metrics[name], model.seed_embeddings, judgements[name])
        if with_answers:
            answers += [
                FoldAnswers(parts[k * len(parts) // len(of_seed)].seed, name, k, direction, one.answers)
                for parts, of_seed in zip(test_sets, folds, strict=True)
                for k, fold in enumerate(of_seed)
                for direction, one in fold.items()
                if one.answers is not None
            ]
    return {"protocols": metrics, "cross_check": checks}, answers


def _measure_hubs_and_warn(model: _EvaluatedModel, inputs: Sequence[Embeddings], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return statistics of hubs (candidates near many queries), and the mean cosines of two images and of two captions.

    The result has the mean and standard deviation over seeds. A warning is logged if a seed's values suggest that its training
    failed. ``inputs`` are the embeddings before a correction of their scores. ``metrics`` are the metrics of the protocol
    ``full``. Cosines are left out for ensembles.
    """
    recalls = {name: _get_mean(metrics[name]["r10"]) for name in ("i2t", "t2i")}
    of_seeds = []
    for k, (path, run) in enumerate(zip(model.seed_files, model.seed_embeddings, strict=True)):
        hubs = measure_hubs(*run.score_blocks())
        vectors = inputs[k].vectors if len(inputs) == len(model.seed_files) else None
        cosines = {side: mean_cosine(rows) for side, rows in zip(("images", "captions"), vectors or (), strict=False)}
        n_images, n_captions = len(run.image_ids), len(run.caption_ids)
        chance = {name: chance_recall(name, 10, n_images, n_captions) for name in hubs}
        if n_images >= _MIN_DIAGNOSED_IMAGES:
            for sentence in diagnose_hubs(hubs, cosines, recalls, chance):
                log.warning("%s: %s", path, sentence)
        of_seeds.append({**hubs, **({"mean_cosine": cosines} if cosines else {})})
    hubness: dict[str, Any] = mean_and_std_over_seeds(of_seeds)
    return hubness


def _get_mean(metric: float | Mapping[str, float]) -> float:
    return metric["mean"] if isinstance(metric, Mapping) else metric


def _add_correlation(metrics: dict[str, Any], seeds: Sequence[Embeddings], judgements: Judgements) -> None:
    """Add the correlation of scores and people's ratings to ``metrics``, under the key ``pairs``."""
    correlation, intervals = correlate_with_ratings(seeds, judgements)
    if correlation:
        metrics["pairs"] = correlation
        if "ci95" in metrics:
            metrics["ci95"]["pairs"] = intervals


def _build_cross_check_entry(queries: Sequence[ProtocolQueries]) -> dict[str, Any]:
    """Return the value of ``cross_check`` in a result file: how the ranks of a protocol were compared with a FAISS search.

    The numbers of compared queries and of ties are sums over folds and seeds. If no ranks were compared, the reason is given.
    """
    agreements = [agreement for one in queries for agreement in one.agreements]
    if not agreements:
        return {"checked": False, "why": queries[0].no_comparison_reason}
    fields = {"queries": "n_compared", "of": "n_queries", "ties": "n_ties"}
    counts = {
        key: {direction: sum(getattr(one, name)[direction] for one in agreements) for direction in agreements[0].recalls}
        for key, name in fields.items()
    }
    return {"checked": True, "against": agreements[0].search_description, **counts}


def _warn_of_unnormalised_captions(path: Path, run: Embeddings) -> None:
    if run.similarity != "cosine" or run.vectors is None:
        return
    _, captions = run.vectors
    squares = np.einsum("nd,nd->n", captions, captions)
    low, high = float(squares.min()) ** 0.5, float(squares.max()) ** 0.5
    if low < 0.99 or high > 1.01:
        log.warning("%s: captions have lengths from %.3g to %.3g, not 1; they are ranked by inner products", path, low, high)


def _measure_approximate_searches(path: Path, run: Embeddings, options: AllEvaluateOptions) -> dict[str, Any]:
    """Measure the approximate index (``--index``) and the two-stage searches (``--rerank``) that ``options`` request.

    ``run`` has the embeddings of one seed, which were read from ``path``. The keys of the result are ``index`` and ``rerank``.
    """
    measured: dict[str, Any] = {}
    if options.index is not None:
        if run.vectors is None:
            raise UserError(f"{path}: holds scores, but FAISS indexes embeddings; leave --index out")
        image_of_caption, parameters = run.image_of_caption(), options.index_parameters
        measured["index"] = measure_index_recalls(*run.vectors, image_of_caption, run.similarity, options.index, parameters)
    if options.rerank:
        vectors = run.pooled_vectors if run.vectors is None else run.vectors
        if vectors is None:
            lacking = "has no pooled_images and pooled_captions, and a first stage needs them to find candidates"
            raise UserError(f"{path}: {lacking} (vse-embed writes them, docs/formats.md); leave --rerank out")
        if run.vectors is not None and run.similarity == "cosine":
            raise UserError(f"{path}: its scores are inner products, which FAISS finds exactly; leave --rerank out")
        measured["rerank"] = [measure_reranked_search(*run.score_blocks(), *vectors, number) for number in options.rerank]
    return measured


def _compute_protocol_metrics(run: Embeddings, protocol: str, folds: Sequence[QueriesByDirection]) -> dict[str, Any]:
    """Return the metrics of one seed: their means over folds and, if there are several folds, the metrics of each fold."""
    per_fold = [compute_fold_metrics(fold) for fold in folds]
    n_queries = sum(len(fold["s2s"].image_rows) for fold in folds) if protocol.startswith("sentence") else None
    if protocol in FOLDED_PROTOCOLS or len(folds) > 1:
        counted = {} if n_queries is None else {"n_queries": n_queries}
        return {"folds": len(per_fold), **average_metrics(per_fold), **counted, "per_fold": per_fold}
    if n_queries is not None:
        return {**per_fold[0], "n_queries": n_queries}
    n_queries_of = {direction: len(queries.image_rows) for direction, queries in folds[0].items()}
    complete = {"i2t": len(run.image_ids), "t2i": len(run.caption_ids)}
    is_whole = n_queries_of == complete and not protocol.startswith(JUDGED_PREFIX)
    return per_fold[0] if is_whole else {**per_fold[0], "n_queries": n_queries_of}
