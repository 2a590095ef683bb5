"""Similarities of all images of a batch with all its captions, by name, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vse.pipeline.config import ModelConfig

Similarity = Callable[[Tensor, Tensor], Tensor]

_BLOCK = {"cpu": 2**18, "cuda": 2**26}  # differences held at once; on a CPU they stay in its cache


def similarity(config: ModelConfig) -> Similarity:
    """The function of image and caption embeddings (n_images, dim), (n_captions, dim) -> (n_images, n_captions)."""
    if config.similarity == "order":
        return partial(order, form=config.order_form)
    return partial(euclidean, floor=config.distance_floor) if config.similarity == "euclidean" else cosine


def cosine(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"]
) -> Float[Tensor, "n_images n_captions"]:
    """Inner products (VSE++ paper, Eq. 3); the encoders decide about unit length, so for VSE0 only captions have it."""
    return images @ captions.T


def euclidean(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], floor: float = 0.0
) -> Float[Tensor, "n_images n_captions"]:
    """Minus the distance of each image and each caption, -sqrt(||v - c||^2 + floor) (two-branch paper, section 3.2).

    Where two vectors are equal and there is no floor, the gradient is 0.
    """
    squares = images.square().sum(1)[:, None] + captions.square().sum(1)[None, :]
    squared = (squares - 2 * images @ captions.T).clamp(min=0) + floor
    apart = squared != 0  # a NaN is one of these, and stays
    return torch.where(apart, -torch.where(apart, squared, 1).sqrt(), 0)


def order(
    images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"], form: str = "squared"
) -> Float[Tensor, "n_images n_captions"]:
    """Minus how far each caption exceeds each image: s(i, c) = -||max(0, c - v)||^2 (VSE++ paper, section 3.5).

    With the form ``norm`` the square is left out, as in the authors' code; where nothing exceeds, its gradient is 0.
    """
    squared: Tensor = -_Violations.apply(images, captions)
    if form == "squared":
        return squared
    exceeds = squared != 0  # a NaN is one of these, and stays
    return torch.where(exceeds, -torch.where(exceeds, -squared, 1).sqrt(), 0)


class _Violations(torch.autograd.Function):
    """||max(0, c - v)||^2 of every pair, block by block of images, and again in the backward pass: none are kept."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, captions: Tensor) -> Tensor:
        ctx.save_for_backward(images, captions)
        found = images.new_empty(len(images), len(captions))
        for rows, exceeding in _exceeding(images, captions):
            torch.linalg.vector_norm(exceeding, dim=2, out=found[rows])
        return found.square_()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        images, captions = ctx.saved_tensors
        of_images, of_captions = torch.empty_like(images), torch.zeros_like(captions)
        for rows, exceeding in _exceeding(images, captions):
            weights = 2 * gradients[0][rows]
            of_images[rows] = -torch.bmm(weights[:, None], exceeding)[:, 0]
            of_captions += exceeding.mul_(weights[:, :, None]).sum(0) if len(exceeding) > 1 else exceeding[0].mul_(weights.T)
        return of_images, of_captions


def _exceeding(images: Tensor, captions: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """max(0, c - v) of some images with all captions (rows, n_captions, dim), block by block."""
    size = max(1, _BLOCK.get(images.device.type, 2**26) // max(1, captions.numel()))
    for start in range(0, len(images), size):
        rows = slice(start, min(start + size, len(images)))
        yield rows, (captions[None] - images[rows, None]).clamp_(min=0)
