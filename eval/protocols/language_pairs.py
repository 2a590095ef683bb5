"""Retrieval between captions of two languages: captions of one language query captions of the other one.

The right answers to a caption are all captions of the same image in the other language. Captions are compared by the cosine,
as in the protocol ``sentence``. A protocol is called ``en:de`` if English captions are the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vse.eval.files.split import Embeddings, select_language
from vse.eval.ranking.answers import unit_rows
from vse.eval.ranking.metrics import MeasuredQueries, QueriesByDirection
from vse.eval.ranking.ranks import blocks_from_embeddings, ranks_from_blocks, shared_tensor
from vse.pipeline.dataset.languages import parse_languages
from vse.pipeline.errors import UserError


def parse_language_pairs(texts: Sequence[str]) -> list[str]:
    """Return the protocols of pairs such as ``en:de``, in both directions: ``en:de`` and ``de:en``."""
    protocols: list[str] = []
    for text in texts:
        languages = parse_languages(text.replace(":", ","), "--pairs") if text.count(":") == 1 else []
        if len(languages) != 2:
            raise UserError(f"--pairs {text}: give two languages, such as en:de")
        protocols += [":".join(languages), ":".join(reversed(languages))]
    return list(dict.fromkeys(protocols))


def rank_language_pair(embeddings: Embeddings, protocol: str, ks: Sequence[int]) -> QueriesByDirection:
    """Return the ranked queries of a protocol such as ``en:de``, as the direction ``t2t``.

    Only images with captions in all languages of the file count. Raises UserError if the file has no embeddings of captions,
    or no captions in one of the languages.
    """
    if embeddings.captions is None:
        raise UserError(f"the protocol {protocol} needs caption embeddings, and the file has none")
    source = Path(protocol)  # errors name the protocol in place of a file; the caller adds the file
    queries, answers = (select_language(source, embeddings, language) for language in protocol.split(":"))
    assert queries.captions is not None
    assert answers.captions is not None
    candidates = unit_rows(shared_tensor(answers.captions))
    query_rows, image_of_answer = queries.image_of_caption(), torch.from_numpy(answers.image_of_caption())
    units = unit_rows(shared_tensor(queries.captions))
    # ScoreBlocks allow one query per image, so each pass ranks one caption of every image.
    order = np.argsort(query_rows, kind="stable")
    counts = np.bincount(query_rows)
    number_in_image = np.empty_like(query_rows)
    number_in_image[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(query_rows), np.int64)
    for number in range(int(counts.max())):
        chosen = np.flatnonzero(number_in_image == number)
        vectors = torch.zeros(len(counts), units.shape[1])
        vectors[torch.from_numpy(query_rows[chosen])] = units[torch.from_numpy(chosen)]
        blocks = blocks_from_embeddings(vectors, candidates, image_of_answer)
        ranks[chosen] = ranks_from_blocks(blocks).i2t[query_rows[chosen]]
    return {"t2t": MeasuredQueries.from_ranks(ranks, query_rows, ks)}
