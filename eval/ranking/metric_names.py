"""What directions and metrics are called, where people read them."""

from __future__ import annotations

from vse.eval.defaults import RECALLS

DIRECTIONS = {
    "i2t": "image to text",
    "t2i": "text to image",
    "i2i": "image to image",
    "t2t": "text to text",
    "s2s": "sentence to sentence",
    "phrase": "phrase to region",
}
NAMES = {f"r{k}": f"R@{k}" for k in RECALLS} | {
    "medr": "Med r",
    "meanr": "mean r",
    "ndcg10": "nDCG@10",
    "mrr": "MRR",
    "map": "mAP",
    "map_at_r": "mAP@R",
    "rprecision": "R-Precision",
    "rsum": "rsum",
    "mean_recall": "mean recall",
    "bound": "upper bound",
    "mean_iou": "mean IoU",
}


def metric_name(metric: str) -> str:
    """What people call a metric: ``R@50`` for ``r50``, say; the metric itself if there is no other name."""
    return NAMES.get(metric) or (f"R@{metric[1:]}" if metric[:1] == "r" and metric[1:].isdecimal() else metric)
