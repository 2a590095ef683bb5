"""Pairs of images and pairs of captions that people judged: the files of Crisscrossed Captions (CxC).

Parekh et al., "Crisscrossed Captions: Extended Intramodal and Intermodal Semantic Similarity Judgments for MS-COCO", EACL
2021.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vse.pipeline.errors import UserError
from vse.pipeline.input_files import reading
from vse.pipeline.read_once import ReadOnce

IMAGE_FILE, CAPTION_FILE = "sis_test.csv", "sts_test.csv"
IMAGE_THRESHOLD, CAPTION_THRESHOLD = 2.5, 3.0  # the score, of 0 to 5, from which on a pair is right
_NUMBER = re.compile(r"(?:.*[_:])?(\d{1,18})(?:\.jpg)?")


class JudgedPairs(NamedTuple):
    """Pairs (n, 2) of COCO's numbers that are right, each in one order, and the SHA-256 of the files that they are from."""

    images: NDArray[np.int64]
    captions: NDArray[np.int64]
    files: dict[str, str]


def read_judged_pairs(folder: Path) -> JudgedPairs:
    """The right pairs of ``sis_test.csv`` (images) and ``sts_test.csv`` (captions), which CxC publishes.

    A pair of images is right from a score of 2.5 on, one of captions from 3. Something paired with itself is left out.
    :class:`UserError` names a file that is missing, or a row that is none of theirs.
    """
    images, captions = ReadOnce(folder / IMAGE_FILE), ReadOnce(folder / CAPTION_FILE)
    return JudgedPairs(
        _pairs(images, ("image1", "image2"), IMAGE_THRESHOLD),
        _pairs(captions, ("caption1", "caption2"), CAPTION_THRESHOLD),
        {IMAGE_FILE: images.sha256, CAPTION_FILE: captions.sha256},
    )


def _pairs(file: ReadOnce, columns: tuple[str, str], threshold: float) -> NDArray[np.int64]:
    import pandas as pd

    with reading(file.path, "a CSV file with a header"):
        table = pd.read_csv(file.stream, dtype=str, keep_default_na=False, index_col=False)
    lacking = [column for column in (*columns, "agg_score") if column not in table]
    if lacking:
        raise UserError(f"{file.path}: has no column {' and no '.join(lacking)}; it is no file of CxC")
    pairs = []
    for row, (first, second, score) in enumerate(zip(*(table[name] for name in (*columns, "agg_score")), strict=True), 1):
        one, other = _NUMBER.fullmatch(first), _NUMBER.fullmatch(second)
        if one is None or other is None or not re.fullmatch(r"\d+(\.\d*)?", score):
            said = ", ".join(cell[:40] for cell in (first, second, score))
            raise UserError(f"{file.path}: row {row}: {said}: not two numbers of COCO and a score")
        if float(score) >= threshold and one[1] != other[1]:
            pairs.append((int(one[1]), int(other[1])))
    return np.array(pairs, np.int64).reshape(-1, 2)
