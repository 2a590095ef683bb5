"""Add the phrases and boxes of Flickr30K Entities to captions: as a new data set, or to a data set of the same photos."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.captions import (
    DEFAULT_TOKENISER,
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
    read_annotation,
    read_marked_captions,
    read_photo_numbers,
    read_unrelated_captions,
)
from vse.pipeline.dataset.phrases import Box
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_size
from vse.pipeline.progress import progress_bar

ENTITIES_SPLITS = ("train", "val", "test")
MIN_CAPTION_SIMILARITY = 0.7  # 563 captions of Flickr8k differ in letters from Entities; this limit matches 562 of them
_COORDINATE_DECIMALS = 4  # decimals of the coordinates of scaled boxes
log = logging.getLogger(__name__)


def build_entities_content(folder: Path, images: Path) -> dict[str, Any]:
    """Build the content of ``dataset.json`` from the captions and splits of Flickr30K Entities.

    ``folder`` has ``Annotations``, ``Sentences``, ``train.txt``, ``val.txt`` and ``test.txt``, and may have
    ``UNRELATED_CAPTIONS``. ``images`` has the file ``<number>.jpg`` of every photo in the three lists. The ``imgid`` of an
    image is this number. Logs the numbers of photos, captions, boxes and phrases. Raises UserError if a file is missing, or
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
    """Add phrases to the sentences of an image that match a caption of ``photo``. Each caption is matched once at most."""
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

        Captions in ``UNRELATED_CAPTIONS`` lose their phrases.
        """
        captions = list(read_marked_captions(self.sentences_file(number)))
        annotation = read_annotation(self.folder / "Annotations" / f"{number}.xml")
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
        """Return the boxes, scaled from the size of the annotated photo to the size of ``file``."""
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
        """Return the phrases of a caption as entries of ``dataset.json``.

        ``tokens`` are the tokens of the caption in ``dataset.json``. Phrases that cover no token, such as
        ``[/EN#0/notvisual &]``, are left out and counted.
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
