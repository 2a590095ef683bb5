"""Ensembles: the mean of the scores of several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings, experiment_of, read_embeddings, same_split
from vse.eval.files.score_matrices import MeanScores
from vse.eval.ranking.ranks import ScoreMatrix
from vse.pipeline.errors import UserError

_DIRECTIONS: tuple[Literal["i2t", "t2i"], ...] = ("i2t", "t2i")


def members_of(files: Sequence[Path]) -> list[Embeddings]:
    """The members of an ensemble, each read once; :class:`UserError` if there is but one, or one twice."""
    if len(files) < 2:
        raise UserError("an ensemble has two members at least: give several files of embeddings")
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("an ensemble counts every member once, and a file is given twice")
    return [read_embeddings(path) for path in files]


def ensemble(files: Sequence[Path], sentence: bool = False, members: Sequence[Embeddings] | None = None) -> Embeddings:
    """One set of embeddings whose scores are the means of the members' scores, of all pairs.

    ``members`` are what the ``files`` hold, if they were read already. They are of one split and similarity; their sizes,
    experiments and seeds are free. No matrix of scores is made: an inner product and the order score are both sums over
    dimensions, so the members' vectors are put side by side, each divided by the root of how many there are. Of files that
    hold scores, the scores are averaged where they are read;
    if those of any member depend on the direction, so do those of the ensemble.

    For the protocol ``sentence`` this is the mean of the members' cosines only if all captions are of one length: with
    ``sentence`` :class:`UserError` names a file whose captions are not.
    """
    members = members_of(files) if members is None else members
    first = members[0]
    for path, member in zip(files, members, strict=True):
        same_split(files[0], first, path, member, of=("similarity",))
        if (member.vectors is None) != (first.vectors is None):
            raise UserError(f"{files[0]} and {path} cannot be averaged: one holds scores, the other embeddings")
        if sentence and member.captions is not None:
            lengths = np.linalg.norm(member.captions, axis=1)
            if lengths.min() < 0.999 or lengths.max() > 1.001:
                raise UserError(f"{path}: the protocol sentence of an ensemble needs captions of length 1, these are not")
    names = dict.fromkeys(experiment_of(path, member) for path, member in zip(files, members, strict=True))
    return replace(
        first,
        images=_side_by_side([member.images for member in members]),
        captions=_side_by_side([member.captions for member in members]),
        **_mean_scores(members),
        experiment=f"ensemble of {len(members)} ({', '.join(names)})",
        provenance="{}",
        trained_on=first.trained_on if len({member.trained_on for member in members}) == 1 else "several data sets",
        source=None,
    )


def _mean_scores(members: Sequence[Embeddings]) -> dict[str, Any]:
    """The score matrices of the ensemble by their names; all None if its vectors are compared."""
    i2t, t2i = (_mean([member.scores_of(direction) for member in members]) for direction in _DIRECTIONS)
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
