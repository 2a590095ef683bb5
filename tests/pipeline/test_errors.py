"""Error messages have at most a few lines, even if there are many valid names, and hold nothing that a terminal obeys."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vse.pipeline.errors import did_you_mean, escape_csv_cell, to_printable_line


def test_few_names_are_all_listed() -> None:
    assert did_you_mean("ordr", ["order", "cosine"]) == " (did you mean 'order'? known: cosine, order)"
    assert did_you_mean("qqq", ["order", "cosine"]) == " (known: cosine, order)"


def test_of_many_names_the_nearest_five_are() -> None:
    names = [f"layer{k:03d}.conv" for k in range(500)]
    end = did_you_mean("layer123.cnv", names)
    assert end.startswith(" (did you mean 'layer123.conv'? nearest of 500: layer123.conv, ")
    assert end.count("layer") == 6
    assert did_you_mean("?", names).count("layer") == 5, "there is always something to begin with"


@given(text=st.text() | st.text(alphabet="\x1b[]0123456789;mHJK\x07\x9b\\ \t\r\nab"))
def test_a_terminal_gets_one_line_and_nothing_to_obey(text: str) -> None:
    line = to_printable_line(text)
    assert len(line.splitlines()) <= 1
    assert line.encode().decode() == line
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in line)


@given(text=st.lists(st.text(alphabet="abcäß犬🐕.,'-", min_size=1), min_size=1).map(" ".join))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert to_printable_line(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m dog", "ared dog"), ("a \x1b]0;another title\x07dog", "a dog"),
        ("a \x1b]8;;http://x\x1b\\dog", "a dog"), ("a\x1b]never closed", "a"), ("a \x9b2Jdog", "a dog"),
        ("a\tdog\nruns\r\naway\x0b\x0c\x85\u2028\u2029now", "a dog runs away now"), ("right \u202eot tfel", "right ot tfel"),
        ("back\x08space\x7f", "backspace"), ("\ud800 alone", "\ufffd alone"), ("zero\x00byte", "zerobyte"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)  # fmt: skip
def test_what_would_be_obeyed_goes(text: str, shown: str) -> None:
    assert to_printable_line(text) == shown


@pytest.mark.parametrize("value", ["a - b", "x=1", "", -1.5, None, 3, True])
def test_other_cells_stay_as_they_are_but_a_carriage_return_ends_no_row(value: object) -> None:
    assert escape_csv_cell(value) == value
    assert (escape_csv_cell("\r=1"), escape_csv_cell("a\r\nb\rc")) == ("'\n=1", "a\nb\nc")
