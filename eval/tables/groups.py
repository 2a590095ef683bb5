"""Groups of results that do not differ significantly. A letter names each group, as in a compact letter display."""

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
from vse.eval.ranking.statistics import SeedQueries, assign_letters, compare_all_pairs
from vse.eval.tables.table import COMPARED_PROTOCOL, ResultGroups
from vse.pipeline.errors import UserError


class ComparedSystem(NamedTuple):
    """A model to compare: the path and the content (``result``) of its result file, and the ranked queries of each seed."""

    path: Path
    result: Result
    queries: Sequence[SeedQueries]


def group_results(paths: Sequence[Path], method: str) -> ResultGroups:
    """Compare all pairs of results by rsum, and return the groups of results that do not differ significantly.

    A letter names each group, and a result has the letters of all its groups. Two results that differ significantly share no
    letter. Results on different test images are not compared. ``method`` (holm, bonferroni or fdr) corrects the p-values for
    the number of comparisons on the same images. Raises UserError if no two results have the same test images, or if
    embeddings are not at the path that their result names.
    """
    paths_by_images: dict[tuple[str, str, str | None], list[Path]] = {}
    for path in paths:
        result = read_result(path)
        sha256 = result.split_identity.sha256 if result.split_identity else None
        paths_by_images.setdefault((result.dataset, result.split, sha256), []).append(path)
    letters_by_path, best, counts = dict.fromkeys(paths, ""), set[Path](), list[int]()
    for same_images in paths_by_images.values():
        if len(same_images) < 2:
            continue
        family = compare_all_pairs([one.queries for one in read_and_rank_systems(same_images, "rsum")], ["rsum"], method)
        differs = np.zeros((len(same_images), len(same_images)), bool)
        for pair in family.pairs:
            differs[pair.a, pair.b] = differs[pair.b, pair.a] = pair.is_significant
        letters_by_path |= dict(zip(same_images, assign_letters(family.values, differs), strict=True))
        best |= {path for path, is_worse in zip(same_images, differs[np.argmax(family.values)], strict=True) if not is_worse}
        counts.append(len(family.pairs))
    if not counts:
        raise UserError("--family compares results on the same images, and there are no two such results; leave it out")
    count = "1 comparison" if counts == [1] else f"{' and '.join(map(str, counts))} comparisons"
    images = "" if len(paths_by_images) == 1 else " on the same images"
    note = f"results{images} that share a letter do not differ significantly in rsum; {count}, p-values corrected by {method}"
    return ResultGroups(letters_by_path, frozenset(best), note)


def read_and_rank_systems(paths: Sequence[Path], metric: str) -> list[ComparedSystem]:
    """Read the results of models, and rank the queries of their embeddings by the protocol ``full``.

    Raises UserError if a result lacks ``metric``, such as ``i2t_r1``, does not name its embeddings, or is an ensemble. Raises
    UserError also if two results have different splits.
    """
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
