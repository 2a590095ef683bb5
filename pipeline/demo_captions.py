"""The grammar of the demo data set: five captions for a scene, each about another part of it.

A caption is a list of pieces. A piece that names drawn objects is a phrase and keeps which ones, so that
every phrase has boxes; a piece that names the background is a phrase of kind ``scene``, without boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vse.pipeline.demo_scenes import Scene, SceneObject
from vse.pipeline.vocabulary import tokenize

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
_NUMBERS = ("no", "one", "two", "three", "four")
_ROWS = (("top", "upper"), ("middle",), ("bottom", "lower"))
_COLUMNS = ("left", "", "right")


@dataclass(frozen=True)
class DemoPhrase:
    """``n_tokens`` tokens from ``first_token`` that name the scene's ``objects`` (indices), or its background if empty."""

    first_token: int
    n_tokens: int
    objects: tuple[int, ...]


@dataclass(frozen=True)
class DemoCaption:
    """``raw`` text, its phrases, and ``facts``: which properties of the scene it states."""

    raw: str
    phrases: tuple[DemoPhrase, ...]
    facts: frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class _Named:
    """A piece of a caption that names objects (or, with none, the background)."""

    text: str
    objects: tuple[int, ...]


def write_captions(scene: Scene, rng: np.random.Generator) -> tuple[DemoCaption, ...]:
    """Five captions of ``scene``: all objects, one object, a relation, the background, another object.

    No two of them give the same set of facts, so none paraphrases another.
    """
    teller = _Teller(scene, rng)
    return (teller.inventory(), teller.one_object(), teller.relation(), teller.background(), teller.on_background())


class _Teller:
    def __init__(self, scene: Scene, rng: np.random.Generator) -> None:
        self.scene = scene
        self.rng = rng
        order = rng.permutation(len(scene.objects))
        self.first, self.second = int(order[0]), int(order[-1])  # equal if the scene has one object

    def inventory(self) -> DemoCaption:
        """Colour, shape and place of every object."""
        n_objects = len(self.scene.objects)
        parts: list[list[str | _Named]] = [
            [self.name(k, "colour", "shape"), self.place(self.scene.objects[k])] for k in range(n_objects)
        ]
        facts = [fact for k in range(n_objects) for fact in self.about(k, "colour", "shape", "place")]
        return self.caption(self.listed(parts), facts)

    def one_object(self) -> DemoCaption:
        """Size, texture, shape and place of one object, and its colour where there are several."""
        which = ("size", "texture", "shape") if self.alone else ("size", "texture", "colour", "shape")
        item = self.scene.objects[self.first]
        opening = self.pick(("there is", "we see", ""))
        named = self.name(self.first, *which)
        return self.caption([opening, named, self.place(item)], self.about(self.first, *which, "place"))

    def relation(self) -> DemoCaption:
        """Where one object lies from another, whose position it gives, or that it is alone."""
        if self.alone:
            lonely = self.pick(("all alone", "by itself", "with nothing else around"))
            pieces: list[str | _Named] = [self.name(0, "size", "colour", "shape"), lonely]
            return self.caption(pieces, [("count",), *self.about(0, "size", "colour", "shape")])
        a, b = self.scene.objects[self.first], self.scene.objects[self.second]
        if a.row != b.row:
            word = self.pick(("above", "over", "higher than") if a.row < b.row else ("below", "under", "lower than"))
        else:
            word = "to the left of" if a.column < b.column else "to the right of"
        verb = self.pick(("is", "sits", ""))
        pieces = [self.name(self.first, "colour", "shape", article="the"), verb, word]
        pieces += [self.name(self.second, "colour", "shape", article="the"), self.place(b)]
        return self.caption(pieces, [("relation", str(self.first), str(self.second)), *self.about(self.second, "place")])

    def background(self) -> DemoCaption:
        """The background, how many objects there are, and their colours (of one alone its texture)."""
        objects = self.scene.objects
        property_named = "texture" if self.alone else "colour"
        words = [self.word(getattr(item, property_named)) for item in objects]
        count = _NUMBERS[len(objects)]
        noun = self.word("shape" if self.alone else "shapes")
        facts = [("background",), ("count",), *(f for k in range(len(objects)) for f in self.about(k, property_named))]
        everything = tuple(range(len(objects)))
        if self.alone:
            return self.caption([_Named(f"{count} {words[0]} {noun}", (0,)), self.where()], facts)
        each: list[list[str | _Named]] = [[_Named(word, (k,))] for k, word in enumerate(words)]
        return self.caption([_Named(f"{count} {noun}", everything), self.where(), ":", *self.listed(each)], facts)

    def on_background(self) -> DemoCaption:
        """Another object than that of ``one_object``, and its place, on the background."""
        which = ("size", "colour", "shape") if self.alone else ("texture", "colour", "shape")
        facts = [("background",), *self.about(self.second, *which, "place")]
        place = self.place(self.scene.objects[self.second])
        return self.caption([self.name(self.second, *which), self.where(), place], facts)

    @property
    def alone(self) -> bool:
        return len(self.scene.objects) == 1

    def pick(self, choices: Sequence[str]) -> str:
        return choices[int(self.rng.integers(len(choices)))]

    def word(self, concept: str) -> str:
        return self.pick(SYNONYMS[concept])

    def name(self, k: int, *properties: str, article: str = "a") -> _Named:
        words = [self.word(getattr(self.scene.objects[k], p)) for p in properties]
        if article == "a" and words[0][0] in "aeiou":
            article = "an"
        if words[-1] == "round":
            words[-1] = f"round {self.word('shape')}"
        return _Named(" ".join([article, *words]), (k,))

    def about(self, k: int, *properties: str) -> list[tuple[str, ...]]:
        return [(p, str(k)) for p in properties]

    def where(self) -> list[str | _Named]:
        return [self.pick(("on", "against", "in front of")), _Named(self.word(self.scene.background), ())]

    def place(self, item: SceneObject) -> str:
        row, column = self.pick(_ROWS[item.row]), _COLUMNS[item.column]
        if (item.row, item.column) == (1, 1):
            return self.pick(("in the middle", "in the centre"))
        if not column:
            return f"at the {row} edge" if row in ("upper", "lower") else f"at the {row}"
        return f"on the {column}" if item.row == 1 else f"in the {row} {column} {self.pick(('corner', 'part'))}"

    @staticmethod
    def listed(parts: Sequence[Sequence[str | _Named]]) -> list[str | _Named]:
        """``a, b and c``."""
        pieces = [*parts[0]]
        for k, part in enumerate(parts[1:], start=2):
            pieces += ["and" if k == len(parts) else ",", *part]
        return pieces

    def caption(self, pieces: Sequence[str | _Named | list[str | _Named]], facts: Sequence[tuple[str, ...]]) -> DemoCaption:
        flat = [p for piece in pieces for p in (piece if isinstance(piece, list) else [piece]) if p]
        text, phrases, n_tokens = "", [], 0
        for piece in flat:
            words = piece if isinstance(piece, str) else piece.text
            n_words = len(tokenize(words))
            if isinstance(piece, _Named):
                phrases.append(DemoPhrase(n_tokens, n_words, piece.objects))
            text += words if not text or words in (",", ":") else f" {words}"
            n_tokens += n_words
        return DemoCaption(text[0].upper() + text[1:] + ".", tuple(phrases), frozenset(facts))
