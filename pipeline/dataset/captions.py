"""Split captions into tokens, build vocabularies, and match the captions of two files.

A data set names a tokeniser of ``TOKENISERS``. The tokeniser splits queries, and captions that have no tokens in
``dataset.json``. Tokens in ``dataset.json`` are used unchanged.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path

from vse.pipeline.errors import UserError, did_you_mean, import_extra
from vse.pipeline.files.writing import read_json, write_text

DEFAULT_TOKENISER = "letters_and_digits"  # the tokeniser of a data set that names none
IMPORT_TOKENISER = "unicode_words"  # the tokeniser of an import without --tokeniser
_ASCII_WORD_PATTERN = re.compile(r"[a-z0-9]+")
_JOINER_CHARACTERS = "\u200c\u200d"  # characters inside words of Persian and of Indian scripts
_UNSPACED_CHARACTER_PATTERN = re.compile(
    "[\u3005-\u3007\u3041-\u3096\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def ascii_words(text: str) -> list[str]:
    """Return the lower-case runs of ASCII letters and digits, as in the tokens of the Karpathy splits."""
    return _ASCII_WORD_PATTERN.findall(text.lower())


def unicode_words(text: str) -> list[str]:
    """Return the lower-case runs of letters, digits and accents of any script.

    A letter and its accent become one character (NFC). Soft hyphens do not split a word. Each Chinese character and each
    hiragana is a token, because these scripts have no blanks between words.
    """
    if text.isascii():
        return ascii_words(text)
    lower = unicodedata.normalize("NFC", text.lower())
    if lower.isascii():
        return ascii_words(lower)
    spread = _UNSPACED_CHARACTER_PATTERN.sub(r" \g<0> ", lower)
    words = "".join(map(_replace_non_word_character, spread)).split()
    return [word for word in (word.strip(_JOINER_CHARACTERS) for word in words) if any(map(str.isalnum, word))]


@cache
def _replace_non_word_character(character: str) -> str:
    """Return a blank for a character that cannot be part of a word, an empty text for a soft hyphen, else the character."""
    kind = unicodedata.category(character)[0]
    return character if kind in "LMN" or character in _JOINER_CHARACTERS else "" if character == "\u00ad" else " "


def nltk_words(text: str) -> list[str]:
    """Return the tokens into which NLTK splits the lower-cased text, as in the vocabularies of VSE++ and SCAN.

    Punctuation marks are tokens. The text counts as one sentence. The published vocabularies split captions into sentences
    first. This changes the tokens of 4 of 40,070 published captions. Raises UserError if NLTK is not installed.
    """
    library = import_extra("nltk.tokenize", "the tokeniser 'nltk'", "nltk")
    words: list[str] = library.NLTKWordTokenizer().tokenize(text.lower())
    return words


TOKENISERS: dict[str, Callable[[str], list[str]]] = {
    "letters_and_digits": ascii_words,
    "unicode_words": unicode_words,
    "nltk": nltk_words,
}


def find_tokeniser(name: object, where: object) -> Callable[[str], list[str]]:
    """Return the tokeniser called ``name``. Raises UserError, whose message begins with ``where``, if ``name`` is unknown."""
    if not isinstance(name, str) or name not in TOKENISERS:
        raise UserError(f"{where}: no tokeniser {name!r}{did_you_mean(str(name), TOKENISERS)}")
    return TOKENISERS[name]


SPECIAL_TOKENS = ("<pad>", "<start>", "<end>", "<unk>")
PAD_ID, START_ID, END_ID, UNKNOWN_ID = range(4)


@dataclass(frozen=True)
class Vocabulary:
    """The words that a model knows. The id of a word is the index in ``words``.

    The first four words are ``<pad> <start> <end> <unk>``.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS:
            raise UserError(f"a vocabulary must start with {' '.join(SPECIAL_TOKENS)}, not with {' '.join(self.words[:4])}")
        if len(set(self.words)) != len(self.words):
            duplicate = next(word for word, count in Counter(self.words).items() if count > 1)
            raise UserError(f"duplicate word {duplicate!r} in the vocabulary")

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], min_count: int = 4) -> Vocabulary:
        """Build the vocabulary of the words that occur at least ``min_count`` times: frequent words first, ties by alphabet.

        Callers pass the training captions only. The published code of the papers counted the test captions, too.
        """
        return cls.from_counts(Counter(word for tokens in captions for word in tokens), min_count)

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], min_count: int) -> Vocabulary:
        """Build the vocabulary of the words with a count of at least ``min_count``: frequent words first, ties by alphabet."""
        frequent = [word for word, count in counts.items() if count >= min_count and word not in SPECIAL_TOKENS]
        return cls(SPECIAL_TOKENS + tuple(sorted(frequent, key=lambda word: (-counts[word], word))))

    @cached_property
    def _id_by_word(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """Return the ids of ``<start>``, of the tokens and of ``<end>``. An unknown word has the id of ``<unk>``."""
        return [START_ID, *(self._id_by_word.get(word, UNKNOWN_ID) for word in tokens), END_ID]

    def save(self, path: Path) -> Path:
        """Write the words as a JSON list."""
        return write_text(path, json.dumps(self.words, ensure_ascii=False, indent=0) + "\n")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a file that :meth:`save` wrote."""
        return cls.from_json(path, read_json(path))

    @classmethod
    def from_json(cls, path: Path, words: object) -> Vocabulary:
        """Return the vocabulary of ``words``, the content of the JSON file ``path``.

        Raises UserError if ``words`` is not a list of texts that begins with the special words, or if a word occurs twice.
        """
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path}: a vocabulary must be a JSON list of words")
        return cls(tuple(words))


_Words = Sequence[str]


def join_letters_and_digits(words: _Words) -> str:
    """Return the ASCII letters and digits of a caption in lower case, without blanks."""
    return "".join(ascii_words(" ".join(words)))


def match_captions(captions: Sequence[_Words], others: Sequence[_Words], min_similarity: float = 1.0) -> dict[int, int]:
    """Match the captions of one file with the captions of another file by their text.

    A caption is a list of words. Returns a dictionary from indices of ``captions`` to indices of ``others``. Each caption is
    matched once at most.

    Captions with the same letters and digits are matched first. The remaining captions are matched in the order of decreasing
    similarity: 2 x the number of equal tokens / the sum of the numbers of tokens. Pairs below ``min_similarity`` are not
    matched.
    """
    by_text: dict[str, list[int]] = {}
    for index, other in enumerate(others):
        by_text.setdefault(join_letters_and_digits(other), []).append(index)
    pairs = {k: same.pop(0) for k, caption in enumerate(captions) if (same := by_text.get(join_letters_and_digits(caption)))}
    rest = [index for same in by_text.values() for index in same]
    tokens, other_tokens = ([ascii_words(" ".join(words)) for words in texts] for texts in (captions, others))
    similar = [
        (-SequenceMatcher(None, tokens[index], other_tokens[other], autojunk=False).ratio(), index, other)
        for index in range(len(captions))
        if index not in pairs
        for other in rest
    ]
    for difference, index, other_index in sorted(similar):
        if min_similarity <= -difference < 1 and index not in pairs and other_index not in pairs.values():
            pairs[index] = other_index
    return pairs


def transfer_spans(spans: Sequence[tuple[int, int]], words: _Words, tokens: _Words) -> list[tuple[int, int]]:
    """Convert spans (start, stop) of ``words`` to spans of ``tokens``, the tokens of the same or a similar caption.

    ``stop`` is exclusive. A new span holds every token that has a letter or digit of the old span. Without such tokens, the
    new span is (0, 0).
    """
    plain = ascii_words(" ".join(words))
    plain_spans = [_convert_span(span, words, plain) for span in spans]
    if "".join(plain) == join_letters_and_digits(tokens):
        return [_convert_span(span, words, tokens) for span in spans]
    counterparts = _align_words(plain, [join_letters_and_digits([token]) for token in tokens])
    transferred = []
    for start, stop in plain_spans:
        filled = [part for part in counterparts[start:stop] if part[0] < part[1]]
        transferred.append((filled[0][0], filled[-1][1]) if filled else (0, 0))
    return transferred


def _convert_span(span: tuple[int, int], words: _Words, tokens: _Words) -> tuple[int, int]:
    """Convert a span of ``words`` to a span of ``tokens``. Both lists must consist of the same letters and digits."""
    ends = _count_letters_before_ends(words)
    begin, end = ends[span[0]], ends[span[1]]
    if begin == end:
        return 0, 0
    ends = _count_letters_before_ends(tokens)
    return bisect_right(ends, begin) - 1, bisect_left(ends, end)


def _count_letters_before_ends(words: _Words) -> list[int]:
    """Return 0, followed by the number of letters and digits from the first word to the end of each word."""
    return list(accumulate((len(join_letters_and_digits([word])) for word in words), initial=0))


def _align_words(words: _Words, tokens: _Words) -> list[tuple[int, int]]:
    """Return, for each word, the span (start, stop) in ``tokens`` that corresponds to the word. The span may be empty."""
    counterparts: list[tuple[int, int]] = []
    for _, i, i_end, j, j_end in SequenceMatcher(None, words, tokens, autojunk=False).get_opcodes():
        one_by_one = i_end - i == j_end - j
        counterparts += [(j + k, j + k + 1) if one_by_one else (j, j_end) for k in range(i_end - i)]
    return counterparts
