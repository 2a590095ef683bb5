"""From embeddings files to the result file: every protocol, over one or several seeds."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import vse
from vse.eval.embeddings import Embeddings, read_embeddings
from vse.eval.metrics import FOLD, RECALLS, averaged, direction_metrics, metrics
from vse.eval.ranks import Ranks, ranks_from_embeddings, ranks_from_scores
from vse.eval.scores import SIMILARITIES
from vse.eval.search import check_against_candidates, check_against_search, check_sentences_against_search
from vse.eval.sentences import sentence_ranks
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files import sha256_file, sha256_json, write_json

log = logging.getLogger(__name__)
PROTOCOLS = ("1k", "full", "sentence")
VERSION = 1


def evaluate(files: Sequence[Path], out: Path, protocol: str | Sequence[str] = "auto", cross_check: bool = True) -> Path:
    """Write the result file of one model's embeddings, a file per seed; returns ``out``.

    ``protocol``, one or several, is ``1k`` (the mean over consecutive folds of 1,000 images), ``full`` (the whole
    split), ``sentence`` (captions query captions, over the whole split), or ``auto``: ``full``, and ``1k`` if there are
    1,000 images. With several seeds every figure becomes ``{"mean": ..., "std": ...}`` (the sample's standard
    deviation). ``cross_check`` compares with FAISS.
    """
    asked = [protocol] if isinstance(protocol, str) else list(protocol)
    for name in asked or [""]:
        if name not in ("auto", *PROTOCOLS):
            raise UserError(f"unknown protocol {name!r}{did_you_mean(name, ('auto', *PROTOCOLS))}")
    runs = [read_embeddings(path) for path in files]
    first = runs[0]
    for path, run in zip(files, runs, strict=True):
        _same_split(files[0], first, path, run)
        if "sentence" in asked and run.captions is None:
            raise UserError(f"{path}: the protocol sentence needs caption embeddings, and the file has none")
    n_images = len(first.image_ids)
    if "1k" in asked and n_images < FOLD:
        raise UserError(f"{files[0]}: the protocol 1k needs {FOLD} images, there are {n_images}")
    if "auto" in asked:
        asked += ["1k", "full"] if n_images >= FOLD else ["full"]
    chosen = [p for p in PROTOCOLS if p in asked]
    by_seed = [{p: _protocol(run, p, cross_check) for p in chosen} for run in runs]
    result = {
        "version": VERSION,
        "dataset": first.dataset,
        "experiment": first.experiment,
        "split": first.split,
        "n_images": n_images,
        "n_captions": len(first.caption_ids),
        "seeds": [run.seed for run in runs],
        "protocols": {p: _over_seeds([seed[p] for seed in by_seed]) for p in chosen},
        "provenance": {**_provenance(first), "embeddings": [_noted(path, out) for path in files]},
    }
    return write_json(out, {**result, "sha256": content_sha256(result)})


def content_sha256(result: Mapping[str, Any]) -> str:
    """SHA-256 of all of a result but its own ``sha256``, by which a later change of the file is noticed."""
    return sha256_json({name: value for name, value in result.items() if name != "sha256"})


def summary_line(result: Mapping[str, Any], protocol: str) -> str:
    """R@1/5/10 of each way, and rsum where there are two; for a person."""
    found = result["protocols"][protocol]
    parts = [
        f"{way} R@1/5/10 " + " / ".join(f"{_mean(found[way][f'r{k}']):.1f}" for k in RECALLS)
        for way in ("i2t", "t2i", "s2s")
        if way in found
    ]
    if "rsum" in found:
        parts.append(f"rsum {_mean(found['rsum']):.1f}")
    return f"{result['dataset']} {result['experiment']} {protocol}: {', '.join(parts)}"


def _mean(figure: Any) -> float:
    return float(figure["mean"] if isinstance(figure, Mapping) else figure)


def _protocol(run: Embeddings, protocol: str, cross_check: bool) -> dict[str, Any]:
    if protocol == "sentence":
        return _sentence(run, cross_check)
    owners = run.owners()
    if protocol == "full":
        return metrics(_ranks(run, np.arange(len(run.image_ids)), np.arange(len(owners)), cross_check))
    folds = []
    for start in range(0, len(run.image_ids) // FOLD * FOLD, FOLD):
        images = np.arange(start, start + FOLD)
        captions = np.flatnonzero((owners >= start) & (owners < start + FOLD))
        folds.append(metrics(_ranks(run, images, captions, cross_check=False)))
    return {"folds": len(folds), **averaged(folds), "per_fold": folds}


def _sentence(run: Embeddings, cross_check: bool) -> dict[str, Any]:
    assert run.captions is not None
    owners = run.owners()
    found = sentence_ranks(torch.from_numpy(run.captions), torch.from_numpy(owners))
    if cross_check:
        recalls = check_sentences_against_search(run.captions, owners, found, RECALLS)
        log.info("FAISS agrees with the exact ranks (R@1 %.1f s2s)", recalls["r1"])
    return {"s2s": direction_metrics(found.ranks), "n_queries": len(found.queries)}


def _ranks(run: Embeddings, images: np.ndarray[Any, Any], captions: np.ndarray[Any, Any], cross_check: bool) -> Ranks:
    """Exact ranks among some rows of a run, which are consecutive images and all their captions."""
    owners = run.owners()[captions] - images[0]
    if run.scores is not None:
        return ranks_from_scores(torch.from_numpy(run.scores[np.ix_(images, captions)]), torch.from_numpy(owners))
    assert run.images is not None
    assert run.captions is not None
    left, right = run.images[images], run.captions[captions]
    ranks = ranks_from_embeddings(torch.from_numpy(left), torch.from_numpy(right), torch.from_numpy(owners), run.similarity)
    if cross_check and run.similarity == "cosine":
        found = check_against_search(left, right, owners, ranks, RECALLS)
        log.info("FAISS agrees with the exact ranks (R@1 %.1f i2t, %.1f t2i)", found["i2t"]["r1"], found["t2i"]["r1"])
    elif cross_check:
        found = check_against_candidates(left, right, owners, ranks, RECALLS, run.similarity)
        exact = metrics(ranks)
        compared = ", ".join(f"{way} {found[way]['r1']:.1f}, exact {exact[way]['r1']:.1f}" for way in ("i2t", "t2i"))
        log.info("candidates of FAISS, re-ranked, do not contradict the exact ranks (R@1 %s)", compared)
    return ranks


def _over_seeds(results: Sequence[Any]) -> Any:
    """One seed's figures as they are; of several, mean and standard deviation of each that is no count."""
    first = results[0]
    if len(results) == 1:
        return first
    if isinstance(first, dict):
        counts = ("folds", "n_queries")
        return {key: first[key] if key in counts else _over_seeds([r[key] for r in results]) for key in first}
    if isinstance(first, list):
        return [_over_seeds(list(items)) for items in zip(*results, strict=True)]
    return {"mean": float(np.mean(results)), "std": float(np.std(results, ddof=1))}


def _same_split(first_path: Path, first: Embeddings, path: Path, run: Embeddings) -> None:
    if run.scores is None and run.similarity not in SIMILARITIES:
        raise UserError(f"{path}: unknown similarity {run.similarity!r}{did_you_mean(str(run.similarity), SIMILARITIES)}")
    for name in ("dataset", "split", "experiment", "similarity"):
        if getattr(first, name) != getattr(run, name):
            raise UserError(f"{path} is of {name} {getattr(run, name)!r}, {first_path} of {getattr(first, name)!r}")
    for name in ("image_ids", "caption_ids", "caption_image_ids"):
        if not np.array_equal(getattr(first, name), getattr(run, name)):
            raise UserError(f"{path} and {first_path} differ in {name}; seeds of one experiment share them")
    if run is not first and run.seed == first.seed:
        raise UserError(f"{path} and {first_path} are of the same seed {run.seed}")


def _noted(embeddings: Path, out: Path) -> dict[str, str]:
    """Where a file of embeddings lies, seen from the result, and its SHA-256."""
    return {"file": os.path.relpath(embeddings, out.parent), "sha256": sha256_file(embeddings)}


def _provenance(run: Embeddings) -> dict[str, Any]:
    versions = {
        "vse": vse.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "python": platform.python_version(),
    }
    try:
        noted = json.loads(run.provenance)
    except (json.JSONDecodeError, TypeError):
        noted = {}
    noted = noted if isinstance(noted, dict) else {"note": noted}
    return {"features": {}, "config": {}, **noted, "versions": versions}
