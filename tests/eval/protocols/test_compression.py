"""Compressed embeddings: codecs as numpy and FAISS have them, ranks of their scores, and re-ranking."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import Fails, result_of, succeeds
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.protocols.compression import Codec, parse_codecs

N_IMAGES, DIM = 40, 16
Array = np.ndarray[Any, Any]


def unit(vectors: Array) -> Array:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def made(seed: int = 0, n_images: int = N_IMAGES, split: str = "test") -> Embeddings:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((n_images, DIM))
    image_of = np.repeat(np.arange(n_images), 2)
    captions = images[image_of] + rng.standard_normal((len(image_of), DIM))
    return Embeddings(
        image_ids=np.arange(n_images),
        caption_ids=np.arange(len(image_of)),
        caption_image_ids=image_of,
        dataset="toy",
        split=split,
        images=unit(images),
        captions=unit(captions),
        experiment="e",
        seed=seed,
    )


def rsum_by_hand(i2t: Array, t2i: Array, image_of: Array) -> float:
    """The sum of recalls of scores (n_images, n_captions) of both directions; equal scores count as wrong."""
    total = 0.0
    for k in (1, 5, 10):
        hits = [
            sum(i2t[i, c] >= max(i2t[i, image_of == i]) for c in range(len(image_of)) if image_of[c] != i) < k
            for i in range(len(i2t))
        ]
        total += 100 * np.mean(hits)
        hits = [
            sum(t2i[i, c] >= t2i[image_of[c], c] for i in range(len(t2i)) if i != image_of[c]) < k
            for c in range(len(image_of))
        ]
        total += 100 * np.mean(hits)
    return float(total)


def entry_of(result: dict[str, Any], codec: str) -> dict[str, Any]:
    (found,) = (entry for entry in result["compression"] if entry["codec"] == codec)
    return dict(found)


@given(seed=st.integers(0, 50))
def test_int8_is_a_quantiser_with_255_steps_between_the_ends_of_each_dimension(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bank, vectors = (rng.standard_normal((n, DIM)).astype(np.float32) for n in (50, 20))
    vectors = np.clip(vectors, bank.min(0), bank.max(0))
    fitted = Codec("int8", DIM).fit(bank)
    low, step = bank.min(0), (bank.max(0) - bank.min(0)) / 255
    codes = np.floor((vectors - low) / step).clip(0, 255)
    assert (np.abs(fitted.encode(vectors) - codes) <= 1).all()  # rounding at the edge of a step
    np.testing.assert_allclose(fitted.encode_and_decode(vectors), low + step * (fitted.encode(vectors) + 0.5), atol=1e-5)
    assert fitted.encode(vectors).nbytes == 20 * fitted.codec.bytes_per_vector


@given(seed=st.integers(0, 50))
def test_binary_scores_order_candidates_as_the_hamming_distance_of_faiss(seed: int) -> None:
    run = made(seed)
    assert run.vectors is not None
    fitted = Codec("binary", DIM).fit(run.vectors[0])
    images, captions = (fitted.encode_and_decode(side) for side in run.vectors)
    index = fitted.build_index(run.vectors[0])
    assert isinstance(index, faiss.IndexBinaryFlat)
    distances, _ = index.search(fitted.encode(run.vectors[1]), len(images))
    np.testing.assert_array_equal(distances, np.sort((DIM - captions @ images.T) / 2, axis=1))
    assert fitted.encode(run.vectors[0]).nbytes == N_IMAGES * 2


def test_product_quantisers_score_as_the_index_of_faiss() -> None:
    rng = np.random.default_rng(0)
    bank = rng.standard_normal((10_000, DIM)).astype(np.float32)
    fitted = Codec("pq", DIM, 4).fit(bank)
    index = fitted.build_index(bank[:100])
    assert isinstance(index, faiss.IndexPQ)
    scores, rows = index.search(bank[200:210], 100)
    ours = bank[200:210] @ fitted.encode_and_decode(bank[:100]).T
    np.testing.assert_allclose(np.take_along_axis(ours, rows, 1), scores, atol=1e-4)
    assert fitted.encode(bank[:7]).shape == (7, 4)


def test_metrics_are_those_of_the_stored_vectors(tmp_path: Path) -> None:
    run = made()
    assert run.vectors is not None
    images, captions = run.vectors
    image_of = run.image_of_caption()
    file = write_embeddings(tmp_path / "test.h5", run)
    result = result_of([file], "full", compress=["dims=4 binary", "int8"])
    assert [(entry["codec"], entry["bytes"]) for entry in result["compression"]] == [
        ("float32", 64),
        ("dims=4", 16),
        ("binary", 2),
        ("int8", 16),
    ]
    assert entry_of(result, "float32")["rsum"] == result["protocols"]["full"]["rsum"]
    cut = unit(images[:, :4]) @ unit(captions[:, :4]).T
    assert entry_of(result, "dims=4")["rsum"] == pytest.approx(rsum_by_hand(cut, cut, image_of))
    signs = np.sign(images) @ np.sign(captions).T
    assert entry_of(result, "binary")["rsum"] == pytest.approx(rsum_by_hand(signs, signs, image_of))
    fitted = Codec("int8", DIM).fit(np.concatenate([images, captions]))
    i2t, t2i = images @ fitted.encode_and_decode(captions).T, fitted.encode_and_decode(images) @ captions.T
    assert entry_of(result, "int8")["rsum"] == pytest.approx(rsum_by_hand(i2t, t2i, image_of))


@pytest.mark.parametrize("candidates", [1, 7, 1000])
def test_rescored_candidates_are_ranked_by_the_original_vectors(tmp_path: Path, candidates: int) -> None:
    run = made(3)
    assert run.vectors is not None
    images, captions = run.vectors
    result = result_of([write_embeddings(tmp_path / "test.h5", run)], "full", compress=["dims=3"], rescore=candidates)
    rescored = entry_of(result, "dims=3")["rescored"]
    if candidates == 1000:  # all candidates
        assert rescored["rsum"] == pytest.approx(result["protocols"]["full"]["rsum"])
        return
    image_of = run.image_of_caption()
    cut, exact = unit(captions[:, :3]) @ unit(images[:, :3]).T, captions @ images.T
    ranks = []
    for caption, own in enumerate(image_of):
        near = np.argsort(-cut[caption])[:candidates]
        ranks.append(sum(exact[caption, near] > exact[caption, own]) if own in near else N_IMAGES - 1)
    for k in (1, 5, 10):
        assert rescored["t2i"][f"r{k}"] == pytest.approx(100 * np.mean(np.asarray(ranks) < k))


@pytest.mark.nightly
def test_codecs_are_fitted_to_the_training_split_if_it_is_embedded(tmp_path: Path) -> None:
    file = write_embeddings(tmp_path / "test.h5", made())
    before = entry_of(result_of([file], "full", compress=["int8"]), "int8")
    assert before["fitted_on"] == "test"
    write_embeddings(tmp_path / "train.h5", replace(made(5, 6000, "train"), seed=0))
    result = result_of([file], "full", compress=["int8 pq4"])
    assert entry_of(result, "pq4")["fitted_on"] == "train"
    assert entry_of(result, "pq4")["bytes"] == 4
    assert entry_of(result, "pq4")["rsum"] < entry_of(result, "int8")["rsum"]
    write_embeddings(tmp_path / "train.h5", replace(made(5, 50, "train"), seed=7))
    with pytest.raises(Exception, match="another run"):
        result_of([file], "full", compress=["int8"])


def test_seeds_lines_tables_and_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write_embeddings(tmp_path / f"{seed}.h5", replace(made(0), seed=seed)) for seed in (0, 1)]
    out = tmp_path / "result.json"
    given = ["--compress", "dims=8 binary", "--rescore", 5, "--bootstrap", 100, "--protocol", "full", "--out", out]
    succeeds(eval_main, *files, *given)
    assert "binary, 2 bytes for each vector: rsum" in capsys.readouterr().err
    entry = entry_of(json.loads(out.read_text()), "binary")
    assert set(entry["rsum"]) == {"mean", "std"}
    low, high = entry["rescored"]["ci95"]["rsum"]
    assert low < entry["rescored"]["rsum"]["mean"] < high
    succeeds(table_main, "compression", out, "--out", tmp_path / "table.csv")
    with (tmp_path / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["codec"], row["bytes"], row["rescored"]) for row in rows] == [
        ("float32", "64", "0"),
        ("dims=8", "32", "0"),
        ("dims=8", "32", "5"),
        ("binary", "2", "0"),
        ("binary", "2", "5"),
    ]
    succeeds(table_main, "compression", out, "--out", tmp_path / "chart.svg")
    assert "dims=8" in (tmp_path / "chart.svg").read_text()
    succeeds(table_main, "compression", out, "--out", tmp_path / "table.tex")
    succeeds(table_main, "compression", out)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--compress", "zip"], "no such codec"),
        (["--compress", "dims=16"], "from 1 to 15"),
        (["--compress", "pq3"], "cannot be divided into 3"),
        (["--compress", "pq4"], "needs 9,984 vectors"),
        (["--rescore", "5"], "name codecs with --compress"),
        (["--compress", "int8", "--correct", "csls"], "leave one of the options out"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, fails: Fails, options: list[str], fault: str) -> None:
    file = write_embeddings(tmp_path / "test.h5", made())
    assert fault in fails(eval_main, file, *options)
    assert parse_codecs(["int8", "int8 dims=2,2"], 4) == [Codec("int8", 4), Codec("dims", 4, 2)]


def test_scores_of_pairs_and_results_without_codecs_are_refused(tmp_path: Path, fails: Fails) -> None:
    run = made()
    scores = np.zeros((N_IMAGES, 2 * N_IMAGES), np.float32)
    scored = replace(run, images=None, captions=None, scores=scores, similarity="scores")
    assert "--compress needs vectors" in fails(eval_main, write_embeddings(tmp_path / "s.h5", scored), "--compress", "int8")
    plain = tmp_path / "plain.json"
    succeeds(eval_main, write_embeddings(tmp_path / "test.h5", run), "--out", plain)
    assert "evaluate them with vse-eval --compress" in fails(table_main, "compression", plain)
