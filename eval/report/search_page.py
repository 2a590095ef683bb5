"""The results of a search as an HTML report with thumbnails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from vse.eval.report.drawings import BRACKETS, SAID, drawn
from vse.eval.report.html_page import page_kind, thumbnail, write_page
from vse.eval.search.hits import SearchHit
from vse.pipeline.image_files import BadImage
from vse.pipeline.provenance import described_code, made

log = logging.getLogger(__name__)

_TEMPLATE = "search.html"
SEARCH_PAGE = page_kind(_TEMPLATE)


def write_search_page(out: Path, query: str | Path, hits: Sequence[SearchHit], searched: str) -> Path:
    """Write a report of one file: the query, and of each hit its rank, score, thumbnail, captions and path; returns ``out``.

    ``searched`` names what was searched. A photo that cannot be read, or that ``dataset.json`` does not know, is a labelled
    blank. Of hits with attention the report draws it, over the photo that was found or, for each caption, over that of the
    query.
    """
    by_photo = isinstance(query, Path)
    asked = {"query": str(query), "by_photo": by_photo, "photo": _thumbnail(query) if isinstance(query, Path) else None}
    cards, attending = [], ""
    for rank, hit in enumerate(hits, 1):
        photo = _thumbnail(hit.photo)
        seen = hit.attention if (asked["photo"] if by_photo else photo) else None
        attending = f"{SAID[seen.side]} {BRACKETS}" if seen else attending
        cards.append(
            {
                "rank": rank,
                "score": f"{hit.score:.4f}",
                "photo": photo,
                "name": str(hit.photo or f"image {hit.image_id}"),
                "captions": hit.captions or ([] if hit.caption is None else [f"caption {hit.caption}"]),
                "drawing": seen and drawn(f"photo-{rank}", [seen]),
            }
        )
    making = made()
    said = ", ".join(str(part) for part in (described_code(making["code"]), making["date"], making["command"]) if part)
    return write_page(
        out,
        _TEMPLATE,
        **asked,
        cards=cards,
        searched=searched,
        made=said,
        attending=attending,
    )


def _thumbnail(photo: Path | None) -> str | None:
    if photo is None:
        return None
    try:
        return thumbnail(photo)
    except BadImage as error:
        log.warning("%s", error)
        return None
