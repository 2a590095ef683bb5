"""Where phrases are in a photo, as an HTML page: each in a colour, with the boxes that score highest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vse.eval.report.html_page import page_kind, sized_thumbnail, write_page
from vse.eval.report.placed import PlacedPhoto, colour_of, placed_box
from vse.eval.search.hits import PhraseHit
from vse.pipeline.provenance import described_code, made

_TEMPLATE = "phrase_search.html"
PHRASE_PAGE = page_kind(_TEMPLATE)
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
    making = made()
    said = ", ".join(str(part) for part in (described_code(making["code"]), making["date"], making["command"]) if part)
    placed = PlacedPhoto("photo", source, photo.name, size, boxes)
    return write_page(out, _TEMPLATE, photo=placed, phrases=phrases, searched=searched, made=said)
