"""Convert published choices between captions to a data set and a file of choices (:mod:`vse.pipeline.dataset.choices`).

Hsieh et al., "SugarCrepe: Fixing Hackable Benchmarks for Vision-Language Compositionality", NeurIPS 2023; Thrush et al.,
"Winoground: Probing Vision and Language Models for Visio-Linguistic Compositionality", CVPR 2022; Yuksekgonul et al., "When
and Why Vision-Language Models Behave like Bags-Of-Words, and What to Do About It?", ICLR 2023 (ARO).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from vse.pipeline.dataset.captions import IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.choices import Choice, build_sentence, check_choices_output, fit_text_model, write_choices
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.preparation import check_dataset_name, check_dataset_output, write_dataset
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.files.writing import parse_json, write_bytes
from vse.pipeline.progress import progress_bar

_Box = tuple[int, int, int, int]
_EXPECTED = "not the form of SugarCrepe (JSON), ARO (visual_genome_*.json) or Winoground (examples.jsonl)"


class _PublishedChoice(NamedTuple):
    """A choice between the captions of an image file, or of a box in it. The first caption is the right one.

    ``kind`` and ``group`` are those of :class:`~vse.pipeline.dataset.choices.Choice`.
    """

    file: str
    captions: tuple[str, ...]
    kind: str
    group: int | None = None
    box: _Box | None = None


def import_choices(files: Sequence[Path], images: Path, out: Path, corpus: Path | None = None) -> Path:
    """Write a data set and a file of choices to the folder ``out`` and return the path of the file of choices.

    ``files`` are published files of SugarCrepe (JSON), ARO (``visual_genome_*.json``) or Winoground (``examples.jsonl``).
    ``images`` is the folder of their images. ARO asks about boxes in photographs: the boxes are cut out and written to
    ``out/images``. ``corpus`` is a ``dataset.json`` whose training captions fit the text model; None: the choices get no
    ``text_scores``. Raises UserError if a file has another form, or if an image is missing.
    """
    name = out.resolve().name
    check_dataset_name(name)
    check_dataset_output(out, name, files)
    check_choices_output(out, files)
    items = [item for file in files for item in _read_choices(file)]
    if missing := next((item.file for item in items if not (images / item.file).is_file()), None):
        raise UserError(f"{images / missing}: no such image; --images is the folder of the images")
    text_model = None if corpus is None else fit_text_model(load_dataset_file(corpus))
    tokenise = find_tokeniser(IMPORT_TOKENISER, files[0])
    imgids: dict[tuple[str, _Box | None], int] = {}
    sentences: dict[int, list[dict[str, Any]]] = {}
    sentids: dict[tuple[int, str], int] = {}
    choices = []
    for item in items:
        imgid = imgids.setdefault((item.file, item.box), len(imgids))
        ids = []
        for text in item.captions:
            if (imgid, text) not in sentids:
                sentids[imgid, text] = len(sentids)
                sentence = build_sentence(sentids[imgid, text], imgid, tokenise(text))
                sentences.setdefault(imgid, []).append({**sentence, "raw": text})
            ids.append(sentids[imgid, text])
        scores = [] if text_model is None else [text_model.score(tokenise(text)) for text in item.captions]
        choices.append(Choice(imgid=imgid, sentids=ids, kind=item.kind, group=item.group, text_scores=scores))
    folder = _cut_out(images, out, imgids) if any(box for _, box in imgids) else images
    entries = []
    for (file, box), imgid in imgids.items():
        path = Path(f"{imgid}.png" if box else file)
        where = {} if path.parent == Path() else {"filepath": path.parent.as_posix()}
        entries.append({"imgid": imgid, **where, "filename": path.name, "split": "test", "sentences": sentences[imgid]})
    content = {"dataset": name, "tokeniser": IMPORT_TOKENISER, "images": entries}
    write_dataset(content, out, None if folder == out / "images" else folder, list(files))
    return write_choices(out, name, f"published: {', '.join(file.name for file in files)}", choices)


def _cut_out(images: Path, out: Path, imgids: Mapping[tuple[str, _Box | None], int]) -> Path:
    """Cut out a box of each image, write the boxes to ``out/images`` as ``<imgid>.png``, and return that folder.

    Raises UserError if an image cannot be read, or if ``out/images`` is a link or the same folder as ``images``.
    """
    folder = out / "images"
    if folder.is_symlink() or folder.resolve() == images.resolve():
        raise UserError(f"{folder}: holds the images of other choices, which cut-out boxes could replace; give another --out")
    for (file, box), imgid in progress_bar(imgids.items(), desc="cut out boxes", unit="image"):
        photo = decode_image(images / file)
        stream = BytesIO()
        photo.crop(box).save(stream, "PNG")
        write_bytes(folder / f"{imgid}.png", stream.getbuffer())
    return folder


def _read_choices(file: Path) -> Iterator[_PublishedChoice]:
    """Yield the choices in a file of SugarCrepe, ARO or Winoground."""
    content = InputFile(file).read()
    if file.suffix == ".jsonl":
        rows = [parse_json(file, line) for line in content.splitlines() if line.strip()]
    else:
        parsed = parse_json(file, content)
        rows = list(parsed.values()) if isinstance(parsed, dict) else parsed
    kind = re.sub(r"[^A-Za-z0-9_]+", "_", file.stem)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{file}: {_EXPECTED}")
    for number, row in enumerate(rows):
        try:
            yield from _read_row(row, kind, number)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file}: choice {number + 1}: {_EXPECTED} ({type(error).__name__}: {error})") from None


def _read_row(row: Any, kind: str, number: int) -> Iterator[_PublishedChoice]:
    """Yield the choices of an entry: one, or two for Winoground, whose entries have two images and two captions.

    Raises KeyError, TypeError or ValueError if the entry has another form.
    """
    if "caption_0" in row:
        captions = _text(row, "caption_0"), _text(row, "caption_1")
        for image, texts in (("image_0", captions), ("image_1", captions[::-1])):
            name = _text(row, image)
            yield _PublishedChoice(name if Path(name).suffix else f"{name}.png", texts, "winoground", number)
    elif "true_caption" in row:
        left, top, width, height = (int(row[f"bbox_{side}"]) for side in "xywh")
        if width < 1 or height < 1:
            raise ValueError("an empty box")
        texts = _text(row, "true_caption"), _text(row, "false_caption")
        yield _PublishedChoice(_text(row, "image_path"), texts, kind, box=(left, top, left + width, top + height))
    else:
        yield _PublishedChoice(_text(row, "filename"), (_text(row, "caption"), _text(row, "negative_caption")), kind)


def _text(row: Any, key: str) -> str:
    text = row[key]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{key} is no text")
    if key.startswith(("image", "file")) and (Path(text).is_absolute() or ".." in Path(text).parts):
        raise ValueError(f"{text} is outside of the folder of images")
    return text
