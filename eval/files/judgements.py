"""Readers of people's judgements of pairs of an image and a caption: the files of Flickr8k, and TREC qrels.

Hodosh, Young and Hockenmaier, "Framing Image Description as a Ranking Task", JAIR 2013, collected the judgements of Flickr8k.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vse.eval.files.embeddings import find_dataset_file
from vse.eval.files.split import Embeddings
from vse.eval.options import JUDGED_PREFIX, AllEvaluateOptions
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError, did_you_mean, to_printable_line
from vse.pipeline.files.inputs import InputFile

log = logging.getLogger(__name__)
_N_LISTED_IDS = 5  # number of unknown ids in a message
_MAX_BAD_SHARE = 0.01  # a file with a larger share of unreadable lines is rejected
_TREC_ID = re.compile(r"(image|caption)-(-?\d{1,18})")  # ids in the files of vse-eval --trec


@dataclass(frozen=True)
class Judgements:
    """The judged pairs of a file.

    Attributes
    ----------
    kind : the kind of the file: ``expert``, ``crowd`` or ``qrels``
    image_ids, caption_ids : (n_pairs,) ids of the image and of the caption of each pair
    ratings : (n_pairs, n_raters) ``expert``: scores from 1 to 4 of three experts; ``crowd``: the share of people who answered
        that the caption describes the image; ``qrels``: the grade in the file
    grades : (n_pairs,) integers from 0: the sum of the experts' scores minus 3, the crowd's share in percent, or the grade
    min_right_grade : the lowest grade of a right pair
    path : the file
    facts : the facts about the judgements for a result file, such as the SHA-256 of ``path``
    """

    kind: str
    image_ids: Int[np.ndarray, " n_pairs"]
    caption_ids: Int[np.ndarray, " n_pairs"]
    ratings: Float[np.ndarray, "n_pairs n_raters"]
    grades: Int[np.ndarray, " n_pairs"]
    min_right_grade: int
    path: Path
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class _JudgementFormat:
    """The format of a file with people's judgements. Each line has the judgement of a pair of an image and a caption.

    A line has ``n_fields`` fields, separated by blanks. Error messages describe the fields by the text ``description``. From
    the fields of a line, ``get_names`` returns the two names of the pair, and ``parse_ratings`` returns its ratings.
    ``compute_grade`` returns the grade of the pair from its ratings. The pair is right if its grade is at least
    ``min_right_grade``.
    """

    n_fields: int
    description: str
    get_names: Callable[[Sequence[str]], tuple[str, str]]
    parse_ratings: Callable[[Sequence[str]], list[float]]
    compute_grade: Callable[[Sequence[float]], float]
    min_right_grade: int


def _parse_expert_scores(fields: Sequence[str]) -> list[float]:
    scores = [float(field) for field in fields[2:]]
    if not all(1 <= score <= 4 for score in scores):
        raise ValueError
    return scores


def _parse_yes_share(fields: Sequence[str]) -> list[float]:
    yes, no = int(fields[3]), int(fields[4])
    return [yes / (yes + no)]


def _parse_grade(fields: Sequence[str]) -> list[float]:
    return [float(max(0, int(fields[3])))]


JUDGEMENT_FORMATS = {
    "expert": _JudgementFormat(
        5, "image, caption and three scores from 1 to 4", lambda f: (f[0], f[1]), _parse_expert_scores, lambda r: sum(r) - 3, 6
    ),
    "crowd": _JudgementFormat(
        5, "image, caption, share, yes and no", lambda f: (f[0], f[1]), _parse_yes_share, lambda r: round(100 * r[0]), 50
    ),
    "qrels": _JudgementFormat(4, "query, 0, answer and grade", lambda f: (f[0], f[2]), _parse_grade, lambda r: r[0], 1),
}


def read_judgements(kind: str, path: Path, embeddings: Embeddings, dataset_file: Path | None) -> Judgements:
    """Read judged pairs of an image and a caption from the file ``path``, which is of a ``kind`` such as ``expert``.

    Pairs whose image or caption is not in ``embeddings`` are left out, and a warning lists some of them. Lines that cannot be
    read are also left out, with a warning. The result has the numbers of these pairs and lines.

    A file may name an image ``1.jpg``, and a caption ``1.jpg#2``. ``dataset_file`` is the ``dataset.json`` in which such names
    are looked up. If it is None, such names raise UserError. UserError is also raised if more than 1% of the lines cannot be
    read, or if no pair is in the embeddings.
    """
    file = InputFile(path)
    lines = file.read().decode("utf-8", "replace").splitlines()
    file_format = JUDGEMENT_FORMATS[kind]
    find_ids = _IdFinder(path, embeddings, dataset_file)
    pairs: list[tuple[int, int]] = []
    ratings: list[list[float]] = []
    bad: list[int] = []
    unknown: list[str] = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields:
            continue
        try:
            if len(fields) != file_format.n_fields:
                raise ValueError
            line_ratings = file_format.parse_ratings(fields)
        except (ValueError, ZeroDivisionError):
            bad.append(number)
            continue
        ids = find_ids(*file_format.get_names(fields))
        if ids is None:
            unknown.append(" and ".join(file_format.get_names(fields)))
        else:
            pairs.append(ids)
            ratings.append(line_ratings)
    n_lines = len(pairs) + len(unknown) + len(bad)
    if len(bad) > _MAX_BAD_SHARE * n_lines:
        raise UserError(
            f"{path}: line {bad[0]} is not a judgement ({file_format.description}), as {len(bad)} of {n_lines} lines"
        )
    if bad:
        log.warning("%s: %d of %d lines cannot be read and are left out, e.g. line %d", path, len(bad), n_lines, bad[0])
    if unknown:
        listed = to_printable_line(", ".join(unknown[:_N_LISTED_IDS]))
        log.warning("%s: %d of %d pairs are not of this split, e.g. %s", path, len(unknown), n_lines, listed)
    if not pairs:
        raise UserError(f"{path}: none of its {n_lines} pairs has an image and a caption of the split {embeddings.split!r}")
    grades = np.array([file_format.compute_grade(one) for one in ratings], np.int64)
    facts = {
        "sha256": file.sha256,
        "pairs": len(pairs),
        "right_pairs": int((grades >= file_format.min_right_grade).sum()),
        "unknown_pairs": len(unknown),
        "unreadable_lines": len(bad),
    }
    image_ids, caption_ids = np.array(pairs, np.int64).T
    return Judgements(kind, image_ids, caption_ids, np.array(ratings), grades, file_format.min_right_grade, path, facts)


class _IdFinder:
    """A function from the two names of a pair to the ids of its image and caption; None if one of them is not in the split.

    A name is an id (``12``), a TREC id (``image-12``, ``caption-34``), the name of an image file (``1.jpg``), or the name of
    an image file with the index of a caption (``1.jpg#2``). If both names are ids, the first one belongs to the image.
    """

    def __init__(self, path: Path, embeddings: Embeddings, dataset_file: Path | None) -> None:
        self._path, self._dataset_file = path, dataset_file
        self._images, self._captions = set(embeddings.image_ids.tolist()), set(embeddings.caption_ids.tolist())
        self._ids_by_name: dict[str, int] | None = None

    def __call__(self, one: str, other: str) -> tuple[int, int] | None:
        if _find_trec_id_kind(one) == "caption" or "#" in one:
            one, other = other, one
        image, caption = self._find(one), self._find(other)
        if image is None or caption is None or image not in self._images or caption not in self._captions:
            return None
        return image, caption

    def _find(self, name: str) -> int | None:
        if match := _TREC_ID.fullmatch(name):
            return int(match[2])
        if re.fullmatch(r"-?\d{1,18}", name):
            return int(name)
        if self._ids_by_name is None:
            if self._dataset_file is None:
                raise UserError(f"{self._path}: names files, e.g. {name}; their data set is needed: --dataset dataset.json")
            self._ids_by_name = _list_ids_by_name(load_dataset_file(self._dataset_file))
        return self._ids_by_name.get(name)


def _find_trec_id_kind(name: str) -> str | None:
    match = _TREC_ID.fullmatch(name)
    return match[1] if match else None


def _list_ids_by_name(dataset: Dataset) -> dict[str, int]:
    """Return a dict from names to ids: images by file name, such as ``1.jpg``, and their captions such as ``1.jpg#2``."""
    ids: dict[str, int] = {}
    for image in dataset.images:
        name = PurePosixPath(image.file).name
        ids[name] = image.imgid
        ids.update({f"{name}#{k}": caption.sentid for k, caption in enumerate(image.captions)})
    return ids


def read_judgement_files(options: AllEvaluateOptions, file: Path, run: Embeddings) -> dict[str, Judgements]:
    """Read the judgement files that ``options`` name. Return the judgements by protocol, such as ``judged-expert``.

    ``run`` has the ids of the complete test set, and was read from ``file``. The file names of the images are read from the
    ``dataset.json`` in ``options.dataset``; if this option is None, from the ``dataset.json`` whose path ``run`` records.
    """
    files = parse_judgement_files(options.judgements, options.qrels)
    if options.dataset is not None and not files:
        raise UserError(f"{options.dataset}: --dataset is for names in --judgements; leave it out")
    dataset_file = options.dataset or find_dataset_file(file, run)
    return {f"{JUDGED_PREFIX}{kind}": read_judgements(kind, path, run, dataset_file) for kind, path in files.items()}


def parse_judgement_files(texts: Iterable[str], qrels: Path | None) -> dict[str, Path]:
    """Return a dict from kinds of judgements to files, from texts such as ``expert=FILE`` or ``expert=FILE,crowd=FILE``.

    ``qrels`` is a further file, of the kind ``qrels``, or None. Raises UserError for an unknown kind, or for two files of one
    kind.
    """
    given = [("qrels", str(qrels))] if qrels else []
    for text in [part for option in texts for part in option.split(",")]:
        kind, is_pair, name = text.partition("=")
        if not (is_pair and name) or kind not in JUDGEMENT_FORMATS:
            raise UserError(
                f"--judgements {text}: KIND=FILE is needed, e.g. expert=FILE{did_you_mean(kind, JUDGEMENT_FORMATS)}"
            )
        given.append((kind, name))
    repeated = next((kind for kind, _ in given if [other for other, _ in given].count(kind) > 1), None)
    if repeated:
        raise UserError(f"--judgements: two files of the kind {repeated}; evaluate them one after the other")
    return {kind: Path(name) for kind, name in given}
