"""Write small files of Flickr30K Entities for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from PIL import Image

Corners = tuple[int, int, int, int]


def thing(chains: str, corners: Corners | None = None, flags: str = "<scene>0</scene><nobndbox>1</nobndbox>") -> str:
    """Return the XML of an object of one or more chains (``"1 2"``) with a box (1-based, inclusive), or with flags."""
    names = "".join(f"<name>{chain}</name>" for chain in chains.split())
    if corners is None:
        return f"<object>{names}{flags}</object>"
    tags = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    return f"<object>{names}<bndbox>{''.join(f'<{tag}>{value}</{tag}>' for tag, value in tags)}</bndbox></object>"


def annotation(things: Iterable[str], size: tuple[int, int] = (100, 80)) -> str:
    """Return the XML of an image, with an object in each line from the third."""
    width, height = size
    head = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return "\n".join(["<annotation>", head, *things, "</annotation>"])


def write_entities(folder: Path, captions: Mapping[str, str], annotations: Mapping[str, str]) -> Path:
    """Write the captions (one per line) and the XML of each photo number as the official files, and return the folder."""
    for kind, suffix, files in (("Sentences", "txt", captions), ("Annotations", "xml", annotations)):
        (folder / kind).mkdir(parents=True)
        for number, text in files.items():
            (folder / kind / f"{number}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def write_photo(path: Path, size: tuple[int, int] = (100, 80)) -> Path:
    """Write a grey photo of ``size`` and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "grey").save(path)
    return path
