"""Re-ranking of the best K of a first stage: its ranks against a loop over queries and candidates, and the loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import Fails, Printed, succeeds
from tests.eval.protocols.test_evaluate import made, made_order
from tests.eval.slow_ranks import slow_order_scores, slow_ranks
from vse.eval import DEFAULT_KS
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.ranking.metrics import Ranks, compute_metrics
from vse.eval.ranking.ranks import ScoreBlocks, blocks_from_scores
from vse.eval.search import approximate as reranking
from vse.eval.search.approximate import measure_reranked_search


def slow_list_ranks(
    scores: np.ndarray, near: np.ndarray, queries: Sequence[int], label: Sequence[int], wanted: Sequence[int], k: int
) -> tuple[list[int], list[bool]]:
    """Return for each query the rank in its list, and whether the list has a right answer.

    ``scores`` and ``near``, the first stage's scores, are (n_queries, n_corpus). A right answer is in the list if fewer than
    ``k`` others are as near.
    """
    ranks, found = [], []
    for q in queries:
        order = sorted(range(len(label)), key=lambda row: (-near[q, row], row))[:k]
        outside = [row for row in range(len(label)) if row not in order]
        right = [row for row in order if label[row] == wanted[q] and all(near[q, row] > near[q, other] for other in outside)]
        wrong = [row for row in order if label[row] != wanted[q]]
        best = max((scores[q, row] for row in right), default=None)
        found.append(best is not None)
        if best is None:
            ranks.append(sum(1 for row in range(len(label)) if label[row] != wanted[q]))
        else:
            ranks.append(sum(1 for row in wrong if scores[q, row] >= best))
    return ranks, found


def blocks(scores: np.ndarray, image_of_caption: np.ndarray, rows: int = 5) -> ScoreBlocks:
    return replace(blocks_from_scores(scores, torch.from_numpy(image_of_caption)), rows_per_block=rows)


def case(seed: int, n: int, m: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scores of both directions, first-stage vectors of both sides, and the image of each caption; not all have one."""
    rng = np.random.default_rng(seed)
    images, captions = rng.normal(size=(n, 6)), rng.normal(size=(m, 6))
    i2t, t2i = (images @ captions.T + rng.normal(size=(2, n, m))).astype(np.float32)
    if whole:  # many tie
        i2t, t2i, images, captions = i2t.round(), t2i.round(), images.round(), captions.round()
    return i2t, t2i, images.astype(np.float32), captions.astype(np.float32), rng.integers(0, n, m)


@pytest.mark.parametrize("whole", [False, True], ids=["no ties", "ties"])
@given(st.integers(0, 1000), st.integers(1, 14), st.integers(1, 30), st.integers(1, 40), st.sampled_from([7, 50, 10**6]))
def test_ranks_are_those_of_a_loop_over_the_candidates(whole: bool, seed: int, n: int, m: int, k: int, at_once: int) -> None:
    i2t, t2i, images, captions, image_of_caption = case(seed, n, m, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reranking, "_MAX_CANDIDATES", at_once)
        found = measure_reranked_search(blocks(i2t, image_of_caption), blocks(t2i, image_of_caption), images, captions, k)
    asking = np.unique(image_of_caption).tolist()
    near = images @ captions.T
    own, of = image_of_caption.tolist(), list(range(n))
    slow = {"i2t": slow_list_ranks(i2t, near, asking, own, of, k), "t2i": slow_list_ranks(t2i.T, near.T, range(m), of, own, k)}
    if not whole or k >= max(n, m):  # of those that tie at the end of a list, FAISS chooses
        expected = compute_metrics(Ranks(*(np.asarray(slow[direction][0]) for direction in ("i2t", "t2i"))))
        for direction in ("i2t", "t2i"):
            assert {name: found[direction][name] for name in expected[direction]} == pytest.approx(expected[direction])
        assert found["rsum"] == pytest.approx(expected["rsum"])
    for direction in ("i2t", "t2i"):
        assert found[direction]["found"] == pytest.approx(100 * np.mean(slow[direction][1]))
        assert found[direction]["n_queries"] == len(slow[direction][0])
        if k >= max(n, m):  # as many candidates as rows give the exact ranks
            assert all(found["lost"][direction][name] == 0 for name in ("r1", "r5", "medr", "meanr"))
            assert all(found[direction][f"recall_at_{depth}"] == 100 for depth in DEFAULT_KS)
    if len(asking) == n:
        exact = np.asarray(slow_ranks(i2t, own)[0])
        assert found["exact"]["i2t"] == pytest.approx(compute_metrics(Ranks(exact, np.zeros(1, int)))["i2t"])


def test_recalls_of_the_exact_top_are_counted_one_by_one() -> None:
    i2t, t2i, images, captions, image_of_caption = case(3, 60, 180)
    found = measure_reranked_search(blocks(i2t, image_of_caption), blocks(t2i, image_of_caption), images, captions, 20)
    near = images @ captions.T
    asking = np.unique(image_of_caption)
    for direction, scores, first in (("i2t", i2t[asking], near[asking]), ("t2i", t2i.T, near.T)):
        for k in DEFAULT_KS:
            shares = []
            for exact, stage in zip(scores, first, strict=True):
                listed = sorted(np.argsort(-stage)[:20], key=lambda row: -exact[row])
                shares.append(len(set(listed[:k]) & set(np.argsort(-exact)[:k])) / k)
            assert found[direction][f"recall_at_{k}"] == pytest.approx(100 * np.mean(shares))
            assert 0 < found[direction][f"recall_at_{k}"] < 100


def test_a_model_that_cannot_tell_anything_apart_finds_nothing() -> None:
    """Neither where every score is the same, nor where every first-stage vector is."""
    n = 30
    same, right = np.ones((n, n), np.float32), np.eye(n, dtype=np.float32)
    for scores, vectors in ((same, right), (right, same[:, :4])):
        found = measure_reranked_search(blocks(scores, np.arange(n)), None, vectors, vectors, 12)
        assert found["rsum"] == 0


def scored(stage_noise: float = 0.5, **changes: Any) -> Embeddings:
    """Return scores with pooled vectors that approximate them."""
    run, rng = made(n_images=40, noise=0.6), np.random.default_rng(1)
    pooled = [values + stage_noise * rng.normal(size=values.shape).astype(np.float32) for values in run.vectors]
    values = {"images": None, "captions": None, "similarity": "scan", "scores": run.images @ run.captions.T}
    return replace(run, **values | {"pooled_images": pooled[0], "pooled_captions": pooled[1]} | changes)


def reranked(*arguments: object) -> dict[str, Any]:
    out = Path(str(arguments[0])).with_suffix(".json")
    succeeds(eval_main, *arguments, "--bootstrap", 0, "--out", out)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def check(found: dict[str, Any], scores: np.ndarray, near: np.ndarray, image_of_caption: np.ndarray, k: int) -> None:
    """Check a result of captions that query images; both matrices are (n_images, n_captions)."""
    n_images, n_captions = scores.shape
    ranks, there = slow_list_ranks(scores.T, near.T, range(n_captions), range(n_images), image_of_caption.tolist(), k)
    assert found["t2i"]["found"] == pytest.approx(100 * np.mean(there)) != 100
    assert found["t2i"]["meanr"] == pytest.approx(np.mean(ranks) + 1)


def test_the_command_says_beside_the_exact_metrics_what_re_ranking_loses(tmp_path: Path, capsys: Printed) -> None:
    result = reranked(write_embeddings(tmp_path / "e.h5", scored()), "--rerank", 5, "--rerank", 15, "--rerank", 500)
    full = result["protocols"]["full"]
    assert [one["reranked"] for one in result["rerank"]] == [5, 15, 500]
    for one in result["rerank"]:
        assert all(one["exact"][direction].items() <= full[direction].items() for direction in ("i2t", "t2i"))
    losses = [one["lost"]["rsum"] for one in result["rerank"]]
    assert losses[0] > losses[1] > losses[2] == 0
    few = result["rerank"][0]
    assert few["rsum"] + few["lost"]["rsum"] == pytest.approx(full["rsum"])
    assert few["t2i"]["meanr"] - few["lost"]["t2i"]["meanr"] == pytest.approx(full["t2i"]["meanr"])
    assert few["t2i"]["found"] == few["t2i"]["r5"] < 100, "five candidates: who is among them has R@5"
    line = capsys.readouterr().err.splitlines()[-3]
    assert line.startswith(f"best 5 re-ranked: i2t R@1/5/10 {few['i2t']['r1']:.1f} / ")


def test_the_members_of_an_ensemble_share_their_first_stages(tmp_path: Path) -> None:
    """Check that concatenated pooled vectors have the mean of the members' inner products."""
    first, second = scored(), scored(0.2, seed=1, experiment="other")
    files = [write_embeddings(tmp_path / f"{k}.h5", run) for k, run in enumerate((first, second))]
    found = reranked(*files, "--ensemble", "--rerank", 7)["rerank"][0]
    near = (first.pooled_vectors[0] @ first.pooled_vectors[1].T + second.pooled_vectors[0] @ second.pooled_vectors[1].T) / 2
    check(found, first.scores, near, first.image_of_caption(), 7)


def test_order_scores_re_rank_the_highest_inner_products(tmp_path: Path) -> None:
    run = made_order(n_images=40, noise=2)
    found = reranked(write_embeddings(tmp_path / "e.h5", run), "--rerank", 6)["rerank"][0]
    images, captions = run.vectors
    check(found, slow_order_scores(images, captions), images @ captions.T, run.image_of_caption(), 6)


@pytest.mark.parametrize(
    ("run", "options", "reason"),
    [
        (scored(pooled_images=None, pooled_captions=None), "--rerank 5", "has no pooled_images and pooled_captions"),
        (made(), "--rerank 5", "FAISS finds exactly; leave --rerank out"),
        (made(), "x.h5 --compare --rerank 5", "--compare and --rerank"),
        (scored(pooled_images=None), "", "it lacks pooled_images"),
        (scored(pooled_images=np.ones((40, 3), np.float32)), "", "pooled_images of 3 and pooled_captions of 16 dimensions"),
        (scored(pooled_captions=np.ones((199, 16), np.float32)), "", "pooled_captions has shape (199, 16), expected (200, d"),
    ],
)
def test_what_cannot_be_re_ranked_is_one_line(
    run: Embeddings, options: str, reason: str, tmp_path: Path, fails: Fails
) -> None:
    file = write_embeddings(tmp_path / "e.h5", run)
    assert reason in fails(eval_main, file, *options.split())
