from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.dataset import list_mentions, list_phrase_texts, load_dataset_file
from vse.pipeline.dataset.images import Phrase, iou
from vse.pipeline.errors import UserError

Edit = Callable[[Path, Callable[[Any], None]], Path]
PHRASE = {"first_token": 1, "n_tokens": 2, "chain": "1147", "types": ["people"], "boxes": [[0, 2, 30.5, 40]]}


def mark(phrases: object) -> Callable[[Any], None]:
    """Return an edit that gives the first caption five tokens and these phrases."""
    changes = {"tokens": ["a", "red", "disc", "on", "sand"], "phrases": phrases}
    return lambda content: content["images"][0]["sentences"][0].update(changes)


def test_a_caption_keeps_its_phrases(own_json: Path, edit: Edit) -> None:
    caption = load_dataset_file(edit(own_json, mark([PHRASE, {"first_token": 4, "n_tokens": 1}]))).images[0].captions[0]
    assert caption.phrases == (Phrase(1, 3, "1147", ("people",), ((0.0, 2.0, 30.5, 40.0),)), Phrase(4, 5))
    assert caption.tokens[caption.phrases[0].start : caption.phrases[0].stop] == ("red", "disc")


def test_phrases_of_the_demo_that_name_the_same_objects_are_one_chain(demo: Path) -> None:
    for image in load_dataset_file(demo).images:
        boxes: dict[str, tuple[tuple[float, ...], ...]] = {}
        for phrase in (phrase for caption in image.captions for phrase in caption.phrases):
            assert phrase.types == (("object",) if phrase.boxes else ("scene",))
            assert bool(phrase.chain) == bool(phrase.boxes)
            assert boxes.setdefault(phrase.chain, phrase.boxes) == phrase.boxes


def test_the_truth_of_a_phrase_is_the_smallest_box_around_its_boxes() -> None:
    assert Phrase(0, 1).truth_box is None
    assert Phrase(0, 1, boxes=((5.0, 2.0, 9.0, 4.0), (1.0, 3.0, 6.0, 8.0))).truth_box == (1.0, 2.0, 9.0, 8.0)


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
    "a type that is no string": (PHRASE | {"types": [3]}, "'types' must be a list of strings"),
    "boxes that are no list": (PHRASE | {"boxes": "all"}, "'boxes' must be a list of [x1, y1, x2, y2]"),
    "three numbers": (PHRASE | {"boxes": [[1, 2, 3]]}, "the box [1, 2, 3] must be four numbers, x1, y1, x2, y2"),
    "a number that is text": (PHRASE | {"boxes": [[1, 2, 3, "4"]]}, "must be four numbers, x1, y1, x2, y2"),
    "no width": (PHRASE | {"boxes": [[3, 2, 3, 9]]}, "the box [3, 2, 3, 9] is empty: x2 must be greater than x1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_file_the_caption_and_the_phrase(fault: str, own_json: Path, edit: Edit) -> None:
    phrase, message = FAULTS[fault]
    with pytest.raises(UserError) as error:
        load_dataset_file(edit(own_json, mark([PHRASE, phrase])))
    assert str(error.value).startswith(f"{own_json}: caption 0: phrase 2")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_phrases_must_be_a_list(own_json: Path, edit: Edit) -> None:
    with pytest.raises(UserError, match="caption 0: 'phrases' must be a list"):
        load_dataset_file(edit(own_json, mark(PHRASE)))


CORNERS = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=4)


def pixels(box: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return the pixels of a box, one by one."""
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


@given(CORNERS, CORNERS)
def test_iou_is_the_share_of_pixels_that_two_boxes_have_in_common(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> None:
    expected = [[len(pixels(x) & pixels(y)) / max(1, len(pixels(x) | pixels(y))) for y in b] for x in a]
    overlap = iou(np.array(a), np.array(b, np.float32))
    assert (overlap.shape, overlap.dtype) == ((len(a), len(b)), np.float64)
    np.testing.assert_allclose(overlap, expected, atol=1e-12)


def test_a_box_without_area_overlaps_nothing_and_there_may_be_no_boxes() -> None:
    empty = np.array([[2, 2, 2, 5], [4, 4, 1, 1]], np.float32)
    assert not iou(empty, np.vstack([empty, [[0, 0, 9, 9]]])).any()
    assert iou(np.zeros((0, 4)), np.zeros((3, 4))).shape == (0, 3)


def two_captions(content: Any) -> None:
    """Give phrases to two captions of the first image and one of the second, and to no other caption."""
    for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
        sentence["phrases"] = []
    first, second = content["images"][0]["sentences"][:2]
    marked = [{"first_token": 3, "n_tokens": 1}, {"first_token": 0, "n_tokens": 2}]
    first.update(tokens=["A", "Dog", "on", "sand"], phrases=marked)
    second.update(tokens=["the", "sand"], phrases=[{"first_token": 1, "n_tokens": 1}])
    content["images"][1]["sentences"][0].update(tokens=["a", "dog"], phrases=[{"first_token": 0, "n_tokens": 2}])


def test_mentions_are_numbered_in_file_order_and_texts_listed_once(own_json: Path, edit: Edit) -> None:
    dataset = load_dataset_file(edit(own_json, two_captions))
    listed, (one, two) = list_mentions(dataset), dataset.images[:2]
    assert [mention.phrase_id for mention in listed] == [0, 1, 2, 3]
    assert [mention.text for mention in listed] == ["sand", "a dog", "sand", "a dog"]
    assert [mention.image for mention in listed] == [one, one, one, two]
    captions = [one.captions[0], one.captions[0], one.captions[1], two.captions[0]]
    assert [mention.caption for mention in listed] == captions
    assert all(mention.phrase in mention.caption.phrases for mention in listed)
    assert list_phrase_texts(dataset) == ["sand", "a dog"]
