"""What a model looks at, in the report of its result: against the attention of each pair by itself."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from tests.drawn import drawings
from tests.train.conftest import experiment
from tests.train.use.attending import compare, scan
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, read_embeddings
from vse.eval.report.gallery import retrieve
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.train.cli import embed_main, report_main
from vse.train.training import train

pytestmark = pytest.mark.slow


def done(main: Callable[[list[str]], None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


def evaluated(run: Path, out: Path) -> Path:
    """The result of a run, whose embeddings are written first."""
    done(embed_main, run)
    done(eval_main, run / "test.h5", "--bootstrap", 0, "--out", out)
    return out


def reported(out: Path, *arguments: object) -> str:
    done(report_main, *arguments, "--out", out)
    return out.read_text()


@pytest.fixture(scope="module", params=["t2i", "i2t"])
def folder(request: pytest.FixtureRequest, positions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the four cells of a grid, and its result."""
    folder = tmp_path_factory.mktemp("reported")
    train(positions, experiment(*scan(request.param)), out=folder / "run")
    evaluated(folder / "run", folder / "result.json")
    return folder


@pytest.fixture
def own(positions: Path, tmp_path: Path) -> Path:
    """The result of a run on copies of the data set and the features, all of which a test may spoil."""
    shutil.copytree(positions.parent.parent, tmp_path / "own")
    features = tmp_path / "own" / "features" / positions.name
    return evaluated(train(features, experiment(*scan("t2i")), out=tmp_path / "own/runs/run"), tmp_path / "own/result.json")


def cards(page: str, direction: str) -> list[str]:
    section = page.split(f'<h2 id="{direction}">')[1].split("<h2")[0]
    return section.split("<article")[1:]


def shown_by(run: Embeddings, direction: str, query: int) -> list[int]:
    """Rows of what a query shows: the five best, and the best right one if it is not among them."""
    (result,) = retrieve(run, direction, [query])
    rows = [candidate.row for candidate in result.candidates]
    return rows if result.answer.row in rows else [*rows, result.answer.row]


def captions(dataset: Dataset) -> dict[int, list[str]]:
    return {caption.sentid: list(caption.tokens) for image in dataset.split("test") for caption in image.captions}


def test_a_caption_shows_on_each_photo_where_its_words_look(folder: Path, demo: Path, tmp_path: Path) -> None:
    page, run = reported(tmp_path / "page.html", folder / "result.json"), read_embeddings(folder / "run" / "test.h5")
    tokens, seen = captions(load_dataset_file(demo)), 0
    for card in cards(page, "t2i"):
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


def test_a_photo_shows_where_the_words_of_each_caption_look(folder: Path, demo: Path, tmp_path: Path) -> None:
    page, run = reported(tmp_path / "page.html", folder / "result.json"), read_embeddings(folder / "run" / "test.h5")
    tokens = captions(load_dataset_file(demo))
    assert len(cards(page, "i2t")) > 3
    for card in cards(page, "i2t"):
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


def test_two_results_have_drawings_of_their_own(folder: Path, positions: Path, cache: Path, tmp_path: Path) -> None:
    train(positions, experiment(*scan("t2i")), seed=1, out=tmp_path / "other")
    other = evaluated(tmp_path / "other", tmp_path / "other.json")
    plain = evaluated(train(cache, experiment("train.epochs=1"), out=tmp_path / "plain"), tmp_path / "plain.json")
    page = reported(tmp_path / "page.html", folder / "result.json", other)
    for direction in ("i2t", "t2i"):
        for card in cards(page, direction):
            columns = {name.split("-")[2] for name in drawings(card)} if direction == "t2i" else set()
            columns |= set(re.findall(r'href="#i2t-\d+-(\d)-\d+"', card))
            assert columns == {"0", "1"}
            numbers = re.findall(r'class="word w(\d+)', card)
            assert direction == "t2i" or len(numbers) == len(set(numbers))
    page = reported(tmp_path / "page.html", plain, folder / "result.json")
    assert {name.split("-")[2] for card in cards(page, "t2i") for name in drawings(card)} == {"1"}
    assert "Not displayed here" not in page
    assert not drawings(reported(tmp_path / "page.html", plain))


def test_whatever_queries_are_asked_for_are_drawn(folder: Path, tmp_path: Path) -> None:
    page = reported(tmp_path / "page.html", folder / "result.json", "--queries", 30, "--seed", 5)
    for direction in ("i2t", "t2i"):
        assert len(cards(page, direction)) > 8
        assert all(drawings(card) for card in cards(page, direction))
    assert not drawings(reported(tmp_path / "page.html", folder / "result.json", "--queries", 0))


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


def test_what_attention_is_read_from_is_not_written(own: Path, fails: Callable[..., str]) -> None:
    run = own.parent / "runs" / "run"
    for file in (run / "best.safetensors", run / "config.yaml", own.parent / "features" / "demo_positions.h5"):
        before = file.read_bytes()
        assert "is not a page by vse report" in fails(report_main, own, "--out", file)
        assert "also an input" in fails(report_main, own, "--out", file, "--force")
        assert file.read_bytes() == before


def test_a_photo_that_cannot_be_read_is_a_blank_without_a_drawing(own: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(own.parent / "data" / "dataset.json")
    lost = dataset.split("test")[:6]
    for image in lost:
        dataset.image_path(image).write_bytes(b"broken")
    page = reported(tmp_path / "page.html", own, "--queries", 36)
    blanks = [card for card in cards(page, "i2t") if "no photo" in card]
    assert blanks
    assert not any(drawings(card) or 'class="word' in card for card in blanks)
    assert np.mean([bool(drawings(card)) for card in cards(page, "t2i")]) == 1
