from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.conftest import Fails, Patch, succeed
from vse.cli import data_main as main
from vse.pipeline.dataset import captions as texts
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

Edit = Callable[[Path, Callable[[Any], None]], Path]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Eine weiße Katze, müde.", ["eine", "weiße", "katze", "müde"]), ("L'été, à Paris…", ["l", "été", "à", "paris"]),
        ("¿Dónde está el NIÑO?", ["dónde", "está", "el", "niño"]), ("Белая собака", ["белая", "собака"]),
        ("एक सफ़ेद कुत्ता", ["एक", "सफ़ेद", "कुत्ता"]),  # Python does not count vowel signs as letters
        ("می\u200cدود", ["می\u200cدود"]), ("白い犬", ["白", "い", "犬"]), ("teddy\u00adbär ❤\ufe0f \u200d", ["teddybär"]),
        ("snake_case 2½ m²", ["snake", "case", "2½", "m²"]), ("❤ …", []), ("cafe\u0301", ["café"]),
    ],
)  # fmt: skip
def test_words_of_every_script_stay_whole(text: str, words: list[str]) -> None:
    assert texts.unicode_words(text) == [normalize("NFC", word) for word in words]


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_text_has_the_same_tokens_as_letters_and_digits(text: str) -> None:
    assert texts.unicode_words(text) == texts.ascii_words(text)


@given(st.text())
def test_words_have_a_letter_or_digit_and_are_not_split_again(text: str) -> None:
    words = texts.unicode_words(text)
    assert all(any(map(str.isalnum, word)) for word in words)
    assert texts.unicode_words(" ".join(words)) == words


@pytest.mark.parametrize("name", texts.TOKENISERS)
def test_lower_case_english_words_are_the_same_by_every_tokeniser(name: str) -> None:
    assert texts.TOKENISERS[name]("Two dogs run on 3 beaches") == ["two", "dogs", "run", "on", "3", "beaches"]


def test_nltk_gives_the_published_tokens_or_names_its_package(monkeypatch: Patch) -> None:
    assert texts.nltk_words("A man's T-shirt isn't red.") == ["a", "man", "'s", "t-shirt", "is", "n't", "red", "."]
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(UserError, match="the tokeniser 'nltk' needs the package nltk: pip install"):
        texts.nltk_words("a dog")


def without_tokens(content: Any) -> None:
    for image in content["images"]:
        for sentence in image["sentences"]:
            del sentence["tokens"]
            sentence.pop("phrases", None)
    content["images"][0]["sentences"][0]["raw"] = "Eine weiße Scheibe"


def test_a_data_set_names_the_tokeniser_of_its_captions_but_tokens_of_the_file_stay(own_json: Path, edit: Edit) -> None:
    before = load_dataset_file(own_json).images
    assert load_dataset_file(edit(own_json, lambda content: content.update(tokeniser="unicode_words"))).images == before
    edit(own_json, lambda content: content.pop("tokeniser"))
    plain = load_dataset_file(edit(own_json, without_tokens))
    assert (plain.tokeniser, plain.images[0].captions[0].tokens) == ("letters_and_digits", ("eine", "wei", "e", "scheibe"))
    named = load_dataset_file(edit(own_json, lambda content: content.update(tokeniser="unicode_words")))
    assert (named.tokeniser, named.images[0].captions[0].tokens) == ("unicode_words", ("eine", "weiße", "scheibe"))
    assert named.images[1].captions == plain.images[1].captions


@pytest.mark.parametrize("name", ["unicode_word", 3])
def test_an_unknown_tokeniser_is_one_line(own_json: Path, edit: Edit, fails: Fails, name: object) -> None:
    line = fails(main, "check", edit(own_json, lambda content: content.update(tokeniser=name)))
    assert f"{own_json}: no tokeniser {name!r}" in line
    assert "known: letters_and_digits, nltk, unicode_words" in line


def test_a_preset_retokenises_captions(own_demo: Path, edit: Edit, tmp_path: Path, monkeypatch: Patch, fails: Fails) -> None:
    folder = tmp_path / "presets" / "datasets"
    folder.mkdir(parents=True)
    monkeypatch.setenv("VSE_PRESETS", str(folder.parent))
    (folder / "mine.yaml").write_text("annotations: dataset.json\ntokeniser: unicode_words\n")
    arguments = ["prepare", "mine", "--source", own_demo.parent, "--out", tmp_path / "out"]
    assert "tokeniser unicode_words: caption 0 " in fails(main, *arguments)
    edit(own_demo, without_tokens)
    succeed(main, *arguments)
    written = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert written["tokeniser"] == "unicode_words"
    assert written["images"][0]["sentences"][0]["tokens"] == ["eine", "weiße", "scheibe"]


WORDS = st.lists(st.lists(st.sampled_from(["dog", "cat", "a", "the", "<unk>", "élan"]), max_size=6), max_size=12)


def test_words_are_sorted_by_count_then_alphabet_behind_the_special_tokens() -> None:
    captions = [["b", "a", "c"], ["b", "a"], ["b", "d"]]
    assert texts.Vocabulary.build(captions, min_count=1).words == ("<pad>", "<start>", "<end>", "<unk>", "b", "a", "c", "d")


def test_a_rare_word_is_unknown() -> None:
    vocabulary = texts.Vocabulary.build([["dog"] * 4, ["cat"] * 3])
    assert vocabulary.encode(["dog", "cat"]) == [texts.START_ID, 4, texts.UNKNOWN_ID, texts.END_ID]


@given(WORDS, st.integers(1, 3))
def test_every_kept_word_is_frequent_and_every_frequent_word_is_kept(captions: list[list[str]], min_count: int) -> None:
    vocabulary = texts.Vocabulary.build(captions, min_count)
    flat = [word for tokens in captions for word in tokens]
    expected = {word for word in flat if flat.count(word) >= min_count} | {"<pad>", "<start>", "<end>", "<unk>"}
    assert set(vocabulary.words) == expected


def test_a_saved_vocabulary_reads_back_and_another_file_is_refused(tmp_path: Path) -> None:
    vocabulary = texts.Vocabulary.build([["élan", "dog"]], min_count=1)
    assert texts.Vocabulary.load(vocabulary.save(tmp_path / "vocab.json")) == vocabulary
    (tmp_path / "vocab.json").write_text('["dog"]')
    with pytest.raises(UserError, match="must start with <pad>"):
        texts.Vocabulary.load(tmp_path / "vocab.json")


WRITTEN = st.lists(st.text("ab1-'.", min_size=1, max_size=3), min_size=1, max_size=8)


def test_captions_are_matched_by_letters_whatever_their_order_case_and_hyphens() -> None:
    captions = [["a", "boy", "in", "a", "tshirt"], ["it", "s", "the", "men", "s"]]
    others = [["It", "'s", "the", "men", "'s", "."], ["A", "boy", "in", "a", "t-shirt", "."]]
    assert texts.match_captions(captions, others) == {0: 1, 1: 0}


def test_each_caption_counts_once() -> None:
    assert texts.match_captions([["a"], ["a"], ["a"]], [["A"], ["b"], ["a", "."]]) == {0: 0, 1: 2}
    assert texts.match_captions([["a"], ["b"]], [["a"], ["a"]]) == {0: 0}


def test_the_most_similar_captions_of_another_spelling_are_matched() -> None:
    captions = [["a", "grey", "dog", "runs"], ["a", "grey", "dog", "ran", "away"], ["boys"]]
    others = [["a", "gray", "dog", "runs"], ["a", "gray", "dog", "ran", "away"], ["girls"]]
    assert texts.match_captions(captions, others) == {}
    assert texts.match_captions(captions, others, 0.7) == {0: 0, 1: 1}
    assert texts.match_captions(captions, others, 0.78) == {1: 1}


def test_other_words_in_the_same_letters_are_not_similar_but_equal() -> None:
    assert texts.match_captions([["go", "cart"]], [["go-cart"]], 0.9) == {0: 0}


@given(WRITTEN)
def test_a_span_of_tokens_has_every_letter_of_a_span_of_words(written: list[str]) -> None:
    tokens = texts.ascii_words(" ".join(written))
    spans = [(i, j) for i in range(len(written)) for j in range(i + 1, len(written) + 1)]
    for (i, j), (start, stop) in zip(spans, texts.transfer_spans(spans, written, tokens), strict=True):
        assert tokens[start:stop] == texts.ascii_words(" ".join(written[i:j]))


@given(WRITTEN)
def test_tokens_may_end_inside_words(written: list[str]) -> None:
    whole = texts.join_letters_and_digits(written)
    tokens = [whole[i : i + 2] for i in range(0, len(whole), 2)]
    ends = [len(texts.join_letters_and_digits(written[:i])) for i in range(len(written) + 1)]
    spans = [(i, j) for i in range(len(written)) for j in range(i + 1, len(written) + 1)]
    for (i, j), (start, stop) in zip(spans, texts.transfer_spans(spans, written, tokens), strict=True):
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
    assert texts.transfer_spans([(0, 3), (4, 6)], ["A", "grey", "dog", "on", "a", "wall", "."], tokens.split()) == expected
