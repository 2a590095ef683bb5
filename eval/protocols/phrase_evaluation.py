"""From files of phrase scores to the result file: the protocol ``phrase``, over one or several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vse.eval.defaults import BOOTSTRAP_SAMPLES, IOU, PHRASE, RECALLS
from vse.eval.files.phrase_scores import PhraseScores, check_same_phrases, is_phrase_scores, read_phrase_scores
from vse.eval.files.results import RESULT, Metric, ProtocolMetrics, Result, mean_and_std
from vse.eval.files.split import image_identity
from vse.eval.protocols.evaluate import as_one_model, evaluated, over_seeds, signed_result, unfinished_runs
from vse.eval.protocols.options import EvaluationOptions, combination_line, index_line, rerank_line, summary_line
from vse.eval.ranking.bootstrap import differences, intervals
from vse.eval.ranking.localisation import phrase_ranks
from vse.eval.ranking.metrics import METRIC_TITLES, Fold, fold_metrics
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import write_json

_OF_TYPE = "type "  # before the name of a type, so that it is no other key
_COMPARED_OF_TYPE = "r1"  # what is compared of each type


def of_phrases(files: Sequence[Path]) -> bool:
    """Whether files hold phrase scores; :class:`UserError` if some do and others do not."""
    kinds = [is_phrase_scores(path) for path in files]
    if any(kinds) and not all(kinds):
        raise UserError(f"{files[kinds.index(True)]} holds phrase scores, and {files[kinds.index(False)]} does not")
    return all(kinds) and bool(kinds)


def check_protocol(files: Sequence[Path], asked: str | Sequence[str], phrases: bool) -> None:
    """:class:`UserError` if a protocol that was asked for is not of what files hold, phrase scores or not."""
    for name in [asked] if isinstance(asked, str) else asked:
        if phrases and name not in ("auto", PHRASE):
            raise UserError(f"{files[0]}: holds phrase scores, and the protocol {name} is of embeddings; leave --protocol out")
        if not phrases and name == PHRASE:
            raise UserError(f"{files[0]}: holds no phrase scores, which the protocol {PHRASE} is of (docs/formats.md)")


def evaluate_files(
    files: Sequence[Path],
    out: Path | None,
    protocol: str | Sequence[str] = "auto",
    asked: EvaluationOptions = EvaluationOptions(),
    iou: float | None = None,
) -> dict[str, Any]:
    """Evaluate one model, a file per seed, whatever the files hold; returns the content of the result file.

    It is written to ``out`` unless that is None; then files are named from the folder that we are in. Of embeddings see
    :func:`vse.eval.protocols.evaluate.evaluated`, of phrase scores :func:`phrases_evaluated`. :class:`UserError` for an option
    that is not of what the files hold.
    """
    asked.check()
    if out is not None:
        check_output(out, RESULT, files)
    phrases, beside = of_phrases(files), Path("result.json") if out is None else out
    check_protocol(files, protocol, phrases)
    if phrases and asked.of_embeddings:
        raise UserError(f"{files[0]} holds phrase scores, and {asked.of_embeddings} is not of these; leave it out")
    check_no_iou(files, iou, phrases)
    if phrases:
        content = phrases_evaluated(files, beside, IOU if iou is None else iou, asked.bootstrap, asked.unfinished)
    else:
        content = evaluated(files, beside, protocol, asked)
    if out is not None:
        write_json(out, content)
    return content


def check_no_iou(files: Sequence[Path], iou: float | None, phrases: bool) -> None:
    """:class:`UserError` if a threshold is given for files that hold no phrase scores."""
    if iou is not None and not phrases:
        raise UserError(f"--iou is of phrase scores, and {files[0]} holds none; leave it out")


def evaluate_phrases(
    files: Sequence[Path], out: Path, iou: float = IOU, bootstrap: int = BOOTSTRAP_SAMPLES, unfinished: bool = False
) -> Path:
    """Write the result file of one model's phrase scores, a file per seed; returns ``out``. See :func:`phrases_evaluated`."""
    check_output(out, RESULT, files)
    return write_json(out, phrases_evaluated(files, out, iou, bootstrap, unfinished))


def phrases_evaluated(
    files: Sequence[Path], out: Path, iou: float = IOU, bootstrap: int = BOOTSTRAP_SAMPLES, unfinished: bool = False
) -> dict[str, Any]:
    """The content of the result file ``out`` of one model's phrase scores, a file per seed.

    A candidate is right if its IoU with the truth is ``iou`` or more. Phrases without a box are left out and counted; a phrase
    whose image has no candidate is missed. ``per_type`` has the metrics of each type, where a phrase of several types counts
    in each. The seeds, intervals and ``unfinished`` are as in :func:`vse.eval.protocols.evaluate.evaluated`.
    """
    check_iou(iou)
    runs = read_phrase_seeds(files)
    not_finished = unfinished_runs(runs, out, unfinished)
    first, folds = runs[0], phrase_folds(files, runs, iou)
    protocol = _protocol([fold_metrics(fold) for fold in folds], folds[0])
    protocol |= {"iou": iou, **phrase_counts(runs)}
    if bootstrap:
        protocol["ci95"] = _nested(intervals([[fold] for fold in folds], bootstrap))
    measured = {
        "split_identity": image_identity(first.dataset, "image_ids", np.unique(first.image_ids)).model_dump(),
        "data": first.identity.checksums.model_dump(),
        "n_images": len(np.unique(first.image_ids)),
        "n_captions": len(np.unique(first.caption_ids)),
        "seeds": [run.seed for run in runs],
        "protocols": {PHRASE: protocol},
        **({"bootstrap": {"over": "images", "samples": bootstrap}} if bootstrap else {}),
    }
    return signed_result(first, runs, out, not_finished, measured)


def phrase_differences(
    sides: Sequence[Sequence[Path]], runs: Sequence[Sequence[PhraseScores]], samples: int, iou: float
) -> dict[str, Any]:
    """How far two models are apart on the same phrases (see :func:`vse.eval.ranking.bootstrap.differences`).

    ``phrase`` has every metric, ``per_type`` R@1 of each type.
    """
    check_iou(iou)
    a, b = ([[fold] for fold in phrase_folds(files, of_model, iou)] for files, of_model in zip(sides, runs, strict=True))
    compared = _nested(differences(a, b, samples))
    per_type = {name: metrics[_COMPARED_OF_TYPE] for name, metrics in compared.get("per_type", {}).items()}
    return compared | ({"per_type": per_type} if per_type else {})


def read_phrase_seeds(files: Sequence[Path]) -> list[PhraseScores]:
    """The phrase scores of one model, a file per seed; :class:`UserError` if they are not of one split and experiment."""
    return as_one_model(files, [read_phrase_scores(path) for path in files], check_same_phrases, ("experiment",))


def phrase_folds(files: Sequence[Path], runs: Sequence[PhraseScores], iou: float) -> list[Fold]:
    """The phrases with a box of each run as queries: ``phrase`` all of them, and under names of their own those of a type."""
    folds: list[Fold] = []
    for path, run in zip(files, runs, strict=True):
        if not run.has_box.any():
            raise UserError(f"{path}: none of its {len(run.truth):,} phrases has a box, so there is nothing to evaluate")
        outcome = phrase_ranks(run.scores, run.boxes, run.offsets, run.truth, iou)
        images = np.unique(run.image_ids, return_inverse=True)[1]
        every, located = outcome.queries(images), run.has_box
        rows = {"phrase": located} | {f"{_OF_TYPE}{name}": of & located for name, of in types_of(run).items()}
        folds.append({name: every.select(of) for name, of in rows.items() if of.any()})
    return folds


def types_of(run: PhraseScores) -> dict[str, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Which phrases (n_phrases,) are of each type, by its name, the most frequent first; a phrase may be of several."""
    texts, which = np.unique(run.types, return_inverse=True)
    names = sorted({name for text in texts.tolist() for name in text.split("/") if name})
    of_types = {name: np.isin(which, [k for k, text in enumerate(texts) if name in text.split("/")]) for name in names}
    return dict(sorted(of_types.items(), key=lambda item: -np.count_nonzero(item[1])))


def phrase_counts(runs: Sequence[PhraseScores]) -> dict[str, int]:
    """How many phrases are evaluated, how many have no box, and how many with a box have no candidate in some run."""
    located = runs[0].has_box
    without = np.any([np.diff(run.offsets) == 0 for run in runs], axis=0)
    return {
        "n_phrases": int(np.count_nonzero(located)),
        "n_without_box": int(np.count_nonzero(~located)),
        "n_without_candidate": int(np.count_nonzero(located & without)),
    }


def check_iou(iou: float) -> None:
    """:class:`UserError` unless it can be a threshold."""
    if not 0 < iou <= 1:
        raise UserError(f"--iou {iou:g}: a threshold is above 0, and 1 at most")


def result_lines(result: Result) -> list[str]:
    """What any result says, for a person: a line per protocol, index and re-ranking."""
    if PHRASE in result.protocols:
        return [phrase_line(result)]
    tried = [*([index_line(result.index)] if result.index else []), *map(rerank_line, result.rerank)]
    tried += [combination_line(result.combination)] if result.combination else []
    return [*(summary_line(result, name) for name in result.protocols), *tried]


def phrase_line(result: Result) -> str:
    """The metrics of a result of phrases, for a person."""
    protocol = result.protocols["phrase"]
    recalls = " / ".join(f"{mean_and_std(protocol.directions[PHRASE][f'r{k}'])[0]:.1f}" for k in RECALLS)
    interval = protocol.interval("phrase_r1")
    around = f" (R@1 [{interval[0]:.1f}, {interval[1]:.1f}])" if interval else ""
    others = ", ".join(
        f"{METRIC_TITLES[key]} {mean_and_std(protocol.directions[PHRASE][key])[0]:.1f}" for key in ("bound", "mean_iou")
    )
    facts = ([f"trained on {result.trained_on}"] if result.trained_on else []) + (["not finished"] * bool(result.unfinished))
    said = f" ({', '.join(facts)})" if facts else ""
    head = f"{result.dataset} {result.display_name}{said} phrase: R@1/5/10 at IoU {protocol.iou:g} {recalls}{around}"
    return f"{head}, {others}; {counts_line(protocol)}"


def counts_line(protocol: ProtocolMetrics) -> str:
    """How many phrases there are, and what was left out, for a person."""
    without = f", {protocol.n_without_candidate:,} of them without a candidate" if protocol.n_without_candidate else ""
    return f"{protocol.n_phrases or 0:,} phrases{without}, {protocol.n_without_box or 0:,} more without a box left out"


def _protocol(metrics: Sequence[Mapping[str, Mapping[str, Metric]]], fold: Fold) -> dict[str, Any]:
    """The metrics over seeds of all phrases, and of each type with its number of phrases."""
    over = {name: over_seeds([dict(of_seed[name]) for of_seed in metrics]) for name in metrics[0]}
    nested = _nested(over)
    for name, of_type in nested.get("per_type", {}).items():
        of_type["n_phrases"] = len(fold[f"{_OF_TYPE}{name}"].images)
    return nested


def _nested(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of all phrases and of each type, with the types under ``per_type``."""
    per_type = {name.removeprefix(_OF_TYPE): value for name, value in by_name.items() if name.startswith(_OF_TYPE)}
    return {"phrase": by_name["phrase"], **({"per_type": per_type} if per_type else {})}
