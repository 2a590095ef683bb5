"""The documentation as a site: it builds, loads nothing from elsewhere, and can be read and searched without a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import WIDTHS, chromium, find_accessibility_errors
from tests.docs.pages import ROOT, pages

__all__ = ["chromium"]  # a fixture

pytestmark = pytest.mark.nightly

SAMPLE = ("index", "quickstart", "commands/vse-eval", "training", "flickr8k", "formats")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:(?:script|img|iframe|source)\b[^>]*\bsrc|link\b[^>]*\bhref)=[\"']?(?:https?:)?//[^>]*>")
    built = list(site.rglob("*.html"))
    assert len(built) >= len(pages()) - 1
    for page in built:
        elsewhere = loaded.findall(page.read_text(encoding="utf-8"))
        assert not elsewhere, f"{page.name}: {elsewhere}"


def open_page(page: Any, site: Path, name: str) -> None:
    page.goto((site / f"{name}.html").as_uri())
    page.wait_for_function("document.querySelector('.md-search').ariaLabel")


@pytest.mark.browser
@pytest.mark.parametrize("name", SAMPLE)
def test_a_page_fits_the_screen(site: Path, chromium: Any, name: str) -> None:
    page = chromium.new_page()
    open_page(page, site, name)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("name", SAMPLE)
def test_a_page_is_accessible(site: Path, chromium: Any, name: str) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 900})
    open_page(page, site, name)
    assert find_accessibility_errors(page) == []
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("--set", "howto/experiment.html#change-one-setting-once"),
        ("--encoding", "commands/vse-data.html#vse-data-import"),
        ("predict", "python.html#which-function-to-call"),
        ("train.on_collapse", "training.html#progress-stopping-and-resuming"),
    ],
)
def test_the_search_without_a_server_finds_options_and_settings(site: Path, chromium: Any, query: str, found: str) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").press_sequentially(query)
    page.wait_for_selector(f"a.md-search-result__link[href*='{found}']", state="attached")
    page.close()


@pytest.mark.browser
def test_a_page_has_links_to_its_neighbours_and_to_its_source(site: Path, chromium: Any) -> None:
    page = chromium.new_page()
    page.goto((site / "commands/vse-eval.html").as_uri())
    links = [page.get_attribute(f"a.md-footer__link--{which}", "href") for which in ("prev", "next")]
    assert links == ["vse-model.html", "vse-table.html"]
    source = page.get_attribute("a.md-content__button", "href")
    assert (site / "commands" / source).read_bytes() == (ROOT / "docs/commands/vse-eval.md").read_bytes()
    page.close()
