"""A simulation of many jobs of which some fail and some are slow.

Each of ``at_once`` places of a cluster takes the next job as soon as it is free. A job fails with probability ``failing``, at
a random moment, and then joins the end of the queue again. A share ``slow`` of the runs takes ``slow_factor`` times as long,
as on a busy machine. The start of a job and the transfer of its files take ``overhead_s``.

    python benchmarks/schedule.py --jobs 128 --hours 1
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cluster:
    """The places of a cluster, and the faults of its jobs."""

    at_once: int = 100
    failing: float = 0.01
    slow: float = 0.05
    slow_factor: float = 3.0
    overhead_s: float = 60.0


def simulate(n_jobs: int, job_s: float, cluster: Cluster, rng: np.random.Generator) -> float:
    """Return the seconds until all of ``n_jobs`` jobs of ``job_s`` seconds are finished."""
    waiting, running = (
        deque(range(n_jobs)),
        [(0.0, -1)] * cluster.at_once,
    )  # end of a place's run, and a job that failed, or -1
    end = 0.0
    while waiting or any(failed >= 0 for _, failed in running):
        now, failed = heapq.heappop(running)
        if failed >= 0:
            waiting.append(failed)
        if not waiting:  # this place stays idle until another run ends
            later = min((one for one in running if one[0] > now), default=None)
            if later is None:
                break
            heapq.heappush(running, (later[0], -1))
            continue
        job = waiting.popleft()
        seconds = cluster.overhead_s + job_s * (cluster.slow_factor if rng.random() < cluster.slow else 1.0)
        fails = rng.random() < cluster.failing
        stop = now + seconds * (rng.random() if fails else 1.0)
        end = max(end, stop)
        heapq.heappush(running, (stop, job if fails else -1))
    return end


def expect(n_jobs: int, job_s: float, cluster: Cluster = Cluster(), repetitions: int = 200) -> tuple[float, float]:
    """Return the median and the 95th percentile of the seconds, over ``repetitions`` simulations with the seed 0."""
    rng = np.random.default_rng(0)
    ends = [simulate(n_jobs, job_s, cluster, rng) for _ in range(repetitions)]
    return float(np.median(ends)), float(np.quantile(ends, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--hours", type=float, required=True, help="hours of a job without a fault")
    parser.add_argument("--at-once", type=int, default=Cluster.at_once)
    parser.add_argument("--failing", type=float, default=Cluster.failing)
    parser.add_argument("--slow", type=float, default=Cluster.slow)
    arguments = parser.parse_args()
    cluster = Cluster(arguments.at_once, arguments.failing, arguments.slow)
    median, high = expect(arguments.jobs, 3600 * arguments.hours, cluster)
    print(f"{median / 3600:.2f} hours, 95th percentile {high / 3600:.2f} hours")


if __name__ == "__main__":
    main()
