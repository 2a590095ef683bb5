from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vse.pipeline.dataset.dataset import Caption, Image, load_dataset_file
from vse.train.data.pairs import Pairs


def image(imgid: int, *texts: str) -> Image:
    captions = [Caption(100 * imgid + k, imgid, text, tuple(text.split())) for k, text in enumerate(texts)]
    return Image(imgid, f"{imgid}.jpg", "train", tuple(captions))


@pytest.fixture
def pairs() -> Pairs:
    return Pairs([image(7, "a dog", "a cat", "a dog"), image(3, "dog a"), image(9, "a cat", "a a dog")])


def test_a_pair_is_a_caption_with_its_image(pairs: Pairs) -> None:
    assert len(pairs) == 6
    assert pairs.image_of.tolist() == [0, 0, 0, 1, 2, 2]
    assert pairs.image_ids.tolist() == [7, 3, 9]
    assert pairs.caption_image_ids.tolist() == [7, 7, 7, 3, 9, 9]
    assert pairs.caption_ids.tolist() == [700, 701, 702, 300, 900, 901]


def test_captions_of_the_same_words_in_the_same_order_share_a_text(pairs: Pairs) -> None:
    dog, cat, again, turned, other_cat, longer = pairs.text_of.tolist()
    assert dog == again
    assert cat == other_cat
    assert len({dog, cat, turned, longer}) == 4


def test_pairs_of_a_data_set_keep_its_order(demo: Path) -> None:
    images = load_dataset_file(demo).split("val")
    pairs = Pairs(images)
    assert pairs.caption_ids.tolist() == [caption.sentid for image in images for caption in image.captions]
    assert np.array_equal(pairs.caption_image_ids, [caption.imgid for caption in pairs.captions])
