"""Embeddings to compare, and scores with their gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def embeddings(n_images: int, n_captions: int, dim: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dim, generator=generator, dtype=dtype, requires_grad=True) for n in (n_images, n_captions)]


def with_gradients(scores: Tensor, sides: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).view_as(scores)
    return [scores.detach(), *torch.autograd.grad((scores * weights).sum(), sides)]


def unit(*sides: Tensor) -> list[Tensor]:
    return [torch.nn.functional.normalize(side.detach()).requires_grad_() for side in sides]
