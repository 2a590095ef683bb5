from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask
import numpy as np
import pytest
from PIL import Image

from tests.browser import SCREENS, WIDTHS, chromium, find_accessibility_errors
from tests.training.serve.conftest import MANY, running
from vse.training.options import RunInputOptions
from vse.training.serve.answers import ServedRuns
from vse.training.serve.app import PageSettings, create_app

__all__ = ["chromium"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.browser]
TEXT = "a red square above a blue circle"
ADDRESS = "?q=a+red+square+above+a+blue+circle"
BOXES = "elements => elements.map(element => element.getBoundingClientRect()).map(({x, y, width}) => ({x, y, width}))"


@pytest.fixture(scope="module")
def url(app: flask.Flask) -> Iterator[str]:
    """The address of a server of two runs."""
    with running(app) as address:
        yield address


@pytest.fixture(scope="module")
def one_run_url(vectors_run: Path) -> Iterator[str]:
    """The address of a server of one run that searches all splits."""
    served = ServedRuns([vectors_run], "all", [RunInputOptions()], MANY, "cpu")
    with running(create_app(served, PageSettings(n_results=10))) as address:
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
        with self.page.expect_navigation():
            self.page.press("#q", "Enter")
        self.load_photos()

    def search_photo(self, photo: Path) -> None:
        with self.page.expect_navigation(url=re.compile(r"/\?photo=")):
            self.page.set_input_files("#photo", photo)

    def load_photos(self) -> None:
        self.page.evaluate("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
        self.page.evaluate("Promise.all([...document.images].map(image => image.decode()))")

    def boxes(self, selector: str) -> list[dict[str, float]]:
        boxes: list[dict[str, float]] = self.page.eval_on_selector_all(selector, BOXES)
        return boxes

    def lightness(self, selector: str, which: str) -> float:
        script = "([selector, which]) => getComputedStyle(document.querySelector(selector))[which]"
        return sum(map(float, re.findall(r"\d+", self.page.evaluate(script, [selector, which]))[:3])) / 765

    def close(self) -> None:
        """Close the page, which must not have reported or loaded anything else."""
        assert self.said == []
        assert all(re.match(r"http://127\.0\.0\.1:|data:", address) for address in self.asked)
        self.page.close()


@pytest.mark.nightly
@pytest.mark.parametrize("width", WIDTHS)
def test_two_models_stand_side_by_side_and_one_fills_the_screen(chromium: Any, url: str, one_run_url: str, width: int) -> None:
    opened = Opened(chromium, url, viewport={"width": width, "height": 900})
    opened.search("w" * 150 + " " + TEXT)  # a word that is longer than a phone is wide
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.evaluate("[...document.images].map(image => image.naturalWidth > 0)") == [True] * 6
    first, second = opened.boxes("section")
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    assert abs(first["width"] - second["width"]) < 1
    rows = opened.boxes(".hits")
    assert rows[0]["y"] == rows[1]["y"], "the results begin at the same height, whatever stands above"
    opened.close()
    opened = Opened(chromium, f"{one_run_url}{ADDRESS}", viewport={"width": width, "height": 900})
    cards = opened.boxes(".card")
    n_columns = len({card["x"] for card in cards})
    assert n_columns == (2 if width == 390 else 5)
    assert max(card["x"] + card["width"] for card in cards) > width - 20, "the grid fills the screen"
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_pages_are_accessible(chromium: Any, url: str, width: int, scheme: str, photo: Path) -> None:
    opened = Opened(chromium, url, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert find_accessibility_errors(opened.page) == []
    opened.search("a zebra")
    assert find_accessibility_errors(opened.page) == []
    dark = scheme == "dark"
    assert (opened.lightness("body", "backgroundColor") < 0.2) == dark
    for text in ("body", "h2", "h3", ".quiet", ".card", "label"):
        assert (opened.lightness(text, "color") > 0.5) == dark, text
    for link in ("a.shot", "a.opens:not(.shot)"):
        opened.page.click(f"{link} >> nth=0")
        opened.page.wait_for_selector("dialog[open] h2")
        assert find_accessibility_errors(opened.page) == []
        opened.page.keyboard.press("Escape")
        opened.page.wait_for_selector("dialog", state="hidden")
        opened.page.wait_for_url(re.compile("q=a"))
    opened.page.click("summary")
    opened.search_photo(photo)
    assert find_accessibility_errors(opened.page) == []
    opened.close()


def test_each_search_has_an_address_a_title_and_a_place_in_the_history(chromium: Any, url: str) -> None:
    opened = Opened(chromium, url)
    page = opened.page
    assert page.evaluate("document.activeElement.id") == "q", "one can type at once"
    opened.search()
    first = page.url
    assert page.title() == f"{TEXT} – demo, test"
    opened.search("a green star")
    assert page.title() == "a green star – demo, test"
    page.go_back()
    assert (page.url, page.input_value("#q")) == (first, TEXT)
    page.click("text=Next page")
    page.wait_for_url("**&page=2")
    assert "Results 4 to 6 of 12 images" in page.text_content("section")
    page.go_back()
    page.go_forward()
    assert "Page 2" in page.text_content(".pages")
    shared = Opened(chromium, f"{url}{ADDRESS}")
    assert shared.page.text_content("h2") == f"Images for “{TEXT}”"
    shared.close()
    opened.close()


def test_a_hit_opens_large_with_its_captions_and_the_back_button_closes_it(
    chromium: Any, url: str, served: ServedRuns
) -> None:
    opened = Opened(chromium, f"{url}{ADDRESS}")
    page, results = opened.page, opened.page.url
    page.click("a.shot >> nth=0")
    page.wait_for_selector("dialog[open] h2")
    image = served.find_image(int(page.url.rpartition("/")[2]))
    assert page.text_content("dialog h2") == image.file
    captions = page.eval_on_selector_all("dialog li", "items => items.map(item => item.textContent)")
    assert captions == [caption.raw for caption in image.captions]
    with page.expect_download() as download:
        page.click("dialog >> text=Download")
    assert download.value.suggested_filename == image.file
    assert Path(download.value.path()).read_bytes() == served.dataset.image_path(image).read_bytes()
    for key, other in (("ArrowRight", {"has_not_text": image.file}), ("ArrowLeft", {"has_text": image.file})):
        page.keyboard.press(key)
        page.locator("dialog h2").filter(**other).wait_for()
    page.go_back()
    page.wait_for_selector("dialog", state="hidden")
    assert page.url == results
    page.go_forward()
    page.wait_for_selector("dialog[open]")
    page.reload()
    assert page.text_content("#results h2") == image.file, "the address of a large image is a page of its own"
    page.go_back()
    page.wait_for_selector(".card")
    page.click("a.shot >> nth=1")
    page.click("dialog >> text=More like this")
    page.wait_for_url("**/?like=*")
    assert page.text_content("h2").startswith("Images like demo_")
    opened.close()


def test_by_the_keyboard_alone_a_look_is_taken(chromium: Any, url: str) -> None:
    opened = Opened(chromium, f"{url}{ADDRESS}")
    page, keys = opened.page, opened.page.keyboard
    page.focus("a.opens:not(.shot) >> nth=0")
    assert page.evaluate("document.activeElement.textContent").startswith("Where it looked at demo_")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
    keys.press("Enter")
    page.wait_for_selector("dialog[open] .seen")
    assert "Each word divides its attention" in page.text_content("dialog")
    page.focus(".word.w1")
    shown = "[...document.querySelectorAll('.map')].filter(map => getComputedStyle(map).visibility === 'visible')"
    assert page.evaluate(f"{shown}.map(map => map.classList[1])") == ["m1"], "the word with the focus is drawn"
    keys.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert page.evaluate("document.activeElement.textContent").startswith("Where it looked"), "the focus returns"
    opened.close()


SEND = """async ([bytes, kind]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "photo.gif", {type: "image/gif"}));
  const options = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
  if (kind === "paste") document.body.dispatchEvent(new ClipboardEvent("paste", options));
  else for (const name of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(name, options));
}"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["choose", "drop", "paste"])
def test_the_results_of_a_photograph_survive_a_reload(
    chromium: Any, url: str, photo: Path, kind: str, encoded: Callable[..., bytes]
) -> None:
    opened = Opened(chromium, url)
    page = opened.page
    if kind == "choose":
        opened.search_photo(photo)
    else:
        with page.expect_navigation(url=re.compile(r"/\?photo=")):
            page.evaluate(SEND, [list(encoded(Image.open(photo).convert("P"), "GIF")), kind])
    for _ in range(2):
        assert page.text_content("h2") == "Captions for your photograph"
        assert page.locator(".card").count() == 6
        page.reload()
    page.click(".choice a:not([aria-current])")
    page.wait_for_url("**find=images")
    assert page.text_content("h2") == "Images like your photograph"
    page.go_back()
    page.click("a.opens:not(.shot) >> nth=0")
    page.wait_for_selector("dialog[open] svg.whole")
    assert page.evaluate("document.querySelector('dialog image').href.baseVal").startswith("data:image/jpeg")
    opened.close()


def test_a_refusal_is_one_line_on_the_page(chromium: Any, url: str, tmp_path: Path, encoded: Callable[..., bytes]) -> None:
    opened = Opened(chromium, url)
    page = opened.page
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    (tmp_path / "large.png").write_bytes(encoded(Image.fromarray(noise), "PNG"))
    (tmp_path / "text.jpg").write_text("no image")
    for name, line in (("large.png", "The photograph has more than 0.09"), ("text.jpg", "not a readable image")):
        page.set_input_files("#photo", tmp_path / name)
        page.locator("[role=alert]").filter(has_text=line).wait_for()
        assert page.locator("[role=alert]").count() == 1
    page.close()


@pytest.mark.nightly
def test_without_scripts_the_links_and_forms_do_the_same(chromium: Any, url: str, photo: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(url)
    page.fill("#q", TEXT)
    with page.expect_navigation():
        page.press("#q", "Enter")
    assert page.locator(".card").count() == 6
    for link, found in (("a.shot", ".large img"), ("a.opens:not(.shot)", "svg.whole")):
        with page.expect_navigation():
            page.click(f"{link} >> nth=0")
        assert page.locator(found).count() == 1
        page.go_back()
    page.click("summary")
    page.set_input_files("#photo", photo)
    with page.expect_navigation():
        page.click("#by-photo button >> nth=1")
    assert page.text_content("h2") == "Images like your photograph"
    assert page.locator(".card").count() == 6
    context.close()


def test_an_unknown_word_and_a_score_are_read_out_with_their_run(chromium: Any, url: str, served: ServedRuns) -> None:
    opened = Opened(chromium, url)
    opened.search("a zebra")
    for number, run in enumerate(served.runs):
        section = opened.page.query_selector(f"section[aria-labelledby=run-{number}]")
        assert section.query_selector("h3").text_content() == run.name
        assert "Not a word of the training captions: zebra." in section.text_content()
    opened.close()
