"""Run and qrels files, read strictly, and their measures by pytrec_eval."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytrec_eval

Measures = dict[str, float]  # as trec_eval calls them, as shares of 1
CUTS = "1,5,10"


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        query, zero, document, relevance = line.split()
        assert zero == "0"
        assert document not in qrels[query]
        qrels[query][document] = int(relevance)
    return dict(qrels)


def read_run(path: Path) -> dict[str, dict[str, float]]:
    run: dict[str, dict[str, float]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        query, constant, document, rank, score, _ = line.split()
        assert constant == "Q0"
        assert document not in run[query]
        run[query][document] = float(score)
        assert int(rank) == len(run[query])
    return dict(run)


def measured(folder: Path, direction: str, run: str = "") -> Measures:
    """The measures of the files of a direction, as pytrec_eval computes them."""
    qrels, answers = read_qrels(folder / f"{direction}.qrels"), read_run(folder / f"{direction}{run}.run")
    assert set(answers) == set(qrels)
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {f"success.{CUTS}", "recip_rank", "map", "ndcg_cut.10"})
    by_query = list(evaluator.evaluate(answers).values())
    return {name: float(np.mean([of_query[name] for of_query in by_query])) for name in by_query[0]}
