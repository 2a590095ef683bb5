"""A part is one new file and one added line: the pages that show how to add one need no more."""

from __future__ import annotations

import pytest

from tests.docs.pages import ROOT, Block, blocks, patched
from tests.docs.world import ROOMS

# How many parts each page adds.
PAGES = {
    "docs/howto/extractor.md": 2,  # of images, and of captions
    "docs/howto/loss.md": 1,
    "docs/howto/similarity.md": 1,
    "docs/howto/image-encoder.md": 1,
    "docs/howto/caption-encoder.md": 1,
}


def package_blocks(page: str) -> list[Block]:
    """The blocks of a page that change the package: all but commands, presets and tests."""
    return [block for block in blocks(page) if block.title.startswith(tuple(f"{room}/" for room in ROOMS))]


@pytest.mark.parametrize(("page", "n_parts"), PAGES.items())
def test_a_part_is_one_new_file_and_one_added_line(page: str, n_parts: int) -> None:
    files = [block for block in package_blocks(page) if block.language != "diff"]
    changes = [block for block in package_blocks(page) if block.language == "diff"]
    assert len({block.title for block in files}) == len(files) == n_parts
    assert len(changes) == n_parts
    for block in files:
        assert not (ROOT / block.title).exists(), f"{block.title} is not new"
    for block in changes:
        text = (ROOT / block.title).read_text(encoding="utf-8")
        before, after = text.splitlines(), patched(text, block.text).splitlines()
        added = [line for line in after if line not in before]
        assert len(added) == 1
        assert [line for line in after if line not in added] == before, "nothing else is changed"


@pytest.mark.parametrize("page", PAGES)
def test_the_line_names_the_file(page: str) -> None:
    files = [block.title for block in package_blocks(page) if block.language != "diff"]
    lines = [line for block in package_blocks(page) for line in block.text.splitlines() if block.language == "diff"]
    modules = [path.removesuffix(".py").rpartition("/")[2] for path in files]
    added = [line for line in lines if line.startswith("+")]
    assert all(any(f"{module}:" in line for line in added) for module in modules)
