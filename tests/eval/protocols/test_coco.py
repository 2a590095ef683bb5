"""The protocols cxc and eccv against the metrics of the package that defines them, on the same rankings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eccv_caption import Metrics
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import succeeds
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.protocols.coco import average_precision_at_r, right_positions
from vse.eval.protocols.protocols import rank_queries, resolve_protocols
from vse.eval.ranking.metrics import fold_metrics


@cache
def coco() -> Embeddings:
    """Made-up embeddings of COCO's test set: an image has something of all its captions, in the package's sense."""
    data = files("eccv_caption") / "data"
    with (data / "coco_test_ids.npy").open("rb") as stream:
        caption_ids = np.load(stream, allow_pickle=False).astype(np.int64)
    owner = {int(c): right[0] for c, right in json.loads((data / "original_caption_to_image.json").read_text()).items()}
    of = np.array([owner[int(c)] for c in caption_ids])
    coco_ids = of[np.sort(np.unique(of, return_index=True)[1])]
    rng = np.random.default_rng(0)
    images = rng.normal(size=(len(coco_ids), 24)).astype(np.float32)
    row = {int(number): k for k, number in enumerate(coco_ids)}
    captions = images[[row[int(number)] for number in of]] + 1.2 * rng.normal(size=(len(caption_ids), 24)).astype(np.float32)
    return Embeddings(
        image_ids=np.arange(len(coco_ids)),
        caption_ids=caption_ids,
        caption_image_ids=np.array([row[int(number)] for number in of]),
        images=images / np.linalg.norm(images, axis=1, keepdims=True),
        captions=captions / np.linalg.norm(captions, axis=1, keepdims=True),
        scores=None,
        dataset="coco",
        split="test",
        experiment="made_up",
        seed=0,
        coco_ids=coco_ids,
    )


@cache
def theirs() -> dict[str, dict[str, float]]:
    """The package's figures of the rankings that our scores give."""
    run = coco()
    scores = torch.from_numpy(run.images @ run.captions.T)
    # Their first 120 are enough of a ranking: at most 48 answers are right, and about 24 are of one fold.
    best_captions, best_images = scores.topk(120).indices.numpy(), scores.T.contiguous().topk(120).indices.numpy()
    i2t = dict(zip(run.coco_ids.tolist(), run.caption_ids[best_captions].tolist(), strict=True))
    t2i = dict(zip(run.caption_ids.tolist(), run.coco_ids[best_images].tolist(), strict=True))
    found: dict[str, dict[str, float]] = Metrics().compute_all_metrics(
        i2t,
        t2i,
        target_metrics=("coco_5k_recalls", "coco_1k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision", "eccv_r1"),
        Ks=(1, 5, 10),
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["full", "1k", "cxc"])
def test_recalls_equal_the_packages(protocol: str) -> None:
    name = {"full": "coco_5k", "1k": "coco_1k", "cxc": "cxc"}[protocol]
    folds = [fold_metrics(fold) for fold in rank_queries(coco(), protocol).folds]
    for direction in ("i2t", "t2i"):
        for k in (1, 5, 10):
            ours = np.mean([fold[direction][f"r{k}"] for fold in folds])
            assert ours == pytest.approx(100 * theirs()[f"{name}_r{k}"][direction]), (direction, k)
            assert 5 < ours < 100


@pytest.mark.slow
def test_precisions_equal_the_packages() -> None:
    (fold,) = rank_queries(coco(), "eccv").folds
    ours = fold_metrics(fold)
    for direction in ("i2t", "t2i"):
        for name in ("map_at_r", "rprecision", "r1"):
            assert ours[direction][name] == pytest.approx(100 * theirs()[f"eccv_{name}"][direction]), (direction, name)
    assert {direction: len(queries.images) for direction, queries in fold.items()} == {"i2t": 1261, "t2i": 1332}


@pytest.mark.slow
def test_blocks_and_a_matrix_of_scores_give_the_same() -> None:
    run = coco()
    dense = replace(run, scores=run.images @ run.captions.T, images=None, captions=None)
    ours = [fold_metrics(rank_queries(one, "eccv").folds[0]) for one in (run, dense)]
    assert ours[0]["i2t"] == pytest.approx(ours[1]["i2t"], rel=1e-4)
    assert ours[0]["t2i"] == pytest.approx(ours[1]["t2i"], rel=1e-4)


@pytest.mark.slow
def test_a_sixth_caption_changes_nothing() -> None:
    """The Karpathy split has ten captions more than the 25,000 that the package ranks."""
    run = coco()
    more = replace(
        run,
        caption_ids=np.append(run.caption_ids, 1),
        caption_image_ids=np.append(run.caption_image_ids, 0),
        captions=np.vstack([run.captions, run.images[1]]),  # it would be the first answer to the second image
    )
    assert fold_metrics(rank_queries(more, "eccv").folds[0]) == fold_metrics(rank_queries(run, "eccv").folds[0])


@pytest.mark.slow
def test_other_images_are_no_candidates() -> None:
    run = coco()
    more = replace(
        run,
        image_ids=np.append(run.image_ids, 5000 + np.arange(100)),
        coco_ids=np.append(run.coco_ids, 9_000_000 + np.arange(100)),
        images=np.vstack([run.images, run.images[:100]]),  # each would tie with an image of COCO
    )
    assert fold_metrics(rank_queries(more, "eccv").folds[0]) == fold_metrics(rank_queries(run, "eccv").folds[0])


def slow_positions(scores: list[float], right: set[int]) -> list[int]:
    """A full sort, of equal scores the wrong ones first."""
    order = sorted(range(len(scores)), key=lambda k: (-scores[k], k in right))
    return [place for place, k in enumerate(order) if k in right]


def test_an_answer_that_is_no_candidate_is_never_found() -> None:
    assert right_positions(np.array([0.1, 0.9, 0.5], np.float32), np.array([-1, 2])).tolist() == [1, 3]


@given(st.data())
def test_positions_equal_a_full_sort_with_ties_against_the_model(data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12))
    right = data.draw(st.sets(st.integers(0, len(scores) - 1), min_size=1))
    found = right_positions(np.array(scores, np.float32), np.array(sorted(right)))
    assert found.tolist() == slow_positions(scores, right)


def test_average_precision_at_r_by_hand() -> None:
    # Three right answers, at the first, third and sixth place: of the first three, 1/1 and 2/3 count.
    assert average_precision_at_r(np.array([0, 2, 5])) == pytest.approx((1 + 2 / 3) / 3)
    assert average_precision_at_r(np.array([0, 1, 2])) == 1
    assert average_precision_at_r(np.array([1])) == 0


def test_auto_adds_them_to_the_test_set_of_coco_alone() -> None:
    run = coco()
    assert resolve_protocols(run, ["auto"]) == ["1k", "full", "cxc", "eccv"]
    assert resolve_protocols(replace(run, coco_ids=None), ["auto"]) == ["1k", "full"]
    named = replace(run, coco_ids=None, image_ids=run.coco_ids, caption_image_ids=run.coco_ids[run.caption_image_ids])
    assert resolve_protocols(named, ["auto"]) == ["1k", "full", "cxc", "eccv"]
    other = replace(run, caption_ids=np.arange(len(run.caption_ids)))
    assert resolve_protocols(other, ["auto"]) == ["1k", "full"]


@pytest.mark.slow
def test_the_command_says_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_embeddings(tmp_path / "coco.h5", coco()), tmp_path / "coco.json"
    succeeds(eval_main, file, "--protocol", "eccv", "--out", out)
    assert "made_up eccv: i2t mAP@R/R-Precision/R@1 " in capsys.readouterr().err
    found: dict[str, Any] = json.loads(out.read_text())["protocols"]["eccv"]
    assert found["n_queries"] == {"i2t": 1261, "t2i": 1332}
    low, high = found["ci95"]["i2t"]["map_at_r"]
    assert low < found["i2t"]["map_at_r"] < high


def test_other_images_are_refused(tmp_path: Path, fails: Callable[..., str]) -> None:
    run = coco()
    file = write_embeddings(tmp_path / "e.h5", replace(run, coco_ids=np.arange(5000) + 1_000_000))
    error = fails(eval_main, file, "--protocol", "cxc", "--out", tmp_path / "r.json")
    assert "the protocols cxc and eccv need all 5,000 test images of COCO" in error
    assert not (tmp_path / "r.json").exists()
