"""Embeddings as a folder of .npy files next to tables of ids: results and errors are those of one HDF5 file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.eval.evaluating import write_result
from tests.eval.files.test_per_query import as_scores
from tests.eval.protocols.test_evaluate import made, made_order
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.options import EvaluationOptions

MATRICES = ("images", "captions", "scores", "scores_i2t", "scores_t2i", "pooled_images", "pooled_captions")
IDS = ("image_ids", "caption_ids", "caption_image_ids", "coco_ids")


def write_folder(folder: Path, run: Embeddings, ids: str = "npy") -> Path:
    """Write a run as a folder, with ids as arrays or as tables."""
    folder.mkdir()
    for name in (*MATRICES, *(IDS if ids == "npy" else ())):
        if getattr(run, name) is not None:
            np.save(folder / f"{name}.npy", getattr(run, name)[:])
    if ids == "csv":
        pd.DataFrame({"image_id": run.image_ids, "file": "a, b.jpg"}).to_csv(folder / "images.csv", index=False)
        table = pd.DataFrame({"image_id": run.caption_image_ids, "caption_id": run.caption_ids})
        table.to_csv(folder / "captions.csv", index=False)
    about = {name: getattr(run, name) for name in ("dataset", "split", "experiment", "seed", "similarity")}
    (folder / "about.json").write_text(json.dumps({**about, "provenance": {"note": "ours"}}))
    return folder


def result(tmp_path: Path, file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        write_result([file], tmp_path / "r.json", options=EvaluationOptions(bootstrap=0)).read_text()
    )
    return found


def both_directions() -> Embeddings:
    run = as_scores(made(noise=1.5))
    return replace(run, scores=None, scores_i2t=run.scores, scores_t2i=np.square(run.scores[:]))


@pytest.mark.parametrize("ids", ["npy", "csv"])
@pytest.mark.parametrize("make", [made, made_order, lambda: as_scores(made(noise=1.5)), both_directions])
def test_a_folder_gives_the_result_of_a_file(make: Callable[[], Embeddings], ids: str, tmp_path: Path) -> None:
    run = make()
    folder = write_folder(tmp_path / "mine", run, ids)
    found, expected = result(tmp_path, folder), result(tmp_path, write_embeddings(tmp_path / "e.h5", run))
    for key in ("dataset", "split", "experiment", "seeds", "n_images", "n_captions", "protocols", "split_identity"):
        assert found[key] == expected[key]
    assert found["provenance"]["note"] == "ours"
    (reference,) = found["provenance"]["embeddings"]
    assert reference["file"] == "mine"
    assert reference["sha256"] == read_embeddings(folder).source.sha256  # type: ignore[union-attr]
    changed = np.load(folder / f"{next(name for name in MATRICES if getattr(run, name) is not None)}.npy")
    changed[0, 0] += 0.5
    np.save(folder / f"{next(name for name in MATRICES if getattr(run, name) is not None)}.npy", changed)
    assert result(tmp_path, folder)["provenance"]["embeddings"][0]["sha256"] != reference["sha256"]


def test_arrays_alone_are_enough(tmp_path: Path) -> None:
    """Rows are numbered from 0, the folder's name is the data set's and the model's."""
    run, folder = made(n_each=2), tmp_path / "clip.vit"
    folder.mkdir()
    np.save(folder / "images.npy", run.images)
    np.save(folder / "captions.npy", np.asfortranarray(run.captions).astype(np.float16))
    np.save(folder / "caption_image_ids.npy", np.repeat(np.arange(30), 2))
    read = read_embeddings(folder)
    assert (read.dataset, read.split, read.similarity) == ("clip.vit", "test", "cosine")
    assert (read.experiment, read.seed) == (None, None)
    assert read.image_ids.tolist() == list(range(30))
    assert read.caption_ids.tolist() == list(range(60))
    assert read.images is not None
    assert np.array_equal(read.images, np.asarray(run.images))
    assert read.captions.dtype == np.float32
    assert result(tmp_path, folder)["n_captions"] == 60


def test_a_matrix_of_scores_is_mapped(tmp_path: Path) -> None:
    """Map scores, which may be larger than memory; those in float64 keep their precision."""
    run = as_scores(made())
    assert isinstance(read_embeddings(write_folder(tmp_path / "a", run)).scores, np.memmap)
    double = replace(run, scores=run.scores[:].astype(np.float64) / 3)
    scores = read_embeddings(write_folder(tmp_path / "b", double)).scores
    assert np.array_equal(scores[:], double.scores[:])  # type: ignore[index]


def test_parquet_serves_for_ids_or_its_package_is_named(tmp_path: Path, fails: Callable[..., str]) -> None:
    run = made()
    folder = write_folder(tmp_path / "mine", run, "csv")
    expected = result(tmp_path, folder)["protocols"]
    table = pd.read_csv(folder / "captions.csv")
    (folder / "captions.csv").unlink()
    if find_spec("pyarrow"):
        table.to_parquet(folder / "captions.parquet")
        assert result(tmp_path, folder)["protocols"] == expected
    else:
        (folder / "captions.parquet").write_bytes(b"PAR1")
        assert "captions.parquet: parquet needs a package: pip install" in fails(eval_main, folder)


def write_tables(folder: Path, run: Embeddings, column: str = "vector", kind: Any = None) -> Path:
    """Write a run as two parquet tables of ids and vectors."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    assert run.images is not None
    assert run.captions is not None
    folder.mkdir()
    lists = [
        pa.array([row.tolist() for row in values[:]], pa.list_(kind or pa.float32())) for values in (run.images, run.captions)
    ]
    tables = {
        "images": {"file": ["a.jpg"] * len(run.image_ids), "image_id": run.image_ids, column: lists[0]},
        "captions": {"image_id": run.caption_image_ids, "caption_id": run.caption_ids, column: lists[1]},
    }
    for name, table in tables.items():
        parquet.write_table(pa.table(table), folder / f"{name}.parquet", row_group_size=7)
    return folder


@pytest.mark.parametrize("column", ["vector", "embedding"])
def test_tables_of_ids_and_vectors_are_enough(column: str, tmp_path: Path) -> None:
    run = made(noise=1.5)
    folder = write_tables(tmp_path / "mine", run, column)
    assert result(tmp_path, folder)["protocols"] == result(tmp_path, write_embeddings(tmp_path / "e.h5", run))["protocols"]
    read = read_embeddings(folder)
    assert read.images is not None
    assert np.array_equal(read.images, np.asarray(run.images))


TABLE_FAULTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "a shorter one": (lambda rows: [*rows[:4], rows[4][:-1], *rows[5:]], "row 5: vector has 15 numbers"),
    "none": (lambda rows: [*rows[:4], None, *rows[5:]], "row 5: vector has 0 numbers"),
    "a missing number": (lambda rows: [*rows[:2], [None, *rows[2][1:]], *rows[3:]], "row 3: vector lacks a number"),
    "empty ones": (lambda rows: [rows[0][:0] for _ in rows], "(it has list<element: null>)"),
    "texts": (lambda rows: [["a"] for _ in rows], "not a parquet file whose column vector has lists of numbers (it has list<"),
    "single numbers": (lambda rows: [row[0] for row in rows], "has lists of numbers (it has double)"),
    "a row too few": (lambda rows: rows[:-1], "images has shape (29, 16), expected (30, dim)"),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_a_fault_in_a_column_of_vectors_is_named_in_a_line(fault: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = write_tables(tmp_path / "mine", made())
    change, message = TABLE_FAULTS[fault]
    table = parquet.read_table(folder / "images.parquet")
    rows = change(table["vector"].to_pylist())
    np.save(folder / "image_ids.npy", table["image_id"].to_numpy())
    parquet.write_table(pa.table({"vector": pa.array(rows)}), folder / "images.parquet")
    assert message in fails(eval_main, folder)


def test_two_columns_or_files_of_vectors_are_refused(tmp_path: Path, fails: Callable[..., str]) -> None:
    run = made()
    folder = write_tables(tmp_path / "mine", run)
    np.save(folder / "images.npy", run.images)
    assert "images.parquet: images are in another file of the folder, too" in fails(eval_main, folder)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(folder / "images.parquet")
    parquet.write_table(table.append_column("embedding", table["vector"]), folder / "images.parquet")
    assert "has the columns vector and embedding; remove one of them" in fails(eval_main, folder)


def a_pickle(folder: Path) -> None:
    np.save(folder / "images.npy", np.array([{"an": "object"}], object), allow_pickle=True)


def a_bare_pickle(folder: Path) -> None:
    (folder / "images.npy").write_bytes(pickle.dumps([1, 2]))


def cut_off(folder: Path) -> None:
    content = (folder / "images.npy").read_bytes()
    (folder / "images.npy").write_bytes(content[:-8])


def changed_array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, change(np.load(folder / name)))


def changed_table(name: str, text: str, by: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_text()
        assert text in content
        (folder / name).write_text(content.replace(text, by, 1))

    return change


def with_nan(values: np.ndarray) -> np.ndarray:
    values[3, 1] = np.nan
    return values


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "objects": (a_pickle, "images.npy: not an array of numbers"),
    "a pickle": (a_bare_pickle, "images.npy: not an array of numbers as numpy.save writes it ("),
    "cut off": (cut_off, "1,912 of 1,920 bytes"),
    "no image vectors": (lambda folder: (folder / "images.npy").unlink(), "it lacks images (docs/formats.md)"),
    "no captions' images": (lambda folder: (folder / "captions.csv").unlink(), "it lacks caption_ids, caption_image_ids"),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir()], "has no embeddings (docs/formats.md)"),
    "not finite": (changed_array("images.npy", with_nan), "images row 3 is not finite"),
    "too few": (changed_array("captions.npy", lambda rows: rows[:-1]), "captions has shape (149, 16), expected (150, dim)"),
    "one row": (changed_array("captions.npy", lambda values: values[0]), "captions has shape (16,)"),
    "texts": (changed_array("images.npy", lambda values: values.astype(str)), "images holds no numbers"),
    "an id twice": (changed_table("images.csv", "\n3,", "\n0,"), "duplicate image id 0"),
    "no such image": (changed_table("captions.csv", "\n0,", "\n7777,"), "a caption belongs to image 7777"),
    "a name for an id": (
        changed_table("images.csv", "\n3,", "\ncat.jpg,"),
        "images.csv: row 2: image_id 'cat.jpg'",
    ),
    "a large id": (changed_table("images.csv", "\n3,", f"\n{2**63},"), f"image_id '{2**63}'"),
    "no id": (changed_table("captions.csv", "image_id,caption_id", "a,b"), "caption_id"),
    "an empty table": (lambda folder: (folder / "images.csv").write_text(""), "images.csv: not a CSV file with a header"),
    "bytes": (
        lambda folder: (folder / "images.csv").write_bytes(b"image_id\n\xff\xfe\n"),
        "images.csv: not a CSV file with a header",
    ),
    "ids twice": (
        lambda folder: np.save(folder / "image_ids.npy", np.arange(30)),
        "images.csv: image_ids are in another file of the folder, too",
    ),
    "a pipe": (
        lambda folder: ((folder / "images.npy").unlink(), os.mkfifo(folder / "images.npy")),
        "images.npy: is a named pipe, and only plain files are read",
    ),
    "a folder": (lambda folder: (folder / "scores.npy").mkdir(), "scores.npy: is a folder, and only plain files are read"),
    "no JSON": (lambda folder: (folder / "about.json").write_text("{"), "about.json: not valid JSON"),
    "a list": (lambda folder: (folder / "about.json").write_text("[]"), "about.json: not an object with dataset, split"),
    "another key": (
        lambda folder: (folder / "about.json").write_text('{"sed": 1}'),
        "unknown key 'sed' (did you mean 'seed'?",
    ),
    "a wrong seed": (
        lambda folder: (folder / "about.json").write_text('{"seed": "x"}'),
        "the attribute seed is 'x', not an integer",
    ),
    "a similarity": (lambda folder: (folder / "about.json").write_text('{"similarity": "cos"}'), "unknown similarity 'cos'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_a_line(fault: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    folder = write_folder(tmp_path / "mine", made(), "csv")
    spoil, message = FAULTS[fault]
    spoil(folder)
    assert message in fails(eval_main, folder)
    assert not (tmp_path / "r.json").exists()


def test_a_result_is_not_written_over_its_input(tmp_path: Path, fails: Callable[..., str]) -> None:
    folder = write_folder(tmp_path / "mine", made())
    assert "output is also an input" in fails(eval_main, folder, "--out", folder / "about.json")
