"""Ensembles: the mean of the scores of several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings, read_embeddings, same_split
from vse.pipeline.errors import UserError


def ensemble(files: Sequence[Path], sentence: bool = False) -> Embeddings:
    """One set of embeddings whose scores are the means of the members' scores, of all pairs.

    Members are of one split and similarity; their sizes, experiments and seeds are free. No matrix of scores is made: an
    inner product and the order score are both sums over dimensions, so the members' vectors are put side by side,
    each divided by the root of how many there are. Of files that hold scores, the scores are averaged.

    For the protocol ``sentence`` this is the mean of the members' cosines only if all captions are of one length: with
    ``sentence`` :class:`UserError` names a file whose captions are not.
    """
    if len(files) < 2:
        raise UserError("an ensemble has two members at least: give several files of embeddings")
    if len({path.resolve() for path in files}) < len(files):
        raise UserError("an ensemble counts every member once, and a file is given twice")
    members = [read_embeddings(path) for path in files]
    first = members[0]
    for path, member in zip(files, members, strict=True):
        same_split(files[0], first, path, member, of=("similarity",))
        if (member.scores is None) != (first.scores is None):
            raise UserError(f"{files[0]} and {path} cannot be averaged: one holds scores, the other embeddings")
        if sentence and member.captions is not None:
            lengths = np.linalg.norm(member.captions, axis=1)
            if lengths.min() < 0.999 or lengths.max() > 1.001:
                raise UserError(f"{path}: the protocol sentence of an ensemble needs captions of length 1, these are not")
    names = dict.fromkeys(member.experiment for member in members)
    return replace(
        first,
        images=_side_by_side([member.images for member in members]),
        captions=_side_by_side([member.captions for member in members]),
        scores=_mean([member.scores for member in members]),
        experiment=f"ensemble of {len(members)} ({', '.join(names)})",
        provenance="{}",
    )


def _side_by_side(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    wide: NDArray[np.float32] = np.concatenate(there, axis=1)
    wide /= np.float32(len(parts) ** 0.5)
    return wide


def _mean(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    total: NDArray[np.float32] | None = None
    for part in parts:
        if part is None:
            return None
        total = part.copy() if total is None else np.add(total, part, out=total)
    return None if total is None else np.divide(total, np.float32(len(parts)), out=total)
