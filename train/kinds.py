"""The kinds of inputs that encoders take and similarities compare: one name for each, wherever it is read or refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

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


def whole_sets(vectors: Tensor) -> Encoded:
    """Sets (n, n_vectors, dim) without any padding, and their mask."""
    return vectors, torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device)


def select(encoded: Encoded, rows: Tensor | slice) -> Encoded:
    """Some rows of one side."""
    return tuple(part[rows] for part in encoded)


@dataclass(frozen=True)
class Packed:
    """Many embeddings of one side, sets without their padding.

    vectors : (n, dim) or, of sets, all of them one after the other, (n_vectors, dim)
    lengths : of sets, how many vectors each has (n,)
    """

    vectors: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.vectors if self.lengths is None else self.lengths)

    @cached_property
    def _starts(self) -> Tensor:
        assert self.lengths is not None
        return self.lengths.cumsum(0) - self.lengths

    def of(self, rows: Tensor, longest: int | None = None) -> Encoded:
        """Some rows; sets are padded with zeros up to ``longest`` vectors, by default the longest of these rows."""
        if self.lengths is None:
            return (self.vectors[rows],)
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()) if longest is None else longest, device=rows.device)
        mask = column < lengths[:, None]
        where = (self._starts[rows][:, None] + column).clamp(max=len(self.vectors) - 1)
        return self.vectors[where] * mask[:, :, None], mask

    def select(self, rows: Tensor) -> Packed:
        """Some rows by themselves."""
        if self.lengths is None:
            return Packed(self.vectors[rows])
        lengths = self.lengths[rows]
        before = lengths.cumsum(0) - lengths
        where = torch.arange(int(lengths.sum())) + (self._starts[rows] - before).repeat_interleave(lengths)
        return Packed(self.vectors[where], lengths)

    def all(self) -> Encoded:
        """All rows."""
        return self.of(torch.arange(len(self), device=self.vectors.device))


def packed(parts: Iterable[Encoded]) -> Packed:
    """Several parts of one side, one after the other."""
    vectors, lengths = [], []
    for part in parts:
        vectors.append(part[0] if len(part) == 1 else part[0][part[1]])
        lengths += [mask.sum(1) for mask in part[1:]]
    end = sum(map(len, vectors))
    whole = vectors[0].new_empty(end, *vectors[0].shape[1:])
    while vectors:  # each part is freed when it is copied, so that all are in memory once, not twice
        last = vectors.pop()
        whole[end - len(last) : end] = last
        end -= len(last)
    return Packed(whole, torch.cat(lengths) if lengths else None)


def padded(sets: Encoded, longest: int) -> Encoded:
    """Sets padded to ``longest`` vectors; single vectors stay as they are."""
    if len(sets) == 1:
        return sets
    vectors, mask = sets
    missing = longest - mask.shape[1]
    return pad(vectors, (0, 0, 0, missing)), pad(mask, (0, missing))
