from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.features.settings.captions import STOP_WORDS, phrase_words


@pytest.mark.parametrize(
    ("phrase", "kept", "content"),
    [
        ("A red hat", "a red hat", "red hat"),
        ("two of the dogs", "two of the dogs", "two dogs"),
        ("her own front yard", "her own front yard", "front yard"),
        ("Them", "them", "them"),
        ("each other", "each other", "each other"),
    ],
)
def test_a_phrase_is_read_in_lower_case_and_without_stop_words_if_it_has_others(phrase: str, kept: str, content: str) -> None:
    assert " ".join(phrase_words(phrase.split())) == kept
    assert " ".join(phrase_words(phrase.split(), drop_stop_words=True)) == content


@given(st.lists(st.sampled_from(["a", "The", "of", "man", "Hat", "two"]), min_size=1))
def test_a_phrase_never_becomes_empty_and_its_words_keep_their_order(tokens: list[str]) -> None:
    words = phrase_words(tokens, drop_stop_words=True)
    lower = [token.lower() for token in tokens]
    named = [word for word in lower if word not in STOP_WORDS]
    assert list(words) == (named or lower)
