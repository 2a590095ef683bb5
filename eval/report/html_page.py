"""HTML reports of one file: photos and charts inside, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from vse.pipeline.files import write_text
from vse.pipeline.image_files import decode
from vse.pipeline.outputs import OutputKind, text_kind

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
    whole = decode(photo)
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
