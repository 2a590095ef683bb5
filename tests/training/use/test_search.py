from __future__ import annotations

import html
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import h5py
import numpy as np
import pytest
from PIL import Image

from tests.training.conftest import Capture, Edit, Fails, Log, done, experiment, forget_captions, printed
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.report.pages import thumbnail_data_uri
from vse.eval.search.index import metadata_file
from vse.eval.search.top_k import N_RESCORED_CANDIDATES
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import read_json, sha256_file, write_json
from vse.training.cli import embed_main, search_main
from vse.training.experiment import ExperimentConfig
from vse.training.options import RunInputOptions
from vse.training.run.folder import RunFolder
from vse.training.training import train
from vse.training.use.search import RunSearchOptions, search_run

NETWORK = ["model.similarity=network", "loss.name=logistic", "train.epochs=1"]
FINETUNE = ["images.source=pictures", "images.finetune=true", "train.epochs=1"]


RUNS = {"cosine": [], "order": ["model.similarity=order"], "fine-tuned": FINETUNE}
BY_COSINE = pytest.mark.parametrize("run", ["cosine"], indirect=True)


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of a form with the embeddings of its test split, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def make(form: str) -> Path:
        if not (folder / form).exists():
            done(embed_main, train(cache, experiment(*RUNS[form]), out=folder / form / "run"))
        return folder / form / "run"

    return make


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, trained: Callable[[str], Path]) -> Path:
    """Read only."""
    return trained(request.param)


def order_or_product(run: Path, images: np.ndarray, captions: np.ndarray) -> np.ndarray:
    if RunFolder(run).read_settings(ExperimentConfig).model.similarity.name == "order":
        return -(np.maximum(0, captions[None] - images[:, None]) ** 2).sum(2)
    return images @ captions.T


@pytest.mark.sampled(1)
def test_a_text_or_a_photo_finds_what_its_embedding_is_nearest_to(run: Path, demo: Path) -> None:
    images = load_dataset_file(demo).split("test")
    with h5py.File(run / "test.h5") as file:
        scores = order_or_product(run, file["images"][:], file["captions"][:])[:, 7]
    text = " ".join(images[1].captions[2].tokens)  # caption 7 of the split
    hits = search_run(run, text, RunSearchOptions(k=4))
    assert [hit.photo.name for hit in hits] == [images[k].file for k in np.argsort(-scores)[:4]]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:4], atol=1e-4)
    dataset = load_dataset_file(demo)
    captions = [caption for image in dataset.split("test") for caption in image.captions]
    with h5py.File(run / "test.h5") as file:
        scores = order_or_product(run, file["images"][:], file["captions"][:])[3]
    hits = search_run(run, dataset.image_path(dataset.split("test")[3]), RunSearchOptions(k=5))
    found = [hit.score for hit in hits]
    np.testing.assert_allclose(found, np.sort(scores)[::-1][:5], atol=2e-3)  # the cache holds float16
    every = search_run(run, dataset.image_path(dataset.split("test")[3]), RunSearchOptions(k=60))
    assert sorted((hit.caption_id, hit.caption) for hit in every) == sorted((c.sentid, c.raw) for c in captions)
    assert [hit.photo.name for hit in every] == [f"demo_{hit.image_id:06}.jpg" for hit in every]


@BY_COSINE
@pytest.mark.parametrize("kind", ["gif", "bmp"])
def test_a_gif_or_a_bitmap_can_be_a_query(run: Path, demo: Path, kind: str, tmp_path: Path) -> None:
    dataset = load_dataset_file(demo)
    query = tmp_path / f"query.{kind}"
    with Image.open(dataset.image_path(dataset.split("test")[3])) as image:
        image.save(query)
        image.convert("RGB").save(tmp_path / "query.png")
    scores = [hit.score for hit in search_run(run, str(query), RunSearchOptions(k=5))]
    expected = [hit.score for hit in search_run(run, str(tmp_path / "query.png"), RunSearchOptions(k=5))]
    np.testing.assert_allclose(scores, expected, atol=0.05)  # a GIF has 256 colours


@BY_COSINE
def test_what_cannot_be_searched_for_is_one_line(run: Path, tmp_path: Path, fails: Fails, tfidf: Path) -> None:
    assert "'?!': no word to search for" in fails(search_main, run, "?!")
    assert "no such image file" in fails(search_main, run, tmp_path / "none.jpg")
    for split in ("tset", "train,tset"):
        assert "no images in split 'tset'" in fails(search_main, run, "a dog", "--split", split)
    assert "no images in split 'all'" in fails(embed_main, run, "--split", "all")
    Image.new("RGB", (20, 20)).save(tmp_path / "black.png")
    assert len(search_run(run, tmp_path / "black.png", RunSearchOptions(k=2))) == 2
    for main, *query in ((embed_main,), (search_main, "a disc")):
        line = fails(main, run, *query, "--caption-features", tfidf)
        assert "reads captions as words, not from a cache; leave --caption-features out" in line


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("run", "kind"),
    [("cosine", "Flat"), ("cosine", "IVF1,Flat"), ("order", "HNSW32"), ("fine-tuned", "Flat")],
    indirect=["run"],
)
def test_an_index_finds_the_same(run: Path, kind: str, photo: Path, tmp_path: Path, capsys: Capture, fails: Fails) -> None:
    for query, searched in (("a red square", "12 images"), (photo, "60 captions")):
        index = tmp_path / f"{searched}.faiss"
        expected, _ = printed(capsys, run, query, "-k", 4)
        options = ("-k", 4, "--index", index, *(["--index-parameters", "efSearch=100"] if kind == "HNSW32" else []))
        if (kind, searched) == ("IVF1,Flat", "12 images"):
            assert "39 rows to be trained, and images has 12" in fails(search_main, run, query, *options, "--index-type", kind)
            assert not index.exists()
            continue
        built, told = printed(capsys, run, query, *options, "--index-type", kind)
        assert f"{index}: built a {kind} index of {searched}" in told
        again, told = printed(capsys, run, query, *options)
        assert "built" not in told
        assert built == again == expected


@BY_COSINE
def test_the_index_is_searched_and_not_the_split(run: Path, tmp_path: Path, capsys: Capture, edit: Edit) -> None:
    index = tmp_path / "x.faiss"
    expected, _ = printed(capsys, run, "a red square", "-k", 12, "--index", index)
    turned = faiss.read_index(str(index))
    vectors = turned.reconstruct_n(0, 12)[::-1].copy()
    turned.reset()
    turned.add(vectors)
    faiss.write_index(turned, str(index))
    edit(metadata_file(index), lambda note: note.update(sha256=sha256_file(index)))
    found, _ = printed(capsys, run, "a red square", "-k", 12, "--index", index)
    names = [line[2] for line in printed(capsys, run, "a red square", "-k", 12)[0]]
    assert sorted(names) == sorted(line[2] for line in found)
    order = sorted(names)
    assert [line[2] for line in found] == [order[11 - order.index(name)] for name in names]
    assert [line[1] for line in found] == [line[1] for line in expected]


@BY_COSINE
def test_an_index_of_something_else_is_one_line(
    run: Path, photo: Path, tmp_path: Path, capsys: Capture, edit: Callable[..., Path], fails: Fails
) -> None:
    index = tmp_path / "x.faiss"
    printed(capsys, run, "a disc", "--index", index)
    options = ("a disc", "--index", index)
    assert "side: images there, captions here" in fails(search_main, run, photo, "--index", index)
    assert "split: test there, val here" in fails(search_main, run, *options, "--split", "val")
    assert "an index of type Flat, not HNSW8" in fails(search_main, run, *options, "--index-type", "HNSW8")
    assert "side: images" not in fails(search_main, run, *options, "--corpus", run / "test.h5")
    trained = Path(shutil.copytree(run, run.with_name("trained anew")))
    weights = RunFolder(trained).read_best_weights()
    sha256 = RunFolder(trained).save_new_best_weights({name: 1.01 * values for name, values in weights.items()})
    RunFolder(trained).replace_best_weights()
    edit(trained / "run.json", lambda record: record["files"].update({"best.safetensors": sha256}))
    assert "(other weights)" in fails(search_main, trained, *options)
    shutil.rmtree(trained)
    index.write_bytes(index.read_bytes()[:-1])
    assert "has changed since it was built" in fails(search_main, run, *options)
    assert "name it with --index" in fails(search_main, run, "a disc", "--index-type", "Flat")
    assert "name it with --index" in fails(search_main, run, "a disc", "--index-parameters", "nprobe=1")


@pytest.mark.parametrize("run", ["cosine", "order"], indirect=True)
def test_order_re_ranks_and_needs_exact_vectors(run: Path, tmp_path: Path, capsys: Capture, fails: Fails) -> None:
    order = RunFolder(run).read_settings(ExperimentConfig).model.similarity.name == "order"
    _, told = printed(capsys, run, "a disc")
    assert (f"order scores are no inner products: by these FAISS finds {N_RESCORED_CANDIDATES} candidates" in told) == order
    options = ("a disc", "--index", tmp_path / "x.faiss", "--index-type", "SQ8")
    if order:
        assert "FAISS finds 11 candidates" in printed(capsys, run, "a disc", "--rerank", 11)[1]
        assert "approximates vectors, but order scores need them exactly" in fails(search_main, run, *options)
        assert not (tmp_path / "x.faiss").exists()
    else:
        assert len(printed(capsys, run, *options)[0]) == 10
        line = fails(search_main, run, "a disc", "--rerank", 11)
        assert "its scores are inner products, and FAISS finds the highest of them; leave --rerank out" in line


@pytest.mark.parametrize("run", ["order"], indirect=True)
def test_a_file_of_embeddings_replaces_the_split(run: Path, photo: Path, tmp_path: Path, capsys: Capture) -> None:
    for query in ("a red square", photo):
        index = tmp_path / f"{type(query).__name__}.faiss"
        expected, _ = printed(capsys, run, query)
        for options in ((), ("--index", index), ("--index", index)):
            found, _ = printed(capsys, run, query, "--split", "val", "--corpus", run / "test.h5", *options)
            assert found == expected


@BY_COSINE
def test_unknown_ids_are_printed_as_ids(run: Path, photo: Path, tmp_path: Path, capsys: Capture) -> None:
    found = read_embeddings(run / "test.h5")
    more = replace(found, image_ids=found.image_ids + 9000, caption_ids=found.caption_ids + 7000)
    more = replace(more, caption_image_ids=found.caption_image_ids + 9000)
    corpus = write_embeddings(tmp_path / "more.h5", more)
    page = tmp_path / "page.html"
    lines, told = printed(capsys, run, "a disc", "--corpus", corpus, "--html", page)
    assert all(len(line) == 3 and int(line[2]) in more.image_ids for line in lines)
    assert page.read_text().count("no photo</div>") == 10
    assert "says that it is of" not in told
    lines, _ = printed(capsys, run, photo, "--corpus", corpus)
    assert all(int(line[2]) in more.image_ids and int(line[3]) in more.caption_ids for line in lines)
    # The same ids, of another data set.
    corpus = write_embeddings(tmp_path / "else.h5", replace(found, dataset="else"))
    lines, told = printed(capsys, run, "a disc", "--corpus", corpus)
    assert all(int(line[2]) in found.image_ids for line in lines)
    assert "else.h5 says that it is of else" in told


@pytest.mark.parametrize("run", ["order"], indirect=True)
def test_a_file_of_embeddings_that_does_not_suit_is_one_line(run: Path, tmp_path: Path, fails: Fails) -> None:
    found = read_embeddings(run / "test.h5")
    n_images, n_captions = len(found.images), len(found.captions)
    other = "cosine" if found.similarity == "order" else "order"
    scores = np.zeros((n_images, n_captions), np.float32)
    short = replace(found, images=found.images[:, :9], captions=found.captions[:, :9])
    wrong: dict[str, Embeddings] = {
        "has scores of pairs, and no embeddings of images": replace(found, images=None, scores=scores),
        f"has 16 by {found.similarity} (the file: 16 dimensions by {other})": replace(found, similarity=other),
        f"(the file: 9 dimensions by {found.similarity})": short,
    }
    for message, embeddings in wrong.items():
        corpus = write_embeddings(tmp_path / "wrong.h5", embeddings)
        assert message in fails(search_main, run, "a disc", "--corpus", corpus)
    assert "no such file" in fails(search_main, run, "a disc", "--corpus", tmp_path / "none.h5")


@BY_COSINE
def test_a_page_shows_what_was_printed(run: Path, demo: Path, photo: Path, tmp_path: Path, capsys: Capture) -> None:
    images = {str(load_dataset_file(demo).image_path(image)): image for image in load_dataset_file(demo).split("test")}
    for query in ("a red square", photo):
        lines, told = printed(capsys, run, query, "-k", 3, "--html", tmp_path / "page.html")
        assert "page.html: the results as a report" in told
        page = html.unescape((tmp_path / "page.html").read_text())
        for rank, score, path, *caption in lines:
            texts = caption or [c.raw for c in images[path].captions]
            for part in (f"<strong>{rank}</strong>", f"score {score}", path, thumbnail_data_uri(Path(path)), *texts):
                assert part in page
        assert str(query) in page
        assert page.count("<img") == len(lines) + (query == photo)


def test_a_network_that_scores_pairs_has_no_index(cache: Path, tmp_path: Path, fails: Fails) -> None:
    run = train(cache, experiment(*NETWORK), out=tmp_path / "run")
    for option in ("--index", "--corpus"):
        line = fails(search_main, run, "a disc", option, tmp_path / "x")
        assert f"its model scores every pair; leave {option} out" in line
    assert not (tmp_path / "x").exists()


@BY_COSINE
def test_what_an_index_does_not_find_is_said(run: Path, photo: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ("-k", 500, "--split", "train", "--index", tmp_path / "x.faiss")
    few, told = printed(capsys, run, photo, *options, "--index-type", "IVF2,Flat")
    assert 0 < len(few) < 240
    assert f"the index found {len(few)} of 240; a higher nprobe or efSearch finds more" in told
    every, told = printed(capsys, run, photo, *options, "--index-parameters", "nprobe=2")
    assert len(every) == 240
    assert "the index found" not in told


@BY_COSINE
def test_a_moved_cache_is_named_with_its_option(run: Path, own_cache: Path, tmp_path: Path, fails: Fails) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    error = fails(search_main, moved, "a red circle")
    assert "is missing" in error
    assert "if it was moved, add --features" in error
    assert len(search_run(moved, "a red circle", RunSearchOptions(k=2), files=RunInputOptions(features=own_cache))) == 2


def test_a_caption_is_one_line_that_no_terminal_obeys(own_cache: Path, tmp_path: Path, capsys: Any, edit: Any) -> None:
    def spoil(content: dict[str, Any]) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                sentence["raw"] = "a \x1b[2Jdisc\n1\t0.9\tforged\r\x07\u202e."

    edit(own_cache.parent.parent / "data" / "dataset.json", spoil)
    run = train(forget_captions(own_cache), experiment("train.epochs=1"), out=tmp_path / "run")
    photo = next((own_cache.parent.parent / "data" / "images").glob("*.jpg"))
    capsys.readouterr()
    done(search_main, run, photo, "-k", 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["1", "2", "3"]
    assert all(line.split("\t")[3:] == ["a disc 1 0.9 forged ."] for line in lines)


def test_unknown_words_are_named_as_they_are_written(cache: Path, tmp_path: Path, caplog: Log) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run")
    record = read_json(RunFolder(run).record_file)
    assert record["tokeniser"] == "letters_and_digits"
    for tokeniser in ("letters_and_digits", "unicode_words"):
        write_json(RunFolder(run).record_file, {**record, "tokeniser": tokeniser})
        search_run(run, "a weiße Scheibe über a weiße circle", RunSearchOptions(k=1))
        assert caplog.messages[-1] == "not a word of the training captions: weiße, scheibe, über"
        for query in ("über", "東京 zrtwq"):
            with pytest.raises(UserError, match=f"'{query}': none of its words is a word of the training captions"):
                search_run(run, query, RunSearchOptions(k=1))


@BY_COSINE
def test_several_splits_are_searched_and_their_captions_are_printed(run: Path, demo: Path, capsys: Capture) -> None:
    dataset = load_dataset_file(demo)
    for split, n_images, description in (
        ("all", 66, "all 66 images of demo (all splits)"),
        ("val,train", 54, "54 of the 66 images of demo (splits val and train)"),
        ("test", 12, "12 of the 66 images of demo (split test)"),
    ):
        lines, messages = printed(capsys, run, "a red circle", "--split", split, "-k", 100)
        assert f"searching {description}" in messages
        assert len(lines) == n_images
        splits = dataset.parse_splits(split)
        captions = {str(dataset.image_path(image)): image.captions[0].raw for image in dataset.images if image.split in splits}
        assert {line[2]: line[3] for line in lines} == captions
