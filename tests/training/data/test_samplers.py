from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.errors import UserError
from vse.training.data.samplers import SAMPLERS, Indices

SIZES = st.integers(4, 40)
SEEDS = st.integers(0, 99)


@st.composite
def image_numbers(draw: st.DrawFn, min_images: int = 1) -> Indices:
    """The image of every pair: images with 1 to 8 captions, whose pairs lie anywhere; not all numbers are in use."""
    counts = draw(st.lists(st.integers(1, 8), min_size=min_images, max_size=20))
    numbers = 3 * np.random.default_rng(draw(SEEDS)).permutation(len(counts))
    return np.random.default_rng(draw(SEEDS)).permutation(np.repeat(numbers, counts))


def twice(n_images: int, n_captions: int = 5) -> Indices:
    return np.repeat(np.arange(n_images), n_captions)


def counts_of(image_indices: Indices, batch: Indices) -> dict[int, int]:
    """How many captions of each of its images a batch has."""
    return Counter(image_indices[batch].tolist())


@given(n=st.integers(2, 400), size=st.integers(2, 130), seed=SEEDS, epoch=st.integers(0, 30))
def test_shuffled_visits_every_pair_once(n: int, size: int, seed: int, epoch: int) -> None:
    batches = SAMPLERS["shuffled"]().build_epoch_batches(np.zeros(n, np.int64), size, seed, epoch)
    seen = np.concatenate(batches).tolist()
    assert len(set(seen)) == len(seen)
    assert len(seen) == (n - 1 if n % size == 1 else n)
    assert all(len(batch) == size for batch in batches[:-1])


@given(image_indices=image_numbers(), size=SIZES, seed=SEEDS)
def test_by_image_visits_every_pair_once_and_image_after_image(image_indices: Indices, size: int, seed: int) -> None:
    batches = SAMPLERS["by_image"]().build_epoch_batches(image_indices, size, seed, 0)
    seen = np.concatenate([*batches, np.empty(0, np.int64)])
    assert len(set(seen.tolist())) == len(seen) == len(image_indices) - (len(image_indices) % size == 1)
    assert all(len(batch) == size for batch in batches[:-1])
    assert np.count_nonzero(np.diff(image_indices[seen])) < max(1, len(set(image_indices[seen].tolist())))


@given(image_indices=image_numbers(), size=SIZES, seed=SEEDS)
def test_neighbourhood_visits_every_pair_once_with_a_second_caption(image_indices: Indices, size: int, seed: int) -> None:
    batches = SAMPLERS["neighbourhood"]().build_epoch_batches(image_indices, size, seed, 0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(image_indices)))
    there_are = counts_of(image_indices, np.arange(len(image_indices)))
    for batch in batches:
        for image, count in counts_of(image_indices, batch).items():
            assert count >= min(2, there_are[image]), "an image with one caption comes with that one"
    *full, last = batches
    assert all(size - 3 < len(batch) <= size for batch in full)
    images = image_indices[last]
    of_last_image = len(last) if len(set(images)) == 1 else int(np.argmax((images != images[-1])[::-1]))
    assert len(last) <= size or len(last) - of_last_image <= size


@given(image_indices=image_numbers(min_images=2), size=st.integers(11, 40), seed=SEEDS)
def test_neighbourhood_leaves_no_image_alone_where_there_is_room(image_indices: Indices, size: int, seed: int) -> None:
    for batch in SAMPLERS["neighbourhood"]().build_epoch_batches(image_indices, size, seed, 0):
        assert len(counts_of(image_indices, batch)) > 1, "else there would be no negatives"


@given(image_indices=image_numbers(), size=SIZES, seed=SEEDS)
def test_neighbourhood_added_is_shuffled_with_a_second_caption_on_top(image_indices: Indices, size: int, seed: int) -> None:
    there_are = counts_of(image_indices, np.arange(len(image_indices)))
    plain, added = (
        SAMPLERS[name]().build_epoch_batches(image_indices, size, seed, 0) for name in ("shuffled", "neighbourhood_added")
    )
    assert len(added) == len(plain)
    for before, batch in zip(plain, added, strict=True):
        assert batch[: len(before)].tolist() == before.tolist()
        alone = [image for image, count in counts_of(image_indices, before).items() if count == 1 and there_are[image] > 1]
        assert sorted(image_indices[batch[len(before) :]]) == sorted(alone), "one more for each image that was alone"
        assert len(set(batch.tolist())) == len(batch) <= 2 * size


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_an_epoch_depends_on_seed_and_epoch_alone(name: str) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in SAMPLERS[name]().build_epoch_batches(twice(12), 8, seed, epoch)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def partners(name: str, epochs: int) -> Counter[tuple[int, int]]:
    """How often two captions of image 0, which has four, are together in a batch of two captions of each image."""
    image_indices, together = twice(8, 4), Counter[tuple[int, int]]()
    for epoch in range(epochs):
        for batch in SAMPLERS[name]().build_epoch_batches(image_indices, 6, 5, epoch):
            own = sorted(batch[image_indices[batch] == 0].tolist())
            if len(own) == 2:
                together[own[0], own[1]] += 1
    return together


@pytest.mark.parametrize("name", ["neighbourhood", "neighbourhood_added"])
def test_all_captions_of_an_image_are_partners_equally_often(name: str) -> None:
    together = partners(name, 300)
    expected = together.total() / 6
    assert len(together) == 6
    assert sum((count - expected) ** 2 / expected for count in together.values()) < 21, "chi square of 5: once in a thousand"


def test_two_images_with_two_captions_each_are_the_smallest_batch() -> None:
    with pytest.raises(UserError, match="train.batch_size 3: neighbourhood sampling .* 4 pairs"):
        SAMPLERS["neighbourhood"]().batches(np.repeat(np.arange(9), 3), 3, np.random.default_rng(0))
