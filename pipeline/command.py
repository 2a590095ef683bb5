"""Build the entry points of the commands, set their number of threads, and state which command wrote an output file.

A user's mistake ends a command with one line on stderr and exit code 2. The log goes to stderr, too.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import click

from vse.pipeline import __version__
from vse.pipeline.errors import Interrupted, UserError, to_printable_line
from vse.pipeline.files.inputs import error_reason, find_nearest_path, is_path_text, report_changed_inputs
from vse.pipeline.presets.own_code import describe_own_code_error

PROC_FOLDER, CGROUPS_FOLDER = Path("/proc"), Path("/sys/fs/cgroup")

_N_SPINS = "3000"  # about 40 microseconds
_COMMANDS_WITHOUT_SPINNING = {"extract", "serve"}  # spinning would take cores from threads that read photos or answer
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
    """Set OpenMP's variables in ``environment``: the number of threads, and how long a waiting thread spins before it sleeps.

    A variable that is already set is kept. The affinity mask of a process is the set of cores on which Linux lets it run.
    ``OMP_NUM_THREADS`` is set only if a Slurm job or a cgroup (a limit of Linux) allows fewer cores than this mask. A busy
    machine does not lower ``OMP_NUM_THREADS``, because the number of threads changes the last bits of results.

    If this process may use all cores of the mask (two or more), and all are idle, a waiting thread first spins for some
    microseconds (``GOMP_SPINCOUNT``), and then sleeps. Otherwise it sleeps at once (``OMP_WAIT_POLICY=PASSIVE``). Sleeping at
    once can be slower on idle cores, and spinning is much slower on busy cores. OpenMP's default is to spin for milliseconds,
    which can be faster on idle cores, but takes more processor time. Programs that mostly wait, or whose other threads need
    the cores, pass ``threads_may_spin=False``. Only GNU's OpenMP reads ``GOMP_SPINCOUNT``.

    Call this function before torch is loaded: OpenMP reads the variables only once. Tests replace ``proc`` and ``cgroups``
    (folders of the system) and ``pause`` (the function that waits between two readings of the idle time).
    """
    cores = read_core_affinity()
    allowed = count_allowed_cores(environment, proc, cgroups)
    if allowed < len(cores):
        environment.setdefault("OMP_NUM_THREADS", str(allowed))
    if environment.keys() & _OPENMP_WAIT_VARIABLES:
        return
    if threads_may_spin and 1 < allowed == len(cores) and are_cores_idle(cores, proc, pause):
        environment["GOMP_SPINCOUNT"] = _N_SPINS
    else:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


def count_allowed_cores(
    environment: Mapping[str, str] = os.environ, proc: Path = PROC_FOLDER, cgroups: Path = CGROUPS_FOLDER
) -> int:
    """Return the number of cores that this process may use, at least 1.

    The number is the smallest of three limits: the number of cores on which Linux lets this process run (its affinity mask),
    the quota of its cgroups (rounded down), and ``SLURM_CPUS_PER_TASK``. Tests replace the folders ``proc`` and ``cgroups``.
    """
    limits = [len(read_core_affinity()), read_cgroup_quota(proc, cgroups)]
    if (job := environment.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        limits.append(int(job))
    return max(1, math.floor(min(limits)))


def read_core_affinity() -> set[int]:
    """Return the indices of the cores on which the system lets this process run (its affinity mask).

    On systems without affinity masks, these are all cores.
    """
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def read_cgroup_quota(proc: Path = PROC_FOLDER, cgroups: Path = CGROUPS_FOLDER) -> float:
    """Return the number of cores that the cgroups (limits of Linux) of this process allow, e.g. 1.5; infinity if unlimited.

    The number is the smallest limit of the cgroup and its ancestors. The limit is in the file ``cpu.max`` (version 2), or in
    ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` (version 1). The ancestors include the root of the folder tree, because this
    root may be the cgroup of a container.
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
    """Return whether each of ``cores`` is idle for more than half of the time during which ``pause`` runs.

    ``pause`` is a function that sleeps. The idle time comes from ``/proc/stat``, in ticks of 10 ms. A core without counters
    counts as busy. Time that a hypervisor takes from a virtual machine is busy time.
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


_MAX_ERROR_LENGTH = 1500  # characters of an error message, a few lines of a terminal
_MAX_PATH_LENGTH = 300  # characters of a path that is compared with other paths
_recorded_command: ContextVar[str | None] = ContextVar("_recorded_command", default=None)


@contextmanager
def record_command(command: str) -> Iterator[None]:
    """Record ``command``, a shell command or Python call as text, in all files that are written in the ``with`` block."""
    token = _recorded_command.set(command)
    try:
        yield
    finally:
        _recorded_command.reset(token)


def current_provenance() -> dict[str, Any]:
    """Return the origin of a file that is written now: ``date`` (UTC), ``command``, and ``code``, the version of this program.

    ``command`` is the text that :func:`record_command` has recorded; None without such a text. The origin differs from run to
    run. Therefore the hash that identifies a cache must not depend on the origin.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": _recorded_command.get(),
        "code": dict(find_code_version()),
    }


@cache
def find_code_version(root: Path | None = None) -> dict[str, Any]:
    """Return the ``version`` of this package and, in a git checkout, also ``commit`` and ``changed``.

    ``changed`` is True if a tracked file differs from the commit.

    ``root`` is the folder that contains the code; None stands for the folder of the running code.
    """
    root = Path(__file__).resolve().parents[1] if root is None else root
    version = {"version": __version__}
    top = _run_git(root, "rev-parse", "--show-toplevel")
    # An installed copy may lie in the repository of another project.
    if top is None or Path(top).resolve() != root.resolve():
        return version
    commit, status = _run_git(root, "rev-parse", "HEAD"), _run_git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return version
    return {**version, "commit": commit, "changed": bool(status)}


def format_code_version(version: object) -> str | None:
    """Return ``version`` as text, e.g. ``vse 0.1.0, commit 0123456789ab (changed)``; None for an object of another form."""
    if not isinstance(version, dict) or not isinstance(version.get("version"), str):
        return None
    commit = f", commit {str(version['commit'])[:12]}" if "commit" in version else ""
    return f"vse {version['version']}{commit}{' (changed)' if version.get('changed') else ''}"


def _run_git(root: Path, *arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def entry_point(command: click.Command) -> Callable[..., None]:
    """Return the function that the console script of a click command calls, and add ``--version`` to the command.

    The exit code is 0 for success, 2 for bad input or usage, and 1 (with a traceback) for an error in this program. An error
    in a user's own code has the exit code 2, too. After Ctrl-C, the exit code is 130. After SIGTERM, it is 143 if the command
    handles this signal.
    """
    if not any(parameter.name == "version" for parameter in command.params):
        click.version_option(__version__, message="%(prog)s %(version)s")(command)

    def main(arguments: Sequence[str] | None = None) -> None:
        argument_list = list(sys.argv[1:] if arguments is None else arguments)
        names = {(command.name or "").removeprefix("vse-"), *argument_list[:1]}  # of vse-serve, or of vse serve
        set_up_openmp(os.environ, threads_may_spin=not names & _COMMANDS_WITHOUT_SPINNING)
        collect_garbage_rarely()
        _log_to_stderr()
        try:
            with record_command(shlex.join([command.name or "", *argument_list])), explain_system_errors():
                code = command.main(args=argument_list, prog_name=command.name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:  # a group without a sub-command prints its help
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _exit_with_error(command, error.format_message())
        except UserError as error:
            _exit_with_error(command, f"{error}{_suggest_nearest_path(str(error))}")
        except Interrupted as stop:
            with suppress(OSError):  # Ctrl-C may also have ended the program that reads our output
                click.echo(f"{command.name}: {stop}", err=True)
            sys.exit(128 + stop.signal)
        except (KeyboardInterrupt, click.Abort):
            sys.exit(130)
        except Exception as error:
            if (own_error := describe_own_code_error(error)) is None:
                raise
            _exit_with_error(command, own_error)
        sys.exit(code if isinstance(code, int) else 0)

    main.__doc__ = command.help
    return main


def collect_garbage_rarely() -> None:
    """Let Python search for unused objects less often while this process runs, and not at all when it ends.

    By default, Python searches each time 700 objects were added (the number depends on its version), and searches all objects
    when it ends. ``import torch`` creates many objects. The searches then take a sixth of the time of a short command.
    Snakemake, too, creates many objects while it plans jobs, so the Snakefile calls this function.
    """
    gc.set_threshold(10_000, 20, 20)
    atexit.register(gc.freeze)


@contextmanager
def explain_system_errors() -> Iterator[None]:
    """Turn an operating-system error in the ``with`` block, such as a full disk or too little memory, into a UserError.

    Any other unexpected error also becomes a UserError if an input file has changed while the block ran.
    """
    with report_changed_inputs():
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise UserError(": ".join(str(part) for part in (error.filename, error.strerror) if part)) from error
        except MemoryError as error:
            raise UserError(f"not enough memory ({error_reason(error)})") from error


class _StderrHandler(logging.Handler):
    """A log handler that looks up ``sys.stderr`` for each message, because tests replace ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(to_printable_line(self.format(record)), err=True)


def _suggest_nearest_path(message: str) -> str:
    """Return a hint, ``; did you mean data/f8k?``, for an error message that begins with a missing path.

    Returns an empty text for any other message, or if no path is similar.
    """
    text, colon, _ = message.partition(": ")
    text = re.sub(r":\d+$", "", text)  # the number of a line
    if not colon or len(text) > _MAX_PATH_LENGTH or not is_path_text(text) or "did you mean" in message:
        return ""
    nearest = find_nearest_path(Path(text))
    return "" if nearest in (None, Path(text)) else f"; did you mean {nearest}?"


def _log_to_stderr() -> None:
    log = logging.getLogger("vse")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, _StderrHandler) for handler in log.handlers):
        log.addHandler(_StderrHandler())


def _exit_with_error(command: click.Command, message: str) -> None:
    text = to_printable_line(message)
    if len(text) > _MAX_ERROR_LENGTH:
        text = f"{text[: _MAX_ERROR_LENGTH // 2]} ... {text[-_MAX_ERROR_LENGTH // 2 :]}"
    click.echo(f"{command.name}: error: {text}", err=True)
    sys.exit(2)
