"""A run of the similarity network from training to the result file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.eval.evaluating import write_result
from tests.train.conftest import COMMAND, experiment
from vse.eval.defaults import RECALLS
from vse.train.cli import search_main, train_main
from vse.train.run.folder import RunFolder
from vse.train.solvers.encode import PairScores, encode
from vse.train.training import train
from vse.train.use.embed import embed_split
from vse.train.use.model import load_run
from vse.train.use.search import SearchRequest, search_run

SETS = [
    "model.similarity=network",
    "model.similarity.widths=[8,4]",
    "loss=logistic",
    "caption_feature=tfidf",
    "model.image_encoder=branch",
    "model.image_encoder.widths=[12,6]",
    "model.caption_encoder=branch",
    "model.caption_encoder.widths=[10,6]",
    "train.learning_rate=0.01",
]
NO_DROPOUT = ["model.image_encoder.dropout=0", "model.caption_encoder.dropout=0"]


@pytest.fixture(scope="module")
def run(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A similarity network on cached captions of the demo. Read only."""
    return train(cache, experiment(*SETS), out=tmp_path_factory.mktemp("runs") / "network")


def best(run: Path) -> dict[str, float]:
    with (run / "metrics.csv").open() as stream:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(stream)]
    return max(rows, key=lambda row: row["rsum"])


def test_it_learns_to_tell_pairs_apart(cache: Path, tfidf: Path, tmp_path: Path) -> None:
    """At random a pair costs log 2, a positive and a negative one twice that."""
    sets = [*SETS, "train.epochs=12", "train.decay_after=12", *NO_DROPOUT]
    run = train(cache, experiment(*sets), out=tmp_path / "run")
    with (run / "metrics.csv").open() as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    assert losses[0] == pytest.approx(2 * np.log(2), abs=0.1)
    assert losses[-1] < 0.75 * losses[0]


def test_the_file_of_a_split_has_scores_and_captions(run: Path, tmp_path: Path) -> None:
    with h5py.File(embed_split(run, tmp_path / "test.h5")) as file:
        content = {name: item[()] for name, item in file.items()}
    pooled, hashes = {"pooled_images", "pooled_captions"}, {"photo_hashes", "caption_hashes"}
    assert content.keys() == {"image_ids", "caption_ids", "caption_image_ids", "scores", "captions", *pooled, *hashes}
    assert content["scores"].shape == (12, 60)
    opened = load_run(run, "test", device="cpu")
    assert opened.model.pairwise
    images, captions = (side.unpack_all() for side in encode(opened.model, opened.split, opened.device))
    np.testing.assert_array_equal(content["captions"], captions[0])
    np.testing.assert_allclose(np.linalg.norm(content["captions"], axis=1), 1, rtol=1e-5)
    with torch.inference_mode():
        slow = opened.model.similarity(images, captions)
    np.testing.assert_allclose(content["scores"], slow, rtol=1e-4, atol=1e-6)


def test_scores_can_be_computed_in_bfloat16(run: Path) -> None:
    opened = load_run(run, "val", device="cpu")
    sides = encode(opened.model, opened.split, opened.device)
    rows = slice(0, 6)
    (exact, _), (rough, _) = (PairScores(opened.model, *sides, precision)(rows, None) for precision in ("fp32", "bf16"))
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


def test_a_split_is_evaluated_as_it_was_validated(run: Path, tmp_path: Path) -> None:
    result = json.loads(write_result([embed_split(run, tmp_path / "val.h5", "val")], tmp_path / "val.json").read_text())
    full = result["protocols"]["full"]
    assert {f"{direction}_r{k}": full[direction][f"r{k}"] for direction in ("i2t", "t2i") for k in RECALLS}.items() <= best(
        run
    ).items()
    assert full["rsum"] == best(run)["rsum"] == RunFolder(run).record()["best_rsum"]


def test_captions_query_captions_by_their_embeddings(run: Path, tmp_path: Path) -> None:
    file = embed_split(run, tmp_path / "test.h5")
    result = json.loads(write_result([file], tmp_path / "test.json", ["auto", "sentence"]).read_text())
    assert result["protocols"].keys() == {"full", "sentence"}
    with h5py.File(file) as content:
        captions, image_of_caption = content["captions"][:].astype(np.float64), content["caption_image_ids"][:]
    cosines = captions @ captions.T
    np.fill_diagonal(cosines, -np.inf)
    own = image_of_caption[:, None] == image_of_caption[None, :]
    nearest = np.where(own, cosines, -np.inf).max(1, keepdims=True)
    ranks = (np.where(own, -np.inf, cosines) >= nearest).sum(1)
    assert result["protocols"]["sentence"]["s2s"]["r10"] == pytest.approx(100 * (ranks < 10).mean(), abs=100 / 60)
    assert result["protocols"]["sentence"]["n_queries"] == 60


def test_a_text_finds_the_images_that_score_highest_with_it(run: Path, tmp_path: Path) -> None:
    opened = load_run(run, "test", device="cpu")
    with h5py.File(embed_split(run, tmp_path / "test.h5")) as file:
        scores = file["scores"][:][:, 7]
    hits = search_run(run, " ".join(opened.split.pairs.captions[7].tokens), SearchRequest(4))
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:4], atol=2e-2)  # the cache holds float16
    best_image = opened.split.pairs.images[int(np.argmax(scores))]
    assert best_image.file.rpartition("/")[2] in {hit.photo.name for hit in hits}


def test_a_photo_finds_the_captions_that_score_highest_with_it(run: Path, tmp_path: Path) -> None:
    opened = load_run(run, "test", device="cpu")
    with h5py.File(embed_split(run, tmp_path / "test.h5")) as file:
        scores = file["scores"][:][3]
    hits = search_run(run, opened.dataset.image_path(opened.split.pairs.images[3]), SearchRequest(5))
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:5], atol=2e-2)


def test_a_text_of_unknown_words_is_one_line(run: Path, fails: Callable[..., str]) -> None:
    assert "'qwrtz zrtwq': none of its words is known to 'tfidf'" in fails(search_main, run, "qwrtz zrtwq")


def test_it_lists_no_hard_negatives(cache: Path, tfidf: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    sets = [part for setting in SETS for part in ("--set", setting)]
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, *sets, "--log-negatives", 3)
    assert "--log-negatives lists what a ranking loss finds hardest; logistic ranks nothing" in line
    assert not (tmp_path / "run").exists()
