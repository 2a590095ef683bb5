"""The same caption in two files: found again by its text, and a span of its words as a span of the other's tokens.

The tokeniser, and the vocabulary that turns tokens into integer ids.

How the text of a caption is cut into words: the tokenisers that a data set may name.

Those that are given in a file of the Karpathy splits stay as they are; a tokeniser cuts captions without tokens, and new text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path

from vse.pipeline.errors import UserError, did_you_mean, import_extra
from vse.pipeline.files.writing import read_json, write_text

SPECIAL_TOKENS = ("<pad>", "<start>", "<end>", "<unk>")
PAD, START, END, UNKNOWN = range(4)
_TOKEN = re.compile(r"[a-z0-9]+")


def tokenize(text: str) -> list[str]:
    """Lower-case runs of letters and digits, as the tokens of the Karpathy splits were made."""
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """The words of a model, each at the index that is its id; the first four are ``<pad> <start> <end> <unk>``."""

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS:
            raise UserError(f"a vocabulary must start with {' '.join(SPECIAL_TOKENS)}, not with {' '.join(self.words[:4])}")
        if len(set(self.words)) != len(self.words):
            duplicate = next(word for word, count in Counter(self.words).items() if count > 1)
            raise UserError(f"duplicate word {duplicate!r} in the vocabulary")

    @classmethod
    def build(cls, captions: Iterable[Sequence[str]], min_count: int = 4) -> Vocabulary:
        """Keep words that occur ``min_count`` times or more, ordered by (-count, word).

        Pass the training captions alone; the published code counted test captions too.
        """
        counts = Counter(word for tokens in captions for word in tokens)
        kept = [word for word, count in counts.items() if count >= min_count and word not in SPECIAL_TOKENS]
        return cls(SPECIAL_TOKENS + tuple(sorted(kept, key=lambda word: (-counts[word], word))))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, tokens: Sequence[str]) -> list[int]:
        """Ids of ``<start> tokens <end>``; an unknown word is ``<unk>``."""
        return [START, *(self._ids.get(word, UNKNOWN) for word in tokens), END]

    def save(self, path: Path) -> Path:
        """Write the words as a JSON list."""
        return write_text(path, json.dumps(self.words, ensure_ascii=False, indent=0) + "\n")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what :meth:`save` wrote."""
        return cls.of_json(path, read_json(path))

    @classmethod
    def of_json(cls, path: Path, words: object) -> Vocabulary:
        """The vocabulary of what was read from ``path``."""
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path}: a vocabulary must be a JSON list of words")
        return cls(tuple(words))


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
    library = import_extra("nltk.tokenize", "the tokeniser 'nltk'", "nltk")
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


_Words = Sequence[str]


def letters(words: _Words) -> str:
    """The letters and digits of a caption, in lower case, without anything between them."""
    return "".join(tokenize(" ".join(words)))


def matched(captions: Sequence[_Words], others: Sequence[_Words], least: float = 1.0) -> dict[int, int]:
    """For each of ``captions``, by its place, the place of the one of ``others`` that has its text; each counts once.

    First those are taken that have the same letters and digits, in whatever case and however cut into words. What is left are
    captions without a counterpart, or whose spelling was corrected: of these the most similar pairs are taken, down to a share
    ``least`` of equal tokens, 2 x equal / (tokens of both); 1 takes none. A caption without a counterpart is missing.
    """
    by_text: dict[str, list[int]] = {}
    for place, other in enumerate(others):
        by_text.setdefault(letters(other), []).append(place)
    pairs = {place: waiting.pop(0) for place, caption in enumerate(captions) if (waiting := by_text.get(letters(caption)))}
    rest = [place for waiting in by_text.values() for place in waiting]
    similar = [
        (-_similarity(caption, others[other]), place, other)
        for place, caption in enumerate(captions)
        if place not in pairs
        for other in rest
    ]
    for difference, place, waiting_at in sorted(similar):
        if least <= -difference < 1 and place not in pairs and waiting_at not in pairs.values():
            pairs[place] = waiting_at
    return pairs


def moved_spans(spans: Sequence[tuple[int, int]], words: _Words, tokens: _Words) -> list[tuple[int, int]]:
    """Spans (start, stop) of ``words`` as spans of ``tokens``, which are the same caption or one much like it.

    A span holds every token that has a letter of it; it is empty, (0, 0), if there is none.
    """
    cut = tokenize(" ".join(words))
    exact = [_same_letters(span, words, cut) for span in spans]
    if "".join(cut) == letters(tokens):
        return [_same_letters(span, words, tokens) for span in spans]
    places = _aligned(cut, [letters([token]) for token in tokens])
    moved = []
    for start, stop in exact:
        kept = [place for place in places[start:stop] if place[0] < place[1]]
        moved.append((kept[0][0], kept[-1][1]) if kept else (0, 0))
    return moved


def _same_letters(span: tuple[int, int], words: _Words, tokens: _Words) -> tuple[int, int]:
    """A span of words as one of tokens that have the same letters."""
    ends = _ends(words)
    begin, end = ends[span[0]], ends[span[1]]
    if begin == end:
        return 0, 0
    ends = _ends(tokens)
    return bisect_right(ends, begin) - 1, bisect_left(ends, end)


def _ends(words: _Words) -> list[int]:
    """Where among a caption's letters and digits each word ends, after a 0 for where the first one begins."""
    return list(accumulate((len(letters([word])) for word in words), initial=0))


def _aligned(words: _Words, tokens: _Words) -> list[tuple[int, int]]:
    """The tokens (start, stop) that stand where each word stood: itself, what replaces it, or none."""
    places: list[tuple[int, int]] = []
    for _, i, i_end, j, j_end in SequenceMatcher(None, words, tokens, autojunk=False).get_opcodes():
        one_by_one = i_end - i == j_end - j
        places += [(j + k, j + k + 1) if one_by_one else (j, j_end) for k in range(i_end - i)]
    return places


def _similarity(words: _Words, others: _Words) -> float:
    """The share of tokens that two captions have in common, in their order."""
    return SequenceMatcher(None, tokenize(" ".join(words)), tokenize(" ".join(others)), autojunk=False).ratio()
