"""The kinds of inputs that encoders take and similarities compare: one name for each, wherever it is read or refused."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import pad


class Kind(StrEnum):
    """What one side of a batch is, as a tuple of tensors.

    ``vectors`` : (n, dim), a single vector of each image or caption
    ``sets`` : vectors (n, longest, dim) of regions, positions or words, and their mask (n, longest); no set is empty
    ``words`` : numbers (n, longest) in the vocabulary, padded, and lengths (n,), which lie on the CPU
    ``tokens`` : numbers (n, longest) of a tokenizer of its own, padded, and their mask (n, longest)
    """

    VECTORS = "vectors"
    SETS = "sets"
    WORDS = "words"
    TOKENS = "tokens"


def kind_of_rows(row_kind: str) -> Kind:
    """What the rows of a feature cache are read as; of a bank of crops, one crop at a time."""
    return Kind.SETS if row_kind == "sets" else Kind.VECTORS


# One side of a batch as an encoder gives it: (vectors,), or (vectors, mask) of sets.
Encoded = tuple[Tensor, ...]


def select(encoded: Encoded, rows: Tensor | slice) -> Encoded:
    """Some rows of one side."""
    return tuple(part[rows] for part in encoded)


def joined(parts: list[Encoded]) -> Encoded:
    """Several parts of one side, one after the other; shorter sets are padded to the longest."""
    if len(parts[0]) == 1:
        return (torch.cat([vectors for (vectors,) in parts]),)
    longest = max(mask.shape[1] for _, mask in parts)
    return tuple(map(torch.cat, zip(*(padded(part, longest) for part in parts), strict=True)))


def padded(sets: Encoded, longest: int) -> Encoded:
    """Sets padded to ``longest`` vectors; single vectors stay as they are."""
    if len(sets) == 1:
        return sets
    vectors, mask = sets
    missing = longest - mask.shape[1]
    return pad(vectors, (0, 0, 0, missing)), pad(mask, (0, missing))
