"""Evaluation of phrase localisation: the protocol ``phrase``, and the comparison of two models by phrase scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.phrase_scores import (
    PhraseScores,
    check_same_phrases,
    is_phrase_score_file,
    rank_phrases,
    read_phrase_scores,
)
from vse.eval.files.results import Metric, split_identity_from_ids
from vse.eval.options import DEFAULT_IOU_THRESHOLD, N_BOOTSTRAP_SAMPLES, PHRASE_PROTOCOL
from vse.eval.protocols.protocols import check_and_unify_seeds
from vse.eval.protocols.result_content import build_result, list_unfinished_runs, mean_and_std_over_seeds
from vse.eval.ranking.metrics import QueriesByDirection, compute_fold_metrics
from vse.eval.ranking.statistics import compute_differences, compute_intervals
from vse.pipeline.errors import UserError

_TYPE_PREFIX = "type "  # prefix of the keys of a fold that hold the phrases of one type


def are_phrase_score_files(files: Sequence[Path], protocol: str | Sequence[str], iou: float | None) -> bool:
    """Return whether all files have phrase scores.

    Raises UserError if only some files have phrase scores, or if ``protocol`` or ``iou`` does not apply to the files.
    """
    kinds = [is_phrase_score_file(path) for path in files]
    if any(kinds) and not all(kinds):
        raise UserError(f"{files[kinds.index(True)]} holds phrase scores, and {files[kinds.index(False)]} does not")
    phrases = all(kinds) and bool(kinds)
    for name in [protocol] if isinstance(protocol, str) else protocol:
        if phrases and name not in ("auto", PHRASE_PROTOCOL):
            raise UserError(
                f"{files[0]}: holds phrase scores, and the protocol {name} applies to embeddings; leave --protocol out"
            )
        if not phrases and name == PHRASE_PROTOCOL:
            raise UserError(
                f"{files[0]}: holds no phrase scores, but the protocol {PHRASE_PROTOCOL} needs them (docs/formats.md)"
            )
    if iou is not None and not phrases:
        raise UserError(f"--iou applies to phrase scores, and {files[0]} holds none; leave it out")
    return phrases


def evaluate_phrases(
    files: Sequence[Path],
    out: Path,
    iou: float = DEFAULT_IOU_THRESHOLD,
    bootstrap: int = N_BOOTSTRAP_SAMPLES,
    allow_unfinished: bool = False,
) -> dict[str, Any]:
    """Evaluate the phrase scores of one model, a file per seed, and return the content of the result file ``out``.

    A candidate box is right if its IoU with the true box is ``iou`` or more. Phrases without a true box are excluded and
    counted; a phrase whose image has no candidate counts as missed. ``allow_unfinished`` accepts runs whose training did not
    finish. Raises UserError if ``iou`` is not above 0 and at most 1.
    """
    runs = read_seed_phrase_scores(files)
    not_finished = list_unfinished_runs(runs, out, allow_unfinished)
    first, folds = runs[0], build_phrase_folds(files, runs, iou)
    protocol = _combine_seed_metrics([compute_fold_metrics(fold) for fold in folds], folds[0])
    protocol |= {"iou": iou, **count_phrases(runs)}
    if bootstrap:
        protocol["ci95"] = _nest_type_metrics(compute_intervals([[fold] for fold in folds], bootstrap))
    measured = {
        "split_identity": split_identity_from_ids(first.dataset, "image_ids", np.unique(first.image_ids)).model_dump(),
        "data": first.identity.checksums.model_dump(),
        "n_images": len(np.unique(first.image_ids)),
        "n_captions": len(np.unique(first.caption_ids)),
        "seeds": [run.seed for run in runs],
        "protocols": {PHRASE_PROTOCOL: protocol},
        **({"bootstrap": {"over": "images", "samples": bootstrap}} if bootstrap else {}),
    }
    return build_result(first, runs, out, not_finished, measured)


def compute_phrase_differences(
    files: Sequence[Sequence[Path]], runs: Sequence[Sequence[PhraseScores]], samples: int, iou: float
) -> dict[str, Any]:
    """Return the difference of two models in each metric of phrase localisation, with its 95% interval and p-value.

    The models must have the same phrases. ``files`` and ``runs`` have the files and the phrase scores of each model's seeds.
    ``samples`` is the number of bootstrap samples, and of samples for the p-value. A candidate box is right if its IoU with
    the true box is at least ``iou``. The result has all metrics under ``phrase``, and R@1 of each type of phrases under
    ``per_type``.
    """
    a, b = ([[fold] for fold in build_phrase_folds(paths, seeds, iou)] for paths, seeds in zip(files, runs, strict=True))
    compared = _nest_type_metrics(compute_differences(a, b, samples))
    per_type = {name: metrics["r1"] for name, metrics in compared.get("per_type", {}).items()}
    return compared | ({"per_type": per_type} if per_type else {})


def read_seed_phrase_scores(files: Sequence[Path]) -> list[PhraseScores]:
    """Read the phrase scores of one model, a file per seed. Raises UserError if the files differ in split or experiment."""
    return check_and_unify_seeds(files, [read_phrase_scores(path) for path in files], check_same_phrases, ("experiment",))


def build_phrase_folds(files: Sequence[Path], runs: Sequence[PhraseScores], iou: float) -> list[QueriesByDirection]:
    """Return for each seed the phrases with a true box, as ranked queries.

    Each item of the list has all phrases under the key ``phrase``, and the phrases of each type under ``type <name>``. Raises
    UserError if no phrase has a true box, or if ``iou`` is not above 0 and at most 1.
    """
    if not 0 < iou <= 1:
        raise UserError(f"--iou {iou:g}: a threshold must be above 0 and at most 1")
    folds: list[QueriesByDirection] = []
    for path, run in zip(files, runs, strict=True):
        if not run.true_box_mask.any():
            raise UserError(f"{path}: none of its {len(run.truth):,} phrases has a box, so there is nothing to evaluate")
        ranks = rank_phrases(run.scores, run.boxes, run.offsets, run.truth, iou)
        queries, has_box = ranks.build_queries(np.unique(run.image_ids, return_inverse=True)[1]), run.true_box_mask
        masks = {"phrase": has_box} | {f"{_TYPE_PREFIX}{name}": mask & has_box for name, mask in build_type_masks(run).items()}
        folds.append({name: queries.select(mask) for name, mask in masks.items() if mask.any()})
    return folds


def build_type_masks(run: PhraseScores) -> dict[str, NDArray[np.bool_]]:
    """Return a mask (n_phrases,) of the phrases of each type, such as ``people``. The most frequent type comes first.

    A phrase can have several types.
    """
    texts, which = np.unique(run.types, return_inverse=True)
    names = sorted({name for text in texts.tolist() for name in text.split("/") if name})
    masks = {name: np.isin(which, [k for k, text in enumerate(texts) if name in text.split("/")]) for name in names}
    return dict(sorted(masks.items(), key=lambda item: -np.count_nonzero(item[1])))


def count_phrases(runs: Sequence[PhraseScores]) -> dict[str, int]:
    """Return the numbers of phrases with a true box, without a true box, and with a true box but without a candidate.

    A phrase counts as without a candidate if at least one seed has no candidate box for the phrase.
    """
    has_box = runs[0].true_box_mask
    without = np.any([np.diff(run.offsets) == 0 for run in runs], axis=0)
    return {
        "n_phrases": int(np.count_nonzero(has_box)),
        "n_without_box": int(np.count_nonzero(~has_box)),
        "n_without_candidate": int(np.count_nonzero(has_box & without)),
    }


def _combine_seed_metrics(metrics: Sequence[Mapping[str, Mapping[str, Metric]]], fold: QueriesByDirection) -> dict[str, Any]:
    combined = {name: mean_and_std_over_seeds([dict(of_seed[name]) for of_seed in metrics]) for name in metrics[0]}
    nested = _nest_type_metrics(combined)
    for name, of_type in nested.get("per_type", {}).items():
        of_type["n_phrases"] = len(fold[f"{_TYPE_PREFIX}{name}"].image_rows)
    return nested


def _nest_type_metrics(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Move the values of each type of phrases under ``per_type``, and return them next to the values under ``phrase``.

    In ``by_name``, the values of a type have the key ``type <name>``; in ``per_type`` they have the key ``<name>``.
    """
    per_type = {name.removeprefix(_TYPE_PREFIX): value for name, value in by_name.items() if name.startswith(_TYPE_PREFIX)}
    return {"phrase": by_name["phrase"], **({"per_type": per_type} if per_type else {})}
