"""The choice of the GPU or CPU that FAISS uses, with simulated GPUs."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from tests.eval.evaluating import Fails, succeeds
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.search import gpu as gpu_module
from vse.eval.search.approximate import measure_index_recalls
from vse.eval.search.gpu import choose_faiss_device, copy_to_gpu
from vse.eval.search.index import build_index, search_index, set_search_parameters
from vse.eval.search.top_k import search_exactly
from vse.pipeline.errors import UserError

FULL = RuntimeError("Error in void* allocMemory at StandardGpuResources.cpp:500: cudaMalloc error out of memory [2]")


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 8)).astype(np.float32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Simulate two GPUs that compute what the CPU computes; return the list of calls on each of them."""
    done: list[tuple[str, int]] = []

    def knn_gpu(_: Any, queries: np.ndarray, corpus: np.ndarray, k: int, *, metric: int, device: int) -> Any:
        done.append(("knn", device))
        return faiss.knn(queries, corpus, k, metric=metric)

    def copied(_: Any, device: int, index: Any) -> Any:
        done.append(("copy", device))
        return index

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", copied, raising=False)
    monkeypatch.setattr(gpu_module, "_chosen_gpu", {})
    return done


@pytest.mark.parametrize(("device", "numbers"), [("auto", [0, 0]), ("cuda", [0, 0]), ("cuda:1", [1, 1]), ("cpu", [])])
def test_the_device_that_is_asked_for_is_the_one_that_searches(device: str, numbers: list[int], calls: list[Any]) -> None:
    choose_faiss_device(device)
    corpus, queries = rows(50), rows(5, 1)
    exact = search_exactly(corpus, queries, 3)
    index = build_index(corpus).index
    np.testing.assert_array_equal(search_index(copy_to_gpu(index, 3), queries, 3).rows, exact.rows)
    assert calls == [(what, number) for what, number in zip(["knn", "copy"], numbers, strict=False)]


def test_a_gpu_without_memory_is_given_up_with_a_line(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        calls.append("tried")
        raise FULL

    corpus, queries = rows(50), rows(5, 1)
    index = build_index(corpus).index
    choose_faiss_device("cpu")
    expected = search_exactly(corpus, queries, 3)
    choose_faiss_device("cuda")
    monkeypatch.setattr(faiss, "knn_gpu", full, raising=False)
    np.testing.assert_array_equal(search_exactly(corpus, queries, 3, block=10).rows, expected.rows)
    assert calls == ["tried"], "once, and not again for each block"
    assert "its GPU failed (cudaMalloc error out of memory [2])" in caplog.text
    choose_faiss_device("cuda:1")
    caplog.clear()
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", lambda *_: SimpleNamespace(search=full), raising=False)
    np.testing.assert_array_equal(search_index(copy_to_gpu(index, 3), queries, 3).rows, expected.rows)
    assert caplog.text.count("FAISS uses the CPU") == 1


def test_a_faiss_without_gpus_says_so_if_one_was_asked_for(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with caplog.at_level(logging.INFO):
        choose_faiss_device("auto")
        assert caplog.text == ""
        choose_faiss_device("cuda")
    assert "FAISS has no GPU 0 here" in caplog.text
    search_exactly(rows(50), rows(5, 1), 3)
    assert calls == []


def test_more_lists_than_a_gpu_can_look_into_are_refused_in_one_line(calls: list[Any]) -> None:
    images = rows(200)
    index = build_index(images, "IVF4,Flat").index
    set_search_parameters(index, "nprobe=4096")
    choose_faiss_device("cuda")
    with pytest.raises(UserError, match="nprobe=4096: .* 2048 .*--device cpu"):
        copy_to_gpu(index, 3)
    with pytest.raises(UserError, match="nprobe=3000"):
        measure_index_recalls(images, images, np.arange(200), factory="IVF4,Flat", parameters="nprobe=3000")
    choose_faiss_device("cpu")
    assert copy_to_gpu(index, 3) is index


def embedded(folder: Path) -> Path:
    ids, vectors = np.arange(30), rows(30) / np.linalg.norm(rows(30), axis=1, keepdims=True)
    return write_embeddings(folder / "test.h5", Embeddings(ids, ids, ids, "toy", "test", vectors, vectors, experiment="x"))


@pytest.mark.parametrize(("device", "searched"), [("cpu", False), ("cuda:1", True)])
def test_vse_eval_honours_device(device: str, searched: bool, calls: list[Any], tmp_path: Path, fails: Fails) -> None:
    arguments = (embedded(tmp_path), "--out", tmp_path / "r.json", "--index", "Flat", "--device")
    succeeds(eval_main, *arguments, device)
    assert bool(calls) == searched
    assert {number for _, number in calls} <= {1}
    assert "--device tpu: FAISS knows auto, cpu, cuda and cuda:N" in fails(eval_main, *arguments, "tpu")
