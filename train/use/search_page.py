"""The results of a search as a page of thumbnails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from vse.eval.report.html_page import thumbnail, write_page
from vse.pipeline.image_files import BadImage
from vse.train.use.search import Hit

log = logging.getLogger(__name__)


def write_search_page(out: Path, query: str | Path, hits: Sequence[Hit], searched: str) -> Path:
    """Write a page of one file: the query, and of each result rank, score, thumbnail, captions and path; returns ``out``.

    ``searched`` says where. A picture that cannot be read, or that ``dataset.json`` does not know, is a labelled blank.
    """
    cards = [
        {
            "rank": rank,
            "score": f"{hit.score:.4f}",
            "picture": _thumbnail(hit.picture),
            "name": str(hit.picture or f"image {hit.image_id}"),
            "captions": hit.captions or ([] if hit.caption is None else [f"caption {hit.caption}"]),
        }
        for rank, hit in enumerate(hits, 1)
    ]
    by_picture = isinstance(query, Path)
    asked = {"query": str(query), "by_picture": by_picture, "picture": _thumbnail(query) if isinstance(query, Path) else None}
    return write_page(out, "search.html", **asked, cards=cards, searched=searched)


def _thumbnail(picture: Path | None) -> str | None:
    if picture is None:
        return None
    try:
        return thumbnail(picture)
    except BadImage as error:
        log.warning("%s", error)
        return None
