"""Ensembles: the mean of the scores of several models.

An image-sentence model and a phrase model together: Eq. 8 of the two-branch paper (Wang et al., TPAMI 2018, section 5.6).

D(x, y) = (1 - alpha) d(x, y) + alpha d_rp(x, y), where d is the distance of an image and a sentence, and d_rp the mean over
the sentence's phrases of the distance to their best region. Scores are distances with a minus: what is higher is nearer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import (
    EMBEDDINGS,
    Embeddings,
    check_same_split,
    experiment_name,
    parse_provenance,
    read_embeddings,
    write_embeddings,
    write_scores,
)
from vse.eval.files.results import changed_settings, display_name
from vse.eval.files.split import MeanScores
from vse.eval.ranking.metrics import metrics
from vse.eval.ranking.ranks import ScoreBlocks, ScoreMatrix, ranks_from_blocks
from vse.pipeline.dataset.identity import check_all_same_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output
from vse.pipeline.presets.presets import load_plan
from vse.pipeline.presets.schema import ENSEMBLE_KEYS, ExperimentPlan

_DIRECTIONS: tuple[Literal["i2t", "t2i"], ...] = ("i2t", "t2i")
Members = list[tuple[Path, Embeddings]]  # of an ensemble of one seed: each with its file


def ensemble_plan(name: str) -> ExperimentPlan:
    """The preset ``name``; :class:`UserError` if it is not that of an ensemble."""
    plan = load_plan(name)
    if not plan.ensemble_of:
        raise UserError(f"the experiment {name} is no ensemble: its preset has no ensemble_of")
    return plan


def members_by_seed(files: Sequence[Path], plan: ExperimentPlan | None = None) -> list[Members]:
    """The members of an ensemble, each file read once: a list of them for each seed of the ensemble.

    Files of several experiments, of some more than one, are seeds: seed s of the ensemble is made of seed s of every
    experiment. Files of one experiment, or one of each, are the members of one ensemble, whatever their seeds. With the
    ``plan`` of an ensemble its members are what it says, in that order, and of one seed, or the seeds of the one experiment
    that it names. :class:`UserError` says what is lacking or too much.
    """
    if len(files) < 2:
        raise UserError("an ensemble has two members at least: give several files of embeddings")
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("an ensemble counts every member once, and a file is given twice")
    members = [(path, read_embeddings(path)) for path in files]
    names = plan.ensemble_of if plan else list(dict.fromkeys(experiment_name(*member) for member in members))
    if not plan and len(names) in (1, len(files)):
        return [members]
    found: dict[tuple[str, int | None], tuple[Path, Embeddings]] = {}
    for path, member in members:
        name = experiment_name(path, member)
        if plan and name not in names:
            raise UserError(f"{path}: of the experiment {name}, and the ensemble {plan.name} is of {' and '.join(names)}")
        other, _ = found.setdefault((name, member.seed), (path, member))
        if other != path:
            raise UserError(f"{path} and {other} are both of {_run(name, member.seed)}; an ensemble counts it once")
    if len(names) == 1:
        return [list(found.values())]
    seeds = dict.fromkeys(seed for _, seed in found)
    for seed, name in product(seeds, names):
        if (name, seed) not in found:
            raise UserError(f"an ensemble is of the same seeds of all its members, and there is no file of {_run(name, seed)}")
    return [[found[name, seed] for name in names] for seed in seeds]


def _run(experiment: str, seed: int | None) -> str:
    return f"{experiment} without a seed" if seed is None else f"{experiment} seed {seed}"


def ensemble(
    members: Members, sentence: bool = False, plan: ExperimentPlan | None = None, alpha: float | None = None
) -> Embeddings:
    """One set of embeddings whose scores are the means of the members' scores, of all pairs.

    The members are of one split and similarity; their sizes, experiments and seeds are free. The ensemble's experiment is that
    of the ``plan`` or, without one, made of its members' names. No matrix of scores is made: an inner product and the order
    score are both sums over dimensions, so the members' vectors are put side by side, each divided by the root of how many
    there are. Of files that hold scores, the scores are averaged where they are read; if those of any member depend on the
    direction, so do those of the ensemble.

    Of an image-sentence model and one of phrases, whose share is ``alpha``, the scores are those of
    :func:`vse.eval.protocols.ensemble.combined_scores`, and a matrix of them is held.

    For the protocol ``sentence`` this is the mean of the members' cosines only if all captions are of one length: with
    ``sentence`` :class:`UserError` names a file whose captions are not.
    """
    (first_path, first), *_ = members
    runs = [member for _, member in members]
    names = dict.fromkeys(experiment_name(*member) for member in members)
    said: dict[str, Any] = {
        "experiment": plan.name if plan else f"ensemble of {len(members)} ({', '.join(names)})",
        "provenance": json.dumps(_provenance(members, plan)),
        "trained_on": first.trained_on if len({member.trained_on for member in runs}) == 1 else "several data sets",
        "source": None,
    }
    streams = both_streams(members)
    if streams is not None:
        if alpha is None:
            raise ValueError("an ensemble with a model of phrases needs their share, alpha")
        return replace(combined_scores(*streams, alpha), **said)
    for path, member in members:
        check_same_split(first_path, first, path, member, attributes=("similarity",))
        if (member.vectors is None) != (first.vectors is None):
            raise UserError(f"{first_path} and {path} cannot be averaged: one holds scores, the other embeddings")
        if sentence and member.captions is not None:
            lengths = np.linalg.norm(member.captions, axis=1)
            if lengths.min() < 0.999 or lengths.max() > 1.001:
                raise UserError(f"{path}: the protocol sentence of an ensemble needs captions of length 1, these are not")
    check_all_same_data([(path, member.identity) for path, member in members])
    return replace(
        first,
        images=_side_by_side([member.images for member in runs]),
        captions=_side_by_side([member.captions for member in runs]),
        pooled_images=_side_by_side([member.pooled_images for member in runs]),
        pooled_captions=_side_by_side([member.pooled_captions for member in runs]),
        **_mean_scores(runs),
        **said,
    )


def save_ensemble(path: Path, runs: Sequence[Embeddings], others: Sequence[Path]) -> list[Path]:
    """Write an ensemble of one seed as an embeddings file, or one of several as ``<name>-<seed>.h5``; returns the files.

    ``others`` are the files that none of these may be.
    """
    paths = [path if len(runs) == 1 else path.with_name(f"{path.stem}-{run.seed}{path.suffix}") for run in runs]
    for one in paths:
        check_output(one, EMBEDDINGS, others)
    for one, run in zip(paths, runs, strict=True):
        if run.vectors is not None:
            write_embeddings(one, run)
        else:
            write_scores(one, replace(run, scores=None, scores_i2t=None, scores_t2i=None), *run.score_blocks())
    return paths


def _provenance(members: Members, plan: ExperimentPlan | None) -> dict[str, Any]:
    """What is said of an ensemble: the preset's settings, its members' features, and which of their settings were changed.

    Without a preset tables call it by its members' names.
    """
    features: dict[str, Any] = {}
    changed: dict[str, None] = {}
    shown: dict[str, None] = {}
    for path, member in members:
        said = parse_provenance(member)
        shown[display_name(experiment_name(path, member), said)] = None
        read = said.get("features")
        features |= read if isinstance(read, Mapping) else {}
        changed |= dict.fromkeys(f"{experiment_name(path, member)}.{change}" for change in changed_settings(said))
    plain = {experiment_name(*member) for member in members}
    named = {"label": " + ".join(shown)} if len(shown) > 1 and plain != set(shown) else {}
    config = {name: getattr(plan, name) for name in ENSEMBLE_KEYS} if plan else named
    return {"features": features, "config": config, "changed_settings": list(changed)}


def _mean_scores(members: Sequence[Embeddings]) -> dict[str, Any]:
    """The score matrices of the ensemble by their names; all None if its vectors are compared."""
    i2t, t2i = (_mean([member.direction_scores(direction) for member in members]) for direction in _DIRECTIONS)
    if any(member.directional for member in members):
        return {"scores": None, "scores_i2t": i2t, "scores_t2i": t2i}
    return {"scores": i2t}


def _side_by_side(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    wide: NDArray[np.float32] = np.concatenate(there, axis=1)
    wide /= np.float32(len(parts) ** 0.5)
    return wide


def _mean(parts: Sequence[ScoreMatrix | None]) -> ScoreMatrix | None:
    there = [part for part in parts if part is not None]
    return MeanScores(there) if there else None


log = logging.getLogger(__name__)
ALPHAS = tuple(k / 10 for k in range(11))
Member = tuple[Path, Embeddings]
Matrices = dict[str, NDArray[np.float32]]
_NAMES: tuple[Literal["scores", "scores_i2t", "scores_t2i"], ...] = ("scores", "scores_i2t", "scores_t2i")


@dataclass(frozen=True)
class Share:
    """The share ``alpha`` of phrases in a score, and the mean rsum of each on the validation split, if it was chosen there."""

    alpha: float
    validated: dict[float, float] | None = None

    def said(self, phrases: Embeddings) -> dict[str, Any]:
        """What a result says of it, and of how much of the split of ``phrases`` the image-sentence model decides alone."""
        assert phrases.n_phrases is not None
        assert phrases.n_regions is not None
        chosen = {} if self.validated is None else {"rsum_val": {f"{alpha:g}": rsum for alpha, rsum in self.validated.items()}}
        return {
            "alpha": self.alpha,
            **chosen,
            "n_captions_without_phrases": int(np.count_nonzero(phrases.n_phrases == 0)),
            "n_images_without_regions": int(np.count_nonzero(phrases.n_regions == 0)),
        }


def both_streams(members: Sequence[Member]) -> tuple[Member, Member] | None:
    """The image-sentence model and the phrase model of an ensemble, in this order; None if it has no phrase model.

    :class:`UserError` if it is of more, or of two phrase models.
    """
    by_phrases = [member for member in members if member[1].has_phrase_scores]
    if not by_phrases:
        return None
    others = [member for member in members if not member[1].has_phrase_scores]
    if len(by_phrases) != 1 or len(others) != 1:
        raise UserError(
            f"{by_phrases[0][0]} holds scores of phrases, which are combined with one model of images and sentences; this "
            f"ensemble has {len(others)} of these, and {len(by_phrases)} of phrases"
        )
    return others[0], by_phrases[0]


def phrases_of(members: Sequence[Member]) -> Embeddings:
    """The phrase model's scores among the members of an ensemble that has one."""
    return next(run for _, run in members if run.has_phrase_scores)


def share_of_phrases(by_seed: Sequence[Sequence[Member]], alpha: float | None) -> Share | None:
    """``alpha`` if it is given, else that of :data:`ALPHAS` with the highest mean rsum of all seeds on the validation split.

    None of an ensemble without a phrase model. The files of the validation split lie beside the members': ``val.h5`` beside
    ``test.h5``, and ``val_sentences.h5``; :class:`UserError` names one that is not there.
    """
    streams = [both_streams(members) for members in by_seed]
    both = [members for members in streams if members is not None]
    if not both:
        if alpha is not None:
            raise UserError("--alpha is the share of phrases, and no file holds scores of phrases (vse-embed --sentences)")
        return None
    if alpha is not None:
        if not 0 <= alpha <= 1:
            raise UserError(f"--alpha {alpha:g}: the share of phrases is between 0 and 1")
        return Share(alpha)
    sums = np.zeros(len(ALPHAS))
    for members in both:
        sentences, phrases = (_validation_file(*member) for member in members)
        nearness = _nearness(sentences[1])
        for k, one in enumerate(ALPHAS):
            ranks = ranks_from_blocks(*combined_scores(sentences, phrases, one, nearness).score_blocks())
            sums[k] += metrics(ranks)["rsum"]
    validated = dict(zip(ALPHAS, (sums / len(both)).tolist(), strict=True))
    best = max(ALPHAS, key=lambda one: validated[one])
    log.info("alpha %g by validation: rsum %.1f, without phrases %.1f", best, validated[best], validated[0.0])
    return Share(best, validated)


def combined_scores(sentences: Member, phrases: Member, alpha: float, nearness: Matrices | None = None) -> Embeddings:
    """The image-sentence model's embeddings with the scores of Eq. 8 (n_images, n_captions) in place of its own.

    d is the Euclidean distance of embeddings that are compared by inner products, and of any other model its score with a
    minus; ``nearness`` is -d, if it is known. Where a caption has no phrase, or an image no region, D = d. The whole matrix
    is held, or two if the scores of the image-sentence model depend on the direction.
    """
    check_same_split(*sentences, *phrases)
    (_, model), (_, of_phrases) = sentences, phrases
    assert of_phrases.scores is not None
    assert of_phrases.n_phrases is not None
    assert of_phrases.n_regions is not None
    alone = (of_phrases.n_regions == 0)[:, None] | (of_phrases.n_phrases == 0)
    by_phrases = np.asarray(of_phrases.scores[:], np.float32)
    found: dict[str, Any] = dict.fromkeys(_NAMES)
    for name, scores in (nearness or _nearness(model)).items():
        found[name] = np.where(alone, scores, (1 - alpha) * scores + alpha * by_phrases).astype(np.float32)
    return replace(model, images=None, captions=None, pooled_images=None, pooled_captions=None, **found)


def _nearness(model: Embeddings) -> Matrices:
    """-d of all pairs, or those of each direction, by the name of the scores whose place they take."""
    i2t, t2i = model.score_blocks()
    if t2i is not None:
        return {"scores_i2t": _dense(i2t), "scores_t2i": _dense(t2i)}
    scores = _dense(i2t)
    if model.vectors is None or model.similarity != "cosine":
        return {"scores": scores}
    images, captions = (np.einsum("nd,nd->n", side, side) for side in model.vectors)
    squares: NDArray[np.float32] = (images[:, None] + captions - 2 * scores).clip(min=0)
    return {"scores": -np.sqrt(squares)}


def _dense(blocks: ScoreBlocks) -> NDArray[np.float32]:
    """All scores (n_images, n_captions)."""
    scores = torch.empty(blocks.n_images, len(blocks.image_of_caption))
    for start in range(0, blocks.n_images, blocks.rows):
        rows = slice(start, min(start + blocks.rows, blocks.n_images))
        scores[rows] = blocks.score(rows, None)
    dense: NDArray[np.float32] = scores.numpy()
    return dense


def _validation_file(path: Path, run: Embeddings) -> Member:
    """The file of the validation split that lies beside that of another one."""
    name = path.name.replace(run.split, "val", 1)
    beside = path.with_name(name)
    if run.split == "val" or name == path.name:
        raise UserError(f"{path}: alpha is chosen on the validation split, and the file is not named by another; give --alpha")
    if not beside.exists():
        option = " --sentences" if run.has_phrase_scores else ""
        raise UserError(
            f"{beside}: no such file, and alpha is chosen by it: write it with vse-embed {path.parent} --split val{option}, "
            "or give --alpha"
        )
    read = read_embeddings(beside)
    if read.split != "val" or read.experiment != run.experiment or read.seed != run.seed:
        raise UserError(f"{beside}: not of the split val and of the model of {path}; write it again, or give --alpha")
    return beside, read
