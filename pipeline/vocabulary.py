"""The tokeniser, and the vocabulary that turns tokens into integer ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vse.pipeline.errors import UserError
from vse.pipeline.files import read_json, write_text

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
