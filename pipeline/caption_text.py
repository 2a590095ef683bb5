"""The same caption in two files: found again by its text, and a span of its words as a span of the other's tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate

from vse.pipeline.vocabulary import tokenize

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
