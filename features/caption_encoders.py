"""What every caption encoder does: fitted on training captions, kept as tensors, applied to any caption.

The code of an encoder lies in a file of its own, such as :mod:`vse.features.tfidf_encoder`, and is imported when it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:  # so that an encoder whose code lies beside its settings can derive from this class
    import torch
    from torch import Tensor

    from vse.features.rows import Item

TokenLists = Sequence[Sequence[str]]


@dataclass(frozen=True)
class CaptionCorpus:
    """What an encoder is fitted on.

    training : the training captions, or every phrase of these
    words : all words of the data set's captions, or phrases
    sentences : the training captions, on which word vectors are trained, because phrases have few words around a word
    """

    training: TokenLists
    words: frozenset[str]
    sentences: TokenLists


class CaptionEncoder(ABC):
    """Turns captions, given as words, into vectors of ``dim`` numbers.

    ``words_read`` gives those words of a new caption that are read: all, unless the encoder is one of phrases.
    """

    dim: int
    reads_raw: ClassVar[bool] = False
    words_read: Callable[[Sequence[str]], Sequence[str]] = tuple

    @abstractmethod
    def encode(self, captions: TokenLists) -> Tensor:
        """Vectors of captions (n, dim), float32 on the CPU; zeros for a caption without a known word."""

    def encoded(self, captions: Sequence[Item]) -> tuple[Tensor, ...]:
        """Vectors of captions as a model reads them."""
        return (self.encode([self.words_read(caption.tokens) for caption in captions]),)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All that was fitted."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Self:
        """The encoder whose :meth:`tensors` these are."""


def text_tensor(words: Sequence[str]) -> Tensor:
    """Words as the bytes of their UTF-8, with a line feed between them."""
    import torch

    return torch.frombuffer(bytearray("\n".join(words).encode()), dtype=torch.uint8)


def tensor_text(tensor: Tensor) -> list[str]:
    """The words whose :func:`text_tensor` this is."""
    return bytes(tensor.numpy()).decode().split("\n")
