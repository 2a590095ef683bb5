"""Exact search in blocks, and approximate indexes: how they are built, configured and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import faiss
import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import Printed
from tests.eval.slow_ranks import slow_order_scores
from vse.eval import DEFAULT_KS
from vse.eval.ranking.metrics import compute_direction_metrics
from vse.eval.ranking.ranks import ranks_from_embeddings
from vse.eval.search.approximate import measure_index_recalls
from vse.eval.search.index import IndexVectors, build_index, search_index, set_search_parameters, stores_corpus_exactly
from vse.eval.search.top_k import search_corpus, search_exactly
from vse.pipeline.errors import UserError


def rows(n: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def whole(n: int, dim: int = 3, seed: int = 0) -> np.ndarray:
    """Return integers, whose sums are exact in float32; many are equal."""
    return np.random.default_rng(seed).integers(-2, 3, (n, dim)).astype(np.float32)


def slow_scores(corpus: np.ndarray, queries: np.ndarray, similarity: str, direction: str) -> np.ndarray:
    if similarity == "cosine":
        return queries.astype(np.float64) @ corpus.T
    return slow_order_scores(queries, corpus) if direction == "i2t" else slow_order_scores(corpus, queries).T


BOTH = pytest.mark.parametrize(("similarity", "direction"), [("cosine", "i2t"), ("order", "i2t"), ("order", "t2i")])


@BOTH
@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 70), st.integers(0, 30), st.integers(1, 50))
def test_blocks_of_any_size_find_what_all_scores_sorted_have_first(
    similarity: str, direction: str, seed: int, block: int, n: int, n_queries: int, k: int
) -> None:
    corpus, queries = whole(n, seed=seed), whole(n_queries, seed=seed + 1)
    full = slow_scores(corpus, queries, similarity, direction)
    scores, found = search_exactly(corpus, queries, k, similarity, direction=direction, block=block)
    np.testing.assert_array_equal(scores, -np.sort(-full, axis=1)[:, :k])
    np.testing.assert_array_equal(scores, np.take_along_axis(full, found, axis=1))
    assert all(len(set(row)) == min(k, n) for row in found.tolist())
    tied = np.diff(scores, axis=1) == 0
    assert (np.diff(found, axis=1)[tied] > 0).all(), "rows that tie are in order"


class Watched:
    """A corpus that records how many rows are read at once."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.most = values, values.shape, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, wanted: slice) -> np.ndarray:
        part = self.values[wanted]
        self.most = max(self.most, len(part))
        return part


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_a_corpus_may_lie_on_disk_and_is_read_in_blocks(similarity: str, tmp_path: Path) -> None:
    corpus, queries = rows(90), rows(5, seed=1)
    expected = search_corpus(corpus, queries, 4, similarity, direction="t2i", candidates=20)
    np.save(tmp_path / "corpus.npy", corpus)
    with h5py.File(tmp_path / "corpus.h5", "w") as file:
        for there in (np.load(tmp_path / "corpus.npy", mmap_mode="r"), file.create_dataset("corpus", data=corpus)):
            found = search_corpus(there, queries, 4, similarity, direction="t2i", candidates=20, block=32)
            np.testing.assert_array_equal(found.rows, expected.rows)
            np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    watched = Watched(corpus)
    search_exactly(watched, queries, 3, block=16)
    build_index(watched, "Flat", block=16)
    assert watched.most == 16


@given(st.integers(0, 100), st.integers(1, 70), st.integers(1, 12), st.integers(1, 60), st.booleans())
def test_one_query_gets_what_it_gets_among_many(seed: int, dim: int, k: int, block: int, tied: bool) -> None:
    corpus, queries = rows(50, dim, seed), rows(3, dim, seed + 1)
    if tied:
        corpus[5:40] = corpus[3]
    whole = faiss.knn(queries, corpus, k, metric=faiss.METRIC_INNER_PRODUCT)[0]
    for number, query in enumerate(queries):
        found = search_exactly(corpus, query[None], k, block=block)
        np.testing.assert_array_equal(found.scores[0], whole[number])
        if dim > 12:  # rows that tie are kept in their order
            np.testing.assert_array_equal(found.rows, search_exactly(corpus, query[None], 50).rows[:, :k])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_by_its_row_in_the_whole(bad: float) -> None:
    corpus, one = rows(400), rows(1)
    corpus[37, 2], one[0, 2] = bad, 0  # the product of zero and an infinity is no number, either
    for fails in (
        lambda: search_exactly(corpus, rows(2), 3, block=8),
        lambda: search_exactly(corpus, one, 5, block=30),
        lambda: build_index(corpus, "Flat", block=8),
        lambda: build_index(corpus, "IVF2,Flat"),
    ):
        with pytest.raises(UserError, match="corpus row 37 is not finite"):
            fails()
    with pytest.raises(UserError, match=r"queries of shape \(2, 5\) .* corpus of shape \(400, 8\)"):
        search_exactly(corpus, rows(2, 5), 3)


FACTORIES = ["Flat", "IVF8,Flat", "HNSW16", "IVF8,SQ8", "PCA4,Flat", "IVF4,SQ8,RFlat"]


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_index_is_the_same_every_time_and_in_any_blocks(factory: str, capfd: Printed) -> None:
    faiss.omp_set_num_threads(1)
    corpus, queries = rows(400), rows(20, seed=1)
    built = [build_index(corpus, factory, block=block) for block in (400, 400, 150)]
    first, *others = (search_index(b.index, queries, 5) for b in built)
    for other in others[: 1 if factory == "HNSW16" else 2]:  # which links HNSW makes depends on the blocks
        np.testing.assert_array_equal(first.rows, other.rows)
        np.testing.assert_array_equal(first.scores, other.scores)
    assert built[0].n_training_rows == (0 if factory in ("Flat", "HNSW16") else 400)
    assert stores_corpus_exactly(built[0].index, corpus) == (factory not in ("IVF8,SQ8", "PCA4,Flat"))
    assert "WARNING" not in capfd.readouterr().err, "FAISS has nothing to complain about"
    found = measure_index_recalls(corpus, corpus, np.arange(400), factory=factory, ks=(10,))
    assert 0 < found["t2i"]["recall_at_10"] <= 100


def test_what_is_trained_depends_on_the_seed_alone() -> None:
    corpus = rows(70_000, 2)  # of which a part is drawn
    first, same, other = (build_index(corpus, "IVF16,Flat", seed=seed) for seed in (0, 0, 1))
    assert first.n_training_rows == 65_536
    centroids = [faiss.vector_to_array(faiss.downcast_index(b.index.quantizer).codes) for b in (first, same, other)]
    np.testing.assert_array_equal(centroids[0], centroids[1])
    assert (centroids[0] != centroids[2]).any()


def test_an_index_that_looks_everywhere_finds_what_is_exact() -> None:
    corpus, queries = rows(500), rows(20, seed=1)
    exact = search_exactly(corpus, queries, 5)
    for factory, parameters in (("Flat", ""), ("IVF8,Flat", "nprobe=8"), ("HNSW32", "efSearch=500")):
        built = build_index(corpus, factory)
        set_search_parameters(built.index, parameters)
        found = search_index(built.index, queries, 5)
        np.testing.assert_array_equal(found.rows, exact.rows)
        np.testing.assert_allclose(found.scores, exact.scores, rtol=1e-5)
        np.testing.assert_array_equal(IndexVectors(built.index)[np.array([5, 499, 5])], corpus[[5, 499, 5]])


def test_what_an_index_does_not_find_is_row_minus_one() -> None:
    corpus = np.repeat(np.eye(2, 8, dtype=np.float32), 60, axis=0)
    built = build_index(corpus, "IVF2,Flat")
    set_search_parameters(built.index, "nprobe=1")
    scores, found = search_index(built.index, corpus[:1], 100)
    assert set(found[0, :60].tolist()) == set(range(60))
    assert (found[0, 60:] == -1).all()
    assert np.isneginf(scores[0, 60:]).all()
    reranked = search_corpus(corpus, corpus[:1], 100, "order", direction="t2i", index=built.index)
    assert (reranked.rows[0, :60] >= 0).all()
    assert (reranked.rows[0, 60:] == -1).all()


NO_INDEX = {
    "": "not an index of 8 dimensions",
    "Flt": r"could not parse index string Flt.*such as Flat; IVF1024,Flat; HNSW32; IVF4096,PQ64; OPQ64,IVF4096,PQ64",
    "PQ3": "multiple of",
    "IDMap,Flat": "leave it out",
    **dict.fromkeys(("IVF8", "IVF999999999999,Flat", "PCA64,Flat"), "such as Flat"),
    **dict.fromkeys(  # these crash FAISS, or fill the memory
        ("HNSW0", "HNSW1", "HNSW999999", "PQ8x0", "RQ0x8", "IVF0,Flat"), "too small or too large"
    ),
}


@pytest.mark.parametrize("factory", NO_INDEX)
def test_a_factory_string_that_is_none_is_one_line(factory: str) -> None:
    with pytest.raises(UserError, match=NO_INDEX[factory]) as caught:
        build_index(rows(300), factory)
    assert "/project/" not in str(caught.value), "no place in the source of FAISS"


def test_too_few_rows_to_train_are_named_with_what_to_do(capfd: Printed) -> None:
    for factory, needed in (
        ("IVF8,Flat", 8 * 39), ("PQ4", 256 * 39), ("IVF2,PQ4x4", 16 * 39), ("OPQ4,IVF2,Flat", 256 * 39),
        ("IVF2,Flat,Refine(PQ4)", 256 * 39), ("HNSW16,PQ4", 256 * 39), ("RQ2x5", 32 * 39),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"{needed} rows to be trained, and captions has {needed - 1}; use fewer"):
            build_index(rows(needed - 1), factory, name="captions")
    build_index(rows(8 * 39), "IVF8,Flat")
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("factory", "parameters", "message"),
    [
        ("IVF4,Flat", "nprobe", "'nprobe' is not of the form NAME=NUMBER"),
        ("IVF4,Flat", "nprobe=-3", "not of the form"),
        ("IVF4,Flat", "nprobe=nan", "not of the form"),
        ("IVF4,Flat", "nprobe=2,efSearch=8", "no parameter 'efSearch'"),
        ("HNSW8", "nprobe=4", "no parameter 'nprobe'"),
        ("Flat", "efSearch=4", "no parameter 'efSearch'.*Flat has none"),
    ],
)
def test_a_parameter_that_does_not_suit_is_one_line(factory: str, parameters: str, message: str) -> None:
    built = build_index(rows(200), factory)
    with pytest.raises(UserError, match=message):
        set_search_parameters(built.index, parameters)


def pairs(n_images: int, image_of_caption: np.ndarray, dim: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images = rows(n_images, dim)
    captions = images[image_of_caption] + rows(len(image_of_caption), dim, 1)
    unit = [values / np.linalg.norm(values, axis=1, keepdims=True) for values in (images, captions)]
    return unit[0], unit[1], image_of_caption


@pytest.mark.parametrize("similarity", ["cosine", "order"])
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 4))
def test_an_index_that_finds_all_has_the_recalls_of_the_exact_ranks(similarity: str, seed: int, n: int, each: int) -> None:
    """Whole numbers, with many that tie: both count them against the model."""
    images, captions = whole(n, seed=seed), whole(n * each, seed=seed + 1)
    image_of_caption = np.random.default_rng(seed).permutation(np.repeat(np.arange(n), each))
    exact = ranks_from_embeddings(*map(torch.from_numpy, (images, captions, image_of_caption)), similarity)
    found = measure_index_recalls(images, captions, image_of_caption, similarity)
    for direction, ranks in (("i2t", exact.i2t), ("t2i", exact.t2i)):
        metrics = compute_direction_metrics(ranks)
        for k in DEFAULT_KS:
            assert found[direction][f"r{k}"] == pytest.approx(metrics[f"r{k}"])
            assert found[direction][f"recall_at_{k}"] == 100


def test_recalls_are_what_counting_one_by_one_gives() -> None:
    images, captions, image_of_caption = pairs(400, np.arange(0, 400, 2).repeat(3))  # every second image has no caption
    found = measure_index_recalls(images, captions, image_of_caption, "cosine", "IVF8,Flat", "nprobe=2", (1, 10), seed=3)
    for direction, corpus, asking, right in (
        ("i2t", captions, np.unique(image_of_caption), lambda image, row: image_of_caption[row] == image),
        ("t2i", images, image_of_caption, lambda image, row: row == image),
    ):
        queries = images[asking] if direction == "i2t" else captions
        built = build_index(corpus, "IVF8,Flat", seed=3)
        set_search_parameters(built.index, "nprobe=2")
        near = built.index.search(queries, 10)[1]
        best = np.argsort(-(queries @ corpus.T), axis=1)[:, :10]
        for k in (1, 10):
            hits = [any(row >= 0 and right(image, row) for row in few[:k]) for image, few in zip(asking, near, strict=True)]
            shared = [len(set(a[:k].tolist()) & set(b[:k].tolist())) / k for a, b in zip(near, best, strict=True)]
            assert found[direction][f"r{k}"] == pytest.approx(100 * np.mean(hits))
            assert found[direction][f"recall_at_{k}"] == pytest.approx(100 * np.mean(shared))
            assert 0 < found[direction][f"recall_at_{k}"] < 100
        assert (found[direction]["n_queries"], found[direction]["n_corpus"]) == (len(queries), len(corpus))
    assert json.loads(json.dumps(found)) == found


def test_order_is_judged_by_its_own_scores_and_says_that_it_re_ranks() -> None:
    images, captions, image_of_caption = pairs(100, np.arange(100), dim=16)
    found = measure_index_recalls(images, captions, image_of_caption, "order", "Flat", candidates=20)
    assert found["reranked"] == 20
    near = search_corpus(images, captions, 10, "order", direction="t2i", candidates=20).rows
    best = np.argsort(-slow_order_scores(images, captions).T, axis=1)[:, :10]
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(near.tolist(), best.tolist(), strict=True)]
    assert found["t2i"]["recall_at_10"] == pytest.approx(100 * np.mean(shared))
    assert found["t2i"]["recall_at_10"] < 100
    every = measure_index_recalls(images, captions, image_of_caption, "order", "Flat", candidates=100)
    assert every["t2i"]["recall_at_10"] == 100
    assert "reranked" not in measure_index_recalls(images, captions, image_of_caption)


def test_a_row_that_ties_with_the_last_exact_one_is_as_good() -> None:
    images = np.repeat(np.eye(2, dtype=np.float32), 80, axis=0)
    image_of_caption = np.arange(0, 160, 2)
    captions = images[image_of_caption]
    for block in (1, 7, 100):  # which changes the rows that the exact search chooses of those that tie
        found = measure_index_recalls(
            images, captions, image_of_caption, "cosine", "IVF2,Flat", "nprobe=2", ks=(1, 10), block=block
        )
        assert found["t2i"]["recall_at_10"] == 100
        assert found["t2i"]["r10"] == 0, "79 others score as high as the right one"


def test_an_image_of_caption_that_does_not_fit_are_named() -> None:
    images, captions, _ = pairs(4, np.arange(4))
    for image_of_caption in (np.array([0, 1, 2, 4]), np.array([0, -1, 2, 3]), np.arange(3)):
        with pytest.raises(UserError, match="rows for 4 captions of 4 images"):
            measure_index_recalls(images, captions, image_of_caption)


def test_a_side_too_small_to_train_has_a_flat_index_and_says_so() -> None:
    images, captions = rows(200, seed=1), rows(30, seed=2)  # most images are distractors
    found = measure_index_recalls(images, captions, np.arange(30), "cosine", "IVF4,Flat", "nprobe=1", (1, 10))
    assert (found["i2t"]["factory"], found["i2t"]["trained_on"], found["i2t"]["recall_at_10"]) == ("Flat", 0, 100)
    assert (found["t2i"]["factory"], found["t2i"]["trained_on"]) == ("IVF4,Flat", 200)
    with pytest.raises(UserError, match="its 64 centroids need 2496 rows"):
        measure_index_recalls(images, captions, np.arange(30), "cosine", "IVF64,Flat")
