from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.dataset.captions import compact_text, match_captions, tokenize, transfer_spans

words = st.lists(st.text("ab1-'.", min_size=1, max_size=3), min_size=1, max_size=8)


def test_captions_are_matched_by_letters_whatever_their_order_case_and_hyphens() -> None:
    captions = [["a", "boy", "in", "a", "tshirt"], ["it", "s", "the", "men", "s"]]
    others = [["It", "'s", "the", "men", "'s", "."], ["A", "boy", "in", "a", "t-shirt", "."]]
    assert match_captions(captions, others) == {0: 1, 1: 0}


def test_each_caption_counts_once() -> None:
    assert match_captions([["a"], ["a"], ["a"]], [["A"], ["b"], ["a", "."]]) == {0: 0, 1: 2}
    assert match_captions([["a"], ["b"]], [["a"], ["a"]]) == {0: 0}


def test_the_most_similar_captions_of_another_spelling_are_matched() -> None:
    captions = [["a", "grey", "dog", "runs"], ["a", "grey", "dog", "ran", "away"], ["boys"]]
    others = [["a", "gray", "dog", "runs"], ["a", "gray", "dog", "ran", "away"], ["girls"]]
    assert match_captions(captions, others) == {}
    assert match_captions(captions, others, 0.7) == {0: 0, 1: 1}
    assert match_captions(captions, others, 0.78) == {1: 1}


def test_other_words_in_the_same_letters_are_not_similar_but_equal() -> None:
    assert match_captions([["go", "cart"]], [["go-cart"]], 0.9) == {0: 0}


@given(words)
def test_a_span_of_tokens_has_every_letter_of_a_span_of_words(written: list[str]) -> None:
    tokens = tokenize(" ".join(written))
    spans = [(i, j) for i in range(len(written)) for j in range(i + 1, len(written) + 1)]
    for (i, j), (start, stop) in zip(spans, transfer_spans(spans, written, tokens), strict=True):
        assert tokens[start:stop] == tokenize(" ".join(written[i:j]))


@given(words)
def test_tokens_may_end_inside_words(written: list[str]) -> None:
    whole = compact_text(written)
    tokens = [whole[i : i + 2] for i in range(0, len(whole), 2)]
    ends = [len(compact_text(written[:i])) for i in range(len(written) + 1)]
    spans = [(i, j) for i in range(len(written)) for j in range(i + 1, len(written) + 1)]
    for (i, j), (start, stop) in zip(spans, transfer_spans(spans, written, tokens), strict=True):
        touched = [k for k in range(len(tokens)) if {2 * k, 2 * k + len(tokens[k]) - 1} & set(range(ends[i], ends[j]))]
        assert list(range(start, stop)) == touched


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("a gray dog on a wall", [(0, 3), (4, 6)]),  # a word replaced
        ("a very grey dog on a wall", [(0, 4), (5, 7)]),  # one more, inside
        ("see a grey dog on a wall", [(1, 4), (5, 7)]),  # one more, before
        ("a dog on a wall", [(0, 2), (3, 5)]),  # one less
        ("a dark gray dog on a wall", [(0, 4), (5, 7)]),  # two for one
        ("a grey dog", [(0, 3), (0, 0)]),  # all of a phrase is missing
    ],
)
def test_a_span_of_a_corrected_caption_covers_its_words(tokens: str, expected: list[tuple[int, int]]) -> None:
    assert transfer_spans([(0, 3), (4, 6)], ["A", "grey", "dog", "on", "a", "wall", "."], tokens.split()) == expected
