from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup

from tests.drawn import drawings
from tests.training.conftest import Capture, Fails, Patch, done, experiment, write_regions
from tests.training.use.attending import compare, scan
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, read_embeddings
from vse.eval.report import charts
from vse.eval.report.gallery import retrieve_candidates
from vse.eval.report.pages import thumbnail_data_uri
from vse.features.cache.feature_cache import merge_shards, open_cache
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.dataset.captions import ascii_words
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.training.cli import embed_main, report_main, search_main
from vse.training.training import train
from vse.training.use.model import load_run

SIDES = ["t2i", "i2t"]
TEXT = "a red square above a blue zebra"


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: Patch) -> None:
    """Reports without their charts, which take half of the time of a report and are not looked at here."""
    monkeypatch.setattr(charts, "_render_chart", lambda *_, **__: Markup())


@pytest.fixture(scope="module", params=SIDES)
def on_grid(request: pytest.FixtureRequest, positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the four cells of a grid."""
    return train(positions, experiment(*scan(request.param)), out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def boxes(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up cache of one to three regions per image; image k has none whose number ends in 7."""
    rng, ids = np.random.default_rng(0), [image.imgid for image in load_dataset_file(demo).images]
    counts = np.asarray([0 if imgid % 10 == 7 else imgid % 3 + 1 for imgid in ids])
    corners = rng.uniform((0, 0, 16, 16), (16, 16, 32, 32), (counts.sum(), 4))
    features = rng.normal(size=(counts.sum(), 16))
    return write_regions(demo, tmp_path_factory.mktemp("features") / "demo_boxes.h5", counts, features, corners)


@pytest.fixture(scope="module", params=SIDES)
def on_boxes(request: pytest.FixtureRequest, boxes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on regions of different numbers."""
    return train(boxes, experiment(*scan(request.param)), out=tmp_path_factory.mktemp("runs") / "run")


def searched(run: Path, query: str | Path, page: Path, *options: object) -> str:
    done(search_main, run, query, "--html", page, *options)
    return page.read_text()


def cards(page: str) -> list[str]:
    return page.split('<li class="card')[1:]


@pytest.mark.sampled(1)
def test_for_a_text_each_photo_shows_where_its_words_look(on_grid: Path, demo: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(demo)
    page = searched(on_grid, TEXT, tmp_path / "page.html", "-k", 3)
    found = drawings(page)
    assert len(cards(page)) == len(found) == 3
    for card, shown in zip(cards(page), found.values(), strict=True):
        image = next(image for image in dataset.split("test") if image.file in card)
        assert shown.source == thumbnail_data_uri(dataset.image_path(image))
        compare(shown, on_grid, image.imgid, ascii_words(TEXT))
        width, height = shown.size
        cells = [[x, y, width / 2, height / 2] for y in (0, height / 2) for x in (0, width / 2)]
        np.testing.assert_allclose(shown.regions, cells, atol=0.06)
    words = re.findall(r'<span class="word w(\d+)( quiet)?" tabindex="0" role="button">(.*?)</span>', page)
    assert [unescape(word) for _, _, word in words] == ["<start>", *ascii_words(TEXT)[:-1], "<zebra>", "<end>"]
    assert [bool(quiet) for _, quiet, _ in words] == [True, *[False] * 6, True, True]
    for number, *_ in words:
        assert f".looks:has(.w{number}:hover) .m{number}," in page
    side = load_run(on_grid, "test").experiment.model.similarity.attention_direction
    assert ("Each word divides its attention" in page) == (side == "t2i")
    assert ("Each region of the photo divides its attention" in page) == (side == "i2t")
    assert "<script" not in page


@pytest.mark.sampled(1)
def test_for_a_photo_each_caption_shows_where_its_words_look_on_it(on_grid: Path, demo: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(demo)
    asked = dataset.split("test")[3]
    page = searched(on_grid, dataset.image_path(asked), tmp_path / "page.html", "-k", 4)
    captions = {caption.raw: caption for image in dataset.split("test") for caption in image.captions}
    assert len(cards(page)) == 4
    for card in cards(page):
        (shown,) = drawings(card).values()
        assert shown.source == thumbnail_data_uri(dataset.image_path(asked))
        said = unescape(re.findall(r"“(.*)” of", card)[0])
        compare(shown, on_grid, asked.imgid, list(captions[said].tokens), atol=2e-2)  # the cache holds float16
        assert len(re.findall(r'class="word w', card)) == len(captions[said].tokens) + 2


@pytest.mark.sampled(1)
def test_regions_are_drawn_as_their_boxes(on_boxes: Path, boxes: Path, demo: Path, tmp_path: Path) -> None:
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
            assert f'<img src="{thumbnail_data_uri(dataset.image_path(image))}"' in card
            continue
        (shown,) = drawings(card).values()
        x1, y1, x2, y2 = cache.shard_arrays[0]["boxes"].map_to_memory()[first:end].T * shown.size[0] / 32
        np.testing.assert_allclose(shown.regions, np.stack([x1, y1, x2 - x1, y2 - y1], 1), atol=0.11)
        compare(shown, on_boxes, image.imgid, ["a", "red", "square"])
    assert {0, 1, 2, 3} == set(counts)


def test_features_without_places_are_told_and_nothing_is_drawn(demo: Path, tmp_path: Path, capsys: Capture) -> None:
    images = load_dataset_file(demo).images
    ids, rng = np.asarray([image.imgid for image in images], np.int64), np.random.default_rng(0)
    out = tmp_path / "features" / "demo_plain.h5"
    rows = FeatureRows(ids, rng.normal(size=(len(ids), 3, 8)).astype(np.float16), np.zeros((len(ids), 32), np.uint8))
    write_shard(shard_path(out, 0, 1), CacheIdentity("demo", "plain", "image", {}), rows)
    run = train(merge_shards(out, 1, demo, ids), experiment(*scan("t2i")), out=tmp_path / "run")
    capsys.readouterr()
    page = searched(run, TEXT, tmp_path / "page.html")
    lines = [line for line in capsys.readouterr().err.splitlines() if "demo_plain.h5" in line]
    assert len(lines) == 1
    assert " its plain " in lines[0]
    assert not drawings(page)
    assert 'class="word' not in page
    assert len(cards(page)) == 10


def test_a_model_that_does_not_attend_has_no_drawings(run: Path, tmp_path: Path, fails: Fails) -> None:
    page = searched(run, TEXT, tmp_path / "page.html")
    assert not drawings(page)
    assert "attention" not in page


def evaluated(run: Path, out: Path) -> Path:
    """The result of a run, whose embeddings are written first."""
    done(embed_main, run)
    done(eval_main, run / "test.h5", "--bootstrap", 0, "--out", out)
    return out


def reported(out: Path, *arguments: object) -> str:
    done(report_main, *arguments, "--out", out)
    return out.read_text()


@pytest.fixture(scope="module")
def folder(on_grid: Path) -> Path:
    """A run on the four cells of a grid, and its result."""
    evaluated(on_grid, on_grid.parent / "result.json")
    return on_grid.parent


@pytest.fixture
def own(positions: Path, tmp_path: Path) -> Path:
    """The result of a run on copies of the data set and the features, all of which a test may spoil."""
    shutil.copytree(positions.parent.parent, tmp_path / "own")
    features = tmp_path / "own" / "features" / positions.name
    return evaluated(train(features, experiment(*scan("t2i")), out=tmp_path / "own/runs/run"), tmp_path / "own/result.json")


def report_cards(page: str, direction: str) -> list[str]:
    section = page.split(f'<h2 id="{direction}">')[1].split("<h2")[0]
    return section.split("<article")[1:]


def shown_by(run: Embeddings, direction: str, query: int) -> list[int]:
    """Rows of what a query shows: the five best, and the best right one if it is not among them."""
    (result,) = retrieve_candidates(run, direction, [query])
    rows = [candidate.row for candidate in result.candidates]
    return rows if result.best_right.row in rows else [*rows, result.best_right.row]


def captions(dataset: Dataset) -> dict[int, list[str]]:
    return {caption.sentid: list(caption.tokens) for image in dataset.split("test") for caption in image.captions}


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_a_caption_shows_on_each_photo_where_its_words_look(folder: Path, demo: Path, tmp_path: Path) -> None:
    page, run = reported(tmp_path / "page.html", folder / "result.json"), read_embeddings(folder / "run" / "test.h5")
    tokens, seen = captions(load_dataset_file(demo)), 0
    for card in report_cards(page, "t2i"):
        for name, shown in drawings(card).items():
            _, query, column, row = name.split("-")
            assert column == "0"
            assert int(row) in shown_by(run, "t2i", int(query))
            words = tokens[int(run.caption_ids[int(query)])]
            assert f"“{' '.join(words)}" in card.lower().replace(",", "")
            compare(shown, folder / "run", int(run.image_ids[int(row)]), words)
            seen += 1
        assert len(drawings(card)) == len(shown_by(run, "t2i", int(query))) == card.count("<figure")
        assert card.count('class="looks"') == 1
    assert seen > 20


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_a_photo_shows_where_the_words_of_each_caption_look(folder: Path, demo: Path, tmp_path: Path) -> None:
    page, run = reported(tmp_path / "page.html", folder / "result.json"), read_embeddings(folder / "run" / "test.h5")
    tokens = captions(load_dataset_file(demo))
    assert len(report_cards(page, "i2t")) > 3
    for card in report_cards(page, "i2t"):
        ((name, shown),) = drawings(card).items()
        query = int(name.split("-")[1])
        said = [re.findall(r'class="word w(\d+)[^>]*>(.*?)</span>', line) for line in card.split("<li")[1:]]
        rows = shown_by(run, "i2t", query)
        assert len(said) == len(rows)
        for row, spoken in zip(rows, said, strict=True):
            numbers = [int(number) for number, _ in spoken]
            words = tokens[int(run.caption_ids[row])]
            assert [unescape(word).strip("<>") for _, word in spoken] == ["start", *words, "end"]
            compare(shown.of(numbers), folder / "run", int(run.image_ids[query]), words)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("on_grid", ["t2i"], indirect=True, scope="module")
def test_two_results_have_drawings_of_their_own(folder: Path, positions: Path, cache: Path, tmp_path: Path) -> None:
    train(positions, experiment(*scan("t2i")), seed=1, out=tmp_path / "other")
    other = evaluated(tmp_path / "other", tmp_path / "other.json")
    plain = evaluated(train(cache, experiment("train.epochs=1"), out=tmp_path / "plain"), tmp_path / "plain.json")
    page = reported(tmp_path / "page.html", folder / "result.json", other)
    for direction in ("i2t", "t2i"):
        for card in report_cards(page, direction):
            columns = {name.split("-")[2] for name in drawings(card)} if direction == "t2i" else set()
            columns |= set(re.findall(r'href="#i2t-\d+-(\d)-\d+"', card))
            assert columns == {"0", "1"}
            numbers = re.findall(r'class="word w(\d+)', card)
            assert direction == "t2i" or len(numbers) == len(set(numbers))
    page = reported(tmp_path / "page.html", plain, folder / "result.json")
    assert {name.split("-")[2] for card in report_cards(page, "t2i") for name in drawings(card)} == {"1"}
    assert "Not displayed here" not in page
    assert not drawings(reported(tmp_path / "page.html", plain))
    page = reported(tmp_path / "page.html", folder / "result.json", "--queries", 30, "--seed", 5)
    assert all(drawings(card) for direction in ("i2t", "t2i") for card in report_cards(page, direction))
    assert not drawings(reported(tmp_path / "page.html", folder / "result.json", "--queries", 0))


@pytest.mark.slow
def test_a_run_that_is_not_at_hand_or_another_is_told(own: Path, tmp_path: Path) -> None:
    run, cache = own.parent / "runs" / "run", own.parent / "features" / "demo_positions.h5"
    assert drawings(reported(tmp_path / "page.html", own))
    again = train(cache, experiment(*scan("t2i"), "train.learning_rate=0.01"), out=run.with_name("again"))
    for file in ("best.safetensors", "run.json", "config.yaml", "metrics.csv"):
        shutil.copy(again / file, run / file)
    page = reported(tmp_path / "page.html", own)
    assert "where the words of vsepp look: the run was trained again since it was embedded" in page
    assert not drawings(page)
    cache.unlink()
    page = reported(tmp_path / "page.html", own)
    assert "where the words of vsepp look: its run, its features or their places on the photos are not at hand" in page
    assert str(tmp_path) not in page.split('role="note"')[1].split("</div>")[0]
    (run / "config.yaml").unlink()
    assert "where the words" not in reported(tmp_path / "page.html", own)


@pytest.mark.slow
def test_what_attention_is_read_from_is_not_written(own: Path, fails: Fails) -> None:
    run = own.parent / "runs" / "run"
    for file in (run / "best.safetensors", run / "config.yaml", own.parent / "features" / "demo_positions.h5"):
        before = file.read_bytes()
        assert "is not a page by vse report" in fails(report_main, own, "--out", file)
        assert "also an input" in fails(report_main, own, "--out", file, "--force")
        assert file.read_bytes() == before


@pytest.mark.slow
def test_a_photo_that_cannot_be_read_is_a_blank_without_a_drawing(own: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(own.parent / "data" / "dataset.json")
    lost = dataset.split("test")[:6]
    for image in lost:
        dataset.image_path(image).write_bytes(b"broken")
    page = reported(tmp_path / "page.html", own, "--queries", 36)
    blanks = [card for card in report_cards(page, "i2t") if "no photo" in card]
    assert blanks
    assert not any(drawings(card) or 'class="word' in card for card in blanks)
    assert np.mean([bool(drawings(card)) for card in report_cards(page, "t2i")]) == 1
