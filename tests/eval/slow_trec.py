"""The measures of trec_eval from run and qrels files, computed as its documentation says, a query after the other.

A run is sorted by score, which is read in single precision, and equal scores by the name of the document, both descending;
the ranks in the file count for nothing. A measure is the mean over the queries that have right answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import log2
from pathlib import Path

import numpy as np
import pytrec_eval

Measures = dict[str, float]  # as trec_eval calls them, as shares of 1
CUTS = (1, 5, 10, 50)


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


def slow_measures(qrels: dict[str, dict[str, int]], run: dict[str, dict[str, float]]) -> Measures:
    assert set(run) == set(qrels)
    found: dict[str, list[float]] = defaultdict(list)
    for query, right in qrels.items():
        documents = sorted(((np.float32(score), name) for name, score in run[query].items()), reverse=True)
        hits = [name in right for _, name in documents]
        places = [place for place, hit in enumerate(hits, 1) if hit]
        for k in CUTS:
            found[f"success_{k}"].append(float(any(hits[:k])))
        found["recip_rank"].append(1 / places[0] if places else 0.0)
        found["map"].append(sum(n / place for n, place in enumerate(places, 1)) / len(right))
        gain = sum(1 / log2(place + 1) for place in places if place <= 10)
        best = sum(1 / log2(place + 1) for place in range(1, min(10, len(right)) + 1))
        found["ndcg_cut_10"].append(gain / best)
    return {name: float(np.mean(values)) for name, values in found.items()}


def measured(folder: Path, direction: str, run: str = "") -> Iterable[Measures]:
    """The measures of the files of a direction: of this reader, and of pytrec_eval."""
    qrels, answers = read_qrels(folder / f"{direction}.qrels"), read_run(folder / f"{direction}{run}.run")
    yield slow_measures(qrels, answers)
    cuts = ",".join(map(str, CUTS))
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {f"success.{cuts}", "recip_rank", "map", "ndcg_cut.10"})
    by_query = list(evaluator.evaluate(answers).values())
    yield {name: float(np.mean([of_query[name] for of_query in by_query])) for name in by_query[0]}
