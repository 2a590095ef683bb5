"""What a model's encoders give for a split, and how its images and captions rank each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from vse.eval.ranking.ranks import Ranks, ScoreBlocks, ranks_from_blocks, ranks_from_embeddings
from vse.features.backbones import autocast
from vse.train.data.pairs import Split
from vse.train.kinds import Encoded, joined, padded, select
from vse.train.models.build import Model

_BLOCK = 512
_PHOTOS = 64  # at once, where a CNN reads them
TILE_IMAGES, TILE_CAPTIONS = 64, 512  # pairs of a model that are scored at once


def encode(model: Model, split: Split, device: torch.device) -> tuple[Encoded, Encoded]:
    """Embeddings of all images and all captions of a split, in their order, on the CPU."""
    model.eval()

    def in_blocks(n: int, block: int, embed: Callable[..., Encoded], read: Callable[[NDArray[np.int64]], Encoded]) -> Encoded:
        parts = []
        for start in range(0, n, block):
            inputs = read(np.arange(start, min(start + block, n)))
            parts.append(tuple(part.cpu() for part in embed(*inputs)))
        return joined(parts)

    with torch.inference_mode():
        images = in_blocks(
            len(split.pairs.images),
            _BLOCK if model.cnn is None else _PHOTOS,
            lambda *inputs: model.embed_images(*(part.to(device) for part in inputs)),
            split.images.of_images,
        )
        captions = in_blocks(len(split.pairs), _BLOCK, model.embed_captions, split.captions.of)
    return images, captions


class PairScores:
    """Scores of images with captions by the model, a tile of pairs at a time, so that no whole matrix is held.

    Every tile has the same shape: the arithmetic of a pair then does not depend on the others that it is scored with.

    Parameters
    ----------
    model : what scores
    images, captions : embeddings, on the CPU
    precision : of a training step, in which the tiles are computed
    """

    def __init__(self, model: Model, images: Encoded, captions: Encoded, precision: str = "fp32") -> None:
        self._model, self._images, self._captions = model.eval(), images, captions
        self._precision = precision
        self._device = next(model.parameters(), torch.empty(0)).device
        self._last: tuple[slice, Tensor | None, tuple[Tensor, Tensor]] | None = None

    def __call__(self, rows: slice, columns: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores (i2t, t2i) of some image rows with all captions, or with the captions of these numbers, on the CPU."""
        if self._last is None or self._last[0] != rows or self._last[1] is not columns:
            self._last = rows, columns, self._scored(rows, columns)
        return self._last[2]

    def in_rows(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """All scores, some image rows at a time."""
        n_images = len(self._images[0])
        for start in range(0, n_images, TILE_IMAGES):
            rows = slice(start, min(start + TILE_IMAGES, n_images))
            yield rows, *self(rows, None)

    def of_direction(self, direction: str) -> Callable[[slice, Tensor | None], Tensor]:
        """The blocks of one direction, as :func:`vse.eval.ranking.ranks.ranks_from_blocks` takes them; each is a copy."""
        which = ("i2t", "t2i").index(direction)
        return lambda rows, columns: self(rows, columns)[which].clone()

    def _scored(self, rows: slice, columns: Tensor | None) -> tuple[Tensor, Tensor]:
        n_rows = rows.stop - rows.start
        numbers = torch.arange(len(self._captions[0])) if columns is None else columns
        images = self._tile(self._images, torch.arange(rows.start, rows.stop), TILE_IMAGES)
        parts = []
        with torch.inference_mode(), autocast(self._precision, self._device):
            for part in torch.split(numbers, TILE_CAPTIONS):
                scores = self._model.similarity(images, self._tile(self._captions, part, TILE_CAPTIONS))
                both = scores if isinstance(scores, tuple) else (scores, scores)
                parts.append([one[:n_rows, : len(part)].float().cpu() for one in both])
        i2t, t2i = (torch.cat(list(one), 1) for one in zip(*parts, strict=True)) if parts else (torch.empty(n_rows, 0),) * 2
        return i2t, t2i

    def _tile(self, side: Encoded, numbers: Tensor, size: int) -> Encoded:
        """Some rows of a side, with the first one repeated up to ``size``."""
        missing = size - len(numbers)
        chosen = select(side, torch.cat([numbers, numbers[:1].expand(missing)]))
        return tuple(part.to(self._device) for part in _trimmed(chosen))


def ranks(
    model: Model, images: Encoded, captions: Encoded, image_of_caption: Int[Tensor, " n_captions"], precision: str = "fp32"
) -> Ranks:
    """Exact ranks of embeddings as the model compares them; ``precision`` is that of a model that scores every pair."""
    ranked_by = model.config.similarity.ranked_by
    if ranked_by is not None:
        return ranks_from_embeddings(*images, *captions, image_of_caption, ranked_by)
    scores = PairScores(model, images, captions, precision)
    i2t, t2i = (
        ScoreBlocks(len(images[0]), image_of_caption, TILE_IMAGES, scores.of_direction(direction)) for direction in ("i2t", "t2i")
    )
    return ranks_from_blocks(i2t, t2i)


def _trimmed(sets: Encoded) -> Encoded:
    """Sets without the columns that none of them fills."""
    if len(sets) == 1:
        return sets
    vectors, mask = sets
    longest = int(mask.sum(1).max())
    return padded((vectors[:, :longest], mask[:, :longest]), longest)
