"""The result of a model: metrics over seeds, the content of the result file, and the lines that ``vse-eval`` prints."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from vse.eval import DEFAULT_KS
from vse.eval.files.embeddings import parse_provenance
from vse.eval.files.results import RESULT_VERSION, PhraseEnsemble, Result, file_reference, hash_file_content, mean_and_std
from vse.eval.options import JUDGED_PREFIX, PHRASE_PROTOCOL
from vse.eval.ranking.metrics import METRIC_TITLES, POSITION_METRICS, RANK_METRICS, metric_title
from vse.pipeline import __version__
from vse.pipeline.command import current_provenance
from vse.pipeline.errors import UserError
from vse.pipeline.files.hdf5 import ModelOutputMetadata

_COUNT_KEYS = ("folds", "n_queries")  # keys whose values are the same in every seed


def mean_and_std_over_seeds(results: Sequence[Any]) -> Any:
    """Return the mean and standard deviation over seeds of every metric; metrics of a single seed are returned unchanged.

    ``results`` has a nested dict or list per seed, all with the same keys. A metric becomes ``{"mean": ..., "std": ...}``
    with the sample standard deviation. Counts are the same for all seeds, and are not averaged.
    """
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, dict):
        return {
            key: first[key] if key in _COUNT_KEYS else mean_and_std_over_seeds([one[key] for one in results]) for key in first
        }
    if isinstance(first, list):
        return [mean_and_std_over_seeds(list(items)) for items in zip(*results, strict=True)]
    return {"mean": float(np.mean(results)), "std": float(np.std(results, ddof=1))}


def list_unfinished_runs(runs: Sequence[ModelOutputMetadata], out: Path, allow_unfinished: bool) -> list[dict[str, str]]:
    """List the runs whose training did not finish, with their embeddings files and states such as ``diverged``.

    Paths are relative to the folder of ``out``. Raises UserError if there is such a run and ``allow_unfinished`` is False.
    """
    unfinished = []
    for run in runs:
        state = parse_provenance(run).get("unfinished")
        if not state or run.source is None:
            continue
        if not allow_unfinished:
            raise UserError(
                f"{run.source.path}: the training of this run did not finish (state: {state}); continue the run and embed "
                "again, or evaluate it with --allow-unfinished"
            )
        unfinished.append({"file": os.path.relpath(run.source.path, out.parent), "state": str(state)})
    return unfinished


def build_result(
    first: ModelOutputMetadata,
    inputs: Sequence[ModelOutputMetadata],
    out: Path,
    unfinished: Sequence[Mapping[str, str]],
    measured: Mapping[str, Any],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Return the content of a result file: the model, the split, the metrics, the provenance, and the SHA-256 of all these.

    Parameters
    ----------
    first : the first seed, which names the data set, the experiment and the split
    inputs : the content of all embeddings files that were read; their paths and training costs become part of the result
    out : the result file; paths are relative to its folder
    unfinished : for each run whose training did not finish, the path of its embeddings and a state such as ``diverged``
    measured : all further entries of the result, such as the metrics under ``protocols``
    seconds : the duration of the evaluation; None if it is not known
    """
    versions = {
        "vse": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "python": platform.python_version(),
    }
    provenance = {"features": {}, "config": {}, **parse_provenance(first), "versions": versions}
    costs = [parse_provenance(run).get("cost") for run in inputs]
    if any(costs):
        provenance["costs"] = costs
    if seconds is not None:
        provenance["evaluation_s"] = seconds
    embeddings = [file_reference(run, out) for run in inputs if run.source is not None]
    result = {
        "version": RESULT_VERSION,
        "dataset": first.dataset,
        "experiment": first.experiment,
        "split": first.split,
        **({"trained_on": first.trained_on} if first.trained_on not in (None, first.dataset) else {}),
        **({"unfinished": unfinished} if unfinished else {}),
        **measured,
        "provenance": {**provenance, "made": current_provenance(), "embeddings": embeddings},
    }
    return {**result, "sha256": hash_file_content(result)}


def format_result_lines(result: Result) -> list[str]:
    """Return the lines to print for a result: one for each protocol, FAISS index, two-stage search, codec and phrase model."""
    if PHRASE_PROTOCOL in result.protocols:
        return [phrase_line(result)]
    lines = [summary_line(result, name) for name in result.protocols]
    lines += [index_line(result.index)] if result.index else []
    lines += map(rerank_line, result.rerank)
    lines += map(compression_line, result.compression)
    return [*lines, *([combination_line(result.combination)] if result.combination else [])]


def summary_line(result: Result, protocol: str) -> str:
    """Return a line with the metrics of each direction of a protocol, and with rsum if the protocol has it.

    Med r, mean r, nDCG@10, MRR and mAP are left out. The line of a protocol such as ``judged-expert`` has all metrics.
    """
    metrics = result.protocols[protocol]
    parts = []
    for direction, direction_metrics in metrics.directions.items():
        names = [name for name in direction_metrics if name not in (*RANK_METRICS, *POSITION_METRICS)]
        if protocol.startswith(JUDGED_PREFIX):
            names = list(direction_metrics)
        if names:
            labels = "/".join(map(metric_title, names))
            labels = labels if "mAP@R" in labels else labels.replace("/R@", "/")
            values = " / ".join(f"{mean_and_std(direction_metrics[name])[0]:.1f}" for name in names)
            parts.append(f"{direction} {labels} {values}")
    if metrics.rsum is not None:
        interval = metrics.interval("rsum")
        around = f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else ""
        parts.append(f"rsum {mean_and_std(metrics.rsum)[0]:.1f}{around}")
    return f"{_describe_model(result)} {protocol}: {', '.join(parts)}"


def phrase_line(result: Result) -> str:
    """Return a line with the metrics of a phrase localisation result."""
    protocol = result.protocols[PHRASE_PROTOCOL]
    values = {name: f"{mean_and_std(metric)[0]:.1f}" for name, metric in protocol.directions[PHRASE_PROTOCOL].items()}
    recalls = " / ".join(values[f"r{k}"] for k in DEFAULT_KS)
    interval = protocol.interval("phrase_r1")
    around = f" (R@1 [{interval[0]:.1f}, {interval[1]:.1f}])" if interval else ""
    others = ", ".join(f"{METRIC_TITLES[key]} {values[key]}" for key in ("bound", "mean_iou"))
    missed = f" (without a candidate: {protocol.n_without_candidate:,})" if protocol.n_without_candidate else ""
    counts = f"{protocol.n_phrases or 0:,} phrases{missed}; not counted, because they have no box: "
    counts += f"{protocol.n_without_box or 0:,}"
    return f"{_describe_model(result)} phrase: R@1/5/10 at IoU {protocol.iou:g} {recalls}{around}, {others}; {counts}"


def index_line(index: Mapping[str, Any]) -> str:
    """Return a line with the recalls of an approximate index."""
    name = " ".join(filter(None, [index["factory"], index["parameters"]]))
    directions = []
    for direction in ("i2t", "t2i"):
        found = index[direction]
        flat = " (Flat)" if found["factory"] != index["factory"] else ""
        recall = f"{found['recall_at_10']:.1f}% of the exact top 10"
        directions.append(f"{direction}{flat} R@1/5/10 {_join_recalls(found)}, {recall}")
    reranked = f"; {index['reranked']} candidates re-ranked by exact scores" if "reranked" in index else ""
    return f"index {name}: {', '.join(directions)}{reranked}"


def rerank_line(rerank: Mapping[str, Any]) -> str:
    """Return a line with the metrics of a two-stage search (``--rerank``), each next to the metric of the exact search."""
    exact, directions = rerank["exact"], []
    for direction in ("i2t", "t2i"):
        found = rerank[direction]
        recalls = f"R@1/5/10 {_join_recalls(found)} (exact {_join_recalls(exact[direction])})"
        directions.append(f"{direction} {recalls}, {found['found']:.1f}% found")
    rsum = f"rsum {rerank['rsum']:.1f} (exact {exact['rsum']:.1f}, lost {rerank['lost']['rsum']:.1f})"
    return f"best {rerank['reranked']} re-ranked: {', '.join(directions)}, {rsum}"


def hubs_line(hubs: Mapping[str, Any]) -> str:
    """Return a line with the statistics of hubs, the candidates near many queries.

    ``never`` is the percentage of candidates that are never among the first 10. ``largest`` is the percentage of queries that
    share the most frequent first candidate.
    """
    skewness, never, largest = (mean_and_std(hubs[name])[0] for name in ("skewness", "never", "largest"))
    first = f"one candidate is first for {largest:.1f}% of the queries"
    return f"skewness {skewness:.2f}; {never:.1f}% of the candidates are never among the first 10; {first}"


def compression_line(entry: Mapping[str, Any]) -> str:
    """Return a line with the bytes per vector and the rsum of a codec (``--compress``).

    If ``entry`` has ``rescored``, the line also has the rsum after the uncompressed vectors ranked the best candidates again.
    """
    text = f"{entry['codec']}, {entry['bytes']:,} bytes for each vector: {_describe_rsum(entry)}"
    if "rescored" in entry:
        text += f"; best {entry['rescored']['candidates']} rescored: {_describe_rsum(entry['rescored'])}"
    return text


def _describe_rsum(measured: Mapping[str, Any]) -> str:
    rsum = measured["rsum"]["mean"] if isinstance(measured["rsum"], Mapping) else measured["rsum"]
    interval = measured.get("ci95", {}).get("rsum")
    return f"rsum {rsum:.1f}" + (f" [{interval[0]:.1f}, {interval[1]:.1f}]" if interval else "")


def combination_line(combination: PhraseEnsemble) -> str:
    """Return a line with the weight of a phrase model, and the numbers of captions and images without its scores."""
    origin = "by validation" if combination.rsum_val else "as given"
    without = (
        f"{combination.n_captions_without_phrases:,} captions without phrases, "
        f"{combination.n_images_without_regions:,} images without regions"
    )
    return f"share of phrases (alpha) {combination.alpha:g}, {origin}; {without}"


def _describe_model(result: Result) -> str:
    facts = [f"trained on {result.trained_on}"] if result.trained_on else []
    facts += ["not finished"] if result.unfinished else []
    limits = f" ({', '.join(facts)})" if facts else ""
    return f"{result.dataset} {result.display_name}{limits}"


def _join_recalls(recalls: Mapping[str, Any]) -> str:
    return " / ".join(f"{recalls[f'r{k}']:.1f}" for k in DEFAULT_KS)
