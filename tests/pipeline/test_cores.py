"""Test the number of cores of this process and the waiting of threads, with copies of the kernel's files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from vse.pipeline.command import (
    are_cores_idle,
    count_allowed_cores,
    entry_point,
    read_cgroup_quota,
    read_core_affinity,
    set_up_openmp,
)

several_cores = pytest.mark.skipif(len(read_core_affinity()) < 2, reason="one core has no neighbours")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc"


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


@pytest.fixture
def set_quota(proc: Path, cgroups: Path) -> Callable[..., None]:
    """Write the lines of /proc/self/cgroup, and the files of the cgroup tree by path."""

    def write(*lines: str, **files: str) -> None:
        (proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))
        for path, text in files.items():
            (cgroups / path).parent.mkdir(parents=True, exist_ok=True)
            (cgroups / path).write_text(f"{text}\n")

    return write


def stat(busy: dict[int, int], idle: dict[int, int], steal: int = 0) -> str:
    """Write /proc/stat for cores with these numbers of busy, idle and stolen ticks."""
    each = [f"cpu{core} {100 + busy[core]} 0 50 {9000 + idle[core]} 7 0 3 {steal} 0 0" for core in busy]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 0 0", *each, "intr 14 0 0", "ctxt 1990473", "procs_running 2", ""])


@pytest.fixture
def passes(proc: Path) -> Callable[..., Callable[[], None]]:
    """Return a pause of two ticks in which cores are busy for some ticks and idle for the others."""

    def pause(*busy: int, steal: int = 0, cores: set[int] | None = None) -> Callable[[], None]:
        numbers = sorted(range(len(busy)) if cores is None else cores)
        none = dict.fromkeys(numbers, 0)
        ticks = dict(zip(numbers, busy, strict=True))
        (proc / "stat").write_text(stat(none, none))
        after = stat(ticks, {core: 2 - steal - used for core, used in ticks.items()}, steal)

        def advance() -> None:
            (proc / "stat").write_text(after)

        return advance

    return pause


NESTED = {"a/b/c": "max 100000", "a/b": "200000 100000", "a": "300000 100000", "a/beside": "100000 100000"}


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/user.slice/job", {"user.slice/job/cpu.max": "max 100000"}, math.inf),
        ("0::/user.slice/job", {"user.slice/job/cpu.max": "25000 50000"}, 0.5),
        ("0::/a/b/c", {f"{path}/cpu.max": limit for path, limit in NESTED.items()}, 2),  # the least of those above it
        ("0::/docker/0123abcd", {"cpu.max": "400000 100000"}, 4),  # a container sees its own cgroup at the root
        ("4:cpuacct,cpu:/job", {"cpu/job/cpu.cfs_quota_us": "150000"}, 1.5),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1"}, math.inf),
        ("4:cpuset,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "1"}, math.inf),
    ],
)
def test_a_cgroup_of_either_version_has_a_quota(
    group: str, files: dict[str, str], quota: float, set_quota: Callable[..., None], proc: Path, cgroups: Path
) -> None:
    set_quota("5:memory:/other", group, "0::/", **files, **{"cpu/job/cpu.cfs_period_us": "100000"})
    assert read_cgroup_quota(proc, cgroups) == quota


@pytest.mark.parametrize(
    ("limit", "cores"), [("50000 100000", 1), ("199000 100000", 1), ("6400000 100000", len(read_core_affinity()))]
)
def test_a_quota_allows_whole_cores_and_one(
    limit: str, cores: int, set_quota: Callable[..., None], proc: Path, cgroups: Path
) -> None:
    set_quota("0::/", **{"cpu.max": limit})
    assert count_allowed_cores({}, proc, cgroups) == cores


@pytest.mark.parametrize(("job", "cores"), [("1", 1), ("4096", len(read_core_affinity())), ("", len(read_core_affinity()))])
def test_a_job_of_slurm_allows_its_cores(job: str, cores: int, proc: Path, cgroups: Path) -> None:
    assert count_allowed_cores({"SLURM_CPUS_PER_TASK": job}, proc, cgroups) == cores


BOUND_TO_ONE_CORE = """
import json, os, sys
from pathlib import Path
from vse.pipeline.command import count_allowed_cores, set_up_openmp
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
environment = {}
set_up_openmp(environment, cgroups=Path(sys.argv[1]), pause=lambda: sys.exit("looks at cores that it does not need"))
print(json.dumps([count_allowed_cores({}, cgroups=Path(sys.argv[1])), environment]))
"""


def test_a_process_may_use_the_cores_of_its_affinity_mask(cgroups: Path) -> None:
    command = [sys.executable, "-c", BOUND_TO_ONE_CORE, str(cgroups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, {"OMP_WAIT_POLICY": "PASSIVE"}], "OpenMP knows the mask by itself"


@pytest.mark.parametrize(
    ("busy", "idle"),
    [((0, 0, 0), True), ((0, 2, 0), False), ((0, 1, 0), False), ((0, 0, 2), True), ((2, 2, 2), False)],
    ids=["idle", "busy", "half", "another core", "all"],
)
def test_cores_are_idle_if_unused(
    busy: tuple[int, ...], idle: bool, proc: Path, passes: Callable[..., Callable[[], None]]
) -> None:
    assert are_cores_idle([0, 1], proc, passes(*busy)) == idle


def test_cores_are_busy_if_their_time_is_stolen_or_not_known(proc: Path, passes: Callable[..., Callable[[], None]]) -> None:
    assert not are_cores_idle([0, 1], proc, passes(0, 0, steal=1)), "a virtual machine is denied them"
    assert not are_cores_idle([0, 2], proc, passes(0, 0))
    (proc / "stat").unlink()
    assert not are_cores_idle([0], proc, lambda: None)


@several_cores
@pytest.mark.parametrize(
    ("busy", "quota", "threads_may_spin", "expected"),
    [
        (0, "max 100000", True, {"GOMP_SPINCOUNT": "3000"}),
        (2, "max 100000", True, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (0, "max 100000", False, {"OMP_WAIT_POLICY": "PASSIVE"}),  # the program waits for others
        (0, "150000 100000", True, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_threads_are_as_many_as_a_quota_allows_and_spin_on_idle_cores(
    busy: int, quota: str, threads_may_spin: bool, expected: dict[str, str], proc: Path, cgroups: Path,
    set_quota: Callable[..., None], passes: Callable[..., Callable[[], None]],
) -> None:  # fmt: skip
    cores, made = read_core_affinity(), dict[str, str]()
    set_quota("0::/", **{"cpu.max": quota})
    pause = passes(*[0] * (len(cores) - 1), busy, cores=cores)
    set_up_openmp(made, proc, cgroups, pause, threads_may_spin=threads_may_spin)
    assert made == expected


@several_cores
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("vse-train", [], "GOMP_SPINCOUNT"),
        ("vse", ["train"], "GOMP_SPINCOUNT"),
        ("vse-extract", ["cnn"], "OMP_WAIT_POLICY"),
        ("vse", ["extract", "cnn"], "OMP_WAIT_POLICY"),
        ("vse-serve", [], "OMP_WAIT_POLICY"),
        ("vse", ["serve"], "OMP_WAIT_POLICY"),
    ],
)
def test_the_threads_of_an_extraction_and_of_a_server_never_spin(
    name: str, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    found: list[str] = []

    @click.command(name)
    @click.argument("words", nargs=-1)
    def command(words: tuple[str, ...]) -> None:
        found.extend(variable for variable in variables if variable in os.environ)

    for variable in (*variables, "KMP_BLOCKTIME", "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(variable, "")  # so that the old value is set again after the test
        monkeypatch.delenv(variable)
    monkeypatch.setattr("vse.pipeline.command.are_cores_idle", lambda *_: True)
    monkeypatch.setattr("vse.pipeline.command.read_cgroup_quota", lambda *_: math.inf)
    with pytest.raises(SystemExit, match="^0$"):
        entry_point(command)(arguments)
    assert found == [expected]


@pytest.mark.parametrize("waiting", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "0"}])
def test_what_the_environment_says_stays(waiting: dict[str, str], proc: Path, cgroups: Path) -> None:
    given = {"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "1", **waiting}
    made = dict(given)
    set_up_openmp(made, proc, cgroups)
    assert made == given
