"""The choices in a report: photos with the caption that the model chose, and the other one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vse.eval.defaults import CHOICES_PROTOCOL
from vse.eval.files.embeddings import resolve_path
from vse.eval.protocols.choices import rank_choices, read_choice_sets
from vse.eval.report.pages import DatasetPhotos, Photo
from vse.eval.report.report_inputs import ReportInput
from vse.pipeline.errors import UserError


class ShownChoice(NamedTuple):
    """A photo, the right and the best wrong caption, whether the model chose the right one, and the kind of the choice."""

    photo: Photo
    right_caption: str
    wrong_caption: str
    is_right: bool
    kind: str


def sample_choices(
    report_input: ReportInput, photos: DatasetPhotos, n: int, seed: int, missing: list[str]
) -> list[ShownChoice]:
    """Return up to ``n`` wrong and ``n`` right decisions, sampled at random, the wrong ones first.

    If the file of choices is not where the result names it, or has changed, a sentence about it is added to ``missing``.
    """
    facts, run = report_input.result.choices.get(CHOICES_PROTOCOL, {}), report_input.embeddings
    file = resolve_path(report_input.path, str(facts.get("file")))
    try:
        if run is None:
            raise UserError("no embeddings")
        choice_set = read_choice_sets(file, run, report_input.path)[CHOICES_PROTOCOL]
        if choice_set.facts["sha256"] != facts.get("sha256"):
            raise UserError("changed")
    except UserError:
        missing.append(f"the choices {file.name} cannot be read, or have changed since the evaluation: none are shown")
        return []
    queries = rank_choices(run, choice_set)["i2t"]
    answers = queries.answers
    assert answers is not None
    is_right = queries.values_by_metric["r1"] > 0
    rng = np.random.default_rng(seed)
    shown = []
    for wanted in (False, True):
        for k in rng.permutation(np.flatnonzero(is_right == wanted))[:n].tolist():
            captions = (run.caption_ids[rows[k]] for rows in (answers.right_answers, answers.wrong_answers))
            right, wrong = (photos.find_caption(int(sentid)) for sentid in captions)
            photo = photos.find_photo(choice_set.choices[k].imgid)
            shown.append(ShownChoice(photo, right, wrong, wanted, choice_set.choices[k].kind.replace("_", " ")))
    return shown
