from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.cli import main
from vse.pipeline.dataset.captions import TOKENISERS, nltk_words, tokenize, unicode_words
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

Edit = Callable[[Path, Callable[[Any], None]], Path]
HERE = [name for name in TOKENISERS if name != "nltk" or find_spec("nltk")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Eine weiße Katze, müde.", ["eine", "weiße", "katze", "müde"]),
        ("L'été, à Paris…", ["l", "été", "à", "paris"]),
        ("¿Dónde está el NIÑO?", ["dónde", "está", "el", "niño"]),
        ("Белая собака", ["белая", "собака"]),
        ("एक सफ़ेद कुत्ता", ["एक", "सफ़ेद", "कुत्ता"]),  # Python does not count vowel signs as letters
        ("می\u200cدود", ["می\u200cدود"]),
        ("白い犬", ["白", "い", "犬"]),
        ("teddy\u00adbär ❤\ufe0f \u200d", ["teddybär"]),
        ("snake_case 2½ m²", ["snake", "case", "2½", "m²"]),
        ("❤ …", []),
    ],
)
def test_words_of_every_script_stay_whole(text: str, words: list[str]) -> None:
    assert unicode_words(text) == [normalize("NFC", word) for word in words]


def test_an_accent_that_was_typed_by_itself_is_the_same_word() -> None:
    assert unicode_words("cafe\u0301") == unicode_words("café") == ["café"]


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_text_has_the_same_tokens_as_letters_and_digits(text: str) -> None:
    assert unicode_words(text) == tokenize(text)


@given(st.text())
def test_words_have_a_letter_or_digit_and_are_not_split_again(text: str) -> None:
    words = unicode_words(text)
    assert all(any(map(str.isalnum, word)) for word in words)
    assert unicode_words(" ".join(words)) == words


@pytest.mark.parametrize("name", HERE)
def test_lower_case_english_words_are_the_same_by_every_tokeniser(name: str) -> None:
    assert TOKENISERS[name]("Two dogs run on 3 beaches") == ["two", "dogs", "run", "on", "3", "beaches"]


def test_nltk_gives_the_published_tokens_or_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("nltk"):
        assert nltk_words("A man's T-shirt isn't red.") == ["a", "man", "'s", "t-shirt", "is", "n't", "red", "."]
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(UserError, match=r"the tokeniser 'nltk' needs the package nltk: pip install 'vse-pipeline\[nltk\]'"):
        nltk_words("a dog")


def without_tokens(content: Any) -> None:
    for image in content["images"]:
        for sentence in image["sentences"]:
            del sentence["tokens"]
            sentence.pop("phrases", None)
    content["images"][0]["sentences"][0]["raw"] = "Eine weiße Scheibe"


def test_a_data_set_names_the_tokeniser_of_its_captions(own_demo: Path, edit: Edit) -> None:
    plain = load_dataset_file(edit(own_demo, without_tokens))
    assert (plain.tokeniser, plain.images[0].captions[0].tokens) == ("letters_and_digits", ("eine", "wei", "e", "scheibe"))
    named = load_dataset_file(edit(own_demo, lambda content: content.update(tokeniser="unicode_words")))
    assert (named.tokeniser, named.images[0].captions[0].tokens) == ("unicode_words", ("eine", "weiße", "scheibe"))
    assert named.images[1].captions == plain.images[1].captions


def test_tokens_of_the_file_stay_whatever_tokeniser_it_names(own_demo: Path, edit: Edit) -> None:
    before = load_dataset_file(own_demo).images
    assert load_dataset_file(edit(own_demo, lambda content: content.update(tokeniser="unicode_words"))).images == before


@pytest.mark.parametrize("name", ["unicode_word", 3, None, ["nltk"]])
def test_an_unknown_tokeniser_is_one_line(own_demo: Path, edit: Edit, fails: Callable[..., str], name: object) -> None:
    line = fails(main, "check", edit(own_demo, lambda content: content.update(tokeniser=name)))
    assert f"{own_demo}: no tokeniser {name!r}" in line
    assert "known: letters_and_digits, nltk, unicode_words" in line


def test_a_preset_retokenises_the_captions_of_a_published_file(
    own_demo: Path, edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    folder = tmp_path / "presets" / "datasets"
    folder.mkdir(parents=True)
    monkeypatch.setenv("VSE_PRESETS", str(folder.parent))
    (folder / "mine.yaml").write_text("annotations: dataset.json\ntokeniser: unicode_words\n")
    arguments = ["prepare", "mine", "--source", str(own_demo.parent), "--out", str(tmp_path / "out")]
    assert "tokeniser unicode_words: caption 0 " in fails(main, *arguments)
    edit(own_demo, without_tokens)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    written = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert written["tokeniser"] == "unicode_words"
    assert written["images"][0]["sentences"][0]["tokens"] == ["eine", "weiße", "scheibe"]
