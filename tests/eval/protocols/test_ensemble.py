from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.eval.protocols.test_evaluate import made, made_order
from tests.eval.slow_ranks import slow_order_scores, slow_ranks
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.protocols.ensemble import ensemble
from vse.eval.protocols.evaluate import evaluate
from vse.eval.ranking.metrics import metrics
from vse.eval.ranking.ranks import Ranks


def dense_scores(run: Embeddings) -> np.ndarray:
    if run.scores is not None:
        return np.asarray(run.scores[:])
    assert run.images is not None
    assert run.captions is not None
    if run.similarity == "order":
        return slow_order_scores(run.images, run.captions)
    return run.images.astype(np.float64) @ run.captions.T.astype(np.float64)


@pytest.mark.parametrize("make", [made, made_order])
@pytest.mark.parametrize("n_members", [2, 3])
def test_an_ensemble_ranks_by_the_mean_of_the_score_matrices(
    make: Callable[..., Embeddings], n_members: int, tmp_path: Path
) -> None:
    # The members see the same split, and one has an embedding of another size.
    members = [make(seed=k, noise=2.0) for k in range(n_members)]
    assert members[0].images is not None
    assert members[0].captions is not None
    members[0] = replace(members[0], images=members[0].images[:, :12], captions=members[0].captions[:, :12])
    files = [write_embeddings(tmp_path / f"{k}.h5", member) for k, member in enumerate(members)]
    mean = np.mean([dense_scores(member) for member in members], axis=0)
    i2t, t2i = slow_ranks(mean, members[0].image_of_caption().tolist())
    found = json.loads(evaluate(files, tmp_path / "r.json", together=True).read_text())
    slow = metrics(Ranks(np.array(i2t), np.array(t2i)))
    assert found["protocols"]["full"]["i2t"] == pytest.approx(slow["i2t"])
    assert found["protocols"]["full"]["t2i"] == pytest.approx(slow["t2i"])
    np.testing.assert_allclose(dense_scores(ensemble(files)), mean, atol=1e-6)


def test_matrices_of_scores_are_averaged(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrices = [rng.normal(size=(30, 150)).astype(np.float32) for _ in range(3)]
    files = [
        write_embeddings(tmp_path / f"{k}.h5", made(images=None, captions=None, scores=matrix, similarity="network"))
        for k, matrix in enumerate(matrices)
    ]
    found = ensemble(files)
    assert found.scores is not None
    np.testing.assert_allclose(found.scores[:], np.mean(matrices, axis=0), atol=1e-6)


def test_an_ensemble_is_no_row_of_its_members(tmp_path: Path) -> None:
    files = [write_embeddings(tmp_path / f"{k}.h5", made(seed=k, experiment=name)) for k, name in enumerate(("vsepp", "vse0"))]
    result = json.loads(evaluate(files, tmp_path / "r.json", together=True).read_text())
    assert result["experiment"] == "ensemble of 2 (vsepp, vse0)"
    assert [noted["file"] for noted in result["provenance"]["embeddings"]] == ["0.h5", "1.h5"]
    assert result["provenance"]["config"] == {}


def test_what_cannot_be_averaged_is_named(tmp_path: Path, fails: Callable[..., str]) -> None:
    out = tmp_path / "r.json"
    one = write_embeddings(tmp_path / "one.h5", made())
    order = write_embeddings(tmp_path / "order.h5", made_order(seed=1))
    scores = np.zeros((30, 150), np.float32)
    pairs = write_embeddings(tmp_path / "pairs.h5", made(images=None, captions=None, scores=scores))
    other = write_embeddings(tmp_path / "other.h5", made(n_images=31))
    for files, reason in (
        ([one], "an ensemble has two members at least"),
        ([one, one], "counts every member once"),
        ([one, order], "order.h5 is of similarity 'order', "),
        ([one, pairs], "cannot be averaged: one holds scores, the other embeddings"),
        ([one, other], "differ in image_ids"),
    ):
        assert reason in fails(eval_main, *files, "--ensemble", "--out", out)
    assert not out.exists()
