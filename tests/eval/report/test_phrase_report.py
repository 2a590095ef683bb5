"""Reports of phrase localisation: phrases in photos, recalls by type, one or two models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import chromium, find_accessibility_errors
from tests.eval.evaluating import Edit, Fails, write_phrase_result
from tests.eval.report.test_report import fails_with
from tests.eval.some_phrases import phrases_of, some_phrases
from vse.eval.files.phrase_scores import PhraseScores, write_phrase_scores
from vse.eval.report.phrases import build_phrase_gallery
from vse.eval.report.report import write_report
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.cli import report_main

__all__ = ["chromium"]  # a fixture


@pytest.fixture
def result(demo: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes the result of a model of the demo's phrases, in ``results``, from a file in its run folder."""

    def make(experiment: str = "good", skill: float = 6.0, **changes: Any) -> Path:
        note = {"captions": str(demo), "config": {"loss": {"margin": skill}}}
        run = phrases_of(demo, skill, experiment=experiment, provenance=json.dumps(note), **changes)
        file = write_phrase_scores(tmp_path / "runs" / f"demo_{experiment}" / "seed-0" / "test.h5", run)
        return write_phrase_result([file], tmp_path / "results" / f"demo_{experiment}.json", bootstrap=100)

    return make


def report(folder: Path, *results: Path, **options: Any) -> str:
    return write_report(results, folder / "page.html", **options).read_text()


def cards(page: str) -> list[str]:
    return page.split("<article")[1:]


def plain(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html))).strip()


def test_the_page_says_what_is_measured_with_a_bar_for_each_type(result: Callable[..., Path], tmp_path: Path) -> None:
    file = result(skill=2.0)
    page, metrics = report(tmp_path, file), json.loads(file.read_text())["protocols"]["phrase"]
    assert "Phrase localisation on demo, split test: 12 images" in page
    tiles = re.findall(r'<div class="tile"><b>([\d.]+)</b>([^<]+)', page)
    names = {"R@1": "r1", "R@5": "r5", "R@10": "r10", "upper bound": "bound"}
    expected = {name: round(metrics["phrase"][key], 1) for name, key in names.items()}
    assert {name: float(value) for value, name in tiles} == expected
    assert f"{metrics['n_phrases']:,} phrases, right at an IoU of 0.5" in page
    assert f"{metrics['n_without_box']:,} more phrases have no box and are left out." in page
    table = page.split('<table class="types">')[1].split("</table>")[0]
    rows = re.findall(r'<tr><td>(.*?)</td><td class="n">([\d,]+)</td>.*?class="a" style="width: ([\d.]+)%"', table, re.DOTALL)
    assert {name: (int(n.replace(",", "")), float(width)) for name, n, width in rows} == {
        name: (of["n_phrases"], round(of["r1"], 1)) for name, of in metrics["per_type"].items()
    }
    alone = report(tmp_path, file, queries=0)
    assert ("<article" in alone, '<table class="types">' in alone) == (False, True)


def test_a_card_has_each_phrase_once_dashed_and_once_solid(result: Callable[..., Path], tmp_path: Path) -> None:
    for card in cards(report(tmp_path, result())):
        said = card.split('<p class="query said">')[1].split("</p>")[0]
        colours = re.findall(r'class="phrase" style="border-color: (#\w+)"', said)
        boxes = [(bool(truth), colour) for truth, colour in re.findall(r'<g( class="truth")?>.*?stroke="(#\w+)"', card)]
        assert colours
        assert sorted(colour for truth, colour in boxes if truth) == sorted(colours)
        assert sorted(colour for truth, colour in boxes if not truth) == sorted(colours)
        assert card.count("<image ") == 1


def test_marks_and_overlaps_are_those_of_the_scores_and_cases_of_their_groups(demo: Path) -> None:
    gallery = build_phrase_gallery([phrases_of(demo, skill=3.0)], load_dataset_file(demo), 0.5, 12, seed=0)
    shown = [(card, phrase) for group in gallery.groups for card in group.cards for phrase in card.columns[0].phrases]
    assert {phrase.is_right for _, phrase in shown} == {True, False}
    for card, phrase in shown:
        boxes = card.columns[0].photo.boxes
        truth, best = sorted((b for b in boxes if b.number == phrase.number), key=lambda box: not box.is_truth)
        (x1, y1, w1, h1), (x2, y2, w2, h2) = truth.rectangle, best.rectangle
        shared = max(0, min(x1 + w1, x2 + w2) - max(x1, x2)) * max(0, min(y1 + h1, y2 + h2) - max(y1, y2))
        assert float(phrase.iou) == pytest.approx(shared / (w1 * h1 + w2 * h2 - shared), abs=0.02)
        assert phrase.is_right == (float(phrase.iou) >= 0.5) == (phrase.first_right == "")
    seeds = (build_phrase_gallery([phrases_of(demo, skill=3.0)], load_dataset_file(demo), 0.5, 12, seed) for seed in (0, 1))
    (b, drawn, w), (again, others, worst) = ([[card.pieces for card in g.cards] for g in one.groups] for one in seeds)
    assert (b, w) == (again, worst)
    assert drawn != others, "the seed decides what is drawn and nothing else"
    named = [(group.title.partition(":")[0], len(group.cards)) for group in gallery.groups]
    assert named == [("Best cases", 4), ("Sampled at random", 4), ("Worst cases", 4)]
    best, _, worst = ([card.columns[0] for card in group.cards] for group in gallery.groups)
    assert all(column.n_right == len(column.phrases) for column in best)
    assert all(column.n_right == 0 for column in worst)
    assert len({card.columns[0].photo.file for group in gallery.groups for card in group.cards}) == 12


def test_two_models_stand_side_by_side(result: Callable[..., Path], tmp_path: Path) -> None:
    good, poor = result("good", 6.0), result("poor", 0.3)
    page = report(tmp_path, good, poor)
    assert page.count('<i class="b"') == page.count('<i class="a"') > 0
    for card in cards(page):
        assert card.count("<svg") == 2
        assert (card.count("<image "), card.count("<use ")) == (1, 1)
    assert "A places more phrases right" in page
    table = plain(page.split("A minus B, on the same queries")[1].split("</table>")[0])
    first = [json.loads(file.read_text())["protocols"]["phrase"]["phrase"]["r1"] for file in (good, poor)]
    assert f"R@1 {first[0] - first[1]:+.1f}" in table
    assert "mean IoU" in table


def test_of_two_models_it_is_counted_who_is_right_alone(demo: Path) -> None:
    dataset, run = load_dataset_file(demo), phrases_of(demo, skill=6.0)
    gallery = build_phrase_gallery([run, run], dataset, 0.5, 12, seed=0)
    assert (gallery.groups, gallery.comparison_counts) == ([], (0, 0, int(run.true_box_mask.sum())))
    other = phrases_of(demo, skill=0.0, seed=3)
    there, back = (build_phrase_gallery(runs, dataset, 0.5, 12, 0).comparison_counts for runs in ([run, other], [other, run]))
    assert back == (there[1], there[0], there[2])


def test_without_scores_or_photos_the_metrics_are_shown(result: Callable[..., Path], tmp_path: Path, own_demo: Path) -> None:
    file = result()
    assert "<article" in report(tmp_path, file, data=own_demo)
    for photo in (own_demo.parent / "images").iterdir():
        photo.unlink()
    blank = report(tmp_path, file, data=own_demo)
    assert "12 photos could not be read" in blank
    assert (blank.count("<image "), blank.count("no photo: ")) == (0, 12)
    (tmp_path / "runs" / "demo_good" / "seed-0" / "test.h5").unlink()
    alone = report(tmp_path, file)
    assert "(give --embeddings)" in alone
    assert ("<article" in alone, '<table class="types">' in alone) == (False, True)


def test_texts_of_data_are_escaped(own_demo: Path, tmp_path: Path, edit: Edit) -> None:
    evil = "<script>alert(1)</script>&\"'"

    def spoil(content: dict[str, Any]) -> None:
        for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
            sentence["tokens"] = [evil] * len(sentence["tokens"])

    edit(own_demo, spoil)
    types = np.array([f"<marquee>{evil}", "=1+1"] * 1000)[: len(phrases_of(own_demo).types)]
    run = phrases_of(own_demo, types=types, experiment=evil.replace("/", ""))
    page = report(tmp_path, other(run, tmp_path / "r.json"), data=own_demo)
    assert "<article" in page
    assert not re.search(r"<(script|marquee)", page)


def other(run: PhraseScores, path: Path) -> Path:
    return write_phrase_result([write_phrase_scores(path.with_suffix(".h5"), run)], path, bootstrap=0)


def test_what_does_not_belong_together_is_refused(
    demo: Path, result: Callable[..., Path], tmp_path: Path, fails: Fails
) -> None:
    good = result()
    toy = other(some_phrases(), tmp_path / "toy.json")
    fails_with("toy.json has dataset 'toy'", [good, toy], tmp_path / "p.html")
    fails_with("the phrases belong to 'toy'; see --data", [toy], tmp_path / "p.html", data=demo)
    unknown = phrases_of(demo, phrase_ids=phrases_of(demo).phrase_ids + 1)
    fails_with("has no phrase .* of caption", [other(unknown, tmp_path / "u.json")], tmp_path / "p.html", data=demo)
    strict = write_phrase_result(sorted(tmp_path.glob("runs/*/*/*.h5")), tmp_path / "s.json", iou=0.7, bootstrap=0)
    fails_with("different IoU", [good, strict], tmp_path / "p.html")
    file = tmp_path / "runs" / "demo_good" / "seed-0" / "test.h5"
    write_phrase_scores(file, phrases_of(demo, skill=1.0, experiment="good"))
    assert "was computed from other embeddings" in fails(report_main, good, "--out", tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


@pytest.mark.nightly
@pytest.mark.browser
@pytest.mark.parametrize(("two", "width", "scheme"), [(False, 1280, "light"), (True, 390, "dark")])
def test_a_browser_shows_the_page_whole(
    result: Callable[..., Path], tmp_path: Path, chromium: Any, two: bool, width: int, scheme: str
) -> None:
    results = [result(skill=2.0), *([result("x" * 60, 0.5)] if two else [])]
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said = []
    for event in ("console", "pageerror"):
        page.on(event, lambda message: said.append(message))
    page.goto(write_report(results, tmp_path / "page.html").as_uri())
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    photos = page.evaluate("[...document.querySelectorAll('.placed svg')].map(svg => svg.getBoundingClientRect().width)")
    assert len(photos) >= 12
    assert all(180 < photo <= width for photo in photos)
    strokes = page.evaluate(
        "[...document.querySelectorAll('.placed .truth .line')].map(r => getComputedStyle(r).strokeDasharray)"
    )
    assert strokes
    assert "none" not in strokes
    assert find_accessibility_errors(page) == []
    page.close()
