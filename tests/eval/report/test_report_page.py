"""The report in a browser: on a phone, a laptop and a wide screen, in the dark, on paper, and its gallery."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import SCREENS, WIDTHS, chromium, find_accessibility_errors
from tests.eval.report.test_report import EVIL, World, world
from vse.eval.report.report import write_report

__all__ = ["chromium", "world"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("two", "width"), [(False, 1280), (True, 390)])
def test_a_browser_shows_the_page_whole(world: World, chromium: Any, two: bool, width: int) -> None:
    long = "w" * 200  # one word, longer than a phone is wide
    world.change(lambda content: [s.update(raw=f"{EVIL} {long}") for i in content["images"] for s in i["sentences"]])
    results = [world.result(noise=0.9), *([world.result(experiment="x" * 60, noise=2.0)] if two else [])]
    path = write_report(results, world.folder / "page.html")
    page = chromium.new_page(viewport={"width": width, "height": 800})
    said, asked = [], []
    for event in ("console", "pageerror", "dialog"):
        page.on(event, lambda message: said.append(message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert said == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}
    assert asked.count(path.as_uri()) == 1
    widths = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) > 20
    assert all(widths)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.scripts.length") == 0
    charts = page.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width)")
    assert len(charts) == 5
    assert all(200 < chart <= width for chart in charts)
    page.close()


def test_the_page_follows_the_reader_s_colour_scheme(world: World, chromium: Any) -> None:
    page = chromium.new_page()
    page.goto(write_report([world.result(noise=0.9)], world.folder / "page.html").as_uri())

    def lightness(selector: str, which: str) -> float:
        script = "([selector, which]) => getComputedStyle(document.querySelector(selector))[which]"
        return sum(map(float, re.findall(r"\d+", page.evaluate(script, [selector, which]))[:3])) / 765

    for dark in (False, True):
        page.emulate_media(color_scheme="dark" if dark else "light")
        assert (lightness("body", "backgroundColor") < 0.2) == dark
        for text in ("body", "h2", "td", "svg text", ".quiet", ".tile span"):
            assert (lightness(text, "fill" if "svg" in text else "color") > 0.5) == dark, text
        assert (lightness(".tile", "backgroundColor") < 0.3) == dark
    page.emulate_media(media="print")
    assert lightness("body", "backgroundColor") > 0.9, "on paper it is light"
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 less its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.close()


def write_two(world: World, **options: Any) -> Path:
    """A report on two results."""
    results = [world.result(noise=0.9), world.result(experiment="other", noise=2.0)]
    return write_report(results, world.folder / "two.html", **options)


def test_on_a_phone_each_column_of_a_table_can_be_scrolled_to(world: World, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 800})
    page.goto(write_two(world).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("[...document.querySelectorAll('table')].every(table => table.closest('.wide'))")
    sizes = page.evaluate("[...document.querySelectorAll('td small')].map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes) >= 11, "the numbers can be read"
    for wide in page.query_selector_all(".wide"):
        wide.evaluate("element => element.scrollLeft = 10000")
        ends = "element => [...element.querySelectorAll('tr > :last-child')].map(cell => cell.getBoundingClientRect().right)"
        assert max(wide.evaluate(ends)) <= 390
        name = wide.query_selector("tr:last-child > :first-child").bounding_box()
        assert name["x"] >= 0, "the name of the row stays"
    page.close()


def write_both(world: World) -> tuple[Path, Path]:
    """A report on two results and a gallery of one, of few queries."""
    one = write_report([world.result(noise=0.9)], world.folder / "one.html", gallery=True, queries=2)
    return write_two(world, queries=2), one


@pytest.mark.nightly
def test_the_report_fits_every_screen(world: World, chromium: Any) -> None:
    page = chromium.new_page()
    for path in write_both(world):
        page.goto(path.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_report_is_accessible(world: World, chromium: Any, width: int, scheme: str) -> None:
    for path in write_both(world):
        page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto(path.as_uri())
        assert find_accessibility_errors(page) == []
        page.close()


def test_a_gallery_is_filtered_by_rank_and_a_link_leads_to_a_query(world: World, chromium: Any) -> None:
    page = chromium.new_page()
    address = write_report([world.result(noise=2.0)], world.folder / "gallery.html", gallery=True).as_uri()
    page.goto(address)
    cards = page.locator("#t2i ~ .gallery .card")
    for option in page.query_selector_all("#t2i ~ .gallery label"):
        option.click()
        count = re.search(r"\((\d+)\)", option.text_content())
        assert cards.locator("visible=true").count() == (int(count[1]) if count else cards.count())
    page.check("#t2i ~ .gallery .filters input >> nth=0")
    last = cards.last.get_attribute("id")
    page.goto(f"{address}#{last}")
    assert page.evaluate("document.querySelector(':target').getBoundingClientRect().bottom <= innerHeight")
    cards.first.locator(".permalink").click()
    assert page.url == f"{address}#{cards.first.get_attribute('id')}"
    page.close()
