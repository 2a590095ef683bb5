from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vse.pipeline.dataset.dataset import load_dataset_file, mentions, phrase_texts

Edit = Callable[[Path, Callable[[Any], None]], Path]


def two_captions(content: Any) -> None:
    """Give phrases to two captions of the first image and one of the second, and to no other caption."""
    for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
        sentence["phrases"] = []
    first, second = content["images"][0]["sentences"][:2]
    first.update(
        tokens=["A", "Dog", "on", "sand"], phrases=[{"first_token": 3, "n_tokens": 1}, {"first_token": 0, "n_tokens": 2}]
    )
    second.update(tokens=["the", "sand"], phrases=[{"first_token": 1, "n_tokens": 1}])
    content["images"][1]["sentences"][0].update(tokens=["a", "dog"], phrases=[{"first_token": 0, "n_tokens": 2}])


def test_mentions_are_numbered_in_file_order(own_demo: Path, edit: Edit) -> None:
    dataset = load_dataset_file(edit(own_demo, two_captions))
    listed = mentions(dataset)
    assert [mention.phrase_id for mention in listed] == [0, 1, 2, 3]
    assert [mention.text for mention in listed] == ["sand", "a dog", "sand", "a dog"]
    assert [mention.image for mention in listed] == [dataset.images[0]] * 3 + [dataset.images[1]]
    assert [mention.caption for mention in listed] == [
        *[dataset.images[0].captions[0]] * 2,
        dataset.images[0].captions[1],
        dataset.images[1].captions[0],
    ]
    assert all(mention.phrase in mention.caption.phrases for mention in listed)


def test_texts_are_listed_once_in_the_order_of_appearance(own_demo: Path, edit: Edit) -> None:
    assert phrase_texts(load_dataset_file(edit(own_demo, two_captions))) == ["sand", "a dog"]


def test_every_text_of_the_demo_is_that_of_a_phrase_and_none_is_missing(demo: Path) -> None:
    dataset = load_dataset_file(demo)
    texts = phrase_texts(dataset)
    assert len(set(texts)) == len(texts) > 1
    assert set(texts) == {mention.text for mention in mentions(dataset)}
