"""The protocols cxc and eccv against the metrics of the package that defines them, on the same rankings."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from eccv_caption import Metrics
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import Fails, succeeds
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.protocols import coco as coco_module
from vse.eval.protocols import protocols as protocols_module
from vse.eval.protocols.coco import find_right_positions, rank_intramodal_queries, read_similar_pairs
from vse.eval.protocols.protocols import rank_queries, resolve_protocols
from vse.eval.ranking.metrics import compute_fold_metrics
from vse.pipeline.errors import UserError

DATA = Path(str(files("eccv_caption"))) / "data"
ANNOTATIONS = ("original", "cxc", "eccv")


def read_ids(folder: Path = DATA) -> np.ndarray:
    """The ids of the captions in a folder like the package's, in the order of their images."""
    with (folder / "coco_test_ids.npy").open("rb") as stream:
        return np.load(stream, allow_pickle=False).astype(np.int64)


def read_owners() -> dict[int, int]:
    """The id of each caption's image."""
    content = json.loads((DATA / "original_caption_to_image.json").read_text())
    return {int(caption): right[0] for caption, right in content.items()}


@cache
def coco(n_images: int = 5000) -> Embeddings:
    """Made-up embeddings of the first of COCO's test images: one has something of all its captions, in the package's sense."""
    caption_ids, owner = read_ids()[: 5 * n_images], read_owners()
    of = np.array([owner[int(c)] for c in caption_ids])
    coco_ids = of[np.sort(np.unique(of, return_index=True)[1])]
    rng = np.random.default_rng(0)
    images = rng.normal(size=(len(coco_ids), 24)).astype(np.float32)
    row = {int(number): k for k, number in enumerate(coco_ids)}
    rows = np.array([row[int(number)] for number in of])
    captions = images[rows] + 1.5 * rng.normal(size=(len(caption_ids), 24)).astype(np.float32)
    units = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (images, captions)]
    named = {"experiment": "made_up", "seed": 0, "coco_ids": coco_ids}
    return Embeddings(np.arange(len(coco_ids)), caption_ids, rows, "coco", "test", *units, **named)


def write_smaller_annotations(run: Embeddings, folder: Path) -> None:
    """The package's files as if COCO's test set had only the images of ``run``; answers that are not in COCO's stay."""
    np.save(folder / "coco_test_ids.npy", run.caption_ids)
    kept = {"image": set(run.coco_ids.tolist()), "caption": set(run.caption_ids.tolist())}
    left_out = {"image": set(read_owners().values()) - kept["image"], "caption": set(read_ids().tolist()) - kept["caption"]}
    for name, (query, answer) in product(ANNOTATIONS, (("image", "caption"), ("caption", "image"))):
        content = json.loads((DATA / f"{name}_{query}_to_{answer}.json").read_text())
        some = {one: [k for k in right if int(k) not in left_out[answer]] for one, right in content.items()}
        some = {one: right for one, right in some.items() if int(one) in kept[query] and kept[answer] & set(map(int, right))}
        (folder / f"{name}_{query}_to_{answer}.json").write_text(json.dumps(some))


class Package(NamedTuple):
    """The package's figures of the rankings that the scores of ``run`` give, and its number of queries of ECCV Caption."""

    run: Embeddings
    figures: dict[str, dict[str, float]]
    n_queries: dict[str, int]


@pytest.fixture(scope="module", params=[1000, pytest.param(5000, marks=pytest.mark.nightly)])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    """The package with a fifth of COCO's test images, at night with all of them."""
    run, folder = coco(request.param), DATA
    if request.param < 5000:
        folder = tmp_path_factory.mktemp("annotations")
        write_smaller_annotations(run, folder)
    metrics = Metrics()
    metrics.coco_ids = read_ids(folder)
    for name, use in zip(ANNOTATIONS, (metrics.set_coco_gts, metrics.set_cxc_gts, metrics.set_eccv_gts), strict=True):
        use(folder / f"{name}_image_to_caption.json", folder / f"{name}_caption_to_image.json")

    scores = torch.from_numpy(run.images @ run.captions.T)
    # Their first 120 are enough of a ranking: at most 48 answers are right, and about 24 are of one fold.
    best_captions, best_images = scores.topk(120).indices.numpy(), scores.T.contiguous().topk(120).indices.numpy()
    i2t = dict(zip(run.coco_ids.tolist(), run.caption_ids[best_captions].tolist(), strict=True))
    t2i = dict(zip(run.caption_ids.tolist(), run.coco_ids[best_images].tolist(), strict=True))
    named = ("coco_5k_recalls", "coco_1k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision", "eccv_r1")
    figures = metrics.compute_all_metrics(i2t, t2i, target_metrics=named, Ks=(1, 5, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coco_module, "_read_eccv_caption_file", lambda name: (folder / name).read_bytes())
        patch.setattr(protocols_module, "N_IMAGES_PER_FOLD", request.param // 5)
        yield Package(run, figures, {direction: len(queries) for direction, queries in metrics.eccv_gts.items()})


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["full", "1k", "cxc"])
def test_recalls_equal_the_packages(package: Package, protocol: str) -> None:
    name = {"full": "coco_5k", "1k": "coco_1k", "cxc": "cxc"}[protocol]
    folds = [compute_fold_metrics(fold) for fold in rank_queries(package.run, protocol).folds]
    assert len(folds) == (5 if protocol == "1k" else 1)
    for direction in ("i2t", "t2i"):
        for k in (1, 5, 10):
            ours = np.mean([fold[direction][f"r{k}"] for fold in folds])
            assert ours == pytest.approx(100 * package.figures[f"{name}_r{k}"][direction]), (direction, k)
            assert 5 < ours < 100


@pytest.mark.slow
def test_precisions_equal_the_packages(package: Package) -> None:
    (fold,) = rank_queries(package.run, "eccv").folds
    ours = compute_fold_metrics(fold)
    for direction in ("i2t", "t2i"):
        for name in ("map_at_r", "rprecision", "r1"):
            assert ours[direction][name] == pytest.approx(100 * package.figures[f"eccv_{name}"][direction]), (direction, name)
    assert {direction: len(queries.image_rows) for direction, queries in fold.items()} == package.n_queries


@pytest.mark.slow
def test_a_matrix_of_scores_other_images_and_captions_change_nothing(package: Package) -> None:
    """The Karpathy split has ten captions more than the 25,000 that the package ranks."""
    run = package.run
    ours = compute_fold_metrics(rank_queries(run, "eccv").folds[0])
    dense = replace(run, scores=run.images @ run.captions.T, images=None, captions=None)
    more = replace(
        run,
        caption_ids=np.append(run.caption_ids, 1),
        caption_image_ids=np.append(run.caption_image_ids, 0),
        captions=np.vstack([run.captions, run.images[1]]),  # it would be the first answer to the second image
        image_ids=np.append(run.image_ids, len(run.image_ids) + np.arange(100)),
        coco_ids=np.append(run.coco_ids, 9_000_000 + np.arange(100)),
        images=np.vstack([run.images, run.images[:100]]),  # each would tie with an image of COCO
    )
    for same in (dense, more):
        found = compute_fold_metrics(rank_queries(same, "eccv").folds[0])
        for direction in ("i2t", "t2i"):
            assert found[direction] == pytest.approx(ours[direction], rel=1e-4 if same is dense else 0, abs=0)


@given(st.data())
def test_positions_equal_a_full_sort_with_ties_against_the_model(data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12))
    right = data.draw(st.sets(st.integers(0, len(scores) - 1), min_size=1))
    found = find_right_positions(np.array(scores, np.float32), np.array(sorted(right)))
    order = sorted(range(len(scores)), key=lambda k: (-scores[k], k in right))  # of equal scores the wrong ones first
    assert found.tolist() == [place for place, k in enumerate(order) if k in right]


def test_an_answer_that_is_no_candidate_is_never_found() -> None:
    assert find_right_positions(np.array([0.1, 0.9, 0.5], np.float32), np.array([-1, 2])).tolist() == [1, 3]


def test_auto_adds_them_to_the_test_set_of_coco_alone() -> None:
    run = coco()
    assert resolve_protocols(run, ["auto"]) == ["1k", "full", "cxc", "eccv"]
    assert resolve_protocols(replace(run, coco_ids=None), ["auto"]) == ["1k", "full"]
    named = replace(run, coco_ids=None, image_ids=run.coco_ids, caption_image_ids=run.coco_ids[run.caption_image_ids])
    assert resolve_protocols(named, ["auto"]) == ["1k", "full", "cxc", "eccv"]
    other = replace(run, caption_ids=np.arange(len(run.caption_ids)))
    assert resolve_protocols(other, ["auto"]) == ["1k", "full"]


# Image-to-image and text-to-text retrieval of CxC, on made-up judgements of COCO's test set, against full sorts.

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
    pairs = read_similar_pairs(write_pairs(tmp_path / "cxc", images, captions))
    assert pairs.image_pairs.tolist() == [[12, 3], [3, 12]]
    assert pairs.caption_pairs.tolist() == [[700, 8], [1, 2]]
    assert pairs.sha256_by_file == {name: sha256((tmp_path / "cxc" / name).read_bytes()).hexdigest() for name in HEADERS}


def rank_of_best(scores: np.ndarray, query: int, right: set[int]) -> int:
    """The place, from 0, of the first right answer in a full sort of all others, wrong ones first among equals."""
    others = [k for k in range(len(scores)) if k != query]
    order = sorted(others, key=lambda k: (-scores[k], k in right))
    return next(place for place, k in enumerate(order) if k in right)


def check_cross_modal_rows(run: Embeddings, queries: pd.DataFrame, protocols: dict[str, Any]) -> None:
    """Each query has the best of all its right answers, and its scores are those of these pairs."""
    scores = run.images @ run.captions.T
    rows = {int(image): row for row, image in enumerate(run.image_ids)}
    columns = {int(caption): column for column, caption in enumerate(run.caption_ids)}
    for protocol, direction in product(("cxc", "eccv"), ("i2t", "t2i")):
        some = queries[(queries["protocol"] == protocol) & (queries["direction"] == direction)]
        assert 100 * (some["rank"] == 0).mean() == pytest.approx(protocols[protocol][direction]["r1"])
        assert ((some["rank"] == 0) == (some["right_score"] > some["wrong_score"])).all()
        for which in ("right", "wrong"):
            pairs = zip(some["query_id"], some[f"{which}_id"], strict=True)
            pairs = ((a, b) if direction == "i2t" else (b, a) for a, b in pairs)
            expected = [scores[rows[image], columns[caption]] for image, caption in pairs]
            assert some[f"{which}_score"].to_numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.nightly
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
    succeeds(eval_main, file, "--protocol", "cxc", "--protocol", "eccv", "--cxc", cxc, *arguments)
    found, queries = json.loads(out.read_text()), pd.read_csv(table)
    assert found["cxc"] == read_similar_pairs(cxc).sha256_by_file

    right: dict[str, dict[int, set[int]]] = {"i2i": defaultdict(set), "t2t": defaultdict(set)}
    row_of_image = {int(number): row for row, number in enumerate(run.coco_ids)}
    row_of_caption = {int(number): row for row, number in enumerate(run.caption_ids)}
    for direction, pairs, rows, least in (("i2i", images, row_of_image, 2.5), ("t2t", captions, row_of_caption, 3)):
        for a, b, score in pairs:
            if score >= least and a != b and a in rows:
                right[direction][rows[a]].add(rows[b])
                right[direction][rows[b]].add(rows[a])
    of_image = defaultdict(set)
    for caption, image in enumerate(run.image_of_caption()):
        of_image[image].add(caption)
    for caption, image in enumerate(run.image_of_caption()):
        right["t2t"][caption] |= of_image[image] - {caption}

    eccv = found["protocols"]["eccv"]
    assert eccv["n_queries"] == {"i2t": 1261, "t2i": 1332}
    assert eccv["ci95"]["i2t"]["map_at_r"][0] < eccv["i2t"]["map_at_r"] < eccv["ci95"]["i2t"]["map_at_r"][1]
    check_cross_modal_rows(run, queries, found["protocols"])
    protocol = found["protocols"]["cxc"]
    assert protocol["n_queries"] == {"i2t": 5000, "t2i": 24_972, "i2i": len(right["i2i"]), "t2t": 25_000}
    for direction, vectors, rows in (
        ("i2i", run.images, {int(number): row for row, number in enumerate(run.image_ids)}),
        ("t2t", run.captions, row_of_caption),
    ):
        some = queries[queries["direction"] == direction]
        assert {rows[query] for query in some["query_id"]} == set(right[direction])
        for query, rank, best, score in some.sample(25, random_state=0)[
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
    "no number": (a_row("cat.jpg,COCO_val2014_000000000001.jpg,3,x"), "row 1: cat.jpg, COCO_val2014_000000000001.jpg, 3: not"),
    "no score": (a_row("COCO_val2014_01.jpg,COCO_val2014_02.jpg,nan,x"), "2.jpg, nan: not two COCO ids and a score"),
    "bytes": (
        lambda folder: (folder / "sis_test.csv").write_bytes(b"\xff\xfe\x00"),
        "sis_test.csv: not a CSV file with a header",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_theirs_is_said_in_a_line(fault: str, tmp_path: Path) -> None:
    folder, (spoil, message) = write_pairs(tmp_path / "cxc", [(1, 2, 5)], []), FAULTS[fault]
    spoil(folder)
    with pytest.raises(UserError, match=re.escape(message)):
        read_similar_pairs(folder)


@pytest.mark.slow
def test_other_images_are_refused(tmp_path: Path, fails: Fails) -> None:
    run, out = coco(), tmp_path / "r.json"
    file = write_embeddings(tmp_path / "e.h5", replace(run, coco_ids=np.arange(5000) + 1_000_000))
    error = fails(eval_main, file, "--protocol", "cxc", "--out", out)
    assert "the protocols cxc and eccv need all 5,000 test images of COCO" in error
    assert not out.exists()
    pairs = read_similar_pairs(write_pairs(tmp_path / "cxc", [(1, 2, 5)], []))
    with pytest.raises(UserError, match="no pair of images of CxC"):
        rank_intramodal_queries(run, run.coco_ids, pairs, [1])
    dense = replace(run, images=None, captions=None, scores=np.zeros((1, 1), np.float32))
    with pytest.raises(UserError, match="the pairs of CxC need embeddings of images and of captions"):
        rank_intramodal_queries(dense, run.coco_ids, pairs, [1])
    assert "(--protocol cxc)" in fails(eval_main, file, "--cxc", tmp_path / "cxc")
    assert "--compare and --cxc" in fails(eval_main, file, file, "--compare", "--cxc", tmp_path / "cxc")
