"""The kinds of tensors that encoders read and similarities compare, and operations on batches of these tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

# The embeddings of the images or captions of a batch: (vectors,), or (vectors, mask) for sets.
BatchVectors = tuple[Tensor, ...]


class InputKind(StrEnum):
    """The kind of tensors that represent a batch of images or captions. A batch is a tuple of one or two tensors.

    ``vectors`` : (n, dim), a single vector of each image or caption.
    ``sets`` : vectors (n, longest, dim) of regions, positions or words, and their mask (n, longest); no set is empty.
    ``words`` : padded indices (n, longest) into the vocabulary of the run, and lengths (n,) on the CPU.
    ``tokens`` : padded indices (n, longest) into the vocabulary of a transformer's tokenizer, and their mask (n, longest).
    """

    VECTORS = "vectors"
    SETS = "sets"
    WORDS = "words"
    TOKENS = "tokens"


def to_input_kind(row_kind: str) -> InputKind:
    """Return the kind of input that a model reads from a cache with rows of the kind ``row_kind``.

    A row with the vectors of several crops of an image is read as a single vector: one of the crops, or their mean.
    """
    return InputKind.SETS if row_kind == "sets" else InputKind.VECTORS


def add_full_mask(vectors: Tensor) -> BatchVectors:
    """Return the vectors (n, n_vectors, dim) as sets of equal sizes, with a mask that is True everywhere."""
    return vectors, torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device)


def select_batch_rows(encoded: BatchVectors, rows: Tensor | slice) -> BatchVectors:
    """Return the images or captions at ``rows`` of a batch."""
    return tuple(part[rows] for part in encoded)


@dataclass(frozen=True)
class PackedEmbeddings:
    """The embeddings of images or captions. Sets are stored without padding.

    ``vectors`` : single vectors (n, dim), or the vectors of all sets one after the other, (n_vectors, dim).
    ``lengths`` : (n,) number of vectors of each set, or None for single vectors.
    """

    vectors: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.vectors if self.lengths is None else self.lengths)

    @cached_property
    def _set_starts(self) -> Tensor:
        assert self.lengths is not None
        return self.lengths.cumsum(0) - self.lengths

    def unpack(self, rows: Tensor, longest: int | None = None) -> BatchVectors:
        """Return the embeddings at ``rows``. Sets are padded with zeros to ``longest`` vectors; None: to the largest one."""
        if self.lengths is None:
            return (self.vectors[rows],)
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()) if longest is None else longest, device=rows.device)
        mask = column < lengths[:, None]
        where = (self._set_starts[rows][:, None] + column).clamp(max=len(self.vectors) - 1)
        return self.vectors[where] * mask[:, :, None], mask

    def select_rows(self, rows: Tensor) -> PackedEmbeddings:
        """Return the embeddings at ``rows`` in packed form."""
        if self.lengths is None:
            return PackedEmbeddings(self.vectors[rows])
        lengths = self.lengths[rows]
        before = lengths.cumsum(0) - lengths
        where = torch.arange(int(lengths.sum())) + (self._set_starts[rows] - before).repeat_interleave(lengths)
        return PackedEmbeddings(self.vectors[where], lengths)

    def unpack_all(self) -> BatchVectors:
        """Return all embeddings. Sets are padded with zeros to the largest set."""
        return self.unpack(torch.arange(len(self), device=self.vectors.device))


def pack_embeddings(parts: Iterable[BatchVectors]) -> PackedEmbeddings:
    """Join one or more batches of embeddings into one array without padding."""
    vectors, lengths = [], []
    for part in parts:
        vectors.append(part[0] if len(part) == 1 else part[0][part[1]])
        lengths += [mask.sum(1) for mask in part[1:]]
    end = sum(map(len, vectors))
    joined = vectors[0].new_empty(end, *vectors[0].shape[1:])
    while vectors:  # free each part once it is copied, so that memory holds the vectors once, not twice
        last = vectors.pop()
        joined[end - len(last) : end] = last
        end -= len(last)
    return PackedEmbeddings(joined, torch.cat(lengths) if lengths else None)


def is_known_full(mask: Tensor) -> bool:
    """Return whether a mask is known to be True everywhere.

    A mask on a GPU is not read, because the program would wait for the GPU. The result is then False.
    """
    return mask.device.type == "cpu" and bool(mask.all())


def pad_sets(sets: BatchVectors, longest: int) -> BatchVectors:
    """Pad each set with zeros until it has ``longest`` vectors. Return single vectors unchanged."""
    if len(sets) == 1:
        return sets
    vectors, mask = sets
    missing = longest - mask.shape[1]
    return pad(vectors, (0, 0, 0, missing)), pad(mask, (0, missing))
