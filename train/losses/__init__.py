"""Losses by name. A new loss is one file here and one line below.

A ranking loss is a function of

- ``scores`` (n, n): similarity of image i (row) and caption j (column) of a batch; row i and column i are a pair,
- ``negatives`` (n, n): True where image i and caption j count as a wrong pair,
- ``settings``: the experiment's group ``loss``, with the ``margin`` (the alpha of the VSE++ paper) and a ``temperature``,

and returns a scalar, summed over the batch. A loss of single pairs is a function of ``scores`` (n,) and ``labels`` (n,), +1
for a right pair and -1 for a wrong one; :mod:`vse.train.losses.objective` draws as many wrong pairs as there are right ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vse.pipeline.config import LossConfig
from vse.pipeline.errors import UserError, did_you_mean
from vse.train.losses.infonce import infonce
from vse.train.losses.logistic import logistic
from vse.train.losses.max_of_hinges import max_of_hinges
from vse.train.losses.spectrum_of_hinges import spectrum_of_hinges
from vse.train.losses.sum_of_hinges import sum_of_hinges
from vse.train.losses.top_of_hinges import top_of_hinges

Loss = Callable[[Tensor, Tensor, LossConfig], Tensor]
PairLoss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "max": max_of_hinges,
    "sum": sum_of_hinges,
    "top": top_of_hinges,
    "spectrum": spectrum_of_hinges,
    "infonce": infonce,
}
PAIR_LOSSES: dict[str, PairLoss] = {"logistic": logistic}


def negative_pairs(image_ids: Int[Tensor, " n"], mask_same_image: bool) -> Bool[Tensor, "n n"]:
    """Which pairs of a batch are wrong: all but i = j, or, if masked, all whose images differ.

    A batch of shuffled captions can hold two captions of one image. The VSE++ paper and its code count
    each as a negative of the other's image; masking does not.
    """
    if mask_same_image:
        return image_ids[:, None] != image_ids[None, :]
    return ~torch.eye(len(image_ids), dtype=torch.bool, device=image_ids.device)


def check_loss(name: str) -> None:
    """:class:`UserError` suggests the nearest name if there is no loss ``name``."""
    known = [*LOSSES, *PAIR_LOSSES]
    if name not in known:
        raise UserError(f"unknown loss {name!r}{did_you_mean(name, known)}")
