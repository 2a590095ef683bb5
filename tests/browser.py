"""The browser of the tests that look at pages, and the check of a page by axe-core."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

WIDTHS = (390, 1280, 1920)  # of a phone, a laptop and a wide screen, in pixels
# With each change a phone and a laptop, each in one colour scheme; at night every pair of a width and a scheme.
SCREENS = [
    *((390, "light"), (1280, "dark")),
    *(pytest.param(width, "light", marks=pytest.mark.nightly) for width in (1280, 1920)),
    *(pytest.param(width, "dark", marks=pytest.mark.nightly) for width in (390, 1920)),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's chromium; where there is none the test is skipped, unless VSE_NEEDS_BROWSER is 1."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        (pytest.fail if os.environ.get("VSE_NEEDS_BROWSER") == "1" else pytest.skip)("there is no chromium")
    playwright_api = pytest.importorskip("playwright.sync_api")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def find_accessibility_errors(page: Any) -> list[str]:
    """Return the rules that a page violates, each with the first element, by the rules of axe-core."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    violations = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in violations]
