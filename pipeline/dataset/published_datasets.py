"""Build data sets from published annotations: Flickr30K Entities, XM3600, Multi30k and XTD.

The phrases and boxes of Entities can also be added to another data set of the same photos. Each function in
:data:`READER_BY_LAYOUT` reads one of the published data sets with captions in several languages.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vse.pipeline.dataset.captions import (
    DEFAULT_TOKENISER,
    IMPORT_TOKENISER,
    ascii_words,
    find_tokeniser,
    join_letters_and_digits,
    match_captions,
    transfer_spans,
)
from vse.pipeline.dataset.entities import (
    NOT_VISUAL_CHAIN,
    ImageBoxAnnotations,
    MarkedCaption,
    read_box_annotations,
    read_marked_captions,
    read_photo_numbers,
    read_unrelated_captions,
)
from vse.pipeline.dataset.images import Box
from vse.pipeline.dataset.languages import is_language_tag
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_size
from vse.pipeline.files.inputs import check_input, open_decoded_stream, wrap_read_errors
from vse.pipeline.files.writing import parse_json
from vse.pipeline.progress import progress_bar

log = logging.getLogger(__name__)

ENTITIES_SPLITS = ("train", "val", "test")
MIN_CAPTION_SIMILARITY = 0.7  # 563 captions of Flickr8k differ in letters from Entities; this limit matches 562 of them
_COORDINATE_DECIMALS = 4  # decimals of the coordinates of scaled boxes


def build_entities_content(folder: Path, images: Path) -> dict[str, Any]:
    """Build the content of ``dataset.json`` from the captions and splits of Flickr30K Entities.

    ``folder`` has ``Annotations``, ``Sentences``, ``train.txt``, ``val.txt`` and ``test.txt``, and may have
    ``UNRELATED_CAPTIONS``. ``images`` has the file ``<number>.jpg`` of every photo in the three lists. The ``imgid`` of a
    photo is its number. Logs the numbers of photos, captions, boxes and phrases. Raises UserError if a file is missing, or
    if a photo is in two splits.
    """
    splits = {split: read_photo_numbers(folder / f"{split}.txt") for split in ENTITIES_SPLITS}
    photos = [(number, split) for split, numbers in splits.items() for number in numbers]
    repeated = [number for number, count in Counter(number for number, _ in photos).items() if count > 1]
    if repeated:
        raise UserError(f"{folder}: photo {repeated[0]} is in two of {', '.join(f'{split}.txt' for split in splits)}")
    if not photos:
        raise UserError(f"{folder}: {', '.join(f'{split}.txt' for split in splits)} name no photo")
    reader = _EntitiesReader(folder, images)
    missing = [f"{number}.jpg" for number, _ in photos if not (images / f"{number}.jpg").is_file()]
    if missing:
        raise UserError(f"{images}: {len(missing)} of {len(photos)} image files are missing, the first is {missing[0]}")
    entries: list[dict[str, Any]] = []
    sentid = 0
    for number, split in progress_bar(photos, desc="read phrases", unit="image"):
        imgid, sentences = int(number), []
        photo = reader.read_photo(number, f"{number}.jpg")
        for caption in photo.captions:
            raw = " ".join(caption.words)
            tokens = ascii_words(raw)
            if not tokens:
                raise UserError(f"{reader.sentences_file(number)}: a caption has no letter and no digit: {raw[:50]!r}")
            phrases = reader.convert_phrases(caption, tokens, photo)
            sentences.append({"sentid": sentid, "imgid": imgid, "raw": raw, "tokens": tokens, "phrases": phrases})
            sentid += 1
        sentids = [sentence["sentid"] for sentence in sentences]
        entries.append(
            {"imgid": imgid, "filename": f"{number}.jpg", "split": split, "sentids": sentids, "sentences": sentences}
        )
    reader.log_counts()
    return {"images": entries}


def mark_entities_phrases(
    content: dict[str, Any], folder: Path, images: Path | None, min_similarity: float = MIN_CAPTION_SIMILARITY
) -> dict[str, Any]:
    """Return the content of a checked ``dataset.json`` with the phrases of Flickr30K Entities instead of earlier phrases.

    An image is matched by the number at the beginning of the file name, and a caption by its text
    (:func:`~vse.pipeline.dataset.captions.match_captions`). Captions whose spelling differs (*grey*, *gray*) are matched if
    the share of equal tokens is at least ``min_similarity``; 1 allows no difference. A caption without a counterpart in
    Entities gets no phrases.

    Boxes are scaled to the size of the files in ``images``. Without ``images``, boxes are in pixels of the annotated photos.
    Logs the numbers of matched images and captions. Raises UserError if no image is in Entities.
    """
    reader, tokenise = _EntitiesReader(folder, images), find_tokeniser(content.get("tokeniser", DEFAULT_TOKENISER), folder)
    entries, n_captions = [], 0
    for entry in progress_bar(content["images"], desc="read phrases", unit="image"):
        number = parse_photo_number(entry["filename"])
        before = entry.get("sentences", ())
        sentences = [{key: value for key, value in sentence.items() if key != "phrases"} for sentence in before]
        n_captions += len(sentences)
        if number is not None and reader.sentences_file(number).is_file():
            photo = reader.read_photo(number, str(Path(entry.get("filepath") or "", entry["filename"])))
            _add_phrases_to_sentences(sentences, photo, reader, min_similarity, tokenise)
        entries.append({**entry, "sentences": sentences})
    n_images, n_joined = reader.counts["images"], reader.counts["joined"]
    if not n_images:
        raise UserError(
            f"{folder}: annotates other images than these {len(entries)}; a file name must begin with the number of the photo"
        )
    log.info(
        "%s: matched %d of %d images and %d of %d captions, %d of them with another spelling; %d captions have no "
        "counterpart and get no phrases",
        *(folder, n_images, len(entries), n_joined, n_captions, reader.counts["corrected"], n_captions - n_joined),
    )
    reader.log_counts()
    return {**content, "images": entries}


def _add_phrases_to_sentences(
    sentences: list[dict[str, Any]],
    photo: _AnnotatedPhoto,
    reader: _EntitiesReader,
    min_similarity: float,
    tokenise: Callable[[str], list[str]],
) -> None:
    """Add the phrases of the annotated captions of ``photo`` to the captions of the same text in ``sentences``.

    ``sentences`` are the captions of an image in ``dataset.json``; ``tokenise`` splits captions without tokens. Captions match
    if the share of equal tokens is at least ``min_similarity``. ``reader`` converts the phrases, and counts the matched
    captions.
    """
    texts = [sentence["tokens"] if "tokens" in sentence else tokenise(sentence["raw"]) for sentence in sentences]
    captions = [caption.words for caption in photo.captions]
    for index, other in match_captions(texts, captions, min_similarity).items():
        sentences[index]["phrases"] = reader.convert_phrases(photo.captions[other], texts[index], photo)
        same = join_letters_and_digits(texts[index]) == join_letters_and_digits(captions[other])
        reader.counts.update(joined=1, corrected=not same)


def parse_photo_number(filename: str) -> str | None:
    """Return the number of a photo on Flickr, ``1000268201`` for ``1000268201_693b08cb0e.jpg``; None if the name has none."""
    match = re.fullmatch(r"([0-9]{1,18})(?:_.*)?", Path(filename).stem)
    return match[1] if match else None


@dataclass(frozen=True)
class _AnnotatedPhoto:
    captions: tuple[MarkedCaption, ...]
    boxes_by_chain: Mapping[str, Sequence[Box]]
    chains_without_box: frozenset[str]


@dataclass
class _EntitiesReader:
    """A reader of a folder of Flickr30K Entities, photo by photo, that counts images, captions, phrases and boxes."""

    folder: Path
    images_folder: Path | None
    counts: Counter[str] = field(default_factory=Counter)
    first_scaled_message: str = ""  # a message about the first photo whose size differs from the annotated size

    def __post_init__(self) -> None:
        for name in ("Annotations", "Sentences"):
            if not (self.folder / name).is_dir():
                raise UserError(f"{self.folder}: not a folder of Flickr30K Entities; it has no folder {name}")
        listed = self.folder / "UNRELATED_CAPTIONS"
        self.unrelated_captions = read_unrelated_captions(listed) if listed.is_file() else frozenset()

    def sentences_file(self, number: str) -> Path:
        return self.folder / "Sentences" / f"{number}.txt"

    def read_photo(self, number: str, file: str) -> _AnnotatedPhoto:
        """Read the captions and boxes of the photo ``number``; ``file`` is its path in the folder of images.

        Captions that do not describe their photo (listed in the file ``UNRELATED_CAPTIONS``) lose their phrases.
        """
        captions = list(read_marked_captions(self.sentences_file(number)))
        annotation = read_box_annotations(self.folder / "Annotations" / f"{number}.xml")
        marked = [phrase for caption in captions for phrase in caption.phrases]
        with_box = sum(phrase.chain != NOT_VISUAL_CHAIN and phrase.chain in annotation.boxes_by_chain for phrase in marked)
        self.counts.update(images=1, boxes=annotation.n_boxes, clipped=annotation.n_clipped)
        self.counts.update(captions=len(captions), marked=len(marked), with_box=with_box)
        for photo, index in self.unrelated_captions:
            if photo == number and index < len(captions):
                self.counts["unrelated"] += len(captions[index].phrases)
                captions[index] = captions[index]._replace(phrases=())
        return _AnnotatedPhoto(tuple(captions), self._scale_boxes(annotation, file), annotation.chains_without_box)

    def _scale_boxes(self, annotation: ImageBoxAnnotations, file: str) -> Mapping[str, Sequence[Box]]:
        """Return the boxes of each coreference chain, scaled from the size of the annotated photo to the size of ``file``."""
        size = annotation.width, annotation.height
        actual_size = size if self.images_folder is None else read_image_size(self.images_folder / file)
        if actual_size == size:
            return annotation.boxes_by_chain
        self.counts["scaled"] += 1
        if not self.first_scaled_message:
            self.first_scaled_message = (
                f"{file} has {actual_size[0]} x {actual_size[1]} pixels instead of {size[0]} x {size[1]}"
            )
        return {
            chain: [_scale_box(box, size, actual_size) for box in boxes] for chain, boxes in annotation.boxes_by_chain.items()
        }

    def convert_phrases(self, caption: MarkedCaption, tokens: Sequence[str], photo: _AnnotatedPhoto) -> list[dict[str, Any]]:
        """Return the phrases of a caption as JSON objects for ``dataset.json``.

        ``tokens`` are the tokens of the caption in ``dataset.json``. A phrase that covers no token, such as
        ``[/EN#0/notvisual &]``, is left out, and ``counts`` counts it.
        """
        entries = []
        spans = transfer_spans([(phrase.start, phrase.stop) for phrase in caption.phrases], caption.words, tokens)
        for phrase, (first, last) in zip(caption.phrases, spans, strict=True):
            if first == last:
                self.counts["wordless"] += 1
                continue
            visual = phrase.chain != NOT_VISUAL_CHAIN
            boxes = photo.boxes_by_chain.get(phrase.chain, ()) if visual else ()
            self.counts.update(
                phrases=1, boxed=bool(boxes), unknown=visual and not boxes and phrase.chain not in photo.chains_without_box
            )
            span = {"first_token": first, "n_tokens": last - first, "chain": phrase.chain if visual else ""}
            entries.append({**span, "types": list(phrase.types), "boxes": [list(box) for box in boxes]})
        return entries

    def log_counts(self) -> None:
        counts = self.counts
        log.info(
            "%s: read %d photos, %d captions and %d boxes; the captions mark %d phrases, %d of them with a box",
            *(self.folder, counts["images"], counts["captions"], counts["boxes"], counts["marked"], counts["with_box"]),
        )
        log.info("added %d phrases, %d of them with a box", counts["phrases"], counts["boxed"])
        for count, message in (
            (counts["unrelated"], "phrases are left out: UNRELATED_CAPTIONS lists their captions"),
            (counts["wordless"], "phrases are left out: they have no letter and no digit in the caption"),
            (counts["unknown"], "phrases have no box, and no annotation has their chain"),
            (counts["clipped"], "boxes extended beyond the photo and were clipped"),
        ):
            if count:
                log.info("%d %s", count, message)
        if self.first_scaled_message:
            message = "%d photos do not have the annotated size (%s); their boxes were scaled"
            log.warning(message, counts["scaled"], self.first_scaled_message)


def _scale_box(box: Box, size: tuple[int, int], new_size: tuple[int, int]) -> Box:
    x1, y1, x2, y2 = (
        round(x * new / old, _COORDINATE_DECIMALS) for x, old, new in zip(box, size * 2, new_size * 2, strict=True)
    )
    return x1, y1, x2, y2


_MULTI30K_SPLITS = {"train": "train", "val": "val", "test_2016": "test"}
_XTD_FOLDERS = ("XTD10", "STAIR", "MIC")
_XTD_CAPTIONS_PATTERN = re.compile(r"test_1kcaptions_(\w+)\.txt")
_COCO_NAME_PATTERN = re.compile(r"COCO_([a-z]+2014)_(\d{12})\.jpg")
_COCO_NAME_EXAMPLE = "COCO_val2014_000000000042.jpg"
_TAG_BY_PUBLISHED_NAME = {"jp": "ja"}  # published names of languages that are not BCP 47 tags


@dataclass(frozen=True)
class PublishedImage:
    """An image of a published data set. ``cocoid`` is its id in MS-COCO, or None without such an id."""

    file: str
    split: str
    captions_by_language: Mapping[str, Sequence[str]]
    cocoid: int | None = None


def read_xm3600(annotations: Path) -> Iterator[PublishedImage]:
    """Read ``captions.jsonl`` of Crossmodal-3600. A line of this file has an image and lists of captions by language."""
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

    The folder has a list of images for each split, and several files of captions for each split and language. Line k of such a
    file is a caption of image k of the list.
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

    If a language has several files, the first one in the order of the folders ``XTD10``, ``STAIR`` and ``MIC`` is read.
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


READER_BY_LAYOUT: dict[str, Callable[[Path], Iterator[PublishedImage]]] = {
    "xm3600": read_xm3600,
    "multi30k": read_multi30k,
    "xtd": read_xtd,
}


def build_multilingual_content(layout: str, annotations: Path, images: Path) -> dict[str, Any]:
    """Return the content of ``dataset.json`` for the published files of a data set in several languages.

    ``layout`` is the form of the files in ``annotations``: ``xm3600``, ``multi30k`` or ``xtd``. Captions are split into words
    of any script. Raises UserError if an image file is missing or a caption has no word.
    """
    tokenise = find_tokeniser(IMPORT_TOKENISER, annotations)
    entries: list[dict[str, Any]] = []
    n_captions = 0
    for imgid, image in enumerate(READER_BY_LAYOUT[layout](annotations)):
        path = PurePosixPath(image.file)
        if path.is_absolute() or ".." in path.parts or not (images / path).is_file():
            raise UserError(f"{images / path}: no such image file, but {annotations} has captions of it")
        sentences = []
        for language, texts in image.captions_by_language.items():
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
    """Return the lines of a text file, which may be compressed.

    Raises UserError if the file does not have ``expected`` lines; None allows any number of lines.
    """
    with wrap_read_errors(path, "a text file in UTF-8"), open_decoded_stream(path) as stream:
        text = stream.read().decode()
    lines = text.removesuffix("\n").split("\n")
    if expected is not None and len(lines) != expected:
        raise UserError(f"{path}: has {len(lines)} lines, but the list of images has {expected}")
    return [line.strip() for line in lines]
