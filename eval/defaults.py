"""Default values and names that the commands show in their help. Importing this module loads no library."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

COCO_PROTOCOLS = ("cxc", "eccv")
N_IMAGES_PER_FOLD = 1000  # images in a fold
FOLDED_PROTOCOLS = ("1k", "sentence-1k")  # protocols whose metrics are means over folds
PROTOCOLS = ("1k", "full", "sentence", "sentence-1k", *COCO_PROTOCOLS)
JUDGED_PREFIX = "judged-"  # begins the name of a protocol whose right answers people judged, e.g. judged-expert
CHOICES_PROTOCOL = "choices"  # choices among a few captions; choices-same_type has those of one kind
PHRASE_PROTOCOL = "phrase"  # name of the protocol of phrase scores, and of its only direction, from phrases to regions
DEFAULT_IOU_THRESHOLD = 0.5  # a candidate box is right if its IoU with the ground-truth box reaches this threshold
N_BOOTSTRAP_SAMPLES = 1000  # samples of the test images for a confidence interval
N_CROSS_CHECK_QUERIES = 1000  # queries of each direction that are compared with a FAISS search; 0 compares all
N_COMPARISON_SAMPLES = 10_000  # samples of the test images for a p-value
DEFAULT_KS = (1, 5, 10)  # the K of R@K in every result; rsum adds up these recalls of both directions
TREC_DEPTH = 1000  # answers for each query in a run file
FAMILY_METHODS = ("holm", "bonferroni", "fdr")  # corrections of p-values for the number of comparisons
COST_NAMES = ("extraction_s", "train_s", "eval_s", "total_s", "cache_mb", "model_mb")  # in seconds and MB
N_REPORT_QUERIES = 12  # queries of each direction that a report displays
N_GALLERY_QUERIES = 20  # best queries, and worst queries, of each direction in the gallery of a report


def published_folder() -> Path:
    """Return the folder of the published tables, ``config/published``."""
    return Path(str(files("vse.presets").joinpath("published")))


def published_tables() -> list[str]:
    """Return the names of all published tables, ``<paper>_<table>``."""
    return sorted(path.stem for path in published_folder().glob("*.csv"))
