"""HTML reports of one file: photos and charts inside, no script, nothing loaded from elsewhere.

The results of a search as an HTML report with thumbnails.

Where phrases are in a photo, as an HTML page: each in a colour, with the boxes that score highest.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from vse.eval.report.drawings import BRACKETS, SAID, PlacedPhoto, colour_of, drawn, placed_box
from vse.eval.search.top_k import PhraseHit, SearchHit
from vse.pipeline.command import current_provenance, describe_code
from vse.pipeline.files.images import BadImage, decode_image
from vse.pipeline.files.outputs import OutputKind, text_kind
from vse.pipeline.files.writing import write_text

THUMBNAIL = 240  # pixels of the longer side

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page_kind(template: str) -> OutputKind:
    """Return the kind of the pages that are made from a template."""
    generator = _generator(template)
    return text_kind(f"a page by {generator}", f'<meta name="generator" content="{generator}">')


def write_page(out: Path, template: str, **values: Any) -> Path:
    """Write a template of ``eval/report/templates``, filled in with everything escaped; returns ``out``."""
    return write_text(out, filled(template, **values))


def filled(template: str, **values: Any) -> str:
    """A template of ``eval/report/templates``, filled in with everything escaped."""
    return _ENVIRONMENT.get_template(template).render(generator=_generator(template), **values)


def _generator(template: str) -> str:
    return f"vse {template.removesuffix('.html')}"


def thumbnail(photo: Path, side: int = THUMBNAIL) -> str:
    """A small JPEG of an image file, as the ``src`` of an ``img``; ``BadImage`` if it cannot be read."""
    return sized_thumbnail(photo, side)[0]


def sized_thumbnail(photo: Path, side: int = THUMBNAIL) -> tuple[str, tuple[int, int]]:
    """What :func:`thumbnail` returns, and the width and height of the photo itself, in which boxes are given."""
    whole = decode_image(photo)
    return jpeg_source(small_jpeg(whole, side)), whole.size


def small_jpeg(photo: Image.Image, side: int = THUMBNAIL) -> bytes:
    """A small JPEG of a photo, without whatever its file says besides."""
    small = photo.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    content = BytesIO()
    small.save(content, "JPEG", quality=82, optimize=True)
    return content.getvalue()


def jpeg_source(content: bytes) -> str:
    """A JPEG as the ``src`` of an ``img``."""
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


log = logging.getLogger(__name__)

_SEARCH_TEMPLATE = "search.html"
SEARCH_PAGE = page_kind(_SEARCH_TEMPLATE)


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
    making = current_provenance()
    said = ", ".join(str(part) for part in (describe_code(making["code"]), making["date"], making["command"]) if part)
    return write_page(
        out,
        _SEARCH_TEMPLATE,
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


_PHRASE_TEMPLATE = "phrase_search.html"
PHRASE_PAGE = page_kind(_PHRASE_TEMPLATE)
_SIDE = 900  # pixels of the longer side of the photo
_LISTED = 5  # boxes of a phrase in numbers


def write_phrase_page(out: Path, photo: Path, hits: Sequence[PhraseHit], searched: str) -> Path:
    """Write a page of one file: the photo with the best box of each phrase, and the best few in numbers; returns ``out``.

    ``searched`` names the model. ``BadImage`` if the photo cannot be read.
    """
    source, size = sized_thumbnail(photo, _SIDE)
    boxes = [placed_box(hit.boxes[0], number) for number, hit in enumerate(hits, 1) if len(hit.boxes)]
    phrases = [
        {
            "number": number,
            "colour": colour_of(number),
            "text": hit.text,
            "boxes": [
                {"score": f"{score:.4f}", "corners": ", ".join(f"{corner:.0f}" for corner in box)}
                for score, box in zip(hit.scores[:_LISTED].tolist(), hit.boxes[:_LISTED].tolist(), strict=True)
            ],
            "n_boxes": len(hit.boxes),
        }
        for number, hit in enumerate(hits, 1)
    ]
    making = current_provenance()
    said = ", ".join(str(part) for part in (describe_code(making["code"]), making["date"], making["command"]) if part)
    placed = PlacedPhoto("photo", source, photo.name, size, boxes)
    return write_page(out, _PHRASE_TEMPLATE, photo=placed, phrases=phrases, searched=searched, made=said)
