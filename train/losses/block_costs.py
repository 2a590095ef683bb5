"""Costs of the scores of all images with all captions of a batch, a block of images at a time, in memory for one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

# What a block costs; a number for each column, or none; and a number that is summed up without gradients.
BlockCost = tuple[Float[Tensor, ""], Float[Tensor, " m"], Float[Tensor, ""]]
OfRows = Callable[[Tensor, Tensor, int], BlockCost]


class BlockCosts(NamedTuple):
    """The summed cost of all blocks, what each has for each column, and the sum of the numbers without gradients."""

    cost: Float[Tensor, ""]
    columns: Float[Tensor, "n_blocks m"]
    total: Float[Tensor, ""]


def block_costs(
    of_rows: OfRows,
    size: int,
    images: Float[Tensor, "n dim"],
    captions: Float[Tensor, "m dim"],
    *parameters: nn.Parameter,
) -> BlockCosts:
    """Costs of ``size`` images at a time with all captions; the backward pass computes each block again (Chen et al., 2016).

    Parameters
    ----------
    of_rows : from some images, all captions and the number of the first of these images to what they cost; it depends on
        nothing else that has gradients but ``parameters``
    size : images of a block
    images, captions : embeddings
    parameters : what else there are gradients of
    """
    return BlockCosts(*_ByBlocks.apply(of_rows, size, images, captions, *parameters))


class _ByBlocks(torch.autograd.Function):
    """No block leaves anything behind but its numbers, in memory that is taken once: what lives on between large blocks that
    come and go would keep an allocator from using their memory for the next ones.
    """

    @staticmethod
    def forward(ctx: Any, of_rows: OfRows, size: int, images: Tensor, captions: Tensor, *parameters: Tensor) -> Any:
        ctx.save_for_backward(images, captions, *parameters)
        ctx.of_rows, ctx.size = of_rows, size
        cost, total = images.new_zeros(()), images.new_zeros(())
        columns = images.new_empty(0, 0)
        for number, start in enumerate(range(0, len(images), size)):
            of_block, of_columns, more = of_rows(images[start : start + size], captions, start)
            if not number:
                columns = of_columns.new_empty(-(-len(images) // size), len(of_columns))
            columns[number] = of_columns
            cost += of_block
            total += more
        ctx.mark_non_differentiable(total)
        return cost, columns, total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        images, captions, *parameters = ctx.saved_tensors
        of_cost, of_columns = upstream[:2]
        gradients = [torch.zeros_like(part) for part in (images, captions, *parameters)]
        whole = captions.detach().requires_grad_()
        for number, start in enumerate(range(0, len(images), ctx.size)):
            rows = slice(start, start + ctx.size)
            with torch.enable_grad():
                some = images[rows].detach().requires_grad_()
                cost, columns, _ = ctx.of_rows(some, whole, start)
                weighed = of_cost * cost + (of_columns[number] * columns).sum()
            own, *others = torch.autograd.grad(weighed, [some, whole, *parameters], materialize_grads=True)
            gradients[0][rows] = own
            for total, gradient in zip(gradients[1:], others, strict=True):
                total += gradient
        return None, None, *gradients
