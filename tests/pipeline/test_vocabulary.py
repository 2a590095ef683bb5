from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.captions import END, START, UNKNOWN, Vocabulary, tokenize
from vse.pipeline.errors import UserError

WORDS = st.lists(st.lists(st.sampled_from(["dog", "cat", "a", "the", "<unk>", "élan"]), max_size=6), max_size=12)


def test_tokens_are_lower_case_runs_of_letters_and_digits() -> None:
    assert tokenize("A man, 2 dogs & a T-shirt.") == ["a", "man", "2", "dogs", "a", "t", "shirt"]


def test_words_are_sorted_by_count_then_alphabet_behind_the_special_tokens() -> None:
    captions = [["b", "a", "c"], ["b", "a"], ["b", "d"]]
    assert Vocabulary.build(captions, min_count=1).words == ("<pad>", "<start>", "<end>", "<unk>", "b", "a", "c", "d")


def test_a_rare_word_is_unknown() -> None:
    vocabulary = Vocabulary.build([["dog"] * 4, ["cat"] * 3])
    assert vocabulary.encode(["dog", "cat"]) == [START, 4, UNKNOWN, END]


@given(WORDS, st.integers(1, 3))
def test_every_kept_word_is_frequent_and_every_frequent_word_is_kept(captions: list[list[str]], min_count: int) -> None:
    vocabulary = Vocabulary.build(captions, min_count)
    flat = [word for tokens in captions for word in tokens]
    expected = {word for word in flat if flat.count(word) >= min_count} | {"<pad>", "<start>", "<end>", "<unk>"}
    assert set(vocabulary.words) == expected


def test_a_saved_vocabulary_reads_back(tmp_path: Path) -> None:
    vocabulary = Vocabulary.build([["élan", "dog"]], min_count=1)
    assert Vocabulary.load(vocabulary.save(tmp_path / "vocab.json")) == vocabulary


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('["dog"]')
    with pytest.raises(UserError, match="must start with <pad>"):
        Vocabulary.load(tmp_path / "vocab.json")
