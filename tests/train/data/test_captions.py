from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.captions import PAD, Vocabulary
from vse.pipeline.dataset.dataset import Caption, load_dataset_file
from vse.train.data.captions import WordIndices

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captions(demo: Path) -> list[Caption]:
    return [caption for image in load_dataset_file(demo).split("train") for caption in image.captions]


@given(data=st.data())
def test_words_are_padded_after_the_end(captions: list[Caption], data: st.DataObject) -> None:
    vocabulary = Vocabulary.build((caption.tokens for caption in captions), 9)
    numbers = np.asarray(data.draw(st.lists(st.integers(0, len(captions) - 1), min_size=1, max_size=9)))
    padded, lengths = WordIndices(captions, vocabulary, CPU).read(numbers)
    encoded = [vocabulary.encode(captions[number].tokens) for number in numbers]
    assert lengths.tolist() == [len(words) for words in encoded]
    longest = max(map(len, encoded))
    assert padded.tolist() == [words + [PAD] * (longest - len(words)) for words in encoded]


def test_a_caption_of_nothing_is_a_start_and_an_end() -> None:
    vocabulary = Vocabulary.build([["a"]], 1)
    words = WordIndices([Caption(0, 0, "", ()), Caption(1, 0, "a b", ("a", "b"))], vocabulary, CPU)
    padded, lengths = words.read(np.asarray([0, 1]))
    assert padded.tolist() == [[1, 2, 0, 0], [1, 4, 3, 2]]
    assert lengths.tolist() == [2, 4]
