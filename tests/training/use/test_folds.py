"""A cross-validation: a data set in folds, a model trained on each fold, and all of them evaluated and compared as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.conftest import COMMAND, Capture, Edit, Fails, done
from vse.cli import data_main
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.splits_and_noise import assign_images_to_parts
from vse.training.cli import embed_main, train_main

N_FOLDS = 3


@pytest.fixture(scope="module")
def folds(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo of 66 images in three folds. Read only."""
    out = tmp_path_factory.mktemp("folds") / "data" / "demo_folds"
    done(data_main, "folds", demo, "--out", out, "--count", N_FOLDS)
    return out


@pytest.fixture(scope="module")
def runs(folds: Path, cache: Path) -> Path:
    """Runs of two experiments on each fold, with their test embeddings. Read only."""
    out = folds.parent.parent / "runs"
    for name, sets in {"vsepp": [], "wide": ["--set", "model.dim=24", "--name", "wide"]}.items():
        for number in range(N_FOLDS):
            run = out / name / f"seed-{number}"
            given = ["--captions", folds / f"fold-{number}.json", "--seed", number, "--out", run]
            done(
                train_main,
                "--features",
                cache,
                *given,
                *COMMAND,
                "--set",
                "train.epochs=1",
                "--set",
                "train.decay_after=1",
                *sets,
            )
            done(embed_main, run)
    return out


def result_of(files: list[Path], out: Path, *options: object) -> dict[str, Any]:
    done(eval_main, *files, "--out", out, *options)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_each_image_is_a_test_image_once_and_a_validation_image_once(folds: Path, demo: Path) -> None:
    whole, parts = load_dataset_file(demo), [load_dataset_file(folds / f"fold-{number}.json") for number in range(N_FOLDS)]
    assert [(part.name, part.fold, part.parent) for part in parts] == [
        ("demo_folds", f"{number} of 3", "demo") for number in range(N_FOLDS)
    ]
    for split in ("test", "val"):
        ids = [image.imgid for part in parts for image in part.split(split)]
        assert sorted(ids) == sorted(image.imgid for image in whole.images)
    for part in parts:
        assert [(image.imgid, image.captions) for image in part.images] == [(i.imgid, i.captions) for i in whole.images]
        assert {split: len(images) for split, images in part.splits.items()} == {"train": 22, "val": 22, "test": 22}
    assert [image.imgid for image in parts[0].split("val")] == [image.imgid for image in parts[1].split("test")]


def test_parts_depend_on_the_seed_alone_and_have_nearly_equal_sizes() -> None:
    ids = list(range(100, 111))
    parts = assign_images_to_parts(ids, 4, seed=0)
    assert parts == assign_images_to_parts(ids[::-1], 4, seed=0) != assign_images_to_parts(ids, 4, seed=1)
    assert sorted(np.bincount(list(parts.values()))) == [2, 3, 3, 3]
    assert parts == dict(zip(ids, [3, 1, 2, 1, 0, 1, 2, 2, 0, 3, 0], strict=True))  # on every machine


def test_folds_are_evaluated_together_each_query_in_its_own_fold(runs: Path, tmp_path: Path, demo: Path) -> None:
    files = [runs / "vsepp" / f"seed-{number}" / "test.h5" for number in range(N_FOLDS)]
    alone = [result_of([file], tmp_path / f"{k}.json", "--bootstrap", 0)["protocols"]["full"] for k, file in enumerate(files)]
    result = result_of(files[::-1], tmp_path / "all.json", "--bootstrap", 100)
    assert (result["n_images"], result["n_captions"], result["split"]) == (66, 330, "test of 3 folds")
    whole = result["protocols"]["full"]
    assert whole["folds"] == N_FOLDS
    for direction, metric in (("i2t", "r1"), ("t2i", "r10"), ("i2t", "medr")):
        each = [one[direction][metric] for one in alone]
        assert whole[direction][metric] == pytest.approx(np.mean(each))
        assert [fold[direction][metric] for fold in whole["per_fold"]] == each
    low, high = whole["ci95"]["rsum"]
    assert low < whole["rsum"] < high
    ids = sorted(id_ for file in files for id_ in read_embeddings(file).image_ids)
    assert ids == sorted(image.imgid for image in load_dataset_file(demo).images)


def test_two_models_are_compared_over_all_folds(runs: Path, tmp_path: Path) -> None:
    files = [runs / name / f"seed-{number}" / "test.h5" for name in ("vsepp", "wide") for number in range(N_FOLDS)]
    done(eval_main, "--compare", *files, "--bootstrap", 100, "--out", tmp_path / "compared.json")
    compared = json.loads((tmp_path / "compared.json").read_text())
    sides = [
        result_of(files[start : start + N_FOLDS], tmp_path / f"{start}.json", "--bootstrap", 0)["protocols"]["full"]["rsum"]
        for start in (0, N_FOLDS)
    ]
    rsum = compared["comparisons"]["full"]["rsum"]
    assert (rsum["a"], rsum["b"]) == (pytest.approx(sides[0]), pytest.approx(sides[1]))
    assert (compared["n_images"], compared["split"]) == (66, "test of 3 folds")
    assert {fact["name"] for fact in compared["differing_facts"]} == {"model.dim"}


def test_a_missing_fold_is_named(runs: Path, fails: Fails) -> None:
    files = [runs / "vsepp" / f"seed-{number}" / "test.h5" for number in (0, 2)]
    assert "1 of fold 0 of 3, 0 of fold 1 of 3, 1 of fold 2 of 3" in fails(eval_main, *files)


def test_a_run_is_not_tested_on_another_fold(runs: Path, folds: Path, tmp_path: Path, fails: Fails) -> None:
    given = [
        "--captions",
        folds / "fold-2.json",
        "--out",
        tmp_path / "test.h5",
    ]  # the test images are the training images of fold 0
    assert "was trained on" in fails(embed_main, runs / "vsepp" / "seed-0", *given)


def test_an_encoder_fitted_to_other_training_captions_is_refused(
    cache: Path, tfidf: Path, folds: Path, tmp_path: Path, fails: Fails
) -> None:
    given = ["--captions", folds / "fold-0.json", "--caption-features", tfidf, "--experiment", "cca_tfidf", "--out", tmp_path]
    assert "fitted to other training captions than those of fold 0 of 3" in fails(train_main, "--features", cache, *given)


def test_wrong_requests_are_refused(
    demo: Path, folds: Path, tmp_path: Path, fails: Fails, edit: Edit, capsys: Capture
) -> None:
    out = ["--out", tmp_path / "out"]
    assert "is a fold itself" in fails(data_main, "folds", folds / "fold-0.json", *out)
    assert "as there are images, 66" in fails(data_main, "folds", demo, *out, "--count", 67)
    assert "need another name" in fails(data_main, "folds", demo, *out, "--name", "demo")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fold-1.json").write_text("{}")
    assert "exists and is not a fold of the data set 'out'" in fails(data_main, "folds", demo, *out)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fold-1.json"]
    copy = Path(shutil.copy(folds / "fold-0.json", tmp_path))
    wrong = edit(copy, lambda content: content.update(fold="3 of 3"))
    assert 'such as "0 of 5"' in fails(data_main, "check", wrong)


def test_one_fold_is_written_alone(demo: Path, folds: Path, tmp_path: Path) -> None:
    done(data_main, "folds", demo, "--out", tmp_path / "demo_folds", "--count", N_FOLDS, "--only", 1)
    assert sorted(path.name for path in (tmp_path / "demo_folds").iterdir()) == ["fold-1.json", "images"]
    assert (tmp_path / "demo_folds" / "fold-1.json").read_bytes() == (folds / "fold-1.json").read_bytes()
