"""Word vectors, from a file or trained on captions, and the encoders ``tfidf`` and ``mean_vector``."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from vse.features.settings.base import dictionary_path
from vse.features.settings.captions import (
    CaptionCorpus,
    CaptionEncoder,
    MeanVectorConfig,
    TfidfConfig,
    TokenLists,
    WordSettings,
)
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import check_decoded_gzip_xz_bz2_size, open_decoded_stream

log = logging.getLogger(__name__)


def words_to_tensor(words: Sequence[str]) -> Tensor:
    """Return words as a uint8 tensor of their UTF-8 bytes, separated by line feeds."""
    import torch

    return torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)


def tensor_to_words(tensor: Tensor) -> list[str]:
    """Return the words from which :func:`words_to_tensor` built the tensor."""
    return bytes(tensor.numpy()).decode().split("\n")


@dataclass(frozen=True)
class WordVectors:
    """Distinct words and their vectors (n_words, dim) float32."""

    words: tuple[str, ...]
    vectors: NDArray[np.float32]

    @cached_property
    def index_by_word(self) -> dict[str, int]:
        return {word: row for row, word in enumerate(self.words)}

    def find_word_rows(self, captions: TokenLists) -> tuple[Tensor, Tensor]:
        """Return each known word's row in the table, caption by caption, and the number (n,) of known words per caption."""
        found = [[self.index_by_word[word] for word in caption if word in self.index_by_word] for caption in captions]
        lengths = torch.tensor([len(indices) for indices in found], dtype=torch.int64)
        return torch.tensor([index for indices in found for index in indices], dtype=torch.int64), lengths

    def tensors(self) -> dict[str, Tensor]:
        return {"words": words_to_tensor(self.words), "vectors": torch.from_numpy(self.vectors)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> WordVectors:
        """Build the word vectors from the result of :meth:`tensors`."""
        return cls(tuple(tensor_to_words(tensors["words"])), tensors["vectors"].numpy())

    def select_words(self, extra_words: Iterable[str], n_first: int) -> WordVectors:
        """Return the vectors of the first ``n_first`` words and of ``extra_words``, in the order of the table."""
        extra_words = set(extra_words)
        rows = [row for row, word in enumerate(self.words) if row < n_first or word in extra_words]
        return WordVectors(tuple(self.words[row] for row in rows), self.vectors[rows])


def read_word_vectors(path: Path) -> WordVectors:
    """Read a file of word vectors, plain or gzipped: GloVe, or word2vec (binary if the file name has ``.bin``, else text).

    The words of a ``.npy`` table, such as Skip-Thought's, are the lines of ``dictionary.txt`` next to it. Raises UserError if
    the file is missing or has another format.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file of word vectors")
    dictionary = dictionary_path(path)
    try:
        if dictionary is not None:
            vectors = _read_npy_table(path, dictionary)
        else:
            vectors = _read_word2vec_binary(path) if ".bin" in path.suffixes else _read_text_format(path)
    except UserError:
        raise
    except Exception as error:  # gensim and gzip raise many classes of errors for a wrong file
        raise UserError(f"{path}: not a word2vec or GloVe file or a table ({error})") from None
    if not vectors.vectors.size or not np.isfinite(vectors.vectors).all():
        raise UserError(f"{path}: holds no word vectors, or some that are not finite")
    return vectors


def train_word_vectors(captions: TokenLists, dim: int, epochs: int, min_count: int, seed: int) -> WordVectors:
    """Train skip-gram vectors (Mikolov et al., 2013) of the words in ``captions``.

    The training uses one core, so that the same seed gives the same vectors.
    """
    from gensim.models import Word2Vec

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


def prepare_word_vectors(
    corpus: CaptionCorpus, config: WordSettings, word_file: Path | None, n_sampled: int
) -> tuple[WordVectors, WordVectors]:
    """Return the word vectors that the encoder keeps, and a sample of at most ``n_sampled`` word vectors for its fit.

    The vectors are read from ``word_file`` or, without a file, trained on the training captions. The encoder keeps the words
    of the data set and the first ``config.keep`` words of the file. Raises UserError if no word of the data set has a vector.
    """
    if word_file is None:
        log.info("training word vectors on %d captions", len(corpus.sentences))
        known = train_word_vectors(corpus.sentences, config.trained_dim, config.trained_epochs, config.min_count, config.seed)
    else:
        known = read_word_vectors(word_file)
    kept = known.select_words(corpus.vocabulary, config.keep)
    with_vector = sum(word in kept.index_by_word for word in corpus.vocabulary)
    log.info("%d of the data set's %d words have a vector", with_vector, len(corpus.vocabulary))
    if not with_vector:
        raise UserError(
            "no word of the captions has a vector; check that the file of word vectors has the captions' language and case"
        )
    sample = np.arange(len(known.words))
    if len(sample) > n_sampled:
        sample = np.sort(np.random.default_rng(config.seed).permutation(len(sample))[:n_sampled])
    return kept, WordVectors(tuple(known.words[k] for k in sample), known.vectors[sample])


def _read_word2vec_binary(path: Path) -> WordVectors:
    from gensim.models import KeyedVectors

    check_decoded_gzip_xz_bz2_size(path)
    keyed = KeyedVectors.load_word2vec_format(str(path), binary=True, unicode_errors="replace")
    return WordVectors(tuple(keyed.index_to_key), np.asarray(keyed.vectors, np.float32))


def _read_npy_table(path: Path, dictionary: Path) -> WordVectors:
    """Read a ``.npy`` table (n_words, dim) and its words, one per line of ``dictionary``.

    A repeated word gets the vector of its first row.
    """
    if not dictionary.is_file():
        raise UserError(f"{dictionary}: no such file; it must hold the words of {path.name}, one per line")
    table = np.load(path, allow_pickle=False)
    words = [line.strip() for line in dictionary.read_text(encoding="utf-8", errors="replace").split("\n")]
    words = words[:-1] if words and not words[-1] else words
    if table.ndim != 2 or table.dtype.kind != "f" or len(table) != len(words):
        raise UserError(f"{path}: {table.dtype} of shape {table.shape}; {dictionary.name} has {len(words)} words")
    rows = {word: row for row, word in reversed(list(enumerate(words)))}
    kept = sorted(rows.values())
    return WordVectors(tuple(words[row] for row in kept), np.asarray(table[kept], np.float32))


def _read_text_format(path: Path) -> WordVectors:
    """Read a text file with a word and its vector per line.

    In word2vec's format, the first line has the number of words and the length of a vector. A word of GloVe may contain
    blanks. A repeated word gets the vector of its first line.
    """
    words: dict[str, None] = {}
    numbers = bytearray()  # the vectors of all words; one array per word would take twice the memory
    n_lines, dim, expected = 0, 0, None
    with open_decoded_stream(path) as stream:
        for line_number, line in enumerate(stream, 1):
            fields = line.decode(errors="replace").rstrip().split(" ")
            if line_number == 1 and len(fields) == 2 and all(field.removeprefix("-").isdigit() for field in fields):
                expected, dim = int(fields[0]), int(fields[1])
                continue
            dim = dim or len(fields) - 1
            try:
                if not 0 < dim < len(fields):
                    raise ValueError(f"{len(fields) - 1} numbers")
                vector = np.asarray(fields[-dim:], np.float32)
            except ValueError as error:
                raise UserError(f"{path}: line {line_number} is not a word and {dim} numbers ({error})") from None
            n_lines += 1
            if (word := " ".join(fields[:-dim])) not in words:
                words[word] = None
                numbers += vector.tobytes()
    if expected is not None and n_lines != expected:
        raise UserError(f"{path}: {n_lines} words, but its first line declares {expected}")
    return WordVectors(tuple(words), np.frombuffer(numbers, np.float32).reshape(len(words), dim))


class TfidfEncoder(CaptionEncoder):
    """An encoder that computes word counts times inverse document frequencies, scaled to unit length (scikit-learn)."""

    def __init__(self, words: Sequence[str], idf: NDArray[np.float64], sublinear: bool) -> None:
        self.words, self.idf, self.sublinear, self.dim = words, idf, sublinear, len(words)
        self._vectorizer = _build_vectorizer(sublinear, vocabulary={word: k for k, word in enumerate(words)})
        self._vectorizer.idf_ = idf

    @classmethod
    def fit_to_corpus(cls, config: TfidfConfig, corpus: CaptionCorpus, word_file: Path | None, device: str) -> TfidfEncoder:
        return cls.fit(corpus.fit_texts, config)

    @classmethod
    def fit(cls, captions: TokenLists, config: TfidfConfig) -> TfidfEncoder:
        """Fit the encoder to words in at least ``config.min_count`` captions. Raises UserError if there is no such word."""
        vectorizer = _build_vectorizer(config.sublinear, min_df=config.min_count, max_features=config.max_words)
        try:
            vectorizer.fit(captions)
        except ValueError as error:
            raise UserError(f"no word occurs in {config.min_count} training captions ({error})") from None
        return cls(list(vectorizer.get_feature_names_out()), vectorizer.idf_, config.sublinear)

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        return torch.from_numpy(self._vectorizer.transform(captions).astype(np.float32).toarray())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save: ``words``, ``rarity`` (inverse document frequencies), and the setting ``sublinear``."""
        idf = torch.from_numpy(np.asarray(self.idf))
        return {"words": words_to_tensor(self.words), "rarity": idf, "sublinear": torch.tensor(self.sublinear)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> TfidfEncoder:
        return cls(tensor_to_words(tensors["words"]), tensors["rarity"].numpy(), bool(tensors["sublinear"]))


def _build_vectorizer(sublinear: bool, **options: object) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import, and other encoders do not need it

    return TfidfVectorizer(analyzer=list, sublinear_tf=sublinear, **options)  # captions are already lists of words


class MeanVectorEncoder(CaptionEncoder):
    """An encoder that computes the mean of a caption's word vectors, scaled to unit length."""

    @classmethod
    def fit_to_corpus(
        cls, config: MeanVectorConfig, corpus: CaptionCorpus, word_file: Path | None, device: str
    ) -> MeanVectorEncoder:
        kept, _ = prepare_word_vectors(corpus, config, word_file, n_sampled=0)
        return cls(kept)

    def __init__(self, word_vectors: WordVectors) -> None:
        self.word_vectors, self.dim = word_vectors, word_vectors.vectors.shape[1]

    def encode(self, captions: TokenLists) -> Float[Tensor, "n dim"]:
        indices, lengths = self.word_vectors.find_word_rows(captions)
        starts = lengths.cumsum(0) - lengths
        return normalize(
            torch.nn.functional.embedding_bag(indices, torch.from_numpy(self.word_vectors.vectors), starts, mode="mean")
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.word_vectors.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> MeanVectorEncoder:
        return cls(WordVectors.from_tensors(tensors))
