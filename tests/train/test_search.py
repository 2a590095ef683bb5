from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from tests.train.conftest import experiment
from vse.pipeline.captions import tokenize
from vse.pipeline.dataset import load_dataset_file
from vse.train.cli import embed_main, search_main
from vse.train.run import RunFolder
from vse.train.search import search_split
from vse.train.training import train

FINETUNE = ["images.source=pictures", "images.finetune=true", "train.epochs=1"]


@pytest.fixture(scope="module", params=[[], ["model.similarity=order"], FINETUNE], ids=["cosine", "order", "fine-tuned"])
def run(request: pytest.FixtureRequest, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the embeddings of its test split."""
    out = train(cache, experiment(*request.param), out=tmp_path_factory.mktemp("runs") / "run")
    with pytest.raises(SystemExit):
        embed_main([str(out)])
    return out


def order_or_product(run: Path, images: np.ndarray, captions: np.ndarray) -> np.ndarray:
    if RunFolder(run).experiment().model.similarity == "order":
        return -(np.maximum(0, captions[None] - images[:, None]) ** 2).sum(2)
    return images @ captions.T


def test_a_caption_finds_the_images_that_its_embedding_is_nearest_to(run: Path, demo: Path) -> None:
    images = load_dataset_file(demo).split("test")
    with h5py.File(run / "test.h5") as file:
        scores = order_or_product(run, file["images"][:], file["captions"][:])[:, 7]
    text = " ".join(images[1].captions[2].tokens)  # caption 7 of the split
    hits = search_split(run, text, k=4)
    assert [hit.picture.name for hit in hits] == [images[k].file for k in np.argsort(-scores)[:4]]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:4], atol=1e-4)


def test_a_picture_finds_the_captions_that_its_embedding_is_nearest_to(run: Path, demo: Path) -> None:
    dataset = load_dataset_file(demo)
    captions = [caption for image in dataset.split("test") for caption in image.captions]
    with h5py.File(run / "test.h5") as file:
        scores = order_or_product(run, file["images"][:], file["captions"][:])[3]
    hits = search_split(run, dataset.image_path(dataset.split("test")[3]), k=5)
    found = [hit.score for hit in hits]
    np.testing.assert_allclose(found, np.sort(scores)[::-1][:5], atol=2e-3)  # the cache holds float16
    assert hits[0].caption in [caption.raw for caption in captions]


def test_the_command_prints_a_line_per_result(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        search_main([str(run), "A red square!", "-k", "3", "--split", "val"])
    assert stop.value.code == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["1", "2", "3"]
    assert all(Path(line[2]).is_file() for line in lines)


def test_what_cannot_be_searched_for_is_one_line(run: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "'?!': no word to search for" in fails(search_main, run, "?!")
    assert "no such image file" in fails(search_main, run, tmp_path / "none.jpg")
    assert "no images in split 'tset'" in fails(search_main, run, "a dog", "--split", "tset")
    Image.new("RGB", (20, 20)).save(tmp_path / "black.png")
    assert len(search_split(run, tmp_path / "black.png", k=2)) == 2


def test_a_cache_of_captions_for_a_run_that_reads_words_is_one_line(run: Path, tfidf: Path, fails: Callable[..., str]) -> None:
    for main, *query in ((embed_main,), (search_main, "a disc")):
        line = fails(main, run, *query, "--caption-features", tfidf)
        assert "reads captions as words, not from a cache; leave --caption-features out" in line


def test_words_are_cut_as_the_captions_were() -> None:
    assert tokenize("A Dog, on the beach.") == ["a", "dog", "on", "the", "beach"]
