"""EM and Fisher vectors of hybrid and of Gaussian mixtures as loops over single numbers, in double precision."""

from __future__ import annotations

import math

from vse.features.extractors.mixture import MIN_SPREAD, Mixture


def as_lists(mixture: Mixture) -> dict:
    names = ("priors", "median", "deviation", "mean", "variance", "laplacian")
    return {name: getattr(mixture, name).tolist() for name in names}


def slow_posterior(x: list[float], m: dict) -> list[float]:
    logs = []
    for k in range(len(m["priors"])):
        total = math.log(m["priors"][k])
        for d, value in enumerate(x):
            if m["laplacian"][k][d]:
                total += -math.log(2 * m["deviation"][k][d]) - abs(value - m["median"][k][d]) / m["deviation"][k][d]
            else:
                variance = m["variance"][k][d]
                total += -0.5 * math.log(2 * math.pi * variance) - (value - m["mean"][k][d]) ** 2 / (2 * variance)
        logs.append(total)
    top = max(logs)
    parts = [math.exp(value - top) for value in logs]
    return [part / sum(parts) for part in parts]


def slow_step(data: list[list[float]], m: dict) -> dict:
    n, dim, n_clusters = len(data), len(data[0]), len(m["priors"])
    gamma = [slow_posterior(x, m) for x in data]
    new = {key: [[0.0] * dim for _ in range(n_clusters)] for key in ("median", "deviation", "mean", "variance", "laplacian")}
    new["priors"] = [0.0] * n_clusters
    for k in range(n_clusters):
        weight = sum(gamma[i][k] for i in range(n))
        new["priors"][k] = weight / n
        for d in range(dim):
            order = sorted(range(n), key=lambda i: data[i][d])
            reached = 0.0
            for i in order:
                reached += gamma[i][k]
                if reached >= weight / 2:
                    break
            median = data[i][d]
            absolute = sum(gamma[i][k] * abs(data[i][d] - median) for i in range(n)) / weight
            mean = sum(gamma[i][k] * data[i][d] for i in range(n)) / weight
            squared = sum(gamma[i][k] * (data[i][d] - mean) ** 2 for i in range(n)) / weight
            s, v = max(absolute, MIN_SPREAD), max(squared, MIN_SPREAD)
            laplace = sum(gamma[i][k] * (-math.log(2 * s) - abs(data[i][d] - median) / s) for i in range(n))
            gauss = sum(
                gamma[i][k] * (-0.5 * math.log(2 * math.pi * v) - (data[i][d] - mean) ** 2 / (2 * v)) for i in range(n)
            )
            new["median"][k][d], new["deviation"][k][d] = median, s
            new["mean"][k][d], new["variance"][k][d] = mean, v
            new["laplacian"][k][d] = laplace > gauss
    return new


def slow_fisher_vector(words: list[list[float]], m: dict) -> list[float]:
    """First all derivatives by the places, cluster by cluster, then all by the deviations."""
    n_clusters, dim = len(m["priors"]), len(m["median"][0])
    place = [[0.0] * dim for _ in range(n_clusters)]
    spread = [[0.0] * dim for _ in range(n_clusters)]
    for x in words:
        gamma = slow_posterior(x, m)
        for k in range(n_clusters):
            for d in range(dim):
                root = math.sqrt(len(words) * m["priors"][k])
                if m["laplacian"][k][d]:
                    off = x[d] - m["median"][k][d]
                    place[k][d] += gamma[k] * (1 if off >= 0 else -1) / root
                    spread[k][d] += gamma[k] * (abs(off) / m["deviation"][k][d] - 1) / root
                else:
                    off = (x[d] - m["mean"][k][d]) / math.sqrt(m["variance"][k][d])
                    place[k][d] += gamma[k] * off / root
                    spread[k][d] += gamma[k] * (off**2 - 1) / (root * math.sqrt(2))
    return [value for part in (place, spread) for row in part for value in row]
