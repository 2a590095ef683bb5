from __future__ import annotations

from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.training.conftest import Log, experiment, numbers
from tests.training.solvers.test_cca import pairs, score_pairs, slow_directions, split, vectors
from vse.pipeline.errors import UserError
from vse.training.run.folder import RunFolder
from vse.training.solvers.closed_form import fit_ridge_maps, reduce_or_pad_maps, sample_anchor_pairs
from vse.training.training import train
from vse.training.use.embed import embed_split

Matrix = NDArray[np.float64]
RIDGE = ["solver=ridge", "solver.regularization=[1.0, 0.1]", "model.dim=256", "caption_feature=tfidf"]
RIDGE += ["model.caption_encoder=linear"]
CSA = ["solver=csa", "solver.regularization=[1.0, 0.1]", "solver.directions=[3, 6, 500]", "model.dim=8"]
CSA += ["model.image_encoder=weighted", "model.caption_encoder=linear", "model.normalize_image=false", "caption_feature=tfidf"]
ASIF = ["solver=asif", "solver.k=[5, 20]", "solver.power=[2, 8]", "model.dim=60", "caption_feature=tfidf"]
ASIF += ["model.image_encoder=relative", "model.caption_encoder=relative"]


def best_row(run: Path) -> dict[str, float]:
    return max(numbers(run), key=lambda row: row["rsum"])


def embedded(run: Path) -> tuple[Matrix, Matrix]:
    with h5py.File(embed_split(run, run.parent / "test.h5")) as file:
        return file["images"][:].astype(np.float64), file["captions"][:].astype(np.float64)


def unit(rows: Matrix) -> Matrix:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def sides(cache: Path, captions: Path, demo: Path) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Vectors of both sides of all training pairs, and of the test split."""
    _, sentids, image_of_caption = split(demo, "train")
    imgids, test_sentids, _ = split(demo, "test")
    train_sides = vectors(cache, image_of_caption), vectors(captions, sentids)
    return *train_sides, vectors(cache, imgids), vectors(captions, test_sentids)


def slow_regression(x: Matrix, y: Matrix, regularization: float) -> Matrix:
    """The A that minimises |x - A y|^2 / n + r |A|^2, as an ordinary least-squares problem."""
    x, y = x - x.mean(0), y - y.mean(0)
    r = regularization * y.var(0).mean()
    rows = np.vstack([y / np.sqrt(len(y)), np.sqrt(r) * np.eye(y.shape[1])])
    targets = np.vstack([x / np.sqrt(len(y)), np.zeros((y.shape[1], x.shape[1]))])
    return np.asarray(np.linalg.lstsq(rows, targets)[0].T)


@pytest.mark.parametrize("regularization", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize(("dim_x", "dim_y"), [(5, 8), (8, 5), (1, 4)])
def test_ridge_minimises_the_regularised_squares(dim_x: int, dim_y: int, regularization: float) -> None:
    x, y = pairs(dim_x, dim_y)
    statistics = score_pairs(x, y)
    of_captions, of_images = slow_regression(x, y, regularization), slow_regression(y, x, regularization)
    images, captions = fit_ridge_maps(statistics, "captions", regularization)
    np.testing.assert_array_equal(images, np.eye(dim_x))
    np.testing.assert_allclose(captions, of_captions, rtol=1e-7, atol=1e-9)
    images, captions = fit_ridge_maps(statistics, "images", regularization)
    np.testing.assert_allclose(images, of_images, rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(captions, np.eye(dim_y))
    s_x, s_y = np.sqrt(x.var(0).sum()), np.sqrt(y.var(0).sum())
    images, captions = fit_ridge_maps(statistics, "both", regularization)
    np.testing.assert_allclose(images, np.vstack([np.eye(dim_x) / s_x, of_images / s_y]), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(captions, np.vstack([of_captions / s_x, np.eye(dim_y) / s_y]), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dim", [1, 3, 5, 9])
def test_a_smaller_space_keeps_what_varies_most(dim: int) -> None:
    x, y = pairs(5, 8)
    statistics = score_pairs(x, y)
    images, captions = fit_ridge_maps(statistics, "captions", 0.1)
    small_images, small_captions = reduce_or_pad_maps(images, captions, statistics, dim)
    both = np.vstack([(x - x.mean(0)) @ images.T, (y - y.mean(0)) @ captions.T])
    _, _, principal = np.linalg.svd(both, full_matrices=False)
    kept = both @ principal[:dim].T @ principal[:dim]
    small = np.vstack([(x - x.mean(0)) @ small_images.T, (y - y.mean(0)) @ small_captions.T])
    assert small.shape[1] == dim
    np.testing.assert_allclose(small @ small.T, kept @ kept.T, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def ridge(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(cache, experiment(*RIDGE), out=tmp_path_factory.mktemp("runs") / "ridge")


@pytest.fixture(scope="module")
def csa(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(cache, experiment(*CSA), out=tmp_path_factory.mktemp("runs") / "csa")


@pytest.fixture(scope="module")
def asif(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(cache, experiment(*ASIF), out=tmp_path_factory.mktemp("runs") / "asif")


def test_each_point_of_the_grid_is_tried_and_the_best_is_kept(ridge: Path, csa: Path, asif: Path) -> None:
    assert [row["regularization"] for row in numbers(ridge)] == [1.0, 0.1]
    assert [(row["regularization"], row["directions"]) for row in numbers(csa)] == list(product([1.0, 0.1], [8, 6, 3]))
    assert [(row["k"], row["power"]) for row in numbers(asif)] == list(product([5, 20], [2, 8]))
    for run in (ridge, csa, asif):
        record = RunFolder(run).read_record()
        assert (record["state"], record["best_rsum"]) == ("finished", best_row(run)["rsum"])


def test_ridge_compares_images_with_mapped_captions(ridge: Path, cache: Path, tfidf: Path, demo: Path) -> None:
    x, y, images, captions = sides(cache, tfidf, demo)
    mapped = (captions - y.mean(0)) @ slow_regression(x, y, best_row(ridge)["regularization"]).T
    found = embedded(ridge)
    dim = images.shape[1]
    np.testing.assert_allclose(found[0][:, :dim], unit(images - x.mean(0)), atol=2e-4)
    np.testing.assert_allclose(found[1][:, :dim], unit(mapped), atol=2e-4)


def test_csa_weighs_the_product_and_not_the_norms(csa: Path, cache: Path, tfidf: Path, demo: Path) -> None:
    x, y, images, captions = sides(cache, tfidf, demo)
    best = best_row(csa)
    left, right, correlations = slow_directions(score_pairs(x, y), int(best["directions"]), best["regularization"])
    seen, read = (images - x.mean(0)) @ left, (captions - y.mean(0)) @ right
    slow = np.empty((len(seen), len(read)))
    for i, a in enumerate(seen):
        for j, b in enumerate(read):
            slow[i, j] = sum(correlations * a * b) / (np.linalg.norm(a) * np.linalg.norm(b))
    found = embedded(csa)
    np.testing.assert_allclose(found[0] @ found[1].T, slow, atol=2e-4)


def test_asif_compares_sparse_powers_of_cosines_with_known_pairs(asif: Path, cache: Path, tfidf: Path, demo: Path) -> None:
    x, y, images, captions = sides(cache, tfidf, demo)
    best, (_, _, image_of_caption) = best_row(asif), split(demo, "train")
    anchors = sample_anchor_pairs(np.unique(image_of_caption, return_inverse=True)[1], 60, 0)
    slow: list[Matrix] = []
    for rows, known in ((images, x[anchors]), (captions, y[anchors])):
        relative = np.zeros((len(rows), 60))
        for i, row in enumerate(rows):
            cosines = [row @ anchor / (np.linalg.norm(row) * np.linalg.norm(anchor)) for anchor in known]
            for a in np.argsort(cosines)[::-1][: int(best["k"])]:
                relative[i, a] = max(cosines[a], 0) ** best["power"]
        slow.append(unit(relative))
    for one, other in zip(embedded(asif), slow, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=9), n=st.integers(1, 40), seed=st.integers(0, 99))
def test_anchors_are_of_as_many_images_as_there_are(counts: list[int], n: int, seed: int) -> None:
    image_indices = np.repeat(np.arange(len(counts)), counts)
    anchors = sample_anchor_pairs(image_indices, n, seed)
    assert len(set(anchors.tolist())) == len(anchors) == min(n, len(image_indices))
    assert (np.diff(anchors) > 0).all()
    taken = np.bincount(image_indices[anchors], minlength=len(counts))
    assert all(mine >= taken.max() - 1 or mine == all_of for mine, all_of in zip(taken, counts, strict=True))


def test_too_few_anchors_and_singular_covariances(cache: Path, tfidf: Path, tmp_path: Path, caplog: Log) -> None:
    out = train(cache, experiment(*ASIF, "model.dim=900", "solver.k=[5]", "solver.power=[2]"), out=tmp_path / "run")
    assert "training pairs can be anchors, not 900" in caplog.text
    weights = RunFolder(out).read_best_weights()["image_encoder.anchors"]
    n_pairs = RunFolder(out).read_record()["n_train_pairs"]
    assert [bool(row.any()) for row in weights] == [True] * n_pairs + [False] * (900 - n_pairs)
    x, y = pairs(5, 8)
    y[:, 3] = 0
    with pytest.raises(UserError, match=r"solver\.regularization 0 is too small"):
        fit_ridge_maps(score_pairs(x, y), "captions", 0.0)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([*RIDGE, "model.image_encoder=identity", "model.dim=256"], "both encoders must have a single layer"),
        ([*CSA, "model.image_encoder=linear"], "csa requires model.image_encoder=weighted"),
        ([*CSA, "model.normalize_image=true"], "csa requires model.image_encoder=weighted"),
        ([*ASIF, "model.caption_encoder=linear"], "asif requires model.image_encoder=relative"),
        ([*RIDGE, "model.similarity=order"], "requires a comparison by inner products"),
        ([*RIDGE, "caption_feature=null"], "ridge reads captions as vectors"),
    ],
)
def test_what_they_cannot_do_is_one_line(sets: list[str], message: str, cache: Path, tfidf: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        train(cache, experiment(*sets), out=tmp_path / "run")
    assert "\n" not in str(refusal.value)
