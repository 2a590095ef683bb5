"""Groups of results that do not differ significantly, marked by letters (:mod:`vse.eval.ranking.families`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vse.eval.files.embeddings import Embeddings, check_same_split, resolve_path
from vse.eval.files.results import Result, read_result
from vse.eval.protocols.correction import repeat_correction
from vse.eval.protocols.protocols import (
    RankingOptions,
    rank_queries_of_seeds,
    read_seed_embeddings,
    select_languages_of_seeds,
)
from vse.eval.ranking.bootstrap import SeedQueries
from vse.eval.ranking.families import assign_letters, compare_all_pairs
from vse.pipeline.errors import UserError

COMPARED_PROTOCOL = "full"


class ComparedSystem(NamedTuple):
    """A system: its result, and the ranked queries of each seed."""

    path: Path
    result: Result
    queries: Sequence[SeedQueries]


class Groups(NamedTuple):
    """The letters of each result, by its path, and a note on the comparison."""

    letters_by_path: dict[Path, str]
    note: str


def group_results(paths: Sequence[Path], method: str) -> Groups:
    """Compare all pairs of results by rsum, and return the letters of each. Two results that differ share no letter.

    ``method`` corrects the p-values for the number of comparisons: holm, bonferroni or fdr. Raises UserError if there are
    fewer than two results, or if their embeddings are not where they name them.
    """
    systems = read_systems(paths, "rsum")
    if len(systems) < 2:
        raise UserError("--family compares results with each other, and there is one only; leave it out")
    family = compare_all_pairs([one.queries for one in systems], ["rsum"], method)
    differs = np.zeros((len(systems), len(systems)), bool)
    for pair in family.pairs:
        differs[pair.a, pair.b] = differs[pair.b, pair.a] = pair.is_significant
    letters = assign_letters(family.values, differs)
    count = f"{len(family.pairs)} comparisons" if len(family.pairs) > 1 else "1 comparison"
    note = f"results that share a letter do not differ significantly in rsum; {count}, p-values corrected by {method}"
    return Groups({one.path: one_letters for one, one_letters in zip(systems, letters, strict=True)}, note)


def read_systems(paths: Sequence[Path], metric: str) -> list[ComparedSystem]:
    """Read results, and rank the queries of their embeddings. Raises UserError if a result cannot be compared."""
    systems: list[ComparedSystem] = []
    first: tuple[Path, Embeddings] | None = None
    for path in paths:
        result = read_result(path)
        protocol = result.protocols.get(COMPARED_PROTOCOL)
        if protocol is None or protocol.metric(metric) is None:
            known = [] if protocol is None else [f"{d}_{name}" for d, of in protocol.directions.items() for name in of]
            reason = f"has no metric {metric!r} of the whole split"
            raise UserError(f"{path}: {reason}{f'; it has rsum, {chr(44).join(known)}' if known else ''}")
        files = [resolve_path(path, entry["file"]) for entry in result.provenance.get("embeddings", [])]
        if not files:
            raise UserError(f"{path}: does not name its embeddings, and the table compare reads them; evaluate files")
        if result.ensemble:
            raise UserError(f"{path}: is an ensemble; save its scores with vse-eval --ensemble --save, and evaluate them")
        seeds = select_languages_of_seeds(files, read_seed_embeddings(files), result.language)
        first = first or (files[0], seeds[0])
        check_same_split(*first, files[0], seeds[0])
        seeds = repeat_correction(path, result, files, seeds)
        ranked = rank_queries_of_seeds(files, seeds, COMPARED_PROTOCOL, RankingOptions(cross_check=False))
        systems.append(ComparedSystem(path, result, [one.folds for one in ranked]))
    return systems
