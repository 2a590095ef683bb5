"""The comparison of two models on the same queries (``vse-eval --compare``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from vse.eval.files.cards import display_name, list_differing_facts
from vse.eval.files.embeddings import (
    Embeddings,
    check_same_split,
    experiment_name,
    parse_provenance,
    read_embeddings,
)
from vse.eval.files.judgements import read_judgement_files
from vse.eval.files.phrase_scores import PhraseScores, check_same_phrases, read_phrase_scores
from vse.eval.files.results import (
    COMPARISON_KIND,
    COMPARISON_VERSION,
    file_reference,
    hash_file_content,
)
from vse.eval.options import DEFAULT_IOU_THRESHOLD, N_COMPARISON_BOOTSTRAP_SAMPLES, PHRASE_PROTOCOL, AllEvaluateOptions
from vse.eval.protocols.choices import read_choice_sets
from vse.eval.protocols.phrase_evaluation import are_phrase_score_files, compute_phrase_differences, read_seed_phrase_scores
from vse.eval.protocols.protocols import (
    RankingOptions,
    group_folds,
    join_fold_ids,
    rank_queries_of_seeds,
    read_seed_embeddings,
    select_languages_of_seeds,
    select_protocols,
)
from vse.eval.protocols.result_content import list_unfinished_runs
from vse.eval.ranking.statistics import (
    compute_differences,
)
from vse.pipeline.command import current_provenance
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import ModelOutputMetadata
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import write_json


def compare_files(
    files: Sequence[Path],
    out: Path | None = None,
    protocol: str | Sequence[str] = "auto",
    options: AllEvaluateOptions = AllEvaluateOptions(),
) -> Path:
    """Compare the files of two models (embeddings, scores or phrase scores), and write and return the comparison file.

    Two files belong to two models. More files are the seeds of two models, which must have equally many seeds. The seeds of
    the two models are paired in their order. The comparison file has the values of each metric, their difference, its 95%
    interval and its p-value. The path of the comparison file is ``out`` or, if ``out`` is None,
    ``results/<dataset>_<a>_vs_<b>.json``, where a and b are the names of the experiments.
    """
    phrases, threshold = (
        are_phrase_score_files(files, protocol, options.iou),
        DEFAULT_IOU_THRESHOLD if options.iou is None else options.iou,
    )
    samples = N_COMPARISON_BOOTSTRAP_SAMPLES if options.bootstrap is None else options.bootstrap
    if not samples:
        raise UserError("a comparison needs samples: leave --bootstrap out, or give a number such as 1,000")
    models = _group_files_by_model(files, read_phrase_scores if phrases else read_embeddings)
    if phrases:
        scores = [read_seed_phrase_scores(paths) for paths in models]
        check_same_phrases(models[0][0], scores[0][0], models[1][0], scores[1][0])
        out = _choose_output_path(files, scores, out)
        not_finished = list_unfinished_runs([run for seeds in scores for run in seeds], out, options.allow_unfinished)
        compared = {PHRASE_PROTOCOL: compute_phrase_differences(models, scores, samples, threshold)}
        return _write_comparison(scores, out, compared, samples, not_finished, {"iou": threshold})
    runs = [select_languages_of_seeds(paths, read_seed_embeddings(paths), options.language) for paths in models]
    (a_parts, *_), (b_parts, *_) = map(group_folds, runs)
    check_same_split(models[0][0], join_fold_ids(a_parts), models[1][0], join_fold_ids(b_parts))
    names, others = (
        select_protocols(paths, seeds, protocol, options.pairs) for paths, seeds in zip(models, runs, strict=True)
    )
    out = _choose_output_path(files, runs, out)
    not_finished = list_unfinished_runs([run for seeds in runs for run in seeds], out, options.allow_unfinished)
    judgements = read_judgement_files(options, models[0][0], join_fold_ids(a_parts))
    choices = read_choice_sets(options.choices, join_fold_ids(a_parts), out)
    ranking = RankingOptions(options.cross_check, options.cross_checked, judgements=judgements, choices=choices)
    compared = {}
    for name in choices or (*names, *judgements):
        if name in others or name in judgements or name in choices:
            first, second = (
                rank_queries_of_seeds(paths, seeds, name, ranking) for paths, seeds in zip(models, runs, strict=True)
            )
            compared[name] = compute_differences([one.folds for one in first], [one.folds for one in second], samples)
    settings = {} if options.language is None else {"language": options.language}
    return _write_comparison(runs, out, compared, samples, not_finished, settings)


def _choose_output_path(files: Sequence[Path], runs: Sequence[Sequence[ModelOutputMetadata]], out: Path | None) -> Path:
    """Return the path of the comparison file: ``out`` or, if ``out`` is None, a path with the names of the two experiments.

    ``files`` are the inputs, and ``runs`` has the content of the files of each model. Raises UserError if the path is one of
    the inputs, or an existing file that is not a comparison.
    """
    if out is None:
        names = [str(seeds[0].experiment) for seeds in runs]
        if names[0] == names[1]:
            numbers = [seeds[0].seed for seeds in runs]
            suffixes = "ab" if None in numbers else numbers
            names = [f"{name}-{suffix}" for name, suffix in zip(names, suffixes, strict=True)]
        name = f"{runs[0][0].dataset}_{'_vs_'.join(names)}"
        out = Path("results") / f"{re.sub(r'[^A-Za-z0-9_+-]+', '-', name)}.json"
    check_output(out, COMPARISON_KIND, files)
    return out


def _write_comparison(
    runs: Sequence[Sequence[Embeddings]] | Sequence[Sequence[PhraseScores]],
    out: Path,
    compared: Mapping[str, Any],
    samples: int,
    unfinished: Sequence[Mapping[str, str]],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    first = runs[0][0]
    if isinstance(first, Embeddings):
        first = join_fold_ids(group_folds([run for run in runs[0] if isinstance(run, Embeddings)])[0])
    comparison = {
        "version": COMPARISON_VERSION,
        "dataset": first.dataset,
        "split": first.split,
        "data": first.identity.checksums.model_dump(),
        "n_images": len(np.unique(first.image_ids)),
        "n_captions": len(np.unique(first.caption_ids)),
        **settings,
        "a": _build_model_entry(runs[0], out),
        "b": _build_model_entry(runs[1], out),
        "samples": samples,
        "comparisons": compared,
        "differing_facts": [fact.model_dump() for fact in list_differing_facts(*(parse_provenance(one[0]) for one in runs))],
        **({"unfinished": unfinished} if unfinished else {}),
        "provenance": {"made": current_provenance()},
    }
    return write_json(out, {**comparison, "sha256": hash_file_content(comparison)})


def _group_files_by_model(files: Sequence[Path], read: Callable[[Path], ModelOutputMetadata]) -> tuple[list[Path], list[Path]]:
    """Divide ``files``, a file per seed, into the files of two models. Each file has the name of its model.

    The function ``read`` reads a file. If there are only two files, they are taken as two models and are not read. Raises
    UserError unless there are two models with equally many seeds.
    """
    if len(files) < 2:
        raise UserError("--compare needs the files of two models")
    if len(files) == 2:
        if files[0].resolve() == files[1].resolve():
            raise UserError(f"{files[0]} is given twice; --compare needs two models")
        return [files[0]], [files[1]]
    by_name: dict[str, list[Path]] = {}
    for path in files:
        run = read(path)
        by_name.setdefault(display_name(experiment_name(path, run), parse_provenance(run)), []).append(path)
    if len(by_name) != 2 or len({len(side) for side in by_name.values()}) != 1:
        found = ", ".join(f"{len(side)} of {name}" for name, side in by_name.items())
        raise UserError(f"--compare needs equally many seeds of two experiments; there are {found}")
    first, second = by_name.values()
    return first, second


def _build_model_entry(runs: Sequence[ModelOutputMetadata], out: Path) -> dict[str, Any]:
    return {
        "experiment": runs[0].experiment,
        "name": display_name(str(runs[0].experiment), parse_provenance(runs[0])),
        **({"trained_on": runs[0].trained_on} if runs[0].trained_on else {}),
        "seeds": [run.seed for run in runs],
        "embeddings": [file_reference(run, out) for run in runs],
    }
