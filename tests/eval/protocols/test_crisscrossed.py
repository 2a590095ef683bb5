"""Image-to-image and text-to-text retrieval of CxC, on made-up judgements of COCO's test set, against full sorts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.eval.files.test_per_query import ran
from tests.eval.protocols.test_coco import coco
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import write_embeddings
from vse.eval.protocols.coco import intramodal_fold, read_judged_pairs
from vse.pipeline.errors import UserError

HEADERS = {
    "sis_test.csv": "image1,image2,agg_score,sampling_method",
    "sts_test.csv": "caption1,caption2,agg_score,sampling_method",
}
Pairs = list[tuple[int, int, float]]


def write_pairs(folder: Path, images: Pairs, captions: Pairs) -> Path:
    """Files as CxC publishes them."""
    folder.mkdir(exist_ok=True)
    lines = [f"COCO_val2014_{a:012d}.jpg,COCO_val2014_{b:012d}.jpg,{score},i2i_csim" for a, b, score in images]
    (folder / "sis_test.csv").write_text("\n".join([HEADERS["sis_test.csv"], *lines]) + "\n")
    lines = [f"COCO_val2014:sentid:{a},COCO_val2014:sentid:{b},{score},c2c_isim" for a, b, score in captions]
    (folder / "sts_test.csv").write_text("\n".join([HEADERS["sts_test.csv"], *lines]) + "\n")
    return folder


def test_pairs_are_right_from_their_threshold_on(tmp_path: Path) -> None:
    images = [(12, 3, 2.5), (12, 4, 2.49), (5, 5, 5.0), (3, 12, 4)]
    captions = [(700, 8, 3.0), (700, 9, 2.99), (8, 8, 5.0), (1, 2, 5)]
    pairs = read_judged_pairs(write_pairs(tmp_path / "cxc", images, captions))
    assert pairs.images.tolist() == [[12, 3], [3, 12]]
    assert pairs.captions.tolist() == [[700, 8], [1, 2]]
    assert pairs.files == {name: sha256((tmp_path / "cxc" / name).read_bytes()).hexdigest() for name in HEADERS}


def rank_of_best(scores: np.ndarray, query: int, right: set[int]) -> int:
    """The place, from 0, of the first right answer in a full sort of all others, wrong ones first among equals."""
    others = [k for k in range(len(scores)) if k != query]
    order = sorted(others, key=lambda k: (-scores[k], k in right))
    return next(place for place, k in enumerate(order) if k in right)


@pytest.mark.slow
def test_ranks_are_those_of_full_sorts(tmp_path: Path) -> None:
    run, rng = coco(), np.random.default_rng(3)
    near = (run.images[:400] @ run.images[:400].T).argsort(1)[:, -6:]
    images = [(int(run.coco_ids[a]), int(run.coco_ids[b]), float(rng.integers(0, 6))) for a in range(300) for b in near[a]]
    picks = rng.integers(0, 25_000, (3000, 2))
    captions = [(int(run.caption_ids[a]), int(run.caption_ids[b]), float(rng.integers(0, 6))) for a, b in picks]
    captions += [(1, 2, 5.0)]  # of no test image
    file, cxc = write_embeddings(tmp_path / "e.h5", run), write_pairs(tmp_path / "cxc", images, captions)
    out, table = tmp_path / "r.json", tmp_path / "q.csv"
    arguments = ("--bootstrap", 100, "--k", "50", "--per-query", table, "--out", out)
    assert ran(file, "--protocol", "cxc", "--cxc", cxc, *arguments) == 0
    found, queries = json.loads(out.read_text()), pd.read_csv(table)
    assert found["cxc"] == read_judged_pairs(cxc).files

    right: dict[str, dict[int, set[int]]] = {"i2i": defaultdict(set), "t2t": defaultdict(set)}
    row_of_image = {int(number): row for row, number in enumerate(run.coco_ids)}
    row_of_caption = {int(number): row for row, number in enumerate(run.caption_ids)}
    for direction, pairs, rows, least in (("i2i", images, row_of_image, 2.5), ("t2t", captions, row_of_caption, 3)):
        for a, b, score in pairs:
            if score >= least and a != b and a in rows:
                right[direction][rows[a]].add(rows[b])
                right[direction][rows[b]].add(rows[a])
    image_of_caption = run.image_of_caption()
    for caption in range(25_000):
        right["t2t"][caption] |= set(np.flatnonzero(image_of_caption == image_of_caption[caption]).tolist()) - {caption}

    protocol = found["protocols"]["cxc"]
    assert protocol["n_queries"] == {"i2t": 5000, "t2i": 24_972, "i2i": len(right["i2i"]), "t2t": 25_000}
    for direction, vectors, rows in (
        ("i2i", run.images, {int(number): row for row, number in enumerate(run.image_ids)}),
        ("t2t", run.captions, row_of_caption),
    ):
        some = queries[queries["direction"] == direction]
        assert {rows[query] for query in some["query_id"]} == set(right[direction])
        for query, rank, best, score in some.sample(60, random_state=0)[
            ["query_id", "rank", "right_id", "right_score"]
        ].to_numpy():
            row = rows[int(query)]
            scores = vectors @ vectors[row]
            assert rank == rank_of_best(scores, row, right[direction][row])
            assert rows[int(best)] in right[direction][row]
            assert score == pytest.approx(max(scores[list(right[direction][row])]), abs=1e-5)
        for k in (1, 5, 10, 50):
            assert protocol[direction][f"r{k}"] == pytest.approx(100 * (some["rank"] < k).mean())
        low, high = protocol["ci95"][direction]["map"]
        assert low < protocol[direction]["map"] < high
    assert protocol["rsum"] == pytest.approx(sum(protocol[of][f"r{k}"] for of in ("i2t", "t2i") for k in (1, 5, 10)))


def a_row(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "sis_test.csv").write_text(f"{HEADERS['sis_test.csv']}\n{text}\n")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: (folder / "sts_test.csv").unlink(), "sts_test.csv: No such file or directory"),
    "another file": (
        lambda folder: (folder / "sts_test.csv").write_text("a,b\n1,2\n"),
        "has no column caption1 and no caption2",
    ),
    "no number": (
        a_row("cat.jpg,COCO_val2014_000000000001.jpg,3,x"),
        "row 1: cat.jpg, COCO_val2014_000000000001.jpg, 3: not two",
    ),
    "no score": (
        a_row("COCO_val2014_000000000001.jpg,COCO_val2014_000000000002.jpg,nan,x"),
        "2.jpg, nan: not two COCO ids and a score",
    ),
    "bytes": (
        lambda folder: (folder / "sis_test.csv").write_bytes(b"\xff\xfe\x00"),
        "sis_test.csv: not a CSV file with a header",
    ),
    "other images": (a_row("1,2,5.0,x"), "no pair of images of CxC"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_theirs_is_said_in_a_line(fault: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = coco()
    a, b = run.coco_ids[:2].tolist()
    folder, (spoil, message) = write_pairs(tmp_path / "cxc", [(a, b, 5)], []), FAULTS[fault]
    spoil(folder)
    file = write_embeddings(tmp_path / "e.h5", run)
    assert message in fails(eval_main, file, "--protocol", "cxc", "--cxc", folder, "--bootstrap", 0)


def test_scores_without_embeddings_have_no_pairs(tmp_path: Path) -> None:
    run = made()
    dense = replace(run, images=None, captions=None, scores=np.zeros((30, 150), np.float32))
    pairs = read_judged_pairs(write_pairs(tmp_path / "cxc", [(1, 2, 5)], []))
    with pytest.raises(UserError, match="the pairs of CxC need embeddings of images and of captions"):
        intramodal_fold(dense, run.image_ids, pairs, [1])


def test_pairs_are_of_the_protocol_cxc(tmp_path: Path, fails: Callable[..., str]) -> None:
    file, folder = write_embeddings(tmp_path / "e.h5", made()), write_pairs(tmp_path / "cxc", [], [])
    assert "(--protocol cxc)" in fails(eval_main, file, "--cxc", folder)
    assert "--compare and --cxc cannot be used together" in fails(eval_main, file, file, "--compare", "--cxc", folder)
