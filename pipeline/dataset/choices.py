"""Caption choices, which test whether a model prefers the right caption of an image to wrong captions.

The wrong captions differ from the right caption in a few words. :func:`swap_phrases` builds them by exchanging two phrases.
:func:`import_choices` converts published caption choices, such as SugarCrepe. Both functions write a data set with the right
and the wrong captions and, next to it, ``choices.json`` with the list of choices.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import combinations, pairwise
from math import log
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vse.pipeline.dataset.captions import IMPORT_TOKENISER, find_tokeniser
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.images import Caption, Phrase
from vse.pipeline.dataset.preparation import (
    check_dataset_name,
    check_dataset_output,
    load_and_check_dataset,
    read_dataset_content,
    write_json_dataset,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.pipeline.files.inputs import InputFile
from vse.pipeline.files.outputs import check_output, json_kind
from vse.pipeline.files.writing import lock_for_writing, parse_json, write_bytes, write_json
from vse.pipeline.progress import progress_bar

logger = logging.getLogger(__name__)
CHOICES_FILE = "choices.json"
_NOT_VISUAL_TYPE = "notvisual"  # the type of a phrase of Flickr30K Entities that names nothing in the photograph
# Two phrases that only these words separate can often be exchanged without a change of meaning.
_SYMMETRIC_WORDS = {"and", "or", "with", "near", "by", "beside", "next", "to", "along", "alongside", "together", ",", "&"}


class CaptionChoice(BaseModel):
    """A choice of the caption for an image: the ids of the captions, one of which is right.

    ``right`` : the index of the right caption in ``sentids``.
    ``kind`` : the kind of the wrong captions, such as ``same_type``.
    ``group`` : a number; choices with the same number belong together, such as the two in an example of Winoground.
    ``text_scores`` : the score of each caption by a text model, which does not see the image; empty without such a model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    imgid: int
    sentids: Annotated[list[int], Field(min_length=2)]
    right: int = 0
    kind: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] = "choice"
    group: int | None = None
    text_scores: list[float] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 <= self.right < len(self.sentids):
            raise ValueError(f"right is {self.right}, but there are {len(self.sentids)} captions")
        if len(self.text_scores) not in (0, len(self.sentids)):
            raise ValueError("text_scores needs a number for each caption")
        return self


class Choices(BaseModel):
    """The content of ``choices.json``.

    ``dataset`` : the name of the data set that has the images and captions.
    ``origin`` : a sentence that states the original data set and the random seed, or the published files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["vse-choices"] = "vse-choices"
    version: Literal[1] = 1
    dataset: str
    origin: str
    choices: Annotated[list[CaptionChoice], Field(min_length=1)]


def read_choices(path: Path) -> tuple[Choices, str]:
    """Return the content of a ``choices.json`` and the SHA-256 of the file. Raises UserError if the content is not valid."""
    file = InputFile(path)
    try:
        return Choices.model_validate(parse_json(path, file.read())), file.sha256
    except ValidationError as error:
        fault = error.errors()[0]
        reason = ": ".join([*map(str, fault["loc"]), fault["msg"]])
        raise UserError(f"{path}: not a file of choices ({reason}); vse-data swap-phrases writes one") from None


class BigramModel:
    """A model of text that counts pairs of neighbouring words: a baseline that chooses captions without the image.

    The probability of a word w after a word v is 0.8 n(v, w) / n(v) + 0.2 (n(w) + 1) / (N + V + 1). Here n(w) is the number of
    occurrences of w, and n(v, w) the number of times that w directly follows v. The end of a caption counts as a word. N is
    the sum of all n(w), and V the number of different words. If v never occurs, the first term is 0.
    """

    def __init__(self, captions: Iterable[Sequence[str]]) -> None:
        self._words: Counter[str] = Counter()
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._before: Counter[str] = Counter()
        for tokens in captions:
            padded = ["", *tokens, ""]
            self._words.update(padded[1:])
            self._pairs.update(pairwise(padded))
            self._before.update(padded[:-1])
        self._n_words = self._words.total()

    def score(self, tokens: Sequence[str]) -> float:
        """Return the mean log probability (natural logarithm) over the words of a caption and its end."""
        total = 0.0
        for before, word in pairwise(["", *tokens, ""]):
            alone = (self._words[word] + 1) / (self._n_words + len(self._words) + 1)
            after = self._pairs[before, word] / self._before[before] if self._before[before] else 0.0
            total += log(0.8 * after + 0.2 * alone)
        return total / (len(tokens) + 1)


def fit_bigram_model(dataset: Dataset) -> BigramModel:
    """Return a model that counts the pairs of neighbouring words in the training captions (:class:`BigramModel`)."""
    return BigramModel(caption.tokens for image in dataset.split("train") for caption in image.captions)


def swap_phrases(dataset_file: Path, out: Path | None = None, split: str = "test", seed: int = 0) -> Path:
    """Write choices between captions and their copies with two phrases exchanged; return the path of ``choices.json``.

    *A man on a horse* becomes *a horse on a man*. The two phrases name different things, and the text between them does not
    consist of words such as *and* or *with* alone. A caption has up to two choices: one of the kind ``same_type``, whose
    phrases share a type such as ``people``, and one of the kind ``other_type``. If a caption has several such pairs of
    phrases, ``seed`` determines the random pair.

    The new data set has only the right and wrong captions of these choices, and their images. The text of a caption is its
    tokens, joined by blanks. The folder ``out``, by default ``data/f8k_swapped`` for ``data/f8k``, gives the new data set its
    name. Raises UserError if no caption of ``split`` has two such phrases.
    """
    dataset = load_and_check_dataset(dataset_file)
    out = out or dataset_file.absolute().parent.with_name(f"{dataset_file.absolute().parent.name}_swapped")
    name = out.resolve().name
    check_dataset_name(name)
    if dataset.fold or name == dataset.name:
        reason = f"is a fold; give its data set {dataset.parent!r}" if dataset.fold else "has this name; give another --out"
        raise UserError(f"{dataset_file}: {reason}")
    check_dataset_output(out, name, [dataset_file])
    check_choices_output(out, [dataset_file])
    rng = np.random.default_rng(seed)
    text_model = fit_bigram_model(dataset)
    next_id = 1 + max((caption.sentid for image in dataset.images for caption in image.captions), default=-1)
    sentences: dict[int, list[dict[str, Any]]] = {image.imgid: [] for image in dataset.split(split)}
    choices = []
    for image in dataset.split(split):
        for caption in image.captions:
            for kind, pairs in _find_exchangeable_phrases(caption).items():
                first, second = pairs[rng.integers(len(pairs))]
                both = [caption.tokens, _exchange_phrases(caption.tokens, first, second)]
                ids = [next_id, next_id + 1]
                next_id += 2
                sentences[image.imgid] += map(build_caption_from_tokens, ids, [image.imgid] * 2, both)
                scores = [text_model.score(tokens) for tokens in both]
                choices.append(CaptionChoice(imgid=image.imgid, sentids=ids, kind=kind, text_scores=scores))
    if not choices:
        raise UserError(f"{dataset_file}: no caption of the split {split!r} has two phrases that can be exchanged")
    content = read_dataset_content(dataset_file)
    entries = [
        {**entry, "sentences": some, "sentids": [sentence["sentid"] for sentence in some]}
        for entry in content["images"]
        if (some := sentences.get(entry["imgid"]))
    ]
    pictures = dataset_file.parent / "images" if dataset.has_image_files else None
    about = {"dataset": name, "parent": dataset.parent or dataset.name}
    origin = f"two phrases of a caption of {dataset.name} exchanged by vse, seed {seed}; no person checked them"
    write_json_dataset({**content, **about, "images": entries}, out, pictures, [dataset_file])
    return write_choices(out, name, origin, choices)


def build_caption_from_tokens(sentid: int, imgid: int, tokens: Sequence[str]) -> dict[str, Any]:
    """Return a caption as a JSON object for ``dataset.json``. The text is the tokens, joined by blanks."""
    return {"sentid": sentid, "imgid": imgid, "raw": " ".join(tokens), "tokens": list(tokens)}


def check_choices_output(out: Path, inputs: Sequence[Path]) -> None:
    """Raise UserError if ``out/choices.json`` exists but is not a file of choices, or if it is one of ``inputs``."""
    check_output(out / CHOICES_FILE, json_kind("a file of choices", "format", "origin", "choices"), inputs)


def write_choices(out: Path, name: str, origin: str, choices: list[CaptionChoice]) -> Path:
    """Write ``choices`` for the data set ``name`` to ``out/choices.json``, and return the path of this file.

    ``origin`` is a sentence about the published files or the data set from which the choices come.
    """
    path = out / CHOICES_FILE
    with lock_for_writing(path):
        write_json(path, Choices(dataset=name, origin=origin, choices=choices).model_dump(exclude_none=True))
    logger.info("%s: %d choices for %d images", path, len(choices), len({choice.imgid for choice in choices}))
    return path


def _find_exchangeable_phrases(caption: Caption) -> dict[str, list[tuple[Phrase, Phrase]]]:
    """Return the pairs of phrases that can be exchanged, by kind: ``same_type`` (e.g. both are ``people``) or ``other_type``.

    The two phrases name different things. The text between them does not consist of words such as *and* or *with* alone.
    """
    found: dict[str, list[tuple[Phrase, Phrase]]] = {}
    for first, second in combinations(sorted(caption.phrases, key=lambda phrase: phrase.start), 2):
        between = caption.tokens[first.stop : second.start]
        texts = [caption.tokens[phrase.start : phrase.stop] for phrase in (first, second)]
        if (
            (first.chain and first.chain == second.chain)
            or texts[0] == texts[1]
            or _NOT_VISUAL_TYPE in first.types + second.types
        ):
            continue
        if first.stop < second.start and not _SYMMETRIC_WORDS.issuperset(between):
            kind = "same_type" if set(first.types) & set(second.types) else "other_type"
            found.setdefault(kind, []).append((first, second))
    return found


def _exchange_phrases(tokens: Sequence[str], first: Phrase, second: Phrase) -> tuple[str, ...]:
    parts = tokens[: first.start], tokens[second.start : second.stop], tokens[first.stop : second.start]
    return (*parts[0], *parts[1], *parts[2], *tokens[first.start : first.stop], *tokens[second.stop :])


_Box = tuple[int, int, int, int]
_WRONG_FORM = "not the form of SugarCrepe (JSON), ARO (visual_genome_*.json) or Winoground (examples.jsonl)"


class _PublishedChoice(NamedTuple):
    """A choice between captions for an image file, or for a box in the image. The first caption is right.

    ``kind`` : the kind of the wrong captions.
    ``group`` : a number; choices with the same number belong together, such as the two in an example of Winoground.
    ``box`` : (left, top, right, bottom) in pixels; None for the complete image.
    """

    image_file: str
    captions: tuple[str, ...]
    kind: str
    group: int | None = None
    box: _Box | None = None


def import_choices(files: Sequence[Path], images: Path, out: Path, corpus: Path | None = None) -> Path:
    """Convert published caption choices to a data set and a ``choices.json`` in ``out``; return the path of this JSON file.

    ``files`` are published files of SugarCrepe (JSON), ARO (``visual_genome_*.json``) or Winoground (``examples.jsonl``).
    ``images`` is the folder of their images. The captions of ARO describe boxes in photographs: the boxes are cut out and
    written to ``out/images``. ``corpus`` is the file of another data set: a :class:`BigramModel` of its training captions
    scores all captions. Without ``corpus``, captions have no scores. Raises UserError if a file has another form or an image
    is missing.
    """
    name = out.resolve().name
    check_dataset_name(name)
    check_dataset_output(out, name, files)
    check_choices_output(out, files)
    items = [item for file in files for item in _read_published_choices(file)]
    if missing := next((item.image_file for item in items if not (images / item.image_file).is_file()), None):
        raise UserError(f"{images / missing}: no such image; --images is the folder of the images")
    text_model = None if corpus is None else fit_bigram_model(load_dataset_file(corpus))
    tokenise = find_tokeniser(IMPORT_TOKENISER, files[0])
    imgids: dict[tuple[str, _Box | None], int] = {}
    sentences: dict[int, list[dict[str, Any]]] = {}
    sentids: dict[tuple[int, str], int] = {}
    choices = []
    for item in items:
        imgid = imgids.setdefault((item.image_file, item.box), len(imgids))
        ids = []
        for text in item.captions:
            if (imgid, text) not in sentids:
                sentids[imgid, text] = len(sentids)
                sentence = build_caption_from_tokens(sentids[imgid, text], imgid, tokenise(text))
                sentences.setdefault(imgid, []).append({**sentence, "raw": text})
            ids.append(sentids[imgid, text])
        scores = [] if text_model is None else [text_model.score(tokenise(text)) for text in item.captions]
        choices.append(CaptionChoice(imgid=imgid, sentids=ids, kind=item.kind, group=item.group, text_scores=scores))
    folder = _cut_out_boxes(images, out, imgids) if any(box for _, box in imgids) else images
    entries = []
    for (file, box), imgid in imgids.items():
        path = Path(f"{imgid}.png" if box else file)
        where = {} if path.parent == Path() else {"filepath": path.parent.as_posix()}
        entries.append({"imgid": imgid, **where, "filename": path.name, "split": "test", "sentences": sentences[imgid]})
    content = {"dataset": name, "tokeniser": IMPORT_TOKENISER, "images": entries}
    write_json_dataset(content, out, None if folder == out / "images" else folder, list(files))
    return write_choices(out, name, f"published: {', '.join(file.name for file in files)}", choices)


def _cut_out_boxes(images: Path, out: Path, imgids: Mapping[tuple[str, _Box | None], int]) -> Path:
    """Cut boxes out of images, write them to ``out/images`` as ``<imgid>.png``, and return that folder.

    ``imgids`` maps a file in ``images`` and a box (left, top, right, bottom; None: the complete image) to the id of the new
    image. Raises UserError if an image cannot be read, or if ``out/images`` is a link or the same folder as ``images``.
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


def _read_published_choices(file: Path) -> Iterator[_PublishedChoice]:
    """Yield the choices in a file of SugarCrepe, ARO or Winoground."""
    content = InputFile(file).read()
    if file.suffix == ".jsonl":
        rows = [parse_json(file, line) for line in content.splitlines() if line.strip()]
    else:
        parsed = parse_json(file, content)
        rows = list(parsed.values()) if isinstance(parsed, dict) else parsed
    kind = re.sub(r"[^A-Za-z0-9_]+", "_", file.stem)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{file}: {_WRONG_FORM}")
    for number, row in enumerate(rows):
        try:
            yield from _parse_published_row(row, kind, number)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file}: choice {number + 1}: {_WRONG_FORM} ({type(error).__name__}: {error})") from None


def _parse_published_row(row: Any, kind: str, number: int) -> Iterator[_PublishedChoice]:
    """Yield the choices in a row of a published file: two choices for Winoground, otherwise one.

    A row of Winoground has two images and two captions. The ``group`` of its choices is ``number``, the index of the row.
    Other choices have no ``group``, and their kind is ``kind``, the name of the published file. Raises KeyError, TypeError or
    ValueError if the row has another form.
    """
    if "caption_0" in row:
        captions = _read_text_field(row, "caption_0"), _read_text_field(row, "caption_1")
        for image, texts in (("image_0", captions), ("image_1", captions[::-1])):
            name = _read_text_field(row, image)
            yield _PublishedChoice(name if Path(name).suffix else f"{name}.png", texts, "winoground", number)
    elif "true_caption" in row:
        left, top, width, height = (int(row[f"bbox_{side}"]) for side in "xywh")
        if width < 1 or height < 1:
            raise ValueError("an empty box")
        texts = _read_text_field(row, "true_caption"), _read_text_field(row, "false_caption")
        yield _PublishedChoice(_read_text_field(row, "image_path"), texts, kind, box=(left, top, left + width, top + height))
    else:
        yield _PublishedChoice(
            _read_text_field(row, "filename"),
            (_read_text_field(row, "caption"), _read_text_field(row, "negative_caption")),
            kind,
        )


def _read_text_field(row: Any, key: str) -> str:
    text = row[key]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{key} is no text")
    if key.startswith(("image", "file")) and (Path(text).is_absolute() or ".." in Path(text).parts):
        raise ValueError(f"{text} is outside of the folder of images")
    return text
