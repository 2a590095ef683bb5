"""Captions as the tokens of a transformer's own tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.features.hardware import moved
from vse.features.transformer import Transformer
from vse.train.data.captions import NumberLists
from vse.train.kinds import Kind

log = logging.getLogger(__name__)

_AT_ONCE = 10_000  # texts that are cut into tokens together


class TokenNumbers:
    """Numbers of the tokens of captions.

    Parameters
    ----------
    texts : the captions as they were written
    transformer : whose tokens they become
    device : where tokens are wanted

    Attributes
    ----------
    n_cut : how many captions were longer than the transformer reads, and lost their ends
    """

    kind = Kind.TOKENS

    def __init__(self, texts: Sequence[str], transformer: Transformer, device: torch.device) -> None:
        self.n_cut = 0
        self._padding, self._device = transformer.padding, device
        self._tokens = NumberLists(self._encoded(texts, transformer))
        if self.n_cut:
            log.warning(
                "%d of %d captions have more than the %d tokens that %s reads, and lose their ends",
                self.n_cut,
                len(texts),
                transformer.longest or transformer.n_positions,
                transformer.name,
            )

    def of(self, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Padded tokens (n, longest), and their mask (n, longest)."""
        tokens, lengths = self._tokens.of(numbers, self._padding)
        mask = np.arange(tokens.shape[1]) < lengths[:, None]
        return moved(torch.from_numpy(tokens), self._device), moved(torch.from_numpy(mask), self._device)

    def _encoded(self, texts: Sequence[str], transformer: Transformer) -> Iterator[list[int]]:
        for start in range(0, len(texts), _AT_ONCE):
            for encoding in transformer.tokenizer.encode_batch(list(texts[start : start + _AT_ONCE])):
                self.n_cut += bool(encoding.overflowing)
                yield encoding.ids
