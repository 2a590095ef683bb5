from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.phrases import Phrase
from vse.pipeline.errors import UserError

Edit = Callable[[Path, Callable[[Any], None]], Path]
PHRASE = {"first_token": 1, "n_tokens": 2, "chain": "1147", "types": ["people"], "boxes": [[0, 2, 30.5, 40]]}


def mark(*phrases: object) -> Callable[[Any], None]:
    """Return an edit that gives the first caption five tokens and these phrases."""

    def change(content: Any) -> None:
        content["images"][0]["sentences"][0].update(tokens=["a", "red", "disc", "on", "sand"], phrases=list(phrases))

    return change


def test_a_caption_keeps_its_phrases(own_demo: Path, edit: Edit) -> None:
    caption = load_dataset_file(edit(own_demo, mark(PHRASE, {"first_token": 4, "n_tokens": 1}))).images[0].captions[0]
    assert caption.phrases == (Phrase(1, 3, "1147", ("people",), ((0.0, 2.0, 30.5, 40.0),)), Phrase(4, 5))
    assert caption.tokens[caption.phrases[0].start : caption.phrases[0].stop] == ("red", "disc")


def test_phrases_of_the_demo_that_name_the_same_objects_are_one_chain(demo: Path) -> None:
    for image in load_dataset_file(demo).images:
        boxes: dict[str, tuple[tuple[float, ...], ...]] = {}
        for phrase in (phrase for caption in image.captions for phrase in caption.phrases):
            assert phrase.types == (("object",) if phrase.boxes else ("scene",))
            assert bool(phrase.chain) == bool(phrase.boxes)
            assert boxes.setdefault(phrase.chain, phrase.boxes) == phrase.boxes


def test_captions_without_phrases_share_one_empty_tuple(own_demo: Path, edit: Edit) -> None:
    def without(content: Any) -> None:
        for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
            del sentence["phrases"]

    images = load_dataset_file(edit(own_demo, without)).images
    assert len({id(caption.phrases) for image in images for caption in image.captions}) == 1


def test_the_truth_of_a_phrase_is_the_smallest_box_around_its_boxes() -> None:
    assert Phrase(0, 1).truth is None
    assert Phrase(0, 1, boxes=((1.0, 2.0, 3.0, 4.0),)).truth == (1.0, 2.0, 3.0, 4.0)
    assert Phrase(0, 1, boxes=((5.0, 2.0, 9.0, 4.0), (1.0, 3.0, 6.0, 8.0))).truth == (1.0, 2.0, 9.0, 8.0)


FAULTS: dict[str, tuple[object, str]] = {
    "not an object": ("red disc", "must be an object with 'first_token' and 'n_tokens'"),
    "no span": ({"first_token": 1}, "'n_tokens' must be an integer, not None"),
    "a fraction": (PHRASE | {"first_token": 1.5}, "'first_token' must be an integer, not 1.5"),
    "true for a number": (PHRASE | {"n_tokens": True}, "'n_tokens' must be an integer, not True"),
    "before the caption": (PHRASE | {"first_token": -1}, "2 tokens from token -1 are not a span of the caption's 5 tokens"),
    "after the caption": (PHRASE | {"first_token": 4}, "2 tokens from token 4 are not a span of the caption's 5 tokens"),
    "no tokens": (PHRASE | {"n_tokens": 0}, "0 tokens from token 1 are not a span of the caption's 5 tokens"),
    "a number as chain": (PHRASE | {"chain": 1147}, "'chain' must be a string, not 1147"),
    "objects that are no list": ({"first_token": 1, "n_tokens": 2, "objects": 3}, "'objects' must be a list"),
    "one type": (PHRASE | {"types": "people"}, "'types' must be a list of strings"),
    "a type that is no string": (PHRASE | {"types": [3]}, "'types' must be a list of strings"),
    "boxes that are no list": (PHRASE | {"boxes": "all"}, "'boxes' must be a list of [x1, y1, x2, y2]"),
    "three numbers": (PHRASE | {"boxes": [[1, 2, 3]]}, "the box [1, 2, 3] must be four numbers, x1, y1, x2, y2"),
    "a number that is text": (PHRASE | {"boxes": [[1, 2, 3, "4"]]}, "must be four numbers, x1, y1, x2, y2"),
    "no width": (PHRASE | {"boxes": [[3, 2, 3, 9]]}, "the box [3, 2, 3, 9] is empty: x2 must be greater than x1"),
    "upside down": (PHRASE | {"boxes": [[1, 9, 3, 2]]}, "the box [1, 9, 3, 2] is empty: x2 must be greater than x1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_file_the_caption_and_the_phrase(fault: str, own_demo: Path, edit: Edit) -> None:
    phrase, message = FAULTS[fault]
    with pytest.raises(UserError) as error:
        load_dataset_file(edit(own_demo, mark(PHRASE, phrase)))
    assert str(error.value).startswith(f"{own_demo}: caption 0: phrase 2")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_phrases_must_be_a_list(own_demo: Path, edit: Edit) -> None:
    def change(content: Any) -> None:
        content["images"][0]["sentences"][0]["phrases"] = {"first_token": 0}

    with pytest.raises(UserError, match="caption 0: 'phrases' must be a list"):
        load_dataset_file(edit(own_demo, change))
