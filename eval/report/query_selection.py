"""Select the queries that a report displays: best, worst and sampled ones, or those that distinguish two models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vse.eval.ranking.rank_arrays import Ints

MAX_NEAR_MISS_RANK = 10  # a right answer up to this (1-based) rank is a near miss


def select_groups(
    ranks: Sequence[Ints], images: Ints, n: int, seed: int, extremes: bool = False
) -> tuple[list[str], Sequence[list[int]], tuple[int, int, int] | None]:
    """Select groups of queries for one or two models: return their titles, the indices of their queries, and counts.

    For two models, the counts are the numbers of queries on which the first model, the second model and neither is better; for
    one model they are None. ``n`` is the largest number of queries in a group with ``extremes``, else in all groups together.
    """
    if len(ranks) == 1 and extremes:
        worst, best = select_extreme_queries(ranks[0], n, seed)
        return [f"The worst {len(worst)} queries", f"The best {len(best)} queries"], (worst, best), None
    if len(ranks) == 1:
        titles = [
            "Right answer at rank 1",
            f"Near misses: right answer at rank 2 to {MAX_NEAR_MISS_RANK}",
            "Failures: the largest ranks of all",
        ]
        return titles, select_queries(ranks[0], images, n, seed), None
    first, second = ranks
    better, worse = int(np.count_nonzero(first < second)), int(np.count_nonzero(first > second))
    titles = ["A ranks the right answer higher", "B ranks the right answer higher"]
    n_selected = 2 * n if extremes else n
    selected = select_contrasting_queries(first, second, images, n_selected)
    return titles, selected, (better, worse, len(first) - better - worse)


def select_extreme_queries(ranks: Ints, n: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the ``n`` queries with the largest ranks, and of the ``n`` other queries with the smallest ranks.

    The first list starts with the largest rank, and the second list with the smallest. Queries with the same rank are in
    random order, by ``seed``.
    """
    sample = np.random.default_rng(seed).permutation(len(ranks))
    order = sample[np.argsort(ranks[sample], kind="stable")].tolist()
    n_worst = min(n, len(order) // 2)
    return order[len(order) - n_worst :][::-1], order[: min(n, len(order) - n_worst)]


def select_queries(ranks: Ints, images: Ints, n: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Return the indices of up to ``n`` queries, a third each of successes, near misses and failures.

    Successes (rank 0) and near misses are sampled with ``seed``; failures have the largest ranks. ``images`` (n_queries,) is
    the row of each query's image. Each image is selected once.
    """
    parts = [n // 3 + (part < n % 3) for part in range(3)]
    sample = np.random.default_rng(seed).permutation(len(ranks))
    worst = np.argsort(-ranks, kind="stable")
    used: set[int] = set()
    failures = take_queries_of_new_images(worst[ranks[worst] > 0], images, parts[2], used)
    near = sample[(ranks[sample] > 0) & (ranks[sample] < MAX_NEAR_MISS_RANK)]
    near_misses = take_queries_of_new_images(near, images, parts[1], used)
    successes = take_queries_of_new_images(sample[ranks[sample] == 0], images, parts[0], used)
    near_misses.sort(key=lambda query: int(ranks[query]))
    return successes, near_misses, failures


def select_contrasting_queries(first: Ints, second: Ints, images: Ints, n: int) -> tuple[list[int], list[int]]:
    """Return the indices of up to ``n`` queries: a half that the first model ranks better, and a half for the second model.

    ``first`` and ``second`` are the ranks (n_queries,) of the two models. Queries that one model alone ranks at 0 come first
    (Tables II and III of the TOD-Net paper), then queries are in descending order of the factor between the 1-based ranks.
    ``images`` (n_queries,) is the row of each query's image. Each image is selected once.
    """
    gain = np.log1p(second) - np.log1p(first)
    solved = (first == 0) | (second == 0)
    used: set[int] = set()
    halves = []
    for sign, size in ((1, n - n // 2), (-1, n // 2)):
        order = np.lexsort((-sign * gain, ~solved))
        halves.append(take_queries_of_new_images(order[sign * gain[order] > 0], images, size, used))
    return halves[0], halves[1]


def take_queries_of_new_images(queries: Ints, images: Ints, n: int, used: set[int]) -> list[int]:
    """Return the first ``n`` of ``queries`` whose images are not in ``used``, and add these images to ``used``.

    ``queries`` are indices into ``images``, which has the image of every query.
    """
    selected: list[int] = []
    for query in queries.tolist():
        if len(selected) == n:
            break
        if images[query] not in used:
            used.add(int(images[query]))
            selected.append(query)
    return selected
