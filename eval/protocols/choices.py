"""The protocols ``choices`` and ``choices-<kind>``: for an image, a model chooses one of a few captions.

One caption is right. The kind names how the wrong captions were written. The model chooses the caption with the highest score.
R@1 is the percentage of right choices. Two further percentages come from choices that do not use the image. ``text_model`` is
the percentage if the caption with the highest score of a text model is chosen. ``text_alone`` is the percentage if the caption
with the highest mean score over all images of the file is chosen. If one of them is far above chance, the words alone give the
right caption away.

A group consists of two choices for two images and the same two captions, as in Winoground (Thrush et al., CVPR 2022). Its
``text_score`` is 100 if the right caption is chosen for each image, else 0. Its ``image_score`` is 100 if the right image has
the higher score with each caption, else 0. Its ``group_score`` is 100 if both other scores are 100, else 0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vse.eval.files.split import Embeddings
from vse.eval.options import CHOICES_PROTOCOL
from vse.eval.ranking.metrics import BestAnswers, Floats, Ints, MeasuredQueries, QueriesByDirection
from vse.pipeline.dataset.choices import CaptionChoice, read_choices
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChoiceSet:
    """The caption choices of one protocol. The images and captions of all choices are in the evaluated embeddings.

    ``choices`` : the choices, each with an image, captions and a kind.
    ``facts`` : facts about the choices for the result file, such as the SHA-256 of the file from which they were read.
    """

    choices: Sequence[CaptionChoice]
    facts: Mapping[str, Any]


def read_choice_sets(path: Path | None, run: Embeddings, out: Path) -> dict[str, ChoiceSet]:
    """Read the caption choices in the file ``path``, and return them by protocol; an empty dict if ``path`` is None.

    The dict has the protocols ``choices-<kind>`` only if the choices have several kinds. Choices with an id that is not in
    ``run`` are left out, and a warning counts them. Raises UserError if no choice is left, or if the file belongs to another
    data set. ``out`` is the result file; paths in ``facts`` are relative to its folder.
    """
    if path is None:
        return {}
    content, sha256 = read_choices(path)
    if content.dataset != run.dataset:
        why = "embed that data set, or, for a folder of arrays, name it in about.json"
        raise UserError(f"{path}: holds choices of {content.dataset!r}, but the embeddings are of {run.dataset!r}; {why}")
    images, captions = set(run.image_ids.tolist()), set(run.caption_ids.tolist())
    known = [one for one in content.choices if one.imgid in images and captions.issuperset(one.sentids)]
    n_unknown = len(content.choices) - len(known)
    if not known:
        raise UserError(f"{path}: none of its {n_unknown} choices has its image and its captions in the split {run.split!r}")
    if n_unknown:
        log.warning("%s: %d of %d choices are not of this split", path, n_unknown, len(content.choices))
    facts = {"file": os.path.relpath(path, out.parent), "sha256": sha256, "origin": content.origin}
    kinds = sorted({one.kind for one in known})
    sets = {CHOICES_PROTOCOL: known}
    if len(kinds) > 1:
        sets |= {f"{CHOICES_PROTOCOL}-{kind}": [one for one in known if one.kind == kind] for kind in kinds}
    return {name: ChoiceSet(some, {**facts, "choices": len(some)}) for name, some in sets.items()}


def rank_choices(run: Embeddings, choice_set: ChoiceSet) -> QueriesByDirection:
    """Return a query for each choice, with R@1: 100 if the right caption has the highest score, else 0. A tie counts as wrong.

    Two metrics have the same values for choices that do not use the image. In ``text_alone``, the score of a caption is its
    mean score over all images. In ``text_model``, it is the score of a text model; this metric is left out if a choice has no
    such scores. ``chance`` is the percentage of right random choices. If all choices are in groups of two, as in Winoground,
    the ``text_score``, ``image_score`` and ``group_score`` of a choice's group are further metrics. The answers of a query are
    the right caption, and the wrong caption with the highest score.
    """
    choices = choice_set.choices
    row_of_image = {id_: row for row, id_ in enumerate(run.image_ids.tolist())}
    row_of_caption = {id_: row for row, id_ in enumerate(run.caption_ids.tolist())}
    images = np.array([row_of_image[one.imgid] for one in choices])
    captions = [np.array([row_of_caption[id_] for id_ in one.sentids]) for one in choices]
    scores, means = _score_captions(run, images, captions)
    values = {
        "r1": _score_decisions(choices, scores),
        "text_alone": _score_decisions(choices, [means[rows] for rows in captions]),
    }
    if all(one.text_scores for one in choices):
        values["text_model"] = _score_decisions(choices, [np.array(one.text_scores) for one in choices])
    values["chance"] = np.array([100 / len(one.sentids) for one in choices])
    values |= _score_groups(choices, scores)
    right = [one.right for one in choices]
    wrong = [int(np.argmax(np.where(np.arange(len(row)) == k, -np.inf, row))) for k, row in zip(right, scores, strict=True)]
    answers = BestAnswers(
        images,
        np.array([int((row >= row[k]).sum()) - 1 for k, row in zip(right, scores, strict=True)]),
        np.array([rows[k] for k, rows in zip(right, captions, strict=True)]),
        np.array([row[k] for k, row in zip(right, scores, strict=True)]),
        np.array([rows[k] for k, rows in zip(wrong, captions, strict=True)]),
        np.array([of[k] for k, of in zip(wrong, scores, strict=True)]),
    )
    return {"i2t": MeasuredQueries(images, values, answers=answers)}


def _score_groups(choices: Sequence[CaptionChoice], scores: Sequence[Floats]) -> dict[str, Floats]:
    """Return, for each choice, the text score, image score and group score (0 or 100) of its group, as in Winoground.

    A group has two choices, for two images and the same two captions. If a choice is in no such group, the dict is empty.
    """
    members: dict[int | None, list[int]] = {}
    for number, one in enumerate(choices):
        members.setdefault(one.group, []).append(number)
    if None in members or any(len(pair) != 2 or any(len(scores[k]) != 2 for k in pair) for pair in members.values()):
        return {}
    values = {name: np.empty(len(choices)) for name in ("text_score", "image_score", "group_score")}
    for pair in members.values():
        right = [scores[k][choices[k].right] for k in pair]
        wrong = [scores[k][1 - choices[k].right] for k in pair]
        text = right[0] > wrong[0] and right[1] > wrong[1]
        image = right[0] > wrong[1] and right[1] > wrong[0]  # an image's wrong caption is the other's right one
        for name, is_right in zip(values, (text, image, text and image), strict=True):
            values[name][pair] = 100.0 * is_right
    return values


def _score_decisions(choices: Sequence[CaptionChoice], scores: Sequence[NDArray[np.floating]]) -> Floats:
    """Return for each choice 100 if the right caption has a higher score than all wrong captions, else 0."""
    right = [row[one.right] > np.delete(row, one.right).max() for one, row in zip(choices, scores, strict=True)]
    return 100.0 * np.array(right)


def _score_captions(run: Embeddings, images: Ints, captions: Sequence[Ints]) -> tuple[list[Floats], Floats]:
    """Return for each choice the scores of its captions with its image, and for each caption its mean score over all images.

    ``images`` and ``captions`` have, for each choice, the row of its image and the rows of its captions.
    """
    blocks, _ = run.score_blocks()
    found: list[Floats] = [np.empty(0)] * len(images)
    sums = np.zeros(len(run.caption_ids))
    for span in blocks.row_slices:
        scores = blocks.score(span, None).cpu().numpy()
        sums += scores.sum(0, dtype=np.float64)
        for number in np.flatnonzero((images >= span.start) & (images < span.stop)).tolist():
            found[number] = scores[images[number] - span.start, captions[number]].astype(np.float64)
    return found, sums / len(run.image_ids)
