"""Batch normalisation of a batch that several processes share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vse.training.processes.group import ProcessGroup


class _SynchronisedBatchNorm:
    """The training pass of a batch normalisation whose mean and variance are those of the rows of all processes.

    ``torch.nn.SyncBatchNorm`` does the same, but on GPUs only.
    """

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)  # type: ignore[misc, no-any-return]
        rows = inputs.float()
        dims = [0, *range(2, rows.ndim)]
        count = rows.new_tensor([rows.numel() / max(1, rows.shape[1])])
        mean = rows.mean(dims)
        squares = (rows - _as_channel(mean, rows)).square().sum(dims)
        parts = self.processes.gather_rows(torch.cat([count, mean, squares])[None], adds_gradients=True)
        counts = parts[:, :1].detach()
        means, sums = parts[:, 1:].chunk(2, dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (sums + counts * (means - mean).square()).sum(0) / total
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * (total / (total - 1).clamp(min=1)), self.momentum)
        normalised = (rows - _as_channel(mean, rows)) * _as_channel((variance + self.eps).rsqrt(), rows)
        if self.affine:
            normalised = normalised * _as_channel(self.weight, rows) + _as_channel(self.bias, rows)
        normalised = normalised.to(inputs.dtype)
        return self.act(self.drop(normalised)) if hasattr(self, "act") else normalised  # timm's modules have an activation


def synchronise_batch_norms(module: nn.Module, processes: ProcessGroup) -> None:
    """Let every batch normalisation in ``module`` use the rows of all processes."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.__class__ = _synchronised_class(type(part))  # type: ignore[assignment, arg-type]
            part.processes = processes  # type: ignore[assignment]


def is_synchronised(module: nn.Module) -> bool:
    """Return whether :func:`synchronise_batch_norms` has changed this module."""
    return isinstance(module, _SynchronisedBatchNorm)


@cache
def _synchronised_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Synchronised{kind.__name__}", (_SynchronisedBatchNorm, kind), {})


def _as_channel(values: Tensor, rows: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (rows.ndim - 2))
