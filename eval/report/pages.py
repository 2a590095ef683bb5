"""Writer of self-contained HTML pages with thumbnails of photos, such as the pages of ``vse-search``."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image as PillowImage

from vse.eval.files.embeddings import Embeddings
from vse.eval.report.drawings import (
    ATTENTION_EXPLANATIONS,
    BRACKET_NOTE,
    PhrasePhoto,
    build_phrase_box,
    draw_attention,
    phrase_colour,
)
from vse.eval.search.top_k import PhraseCandidates, SearchHit
from vse.pipeline.command import current_provenance, format_code_version
from vse.pipeline.dataset.dataset import Dataset, Image
from vse.pipeline.dataset.identity import check_recorded_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, decode_image
from vse.pipeline.files.outputs import OutputKind, text_kind
from vse.pipeline.files.writing import write_text

log = logging.getLogger(__name__)
THUMBNAIL_SIDE = 240  # pixels of the longer side
_GALLERY_SIDE = 208  # pixels of the longer side of a photo in a gallery
_TEMPLATE_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page_output_kind(template: str) -> OutputKind:
    """Return the kind of output file for pages of ``template``. A new page may replace only a page of the same template."""
    generator = _generator_name(template)
    return text_kind(f"a page by {generator}", f'<meta name="generator" content="{generator}">')


def write_page(out: Path, template: str, **values: Any) -> Path:
    """Render a template of ``eval/report/templates`` with escaped values, write it to ``out``, and return ``out``."""
    return write_text(out, render_page(template, **values))


def render_page(template: str, **values: Any) -> str:
    """Return the HTML of a template in ``eval/report/templates``. All values are escaped."""
    return _TEMPLATE_ENVIRONMENT.get_template(template).render(generator=_generator_name(template), **values)


def _generator_name(template: str) -> str:
    return f"vse {template.removesuffix('.html')}"


def thumbnail_data_uri(photo: Path, side: int = THUMBNAIL_SIDE) -> str:
    """Return a small JPEG of an image file as a data URI for HTML. Raises BadImage if the file cannot be read."""
    return thumbnail_uri_and_size(photo, side)[0]


def thumbnail_uri_and_size(photo: Path, side: int = THUMBNAIL_SIDE) -> tuple[str, tuple[int, int]]:
    """Return a small JPEG of a photo as a data URI for HTML, and the width and height of the photo in pixels.

    Raises BadImage if the file cannot be read.
    """
    original = decode_image(photo)
    return jpeg_data_uri(small_jpeg(original, side)), original.size


def small_jpeg(photo: PillowImage.Image, side: int = THUMBNAIL_SIDE) -> bytes:
    """Return a small JPEG of a photo, without the metadata of its file."""
    small = photo.copy()
    small.thumbnail((side, side), PillowImage.Resampling.LANCZOS)
    content = BytesIO()
    small.save(content, "JPEG", quality=82, optimize=True)
    return content.getvalue()


def jpeg_data_uri(content: bytes) -> str:
    """Return the bytes of a JPEG as a data URI, for the attribute ``src`` of an image in HTML."""
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class Photo:
    """A photo to display with its first caption. ``source`` is the photo as a data URI; None if it cannot be read."""

    source: str | None
    file: str
    caption: str


@dataclass
class DatasetPhotos:
    """The photos and captions of a data set; each photo is read once.

    ``unreadable_files`` has the names of the photo files that could not be read.
    """

    dataset: Dataset
    unreadable_files: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._sources: dict[int, str | None] = {}

    def check_embeddings(self, run: Embeddings) -> None:
        """Raise UserError unless the data set is the one that the embeddings name, and has all their images and captions."""
        path = self.dataset.path
        if run.dataset != self.dataset.name:
            raise UserError(
                f"{path} is the data set {self.dataset.name!r}, the embeddings belong to {run.dataset!r}; see --data"
            )
        unknown = run.image_ids[self.dataset.find_image_rows(run.image_ids) < 0]
        if len(unknown):
            raise UserError(f"{path}: has no image {unknown[0]}, but the embeddings have one; see --data")
        rows, _ = self.dataset.find_caption_rows(run.caption_ids)
        wrong = np.flatnonzero((rows < 0) | (rows != self.dataset.find_image_rows(run.caption_image_ids)))
        if len(wrong):
            caption = f"caption {run.caption_ids[wrong[0]]} of image {run.caption_image_ids[wrong[0]]}"
            raise UserError(f"{path}: has no {caption}, but the embeddings have one; see --data")
        check_recorded_data(self.dataset, run.identity)

    def find_photo(self, imgid: int) -> Photo:
        """Return the photo of the image with the id ``imgid``.

        The ``source`` of the photo is None if there is no such image, or if the photo cannot be read.
        """
        image = self.dataset.find_image(imgid)
        if image is None:
            return Photo(None, f"image {imgid}", "")
        if imgid not in self._sources:
            self._sources[imgid] = self._read_thumbnail(image)
        return Photo(self._sources[imgid], image.file, image.captions[0].raw)

    def find_caption(self, sentid: int) -> str:
        rows, numbers = self.dataset.find_caption_rows(np.asarray([sentid]))
        return self.dataset.images[int(rows[0])].captions[int(numbers[0])].raw

    def _read_thumbnail(self, image: Image) -> str | None:
        if not self.dataset.has_image_files:
            return None
        try:
            return thumbnail_data_uri(self.dataset.image_path(image), _GALLERY_SIDE)
        except BadImage as error:
            log.warning("%s", error)
            self.unreadable_files.add(image.file)
            return None


_SEARCH_TEMPLATE = "search.html"
SEARCH_PAGE_KIND = page_output_kind(_SEARCH_TEMPLATE)


def write_search_page(out: Path, query: str | Path, hits: Sequence[SearchHit], corpus_name: str) -> Path:
    """Write the page of a search with the rank, score, thumbnail, captions and path of each hit; return ``out``.

    ``query`` is a text or the path of a photo. ``corpus_name`` names the run, and the split or corpus that was searched. If a
    photo cannot be read, its file name is displayed. If the model computes attention, it is drawn on the photos of the hits
    or, if the hits are captions, on the photo of the query.
    """
    by_photo = isinstance(query, Path)
    query_photo = _readable_thumbnail(query) if isinstance(query, Path) else None
    cards, explanation = [], ""
    for rank, hit in enumerate(hits, 1):
        photo = _readable_thumbnail(hit.photo)
        attention = hit.attention if (query_photo if by_photo else photo) else None
        explanation = f"{ATTENTION_EXPLANATIONS[attention.direction]} {BRACKET_NOTE}" if attention else explanation
        cards.append(
            {
                "rank": rank,
                "score": f"{hit.score:.4f}",
                "photo": photo,
                "name": str(hit.photo or f"image {hit.image_id}"),
                "captions": hit.captions or ([] if hit.caption is None else [f"caption {hit.caption}"]),
                "drawing": attention and draw_attention(f"photo-{rank}", [attention]),
            }
        )
    values = {"query": str(query), "by_photo": by_photo, "photo": query_photo, "cards": cards, "corpus": corpus_name}
    return write_page(out, _SEARCH_TEMPLATE, **values, origin=_describe_command(), explanation=explanation)


def _describe_command() -> str:
    record = current_provenance()
    return ", ".join(str(part) for part in (format_code_version(record["code"]), record["date"], record["command"]) if part)


def _readable_thumbnail(photo: Path | None) -> str | None:
    """Return the thumbnail of a photo; None without a photo. If the photo cannot be read, log a warning and return None."""
    if photo is None:
        return None
    try:
        return thumbnail_data_uri(photo)
    except BadImage as error:
        log.warning("%s", error)
        return None


_PHRASE_TEMPLATE = "phrase_search.html"
PHRASE_PAGE_KIND = page_output_kind(_PHRASE_TEMPLATE)
_PHRASE_PHOTO_SIDE = 900  # pixels of the longer side of the photo
_N_LISTED_BOXES = 5  # boxes per phrase whose coordinates are listed


def write_phrase_page(out: Path, photo: Path, hits: Sequence[PhraseCandidates], model: str) -> Path:
    """Write a page with a photo, the best box of each phrase, and the coordinates of the best boxes; return ``out``.

    Raises BadImage if the photo cannot be read.
    """
    source, size = thumbnail_uri_and_size(photo, _PHRASE_PHOTO_SIDE)
    boxes = [build_phrase_box(hit.boxes[0], number) for number, hit in enumerate(hits, 1) if len(hit.boxes)]
    phrases = [
        {
            "number": number,
            "colour": phrase_colour(number),
            "text": hit.text,
            "boxes": [
                {"score": f"{score:.4f}", "corners": ", ".join(f"{corner:.0f}" for corner in box)}
                for score, box in zip(hit.scores[:_N_LISTED_BOXES].tolist(), hit.boxes[:_N_LISTED_BOXES].tolist(), strict=True)
            ],
            "n_boxes": len(hit.boxes),
        }
        for number, hit in enumerate(hits, 1)
    ]
    drawing = PhrasePhoto("photo", source, photo.name, size, boxes)
    return write_page(out, _PHRASE_TEMPLATE, photo=drawing, phrases=phrases, model=model, origin=_describe_command())
