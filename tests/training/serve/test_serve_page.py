from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import numpy as np
import pytest
from PIL import Image

from tests.eval.report.test_report import chromium
from tests.training.serve.conftest import running
from vse.training.serve.answers import ServedRuns

__all__ = ["chromium"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.browser]
TEXT = "a red square above a blue circle"
FOCUSED = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"


@pytest.fixture(scope="module")
def url(app: flask.Flask) -> Iterator[str]:
    with running(app) as address:
        yield address


class Opened:
    """A page, and what its console and its requests say."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def search(self, text: str = TEXT) -> None:
        self.page.fill("#q", text)
        self.page.press("#q", "Enter")
        self.done()

    def done(self) -> None:
        """Wait for the answer and its photos."""
        self.page.locator("#status").filter(has_text=re.compile("results")).wait_for()
        self.page.evaluate("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
        self.page.evaluate("Promise.all([...document.images].map(image => image.decode()))")

    def lightness(self, selector: str, which: str) -> float:
        script = "([selector, which]) => getComputedStyle(document.querySelector(selector))[which]"
        return sum(map(float, re.findall(r"\d+", self.page.evaluate(script, [selector, which]))[:3])) / 765


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_results_stand_side_by_side_or_below_each_other(chromium: Any, url: str, width: int, scheme: str) -> None:
    opened = Opened(chromium, url, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = opened.page
    opened.search("w" * 150)  # one word, longer than a phone is wide
    opened.search()
    assert opened.said == []
    assert all(address.startswith((url, "data:")) for address in opened.asked)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].map(image => image.naturalWidth > 0)") == [True] * 6
    boxes = [section.bounding_box() for section in page.query_selector_all("section")]
    assert len(boxes) == 2
    if width == 1280:
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    else:
        assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]
    dark = scheme == "dark"
    assert (opened.lightness("body", "backgroundColor") < 0.2) == dark
    for text in ("body", "h1", "h2", "h3", ".quiet", ".card", "label"):
        assert (opened.lightness(text, "color") > 0.5) == dark, text
    assert abs(opened.lightness("button", "color") - opened.lightness("button", "backgroundColor")) > 0.35
    page.close()


def test_by_the_keyboard_alone_a_caption_is_searched_and_a_look_is_taken(chromium: Any, url: str) -> None:
    opened = Opened(chromium, url)
    page, keys = opened.page, opened.page.keyboard
    assert page.evaluate(FOCUSED) == "q", "one can type at once"
    keys.type(TEXT)
    keys.press("Enter")
    opened.done()
    assert page.evaluate("document.activeElement.textContent") == f"Images for “{TEXT}”"
    assert page.evaluate("location.search") == "?q=a+red+square+above+a+blue+circle&k=3"
    assert page.text_content("[role=status]") == "6 results"
    keys.press("Tab")
    assert page.evaluate("document.activeElement.matches('a.look')"), "after the heading comes what one can do"
    assert page.evaluate("document.activeElement.textContent").startswith("Where it looked at demo_")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "what has the focus is seen"
    for key, expanded in (("Enter", "true"), (" ", "false"), (" ", "true")):
        keys.press(key)
        page.wait_for_selector(f".card:first-child a.look:focus[aria-expanded={expanded}]")
    page.wait_for_selector(".card:has(.looked) .seen")
    assert "Each word divides its attention" in page.text_content(".card:has(.looked)")
    keys.press("Tab")
    assert page.evaluate("document.activeElement.matches('.word.w0')")
    keys.press("Tab")
    shown = "[...document.querySelectorAll('.map')].filter(map => getComputedStyle(map).visibility === 'visible')"
    assert page.evaluate(f"{shown}.map(map => map.classList[1])") == ["m1"], "the word with the focus is drawn"
    assert opened.said == []
    page.close()


def test_a_photograph_that_is_chosen_or_dropped_finds_captions(chromium: Any, url: str, photo: Path) -> None:
    opened = Opened(chromium, url)
    page = opened.page
    page.set_input_files("#photo", photo)
    opened.done()
    assert page.text_content("h2") == "Captions for your photograph"
    assert page.evaluate("document.querySelectorAll('.card').length") == 6
    page.click("button.look >> nth=0")
    page.wait_for_selector(".looked svg.whole")
    assert page.evaluate("document.querySelector('.looked image').href.baseVal").startswith("data:image/jpeg")
    assert opened.said == []
    page.close()
    opened = Opened(chromium, url)
    page = opened.page
    drop = """async ([bytes, type]) => {
      const dropped = new DataTransfer();
      dropped.items.add(new File([new Uint8Array(bytes)], "dropped.jpg", {type}));
      for (const name of ["dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(name, {dataTransfer: dropped, bubbles: true, cancelable: true}));
    }"""
    page.evaluate(drop, [list(photo.read_bytes()), "image/jpeg"])
    opened.done()
    assert page.text_content("h2") == "Captions for your photograph"
    assert opened.said == []
    page.close()


def test_a_refusal_is_one_line_on_the_page(chromium: Any, url: str, tmp_path: Path, encoded: Callable[..., bytes]) -> None:
    opened = Opened(chromium, url)
    page = opened.page
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    (tmp_path / "large.png").write_bytes(encoded(Image.fromarray(noise), "PNG"))
    (tmp_path / "text.jpg").write_text("no image")
    for name, line in (("large.png", "The photograph has more than 0.09"), ("text.jpg", "not a readable image")):
        page.set_input_files("#photo", tmp_path / name)
        page.locator("[role=alert]").filter(has_text=line).wait_for()
        assert page.evaluate("document.querySelectorAll('[role=alert]').length") == 1
        assert page.text_content("#status") == "No results"
    page.close()


def test_without_scripts_the_forms_do_the_same(chromium: Any, url: str, photo: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    page.fill("#q", TEXT)
    with page.expect_navigation():
        page.press("#q", "Enter")
    assert page.locator(".card").count() == 6
    with page.expect_navigation():
        page.click("a.look >> nth=0")
    assert page.locator("svg.whole").count() == 1
    page.set_input_files("#photo", photo)
    with page.expect_navigation():
        page.click("#by-photo button")
    assert page.locator(".card").count() == 6
    assert page.locator("button.look").first.is_hidden()
    context.close()


def test_an_unknown_word_and_a_score_are_read_out_with_their_run(chromium: Any, url: str, served: ServedRuns) -> None:
    opened = Opened(chromium, url)
    opened.search("a zebra")
    for number, run in enumerate(served.runs):
        section = opened.page.query_selector(f"section[aria-labelledby=run-{number}]")
        assert section.query_selector("h3").text_content() == run.name
        assert "Not a word of the training captions: zebra." in section.text_content()
    opened.page.close()
