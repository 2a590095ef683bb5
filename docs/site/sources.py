"""Copy the Markdown file of each page of the site to the page's folder, and link it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Set the address that the theme's button for the source opens."""
    page.edit_url = Path(page.file.src_path).name
    return markdown


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Copy the Markdown file of a page to the folder of the page."""
    copy = Path(page.file.abs_dest_path).parent / Path(page.file.src_path).name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(page.file.content_string, encoding="utf-8")
    return output
