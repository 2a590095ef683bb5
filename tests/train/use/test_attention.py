"""What a model looks at, on the page of a search: against the attention of each pair by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from tests.drawn import drawings
from tests.train.conftest import experiment
from tests.train.use.attending import compare, scan
from vse.eval.report.pages import thumbnail
from vse.features.cache.feature_cache import merge_shards, open_cache
from vse.features.cache.rows import Identity, Rows
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.dataset.captions import tokenize
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.train.cli import search_main
from vse.train.training import train
from vse.train.use.model import load_run

SIDES = ["t2i", "i2t"]
TEXT = "a red square above a blue zebra"


@pytest.fixture(scope="module", params=SIDES)
def on_grid(request: pytest.FixtureRequest, positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the four cells of a grid."""
    return train(positions, experiment(*scan(request.param)), out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def boxes(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up cache of one to three regions per image; image k has none whose number ends in 7."""
    out, rng = tmp_path_factory.mktemp("features") / "demo_boxes.h5", np.random.default_rng(0)
    images = load_dataset_file(demo).images
    counts = np.asarray([0 if image.imgid % 10 == 7 else image.imgid % 3 + 1 for image in images])
    corners = rng.uniform((0, 0, 16, 16), (16, 16, 32, 32), (counts.sum(), 4))
    rows = Rows(
        np.asarray([image.imgid for image in images], np.int64),
        rng.normal(size=(counts.sum(), 16)).astype(np.float16),
        np.zeros((len(images), 32), np.uint8),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes=corners.astype(np.float32),
        scores=np.ones(counts.sum(), np.float32),
        image_size=np.full((len(images), 2), 32, np.int32),
    )
    write_shard(shard_path(out, 0, 1), Identity("demo", "boxes", "image", {}), rows)
    return merge_shards(out, 1, demo, rows.ids)


@pytest.fixture(scope="module", params=SIDES)
def on_boxes(request: pytest.FixtureRequest, boxes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on regions of different numbers."""
    return train(boxes, experiment(*scan(request.param)), out=tmp_path_factory.mktemp("runs") / "run")


def searched(run: Path, query: str | Path, page: Path, *options: object) -> str:
    with pytest.raises(SystemExit) as stop:
        search_main([str(part) for part in (run, query, "--html", page, *options)])
    assert stop.value.code == 0
    return page.read_text()


def cards(page: str) -> list[str]:
    return page.split('<li class="card')[1:]


def test_for_a_text_each_photo_shows_where_its_words_look(on_grid: Path, demo: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(demo)
    page = searched(on_grid, TEXT, tmp_path / "page.html", "-k", 3)
    found = drawings(page)
    assert len(cards(page)) == len(found) == 3
    for card, shown in zip(cards(page), found.values(), strict=True):
        image = next(image for image in dataset.split("test") if image.file in card)
        assert shown.source == thumbnail(dataset.image_path(image))
        compare(shown, on_grid, image.imgid, tokenize(TEXT))
        width, height = shown.size
        cells = [[x, y, width / 2, height / 2] for y in (0, height / 2) for x in (0, width / 2)]
        np.testing.assert_allclose(shown.regions, cells, atol=0.06)
    words = re.findall(r'<span class="word w(\d+)( quiet)?" tabindex="0" role="button">(.*?)</span>', page)
    assert [unescape(word) for _, _, word in words] == ["<start>", *tokenize(TEXT)[:-1], "<zebra>", "<end>"]
    assert [bool(quiet) for _, quiet, _ in words] == [True, *[False] * 6, True, True]
    for number, *_ in words:
        assert f".looks:has(.w{number}:hover) .m{number}," in page


def test_for_a_photo_each_caption_shows_where_its_words_look_on_it(on_grid: Path, demo: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(demo)
    asked = dataset.split("test")[3]
    page = searched(on_grid, dataset.image_path(asked), tmp_path / "page.html", "-k", 4)
    captions = {caption.raw: caption for image in dataset.split("test") for caption in image.captions}
    assert len(cards(page)) == 4
    for card in cards(page):
        (shown,) = drawings(card).values()
        assert shown.source == thumbnail(dataset.image_path(asked))
        said = unescape(re.findall(r"“(.*)” of", card)[0])
        compare(shown, on_grid, asked.imgid, list(captions[said].tokens), atol=2e-2)  # the cache holds float16
        assert len(re.findall(r'class="word w', card)) == len(captions[said].tokens) + 2


def test_regions_are_drawn_as_their_boxes_and_an_image_without_one_is_shown_plainly(
    on_boxes: Path, boxes: Path, demo: Path, tmp_path: Path
) -> None:
    cache, dataset = open_cache(boxes), load_dataset_file(demo)
    page = searched(on_boxes, "a red square", tmp_path / "page.html", "-k", 12)
    counts = []
    for card in cards(page):
        image = next(image for image in dataset.split("test") if image.file in card)
        row = cache.ids.tolist().index(image.imgid)
        first, end = cache.offsets[row : row + 2]
        counts.append(end - first)
        if first == end:
            assert "<image" not in card
            assert f'<img src="{thumbnail(dataset.image_path(image))}"' in card
            continue
        (shown,) = drawings(card).values()
        x1, y1, x2, y2 = cache.shards[0]["boxes"].map()[first:end].T * shown.size[0] / 32
        np.testing.assert_allclose(shown.regions, np.stack([x1, y1, x2 - x1, y2 - y1], 1), atol=0.11)
        compare(shown, on_boxes, image.imgid, ["a", "red", "square"])
    assert {0, 1, 2, 3} == set(counts)


def test_the_page_says_which_side_attends(on_grid: Path, tmp_path: Path) -> None:
    side = load_run(on_grid, "test").experiment.model.similarity.attends
    page = searched(on_grid, TEXT, tmp_path / "page.html")
    assert ("Each word divides its attention" in page) == (side == "t2i")
    assert ("Each region of the photo divides its attention" in page) == (side == "i2t")
    assert "<script" not in page


def test_features_without_places_are_told_and_nothing_is_drawn(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = load_dataset_file(demo).images
    ids, rng = np.asarray([image.imgid for image in images], np.int64), np.random.default_rng(0)
    out = tmp_path / "features" / "demo_plain.h5"
    rows = Rows(ids, rng.normal(size=(len(ids), 3, 8)).astype(np.float16), np.zeros((len(ids), 32), np.uint8))
    write_shard(shard_path(out, 0, 1), Identity("demo", "plain", "image", {}), rows)
    run = train(merge_shards(out, 1, demo, ids), experiment(*scan("t2i")), out=tmp_path / "run")
    capsys.readouterr()
    page = searched(run, TEXT, tmp_path / "page.html")
    lines = [line for line in capsys.readouterr().err.splitlines() if "demo_plain.h5" in line]
    assert len(lines) == 1
    assert " its plain " in lines[0]
    assert not drawings(page)
    assert 'class="word' not in page
    assert len(cards(page)) == 10


def test_a_model_that_does_not_attend_has_no_drawings(run: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    page = searched(run, TEXT, tmp_path / "page.html")
    assert not drawings(page)
    assert "attention" not in page
