"""Read the published files of data sets with captions in several languages: XM3600, Multi30k and XTD.

Each function of :data:`LAYOUTS` yields the images of a data set with their captions by language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vse.pipeline.dataset.captions import IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_input, open_decoded_stream, wrap_read_errors
from vse.pipeline.files.writing import parse_json

_MULTI30K_SPLITS = {"train": "train", "val": "val", "test_2016": "test"}
_XTD_FOLDERS = ("XTD10", "STAIR", "MIC")
_XTD_CAPTIONS_PATTERN = re.compile(r"test_1kcaptions_(\w+)\.txt")
_COCO_NAME_PATTERN = re.compile(r"COCO_([a-z]+2014)_(\d{12})\.jpg")
_COCO_NAME_EXAMPLE = "COCO_val2014_000000000042.jpg"
_TAG_BY_PUBLISHED_NAME = {"jp": "ja"}  # published names of languages that are not BCP 47 tags


@dataclass(frozen=True)
class PublishedImage:
    """An image of a published data set: the file, the split, the captions by language, and the id in MS-COCO or None."""

    file: str
    split: str
    captions: Mapping[str, Sequence[str]]
    cocoid: int | None = None


def read_xm3600(annotations: Path) -> Iterator[PublishedImage]:
    """Read ``captions.jsonl`` of Crossmodal-3600, which has a line for each image, with lists of captions by language."""
    check_input(annotations)
    with annotations.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            entry = parse_json(annotations, line) if line.strip() else {}
            with wrap_read_errors(annotations, f"captions of XM3600 (line {number})"):
                if not entry:
                    continue
                captions = {name: value["caption"] for name, value in entry.items() if is_language_tag(name)}
                yield PublishedImage(f"{entry['image/key']}.jpg", "test", captions)


def read_multi30k(annotations: Path) -> Iterator[PublishedImage]:
    """Read the folder ``data/task2`` of Multi30k.

    It has lists of images, and several files of captions for each split and language. Line k is a caption of image k.
    """
    for published, split in _MULTI30K_SPLITS.items():
        lists = sorted((annotations / "image_splits").glob(f"{published}*.txt"))
        if not lists:
            raise UserError(f"{annotations / 'image_splits'}: has no list of the images of {published}")
        files = _read_lines(lists[0])
        captions: list[dict[str, list[str]]] = [{} for _ in files]
        paths = {path.name.removesuffix(".gz"): path for path in sorted((annotations / "raw").glob(f"{published}.*"))}
        for name, path in paths.items():
            language = name.rpartition(".")[2]
            for of_image, text in zip(captions, _read_lines(path, len(files)), strict=True):
                of_image.setdefault(language, []).append(text)
        if not paths:
            raise UserError(f"{annotations / 'raw'}: has no captions of {published}, such as {published}.1.de.gz")
        yield from (PublishedImage(file, split, texts) for file, texts in zip(files, captions, strict=True))


def read_xtd(annotations: Path) -> Iterator[PublishedImage]:
    """Read the folder of XTD, which has a list of images of COCO, and a file for each language with a caption per image.

    If a language has several files, the file in the folder ``XTD10`` is read.
    """
    files = _read_lines(annotations / "XTD10" / "test_image_names.txt")
    texts_by_language: dict[str, list[str]] = {}
    for path in (path for folder in _XTD_FOLDERS for path in sorted((annotations / folder).glob("*.txt"))):
        if found := _XTD_CAPTIONS_PATTERN.fullmatch(path.name):
            language = _TAG_BY_PUBLISHED_NAME.get(found[1], found[1])
            if language not in texts_by_language:
                texts_by_language[language] = _read_lines(path, len(files))
    for row, file in enumerate(files):
        name = _COCO_NAME_PATTERN.fullmatch(file)
        if name is None:
            raise UserError(f"{annotations}: {file[:50]!r} is not the name of an image of COCO, such as {_COCO_NAME_EXAMPLE}")
        captions = {language: [texts[row]] for language, texts in texts_by_language.items()}
        yield PublishedImage(f"{name[1]}/{file}", "test", captions, int(name[2]))


LAYOUTS: dict[str, Callable[[Path], Iterator[PublishedImage]]] = {
    "xm3600": read_xm3600,
    "multi30k": read_multi30k,
    "xtd": read_xtd,
}


def build_multilingual_content(layout: str, annotations: Path, images: Path) -> dict[str, Any]:
    """Return the content of ``dataset.json`` for published files in one of :data:`LAYOUTS`.

    Captions are split into words of any script. Raises UserError if an image file is missing or a caption has no word.
    """
    tokenise = find_tokeniser(IMPORT_TOKENISER, annotations)
    entries: list[dict[str, Any]] = []
    n_captions = 0
    for imgid, image in enumerate(LAYOUTS[layout](annotations)):
        path = PurePosixPath(image.file)
        if path.is_absolute() or ".." in path.parts or not (images / path).is_file():
            raise UserError(f"{images / path}: no such image file, but {annotations} has captions of it")
        sentences = []
        for language, texts in image.captions.items():
            for text in (text.strip() for text in texts):
                tokens = tokenise(text)
                if not tokens:
                    raise UserError(f"{annotations}: {image.file}: the caption {text[:50]!r} in {language} has no word")
                entry = {"sentid": n_captions, "imgid": imgid, "raw": text, "tokens": tokens, "language": language}
                sentences.append(entry)
                n_captions += 1
        entries.append(
            {
                "imgid": imgid,
                **({} if path.parent == PurePosixPath() else {"filepath": path.parent.as_posix()}),
                "filename": path.name,
                "split": image.split,
                **({} if image.cocoid is None else {"cocoid": image.cocoid}),
                "sentids": [sentence["sentid"] for sentence in sentences],
                "sentences": sentences,
            }
        )
    return {"tokeniser": IMPORT_TOKENISER, "images": entries}


def _read_lines(path: Path, expected: int | None = None) -> list[str]:
    """Return the lines of a text file, which may be compressed. Raises UserError if there are not ``expected`` lines."""
    with wrap_read_errors(path, "a text file in UTF-8"), open_decoded_stream(path) as stream:
        text = stream.read().decode()
    lines = text.removesuffix("\n").split("\n")
    if expected is not None and len(lines) != expected:
        raise UserError(f"{path}: has {len(lines)} lines, but the list of images has {expected}")
    return [line.strip() for line in lines]
