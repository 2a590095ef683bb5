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

from tests.eval.evaluating import Fails, result_of
from tests.eval.files.test_per_query import as_scores
from tests.eval.protocols.test_evaluate import made, made_order
from tests.hostile import fifo
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings

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


def both_directions() -> Embeddings:
    run = as_scores(made(noise=1.5))
    return replace(run, scores=None, scores_i2t=run.scores, scores_t2i=np.square(run.scores[:]))


@pytest.mark.parametrize(
    ("make", "ids"),
    [(made, "npy"), (made, "csv"), (made_order, "csv"), (lambda: as_scores(made(noise=1.5)), "csv"), (both_directions, "npy")],
)
def test_a_folder_gives_the_result_of_a_file(make: Callable[[], Embeddings], ids: str, tmp_path: Path) -> None:
    run = make()
    folder = write_folder(tmp_path / "mine", run, ids)
    found, expected = result_of([folder]), result_of([write_embeddings(tmp_path / "e.h5", run)])
    for key in ("dataset", "split", "experiment", "seeds", "n_images", "n_captions", "protocols", "split_identity"):
        assert found[key] == expected[key]
    assert found["provenance"]["note"] == "ours"
    (reference,) = found["provenance"]["embeddings"]
    assert (reference["file"], reference["sha256"]) == ("mine", read_embeddings(folder).source.sha256)
    matrix = next(folder / f"{name}.npy" for name in MATRICES if getattr(run, name) is not None)
    np.save(matrix, np.load(matrix) * np.float32(0.5))
    assert result_of([folder])["provenance"]["embeddings"][0]["sha256"] != reference["sha256"]


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
    assert (read.image_ids.tolist(), read.caption_ids.tolist()) == (list(range(30)), list(range(60)))
    assert np.array_equal(read.images, np.asarray(run.images))
    assert read.captions.dtype == np.float32
    assert result_of([folder])["n_captions"] == 60


def test_a_matrix_of_scores_is_mapped(tmp_path: Path) -> None:
    """Map scores, which may be larger than memory; those in float64 keep their precision."""
    run = as_scores(made())
    assert isinstance(read_embeddings(write_folder(tmp_path / "a", run)).scores, np.memmap)
    double = replace(run, scores=run.scores[:].astype(np.float64) / 3)
    scores = read_embeddings(write_folder(tmp_path / "b", double)).scores
    assert np.array_equal(scores[:], double.scores[:])


def test_parquet_serves_for_ids_or_its_package_is_named(tmp_path: Path, fails: Fails) -> None:
    folder = write_folder(tmp_path / "mine", made(), "csv")
    expected = result_of([folder])["protocols"]
    table = pd.read_csv(folder / "captions.csv")
    (folder / "captions.csv").unlink()
    if find_spec("pyarrow"):
        table.to_parquet(folder / "captions.parquet")
        assert result_of([folder])["protocols"] == expected
    else:
        (folder / "captions.parquet").write_bytes(b"PAR1")
        assert "captions.parquet: parquet needs a package: pip install" in fails(eval_main, folder)


def write_tables(folder: Path, run: Embeddings, column: str = "vector") -> Path:
    """Write a run as two parquet tables of ids and vectors."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    lists = [pa.array([row.tolist() for row in values[:]], pa.list_(pa.float32())) for values in (run.images, run.captions)]
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
    assert result_of([folder])["protocols"] == result_of([write_embeddings(tmp_path / "e.h5", run)])["protocols"]
    assert np.array_equal(read_embeddings(folder).images, np.asarray(run.images))


TABLE_FAULTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "a shorter one": (lambda rows: [*rows[:4], rows[4][:-1], *rows[5:]], "row 5: vector has 15 numbers"),
    "none": (lambda rows: [*rows[:4], None, *rows[5:]], "row 5: vector has 0 numbers"),
    "texts": (lambda rows: [["a"] for _ in rows], "not a parquet file whose column vector has lists of numbers (it has list<"),
    "a row too few": (lambda rows: rows[:-1], "images has shape (29, 16), expected (30, dim)"),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_a_fault_in_a_column_of_vectors_is_named_in_a_line(fault: str, tmp_path: Path, fails: Fails) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = write_tables(tmp_path / "mine", made())
    change, message = TABLE_FAULTS[fault]
    table = parquet.read_table(folder / "images.parquet")
    rows = change(table["vector"].to_pylist())
    np.save(folder / "image_ids.npy", table["image_id"].to_numpy())
    parquet.write_table(pa.table({"vector": pa.array(rows)}), folder / "images.parquet")
    assert message in fails(eval_main, folder)


def test_two_columns_or_files_of_vectors_are_refused(tmp_path: Path, fails: Fails) -> None:
    run = made()
    folder = write_tables(tmp_path / "mine", run)
    np.save(folder / "images.npy", run.images)
    assert "images.parquet: images are in another file of the folder, too" in fails(eval_main, folder)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(folder / "images.parquet")
    parquet.write_table(table.append_column("embedding", table["vector"]), folder / "images.parquet")
    assert "has the columns vector and embedding; remove one of them" in fails(eval_main, folder)


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def changed_table(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "objects": (lambda folder: np.save(folder / "images.npy", np.array([{}], object)), "images.npy: not an array of numbers"),
    "a pickle": (text("images.npy", pickle.dumps([1, 2])), "images.npy: not an array of numbers as numpy.save writes it ("),
    "cut off": (lambda folder: os.truncate(folder / "images.npy", 2040), "1,912 of 1,920 bytes"),
    "no image vectors": (lambda folder: (folder / "images.npy").unlink(), "it lacks images (docs/formats.md)"),
    "no captions' images": (lambda folder: (folder / "captions.csv").unlink(), "it lacks caption_ids, caption_image_ids"),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir()], "has no embeddings (docs/formats.md)"),
    "a name for an id": (changed_table("images.csv", "\n3,", "\ncat.jpg,"), "images.csv: row 2: image_id 'cat.jpg'"),
    "a large id": (changed_table("images.csv", "\n3,", f"\n{2**63},"), f"image_id '{2**63}'"),
    "no id": (changed_table("captions.csv", "image_id,caption_id", "a,b"), "caption_id"),
    "bytes": (text("images.csv", b"image_id\n\xff\xfe\n"), "images.csv: not a CSV file with a header"),
    "ids twice": (
        lambda folder: np.save(folder / "image_ids.npy", np.arange(30)),
        "images.csv: image_ids are in another file of the folder, too",
    ),
    "a pipe": (lambda folder: fifo(folder / "images.npy"), "images.npy: is a named pipe, and only plain files are read"),
    "no JSON": (text("about.json", "{"), "about.json: not valid JSON"),
    "another key": (text("about.json", '{"sed": 1}'), "unknown key 'sed' (did you mean 'seed'?"),
    "a wrong seed": (text("about.json", '{"seed": "x"}'), "the attribute seed is 'x', not an integer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_a_line(fault: str, tmp_path: Path, fails: Fails) -> None:
    folder = write_folder(tmp_path / "mine", made(), "csv")
    spoil, message = FAULTS[fault]
    spoil(folder)
    assert message in fails(eval_main, folder)


def test_a_result_is_not_written_over_its_input(tmp_path: Path, fails: Fails) -> None:
    folder = write_folder(tmp_path / "mine", made())
    assert "output is also an input" in fails(eval_main, folder, "--out", folder / "about.json")
