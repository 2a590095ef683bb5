from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vse.features.settings.captions import hash_word_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file


def test_a_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("a 1 2\n")
    assert hash_word_file(path) == sha256_file(path)


def test_a_table_is_known_by_its_numbers_and_its_words(tmp_path: Path) -> None:
    path, dictionary = tmp_path / "utable.npy", tmp_path / "dictionary.txt"
    seen = set()
    for vectors, words in ((np.zeros((1, 2)), "a\n"), (np.ones((1, 2)), "a\n"), (np.ones((1, 2)), "b\n")):
        np.save(path, vectors)
        dictionary.write_text(words)
        seen |= {hash_word_file(path), hash_word_file(path)}
    assert len(seen) == 3


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.txt: no such file of word vectors"):
        hash_word_file(tmp_path / "gone.txt")
    np.save(tmp_path / "utable.npy", np.zeros((1, 2)))
    with pytest.raises(UserError, match=r"dictionary.txt: no such file .*the words of utable.npy belong there"):
        hash_word_file(tmp_path / "utable.npy")
