from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.eval.evaluating import write_result
from tests.training.conftest import Patch, assert_same, experiment, interrupted, numbers, state
from vse.eval import DEFAULT_KS
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import Interrupted, UserError
from vse.training.experiment import ExperimentConfig
from vse.training.options import TrainInputs, TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers import cca as cca_module
from vse.training.solvers.cca import CaptionCcaSolver, Covariances, compute_canonical_directions, compute_covariances
from vse.training.training import train
from vse.training.use.embed import embed_split

Matrix = NDArray[np.float64]
SHAPES = [(5, 8), (8, 5), (6, 6), (1, 4), (4, 1)]


def pairs(dim_x: int, dim_y: int, n: int = 400, seed: int = 0) -> tuple[Matrix, Matrix]:
    """Vectors of both sides of n pairs, which have something in common, around means that are not 0."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(n, 3)) * [3, 1, 0.3]
    x, y = (common @ rng.normal(size=(3, dim)) + rng.normal(size=(n, dim)) for dim in (dim_x, dim_y))
    return x + np.arange(dim_x), 10 * y - 5


def score_pairs(x: Matrix, y: Matrix) -> Covariances:
    n, both = len(x), np.cov(x.T, y.T, bias=True)
    dim = x.shape[1]
    assert n > 1
    return Covariances(x.mean(0), y.mean(0), both[:dim, :dim], both[dim:, dim:], both[:dim, dim:])


def ridged(covariance: Matrix, regularization: float) -> Matrix:
    return covariance + regularization * np.diag(covariance).mean() * np.eye(len(covariance))


def slow_directions(found: Covariances, dim: int, regularization: float) -> tuple[Matrix, Matrix, Matrix]:
    """The generalised eigenproblem of both sides at once: [0 xy; yx 0] w = r [xx 0; 0 yy] w."""
    n_x, n_y = found.xy.shape
    across = np.block([[np.zeros((n_x, n_x)), found.xy], [found.xy.T, np.zeros((n_y, n_y))]])
    within = scipy.linalg.block_diag(ridged(found.xx, regularization), ridged(found.yy, regularization))
    correlations, vectors = scipy.linalg.eigh(across, within)
    highest = np.argsort(-correlations)[:dim]
    return np.sqrt(2) * vectors[:n_x, highest], np.sqrt(2) * vectors[n_x:, highest], correlations[highest]


def up_to_sign(x: Matrix, y: Matrix, like: Matrix) -> tuple[Matrix, Matrix]:
    """Directions turned round, on both sides at once, where that of x points the other way."""
    signs = np.sign((x * like).sum(0))
    return x * signs, y * signs


@pytest.mark.parametrize("regularization", [0.0, 1e-3, 0.1, 2.0])
@pytest.mark.parametrize(("dim_x", "dim_y"), SHAPES)
def test_directions_solve_the_generalised_eigenproblem(dim_x: int, dim_y: int, regularization: float) -> None:
    found = score_pairs(*pairs(dim_x, dim_y))
    for dim in range(1, min(dim_x, dim_y) + 1):
        x, y, correlations = compute_canonical_directions(found, dim, regularization)
        slow_x, slow_y, slow_correlations = slow_directions(found, dim, regularization)
        assert (x.shape, y.shape) == ((dim_x, dim), (dim_y, dim))
        np.testing.assert_allclose(correlations, slow_correlations, rtol=1e-8)
        for one, other in zip(up_to_sign(x, y, slow_x), (slow_x, slow_y), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)


def test_missing_uncorrelated_and_singular_directions() -> None:
    found = score_pairs(*pairs(3, 8))
    x, y, correlations = compute_canonical_directions(found, 5, 0.01)
    fewer = compute_canonical_directions(found, 3, 0.01)
    for whole, part in zip((x, y, correlations), fewer, strict=True):
        np.testing.assert_array_equal(whole[..., :3], part)
        assert not whole[..., 3:].any()
    assert (x.shape, y.shape) == ((3, 5), (8, 5))
    assert fewer[2].all()
    found = Covariances(np.zeros(3), np.zeros(3), np.eye(3), np.eye(3), np.diag([0.5, 0.2, 0]))
    x, y, correlations = compute_canonical_directions(found, 3, 0.0)
    np.testing.assert_allclose(correlations, [0.5, 0.2, 0])
    np.testing.assert_allclose(abs(x), np.diag([1, 1, 0]), atol=1e-12)
    np.testing.assert_allclose(abs(y), np.diag([1, 1, 0]), atol=1e-12)
    x, y = pairs(5, 8)
    x[:, 2] = x[:, 0] + x[:, 1]
    y[:, 3] = 7
    compute_canonical_directions(score_pairs(x, y), 4, 1e-6)
    with pytest.raises(UserError, match=r"solver.regularization 0 is too small: a covariance is singular"):
        compute_canonical_directions(score_pairs(x, y), 4, 0.0)


Blocks = list[tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]]


def blocks(counts: list[list[int]], dim_x: int, dim_y: int, offset: float, seed: int) -> Blocks:
    """Blocks of images with so many captions each."""
    rng = np.random.default_rng(seed)
    found = []
    for block in counts:
        image_of_caption = np.repeat(np.arange(len(block)), block)
        images = rng.normal(size=(len(block), dim_x)) + offset
        captions = images[image_of_caption] @ rng.normal(size=(dim_x, dim_y)) + rng.normal(size=(len(image_of_caption), dim_y))
        found.append((torch.from_numpy(images).float(), torch.from_numpy(captions).float(), image_of_caption))
    return found


@given(
    counts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), min_size=1, max_size=5),
    dims=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    offset=st.sampled_from([0.0, -3.0, 50.0]),
    seed=st.integers(0, 999),
)
def test_covariances_are_those_of_all_pairs(counts: list[list[int]], dims: tuple[int, int], offset: float, seed: int) -> None:
    parts = blocks(counts, *dims, offset, seed)
    found = compute_covariances(iter(parts))
    x = np.concatenate([images.double().numpy()[image_of_caption] for images, _, image_of_caption in parts])
    y = np.concatenate([captions.double().numpy() for _, captions, _ in parts])
    np.testing.assert_allclose(found.mean_x, x.mean(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found.mean_y, y.mean(0), rtol=1e-5, atol=1e-4)
    both = np.atleast_2d(np.cov(x.T, y.T, bias=True))
    size = np.abs(both).max()
    together = np.block([[found.xx, found.xy], [found.xy.T, found.yy]])
    np.testing.assert_allclose(together, both, rtol=1e-4, atol=1e-4 * size + 1e-6)


def test_a_mean_far_from_zero_does_no_harm() -> None:
    parts = blocks([[2] * 50, [5] * 40, [1] * 7], 4, 3, offset=3000, seed=1)
    x = np.concatenate([images.double().numpy()[image_of_caption] for images, _, image_of_caption in parts])
    np.testing.assert_allclose(compute_covariances(iter(parts)).xx, np.cov(x.T, bias=True), rtol=1e-3, atol=1e-4)


SETS = [
    "solver=cca",
    "caption_feature=tfidf",
    "model.image_encoder={name: branch, widths: [6]}",
    "model.caption_encoder={name: branch, widths: [6]}",
    "solver.regularization=[1.0, 0.01, 0.1]",
    "solver.power=3",
]


@pytest.fixture(scope="module")
def run(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CCA of the demo. Read only."""
    return train(cache, experiment(*SETS), out=tmp_path_factory.mktemp("runs") / "cca")


def test_a_run_tries_each_regularisation_and_keeps_the_best(run: Path) -> None:
    files = {path.name for path in run.iterdir()}
    assert files == {"config.yaml", "vocab.json", "metrics.csv", "best.safetensors", "last.ckpt", "run.json"}
    rows, record = numbers(run), RunFolder(run).read_record()
    assert [(row["epoch"], row["regularization"]) for row in rows] == [(1, 1.0), (2, 0.01), (3, 0.1)]
    assert (record["state"], record["epochs"], record["dataset"]) == ("finished", 3, "demo")
    best = max(rows, key=lambda row: row["rsum"])
    assert (record["best_epoch"], record["best_rsum"]) == (best["epoch"], best["rsum"])
    assert len({row["rsum"] for row in rows}) > 1
    for row in rows:
        recalls = [row[f"{direction}_r{k}"] for direction in ("i2t", "t2i") for k in DEFAULT_KS]
        assert row["rsum"] == pytest.approx(sum(recalls))


def vectors(cache: Path, ids: list[int]) -> Matrix:
    """What HDF5 reads."""
    with h5py.File(cache) as file:
        rows = dict(zip(file["ids"][:].tolist(), file["features"][:].astype(np.float64), strict=True))
    return np.stack([rows[number] for number in ids])


def split(demo: Path, name: str) -> tuple[list[int], list[int], list[int]]:
    """Ids of the images of a split, of its captions, and for each of these its image's."""
    images = load_dataset_file(demo).split(name)
    captions = [caption for image in images for caption in image.captions]
    return [i.imgid for i in images], [c.sentid for c in captions], [c.imgid for c in captions]


def test_embeddings_are_scaled_projections_of_unit_length(run: Path, demo: Path, cache: Path, tfidf: Path) -> None:
    _, sentids, image_of_caption = split(demo, "train")
    found = score_pairs(vectors(cache, image_of_caption), vectors(tfidf, sentids))
    best = max(numbers(run), key=lambda row: row["rsum"])
    regularization = best["regularization"]
    x, y, correlations = slow_directions(found, 6, regularization)
    imgids, sentids, _ = split(demo, "test")
    sides = [(vectors(cache, imgids), found.mean_x, x), (vectors(tfidf, sentids), found.mean_y, y)]
    slow = [(rows - mean) @ directions * correlations**3 for rows, mean, directions in sides]
    slow = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in slow]
    with h5py.File(embed_split(run, run.parent / "test.h5")) as file:
        images, captions = file["images"][:].astype(np.float64), file["captions"][:].astype(np.float64)
        assert file.attrs["similarity"] == "cosine"
    signs = np.sign((images * slow[0]).sum(0))
    np.testing.assert_allclose(images, slow[0] * signs, atol=2e-4)
    np.testing.assert_allclose(captions, slow[1] * signs, atol=2e-4)


def test_a_split_is_evaluated_as_it_was_validated(run: Path, tmp_path: Path, cache: Path, monkeypatch: Patch) -> None:
    result = json.loads(write_result([embed_split(run, tmp_path / "val.h5", "val")], tmp_path / "r.json").read_text())
    best = max(numbers(run), key=lambda row: row["rsum"])
    full = result["protocols"]["full"]
    recalls = {f"{direction}_r{k}": full[direction][f"r{k}"] for direction in ("i2t", "t2i") for k in DEFAULT_KS}
    assert recalls.items() <= best.items()
    test = write_result([embed_split(run, tmp_path / "test.h5")], tmp_path / "t.json", ["auto", "sentence"])
    assert json.loads(test.read_text())["protocols"].keys() == {"full", "sentence"}
    monkeypatch.setattr(cca_module, "_IMAGES_PER_BLOCK", 7)
    small = RunFolder(train(cache, experiment(*SETS), out=tmp_path / "small")).read_checkpoint()["model"]
    for name, weights in RunFolder(run).read_checkpoint()["model"].items():
        torch.testing.assert_close(abs(small[name]), abs(weights), rtol=1e-3, atol=1e-3)  # directions may turn round


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "call"), [("iterate_pair_blocks", 0), ("validate", 0), ("validate", 2)])
def test_a_run_that_is_stopped_is_resumed(method: str, call: int, run: Path, cache: Path, tmp_path: Path) -> None:
    with interrupted(call, of=CaptionCcaSolver, method=method), pytest.raises(Interrupted, match="--resume"):
        train(cache, experiment(*SETS), out=tmp_path / "cut")
    cut = train(cache, experiment(*SETS), out=tmp_path / "cut", options=TrainOptions(resume=True))
    assert_same(state(run), state(cut))
    assert [{**row, "seconds": 0} for row in numbers(run)] == [{**row, "seconds": 0} for row in numbers(cut)]
    assert (run / "best.safetensors").read_bytes() == (cut / "best.safetensors").read_bytes()


def test_early_stopping_leaves_no_regularisation_out(cache: Path, tmp_path: Path) -> None:
    out = train(cache, experiment(*SETS, "train.early_stop=1"), out=tmp_path / "run")
    assert len(numbers(out)) == len(experiment(*SETS).solver.regularization)


def test_cca_needs_vectors_of_captions_which_a_path_may_name(cache: Path, tmp_path: Path, tfidf: Path) -> None:
    with pytest.raises(UserError, match="solver: cca reads captions as vectors: name a caption feature"):
        train(cache, experiment(*SETS, "caption_feature=null"), out=tmp_path / "run")
    with pytest.raises(UserError, match="--log-negatives lists what a ranking loss finds hardest; cca ranks nothing"):
        train(cache, experiment(*SETS), out=tmp_path / "run", options=TrainOptions(log_negatives=1))
    inputs = TrainInputs(caption_features=tfidf)
    out = train(cache, experiment(*SETS, "caption_feature=null"), out=tmp_path / "run", inputs=inputs)
    assert RunFolder(out).read_settings(ExperimentConfig).caption_feature == "tfidf"
