from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from vse.features.extractors.words import WordVectors, read_word_vectors, train_word_vectors
from vse.features.settings.base import hash_word_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file

WORDS = ("a", "dog", "Café", "don't")
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) / 8


def glove(path: Path) -> Path:
    lines = [" ".join([word, *map(str, row)]) for word, row in zip(WORDS, VECTORS.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def word2vec_text(path: Path) -> Path:
    glove(path)
    path.write_text("4 3\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def word2vec_binary(path: Path) -> Path:
    rows = [word.encode() + b" " + struct.pack("<3f", *row) + b"\n" for word, row in zip(WORDS, VECTORS, strict=True)]
    path.write_bytes(b"4 3\n" + b"".join(rows))
    return path


@pytest.mark.parametrize(
    ("name", "write"), [("g.txt", glove), ("w.txt", word2vec_text), ("w.vec", word2vec_text), ("w.bin", word2vec_binary)]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_format_gives_the_same_vectors(name: str, write: object, zipped: bool, tmp_path: Path) -> None:
    path = write(tmp_path / name)  # type: ignore[operator]
    if zipped:
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    found = read_word_vectors(path)
    assert found.words == WORDS
    np.testing.assert_array_equal(found.vectors, VECTORS)


def table(path: Path, vectors: np.ndarray = VECTORS, words: tuple[str, ...] = WORDS) -> Path:
    np.save(path, vectors)
    path.with_name("dictionary.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return path


def test_a_table_has_its_words_beside_it(tmp_path: Path) -> None:
    found = read_word_vectors(table(tmp_path / "utable.npy", VECTORS.astype(np.float64)))
    assert found.words == WORDS
    assert found.vectors.dtype == np.float32
    np.testing.assert_array_equal(found.vectors, VECTORS)


def test_of_a_word_that_a_table_has_twice_the_first_counts(tmp_path: Path) -> None:
    found = read_word_vectors(table(tmp_path / "utable.npy", words=("a", "dog", "a", "cat")))
    assert found.words == ("a", "dog", "cat")
    np.testing.assert_array_equal(found.vectors, VECTORS[[0, 1, 3]])


def test_a_table_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "utable.npy"
    for vectors, words in ((VECTORS, WORDS[:3]), (VECTORS[0], WORDS[:3]), (np.arange(8).reshape(4, 2), WORDS)):
        with pytest.raises(UserError, match=f"of shape .*; dictionary.txt has {len(words)} words"):
            read_word_vectors(table(path, vectors, words))
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="not a word2vec or GloVe file or a table"):
        read_word_vectors(path)


def test_the_first_words_and_the_wanted_ones_are_kept() -> None:
    found = WordVectors(WORDS, VECTORS).select_words({"don't", "cat"}, n_first=2)
    assert found.words == ("a", "dog", "don't")
    np.testing.assert_array_equal(found.vectors, VECTORS[[0, 1, 3]])
    assert found.find_word_rows([["a", "cat", "don't"]])[0].tolist() == [0, 2]


def test_training_can_be_repeated() -> None:
    captions = [["a", "red", "disc"], ["a", "blue", "disc"], ["the", "red", "square"]] * 20
    first, again = (train_word_vectors(captions, 8, 3, 1, seed=0) for _ in range(2))
    assert first.words == again.words
    np.testing.assert_array_equal(first.vectors, again.vectors)
    assert first.vectors.shape == (6, 8)
    assert "square" not in train_word_vectors(captions, 8, 1, 21, seed=0).words


def test_a_file_is_known_by_its_bytes_and_a_table_by_its_numbers_and_its_words(tmp_path: Path) -> None:
    assert hash_word_file(glove(tmp_path / "glove.txt")) == sha256_file(tmp_path / "glove.txt")
    path, dictionary = tmp_path / "utable.npy", tmp_path / "dictionary.txt"
    seen = set()
    for vectors, words in ((np.zeros((1, 2)), "a\n"), (np.ones((1, 2)), "a\n"), (np.ones((1, 2)), "b\n")):
        np.save(path, vectors)
        dictionary.write_text(words)
        seen |= {hash_word_file(path), hash_word_file(path)}
    assert len(seen) == 3


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for read in (hash_word_file, read_word_vectors):
        with pytest.raises(UserError, match=r"gone.txt: no such file of word vectors"):
            read(tmp_path / "gone.txt")
    np.save(tmp_path / "utable.npy", np.zeros((1, 2)))
    with pytest.raises(UserError, match=r"dictionary.txt: no such file .*the words of utable.npy belong there"):
        hash_word_file(tmp_path / "utable.npy")
