"""The ladder against slow references: metrics, their intervals and spread, costs, and the best trade-offs."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import write_result
from tests.eval.slow_ranks import slow_ranks
from vse.eval.cli import table_main
from vse.eval.defaults import LADDER_COSTS
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.options import EvaluationOptions
from vse.eval.tables.ladder import LadderTable, build_ladder, cost_cell, pareto_front

N_IMAGES, N_EACH = 20, 2
COST = {"extraction_s": {"fc7": 100.0, "tfidf": 5.0}, "cache_mb": {"fc7": 8.0, "tfidf": 2.0}, "model_mb": 4.0}


def embeddings(name: str, seed: int, noise: float, **cost: Any) -> Embeddings:
    """Embeddings of a run that says what it cost."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(N_IMAGES, 8)).astype(np.float32)
    captions = np.repeat(images, N_EACH, axis=0) + noise * rng.normal(size=(N_IMAGES * N_EACH, 8)).astype(np.float32)
    config = {"feature": "fc7", "caption_feature": "tfidf", "title": "VSE++", "rows": []}
    return Embeddings(
        image_ids=np.arange(N_IMAGES),
        caption_ids=np.arange(N_IMAGES * N_EACH),
        caption_image_ids=np.repeat(np.arange(N_IMAGES), N_EACH),
        images=images / np.linalg.norm(images, axis=1, keepdims=True),
        captions=captions / np.linalg.norm(captions, axis=1, keepdims=True),
        dataset="demo",
        split="test",
        experiment=name,
        seed=seed,
        provenance=json.dumps({"config": config, **({"cost": COST | cost} if cost else {})}),
    )


def result(folder: Path, name: str, *runs: Embeddings) -> Path:
    """The result of some seeds of a model."""
    files = [write_embeddings(folder / f"{name}-{run.seed}.h5", run) for run in runs]
    return write_result(files, folder / f"{name}.json", options=EvaluationOptions(bootstrap=200))


def edited(path: Path, change: Callable[[Any], None]) -> Path:
    """The result with another content, as if it had been written so."""
    content = json.loads(path.read_text())
    change(content)
    content.pop("sha256", None)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def two_seeds(tmp_path: Path) -> tuple[Path, list[Embeddings]]:
    """A result over two seeds, and their embeddings."""
    runs = [embeddings("vsepp+tfidf+fc7", seed, 2.0, train_s=10.0 * (1 + seed), embed_s=1.0) for seed in (0, 1)]
    return result(tmp_path, "two", *runs), runs


def slow_hits(run: Embeddings) -> list[list[tuple[int, list[int]]]]:
    """Of both directions, image and ranks of each query."""
    of = run.caption_image_ids.tolist()
    i2t, t2i = slow_ranks(run.images.astype(np.float64) @ run.captions.astype(np.float64).T, of)
    return [
        [(k, [rank]) for k, rank in enumerate(i2t)],
        [(k, [t2i[c] for c in range(len(of)) if of[c] == k]) for k in range(N_IMAGES)],
    ]


def slow_rsum(run: Embeddings, images: list[int]) -> float:
    """The rsum of the queries of some images, each as often as it is among them."""
    total = 0.0
    for by_image in slow_hits(run):
        ranks = [rank for image in images for rank in by_image[image][1]]
        total += sum(100.0 * sum(rank < k for rank in ranks) / len(ranks) for k in (1, 5, 10))
    return total


def test_a_row_has_the_mean_of_the_seeds_their_spread_and_an_interval_over_images(
    two_seeds: tuple[Path, list[Embeddings]],
) -> None:
    path, runs = two_seeds
    (row,) = build_ladder([path]).to_dict("records")
    each = [slow_rsum(run, list(range(N_IMAGES))) for run in runs]
    assert row["rsum"] == pytest.approx(statistics.mean(each))
    assert row["rsum_std"] == pytest.approx(statistics.stdev(each))
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, N_IMAGES, (200, N_IMAGES)).tolist()
    hits = [slow_hits(run) for run in runs]
    means = []
    for images in drawn:
        totals = []
        for of_run in hits:
            ranks = [[rank for image in images for rank in by_image[image][1]] for by_image in of_run]
            totals.append(sum(100.0 * sum(r < k for r in one) / len(one) for one in ranks for k in (1, 5, 10)))
        means.append(statistics.mean(totals))
    assert (row["rsum_low"], row["rsum_high"]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert row["rsum_low"] < row["rsum"] < row["rsum_high"]


def test_costs_are_those_of_both_caches_once_and_of_a_seed_on_average(two_seeds: tuple[Path, list[Embeddings]]) -> None:
    path, _ = two_seeds
    evaluation = json.loads(path.read_text())["provenance"]["evaluation_s"]
    (row,) = build_ladder([path]).to_dict("records")
    assert (row["extraction_s"], row["train_s"], row["cache_mb"], row["model_mb"]) == (105.0, 15.0, 10.0, 4.0)
    assert row["eval_s"] == pytest.approx(1.0 + evaluation / 2)
    assert row["total_s"] == pytest.approx(105 + 15 + row["eval_s"])


def test_a_row_says_what_was_read(two_seeds: tuple[Path, list[Embeddings]], tmp_path: Path) -> None:
    (row,) = build_ladder([two_seeds[0]]).to_dict("records")
    said = ("method", "captions", "images", "experiment", "dataset", "split", "protocol", "n_images", "n_captions", "seeds")
    assert [row[name] for name in said] == ["VSE++", "tfidf", "fc7", "vsepp+tfidf+fc7", "demo", "test", "full", 20, 40, 2]
    one = embeddings("vsepp", 3, 1.0)
    words = result(tmp_path, "words", one)
    (row,) = build_ladder([edited(words, lambda r: r["provenance"]["config"].update(caption_feature=None))]).to_dict("records")
    assert (row["captions"], row["images"], "rsum_std" in row) == ("words", "fc7", False)
    (row,) = build_ladder([edited(words, lambda r: r.update(provenance={}))]).to_dict("records")
    assert (row["captions"], row["images"], row["method"]) == ("", "", "VSE++ (1C)")


def slow_front(points: list[tuple[float, float]]) -> list[bool]:
    """By the definition, each point against each."""
    return [
        not any(
            cost <= own and value >= worth and (cost < own or value > worth)
            for cost, value in points
        )
        and np.isfinite(own)
        and np.isfinite(worth)
        for own, worth in points
    ]  # fmt: skip


COORDINATE = st.integers(0, 4).map(float) | st.sampled_from([float("nan")])


@given(st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    costs, values = (np.array([point[k] for point in points], float) for k in (0, 1))
    assert pareto_front(costs, values).tolist() == slow_front(points)


def ladder_of_three(folder: Path) -> list[Path]:
    """A cheap model, a dear and better one, and one that is dear and no better."""
    made = {"cheap": (2.0, 1.0), "better": (1.0, 50.0), "worse": (3.0, 60.0)}
    return [
        result(folder, name, embeddings(name, 0, noise, train_s=seconds, embed_s=0.0))
        for name, (noise, seconds) in made.items()
    ]


def test_best_trade_offs_are_marked_and_the_highest_rsum_comes_first(tmp_path: Path) -> None:
    table = build_ladder(ladder_of_three(tmp_path))
    assert table["experiment"].tolist() == ["better", "cheap", "worse"]
    assert table["best"].tolist() == ["yes", "yes", ""]


def test_another_cost_has_another_front(tmp_path: Path) -> None:
    files = ladder_of_three(tmp_path)
    table = build_ladder(files, "model_mb")
    assert table["best"].tolist() == ["yes", "", ""], "all are as large, so the best one is the only one"


def test_unknown_costs_are_blank_and_mark_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unknown = result(tmp_path, "unknown", embeddings("unknown", 0, 0.5))
    with caplog.at_level(logging.WARNING):
        table = build_ladder([unknown])
    assert table[[name for name in LADDER_COSTS if name != "eval_s"]].isna().all(axis=None)
    assert table["best"].tolist() == [""]
    assert "no result has the cost total_s" in caplog.text
    both = build_ladder([unknown, *ladder_of_three(tmp_path)])
    assert both.set_index("experiment")["best"].to_dict() == {"unknown": "", "better": "yes", "cheap": "yes", "worse": ""}


def test_a_cost_that_is_no_number_is_not_known(two_seeds: tuple[Path, list[Embeddings]]) -> None:
    def spoil(content: Any) -> None:
        content["provenance"] |= {"costs": [{"train_s": "long", "extraction_s": 3, "model_mb": -1}], "evaluation_s": True}

    (row,) = build_ladder([edited(two_seeds[0], spoil)]).to_dict("records")
    assert all(np.isnan(row[name]) for name in LADDER_COSTS)


def test_data_sets_have_fronts_of_their_own(tmp_path: Path) -> None:
    cheap, better, _ = ladder_of_three(tmp_path)
    other = edited(better, lambda content: content.update(dataset="other"))
    table = build_ladder([cheap, other])
    assert table[["dataset", "best"]].to_numpy().tolist() == [["demo", "yes"], ["other", "yes"]]


def test_the_csv_is_the_whole_table(two_seeds: tuple[Path, list[Embeddings]], tmp_path: Path) -> None:
    table = build_ladder([two_seeds[0]])
    read = pd.read_csv(LadderTable("ladder").write(table, tmp_path / "x.csv"))
    assert list(read) == list(table)
    assert read["rsum"].tolist() == [round(table["rsum"][0], 2)]


def test_latex_and_terminal_show_what_people_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in ladder_of_three(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        table_main(["ladder", *files])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert "| method | captions | images |" in text
    assert text.count("| * |") == 2
    assert "total s |" in text
    with pytest.raises(SystemExit):
        table_main(["ladder", *files, "--out", str(tmp_path / "x.tex")])
    latex = (tmp_path / "x.tex").read_text()
    assert "model MB" in latex
    assert "\\toprule" in latex


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "0.0123"), (1.5, "1.5"), (12.34, "12.3"), (1234.5, "1234"), (np.nan, "")]
)
def test_costs_are_shown_to_three_digits(value: float, text: str) -> None:
    assert cost_cell(value) == text


def test_mistakes_are_one_line(tmp_path: Path, fails: Callable[..., str]) -> None:
    (good, *_) = ladder_of_three(tmp_path)
    folds = edited(result(tmp_path, "folds", embeddings("folds", 0, 1.0)), lambda r: r["protocols"].pop("full"))
    cases = [
        (["ladder"], "the table ladder needs result files"),
        (["ladder", folds], "folds.json: has no metrics of the whole split"),
        (["ladder", good, "--dataset", "demo"], "--dataset: the table ladder"),
        (["summary", good, "--cost", "train_s"], "--cost: the table summary"),
        (["ladder", good, "--out", tmp_path / "x.txt"], "x.txt: the table ladder is written as .csv, .tex, .svg, .png"),
        (["ladder", good, "--out", good], "output is also an input"),
        (["ladder", tmp_path / "none.json"], "none.json: No such file"),
    ]
    for arguments, message in cases:
        assert message in fails(table_main, *arguments)
