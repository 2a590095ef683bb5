"""How many are true in each row or column of a block of comparisons, counted by bytes."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_MOST = 255  # that a byte counts


def row_counts(mask: Bool[Tensor, "n_rows n_columns"]) -> Int[Tensor, " n_rows"]:
    """How many of each row are true: as ``mask.sum(1)``, which takes a multiple of the time on a processor."""
    if mask.device.type != "cpu":
        return mask.sum(1)
    n_rows, n_columns = mask.shape
    words = torch.nn.functional.pad(mask, (0, -n_columns % 8)).flatten().view(torch.int64).view(n_rows, -(-n_columns // 8))
    counts = torch.zeros(n_rows, dtype=torch.int64)
    for some in torch.split(words, _MOST, 1):  # one sum counts eight bytes, none of which overflows
        counts += some.sum(1, keepdim=True).view(torch.uint8).sum(1)
    return counts


def column_counts(mask: Bool[Tensor, "n_rows n_columns"]) -> Int[Tensor, " n_columns"]:
    """How many of each column are true: as ``mask.sum(0)``, which takes a multiple of the time on a processor."""
    if mask.device.type != "cpu":
        return mask.sum(0)
    counts = torch.zeros(mask.shape[1], dtype=torch.int64)
    for some in torch.split(mask.contiguous().view(torch.uint8), _MOST):
        counts += some.sum(0, dtype=torch.uint8)
    return counts
