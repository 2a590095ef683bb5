"""Captions with the phrases and boxes of Flickr30K Entities: a data set of its own, or added to one of the same photos."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.captions import UNNAMED, letters, matched, moved_spans, tokeniser_named, tokenize
from vse.pipeline.dataset.entities import (
    NOT_VISUAL,
    Annotation,
    MarkedCaption,
    read_annotation,
    read_captions,
    read_split,
    read_unrelated,
)
from vse.pipeline.dataset.phrases import Box
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_size
from vse.pipeline.progress import progress_bar

ENTITIES_SPLITS = ("train", "val", "test")
SIMILAR = 0.7  # Of 563 captions of Flickr8k that differ in a letter from Entities', 562 have such a counterpart.
_DIGITS = 4  # after the point, of a coordinate that was scaled
log = logging.getLogger(__name__)


def entities_content(folder: Path, images: Path) -> dict[str, Any]:
    """The content of ``dataset.json`` for the official files: captions and splits are those of Flickr30K Entities.

    ``folder`` has ``Annotations``, ``Sentences``, ``train.txt``, ``val.txt`` and ``test.txt``, and may have
    ``UNRELATED_CAPTIONS``; ``images`` has ``<number>.jpg`` of every listed photo, whose ``imgid`` is its number. Counts are
    logged. :class:`UserError` if a file is missing, or a photo is in two splits.
    """
    splits = {split: read_split(folder / f"{split}.txt") for split in ENTITIES_SPLITS}
    places = [(number, split) for split, numbers in splits.items() for number in numbers]
    twice = [number for number, count in Counter(number for number, _ in places).items() if count > 1]
    if twice:
        raise UserError(f"{folder}: photo {twice[0]} is in two of {', '.join(f'{split}.txt' for split in splits)}")
    if not places:
        raise UserError(f"{folder}: {', '.join(f'{split}.txt' for split in splits)} name no photo")
    reader = _Reader(folder, images)
    absent = [f"{number}.jpg" for number, _ in places if not (images / f"{number}.jpg").is_file()]
    if absent:
        raise UserError(f"{images}: {len(absent)} of {len(places)} image files are missing, the first is {absent[0]}")
    entries: list[dict[str, Any]] = []
    sentid = 0
    for number, split in progress_bar(places, desc="read phrases", unit="image"):
        imgid, sentences = int(number), []
        photo = reader.read(number, f"{number}.jpg")
        for caption in photo.captions:
            raw = " ".join(caption.words)
            tokens = tokenize(raw)
            if not tokens:
                raise UserError(f"{reader.sentences(number)}: a caption has no letter and no digit: {raw[:50]!r}")
            phrases = reader.phrases(caption, tokens, photo)
            sentences.append({"sentid": sentid, "imgid": imgid, "raw": raw, "tokens": tokens, "phrases": phrases})
            sentid += 1
        sentids = [sentence["sentid"] for sentence in sentences]
        entries.append(
            {"imgid": imgid, "filename": f"{number}.jpg", "split": split, "sentids": sentids, "sentences": sentences}
        )
    reader.report()
    return {"images": entries}


def with_phrases(content: dict[str, Any], folder: Path, images: Path | None, similar: float = SIMILAR) -> dict[str, Any]:
    """The content of a checked ``dataset.json`` in whose captions the phrases of Flickr30K Entities are marked.

    An image is joined by the number with which the name of its file begins, a caption by its text: its letters and digits, in
    whatever case and however they are cut into tokens; the order of an image's captions does not matter. A caption whose
    spelling differs (*grey*, *gray*) is joined to what is left of its image if a share ``similar`` of tokens is equal; 1 joins
    none of these. Phrases that captions had are replaced. Captions without a counterpart have no phrases. All is counted in
    the log.
    Without ``images`` boxes are in pixels of the annotated photos. :class:`UserError` if no image is annotated.
    """
    reader, cut = _Reader(folder, images), tokeniser_named(content.get("tokeniser", UNNAMED), folder)
    entries, n_captions = [], 0
    for entry in progress_bar(content["images"], desc="read phrases", unit="image"):
        number = photo_number(entry["filename"])
        before = entry.get("sentences", ())
        sentences = [{key: value for key, value in sentence.items() if key != "phrases"} for sentence in before]
        n_captions += len(sentences)
        if number is not None and reader.sentences(number).is_file():
            photo = reader.read(number, str(Path(entry.get("filepath") or "", entry["filename"])))
            _join(sentences, photo, reader, similar, cut)
        entries.append({**entry, "sentences": sentences})
    n_images, n_joined = reader.counts["images"], reader.counts["joined"]
    if not n_images:
        raise UserError(
            f"{folder}: annotates none of the {len(entries)} images; a file's name has to begin with the number of its photo"
        )
    log.info(
        "%s: %d of %d images and %d of %d captions were joined, %d of them with another spelling; %d captions have no "
        "counterpart and no phrases",
        *(folder, n_images, len(entries), n_joined, n_captions, reader.counts["corrected"], n_captions - n_joined),
    )
    reader.report()
    return {**content, "images": entries}


def _join(
    sentences: list[dict[str, Any]], photo: _Photo, reader: _Reader, similar: float, cut: Callable[[str], list[str]]
) -> None:
    """Mark the phrases in the sentences of an image that have the text of a caption of Entities, each of which counts once."""
    texts = [sentence["tokens"] if "tokens" in sentence else cut(sentence["raw"]) for sentence in sentences]
    captions = [caption.words for caption in photo.captions]
    for place, other in matched(texts, captions, similar).items():
        sentences[place]["phrases"] = reader.phrases(photo.captions[other], texts[place], photo)
        same = letters(texts[place]) == letters(captions[other])
        reader.counts.update(joined=1, corrected=not same)


def photo_number(filename: str) -> str | None:
    """The number of a photo of Flickr, ``1000268201`` of ``1000268201_693b08cb0e.jpg``; None if the name has none."""
    match = re.fullmatch(r"([0-9]{1,18})(?:_.*)?", Path(filename).stem)
    return match[1] if match else None


@dataclass(frozen=True)
class _Photo:
    """What Entities has of a photo: its captions, and the boxes of its chains in pixels of the file."""

    captions: tuple[MarkedCaption, ...]
    boxes: Mapping[str, Sequence[Box]]
    unboxed: frozenset[str]


@dataclass
class _Reader:
    """Reads the photos of a folder of Entities one by one, and counts what it meets."""

    folder: Path
    images: Path | None
    counts: Counter[str] = field(default_factory=Counter)
    first_scaled: str = ""

    def __post_init__(self) -> None:
        for name in ("Annotations", "Sentences"):
            if not (self.folder / name).is_dir():
                raise UserError(f"{self.folder}: has no folder {name}, so it is none of Flickr30K Entities")
        listed = self.folder / "UNRELATED_CAPTIONS"
        self.unrelated = read_unrelated(listed) if listed.is_file() else frozenset()

    def sentences(self, number: str) -> Path:
        """The file of a photo's captions."""
        return self.folder / "Sentences" / f"{number}.txt"

    def read(self, number: str, file: str) -> _Photo:
        """The captions and boxes of a photo, whose ``file`` lies in the folder of images.

        Captions that say nothing of the photo have no phrases.
        """
        captions = list(read_captions(self.sentences(number)))
        annotation = read_annotation(self.folder / "Annotations" / f"{number}.xml")
        marked = [phrase for caption in captions for phrase in caption.phrases]
        with_box = sum(phrase.chain != NOT_VISUAL and phrase.chain in annotation.boxes for phrase in marked)
        self.counts.update(
            images=1,
            boxes=annotation.n_boxes,
            cut=annotation.n_cut,
            captions=len(captions),
            marked=len(marked),
            with_box=with_box,
        )
        for photo, place in self.unrelated:
            if photo == number and place < len(captions):
                self.counts["unrelated"] += len(captions[place].phrases)
                captions[place] = captions[place]._replace(phrases=())
        return _Photo(tuple(captions), self._scaled(annotation, file), annotation.unboxed)

    def _scaled(self, annotation: Annotation, file: str) -> Mapping[str, Sequence[Box]]:
        """The boxes in pixels of the file, which may have another size than was annotated."""
        size = annotation.width, annotation.height
        now = size if self.images is None else read_image_size(self.images / file)
        if now == size:
            return annotation.boxes
        self.counts["scaled"] += 1
        self.first_scaled = self.first_scaled or f"{file} has {now[0]} x {now[1]} pixels instead of {size[0]} x {size[1]}"
        return {chain: [_resized(box, size, now) for box in boxes] for chain, boxes in annotation.boxes.items()}

    def phrases(self, caption: MarkedCaption, tokens: Sequence[str], photo: _Photo) -> list[dict[str, Any]]:
        """The phrases of a caption as ``dataset.json`` has them, as spans of ``tokens``, which are those of the same caption.

        A phrase without a letter and a digit (``[/EN#0/notvisual &]``) is no span of tokens: it is left out and counted.
        """
        entries = []
        spans = moved_spans([(phrase.start, phrase.stop) for phrase in caption.phrases], caption.words, tokens)
        for phrase, (first, last) in zip(caption.phrases, spans, strict=True):
            if first == last:
                self.counts["wordless"] += 1
                continue
            visual = phrase.chain != NOT_VISUAL
            boxes = photo.boxes.get(phrase.chain, ()) if visual else ()
            self.counts.update(
                phrases=1, boxed=bool(boxes), unknown=visual and not boxes and phrase.chain not in photo.unboxed
            )
            entries.append(
                {
                    "first_token": first,
                    "n_tokens": last - first,
                    "chain": phrase.chain if visual else "",
                    "types": list(phrase.types),
                    "boxes": [list(box) for box in boxes],
                }
            )
        return entries

    def report(self) -> None:
        """Log the counts; what is unusual only where it occurs."""
        counts = self.counts
        log.info(
            "%s: of %d photos, %d captions and %d boxes; the captions mark %d phrases, %d of them with a box",
            *(self.folder, counts["images"], counts["captions"], counts["boxes"], counts["marked"], counts["with_box"]),
        )
        log.info("%d phrases are taken, %d of them with a box", counts["phrases"], counts["boxed"])
        for count, what in (
            (
                counts["unrelated"],
                "phrases are left out: UNRELATED_CAPTIONS says that their captions say nothing of the photo",
            ),
            (counts["wordless"], "phrases are left out: they have no letter and no digit in the caption"),
            (counts["unknown"], "phrases have no box, and their chain is in no annotation"),
            (counts["cut"], "boxes reached out of the photo and were cut at its border"),
        ):
            if count:
                log.info("%d %s", count, what)
        if self.first_scaled:
            log.warning(
                "%d photos have another size than was annotated (%s); their boxes were scaled",
                counts["scaled"],
                self.first_scaled,
            )


def _resized(box: Box, size: tuple[int, int], now: tuple[int, int]) -> Box:
    """A box in an image of ``size`` (width, height) that has the size ``now``."""
    x1, y1, x2, y2 = (round(x * new / old, _DIGITS) for x, old, new in zip(box, size * 2, now * 2, strict=True))
    return x1, y1, x2, y2
