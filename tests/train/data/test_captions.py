from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vse.features.cache import open_cache
from vse.features.reader import FeatureReader
from vse.pipeline.dataset import Caption, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.vocabulary import PAD, Vocabulary
from vse.train.data.captions import CachedCaptions, Words

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captions(demo: Path) -> list[Caption]:
    return [caption for image in load_dataset_file(demo).split("train") for caption in image.captions]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_words_are_padded_behind_the_end(captions: list[Caption], data: st.DataObject) -> None:
    vocabulary = Vocabulary.build((caption.tokens for caption in captions), 9)
    numbers = np.asarray(data.draw(st.lists(st.integers(0, len(captions) - 1), min_size=1, max_size=9)))
    padded, lengths = Words(captions, vocabulary, CPU).of(numbers)
    encoded = [vocabulary.encode(captions[number].tokens) for number in numbers]
    assert lengths.tolist() == [len(words) for words in encoded]
    longest = max(map(len, encoded))
    assert padded.tolist() == [words + [PAD] * (longest - len(words)) for words in encoded]


def test_a_caption_of_nothing_is_a_start_and_an_end() -> None:
    vocabulary = Vocabulary.build([["a"]], 1)
    words = Words([Caption(0, 0, "", ()), Caption(1, 0, "a b", ("a", "b"))], vocabulary, CPU)
    padded, lengths = words.of(np.asarray([0, 1]))
    assert padded.tolist() == [[1, 2, 0, 0], [1, 4, 3, 2]]
    assert lengths.tolist() == [2, 4]


@pytest.mark.parametrize("memory_gb", [0.0, 1.0], ids=["mapped", "in memory"])
def test_cached_captions_are_the_rows_of_their_ids(memory_gb: float, tfidf: Path) -> None:
    cache = open_cache(tfidf)
    with h5py.File(cache.path) as file:
        rows = dict(zip(file["ids"][:].tolist(), file["features"][:].astype(np.float32), strict=True))
    ids = np.random.default_rng(0).permutation(cache.ids)[:20]
    found = CachedCaptions(FeatureReader(cache, 0), ids, CPU, memory_gb)
    numbers = np.asarray([19, 3, 3, 0])
    (vectors,) = found.of(numbers)
    assert torch.equal(vectors, torch.from_numpy(np.stack([rows[int(ids[number])] for number in numbers])))


def test_a_caption_without_features_is_named(tfidf: Path) -> None:
    with pytest.raises(UserError, match="the first is id 99999"):
        CachedCaptions(FeatureReader(open_cache(tfidf), 0), np.asarray([0, 99999]), CPU)
