from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.eval.evaluating import Fails, Printed, result_of, succeeds
from tests.eval.slow_ranks import slow_cosines, slow_metrics_of_lists, slow_order_scores, slow_sentence_ranks
from vse.eval import DEFAULT_KS
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.ranking.metrics import Ranks, compute_direction_metrics, compute_metrics
from vse.eval.ranking.ranks import ranks_from_embeddings
from vse.eval.search.cross_check import check_against_candidates, check_against_search
from vse.eval.tables.summary import build_summary
from vse.pipeline.errors import UserError


def made(n_images: int = 30, n_each: int = 5, seed: int = 0, noise: float = 1.0, **changes: Any) -> Embeddings:
    """Embeddings whose captions are their image plus noise, of unit length."""
    rng, of = np.random.default_rng(seed), np.repeat(np.arange(n_images), n_each)
    images = rng.normal(size=(n_images, 16)).astype(np.float32)
    captions = images[of] + noise * rng.normal(size=(len(of), 16)).astype(np.float32)
    units = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (images, captions)]
    named = {"experiment": "vsepp", "seed": seed}
    run = Embeddings(np.arange(n_images) * 3, np.arange(len(of)), of * 3, "demo", "test", *units, **named)
    return replace(run, **changes)


def evaluated(tmp_path: Path, *embeddings: Embeddings, protocol: str | Sequence[str] = "auto") -> dict[str, Any]:
    return result_of([write_embeddings(tmp_path / f"{k}.h5", e) for k, e in enumerate(embeddings)], protocol)


def made_order(**changes: Any) -> Embeddings:
    """Order embeddings as the published models make them: of unit length, then without signs."""
    run = made(**changes)
    return replace(run, images=np.abs(run.images), captions=np.abs(run.captions), similarity="order")


def slow_metrics(run: Embeddings, images: range) -> dict[str, Any]:
    """Full sorting of every query over some consecutive images, as the published evaluators do (no ties here)."""
    image_of_caption = run.image_of_caption()
    captions = [c for c in range(len(image_of_caption)) if image_of_caption[c] in images]
    left, right = run.images[images.start : images.stop], run.captions[captions]
    scores = left @ right.T if run.similarity == "cosine" else slow_order_scores(left, right)
    own = image_of_caption[captions] - images.start
    i2t = [min(np.flatnonzero(own[np.argsort(-scores[i])] == i)) for i in range(len(images))]
    t2i = [int(np.flatnonzero(np.argsort(-scores[:, c]) == own[c])[0]) for c in range(len(captions))]
    found = compute_metrics(Ranks(np.asarray(i2t), np.asarray(t2i)))
    of_lists = slow_metrics_of_lists(scores, scores, own.tolist()) if len(images) < 100 else {}
    return {key: {**value, **of_lists.get(key, {})} if isinstance(value, dict) else value for key, value in found.items()}


@pytest.mark.parametrize("make", [made, made_order])
def test_the_full_split_equals_a_sorting_of_every_query(make: Callable[..., Embeddings], tmp_path: Path) -> None:
    run = make(n_each=3)
    found = evaluated(tmp_path, run)
    assert (found["n_images"], found["n_captions"], found["split"], found["seeds"]) == (30, 90, "test", [0])
    assert set(found["protocols"]) == {"full"}
    slow = slow_metrics(run, range(30))
    assert found["protocols"]["full"]["rsum"] == pytest.approx(slow["rsum"])
    for direction in ("i2t", "t2i"):
        assert found["protocols"]["full"][direction] == pytest.approx(slow[direction])


def test_1k_is_the_mean_over_whole_folds_in_file_order(tmp_path: Path) -> None:
    run = made(n_images=2100, n_each=2, noise=1.5)
    found = evaluated(tmp_path, run, protocol="1k")["protocols"]["1k"]
    folds = [slow_metrics(run, range(0, 1000)), slow_metrics(run, range(1000, 2000))]
    assert found["folds"] == 2
    for fold, slow in zip(found["per_fold"], folds, strict=True):
        for direction in ("i2t", "t2i"):
            assert {name: fold[direction][name] for name in slow[direction]} == pytest.approx(slow[direction])
    assert found["rsum"] == pytest.approx(np.mean([slow["rsum"] for slow in folds]))
    assert found["i2t"]["medr"] == pytest.approx(np.mean([slow["i2t"]["medr"] for slow in folds]))


def test_sentence_1k_is_the_mean_over_whole_folds_in_file_order(tmp_path: Path) -> None:
    run = made(n_images=2100, n_each=2, noise=2)
    found = evaluated(tmp_path, run, protocol=["sentence", "sentence-1k"])["protocols"]["sentence-1k"]
    assert (found["folds"], found["n_queries"]) == (2, 4000)
    query = np.arange(2000)
    for fold, start in zip(found["per_fold"], (0, 2000), strict=True):
        captions = run.captions[start : start + 2000].astype(np.float64)
        cosines = captions @ captions.T
        ahead = (cosines >= cosines[query, query ^ 1][:, None]) & (query // 2 != query[:, None] // 2)
        assert fold["s2s"] == pytest.approx(compute_direction_metrics(ahead.sum(1)))
    assert found["s2s"]["r1"] == pytest.approx(np.mean([fold["s2s"]["r1"] for fold in found["per_fold"]]))


def test_a_result_says_what_its_ranks_were_compared_with(tmp_path: Path) -> None:
    """In the folds as over the whole split: how many queries over all folds and seeds, and for how many a negative ties."""
    runs = [made(n_images=2100, n_each=2, seed=seed) for seed in (0, 1)]
    files = [write_embeddings(tmp_path / f"{seed}.h5", run) for seed, run in enumerate(runs)]
    found = result_of(files, ["auto", "sentence", "sentence-1k"], cross_checked=0)["cross_check"]
    for check in found.values():
        assert (check["checked"], check["against"]) == (True, "an exact search by FAISS")
        assert all(n < check["queries"][direction] / 100 for direction, n in check["ties"].items())
    assert {name: check["queries"] for name, check in found.items()} == {
        "1k": {"i2t": 4000, "t2i": 8000},
        "full": {"i2t": 4200, "t2i": 8400},
        "sentence": {"s2s": 8400},
        "sentence-1k": {"s2s": 8000},
    }
    some = result_of(files[:1], ["1k", "sentence-1k"], cross_checked=500)["cross_check"]
    assert [check["of"] for check in some.values()] == [{"i2t": 2000, "t2i": 4000}, {"s2s": 4000}]
    assert {n for check in some.values() for n in check["queries"].values()} == {500}, "of each direction, folds together"


@pytest.mark.parametrize(
    ("make", "against"), [(made, "an exact search by FAISS"), (made_order, "candidates of FAISS, re-ranked by exact scores")]
)
def test_ties_are_counted_and_do_not_trouble_the_cross_check(
    make: Callable[..., Embeddings], against: str, tmp_path: Path
) -> None:
    run = make(noise=0.3)
    run.images[7], run.captions[35:40] = run.images[3], run.captions[15:20]
    found = evaluated(tmp_path, run)["cross_check"]["full"]
    every = {"i2t": 30, "t2i": 150}
    assert found == {"checked": True, "against": against, "queries": every, "of": every, "ties": {"i2t": 2, "t2i": 10}}
    collapsed = replace(run, images=np.ones_like(run.images), captions=np.ones_like(run.captions))
    assert evaluated(tmp_path, collapsed)["protocols"]["full"]["rsum"] == 0


def test_a_result_says_why_its_ranks_were_not_compared(tmp_path: Path) -> None:
    run = made()
    scores = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    why = {"checked": False, "why": "FAISS does not search scores of pairs"}
    assert evaluated(tmp_path, scores)["cross_check"] == {"full": why}
    left_out = result_of([write_embeddings(tmp_path / "e.h5", run)], cross_check=False)["cross_check"]
    assert left_out == {"full": {"checked": False, "why": "--no-cross-check"}}


@pytest.mark.parametrize("text", ["20 50", "1,20,5,50,10"])
def test_any_list_of_k_stands_beside_1_5_and_10(text: str, tmp_path: Path, capsys: Printed) -> None:
    """And rsum stays the sum of these six."""
    run, out, rows = made(n_images=60, noise=2), tmp_path / "r.json", tmp_path / "q.csv"
    file = write_embeddings(tmp_path / "e.h5", run)
    both = ("--protocol", "full", "--protocol", "sentence")
    succeeds(eval_main, file, "--k", text, "--out", out, "--per-query", rows, *both)
    found, table = json.loads(out.read_text())["protocols"], pd.read_csv(rows)
    plain = evaluated(tmp_path, run, protocol=["full", "sentence"])["protocols"]
    for protocol, direction in (("full", "i2t"), ("full", "t2i"), ("sentence", "s2s")):
        metrics = found[protocol][direction]
        assert list(metrics)[:7] == ["r1", "r5", "r10", "r20", "r50", "medr", "meanr"]
        ranks = table[(table["protocol"] == protocol) & (table["direction"] == direction)]["rank"]
        for k in (20, 50):
            assert metrics[f"r{k}"] == pytest.approx(100 * (ranks < k).mean())
        low, high = found[protocol]["ci95"][direction]["r20"]
        assert low <= metrics["r20"] <= high
        assert {name: value for name, value in metrics.items() if name not in ("r20", "r50")} == plain[protocol][direction]
    assert found["full"]["rsum"] == plain["full"]["rsum"]
    assert "full: i2t R@1/5/10/20/50 " in capsys.readouterr().err
    table = build_summary([out])
    assert table["t2i_r50"][0] == found["full"]["t2i"]["r50"]
    assert table["i2t_ndcg10"][0] == found["full"]["i2t"]["ndcg10"]


@pytest.mark.parametrize("text", ["0", "1,x", "-5", "5,1.5", "٣", "9" * 40])
def test_a_k_that_is_no_number_is_refused(text: str, tmp_path: Path, fails: Fails) -> None:
    file = write_embeddings(tmp_path / "e.h5", made(n_images=4))
    assert f"--k {text}: " in fails(eval_main, file, f"--k={text}")


def test_several_seeds_give_mean_and_standard_deviation(tmp_path: Path) -> None:
    runs = [made(seed=seed, noise=2) for seed in (0, 1, 2)]
    found = evaluated(tmp_path, *runs, protocol=["full", "sentence"])
    assert (found["seeds"], found["protocols"]["sentence"]["n_queries"]) == ([0, 1, 2], 150)
    for protocol, direction, slow in (
        ("full", "t2i", [slow_metrics(run, range(30))["t2i"] for run in runs]),
        ("sentence", "s2s", [slow_sentence(run) for run in runs]),
    ):
        for name, metric in found["protocols"][protocol][direction].items():
            values = [of_seed[name] for of_seed in slow]
            assert metric == pytest.approx({"mean": np.mean(values), "std": np.std(values, ddof=1)})


def test_a_result_carries_the_hash_of_its_content(tmp_path: Path) -> None:
    result = evaluated(tmp_path, made(n_images=4, provenance='{"note": "für α"}'))
    content = {key: value for key, value in result.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert result["sha256"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("beside", ["captions", "images", "both"])
def test_where_there_are_scores_they_compare_images_and_captions(beside: str, tmp_path: Path) -> None:
    """A model of pairs may also have embeddings, which need not be of one dimension."""
    run, other = made(), made(seed=7)
    scores = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    images = None if beside == "captions" else np.ones((30, 2), np.float32)
    both = replace(scores, captions=None if beside == "images" else other.captions, images=images, similarity="pairs")
    assert evaluated(tmp_path, both)["protocols"] == evaluated(tmp_path, scores)["protocols"]
    if beside != "images":
        found = evaluated(tmp_path, both, protocol=["full", "sentence"])["protocols"]
        assert found["full"] == evaluated(tmp_path, run)["protocols"]["full"]
        assert found["sentence"] == evaluated(tmp_path, other, protocol="sentence")["protocols"]["sentence"]


def slow_sentence(run: Embeddings) -> dict[str, Any]:
    ranks = slow_sentence_ranks(slow_cosines(run.captions), run.image_of_caption().tolist())
    return compute_direction_metrics(np.asarray(list(ranks.values())))


@pytest.mark.parametrize("make", [made, made_order])
def test_captions_query_captions_by_cosine(make: Callable[..., Embeddings], tmp_path: Path) -> None:
    run = make(n_images=12, n_each=3)
    run.caption_image_ids[[1, 2]] = run.caption_image_ids[3]  # the only caption of the first image is no query
    found = evaluated(tmp_path, replace(run, captions=run.captions * 3), protocol="sentence")["protocols"]
    assert found == {"sentence": {"s2s": pytest.approx(slow_sentence(run)), "n_queries": 35}}


def test_protocols_may_be_several(tmp_path: Path) -> None:
    small, large = made(n_images=20), made(n_images=1000, n_each=2)
    for run, protocol, expected in (
        (small, "auto", ["full"]),
        (small, ["sentence", "full", "full"], ["full", "sentence"]),
        (large, ("sentence", "auto"), ["1k", "full", "sentence"]),
        (large, ["sentence", "1k"], ["1k", "sentence"]),
    ):
        assert list(evaluated(tmp_path, run, protocol=protocol)["protocols"]) == expected
    for unknown, message in ((["full", "sentences"], r"'sentences' \(did you mean 'sentence'\?"), ([], "known: 1k, auto")):
        with pytest.raises(UserError, match=message):
            evaluated(tmp_path, small, protocol=unknown)


def test_the_command_writes_or_prints_several_protocols(tmp_path: Path, capsys: Printed) -> None:
    file, out = write_embeddings(tmp_path / "e.h5", made(noise=2)), tmp_path / "r.json"
    arguments = (file, "--protocol", "auto", "--protocol", "sentence")
    succeeds(eval_main, *arguments, "--out", out)
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    found = json.loads(out.read_text())["protocols"]
    r1, r5, r10 = (f"{found['sentence']['s2s'][name]:.1f}" for name in ("r1", "r5", "r10"))
    assert f"FAISS agrees with the exact ranks (R@1 s2s {r1} of 150 queries)" in captured.err
    full, sentence = lines = captured.err.splitlines()[-2:]
    assert full.startswith("demo vsepp full: i2t R@1/5/10 ")
    low, high = found["full"]["ci95"]["rsum"]
    assert full.endswith(f", rsum {found['full']['rsum']:.1f} [{low:.1f}, {high:.1f}]")
    assert sentence == f"demo vsepp sentence: s2s R@1/5/10 {r1} / {r5} / {r10}"
    succeeds(eval_main, *arguments)
    assert capsys.readouterr().out.splitlines() == lines
    assert sorted(tmp_path.iterdir()) == [file, out]


def test_what_has_no_captions_to_compare_is_refused(tmp_path: Path, fails: Fails) -> None:
    scores = write_embeddings(tmp_path / "s.h5", made(captions=None, scores=np.zeros((30, 150), np.float32)))
    single = write_embeddings(tmp_path / "1.h5", made(n_each=1))
    for file, protocols, message in (
        (scores, (), f"{scores}: the protocol sentence needs caption embeddings"),
        (single, (), "needs images with two captions or more"),
        (single, ("--protocol", "1k"), "needs 1000 images"),
    ):
        assert message in fails(eval_main, file, *protocols, "--protocol", "sentence", "--out", tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("make", [made, made_order])
def test_a_sample_of_queries_is_compared_like_all_of_them(make: Callable[..., Embeddings]) -> None:
    run = make(n_images=300, noise=2)
    image_of_caption, similarity = run.image_of_caption(), run.similarity
    ranks = ranks_from_embeddings(*map(torch.from_numpy, (*run.vectors, image_of_caption)), similarity)
    check, more = (check_against_search, ()) if similarity == "cosine" else (check_against_candidates, ("order",))
    agreement = check(*run.vectors, image_of_caption, ranks, DEFAULT_KS, *more, max_compared=40)
    assert (agreement.n_compared, agreement.n_queries) == ({"i2t": 40, "t2i": 40}, {"i2t": 300, "t2i": 1500})
    if similarity == "cosine":
        assert agreement.recalls == agreement.exact_recalls
    wrong = Ranks(ranks.i2t, np.where(ranks.t2i == 0, 299, 0))
    with pytest.raises(RuntimeError, match="t2i query"):
        check(*run.vectors, image_of_caption, wrong, DEFAULT_KS, *more, max_compared=40)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_a_rank_that_is_off_by_one_at_k_is_noticed(direction: str) -> None:
    run = made(n_images=300, noise=4)
    split = run.images, run.captions, run.image_of_caption()
    ranks = ranks_from_embeddings(*map(torch.from_numpy, split))
    for k, step in product(DEFAULT_KS, (-1, 1)):
        off = {"i2t": ranks.i2t.copy(), "t2i": ranks.t2i.copy()}
        (queries,) = np.nonzero(off[direction] == (k - 1 if step > 0 else k))
        off[direction][queries[0]] += step
        with pytest.raises(RuntimeError, match=f"{direction} query {queries[0]}"):
            check_against_search(*split, Ranks(**off), DEFAULT_KS)


def test_captions_that_are_not_of_unit_length_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made()
    evaluated(tmp_path, run)
    assert "not 1" not in caplog.text
    evaluated(tmp_path, replace(run, captions=3 * run.captions))
    assert "0.h5: captions have lengths from 3 to 3, not 1" in caplog.text


@pytest.mark.parametrize("make", [made, made_order])
def test_an_index_that_looks_everywhere_finds_what_the_exact_search_finds(
    make: Callable[..., Embeddings], tmp_path: Path, capsys: Printed
) -> None:
    file, out = write_embeddings(tmp_path / "e.h5", make(n_images=200, noise=2)), tmp_path / "r.json"
    succeeds(eval_main, file, "--index", "IVF4,Flat", "--index-parameters", "nprobe=4", "--bootstrap", 0, "--out", out)
    result = json.loads(out.read_text())
    for direction in ("i2t", "t2i"):
        if make is made:
            assert result["index"][direction]["recall_at_10"] == 100
            for name in ("r1", "r5", "r10"):
                assert result["index"][direction][name] == pytest.approx(result["protocols"]["full"][direction][name])
        else:  # order scores are of candidates only
            assert 20 < result["index"][direction]["recall_at_10"] <= 100
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("index IVF4,Flat nprobe=4: i2t R@1/5/10 ")
    assert line.endswith("; 200 candidates re-ranked by exact scores") == (make is made_order)


def test_an_index_that_cannot_be_is_refused(tmp_path: Path, fails: Fails) -> None:
    run, out = made(), tmp_path / "r.json"
    file = write_embeddings(tmp_path / "e.h5", run)
    scores = write_embeddings(tmp_path / "s.h5", made(images=None, captions=None, scores=np.zeros((30, 150), np.float32)))
    assert "s.h5: holds scores, but FAISS indexes embeddings" in fails(eval_main, scores, "--index", "Flat", "--out", out)
    assert "name it with --index" in fails(eval_main, file, "--index-parameters", "nprobe=4", "--out", out)
    assert "IVF4,Flat" in fails(eval_main, file, "--index", "IVF4,Flat", "--out", out)  # 30 images do not train 4 lists
    assert not out.exists()
