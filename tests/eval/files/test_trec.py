"""Run and qrels files, read as trec_eval reads them, give the metrics of the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import succeeds
from tests.eval.files.test_per_query import as_scores
from tests.eval.protocols.test_evaluate import made, made_order
from tests.eval.protocols.test_golden import golden
from tests.eval.slow_trec import measured, read_qrels, read_run
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings


def collapsed() -> Embeddings:
    """Return embeddings in which every pair has the same score."""
    run = made(n_each=2)
    return replace(run, images=np.ones((30, 4), np.float32), captions=np.ones((60, 4), np.float32))


def rounded() -> Embeddings:
    """Many scores are equal, of images that have no, one or several captions, in mixed order."""
    run = as_scores(made(n_each=4, noise=1.5))
    kept = np.random.default_rng(0).permutation(120)[:70]
    return replace(
        run,
        scores=np.round(run.scores[:][:, kept] * 5) / 5,
        caption_ids=run.caption_ids[kept],
        caption_image_ids=run.caption_image_ids[kept],
    )


def nearly_equal() -> Embeddings:
    """Scores that differ in double precision alone."""
    run = rounded()
    return replace(run, scores=1 + run.scores.astype(np.float64) * 1e-12)


def directional() -> Embeddings:
    run = rounded()
    return replace(run, scores=None, scores_i2t=run.scores, scores_t2i=np.round(run.scores**2, 1))


MAKERS = [made, made_order, golden, collapsed, rounded, nearly_equal, directional]


def evaluated(tmp_path: Path, *runs: Embeddings, arguments: tuple[object, ...] = ()) -> dict[str, Any]:
    files = [write_embeddings(tmp_path / f"{k}.h5", run) for k, run in enumerate(runs)]
    result = tmp_path / "result.json"
    succeeds(eval_main, *files, "--out", result, "--trec", tmp_path / "trec", "--bootstrap", 0, *arguments)
    protocols: dict[str, Any] = json.loads(result.read_text())["protocols"]
    return protocols


@pytest.mark.parametrize(("make", "depth"), [*((make, 0) for make in MAKERS), (rounded, 1000)])
def test_trec_eval_measures_what_the_result_has(make: Callable[[], Embeddings], depth: int, tmp_path: Path) -> None:
    full = evaluated(tmp_path, make(), arguments=("--trec-depth", depth))["full"]
    for direction in ("i2t", "t2i"):
        measures = measured(tmp_path / "trec", direction)
        for k in (1, 5, 10):
            assert 100 * measures[f"success_{k}"] == pytest.approx(full[direction][f"r{k}"]), k
        for ours, theirs in (("ndcg10", "ndcg_cut_10"), ("mrr", "recip_rank"), ("map", "map")):
            assert 100 * measures[theirs] == pytest.approx(full[direction][ours]), ours


@pytest.mark.parametrize("make", [rounded, collapsed])
def test_a_short_run_has_the_best_answers_and_the_same_recalls(make: Callable[[], Embeddings], tmp_path: Path) -> None:
    run = make()
    full = evaluated(tmp_path, run, arguments=("--trec-depth", 10))["full"]
    for direction in ("i2t", "t2i"):
        assert all(len(answers) == 10 for answers in read_run(tmp_path / "trec" / f"{direction}.run").values())
        assert 100 * measured(tmp_path / "trec", direction)["success_10"] == pytest.approx(full[direction]["r10"])


def test_ids_say_what_they_are_of(tmp_path: Path) -> None:
    run = golden()
    evaluated(tmp_path, run)
    i2t, t2i = (read_qrels(tmp_path / "trec" / f"{direction}.qrels") for direction in ("i2t", "t2i"))
    owners = dict(zip(run.caption_ids.tolist(), run.caption_image_ids.tolist(), strict=True))
    assert t2i == {f"caption-{caption}": {f"image-{image}": 1} for caption, image in owners.items()}
    images = {image: [caption for caption, owner in owners.items() if owner == image] for image in owners.values()}
    assert i2t == {f"image-{image}": {f"caption-{caption}": 1 for caption in own} for image, own in images.items()}
    line = (tmp_path / "trec" / "i2t.run").read_text().splitlines()[0].split()
    assert line[3] == "1"
    assert line[5] == "by_hand"


def test_scores_are_those_that_were_ranked_where_there_are_no_ties(tmp_path: Path) -> None:
    run = as_scores(made())
    evaluated(tmp_path, run)
    answers = read_run(tmp_path / "trec" / "t2i.run")
    for k, caption in enumerate(run.caption_ids[:3]):
        for image, score in answers[f"caption-{caption}"].items():
            assert np.float32(score) == run.scores[run.image_ids.tolist().index(int(image.removeprefix("image-")))][k]


def test_several_seeds_have_a_run_each(tmp_path: Path) -> None:
    runs = [made(seed=seed, noise=1.5) for seed in (3, 4)]
    full = evaluated(tmp_path, *runs)["full"]
    names = {path.name for path in (tmp_path / "trec").iterdir()}
    assert names == {"i2t.qrels", "t2i.qrels", "i2t-3.run", "t2i-3.run", "i2t-4.run", "t2i-4.run"}
    for direction in ("i2t", "t2i"):
        both = [measured(tmp_path / "trec", direction, f"-{seed}") for seed in (3, 4)]
        assert 100 * np.mean([one["success_1"] for one in both]) == pytest.approx(full[direction]["r1"]["mean"])
