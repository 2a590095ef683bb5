from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.captions import PAD, Vocabulary
from vse.pipeline.dataset import load_dataset_file
from vse.train.pairs import Pairs


@pytest.fixture(scope="module")
def pairs(demo: Path) -> Pairs:
    images = load_dataset_file(demo).split("train")
    vocabulary = Vocabulary.build(caption.tokens for image in images for caption in image.captions)
    return Pairs(images, vocabulary)


@given(n=st.integers(2, 400), size=st.integers(2, 130), seed=st.integers(0, 99), epoch=st.integers(0, 30))
def test_an_epoch_visits_every_pair_once(n: int, size: int, seed: int, epoch: int) -> None:
    batches = list(shuffled(n, size, seed, epoch))
    seen = np.concatenate(batches).tolist()
    assert len(set(seen)) == len(seen)
    assert len(seen) == (n - 1 if n % size == 1 else n)
    assert all(len(batch) == size for batch in batches[:-1])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(list(shuffled(50, 8, seed, epoch))).tolist()

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_captions_are_padded_and_know_their_image(pairs: Pairs, demo: Path) -> None:
    numbers = np.array([17, 3, 200])
    padded, lengths = pairs.words(numbers)
    captions = [c for image in load_dataset_file(demo).split("train") for c in image.captions]
    vocabulary = Vocabulary.build(c.tokens for c in captions)
    for k, number in enumerate(numbers):
        words = vocabulary.encode(captions[number].tokens)
        assert lengths[k] == len(words)
        assert padded[k, : len(words)].tolist() == words
        assert (padded[k, len(words) :] == PAD).all()
        assert pairs.image_ids[pairs.image_of[number]] == captions[number].imgid
