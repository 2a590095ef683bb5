"""All phrases of a data set in one list, and their different texts."""

from __future__ import annotations

from typing import NamedTuple

from vse.pipeline.dataset import Caption, Dataset, Image
from vse.pipeline.phrases import Phrase


class Mention(NamedTuple):
    """A phrase where it stands: in which caption of which image.

    ``number`` is its place among all phrases of the data set in file order, from 0, and its id in every file. ``text`` is its
    tokens in lower case with blanks between them.
    """

    number: int
    image: Image
    caption: Caption
    phrase: Phrase
    text: str


def mentions(dataset: Dataset) -> list[Mention]:
    """All phrases of a data set, in the order of ``dataset.json``."""
    places = ((image, caption, phrase) for image in dataset.images for caption in image.captions for phrase in caption.phrases)
    return [
        Mention(number, image, caption, phrase, " ".join(caption.tokens[phrase.start : phrase.stop]).lower())
        for number, (image, caption, phrase) in enumerate(places)
    ]


def phrase_texts(dataset: Dataset) -> list[str]:
    """The different texts of a data set's phrases, in the order of their first appearance.

    The place of a text in this list is its id in a cache of phrases.
    """
    return list(dict.fromkeys(mention.text for mention in mentions(dataset)))
