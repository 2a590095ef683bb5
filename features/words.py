"""Word vectors: read from a word2vec or GloVe file, or trained on captions."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from gensim.models import KeyedVectors, Word2Vec
from numpy.typing import NDArray

from vse.pipeline.errors import UserError

Words = Sequence[str]


@dataclass(frozen=True)
class WordVectors:
    """Distinct ``words`` and their ``vectors`` (n_words, dim) float32."""

    words: tuple[str, ...]
    vectors: NDArray[np.float32]

    @cached_property
    def rows(self) -> dict[str, int]:
        """Row of each word."""
        return {word: row for row, word in enumerate(self.words)}

    def encode(self, caption: Words) -> list[int]:
        """Rows of the words of a caption that are known, in order."""
        return [self.rows[word] for word in caption if word in self.rows]

    def only(self, wanted: Iterable[str], first: int) -> WordVectors:
        """The ``first`` words and those ``wanted``, in the same order."""
        others = set(wanted)
        kept = [row for row, word in enumerate(self.words) if row < first or word in others]
        return WordVectors(tuple(self.words[row] for row in kept), self.vectors[kept])


def read_words(path: Path) -> WordVectors:
    """Word vectors of a word2vec file (binary if its name has ``.bin``, else text) or of a GloVe text file; also gzipped."""
    if not path.is_file():
        raise UserError(f"{path}: no such file of word vectors")
    binary = ".bin" in path.suffixes
    try:
        glove = not binary and not _has_header(path)
        found = KeyedVectors.load_word2vec_format(str(path), binary=binary, no_header=glove, unicode_errors="replace")
    except (OSError, EOFError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a word2vec or GloVe file ({error})") from None
    vectors = np.asarray(found.vectors, np.float32)
    if not len(vectors) or not np.isfinite(vectors).all():
        raise UserError(f"{path}: holds no word vectors, or some that are not finite")
    return WordVectors(tuple(found.index_to_key), vectors)


def train_words(captions: Sequence[Words], dim: int, epochs: int, min_count: int, seed: int) -> WordVectors:
    """Skip-gram vectors (Mikolov et al., 2013) of the words of ``captions``, on one core, so that they can be repeated."""
    model = Word2Vec(
        [list(caption) for caption in captions],
        vector_size=dim,
        epochs=epochs,
        min_count=min_count,
        seed=seed,
        sg=1,
        workers=1,
        hashfxn=lambda word: zlib.crc32(str(word).encode()),
    )
    return WordVectors(tuple(model.wv.index_to_key), np.asarray(model.wv.vectors, np.float32))


def _has_header(path: Path) -> bool:
    """Whether a text file begins with two numbers, as word2vec's do; GloVe's begin with a word."""
    from smart_open import open as open_any  # what gensim reads with: plain or compressed

    with open_any(str(path), "rb") as stream:
        fields = stream.readline().split()
    return len(fields) == 2 and all(field.isdigit() for field in fields)
