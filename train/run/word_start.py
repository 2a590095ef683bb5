"""Word embeddings that start from a file of word vectors."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from vse.features.words import read_words
from vse.pipeline.errors import UserError
from vse.pipeline.vocabulary import SPECIAL_TOKENS, Vocabulary
from vse.train.models.build import Model
from vse.train.models.encoders.word_reader import WordReader

log = logging.getLogger(__name__)


def start_words(model: Model, vocabulary: Vocabulary, file: Path) -> None:
    """The word embeddings of ``model`` start from the vectors of ``file``; says how many words it lacks.

    :class:`UserError` if the model reads no words, if its word embeddings are of another length, or if no word has a vector.
    """
    encoder = model.caption_encoder
    if not isinstance(encoder, WordReader):
        raise UserError(f"{file}: word vectors are for encoders of words, and the captions are not read by one")
    known = read_words(file).only(vocabulary.words, 0)
    dim, expected = known.vectors.shape[1], encoder.words.embedding_dim
    if dim != expected:
        raise UserError(f"{file}: vectors of {dim} numbers, but model.word_dim is {expected}; --set model.word_dim={dim}")
    n_words = len(vocabulary) - len(SPECIAL_TOKENS)
    n_known = len(set(known.words) - set(SPECIAL_TOKENS))
    if not n_known:
        raise UserError(f"{file}: not one word of the captions has a vector; is it of this language and case?")
    vectors, there = np.zeros((len(vocabulary), dim), np.float32), np.zeros(len(vocabulary), bool)
    for row, word in enumerate(vocabulary.words):
        if word in known.rows:
            vectors[row], there[row] = known.vectors[known.rows[word]], True
    encoder.start_words(torch.from_numpy(vectors), torch.from_numpy(there))
    log.info("%s: vectors of %d of %d words; the other %d start at random", file, n_known, n_words, n_words - n_known)
