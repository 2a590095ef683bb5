"""The similarity network: its scores, and a run of it from training to the result file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train.conftest import COMMAND, experiment
from vse.eval.protocols.evaluate import evaluate
from vse.eval.ranking.metrics import RECALLS
from vse.train.cli import search_main, train_main
from vse.train.models import similarity_network
from vse.train.models.similarity_network import SimilarityNetwork
from vse.train.run.folder import RunFolder
from vse.train.solvers.encode import encode, score_matrix
from vse.train.training import train
from vse.train.use.embed import embed_split, load_run
from vse.train.use.search import search_split

DIM = 4


def network(*widths: int) -> SimilarityNetwork:
    torch.manual_seed(0)
    made = SimilarityNetwork(DIM, widths)
    for layer in made.linears:
        torch.nn.init.normal_(layer.bias)
    return made


def sides(n_images: int, n_captions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images, captions = (torch.randn(n, DIM, generator=generator, requires_grad=True) for n in (n_images, n_captions))
    return images, captions


@pytest.mark.parametrize("widths", [(), (5,), (5, 3)])
def test_a_score_is_what_layers_make_of_the_product(widths: tuple[int, ...]) -> None:
    """Fully connected layers with ReLU, of the given widths and then of 1."""
    made, (images, captions) = network(*widths), sides(6, 6)
    assert [layer.out_features for layer in made.linears] == [*widths, 1]
    vectors = images * captions
    for layer in made.linears[:-1]:
        vectors = torch.relu(vectors @ layer.weight.T + layer.bias)
    slow = (vectors @ made.linears[-1].weight.T + made.linears[-1].bias)[:, 0]
    found = made.of_pairs(images, captions)
    torch.testing.assert_close(found, slow)
    with torch.no_grad():
        for parameter in made.linears[-1].parameters():
            parameter.neg_()
    torch.testing.assert_close(made.of_pairs(images, captions), -slow, msg="no ReLU behind the last layer")


@settings(deadline=None, max_examples=40)
@given(n_images=st.integers(0, 6), n_captions=st.integers(1, 6), block=st.integers(1, 40))
def test_all_pairs_are_scored_in_blocks_of_any_size(n_images: int, n_captions: int, block: int) -> None:
    made, (images, captions) = network(5, 3), sides(n_images, n_captions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity_network, "_BLOCK", block)
        found = made(images, captions)
    slow = [[made.of_pairs(images[i, None], captions[j, None])[0] for j in range(n_captions)] for i in range(n_images)]
    assert found.shape == (n_images, n_captions)
    torch.testing.assert_close(found.tolist(), [[score.item() for score in row] for row in slow], rtol=1e-4, atol=1e-6)
    weights = torch.linspace(-1, 2, found.numel()).view_as(found)
    wanted = [images, captions, *made.parameters()]
    total = sum((weights[i, j] * slow[i][j] for i in range(n_images) for j in range(n_captions)), start=0 * images.sum())
    gradients = (torch.autograd.grad(loss, wanted, materialize_grads=True) for loss in ((weights * found).sum(), total))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_more_pairs_than_a_block_holds() -> None:
    made, (images, captions) = network(3), sides(200, 190)
    assert len(images) * len(captions) > similarity_network._BLOCK
    with torch.inference_mode():
        found = made(images, captions)
        for row in (0, 99, 199):
            torch.testing.assert_close(found[row], made.of_pairs(images[row].expand(190, DIM), captions))


SETS = [
    "model.similarity=network",
    "model.network_widths=[8,4]",
    "loss.name=logistic",
    "caption_feature=tfidf",
    "model.branches.layers=nonlinear",
    "model.branches.image_widths=[12,6]",
    "model.branches.caption_widths=[10,6]",
    "train.learning_rate=0.01",
]


@pytest.fixture(scope="module")
def run(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A similarity network on cached captions of the demo. Read only."""
    return train(cache, experiment(*SETS), out=tmp_path_factory.mktemp("runs") / "network")


def best(run: Path) -> dict[str, float]:
    with (run / "metrics.csv").open() as stream:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(stream)]
    return max(rows, key=lambda row: row["rsum"])


def test_it_learns_to_tell_pairs_apart(cache: Path, tfidf: Path, tmp_path: Path) -> None:
    """By chance a pair costs log 2, a right one and a wrong one twice that."""
    sets = [*SETS, "train.epochs=12", "train.decay_after=12", "model.branches.dropout=0"]
    run = train(cache, experiment(*sets), out=tmp_path / "run")
    with (run / "metrics.csv").open() as stream:
        losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    assert losses[0] == pytest.approx(2 * np.log(2), abs=0.1)
    assert losses[-1] < 0.75 * losses[0]


def test_the_file_of_a_split_has_scores_and_captions(run: Path, tmp_path: Path) -> None:
    with h5py.File(embed_split(run, tmp_path / "test.h5")) as file:
        content = {name: item[()] for name, item in file.items()}
    assert content.keys() == {"image_ids", "caption_ids", "caption_image_ids", "scores", "captions"}
    assert content["scores"].shape == (12, 60)
    found = load_run(run, "test", device="cpu")
    assert found.model.pairwise
    images, captions = encode(found.model, found.split, found.device)
    np.testing.assert_array_equal(content["captions"], captions)
    np.testing.assert_allclose(np.linalg.norm(content["captions"], axis=1), 1, rtol=1e-5)
    with torch.inference_mode():
        slow = [[found.model.similarity.of_pairs(i[None], c[None]).item() for c in captions] for i in images]
    np.testing.assert_allclose(content["scores"], slow, rtol=1e-4, atol=1e-6)


def test_scores_can_be_computed_in_bfloat16(run: Path) -> None:
    found = load_run(run, "val", device="cpu")
    images, captions = encode(found.model, found.split, found.device)
    exact, rough = (score_matrix(found.model, images, captions, precision) for precision in ("fp32", "bf16"))
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


def test_a_split_is_evaluated_as_it_was_validated(run: Path, tmp_path: Path) -> None:
    result = json.loads(evaluate([embed_split(run, tmp_path / "val.h5", "val")], tmp_path / "val.json").read_text())
    full = result["protocols"]["full"]
    assert {f"{direction}_r{k}": full[direction][f"r{k}"] for direction in ("i2t", "t2i") for k in RECALLS}.items() <= best(
        run
    ).items()
    assert full["rsum"] == best(run)["rsum"] == RunFolder(run).record()["best_rsum"]


def test_captions_query_captions_by_their_embeddings(run: Path, tmp_path: Path) -> None:
    file = embed_split(run, tmp_path / "test.h5")
    result = json.loads(evaluate([file], tmp_path / "test.json", ["auto", "sentence"]).read_text())
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
    found = load_run(run, "test", device="cpu")
    with h5py.File(embed_split(run, tmp_path / "test.h5")) as file:
        scores = file["scores"][:][:, 7]
    hits = search_split(run, " ".join(found.split.pairs.captions[7].tokens), k=4)
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:4], atol=2e-2)  # the cache holds float16
    best_image = found.split.pairs.images[int(np.argmax(scores))]
    assert best_image.file.rpartition("/")[2] in {hit.picture.name for hit in hits}


def test_a_picture_finds_the_captions_that_score_highest_with_it(run: Path, tmp_path: Path) -> None:
    found = load_run(run, "test", device="cpu")
    with h5py.File(embed_split(run, tmp_path / "test.h5")) as file:
        scores = file["scores"][:][3]
    hits = search_split(run, found.dataset.image_path(found.split.pairs.images[3]), k=5)
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:5], atol=2e-2)


def test_a_text_of_unknown_words_is_one_line(run: Path, fails: Callable[..., str]) -> None:
    assert "'qwrtz zrtwq': none of its words is known to 'tfidf'" in fails(search_main, run, "qwrtz zrtwq")


def test_it_lists_no_hard_negatives(cache: Path, tfidf: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    sets = [part for setting in SETS for part in ("--set", setting)]
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, *sets, "--log-negatives", 3)
    assert "--log-negatives lists what a ranking loss finds hardest; logistic ranks nothing" in line
    assert not (tmp_path / "run").exists()
