"""What a result says in a line, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vse.eval.defaults import RECALLS
from vse.eval.files.results import Combination, Result, mean_and_std
from vse.eval.ranking.list_metrics import LIST_METRICS
from vse.eval.ranking.metric_names import metric_name


def summary_line(result: Result, protocol: str) -> str:
    """The recalls of each direction, or what a protocol has in their place, and rsum where there is one; for a person."""
    shown = result.protocols[protocol]
    parts = []
    for direction, metrics in shown.directions.items():
        names = [name for name in metrics if name not in ("medr", "meanr", *LIST_METRICS)]
        if names:
            labels = "/".join(map(metric_name, names))
            labels = labels if "mAP@R" in labels else labels.replace("/R@", "/")
            parts.append(f"{direction} {labels} " + " / ".join(f"{mean_and_std(metrics[name])[0]:.1f}" for name in names))
    if shown.rsum is not None:
        interval = shown.interval("rsum")
        parts.append(
            f"rsum {mean_and_std(shown.rsum)[0]:.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")
        )
    facts = ([f"trained on {result.trained_on}"] if result.trained_on else []) + (
        ["not finished"] if result.unfinished else []
    )
    said = f" ({', '.join(facts)})" if facts else ""
    return f"{result.dataset} {result.shown_name}{said} {protocol}: {', '.join(parts)}"


def index_line(index: Mapping[str, Any]) -> str:
    """What an approximate index finds, for a person."""
    what = " ".join(filter(None, [index["factory"], index["parameters"]]))
    directions = []
    for direction in ("i2t", "t2i"):
        side = index[direction]
        flat = " (Flat)" if side["factory"] != index["factory"] else ""
        recall = f"{side['recall_at_10']:.1f}% of the exact top 10"
        directions.append(f"{direction}{flat} R@1/5/10 {_slashed(side)}, {recall}")
    reranked = f"; {index['reranked']} candidates re-ranked by exact scores" if "reranked" in index else ""
    return f"index {what}: {', '.join(directions)}{reranked}"


def rerank_line(rerank: Mapping[str, Any]) -> str:
    """What a re-ranking of some candidates gives, beside the exact metrics, for a person."""
    exact, directions = rerank["exact"], []
    for direction in ("i2t", "t2i"):
        side = rerank[direction]
        recalls = f"R@1/5/10 {_slashed(side)} (exact {_slashed(exact[direction])})"
        directions.append(f"{direction} {recalls}, {side['found']:.1f}% found")
    sums = f"rsum {rerank['rsum']:.1f} (exact {exact['rsum']:.1f}, lost {rerank['lost']['rsum']:.1f})"
    return f"best {rerank['reranked']} re-ranked: {', '.join(directions)}, {sums}"


def combination_line(combination: Combination) -> str:
    """How much phrases count in an ensemble, and where they do not, for a person."""
    by = "by validation" if combination.rsum_val else "as given"
    without = (
        f"{combination.n_captions_without_phrases:,} captions without phrases, "
        f"{combination.n_images_without_regions:,} images without regions"
    )
    return f"share of phrases (alpha) {combination.alpha:g}, {by}; {without}"


def _slashed(recalls: Mapping[str, Any]) -> str:
    return " / ".join(f"{recalls[f'r{k}']:.1f}" for k in RECALLS)
