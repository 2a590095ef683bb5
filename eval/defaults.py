"""Names and numbers that the commands show in their help: importing this costs nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

COCO_PROTOCOLS = ("cxc", "eccv")
FOLD = 1000  # images
FOLDED_PROTOCOLS = ("1k", "sentence-1k")  # over consecutive folds of so many images
PROTOCOLS = ("1k", "full", "sentence", "sentence-1k", *COCO_PROTOCOLS)
PHRASE = "phrase"  # of files of phrase scores
IOU = 0.5  # with its truth, from which on a candidate of a phrase is right
BOOTSTRAP_SAMPLES = 1000  # of the test images, for intervals
CROSS_CHECK_QUERIES = 1000  # queries of each direction of a protocol, by a FAISS search; 0 for all
COMPARISON_SAMPLES = 10_000  # of the test images, for p-values
RECALLS = (1, 5, 10)  # the K of R@K; rsum is the sum of these
TREC_DEPTH = 1000  # answers to a query in a run file
LADDER_COSTS = ("extraction_s", "train_s", "eval_s", "total_s", "cache_mb", "model_mb")  # of a result, in seconds and MB
REPORT_QUERIES = 12  # shown in a report, in each direction


def published_folder() -> Path:
    """Where the published tables lie, ``config/published``."""
    return Path(str(files("vse.presets").joinpath("published")))


def published_tables() -> list[str]:
    """Names of all published tables, ``<paper>_<table>``."""
    return sorted(path.stem for path in published_folder().glob("*.csv"))
