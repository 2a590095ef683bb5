"""The ladder against slow references: metrics, their intervals and spread, costs, and the best trade-offs."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.eval.evaluating import Fails, Printed, succeeds, write_result
from tests.eval.slow_ranks import slow_ranks
from vse.eval.cli import table_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.options import COST_NAMES, AllEvaluateOptions
from vse.eval.tables.ladder import LadderTable, build_ladder, pareto_front

N_IMAGES, N_EACH = 20, 2
COST = {"extraction_s": {"fc7": 100.0, "tfidf": 5.0}, "cache_mb": {"fc7": 8.0, "tfidf": 2.0}, "model_mb": 4.0}


def embeddings(name: str, seed: int, noise: float, **cost: Any) -> Embeddings:
    """Embeddings of a run that says what it cost."""
    rng, of = np.random.default_rng(seed), np.repeat(np.arange(N_IMAGES), N_EACH)
    images = rng.normal(size=(N_IMAGES, 8)).astype(np.float32)
    captions = images[of] + noise * rng.normal(size=(len(of), 8)).astype(np.float32)
    units = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (images, captions)]
    config = {"feature": "fc7", "caption_feature": "tfidf", "title": "VSE++", "rows": []}
    note = json.dumps({"config": config, **({"cost": COST | cost} if cost else {})})
    ids = np.arange(len(of))
    return Embeddings(ids[:N_IMAGES], ids, of, "demo", "test", *units, experiment=name, seed=seed, provenance=note)


def result(folder: Path, name: str, *runs: Embeddings) -> Path:
    """The result of some seeds of a model."""
    files = [write_embeddings(folder / f"{name}-{run.seed}.h5", run) for run in runs]
    return write_result(files, folder / f"{name}.json", options=AllEvaluateOptions(bootstrap=200))


def edited(path: Path, change: Callable[[Any], None]) -> Path:
    """The result with another content, as if it had been written so."""
    content = json.loads(path.read_text())
    change(content)
    content.pop("sha256", None)
    path.write_text(json.dumps(content))
    return path


TwoSeeds = tuple[Path, list[Embeddings]]


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> TwoSeeds:
    """A result over two seeds, and their embeddings. Read only."""
    runs = [embeddings("vsepp+tfidf+fc7", seed, 2.0, train_s=10.0 * (1 + seed), embed_s=1.0) for seed in (0, 1)]
    return result(tmp_path_factory.mktemp("two"), "two", *runs), runs


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A cheap model, a dear and better one, and one that is dear and no better. Read only."""
    folder = tmp_path_factory.mktemp("three")
    made = {"cheap": (2.0, 1.0), "better": (1.0, 50.0), "worse": (3.0, 60.0)}
    return [
        result(folder, name, embeddings(name, 0, noise, train_s=seconds, embed_s=0.0))
        for name, (noise, seconds) in made.items()
    ]


def slow_ranks_by_image(run: Embeddings) -> list[list[list[int]]]:
    """For both directions and each image, the ranks of its queries."""
    of = run.caption_image_ids.tolist()
    i2t, t2i = slow_ranks(run.images.astype(np.float64) @ run.captions.astype(np.float64).T, of)
    return [[[rank] for rank in i2t], [[t2i[c] for c in range(len(of)) if of[c] == k] for k in range(N_IMAGES)]]


def slow_rsum(ranks: list[list[list[int]]], images: list[int]) -> float:
    """The rsum of the queries of some images, each as often as it is among them."""
    chosen = [[rank for image in images for rank in by_image[image]] for by_image in ranks]
    return sum(100.0 * sum(rank < k for rank in each) / len(each) for each in chosen for k in (1, 5, 10))


def test_a_row_has_the_mean_of_the_seeds_their_spread_and_an_interval_over_images(two_seeds: TwoSeeds) -> None:
    path, runs = two_seeds
    (row,) = build_ladder([path]).to_dict("records")
    ranks = [slow_ranks_by_image(run) for run in runs]
    each = [slow_rsum(of_run, list(range(N_IMAGES))) for of_run in ranks]
    assert row["rsum"] == pytest.approx(statistics.mean(each))
    assert row["rsum_std"] == pytest.approx(statistics.stdev(each))
    drawn = np.random.default_rng(0).integers(0, N_IMAGES, (200, N_IMAGES)).tolist()
    means = [statistics.mean(slow_rsum(of_run, images) for of_run in ranks) for images in drawn]
    assert (row["rsum_low"], row["rsum_high"]) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert row["rsum_low"] < row["rsum"] < row["rsum_high"]


def test_costs_are_those_of_both_caches_once_and_of_a_seed_on_average(two_seeds: TwoSeeds) -> None:
    path, _ = two_seeds
    evaluation = json.loads(path.read_text())["provenance"]["evaluation_s"]
    (row,) = build_ladder([path]).to_dict("records")
    assert (row["extraction_s"], row["train_s"], row["cache_mb"], row["model_mb"]) == (105.0, 15.0, 10.0, 4.0)
    assert row["eval_s"] == pytest.approx(1.0 + evaluation / 2)
    assert row["total_s"] == pytest.approx(105 + 15 + row["eval_s"])
    said = ("method", "captions", "images", "experiment", "dataset", "split", "protocol", "n_images", "n_captions", "seeds")
    assert [row[name] for name in said] == ["VSE++", "tfidf", "fc7", "vsepp+tfidf+fc7", "demo", "test", "full", 20, 40, 2]


def test_a_row_without_a_caption_feature_or_provenance_names_words_or_nothing(tmp_path: Path) -> None:
    words = result(tmp_path, "words", embeddings("vsepp", 3, 1.0))
    (row,) = build_ladder([edited(words, lambda r: r["provenance"]["config"].update(caption_feature=None))]).to_dict("records")
    assert (row["captions"], row["images"], "rsum_std" in row) == ("words", "fc7", False)
    (row,) = build_ladder([edited(words, lambda r: r.update(provenance={}))]).to_dict("records")
    assert (row["captions"], row["images"], row["method"]) == ("", "", "VSE++ (1C)")


COORDINATE = st.integers(0, 4).map(float) | st.sampled_from([float("nan")])


@given(st.lists(st.tuples(COORDINATE, COORDINATE), max_size=12))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    costs, values = (np.array([point[k] for point in points], float) for k in (0, 1))
    slow = [not any(beats(other, own) for other in points) and bool(np.isfinite(own).all()) for own in points]
    assert pareto_front(costs, values).tolist() == slow


def test_best_trade_offs_are_marked_and_the_highest_rsum_comes_first(three: list[Path], tmp_path: Path) -> None:
    table = build_ladder(three)
    assert table["experiment"].tolist() == ["better", "cheap", "worse"]
    assert table["best"].tolist() == ["yes", "yes", ""]
    assert build_ladder(three, "model_mb")["best"].tolist() == ["yes", "", ""], (
        "all are as large, so the best one is the only one"
    )
    other = tmp_path / "other.json"
    shutil.copy(three[1], other)
    table = build_ladder([three[0], edited(other, lambda content: content.update(dataset="other"))])
    assert table[["dataset", "best"]].to_numpy().tolist() == [["demo", "yes"], ["other", "yes"]]
    read = pd.read_csv(LadderTable("ladder").write(table, tmp_path / "x.csv"))
    assert list(read) == list(table)
    assert read["rsum"].tolist() == table["rsum"].round(2).tolist()


def test_corrected_rows_have_their_own_best_trade_offs(three: list[Path], tmp_path: Path, capsys: Printed) -> None:
    corrected = shutil.copy(three[2], tmp_path / "corrected.json")
    correction = {"method": "csls", "parameters": {"k": 10}, "bank": "train"}
    table = build_ladder([*three, edited(corrected, lambda content: content.update(correction=correction))])
    assert table[["method", "correction", "best"]].to_numpy().tolist()[2:] == [
        ["VSE++", "", ""],
        ["VSE++ + csls (bank train)", "csls", "yes"],
    ]
    succeeds(table_main, "ladder", *three, corrected)
    assert "corrected rows with corrected rows" in capsys.readouterr().out
    succeeds(table_main, "ladder", *three)
    assert "corrected" not in capsys.readouterr().out


def test_unknown_costs_are_blank_and_mark_nothing(
    three: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: Fails
) -> None:
    unknown, out = result(tmp_path, "unknown", embeddings("unknown", 0, 0.5)), tmp_path / "x.svg"
    table = build_ladder([unknown])
    assert table[[name for name in COST_NAMES if name != "eval_s"]].isna().all(axis=None)
    assert table["best"].tolist() == [""]
    assert "no result has the cost total_s" in caplog.text
    both = build_ladder([unknown, *three])
    assert both.set_index("experiment")["best"].to_dict() == {"unknown": "", "better": "yes", "cheap": "yes", "worse": ""}
    assert "x.svg: no result has the cost total_s" in fails(table_main, "ladder", unknown, "--out", out)
    other = edited(unknown, lambda content: content.update(dataset="other"))
    assert "several datasets" in fails(table_main, "ladder", three[0], other, "--out", out)
    assert not out.exists()


def test_a_cost_that_is_no_number_is_not_known(tmp_path: Path) -> None:
    def spoil(content: Any) -> None:
        content["provenance"] |= {"costs": [{"train_s": "long", "extraction_s": 3, "model_mb": -1}], "evaluation_s": True}

    (row,) = build_ladder([edited(result(tmp_path, "one", embeddings("one", 0, 0.5)), spoil)]).to_dict("records")
    assert all(np.isnan(row[name]) for name in COST_NAMES)


def test_latex_terminal_and_picture_show_what_people_compare(three: list[Path], tmp_path: Path, capsys: Printed) -> None:
    succeeds(table_main, "ladder", *three)
    text = capsys.readouterr().out
    assert "| method | captions | images |" in text
    assert text.count("| * |") == 2
    for name in ("x.tex", "a.svg", "b.svg", "x.png"):
        succeeds(table_main, "ladder", *three, "--out", tmp_path / name)
    latex, drawn, again = ((tmp_path / name).read_text() for name in ("x.tex", "a.svg", "b.svg"))
    assert "model MB" in latex
    assert "\\toprule" in latex
    assert drawn == again
    ElementTree.fromstring(drawn)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"fc7", "tfidf", "rsum", "extraction, training and evaluation, seconds"} <= set(texts)
    assert texts.count("VSE++") == 3, "a name at each point"
    assert all("$" not in text for text in texts), "numbers at the axes are plain"
    with Image.open(tmp_path / "x.png") as image:
        assert image.width > 800
        assert len(np.unique(np.asarray(image.convert("L")))) > 10


def test_mistakes_are_one_line(three: list[Path], tmp_path: Path, fails: Fails) -> None:
    good, folds = three[0], result(tmp_path, "folds", embeddings("folds", 0, 1.0))
    edited(folds, lambda content: content["protocols"].pop("full"))
    for arguments, message in (
        (["vsepp_9"], "'vsepp_9' is no choice (did you mean 'vsepp_4'?"),
        ([good], "one of these words comes before it: summary"),
        (["vsepp_4", "--out", "t.xls"], "written as .csv, .tex"),
        (["ladder"], "the table ladder needs result files"),
        (["ladder", folds], "folds.json: has no metrics of the whole split"),
        (["ladder", good, "--dataset", "demo"], "--dataset: the table ladder"),
        (["summary", good, "--cost", "train_s"], "--cost: the table summary"),
        (["ladder", good, "--out", tmp_path / "x.txt"], "x.txt: the table ladder is written as .csv, .tex, .svg, .png"),
        (["ladder", good, "--out", good], "output is also an input"),
        (["ladder", tmp_path / "none.json"], "none.json: No such file"),
    ):
        assert message in fails(table_main, *arguments)


def test_names_from_data_are_drawn_as_they_are(tmp_path: Path) -> None:
    named = result(tmp_path, "odd", embeddings("odd", 0, 1.0, train_s=0.0, embed_s=0.0))
    hostile = "$x_{1}$ <b>&\x07\n" + 60 * "y"

    def rename(content: dict[str, dict[str, dict[str, str]]]) -> None:
        content["provenance"]["config"] |= {"title": hostile, "feature": "$", "caption_feature": "a$b$"}

    drawn = LadderTable("ladder").write(build_ladder([edited(named, rename)]), tmp_path / "x.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "$x_{1}$ &lt;b&gt;&amp;" in drawn
    assert "y" * 41 not in drawn
