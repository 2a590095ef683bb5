"""Validation among folds of images, against the metrics of each fold alone."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.conftest import experiment
from vse.eval.ranking.metrics import metrics
from vse.train.kinds import pack
from vse.train.solvers.base import folds_of
from vse.train.solvers.encode import encode, ranks
from vse.train.training import train
from vse.train.use.model import load_run


def test_folds_are_consecutive_images_with_their_captions() -> None:
    images, image_of = torch.arange(7.0)[:, None], torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6])
    captions = 10 * torch.arange(11.0)[:, None]
    folds = list(folds_of(pack([(images,)]), pack([(captions,)]), image_of, 3))
    assert [fold[0].vectors[:, 0].tolist() for fold in folds] == [[0, 1, 2], [3, 4, 5]]
    assert [fold[1].vectors[:, 0].tolist() for fold in folds] == [[0, 10, 20, 30, 40, 50], [60, 70, 80, 90]]
    assert [fold[2].tolist() for fold in folds] == [[0, 0, 1, 2, 2, 2], [0, 1, 1, 2]]


@pytest.mark.parametrize("size", [None, 7, 1000])
def test_a_split_no_larger_than_a_fold_is_one(size: int | None) -> None:
    sides = pack([(torch.rand(7, 2),)]), pack([(torch.rand(9, 2),)])
    (fold,) = folds_of(*sides, torch.zeros(9, dtype=torch.int64), size)
    assert fold[:2] == sides


def test_validation_takes_means_over_folds(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.epochs=1", "train.validate_fold=3"), out=tmp_path / "run")
    opened = load_run(run, "val", device="cpu")
    images, captions = encode(opened.model, opened.split, opened.device)
    found = []
    for first in (0, 3):
        image_of = torch.arange(3).repeat_interleave(5)
        own = pack([(images.vectors[first : first + 3],)]), pack([(captions.vectors[5 * first : 5 * first + 15],)])
        found.append(metrics(ranks(opened.model, *own, image_of))["rsum"])
    row = next(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert float(row["rsum"]) == pytest.approx(np.mean(found))
