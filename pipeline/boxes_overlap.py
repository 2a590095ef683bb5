"""How much boxes overlap."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Num


def iou(a: Num[np.ndarray, "n_boxes 4"], b: Num[np.ndarray, "n_others 4"]) -> Float[np.ndarray, "n_boxes n_others"]:
    """Intersection over union of every box of ``a`` with every box of ``b``, in float64.

    Boxes are (x1, y1, x2, y2) with x2 and y2 exclusive, so their area is (x2 - x1)(y2 - y1). Of boxes of whole pixels that is
    the IoU of the published evaluations, which count x2 and y2 in and add 1 to each side. A box without area has an IoU of 0
    with every box.
    """
    first, second = (np.asarray(boxes, np.float64) for boxes in (a, b))
    near = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.clip(far - near, 0, None).prod(axis=2)
    union = _areas(first)[:, None] + _areas(second) - shared
    overlap: Float[np.ndarray, "n_boxes n_others"] = np.zeros_like(shared)
    np.divide(shared, union, out=overlap, where=(shared > 0) & (union > 0))
    return overlap


def _areas(boxes: Float[np.ndarray, "n_boxes 4"]) -> Float[np.ndarray, " n_boxes"]:
    """Area of each box, 0 where it is empty or upside down."""
    areas: Float[np.ndarray, " n_boxes"] = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1)
    return areas
