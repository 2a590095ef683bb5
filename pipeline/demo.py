"""Draw the demo data set: images of simple scenes with five captions each. The same seed gives the same data set.

A caption is a list of pieces. A piece that names objects becomes a phrase with the boxes of these objects. A piece that
names the background becomes a phrase of kind ``scene`` without boxes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vse.pipeline.dataset.captions import ascii_words
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.preparation import write_dataset_file
from vse.pipeline.demo_scenes import IMAGE_SIZE, Scene, SceneObject, compose_scene, draw_element, draw_scene
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import OutputKind, check_output, may_replace_other_kinds
from vse.pipeline.files.writing import lock_for_writing, read_json, remove_temporary_files, write_bytes
from vse.pipeline.progress import progress_bar

SYNONYMS = {
    "circle": ("circle", "disc", "round"),
    "square": ("square", "box"),
    "triangle": ("triangle", "wedge"),
    "star": ("star",),
    "cross": ("cross", "plus sign"),
    "ring": ("ring", "hoop"),
    "diamond": ("diamond", "rhombus"),
    "crescent": ("crescent", "moon"),
    "red": ("red", "scarlet"),
    "green": ("green",),
    "blue": ("blue",),
    "yellow": ("yellow", "golden"),
    "purple": ("purple", "violet"),
    "orange": ("orange",),
    "white": ("white",),
    "black": ("black",),
    "pink": ("pink", "rosy"),
    "brown": ("brown",),
    "small": ("small", "little", "tiny"),
    "large": ("large", "big", "huge"),
    "plain": ("plain", "solid"),
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted"),
    "checkered": ("checkered", "chequered"),
    "grass": ("the grass", "a green lawn", "a meadow"),
    "sand": ("the sand", "a sandy beach"),
    "sea": ("the sea", "blue waves", "the water"),
    "night": ("the night sky", "a starry night"),
    "snow": ("the snow", "snowy ground"),
    "bricks": ("a brick wall", "red bricks"),
    "wood": ("a wooden floor", "wooden planks"),
    "sky": ("the blue sky", "a clear sky"),
    "shape": ("shape", "thing", "object"),
    "shapes": ("shapes", "things", "objects"),
}
_NUMBER_WORDS = ("no", "one", "two", "three", "four")
_ROW_WORDS = (("top", "upper"), ("middle",), ("bottom", "lower"))
_COLUMN_WORDS = ("left", "", "right")


@dataclass(frozen=True)
class DemoPhrase:
    """A phrase of a caption.

    ``first_token`` is the index of the first token of the phrase in the caption. ``n_tokens`` is the number of tokens.
    ``object_indices`` are the indices in the scene of the objects that the phrase names. They are empty for the background.
    """

    first_token: int
    n_tokens: int
    object_indices: tuple[int, ...]


@dataclass(frozen=True)
class DemoCaption:
    """A caption of a scene: its text, its phrases, and the facts that it states, such as ``("colour", "0")``.

    This fact means that the caption states the colour of the object with the index 0.
    """

    raw: str
    phrases: tuple[DemoPhrase, ...]
    facts: frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class _PhraseText:
    """A piece of a caption that names objects of the scene, or the background.

    ``object_indices`` are the indices of the objects in the scene. They are empty for the background.
    """

    text: str
    object_indices: tuple[int, ...]


def compose_captions(scene: Scene, rng: np.random.Generator) -> tuple[DemoCaption, ...]:
    """Return five captions with different facts: all objects, one object, a relation, the background, another object."""
    writer = _CaptionWriter(scene, rng)
    return (
        writer.describe_all_objects(),
        writer.describe_one_object(),
        writer.describe_relation(),
        writer.describe_background(),
        writer.describe_other_object(),
    )


class _CaptionWriter:
    """A writer of the captions of a scene. Every method that describes something returns one caption."""

    def __init__(self, scene: Scene, rng: np.random.Generator) -> None:
        self.scene = scene
        self.rng = rng
        order = rng.permutation(len(scene.objects))
        self.first_index, self.second_index = int(order[0]), int(order[-1])  # equal if the scene has one object

    def describe_all_objects(self) -> DemoCaption:
        """Describe the colour, shape and place of every object."""
        n_objects = len(self.scene.objects)
        parts: list[list[str | _PhraseText]] = [
            [self.build_object_phrase(k, "colour", "shape"), self.build_place_text(self.scene.objects[k])]
            for k in range(n_objects)
        ]
        facts = [fact for k in range(n_objects) for fact in self.list_object_facts(k, "colour", "shape", "place")]
        return self.build_caption(self.join_parts(parts), facts)

    def describe_one_object(self) -> DemoCaption:
        """Describe the size, texture, shape and place of one object. Among several objects, describe its colour, too."""
        which = ("size", "texture", "shape") if self.has_one_object else ("size", "texture", "colour", "shape")
        item = self.scene.objects[self.first_index]
        opening = self.pick(("there is", "we see", ""))
        named = self.build_object_phrase(self.first_index, *which)
        return self.build_caption(
            [opening, named, self.build_place_text(item)], self.list_object_facts(self.first_index, *which, "place")
        )

    def describe_relation(self) -> DemoCaption:
        """Describe the position of one object relative to a second object, or state that a single object is alone."""
        if self.has_one_object:
            lonely = self.pick(("all alone", "by itself", "with nothing else around"))
            pieces: list[str | _PhraseText] = [self.build_object_phrase(0, "size", "colour", "shape"), lonely]
            return self.build_caption(pieces, [("count",), *self.list_object_facts(0, "size", "colour", "shape")])
        a, b = self.scene.objects[self.first_index], self.scene.objects[self.second_index]
        if a.row != b.row:
            word = self.pick(("above", "over", "higher than") if a.row < b.row else ("below", "under", "lower than"))
        else:
            word = "to the left of" if a.column < b.column else "to the right of"
        verb = self.pick(("is", "sits", ""))
        pieces = [self.build_object_phrase(self.first_index, "colour", "shape", article="the"), verb, word]
        pieces += [self.build_object_phrase(self.second_index, "colour", "shape", article="the"), self.build_place_text(b)]
        return self.build_caption(
            pieces,
            [("relation", str(self.first_index), str(self.second_index)), *self.list_object_facts(self.second_index, "place")],
        )

    def describe_background(self) -> DemoCaption:
        """Describe the background, the number of objects, and their colours (the texture of a single object)."""
        objects = self.scene.objects
        property_named = "texture" if self.has_one_object else "colour"
        words = [self.pick_synonym(getattr(item, property_named)) for item in objects]
        count = _NUMBER_WORDS[len(objects)]
        noun = self.pick_synonym("shape" if self.has_one_object else "shapes")
        facts = [
            ("background",),
            ("count",),
            *(f for k in range(len(objects)) for f in self.list_object_facts(k, property_named)),
        ]
        everything = tuple(range(len(objects)))
        if self.has_one_object:
            return self.build_caption([_PhraseText(f"{count} {words[0]} {noun}", (0,)), self.build_background_phrase()], facts)
        each: list[list[str | _PhraseText]] = [[_PhraseText(word, (k,))] for k, word in enumerate(words)]
        return self.build_caption(
            [_PhraseText(f"{count} {noun}", everything), self.build_background_phrase(), ":", *self.join_parts(each)], facts
        )

    def describe_other_object(self) -> DemoCaption:
        """Describe the background and one object. With several objects, :meth:`describe_one_object` describes another one."""
        which = ("size", "colour", "shape") if self.has_one_object else ("texture", "colour", "shape")
        facts = [("background",), *self.list_object_facts(self.second_index, *which, "place")]
        place = self.build_place_text(self.scene.objects[self.second_index])
        return self.build_caption(
            [self.build_object_phrase(self.second_index, *which), self.build_background_phrase(), place], facts
        )

    @property
    def has_one_object(self) -> bool:
        return len(self.scene.objects) == 1

    def pick(self, choices: Sequence[str]) -> str:
        return draw_element(self.rng, choices)

    def pick_synonym(self, concept: str) -> str:
        return self.pick(SYNONYMS[concept])

    def build_object_phrase(self, k: int, *properties: str, article: str = "a") -> _PhraseText:
        words = [self.pick_synonym(getattr(self.scene.objects[k], p)) for p in properties]
        if article == "a" and words[0][0] in "aeiou":
            article = "an"
        if words[-1] == "round":
            words[-1] = f"round {self.pick_synonym('shape')}"
        return _PhraseText(" ".join([article, *words]), (k,))

    def list_object_facts(self, k: int, *properties: str) -> list[tuple[str, ...]]:
        return [(p, str(k)) for p in properties]

    def build_background_phrase(self) -> list[str | _PhraseText]:
        return [self.pick(("on", "against", "in front of")), _PhraseText(self.pick_synonym(self.scene.background), ())]

    def build_place_text(self, item: SceneObject) -> str:
        row, column = self.pick(_ROW_WORDS[item.row]), _COLUMN_WORDS[item.column]
        if (item.row, item.column) == (1, 1):
            return self.pick(("in the middle", "in the centre"))
        if not column:
            return f"at the {row} edge" if row in ("upper", "lower") else f"at the {row}"
        return f"on the {column}" if item.row == 1 else f"in the {row} {column} {self.pick(('corner', 'part'))}"

    @staticmethod
    def join_parts(parts: Sequence[Sequence[str | _PhraseText]]) -> list[str | _PhraseText]:
        pieces = [*parts[0]]
        for k, part in enumerate(parts[1:], start=2):
            pieces += ["and" if k == len(parts) else ",", *part]
        return pieces

    def build_caption(
        self, pieces: Sequence[str | _PhraseText | list[str | _PhraseText]], facts: Sequence[tuple[str, ...]]
    ) -> DemoCaption:
        flat = [p for piece in pieces for p in (piece if isinstance(piece, list) else [piece]) if p]
        text, phrases, n_tokens = "", [], 0
        for piece in flat:
            words = piece if isinstance(piece, str) else piece.text
            n_words = len(ascii_words(words))
            if isinstance(piece, _PhraseText):
                phrases.append(DemoPhrase(n_tokens, n_words, piece.object_indices))
            text += words if not text or words in (",", ":") else f" {words}"
            n_tokens += n_words
        return DemoCaption(text[0].upper() + text[1:] + ".", tuple(phrases), frozenset(facts))


DEFAULT_N_IMAGES = 5500  # 4,000 images for training, 500 for validation and 1,000 for testing


def create_demo(out: Path, n_images: int = DEFAULT_N_IMAGES, seed: int = 0, name: str = "demo") -> Path:
    """Draw ``n_images`` scenes with five captions each, and write ``out/images`` and then ``out/dataset.json``.

    About 8/11 of the images are for training, 1/11 for validation and 2/11 for testing. Each caption has ``phrases``. The
    entry of a phrase has the first token, the number of tokens, the ``kind`` (``object``, or ``scene`` for the background)
    and the ``boxes`` (x1, y1, x2, y2 in pixels) of the objects. A background has no boxes. Returns the path of
    ``dataset.json``.
    """
    if n_images < 6:
        raise UserError(f"--images {n_images}: the demo needs at least 6 images, so that no split is empty")
    if seed < 0:
        raise UserError(f"--seed {seed}: the seed must not be negative")
    n_test, n_val = max(1, round(n_images * 2 / 11)), max(1, round(n_images / 11))
    splits = ["train"] * (n_images - n_val - n_test) + ["val"] * n_val + ["test"] * n_test
    with lock_for_writing(out, folder=True):
        for imgid in range(n_images):
            check_output(out / "images" / _image_filename(imgid), _DEMO_IMAGE_KIND)
        _remove_earlier_demo(out, name)
        return _draw_dataset(out, splits, seed, name)


def _image_filename(imgid: int) -> str:
    return f"demo_{imgid:06d}.jpg"


def _encode_jpeg(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=92)
    return content.getvalue()


def _is_demo_image(path: Path) -> bool:
    """Return whether an image has the size and the JPEG quantization tables of demo images. Few photos have both."""
    with Image.open(path) as found, Image.open(io.BytesIO(_encode_jpeg(Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE))))) as ours:
        return (found.size, getattr(found, "quantization", None)) == (ours.size, getattr(ours, "quantization", 0))


_DEMO_IMAGE_KIND = OutputKind("an image of the demo", _is_demo_image)


def _remove_earlier_demo(out: Path, name: str) -> None:
    """Remove the ``dataset.json`` of an earlier demo and the temporary files of killed runs."""
    file = out / "dataset.json"
    if file.is_file():
        earlier = None if may_replace_other_kinds() else read_json(file)
        if earlier is not None and (not isinstance(earlier, dict) or earlier.get("dataset") != name):
            raise UserError(f"{file}: describes another data set and is not overwritten; give another --out")
        file.unlink()
    remove_temporary_files(out)
    remove_temporary_files(out / "images")


def _draw_dataset(out: Path, splits: list[str], seed: int, name: str) -> Path:
    entries = []
    for imgid, split in enumerate(progress_bar(splits, desc="draw demo", unit="image")):
        rng = np.random.default_rng([seed, imgid])
        scene = compose_scene(rng)
        filename = _image_filename(imgid)
        write_bytes(out / "images" / filename, _encode_jpeg(draw_scene(scene, rng)), sync=False)
        captions = compose_captions(scene, rng)
        sentids = [imgid * len(captions) + k for k in range(len(captions))]
        sentences = [_build_caption_entry(sentid, imgid, scene, c) for sentid, c in zip(sentids, captions, strict=True)]
        entry = {"imgid": imgid, "filename": filename, "split": split, "sentids": sentids}
        entries.append({**entry, "sentences": sentences})
    path = write_dataset_file(out / "dataset.json", {"dataset": name, "images": entries})
    load_dataset_file(path)  # writes the copy in columns, if the file is large
    return path


def _build_caption_entry(sentid: int, imgid: int, scene: Scene, caption: DemoCaption) -> dict[str, Any]:
    phrases = [
        {
            "first_token": phrase.first_token,
            "n_tokens": phrase.n_tokens,
            "kind": "object" if phrase.object_indices else "scene",
            "objects": list(phrase.object_indices),
            "boxes": [list(scene.objects[k].box) for k in phrase.object_indices],
        }
        for phrase in caption.phrases
    ]
    tokens = ascii_words(caption.raw)
    return {"sentid": sentid, "imgid": imgid, "raw": caption.raw, "tokens": tokens, "phrases": phrases}
