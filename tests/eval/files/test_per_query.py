"""The table of queries that vse-eval writes has the ranks that give the metrics of the result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.eval.evaluating import Fails, succeeds
from tests.eval.protocols.test_evaluate import made, made_order
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings

COLUMNS = ["seed", "protocol", "fold", "direction", "query_id", "rank", "right_id", "right_score", "wrong_id", "wrong_score"]


def per_query(tmp_path: Path, *runs: Embeddings, arguments: tuple[str, ...] = ()) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Run the command; return the table and the protocols of the result that it writes."""
    files = [write_embeddings(tmp_path / f"{k}.h5", run) for k, run in enumerate(runs)]
    table, result = tmp_path / "queries.csv", tmp_path / "result.json"
    succeeds(eval_main, *files, "--out", result, "--per-query", table, "--bootstrap", 0, *arguments)
    scores = ["right_score", "wrong_score"]
    rows = pd.read_csv(table, dtype=dict.fromkeys(scores, str)).astype(dict.fromkeys(scores, float))  # exact numbers
    return rows, json.loads(result.read_text())["protocols"]


def as_scores(run: Embeddings) -> Embeddings:
    return replace(run, images=None, captions=None, scores=run.images @ run.captions.T)


@pytest.mark.parametrize("kind", ["cosine", "order", "scores", "directional"])
def test_a_row_says_which_answers_a_query_got(kind: str, tmp_path: Path) -> None:
    run = made_order(noise=1.5) if kind == "order" else made(noise=1.5)
    if kind in ("scores", "directional"):
        run = as_scores(run)
    if kind == "directional":
        run = replace(run, scores=None, scores_i2t=run.scores, scores_t2i=np.square(run.scores))
    table, protocols = per_query(tmp_path, run)
    assert list(table) == COLUMNS
    assert (set(table["protocol"]), set(table["seed"]), set(table["fold"])) == ({"full"}, {0}, {0})
    i2t, t2i = (table[table["direction"] == direction] for direction in ("i2t", "t2i"))
    assert i2t["query_id"].tolist() == run.image_ids.tolist()
    assert t2i["query_id"].tolist() == run.caption_ids.tolist()
    image_indices = dict(zip(run.caption_ids, run.caption_image_ids, strict=True))
    assert [image_indices[caption] for caption in i2t["right_id"]] == i2t["query_id"].tolist()
    assert all(image_indices[row.wrong_id] != row.query_id for row in i2t.itertuples())
    assert t2i["right_id"].tolist() == run.caption_image_ids.tolist()
    assert (t2i["wrong_id"] != t2i["right_id"]).all()
    for direction, rows in (("i2t", i2t), ("t2i", t2i)):
        assert ((rows["rank"] == 0) == (rows["right_score"] > rows["wrong_score"])).all()
        for k in (1, 5, 10):
            assert 100 * (rows["rank"] < k).mean() == pytest.approx(protocols["full"][direction][f"r{k}"])


def test_a_score_is_the_one_that_was_ranked(tmp_path: Path) -> None:
    """To the bit, in the precision of the file."""
    run = as_scores(made())
    double = run.scores[:].astype(np.float64) / 3
    table, _ = per_query(tmp_path, replace(run, scores=double))
    rows = table[table["direction"] == "i2t"]
    columns = {caption: column for column, caption in enumerate(run.caption_ids)}
    for which in ("right", "wrong"):
        expected = [double[row, columns[answer]] for row, answer in enumerate(rows[f"{which}_id"])]
        assert rows[f"{which}_score"].tolist() == expected


def test_seeds_folds_and_sentences_have_their_rows(tmp_path: Path) -> None:
    runs = [made(n_images=2100, n_each=2, noise=2, seed=seed) for seed in (3, 4)]
    arguments = ("--protocol", "auto", "--protocol", "sentence", "--protocol", "sentence-1k")
    table, protocols = per_query(tmp_path, *runs, arguments=arguments)
    counts = table.groupby(["seed", "protocol", "fold", "direction"]).size().to_dict()
    expected = {}
    for seed in (3, 4):
        expected |= {(seed, "1k", fold, "i2t"): 1000 for fold in (0, 1)}
        expected |= {(seed, "1k", fold, "t2i"): 2000 for fold in (0, 1)}
        expected |= {(seed, "full", 0, "i2t"): 2100, (seed, "full", 0, "t2i"): 4200, (seed, "sentence", 0, "s2s"): 4200}
        expected |= {(seed, "sentence-1k", fold, "s2s"): 2000 for fold in (0, 1)}
    assert counts == expected
    for (protocol, fold, direction), rows in table.groupby(["protocol", "fold", "direction"]):
        metrics = protocols[protocol] if protocol in ("full", "sentence") else protocols[protocol]["per_fold"][fold]
        assert 100 * (rows["rank"] < 1).mean() == pytest.approx(metrics[direction]["r1"]["mean"])
    captions = runs[0].captions
    first = table[(table["protocol"] == "sentence") & (table["seed"] == 3)].iloc[0]
    cosines = captions @ captions[0]
    assert (first["query_id"], first["right_id"], first["wrong_id"]) == (0, 1, 2 + int(cosines[2:].argmax()))
    assert first[["right_score", "wrong_score"]].tolist() == pytest.approx([cosines[1], cosines[2:].max()], abs=1e-5)


def test_a_query_without_a_wrong_answer_has_none(tmp_path: Path) -> None:
    table, _ = per_query(tmp_path, replace(made(n_images=1), seed=None))
    assert table[["wrong_id", "wrong_score", "seed"]].isna().all(axis=None)
    assert (table["rank"] == 0).all()


def test_parquet_has_the_rows_of_csv(tmp_path: Path) -> None:
    file, csv, parquet = write_embeddings(tmp_path / "e.h5", made()), tmp_path / "q.csv", tmp_path / "q.parquet"
    succeeds(eval_main, file, "--bootstrap", 0, "--per-query", csv)
    succeeds(eval_main, file, "--bootstrap", 0, "--per-query", parquet)
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), pd.read_csv(csv), check_dtype=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--per-query", "q.txt"), "q.txt: the file of queries is written as .csv or .parquet"),
        (("--per-query", "e.h5"), "e.h5: output is also an input"),
        (("--per-query", "q.csv", "--compare", "f.h5"), "--compare and --per-query"),
        (("--per-query", "folder.csv"), "cannot write folder.csv: it is a folder"),
        (("--trec", "e.h5"), "e.h5: run files are written to a folder"),
        (("--trec-depth", "3"), "--trec-depth applies to run files: name their folder with --trec"),
        (("--trec", "t", "--compare", "e.h5"), "--compare and --trec cannot be used together"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    monkeypatch.chdir(tmp_path)
    write_embeddings(Path("e.h5"), made())
    Path("folder.csv").mkdir()
    assert message in fails(eval_main, "e.h5", *arguments)
