from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import faiss
import h5py
import numpy as np
import pytest
import torch

from tests.training.conftest import Capture, Edit, Fails, done, experiment, printed
from tests.training.toy_similarity import ToySettings
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.eval.search.index import metadata_file
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.files.writing import sha256_file
from vse.training.cli import embed_main, search_main
from vse.training.models.similarities import SIMILARITIES
from vse.training.solvers.encode import encode_split
from vse.training.training import train
from vse.training.use.model import load_run

WORDS = ["model.caption_encoder={name: gru, states: all}", "train.epochs=1"]
SCAN = "model.similarity={name: scan, attention: t2i, aggregation: avg}"
FORMS = {"toy": ["model.similarity=toy", *WORDS], "scan": [SCAN, *WORDS]}


@pytest.fixture(scope="module", autouse=True)
def line() -> Iterator[None]:
    """The toy's line in the registry."""
    SIMILARITIES.add(ToySettings)
    yield
    SIMILARITIES.remove("toy")


@pytest.fixture(scope="module", params=FORMS)
def run(request: pytest.FixtureRequest, positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets of positions against sets of words, with the scores of the test split. Read only."""
    out = train(positions, experiment(*FORMS[request.param]), out=tmp_path_factory.mktemp("runs") / "run")
    done(embed_main, out)
    return out


def slow_pooled(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Set by set, vector by vector."""
    trained = load_run(run, "test", device="cpu")
    sides = []
    for side in encode_split(trained.model, trained.split, trained.device):
        vectors, mask = side.unpack_all()
        sets = zip(vectors.numpy(), mask.numpy(), strict=True)
        means = [sum(v / np.linalg.norm(v) for v in of[there]) for of, there in sets]
        sides.append(np.stack([mean / np.linalg.norm(mean) for mean in means]))
    return sides[0], sides[1]


@pytest.mark.sampled(1)
def test_scores_with_a_bank_are_those_of_the_model(run: Path, tmp_path: Path) -> None:
    """A correction of hubs needs the scores of test images and captions with captions and images of the training split."""
    done(embed_main, run, "--bank-images", 10**6, "--out", tmp_path / "test.h5")
    done(embed_main, run, "--bank-images", 4, "--split", "val", "--out", tmp_path / "val.h5")
    test, bank = (load_run(run, split, device="cpu") for split in ("test", "train"))
    images, captions = (side.unpack_all() for side in encode_split(test.model, test.split, test.device))
    bank_images, bank_captions = (side.unpack_all() for side in encode_split(bank.model, bank.split, bank.device))
    with torch.inference_mode():
        t2i, i2t = test.model.similarity(images, bank_captions), test.model.similarity(bank_images, captions)
    if isinstance(t2i, tuple):  # i2t and t2i; candidates of t2i are images
        t2i, i2t = t2i[1], i2t[0]
    found = read_embeddings(tmp_path / "test.h5")
    for name, scores in (("bank_scores_images", t2i), ("bank_scores_captions", i2t.T)):
        np.testing.assert_allclose(getattr(found, name), scores.numpy(), atol=1e-4)
    few = read_embeddings(tmp_path / "val.h5")
    assert few.bank_scores_captions.shape[1] == 4
    n_captions = sum(len(image.captions) for image in bank.split.pairs.images[:4])
    assert few.bank_scores_images.shape[1] == n_captions
    done(eval_main, tmp_path / "test.h5", "--correct", "inverted-softmax", "--bootstrap", 0, "--out", tmp_path / "result.json")
    record = json.loads((tmp_path / "result.json").read_text())["correction"]
    assert (record["bank"], record["transductive"], record["bank_images"]) == ("train", False, len(bank.split.pairs.images))


def test_a_bank_of_the_split_itself_is_refused(run: Path, fails: Fails) -> None:
    assert "leave it out for --split train" in fails(embed_main, run, "--split", "train", "--bank-images", 4)


def test_pooled_vectors_are_unit_means_and_what_they_lose_is_told(run: Path, tmp_path: Path) -> None:
    with h5py.File(run / "test.h5") as file:
        for found, expected in zip((file["pooled_images"], file["pooled_captions"]), slow_pooled(run), strict=True):
            np.testing.assert_allclose(found[:], expected, atol=1e-5)
    done(eval_main, run / "test.h5", "--rerank", 4, "--rerank", 60, "--out", tmp_path / "r.json")
    few, every = json.loads((tmp_path / "r.json").read_text())["rerank"]
    assert few["t2i"]["found"] < every["t2i"]["found"] == 100
    assert every["lost"]["rsum"] == 0
    assert every["exact"].items() >= {name: every[name] for name in ("rsum", "mean_recall")}.items()


def test_as_many_candidates_as_images_give_the_full_search(run: Path, photo: Path, capsys: Capture) -> None:
    for query, every in (("a red square", 12), (photo, 60)):
        expected, stderr = printed(capsys, run, query)
        assert "scored:" not in stderr
        for k in (every, every + 100):
            found, stderr = printed(capsys, run, query, "--rerank", k)
            assert found == expected
            assert f"scored: the {every} of {every}" in stderr


def test_a_text_is_scored_with_the_images_whose_pooled_vectors_are_nearest(run: Path, demo: Path, capsys: Capture) -> None:
    images = load_dataset_file(demo).split("test")
    with h5py.File(run / "test.h5") as file:
        scores = (file["scores"] if "scores" in file else file["scores_t2i"])[:, 7]
        near = file["pooled_images"][:] @ file["pooled_captions"][7]
    best = np.argsort(-near)[:5]
    listed = sorted(best, key=lambda row: -scores[row])
    lines, stderr = printed(capsys, run, " ".join(images[1].captions[2].tokens), "-k", 3, "--rerank", 5)
    assert [Path(line[2]).name for line in lines] == [images[row].file for row in listed[:3]]
    assert [float(line[1]) for line in lines] == pytest.approx(scores[listed[:3]], abs=1e-4)
    assert "scored: the 5 of 12 images that pooled vectors find" in stderr
    assert len(printed(capsys, run, "a disc", "-k", 4, "--rerank", 2)[0]) == 4, "no fewer are scored than displayed"


def test_an_index_may_be_the_first_stage(run: Path, photo: Path, tmp_path: Path, capsys: Capture, fails: Fails) -> None:
    for query, name in (("a red square", "12 images"), (photo, "60 captions")):
        index = tmp_path / f"{name}.faiss"
        expected, _ = printed(capsys, run, query, "-k", 3, "--rerank", 6)
        built, stderr = printed(capsys, run, query, "-k", 3, "--rerank", 6, "--index", index)
        assert f"built a Flat index of {name}" in stderr
        again, stderr = printed(capsys, run, query, "-k", 3, "--rerank", 6, "--index", index)
        assert "built" not in stderr
        assert built == again == expected
    line = fails(search_main, run, "a disc", "--index", tmp_path / "12 images.faiss")
    assert "leave --index out, or add --rerank" in line
    assert "leave --corpus out" in fails(search_main, run, "a disc", "--corpus", run / "test.h5", "--rerank", 5)


def test_an_index_may_find_nothing(run: Path, photo: Path, tmp_path: Path, capsys: Capture, edit: Edit) -> None:
    file = tmp_path / "x.faiss"
    query = (run, photo, "--split", "train", "--rerank", 20, "--index", file)
    printed(capsys, *query, "--index-type", "IVF2,Flat")
    found = []
    for number in (0, 1):  # all vectors in one list, of which the other is that of the query
        index = faiss.read_index(str(file))
        index.make_direct_map()
        vectors, rows, lists = index.reconstruct_n(0, 240), np.arange(240), np.full(240, number)
        index.reset()
        index.set_direct_map_type(faiss.DirectMap.NoMap)
        index.add_core(240, *map(faiss.swig_ptr, (vectors, rows, lists)))
        faiss.write_index(index, str(file))
        edit(metadata_file(file), lambda note: note.update(sha256=sha256_file(file)))
        lines, stderr = printed(capsys, *query)
        assert ("the index found 0 of 20" in stderr) == (not lines)
        found.append(len(lines))
    assert sorted(found) == [0, 10]


def test_a_network_re_ranks_by_its_embeddings_as_they_are(cache: Path, tmp_path: Path, capsys: Capture) -> None:
    network = experiment("model.similarity=network", "loss.name=logistic", "train.epochs=1")
    run = train(cache, network, out=tmp_path / "run")
    done(embed_main, run)
    with h5py.File(run / "test.h5") as file:
        np.testing.assert_array_equal(file["pooled_captions"][:], file["captions"][:])
    assert printed(capsys, run, "a disc", "--rerank", 12)[0] == printed(capsys, run, "a disc")[0]
