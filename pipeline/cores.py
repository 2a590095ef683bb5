"""How many cores this process may use, whether they are idle, and what OpenMP's threads should do while they wait.

All of it comes from the environment and from files of the kernel, below ``proc`` and ``cgroups``; torch is not imported.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def _two_ticks() -> None:
    time.sleep(0.02)


def set_up_openmp(
    environment: MutableMapping[str, str],
    proc: Path = PROC,
    cgroups: Path = CGROUPS,
    pause: Callable[[], None] = _two_ticks,
    may_spin: bool = True,
) -> None:
    """Write into ``environment`` how many threads OpenMP has and how they wait, unless it already says so.

    ``OMP_NUM_THREADS`` is written only where a job or a cgroup allows fewer cores than the affinity mask, which OpenMP knows.
    What else runs on the cores has no say in the number: results depend on it to the last bit, and should not depend on the
    neighbours of the day.

    Threads spin while they wait, OpenMP's default, if this process may use all cores of its mask and all are idle; else they
    sleep (``OMP_WAIT_POLICY=PASSIVE``). Sleeping costs up to 30% on idle cores. Spinning costs a factor of 3 on busy ones: a
    thread that spins keeps a core from the one that it waits for. Below a quota it spends the time of those that work.

    A program that waits for others, as a server does, says that it must not spin (``may_spin``).

    OpenMP reads these variables once, when torch is loaded.
    """
    cores = core_affinity()
    allowed = allowed_cores(environment, proc, cgroups)
    if allowed < len(cores):
        environment.setdefault("OMP_NUM_THREADS", str(allowed))
    if environment.keys() & _WAITING:
        return
    if not (may_spin and 1 < allowed == len(cores) and all_idle(cores, proc, pause)):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


def allowed_cores(environment: Mapping[str, str] = os.environ, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The number of cores that this process may keep busy, at least 1.

    The least of its affinity mask, the whole cores of its cgroups' quota, and ``SLURM_CPUS_PER_TASK``, a job's cores.
    """
    limits = [len(core_affinity()), cgroup_quota(proc, cgroups)]
    if (job := environment.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        limits.append(int(job))
    return max(1, math.floor(min(limits)))


def core_affinity() -> set[int]:
    """The numbers of the cores on which the scheduler may run this process; all cores on systems that have no such mask."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cgroup_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """How many cores' time this process's cgroups may spend, e.g. 1.5; infinity if there is no limit.

    The least of its own cgroup and those above it: ``cpu.max`` of version 2, ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of
    version 1. The root counts, too, because a container may see its own cgroup there.
    """
    quotas = [math.inf]
    for line in _text(proc / "self" / "cgroup").splitlines():  # 0::/path is version 2, 4:cpu,cpuacct:/path version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            files = [_text(root / folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
            limit = " ".join(files).split()
            if len(limit) == 2 and limit[0].isdecimal():  # neither max nor -1
                quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas)


def all_idle(cores: Iterable[int], proc: Path = PROC, pause: Callable[[], None] = _two_ticks) -> bool:
    """Whether each of ``cores`` is idle for more than half of a ``pause``, as ``/proc/stat`` counts it in ticks of 10 ms.

    These counters rather than the load average, which for a minute holds the command before this one against it, or the
    number of runnable tasks, which on a node of many jobs counts those on other cores: they are of now and of these cores, and
    time that a virtual machine is denied is time not idle. This process sleeps meanwhile and is not counted. What cannot be
    read counts as busy. Two ticks miss what keeps a core busy less than half of the time, and nobody sees what starts later.
    """
    before = _idle_less_busy(proc)
    pause()
    after = _idle_less_busy(proc)
    return all(after.get(core, 0) > before.get(core, 0) for core in cores)


def _idle_less_busy(proc: Path) -> dict[int, int]:
    """For each core, ticks since the machine started in which it was idle, less those in which it was not."""
    ticks = {}
    for line in _text(proc / "stat").splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name != "cpu":
            counts = [int(column) for column in columns[:8]]  # user nice system idle iowait irq softirq steal
            ticks[int(name[3:])] = 2 * sum(counts[3:5]) - sum(counts)
    return ticks


def _text(file: Path) -> str:
    """What a file holds, nothing if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
