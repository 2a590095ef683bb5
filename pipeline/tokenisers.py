"""How the text of a caption is cut into words: the tokenisers that a data set may name.

Those that are given in a file of the Karpathy splits stay as they are; a tokeniser cuts captions without tokens, and new text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache

from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.extra_packages import extra_package
from vse.pipeline.vocabulary import tokenize

UNNAMED = "letters_and_digits"  # the tokeniser of a data set that names none
NEW = "unicode_words"  # and of one that is imported
_JOINERS = "\u200c\u200d"  # stand inside words of Persian and of Indian scripts
_UNSPACED = re.compile("[\u3005-\u3007\u3041-\u3096\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def unicode_words(text: str) -> list[str]:
    """Lower-case runs of the letters, digits and accents of any script.

    Of ASCII text they are the same as those of ``letters_and_digits``. *é* is one character however it was typed (NFC), and
    soft hyphens, which are not printed, cut nothing. Chinese characters and hiragana, which have no blanks between words, are
    a word each.
    """
    lower = unicodedata.normalize("NFC", text.lower())
    if lower.isascii():
        return tokenize(lower)
    spread = _UNSPACED.sub(r" \g<0> ", lower)
    words = "".join(map(_kept, spread)).split()
    return [word for word in (word.strip(_JOINERS) for word in words) if any(map(str.isalnum, word))]


@cache
def _kept(character: str) -> str:
    """The character itself if it stands inside words, nothing in place of a soft hyphen, a blank in place of any other."""
    kind = unicodedata.category(character)[0]
    return character if kind in "LMN" or character in _JOINERS else "" if character == "\u00ad" else " "


def nltk_words(text: str) -> list[str]:
    """What NLTK's ``word_tokenize`` cuts the lower-cased text into, as for the vocabularies of VSE++ and SCAN.

    Punctuation counts as words. A caption is taken for one sentence, so no data of NLTK is needed; of 40,070 published
    captions the vocabularies' own sentence splitting cuts 4 otherwise. :class:`UserError` if NLTK is not installed.
    """
    library = extra_package("nltk.tokenize", "the tokeniser 'nltk'", "nltk")
    words: list[str] = library.NLTKWordTokenizer().tokenize(text.lower())
    return words


TOKENISERS: dict[str, Callable[[str], list[str]]] = {
    "letters_and_digits": tokenize,
    "unicode_words": unicode_words,
    "nltk": nltk_words,
}


def tokeniser_named(name: object, where: object) -> Callable[[str], list[str]]:
    """The tokeniser that ``where`` names; :class:`UserError` if there is none of that name."""
    if not isinstance(name, str) or name not in TOKENISERS:
        raise UserError(f"{where}: no tokeniser {name!r}{did_you_mean(str(name), TOKENISERS)}")
    return TOKENISERS[name]
