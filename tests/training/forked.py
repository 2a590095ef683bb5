"""Processes of their own that take signals and exit codes, without the seconds that importing torch costs each of them.

They are forked from a server that has imported it once. No annotations are checked in them.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.training.forked_imports", "tests.training.forked"])

# Called with the arguments of a command.
Main = Callable[[Sequence[object]], None]


def train_main(arguments: Sequence[object]) -> None:
    """``vse-train``."""
    from vse.training.cli import train_main

    train_main([str(argument) for argument in arguments])


def train_on_a_full_disk(arguments: Sequence[object]) -> None:
    """``vse-train`` where no file may grow beyond 20,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    train_main(arguments)


def train_compiled(arguments: Sequence[object]) -> None:
    """``vse-train`` with all that it compiles traced as graphs, but run as they are: compiling C++ would take a minute.

    At its end, it says the names of the functions of which there are graphs.
    """
    import torch

    compile_function, traced = torch.compile, set()

    def compiled(function: Callable[..., object]) -> object:
        def run_as_it_is(graph: torch.fx.GraphModule, _: object) -> object:
            traced.add(function.__name__)
            return graph.forward

        return compile_function(function, backend=run_as_it_is)

    torch.compile = compiled
    try:
        train_main(arguments)
    finally:
        print("compiled:", *sorted(traced), file=sys.stderr)


def train_until_a_signal(rank: int, step: int, arguments: Sequence[object]) -> None:
    """``vse-train``, of which one process gets a SIGTERM in one of its steps, counted from 0."""
    from vse.training.solvers.retrieval import RetrievalTrainer

    take_step, numbers = RetrievalTrainer.step, count()

    def call(self: Any, *arguments: Any) -> Any:
        if next(numbers) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(self, *arguments)

    if os.environ["RANK"] == str(rank):
        RetrievalTrainer.step = call  # type: ignore[method-assign]
    train_main(arguments)


def train_toy(arguments: Sequence[object]) -> None:
    """``vse-train`` that knows the toy similarity."""
    from tests.training.toy_similarity import ToySettings
    from vse.training.models.similarities import SIMILARITIES

    SIMILARITIES.add(ToySettings)
    train_main(arguments)


def start(
    main: Main, arguments: Sequence[object], log: Path, environment: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """A process that runs a command and writes what it says to a file; to be joined."""
    process = _CONTEXT.Process(target=_run, args=(main, list(arguments), log, dict(environment or {})), daemon=True)
    process.start()
    return process


def run(main: Main, arguments: Sequence[object], log: Path) -> int | None:
    """The exit code of a command in a process of its own."""
    process = start(main, arguments, log)
    process.join()
    return process.exitcode


def start_together(
    arguments: Sequence[object], size: int, logs: Path, main: Main = train_main, launcher: str = "torchrun"
) -> tuple[list[ForkServerProcess], list[Path]]:
    """Several processes that train together, with the variables of a launcher, and the file of what each says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    files = [logs / f"log-{rank}.txt" for rank in range(size)]
    processes = [start(main, arguments, file, variables(launcher, rank, size, port)) for rank, file in enumerate(files)]
    return processes, files


def variables(launcher: str, rank: int, size: int, port: str) -> dict[str, str]:
    """What a launcher sets for a process, if all are on one machine."""
    every = {
        "torchrun": {
            **{"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "localhost"},
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        },
        "srun": {
            **{"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": 0},
            **{"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            **{"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_NTASKS": size},
        },
        "mpirun": {
            **{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "PMIX_NAMESPACE": "prterun-host-1@1"},
            **{"OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": size},
        },
    }
    return {name: str(value) for name, value in {"MASTER_PORT": port, **every[launcher]}.items()}


def run_together(
    arguments: Sequence[object], size: int, logs: Path, main: Main = train_main, launcher: str = "torchrun"
) -> tuple[list[int | None], str]:
    """The exit codes of several processes that train together, and what all have said."""
    processes, files = start_together(arguments, size, logs, main, launcher)
    for process in processes:
        process.join()
    return [process.exitcode for process in processes], "".join(file.read_text() for file in files)


def _run(main: Main, arguments: Sequence[object], log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    main(arguments)
