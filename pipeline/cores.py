"""Find the cores that this process may use, and set the number and the waiting policy of OpenMP threads."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path

PROC_FOLDER, CGROUPS_FOLDER = Path("/proc"), Path("/sys/fs/cgroup")

_OPENMP_WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def _sleep_two_ticks() -> None:
    time.sleep(0.02)


def set_up_openmp(
    environment: MutableMapping[str, str],
    proc: Path = PROC_FOLDER,
    cgroups: Path = CGROUPS_FOLDER,
    pause: Callable[[], None] = _sleep_two_ticks,
    threads_may_spin: bool = True,
) -> None:
    """Set OpenMP's variables in ``environment``: the number of threads, and whether waiting threads sleep or spin.

    A variable that is already set is kept. ``OMP_NUM_THREADS`` is set only if a Slurm job or a cgroup (a limit of Linux)
    allows fewer cores than the affinity mask. The load has no influence on ``OMP_NUM_THREADS``, because the number of threads
    changes the last bits of results.

    Waiting threads spin, OpenMP's default, if this process may use all cores of the affinity mask and all cores are idle.
    Otherwise waiting threads sleep (``OMP_WAIT_POLICY=PASSIVE``). Sleeping costs up to 30% of the time on idle cores;
    spinning costs a factor of 3 on busy cores. A server, which mostly waits, passes ``threads_may_spin=False``.

    Call this function before torch is loaded: OpenMP reads the variables only once.
    """
    cores = core_affinity()
    allowed = count_allowed_cores(environment, proc, cgroups)
    if allowed < len(cores):
        environment.setdefault("OMP_NUM_THREADS", str(allowed))
    if environment.keys() & _OPENMP_WAIT_VARIABLES:
        return
    if not (threads_may_spin and 1 < allowed == len(cores) and are_cores_idle(cores, proc, pause)):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


def count_allowed_cores(
    environment: Mapping[str, str] = os.environ, proc: Path = PROC_FOLDER, cgroups: Path = CGROUPS_FOLDER
) -> int:
    """Return the number of cores that this process may use, at least 1.

    This number is the minimum of the size of the affinity mask, the quota of the cgroups (rounded down), and
    ``SLURM_CPUS_PER_TASK``.
    """
    limits = [len(core_affinity()), cgroup_quota(proc, cgroups)]
    if (job := environment.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        limits.append(int(job))
    return max(1, math.floor(min(limits)))


def core_affinity() -> set[int]:
    """Return the indices of the cores in this process's affinity mask; all cores on systems without affinity masks."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cgroup_quota(proc: Path = PROC_FOLDER, cgroups: Path = CGROUPS_FOLDER) -> float:
    """Return the number of cores whose time this process's cgroups may use, e.g. 1.5; infinity without a limit.

    The number is the smallest limit of the cgroup and its ancestors: ``cpu.max`` in version 2, ``cpu.cfs_quota_us`` and
    ``cpu.cfs_period_us`` in version 1. The root is included, because the root may be the cgroup of a container.
    """
    quotas = [math.inf]
    for line in _read_text(proc / "self" / "cgroup").splitlines():  # 0::/path is version 2, 4:cpu,cpuacct:/path version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            files = [_read_text(root / folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
            limit = " ".join(files).split()
            if len(limit) == 2 and limit[0].isdecimal():  # neither max nor -1
                quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas)


def are_cores_idle(cores: Iterable[int], proc: Path = PROC_FOLDER, pause: Callable[[], None] = _sleep_two_ticks) -> bool:
    """Return whether each of ``cores`` is idle for more than half of a ``pause``.

    The idle time comes from ``/proc/stat``, in ticks of 10 ms. A core without counters is busy. Time that a hypervisor takes
    from a virtual machine is busy time.
    """
    before = _read_idle_surplus_ticks(proc)
    pause()
    after = _read_idle_surplus_ticks(proc)
    return all(after.get(core, 0) > before.get(core, 0) for core in cores)


def _read_idle_surplus_ticks(proc: Path) -> dict[int, int]:
    """Return, for each core, the number of idle ticks minus the number of busy ticks since the machine started."""
    ticks = {}
    for line in _read_text(proc / "stat").splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name != "cpu":
            counts = [int(column) for column in columns[:8]]  # user nice system idle iowait irq softirq steal
            ticks[int(name[3:])] = 2 * sum(counts[3:5]) - sum(counts)
    return ticks


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
