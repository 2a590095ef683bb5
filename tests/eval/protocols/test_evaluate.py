from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

from tests.eval.evaluating import write_result
from tests.eval.slow_ranks import slow_cosines, slow_metrics_of_lists, slow_order_scores, slow_sentence_ranks
from vse.eval.cli import eval_main, table_main
from vse.eval.defaults import RECALLS
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.options import EvaluationOptions
from vse.eval.ranking.metrics import direction_metrics, metrics
from vse.eval.ranking.ranks import Ranks, ranks_from_embeddings
from vse.eval.search.cross_check import check_against_candidates, check_against_search
from vse.eval.search.top_k import search
from vse.eval.tables.summary import build_summary
from vse.pipeline.errors import UserError


def made(n_images: int = 30, n_each: int = 5, seed: int = 0, noise: float = 1.0, **changes: Any) -> Embeddings:
    """Embeddings whose captions are their image plus noise, of unit length."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(n_images, 16)).astype(np.float32)
    captions = np.repeat(images, n_each, axis=0) + noise * rng.normal(size=(n_images * n_each, 16)).astype(np.float32)
    values = Embeddings(
        image_ids=np.arange(n_images) * 3,
        caption_ids=np.arange(n_images * n_each),
        caption_image_ids=np.repeat(np.arange(n_images) * 3, n_each),
        images=images / np.linalg.norm(images, axis=1, keepdims=True),
        captions=captions / np.linalg.norm(captions, axis=1, keepdims=True),
        scores=None,
        dataset="demo",
        split="test",
        experiment="vsepp",
        seed=seed,
    )
    return replace(values, **changes)


def evaluated(tmp_path: Path, *embeddings: Embeddings, protocol: str | Sequence[str] = "auto") -> dict[str, Any]:
    files = [write_embeddings(tmp_path / f"{k}.h5", e) for k, e in enumerate(embeddings)]
    result: dict[str, Any] = json.loads(
        write_result(files, tmp_path / "result.json", protocol, options=EvaluationOptions(bootstrap=0)).read_text()
    )
    return result


def made_order(**changes: Any) -> Embeddings:
    """Order embeddings as the published models make them: of unit length, then without signs."""
    run = made(**changes)
    assert run.images is not None
    assert run.captions is not None
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
    found = metrics(Ranks(np.asarray(i2t), np.asarray(t2i)))
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
    for fold, start in zip(found["per_fold"], (0, 2000), strict=True):
        captions = run.captions[start : start + 2000].astype(np.float64)
        cosines = captions @ captions.T
        ranks = [
            sum(score >= cosines[query, query ^ 1] for other, score in enumerate(cosines[query]) if other // 2 != query // 2)
            for query in range(2000)
        ]
        assert fold["s2s"] == pytest.approx(direction_metrics(np.array(ranks)))
    assert found["s2s"]["r1"] == pytest.approx(np.mean([fold["s2s"]["r1"] for fold in found["per_fold"]]))


def test_a_result_says_what_its_ranks_were_compared_with(tmp_path: Path) -> None:
    """In the folds as over the whole split: how many queries over all folds and seeds, and for how many a negative ties."""
    runs = [made(n_images=2100, n_each=2, seed=seed) for seed in (0, 1)]
    files = [write_embeddings(tmp_path / f"{seed}.h5", run) for seed, run in enumerate(runs)]

    def cross_checked(n: int) -> dict[str, Any]:
        asked = EvaluationOptions(bootstrap=0, cross_checked=n)
        out = write_result(files, tmp_path / "r.json", ["auto", "sentence", "sentence-1k"], asked)
        checks: dict[str, Any] = json.loads(out.read_text())["cross_check"]
        return checks

    found = cross_checked(0)
    for check in found.values():
        assert (check["checked"], check["against"]) == (True, "an exact search by FAISS")
        assert all(n < check["queries"][direction] / 100 for direction, n in check["ties"].items())
    assert {name: check["queries"] for name, check in found.items()} == {
        "1k": {"i2t": 4000, "t2i": 8000},
        "full": {"i2t": 4200, "t2i": 8400},
        "sentence": {"s2s": 8400},
        "sentence-1k": {"s2s": 8000},
    }
    some = cross_checked(500)  # of each direction and seed, and of folds together
    assert {name: check["of"] for name, check in some.items()} == {name: check["queries"] for name, check in found.items()}
    assert {count for check in some.values() for count in check["queries"].values()} == {1000}


@pytest.mark.parametrize(
    ("make", "against"), [(made, "an exact search by FAISS"), (made_order, "candidates of FAISS, re-ranked by exact scores")]
)
def test_ties_are_counted(make: Callable[..., Embeddings], against: str, tmp_path: Path) -> None:
    run = make(noise=0.3)
    run.images[7], run.captions[35:40] = run.images[3], run.captions[15:20]
    found = evaluated(tmp_path, run)["cross_check"]["full"]
    every = {"i2t": 30, "t2i": 150}
    assert found == {"checked": True, "against": against, "queries": every, "of": every, "ties": {"i2t": 2, "t2i": 10}}


def test_a_result_says_why_its_ranks_were_not_compared(tmp_path: Path) -> None:
    run = made()
    scores = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    why = {"checked": False, "why": "FAISS does not search scores of pairs"}
    assert evaluated(tmp_path, scores)["cross_check"] == {"full": why}
    out = write_result(
        [write_embeddings(tmp_path / "e.h5", run)],
        tmp_path / "r.json",
        options=EvaluationOptions(cross_check=False, bootstrap=0),
    )
    assert json.loads(out.read_text())["cross_check"] == {"full": {"checked": False, "why": "--no-cross-check"}}


@pytest.mark.parametrize("text", ["50,20", "20 50", "1,20,5,50,10"])
def test_any_list_of_k_stands_beside_1_5_and_10(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And rsum stays the sum of these six."""
    run, out, rows = made(n_images=60, noise=2), tmp_path / "r.json", tmp_path / "q.csv"
    file = write_embeddings(tmp_path / "e.h5", run)
    with pytest.raises(SystemExit) as stop:
        eval_main(
            [
                str(file),
                "--k",
                text,
                "--out",
                str(out),
                "--per-query",
                str(rows),
                "--protocol",
                "full",
                "--protocol",
                "sentence",
            ]
        )
    assert stop.value.code == 0
    found, table = json.loads(out.read_text())["protocols"], pd.read_csv(rows)
    plain = evaluated(tmp_path, run, protocol=["full", "sentence"])["protocols"]
    for protocol, direction in (("full", "i2t"), ("full", "t2i"), ("sentence", "s2s")):
        metrics = found[protocol][direction]
        assert list(metrics)[:7] == ["r1", "r5", "r10", "r20", "r50", "medr", "meanr"]
        ranks = table[(table["protocol"] == protocol) & (table["direction"] == direction)]["rank"]
        assert {f"r{k}": metrics[f"r{k}"] for k in (20, 50)} == pytest.approx(
            {f"r{k}": 100 * (ranks < k).mean() for k in (20, 50)}
        )
        low, high = found[protocol]["ci95"][direction]["r20"]
        assert low <= metrics["r20"] <= high
        assert {name: value for name, value in metrics.items() if name not in ("r20", "r50")} == plain[protocol][direction]
    assert found["full"]["rsum"] == plain["full"]["rsum"]
    assert "full: i2t R@1/5/10/20/50 " in capsys.readouterr().err
    table = build_summary([out])
    assert table["t2i_r50"][0] == found["full"]["t2i"]["r50"]
    assert table["i2t_ndcg10"][0] == found["full"]["i2t"]["ndcg10"]


@pytest.mark.parametrize("text", ["0", "1,x", "-5", "5,1.5", "٣", "9" * 40])
def test_a_k_that_is_no_number_is_refused(text: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    file = write_embeddings(tmp_path / "e.h5", made(n_images=4))
    assert f"--k {text}: " in fails(eval_main, file, f"--k={text}")


def test_several_seeds_give_mean_and_standard_deviation(tmp_path: Path) -> None:
    runs = [made(seed=seed, noise=2) for seed in (0, 1, 2)]
    found = evaluated(tmp_path, *runs)
    figures = [slow_metrics(run, range(30))["t2i"]["r1"] for run in runs]
    assert found["seeds"] == [0, 1, 2]
    assert found["protocols"]["full"]["t2i"]["r1"] == pytest.approx({"mean": np.mean(figures), "std": np.std(figures, ddof=1)})


def test_a_result_carries_the_hash_of_its_content(tmp_path: Path) -> None:
    result = evaluated(tmp_path, made(n_images=4, provenance='{"note": "für α"}'))
    content = {key: value for key, value in result.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert result["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_score_matrix_is_evaluated_like_the_embeddings_it_came_from(tmp_path: Path) -> None:
    run = made()
    scores = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    assert evaluated(tmp_path, scores)["protocols"] == evaluated(tmp_path, run)["protocols"]


def test_rows_are_joined_by_id(tmp_path: Path) -> None:
    run = made()
    order = np.random.default_rng(1).permutation(len(run.caption_ids))
    mixed = replace(
        run,
        caption_ids=run.caption_ids[order],
        caption_image_ids=run.caption_image_ids[order],
        captions=run.captions[order],
    )
    found, expected = (evaluated(tmp_path, one)["protocols"]["full"] for one in (mixed, run))
    for direction in ("i2t", "t2i"):
        assert found[direction] == pytest.approx(expected[direction])
    assert found["rsum"] == expected["rsum"]


@pytest.mark.parametrize("beside", ["captions", "images", "both"])
def test_where_there_are_scores_they_compare_images_and_captions(beside: str, tmp_path: Path) -> None:
    """A model of pairs may also have embeddings, which need not be of one dimension."""
    run, other = made(), made(seed=7)
    assert other.captions is not None
    scores = replace(run, images=None, captions=None, scores=run.images @ run.captions.T)
    images = None if beside == "captions" else np.ones((30, 2), np.float32)
    both = replace(scores, captions=None if beside == "images" else other.captions, images=images, similarity="pairs")
    assert evaluated(tmp_path, both)["protocols"] == evaluated(tmp_path, scores)["protocols"]
    if beside != "images":
        found = evaluated(tmp_path, both, protocol=["full", "sentence"])["protocols"]
        assert found["full"] == evaluated(tmp_path, run)["protocols"]["full"]
        assert found["sentence"] == evaluated(tmp_path, other, protocol="sentence")["protocols"]["sentence"]


def slow_sentence(run: Embeddings) -> dict[str, Any]:
    assert run.captions is not None
    ranks = slow_sentence_ranks(slow_cosines(run.captions), run.image_of_caption().tolist())
    return direction_metrics(np.asarray(list(ranks.values())))


@pytest.mark.parametrize("make", [made, made_order])
def test_captions_query_captions_by_cosine(make: Callable[..., Embeddings], tmp_path: Path) -> None:
    run = make(n_images=12, n_each=3)
    longer = replace(run, captions=run.captions * 3)
    found = evaluated(tmp_path, longer, protocol="sentence")["protocols"]
    assert found == {"sentence": {"s2s": pytest.approx(slow_sentence(run)), "n_queries": 36}}


def test_a_caption_without_another_one_of_its_image_is_no_query(tmp_path: Path) -> None:
    run = made(n_images=12, n_each=2)
    moved = run.caption_image_ids.copy()
    moved[1] = moved[2]  # the first image keeps one caption, the second one has three
    run = replace(run, caption_image_ids=moved)
    found = evaluated(tmp_path, run, protocol="sentence")["protocols"]["sentence"]
    assert found == {"s2s": pytest.approx(slow_sentence(run)), "n_queries": 23}


def test_several_seeds_have_as_many_queries_as_one(tmp_path: Path) -> None:
    runs = [made(n_images=10, n_each=3, seed=seed, noise=2) for seed in (0, 1, 2)]
    found = evaluated(tmp_path, *runs, protocol="sentence")["protocols"]["sentence"]
    assert found["n_queries"] == 30
    figures = [slow_sentence(run) for run in runs]
    for name, figure in found["s2s"].items():
        values = [of_seed[name] for of_seed in figures]
        assert figure == pytest.approx({"mean": np.mean(values), "std": np.std(values, ddof=1)})


def test_protocols_may_be_several(tmp_path: Path) -> None:
    small, large = made(n_images=20), made(n_images=1000, n_each=2)
    for run, protocol, expected in (
        (small, "auto", ["full"]),
        (small, ["auto", "sentence"], ["full", "sentence"]),
        (small, ["sentence", "full", "full"], ["full", "sentence"]),
        (large, ("auto",), ["1k", "full"]),
        (large, ("sentence", "auto"), ["1k", "full", "sentence"]),
        (large, ["sentence", "1k"], ["1k", "sentence"]),
    ):
        assert list(evaluated(tmp_path, run, protocol=protocol)["protocols"]) == expected
    for unknown in ("sentences", ["full", "sentences"]):
        with pytest.raises(UserError, match="unknown protocol 'sentences' \\(did you mean 'sentence'\\?"):
            evaluated(tmp_path, small, protocol=unknown)
    with pytest.raises(UserError, match="known: 1k, auto, cxc, eccv, full, sentence"):
        evaluated(tmp_path, small, protocol=[])


def test_the_command_takes_several_protocols(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_embeddings(tmp_path / "e.h5", made(noise=2)), tmp_path / "r.json"
    with pytest.raises(SystemExit) as stop:
        eval_main([str(file), "--protocol", "auto", "--protocol", "sentence", "--out", str(out)])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    found = json.loads(out.read_text())["protocols"]
    r1, r5, r10 = (f"{found['sentence']['s2s'][name]:.1f}" for name in ("r1", "r5", "r10"))
    assert f"FAISS agrees with the exact ranks (R@1 s2s {r1} of 150 queries)" in captured.err
    full, sentence = captured.err.splitlines()[-2:]
    assert full.startswith("demo vsepp full: i2t R@1/5/10 ")
    low, high = found["full"]["ci95"]["rsum"]
    assert full.endswith(f", rsum {found['full']['rsum']:.1f} [{low:.1f}, {high:.1f}]")
    assert sentence == f"demo vsepp sentence: s2s R@1/5/10 {r1} / {r5} / {r10}"


def test_without_a_file_to_write_the_metrics_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_embeddings(tmp_path / "e.h5", made(noise=2)), tmp_path / "r.json"
    printed = []
    for more in (["--out", str(out)], []):
        with pytest.raises(SystemExit) as stop:
            eval_main([str(file), *more])
        assert stop.value.code == 0
        printed.append(capsys.readouterr())
    assert printed[0].out == f"{out}\n"
    assert printed[1].out.startswith("demo vsepp full: i2t R@1/5/10 ")
    assert printed[1].out == printed[0].err.splitlines(keepends=True)[-1]
    assert sorted(tmp_path.iterdir()) == [file, out]


def test_what_has_no_captions_to_compare_is_refused(tmp_path: Path, fails: Callable[..., str]) -> None:
    sentence = ("--protocol", "sentence", "--out", tmp_path / "r.json")
    scores = write_embeddings(tmp_path / "s.h5", made(captions=None, scores=np.zeros((30, 150), np.float32)))
    assert f"{scores}: the protocol sentence needs caption embeddings" in fails(eval_main, scores, *sentence)
    single = write_embeddings(tmp_path / "1.h5", made(n_each=1))
    assert "needs images with two captions or more" in fails(eval_main, single, *sentence)
    assert "'sentences' is not one of" in fails(eval_main, single, "--protocol", "sentences", "--out", tmp_path / "r.json")
    assert "needs 1000 images" in fails(eval_main, single, "--protocol", "auto", "--protocol", "1k", *sentence)
    assert not (tmp_path / "r.json").exists()


def test_search_finds_the_highest_inner_products() -> None:
    run = made()
    scores, rows = search(run.captions, run.images, 4)
    full = run.images @ run.captions.T
    np.testing.assert_array_equal(rows, np.argsort(-full, axis=1)[:, :4])
    np.testing.assert_allclose(scores, -np.sort(-full, axis=1)[:, :4], rtol=1e-5)


def test_faiss_and_the_exact_ranks_must_agree(tmp_path: Path) -> None:
    run = made(noise=2)
    assert run.images is not None
    assert run.captions is not None
    exact = evaluated(tmp_path, run)["protocols"]["full"]
    image_of_caption = run.image_of_caption()
    ranks = ranks_from_embeddings(*map(torch.from_numpy, (run.images, run.captions, image_of_caption)))
    found = check_against_search(run.images, run.captions, image_of_caption, ranks, RECALLS).recalls
    for direction in ("i2t", "t2i"):
        assert found[direction] == pytest.approx({f"r{k}": exact[direction][f"r{k}"] for k in RECALLS})
    wrong = Ranks(np.zeros(30, np.int64), np.zeros(150, np.int64))
    with pytest.raises(RuntimeError, match="query"):
        check_against_search(run.images, run.captions, image_of_caption, wrong, RECALLS)


@pytest.mark.parametrize("make", [made, made_order])
def test_a_sample_of_queries_is_compared_like_all_of_them(make: Callable[..., Embeddings]) -> None:
    run = make(n_images=300, noise=2)
    assert run.vectors is not None
    image_of_caption, similarity = run.image_of_caption(), run.similarity
    ranks = ranks_from_embeddings(*map(torch.from_numpy, (*run.vectors, image_of_caption)), similarity)
    check, more = (check_against_search, ()) if similarity == "cosine" else (check_against_candidates, ("order",))
    agreement = check(*run.vectors, image_of_caption, ranks, RECALLS, *more, most=40)
    assert (agreement.queries, agreement.of) == ({"i2t": 40, "t2i": 40}, {"i2t": 300, "t2i": 1500})
    if similarity == "cosine":
        assert agreement.recalls == agreement.exact
    wrong = Ranks(ranks.i2t, np.where(ranks.t2i == 0, 299, 0))
    with pytest.raises(RuntimeError, match="t2i query"):
        check(*run.vectors, image_of_caption, wrong, RECALLS, *more, most=40)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("k", RECALLS)
@pytest.mark.parametrize("step", [-1, 1])
def test_a_rank_that_is_off_by_one_at_k_is_noticed(direction: str, k: int, step: int) -> None:
    run = made(n_images=300, noise=4)
    assert run.images is not None
    assert run.captions is not None
    image_of_caption = run.image_of_caption()
    ranks = ranks_from_embeddings(*map(torch.from_numpy, (run.images, run.captions, image_of_caption)))
    off = {"i2t": ranks.i2t.copy(), "t2i": ranks.t2i.copy()}
    (queries,) = np.nonzero(off[direction] == (k - 1 if step > 0 else k))
    assert len(queries)
    off[direction][queries[0]] += step
    with pytest.raises(RuntimeError, match=f"{direction} query {queries[0]}"):
        check_against_search(run.images, run.captions, image_of_caption, Ranks(**off), RECALLS)


def test_order_ranks_are_compared_with_candidates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    exact = evaluated(tmp_path, made_order(noise=0.5))["protocols"]["full"]
    i2t, t2i = (
        f"{direction} {exact[direction]['r1']:.1f}, exact {exact[direction]['r1']:.1f}" for direction in ("i2t", "t2i")
    )
    assert f"re-ranked, do not contradict the exact ranks (R@1 {i2t} of 30 queries; {t2i} of 150 queries)" in caplog.text


@pytest.mark.parametrize("make", [made, made_order])
def test_ties_do_not_trouble_the_cross_check(make: Callable[..., Embeddings], tmp_path: Path) -> None:
    run = make()
    collapsed = replace(run, images=np.ones_like(run.images), captions=np.ones_like(run.captions))
    assert evaluated(tmp_path, collapsed)["protocols"]["full"]["rsum"] == 0


FAULTS: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "no captions": (lambda f: f.__delitem__("captions"), "lacks captions"),
    "no split": (lambda f: f.attrs.__delitem__("split"), "lacks the attribute split"),
    "scores of another size": (lambda f: f.create_dataset("scores", data=np.zeros((30, 149))), "scores has shape (30, 149)"),
    "captions of another length, beside scores": (
        lambda f: (
            f.create_dataset("scores", data=np.zeros((30, 150))),
            f.__delitem__("captions"),
            f.create_dataset("captions", data=np.zeros((149, 4))),
        ),
        "captions has shape (149, 4), expected (150, dim)",
    ),
    "NaN in captions beside scores": (
        lambda f: (f.create_dataset("scores", data=np.zeros((30, 150))), f["captions"].__setitem__((9, 0), np.nan)),
        "captions row 9 is not finite",
    ),
    "no dimensions": (
        lambda f: (f.__delitem__("captions"), f.create_dataset("captions", data=np.zeros((150, 0)))),
        "captions has shape (150, 0), expected (150, dim)",
    ),
    "one axis": (lambda f: (f.__delitem__("images"), f.create_dataset("images", data=np.zeros(30))), "images has shape (30,)"),
    "NaN": (lambda f: f["images"].__setitem__((4, 2), np.nan), "images row 4 is not finite"),
    "duplicate id": (lambda f: f["image_ids"].__setitem__(1, 0), "duplicate image id 0"),
    "caption without image": (lambda f: f["caption_image_ids"].__setitem__(3, 77), "belongs to image 77"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_named(fault: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    spoil, message = FAULTS[fault]
    path = write_embeddings(tmp_path / "e.h5", made())
    with h5py.File(path, "r+") as file:
        del file.attrs["content_sha256"]  # another program writes none
        spoil(file)
    assert message in fails(eval_main, path, "--out", tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_files_of_different_models_are_not_seeds(tmp_path: Path, fails: Callable[..., str]) -> None:
    a = write_embeddings(tmp_path / "a.h5", made())
    b = write_embeddings(tmp_path / "b.h5", made(seed=1, experiment="vse0"))
    c = write_embeddings(tmp_path / "c.h5", made())
    d = write_embeddings(tmp_path / "d.h5", made_order(seed=1))
    assert "has similarity 'order'" in fails(eval_main, a, d, "--out", tmp_path / "r.json")
    assert "has experiment 'vse0'" in fails(eval_main, a, b, "--out", tmp_path / "r.json")
    assert "the same seed 0" in fails(eval_main, a, c, "--out", tmp_path / "r.json")
    assert "no such file" in fails(eval_main, tmp_path / "x.h5", "--out", tmp_path / "r.json")
    assert "needs 1000 images" in fails(eval_main, a, "--protocol", "1k", "--out", tmp_path / "r.json")


def test_a_similarity_that_nobody_knows_is_refused(tmp_path: Path, fails: Callable[..., str]) -> None:
    file = write_embeddings(tmp_path / "e.h5", made(similarity="ordr"))
    line = fails(eval_main, file, "--out", tmp_path / "r.json")
    assert f"{file}: unknown similarity 'ordr' (did you mean 'order'? known: cosine, order)" in line


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    run = made()
    found = read_embeddings(write_embeddings(tmp_path / "e.h5", run))
    for name, value in vars(replace(run, source=found.source)).items():
        np.testing.assert_array_equal(getattr(found, name), value)


def test_the_summary_has_a_row_per_result_and_protocol(tmp_path: Path) -> None:
    results = []
    for name, n_images in (("vse0", 1000), ("vsepp", 1100)):
        file = write_embeddings(tmp_path / f"{name}.h5", made(n_images=n_images, experiment=name))
        results.append(write_result([file], tmp_path / f"{name}.json"))
    with pytest.raises(SystemExit) as stop:
        table_main(["summary", *map(str, results), "--out", str(tmp_path / "table.csv")])
    assert stop.value.code == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert list(zip(table["experiment"], table["protocol"], strict=True)) == [
        ("vse0", "full"),
        ("vsepp", "1k"),
        ("vsepp", "full"),
    ]
    full = json.loads(results[0].read_text())["protocols"]["full"]
    assert table["rsum"][0] == pytest.approx(full["rsum"], abs=0.01)
    assert table["i2t_medr"][0] == full["i2t"]["medr"]


def test_a_table_of_several_seeds_has_deviations_and_can_be_latex(tmp_path: Path, fails: Callable[..., str]) -> None:
    files = [write_embeddings(tmp_path / f"{seed}.h5", made(seed=seed, noise=2)) for seed in (0, 1)]
    result = write_result(files, tmp_path / "r.json")
    assert build_summary([result])["rsum_std"][0] > 0
    with pytest.raises(SystemExit):
        table_main(["summary", str(result), "--out", str(tmp_path / "t.tex")])
    text = (tmp_path / "t.tex").read_text()
    assert "\\toprule" in text
    assert "image to text" in text
    assert "$\\pm$" in text
    assert "t.xls: the table summary is written as" in fails(table_main, "summary", result, "--out", tmp_path / "t.xls")


def test_captions_that_are_not_of_unit_length_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made()
    assert run.captions is not None
    evaluated(tmp_path, run)
    assert "not 1" not in caplog.text
    evaluated(tmp_path, replace(run, captions=3 * run.captions))
    assert "0.h5: captions have lengths from 3 to 3, not 1" in caplog.text


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="not a result file"):
        build_summary([tmp_path / "bad.json"])


@pytest.mark.parametrize("make", [made, made_order])
def test_an_index_that_looks_everywhere_finds_what_the_exact_search_finds(
    make: Callable[..., Embeddings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_embeddings(tmp_path / "e.h5", make(n_images=200, noise=2)), tmp_path / "r.json"
    with pytest.raises(SystemExit) as stop:
        eval_main([str(file), "--index", "IVF4,Flat", "--index-parameters", "nprobe=4", "--out", str(out)])
    assert stop.value.code == 0
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


@pytest.mark.parametrize("factory", ["HNSW8", "PCA4,Flat", "PCA4,IVF4,PQ4x4", "IVF4,PQ4x4,RFlat"])
def test_indexes_of_several_parts_are_tried_by_the_command(factory: str, tmp_path: Path) -> None:
    file, out = write_embeddings(tmp_path / "e.h5", made(n_images=1000, n_each=1)), tmp_path / "r.json"
    command = [str(file), "--protocol", "full", "--no-cross-check", "--bootstrap", "0", "--index", factory, "--out", str(out)]
    with pytest.raises(SystemExit) as stop:
        eval_main(command)
    assert stop.value.code == 0
    assert 0 < json.loads(out.read_text())["index"]["t2i"]["recall_at_10"] <= 100


def test_an_index_that_cannot_be_is_refused(tmp_path: Path, fails: Callable[..., str]) -> None:
    run, out = made(), tmp_path / "r.json"
    file = write_embeddings(tmp_path / "e.h5", run)
    scores = write_embeddings(tmp_path / "s.h5", made(images=None, captions=None, scores=np.zeros((30, 150), np.float32)))
    assert "s.h5: holds scores, but FAISS indexes embeddings" in fails(eval_main, scores, "--index", "Flat", "--out", out)
    assert "name it with --index" in fails(eval_main, file, "--index-parameters", "nprobe=4", "--out", out)
    assert "IVF4,Flat" in fails(eval_main, file, "--index", "IVF4,Flat", "--out", out)  # 30 images do not train 4 lists
    assert not out.exists()
