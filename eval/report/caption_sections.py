"""Two sections of a report: choices between captions, and errors that people accept.

The first section displays photos, each with the right caption and the best wrong caption of a choice. The second section
displays photos with the first caption that the model found, if this caption belongs to another photo and people accepted it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vse.eval.files.embeddings import Embeddings, resolve_path
from vse.eval.files.judgements import Judgements, read_judgements
from vse.eval.options import CHOICES_PROTOCOL, JUDGED_PREFIX
from vse.eval.protocols.choices import rank_choices, read_choice_sets
from vse.eval.protocols.judged import rank_judged_queries
from vse.eval.ranking.metrics import Floats
from vse.eval.report.pages import DatasetPhotos, Photo
from vse.eval.report.report_inputs import ReportInput
from vse.pipeline.errors import UserError


class ChoiceCard(NamedTuple):
    """A choice to display: the photo, the right and the best wrong caption, and the kind of the choice.

    ``is_right`` is True if the model chose the right caption.
    """

    photo: Photo
    right_caption: str
    wrong_caption: str
    is_right: bool
    kind: str


def sample_choices(
    report_input: ReportInput, photos: DatasetPhotos, n: int, seed: int, missing: list[str]
) -> list[ChoiceCard]:
    """Return up to ``n`` wrong and ``n`` right choices, sampled at random, the wrong choices first.

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
    cards = []
    for wanted in (False, True):
        for k in rng.permutation(np.flatnonzero(is_right == wanted))[:n].tolist():
            captions = (run.caption_ids[rows[k]] for rows in (answers.right_answers, answers.wrong_answers))
            right, wrong = (photos.find_caption(int(sentid)) for sentid in captions)
            photo = photos.find_photo(choice_set.choices[k].imgid)
            cards.append(ChoiceCard(photo, right, wrong, wanted, choice_set.choices[k].kind.replace("_", " ")))
    return cards


N_ACCEPTED = 10  # number of accepted answers displayed for each kind of judgements


@dataclass(frozen=True)
class AcceptedAnswer:
    """A photo, the first caption that the model found for it, the photo's own caption, and the verdict of the raters."""

    photo: Photo
    caption: str
    own_caption: str
    verdict: str


def find_accepted_answers(report_input: ReportInput, photos: DatasetPhotos, missing: list[str]) -> list[AcceptedAnswer]:
    """Return wrong first captions that people accept, by the judgements that a result names, highest grades first.

    If a file of judgements is not where the result names it, or has changed, a sentence about it is added to ``missing``.
    """
    answers: list[AcceptedAnswer] = []
    run = report_input.embeddings
    for name, facts in report_input.result.judgements.items():
        file = resolve_path(report_input.path, str(facts.get("file")))
        try:
            if run is None:
                raise UserError("no embeddings")
            judgements = read_judgements(name.removeprefix(JUDGED_PREFIX), file, run, photos.dataset.path)
        except UserError:
            missing.append(f"the judgements {file.name} cannot be read: no answers that people accept")
            continue
        if judgements.facts["sha256"] != facts.get("sha256"):
            missing.append(f"the judgements {file.name} have changed since the evaluation: no answers that people accept")
            continue
        answers += _list_accepted_answers(run, judgements, photos)
    return answers


def _list_accepted_answers(run: Embeddings, judgements: Judgements, photos: DatasetPhotos) -> list[AcceptedAnswer]:
    queries = rank_judged_queries(run, judgements)["i2t"]
    assert queries.answers is not None
    wrong_but_accepted = (queries.values_by_metric["r1"] > 0) & (queries.values_by_metric["r1_own"] == 0)
    index_of = {
        pair: index
        for index, pair in enumerate(zip(judgements.image_ids.tolist(), judgements.caption_ids.tolist(), strict=True))
    }
    found = []
    for row in np.flatnonzero(wrong_but_accepted):
        image_row, caption_row = int(queries.answers.queries[row]), int(queries.answers.right_answers[row])
        found.append((index_of[int(run.image_ids[image_row]), int(run.caption_ids[caption_row])], image_row, caption_row))
    found.sort(key=lambda one: (-judgements.grades[one[0]], one[1]))
    answers = []
    for index, image_row, caption_row in found[:N_ACCEPTED]:
        photo = photos.find_photo(int(run.image_ids[image_row]))
        caption = photos.find_caption(int(run.caption_ids[caption_row]))
        answers.append(
            AcceptedAnswer(photo, caption, photo.caption, _describe_verdict(judgements.kind, judgements.ratings[index]))
        )
    return answers


def _describe_verdict(kind: str, ratings: Floats) -> str:
    if kind == "expert":
        return f"experts: {', '.join(f'{rating:g}' for rating in ratings)} of 4"
    return f"{100 * ratings[0]:.0f}% of a crowd say yes" if kind == "crowd" else f"grade {ratings[0]:g}"
