"""Ensembles: the mean score of several models, or the weighted sum of an image-sentence model and a phrase model.

The weighted sum is Eq. 8 of the two-branch paper (Wang et al., TPAMI 2018, section 5.6): D(x, y) = (1 - alpha) d(x, y) + alpha
d_rp(x, y). Here d is the distance between an image and a sentence, and d_rp is the mean, over the phrases of the sentence, of
the distance between a phrase and its best region. Scores are negative distances.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.cards import display_name, list_changed_settings
from vse.eval.files.embeddings import (
    EMBEDDINGS_KIND,
    Embeddings,
    check_same_split,
    experiment_name,
    parse_provenance,
    read_embeddings,
    require_complete_scores,
    write_embeddings,
    write_scores,
)
from vse.eval.files.split import MATRIX_NAMES, MeanScores
from vse.eval.ranking.metrics import compute_metrics
from vse.eval.ranking.ranks import ScoreBlocks, ranks_from_blocks
from vse.pipeline.dataset.identity import check_all_same_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_output
from vse.pipeline.presets.presets import load_experiment_outline
from vse.pipeline.presets.schema import ENSEMBLE_KEYS, ExperimentOutline

log = logging.getLogger(__name__)
CANDIDATE_ALPHAS = tuple(k / 10 for k in range(11))  # weights of the phrase model that are tried on the validation split
MemberFile = tuple[Path, Embeddings]
ScoresByName = dict[str, NDArray[np.float32]]


def load_ensemble_outline(name: str) -> ExperimentOutline:
    """Load the preset called ``name``, which lists the experiments of an ensemble. Raises UserError if it lists none."""
    outline = load_experiment_outline(name)
    if not outline.ensemble_of:
        raise UserError(f"the experiment {name} is not an ensemble: its preset has no ensemble_of")
    return outline


def read_members_per_seed(files: Sequence[Path], outline: ExperimentOutline | None = None) -> list[list[MemberFile]]:
    """Read the files of an ensemble, and return for each seed its members: pairs of a file and its embeddings.

    The ensemble of seed s combines seed s of every experiment. ``outline``, the preset of the ensemble, names the experiments
    and their order. Without an outline, all files form a single ensemble if they all belong to one experiment, or if all
    belong to different experiments. Raises UserError if a member is missing, given twice or not in the outline.
    """
    if len(files) < 2:
        raise UserError("an ensemble has at least two members: give several files of embeddings")
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("an ensemble counts every member once, and a file is given twice")
    members = [(path, read_embeddings(path)) for path in files]
    names = outline.ensemble_of if outline else list(dict.fromkeys(experiment_name(*member) for member in members))
    if not outline and len(names) in (1, len(files)):
        return [members]
    found: dict[tuple[str, int | None], tuple[Path, Embeddings]] = {}
    for path, member in members:
        name = experiment_name(path, member)
        if outline and name not in names:
            raise UserError(
                f"{path}: the experiment {name} is not a member of {outline.name}, which has {' and '.join(names)}"
            )
        other, _ = found.setdefault((name, member.seed), (path, member))
        if other != path:
            raise UserError(f"{path} and {other} are both {_describe_member(name, member.seed)}; an ensemble counts it once")
    if len(names) == 1:
        return [list(found.values())]
    seeds = dict.fromkeys(seed for _, seed in found)
    for seed, name in product(seeds, names):
        if (name, seed) not in found:
            raise UserError(f"an ensemble needs the same seeds of all its members: no file of {_describe_member(name, seed)}")
    return [[found[name, seed] for name in names] for seed in seeds]


def _describe_member(experiment: str, seed: int | None) -> str:
    return f"{experiment} without a seed" if seed is None else f"{experiment} seed {seed}"


def build_ensemble(
    members: list[MemberFile],
    compares_captions: bool = False,
    outline: ExperimentOutline | None = None,
    alpha: float | None = None,
) -> Embeddings:
    """Return embeddings whose scores are the means of the members' scores.

    If one of the members is a phrase model, :func:`combine_scores` computes a weighted sum instead of the means.

    All members have the same split and similarity; their dimensions, experiments and seeds may differ. The vectors of n
    members are concatenated and divided by the square root of n. Inner products and order scores of the resulting vectors are
    the mean scores of the members. Score matrices are averaged row by row when they are read.

    Parameters
    ----------
    members : the file and the embeddings of each member
    compares_captions : whether captions query captions, as in the protocol ``sentence``; if so, raises UserError unless the
        captions are unit vectors
    outline : the preset of the ensemble, whose name becomes the experiment; None uses the names of the members
    alpha : the weight of the phrase model's scores, from 0 to 1; required if one member is a phrase model
    """
    first = members[0][1]
    runs = [member for _, member in members]
    names = dict.fromkeys(experiment_name(*member) for member in members)
    described: dict[str, Any] = {
        "experiment": outline.name if outline else f"ensemble of {len(members)} ({', '.join(names)})",
        "provenance": json.dumps(_build_provenance(members, outline)),
        "trained_on": first.trained_on if len({member.trained_on for member in runs}) == 1 else "several data sets",
        "source": None,
    }
    pair = find_sentence_and_phrase_members(members)
    if pair is not None:
        if alpha is None:
            raise ValueError("an ensemble with a phrase model needs the share of phrases, alpha")
        return replace(combine_scores(*pair, alpha), **described)
    _check_members(members, compares_captions)
    return replace(
        first,
        images=_concatenate_vectors([member.images for member in runs]),
        captions=_concatenate_vectors([member.captions for member in runs]),
        pooled_images=_concatenate_vectors([member.pooled_images for member in runs]),
        pooled_captions=_concatenate_vectors([member.pooled_captions for member in runs]),
        bank_scores_images=None,
        bank_scores_captions=None,
        **_average_scores(runs),
        **described,
    )


def _check_members(members: list[MemberFile], compares_captions: bool) -> None:
    (first_path, first), *_ = members
    for path, member in members:
        require_complete_scores(path, member, "--ensemble")
        check_same_split(first_path, first, path, member, attributes=("similarity",))
        if (member.vectors is None) != (first.vectors is None):
            raise UserError(f"{first_path} and {path} cannot be averaged: one holds scores, the other embeddings")
        if compares_captions and member.captions is not None:
            lengths = np.linalg.norm(member.captions, axis=1)
            if lengths.min() < 0.999 or lengths.max() > 1.001:
                raise UserError(f"{path}: the protocol sentence of an ensemble needs captions of length 1, these are not")
    check_all_same_data([(path, member.identity) for path, member in members])


def save_ensemble(path: Path, runs: Sequence[Embeddings], other_files: Sequence[Path]) -> list[Path]:
    """Write the ensemble of a single seed to ``path``, or the ensembles of several seeds to ``<name>-<seed>.h5``.

    Here ``<name>`` is the file name in ``path`` without its suffix. Return the paths of the files. ``other_files`` are the
    other inputs and outputs of the command. Raises UserError if a file to write is one of ``other_files``, or an existing file
    of another kind.
    """
    paths = [path if len(runs) == 1 else path.with_name(f"{path.stem}-{run.seed}{path.suffix}") for run in runs]
    for one in paths:
        check_output(one, EMBEDDINGS_KIND, other_files)
    for one, run in zip(paths, runs, strict=True):
        if run.vectors is not None:
            write_embeddings(one, run)
        else:
            write_scores(one, replace(run, scores=None, scores_i2t=None, scores_t2i=None), *run.score_blocks())
    return paths


def _build_provenance(members: list[MemberFile], outline: ExperimentOutline | None) -> dict[str, Any]:
    """Return the provenance of an ensemble: its preset's settings, and the features and changed settings of its members."""
    features: dict[str, Any] = {}
    changed: dict[str, None] = {}
    names: dict[str, None] = {}
    for path, member in members:
        provenance = parse_provenance(member)
        names[display_name(experiment_name(path, member), provenance)] = None
        of_member = provenance.get("features")
        features |= of_member if isinstance(of_member, Mapping) else {}
        changed |= dict.fromkeys(f"{experiment_name(path, member)}.{change}" for change in list_changed_settings(provenance))
    experiments = {experiment_name(*member) for member in members}
    label = {"label": " + ".join(names)} if len(names) > 1 and experiments != set(names) else {}
    config = {name: getattr(outline, name) for name in ENSEMBLE_KEYS} if outline else label
    return {"features": features, "config": config, "changed_settings": list(changed)}


def _average_scores(members: Sequence[Embeddings]) -> dict[str, Any]:
    if members[0].vectors is not None:
        return {"scores": None}
    means = {}
    for direction in ("i2t", "t2i"):
        scores = [member.direction_scores(direction) for member in members]
        means[f"scores_{direction}"] = MeanScores([one for one in scores if one is not None])
    if any(member.has_directional_scores for member in members):
        return {"scores": None, **means}
    return {"scores": means["scores_i2t"]}


def _concatenate_vectors(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    """Return the concatenated vectors of n members, divided by the square root of n; None if a member has no vectors."""
    vectors = [part for part in parts if part is not None]
    if len(vectors) < len(parts):
        return None
    wide: NDArray[np.float32] = np.concatenate(vectors, axis=1)
    wide /= np.float32(len(parts) ** 0.5)
    return wide


@dataclass(frozen=True)
class PhraseWeight:
    """The weight ``alpha`` (0 to 1) of a phrase model that is combined with an image-sentence model.

    The image-sentence model has the weight 1 - ``alpha``. ``rsum_by_alpha`` maps each weight that was tried to the mean rsum
    on the validation split; None if the user set ``alpha``.
    """

    alpha: float
    rsum_by_alpha: dict[float, float] | None = None

    def build_result_entry(self, phrase_model: Embeddings) -> dict[str, Any]:
        """Return the value of ``combination`` in a result file.

        It is a dict with the weight, the rsum of each weight that was tried, and the numbers of captions without phrases and
        of images without regions.
        """
        assert phrase_model.n_phrases is not None
        assert phrase_model.n_regions is not None
        rsums = {f"{alpha:g}": rsum for alpha, rsum in (self.rsum_by_alpha or {}).items()}
        return {
            "alpha": self.alpha,
            **({"rsum_val": rsums} if rsums else {}),
            "n_captions_without_phrases": int(np.count_nonzero(phrase_model.n_phrases == 0)),
            "n_images_without_regions": int(np.count_nonzero(phrase_model.n_regions == 0)),
        }


def find_sentence_and_phrase_members(members: Sequence[MemberFile]) -> tuple[MemberFile, MemberFile] | None:
    """Return the image-sentence model and the phrase model of an ensemble; None for an ensemble without a phrase model.

    Raises UserError if an ensemble with a phrase model does not consist of one phrase model and one image-sentence model.
    """
    phrase_models = [member for member in members if member[1].is_from_phrase_model]
    if not phrase_models:
        return None
    others = [member for member in members if not member[1].is_from_phrase_model]
    if len(phrase_models) != 1 or len(others) != 1:
        raise UserError(
            f"{phrase_models[0][0]} holds scores of phrases and is combined with one image-sentence model; this ensemble has "
            f"{len(others)} image-sentence models and {len(phrase_models)} phrase models"
        )
    return others[0], phrase_models[0]


def find_phrase_member(members: Sequence[MemberFile]) -> Embeddings:
    """Return the scores of the phrase model among the members. Raises StopIteration without a phrase model."""
    return next(run for _, run in members if run.is_from_phrase_model)


def choose_phrase_weight(members_by_seed: Sequence[Sequence[MemberFile]], alpha: float | None) -> PhraseWeight | None:
    """Return the weight of the phrase model: ``alpha`` or, if ``alpha`` is None, the best weight on the validation split.

    ``members_by_seed`` has the members (file and embeddings) of each seed's ensemble. If they have no phrase model, return
    None. The weights 0, 0.1, ..., 1 are tried; the best weight has the highest rsum as a mean over the seeds. The validation
    files are next to the members: ``val.h5`` next to ``test.h5``, and ``val_sentences.h5`` next to ``test_sentences.h5``.
    Raises UserError if a validation file is missing.
    """
    pairs = [pair for members in members_by_seed if (pair := find_sentence_and_phrase_members(members)) is not None]
    if not pairs:
        if alpha is not None:
            raise UserError("--alpha is the share of phrases, and no file holds scores of phrases (vse-embed --sentences)")
        return None
    if alpha is not None:
        if not 0 <= alpha <= 1:
            raise UserError(f"--alpha {alpha:g}: the share of phrases must be between 0 and 1")
        return PhraseWeight(alpha)
    rsums = np.zeros(len(CANDIDATE_ALPHAS))
    for pair in pairs:
        sentence_file, phrase_file = (_read_validation_file(*member) for member in pair)
        distances = _compute_negative_distances(sentence_file[1])
        for k, candidate in enumerate(CANDIDATE_ALPHAS):
            ranks = ranks_from_blocks(*combine_scores(sentence_file, phrase_file, candidate, distances).score_blocks())
            rsums[k] += compute_metrics(ranks)["rsum"]
    rsum_by_alpha = dict(zip(CANDIDATE_ALPHAS, (rsums / len(pairs)).tolist(), strict=True))
    best = max(CANDIDATE_ALPHAS, key=lambda candidate: rsum_by_alpha[candidate])
    log.info("alpha %g by validation: rsum %.1f, without phrases %.1f", best, rsum_by_alpha[best], rsum_by_alpha[0.0])
    return PhraseWeight(best, rsum_by_alpha)


def combine_scores(
    sentence_file: MemberFile, phrase_file: MemberFile, alpha: float, negative_distances: ScoresByName | None = None
) -> Embeddings:
    """Return the embeddings of the image-sentence model with the scores -D(x, y) = -(1 - alpha) d(x, y) - alpha d_rp(x, y).

    This is Eq. 8 of Wang et al., TPAMI 2018: d is the distance of image x and sentence y, and d_rp is the mean distance of the
    sentence's phrases to their best regions. If the image-sentence model compares vectors by inner products, d is their
    Euclidean distance. For other models, d is the negative score. If a caption has no phrases, or an image has no regions, D
    equals d. ``negative_distances`` has -d; if it is None, -d is computed. The scores are (n_images, n_captions). One matrix
    is held in memory, or two if the scores of the image-sentence model depend on the direction.
    """
    check_same_split(*sentence_file, *phrase_file)
    (_, model), (_, phrase_model) = sentence_file, phrase_file
    assert phrase_model.scores is not None
    assert phrase_model.n_phrases is not None
    assert phrase_model.n_regions is not None
    lacks_phrase_score = (phrase_model.n_regions == 0)[:, None] | (phrase_model.n_phrases == 0)
    phrase_scores = np.asarray(phrase_model.scores[:], np.float32)
    combined: dict[str, Any] = dict.fromkeys(MATRIX_NAMES)
    for name, scores in (negative_distances or _compute_negative_distances(model)).items():
        combined[name] = np.where(lacks_phrase_score, scores, (1 - alpha) * scores + alpha * phrase_scores).astype(np.float32)
    return replace(model, **combined)


def _compute_negative_distances(model: Embeddings) -> ScoresByName:
    """Return the negative distance of each image and sentence, (n_images, n_captions).

    For vectors that are compared by inner products, this is the negative Euclidean distance; for other models it is the score.
    The keys of the dict are ``scores`` or, if scores depend on the direction, ``scores_i2t`` and ``scores_t2i``.
    """
    i2t, t2i = model.score_blocks()
    if t2i is not None:
        return {"scores_i2t": _compute_all_scores(i2t), "scores_t2i": _compute_all_scores(t2i)}
    scores = _compute_all_scores(i2t)
    if model.vectors is None or model.similarity != "cosine":
        return {"scores": scores}
    images, captions = (np.einsum("nd,nd->n", side, side) for side in model.vectors)
    squares: NDArray[np.float32] = (images[:, None] + captions - 2 * scores).clip(min=0)
    return {"scores": -np.sqrt(squares)}


def _compute_all_scores(blocks: ScoreBlocks) -> NDArray[np.float32]:
    scores = torch.empty(blocks.n_images, len(blocks.image_of_caption))
    for rows in blocks.row_slices:
        scores[rows] = blocks.score(rows, None)
    return np.asarray(scores.numpy())


def _read_validation_file(path: Path, run: Embeddings) -> MemberFile:
    name = path.name.replace(run.split, "val", 1)
    val_path = path.with_name(name)
    if run.split == "val" or name == path.name:
        raise UserError(
            f"{path}: alpha is chosen on the validation split, but its file cannot be found from this name; give --alpha"
        )
    if not val_path.exists():
        option = " --sentences" if run.is_from_phrase_model else ""
        raise UserError(
            f"{val_path}: no such file, and alpha is chosen by it: write it with vse-embed {path.parent} --split val{option}, "
            "or give --alpha"
        )
    val_run = read_embeddings(val_path)
    if val_run.split != "val" or val_run.experiment != run.experiment or val_run.seed != run.seed:
        raise UserError(f"{val_path}: does not hold the split val of the model of {path}; write it again, or give --alpha")
    return val_path, val_run
