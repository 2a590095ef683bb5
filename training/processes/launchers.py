"""Join the processes that torchrun, SLURM's ``srun`` or Open MPI's ``mpirun`` started.

Each launcher sets environment variables with the rank of a process and the address of the first process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vse.features.backbones.device import pick_device
from vse.pipeline.errors import UserError
from vse.training.processes.group import ProcessGroup
from vse.training.processes.interruption import ProcessWatch

_FIRST_PORT, _N_PORTS = 20_000, 10_000  # a range of ports that systems do not assign to clients
_MAX_PORT = 2**16 - 1


@dataclass(frozen=True)
class Launch:
    """The rank of a process, and the address of the first process, as the launcher of the processes has set them.

    ``rank``, ``size`` : rank of the process among all processes, and number of all processes.
    ``local_rank``, ``local_size`` : rank among the processes of this machine, and number of these processes.
    ``address``, ``port`` : address and port at which the first process accepts connections of the others.
    ``advice`` : text for error messages: how to start several processes on a machine. ``{n}`` stands for their number.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    advice: str


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the rank and the address that a launcher gave to this process in environment variables.

    Returns None if this is the only process, unless torchrun started it. The variables of torchrun are read first, because
    ``srun`` or ``mpirun`` may have started torchrun. A process that ``sbatch`` started without ``srun`` counts as the only
    process. Raises UserError if a variable is missing or invalid.
    """
    if "TORCHELASTIC_RUN_ID" in environment or environment.get("WORLD_SIZE", "1") != "1":
        launch = _read_torchrun(_LauncherVariables("torchrun", environment))
    elif "SLURM_STEP_NUM_TASKS" in environment:
        launch = _read_slurm(_LauncherVariables("srun", environment))
    elif "OMPI_COMM_WORLD_SIZE" in environment:
        launch = _read_open_mpi(_LauncherVariables("mpirun", environment))
    else:
        return None
    if not (0 <= launch.rank < launch.size and 0 <= launch.local_rank < launch.local_size <= launch.size):
        raise UserError(
            f"the launcher's variables contradict each other: rank {launch.rank} of {launch.size} processes, and rank "
            f"{launch.local_rank} of {launch.local_size} on this machine"
        )
    return launch if launch.size > 1 or "TORCHELASTIC_RUN_ID" in environment else None


def parse_first_host(node_list: str) -> str:
    """Return the first host in a SLURM list of nodes, e.g. ``gpu07`` for ``gpu[07-09,12],cpu1``."""
    first = re.match(r"[^,\[]*(\[[^\]]*\][^,\[]*)*", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else node_list


class _LauncherVariables:
    """The environment variables of a launcher. The methods raise UserError if a variable is missing or invalid."""

    def __init__(self, launcher: str, values: Mapping[str, str]) -> None:
        self.launcher, self.values = launcher, values

    def read_text(self, name: str, advice: str = "") -> str:
        if not self.values.get(name):
            raise UserError(
                f"{self.launcher} started this process, but the variable {name} is not set; "
                + (advice or f"start the command by {self.launcher}, or unset its other variables to start a single process")
            )
        return self.values[name]

    def read_number(self, name: str) -> int:
        text = self.read_text(name)
        if not text.isdecimal():
            raise UserError(f"{name}={text} is not a number")
        return int(text)

    def read_or_compute_port(self, *names: str, advice: str = "") -> int:
        """Return the variable ``MASTER_PORT`` or, if it is not set, a port computed from the variables ``names``.

        All processes of a job compute the same port. ``advice`` : end of the error message if one of ``names`` is not set.
        Without ``advice``, the message advises to start the command by the launcher.
        """
        if names and "MASTER_PORT" not in self.values:
            job = ".".join(self.read_text(name, advice) for name in names)
            return _FIRST_PORT + crc32(job.encode()) % _N_PORTS
        port = self.read_number("MASTER_PORT")
        if not 0 < port <= _MAX_PORT:
            raise UserError(f"MASTER_PORT={port} is not a port; it is a number from 1 to {_MAX_PORT}")
        return port


def _read_torchrun(variables: _LauncherVariables) -> Launch:
    local_rank = variables.read_number("LOCAL_RANK")
    has_local_size = "LOCAL_WORLD_SIZE" in variables.values
    return Launch(
        variables.read_number("RANK"),
        variables.read_number("WORLD_SIZE"),
        local_rank,
        variables.read_number("LOCAL_WORLD_SIZE") if has_local_size else local_rank + 1,
        variables.read_text("MASTER_ADDR"),
        variables.read_or_compute_port(),
        "start torchrun with --nproc-per-node {n}",
    )


def _read_slurm(variables: _LauncherVariables) -> Launch:
    rank, size = variables.read_number("SLURM_PROCID"), variables.read_number("SLURM_STEP_NUM_TASKS")
    local_rank, node = variables.read_number("SLURM_LOCALID"), variables.read_number("SLURM_NODEID")
    nodes = variables.read_text("SLURM_STEP_NODELIST")
    per_node = _parse_task_counts(variables.read_text("SLURM_STEP_TASKS_PER_NODE"))
    if node >= len(per_node):
        raise UserError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE has {len(per_node)} nodes")
    address = variables.values.get("MASTER_ADDR") or parse_first_host(nodes)
    port = variables.read_or_compute_port("SLURM_JOB_ID", "SLURM_STEP_ID")
    return Launch(rank, size, local_rank, per_node[node], address, port, "start srun with --ntasks-per-node={n}")


def _read_open_mpi(variables: _LauncherVariables) -> Launch:
    size, local_size = variables.read_number("OMPI_COMM_WORLD_SIZE"), variables.read_number("OMPI_COMM_WORLD_LOCAL_SIZE")
    advice = "set it to the host name of the first process: mpirun -x MASTER_ADDR=HOST"
    one_machine = size <= local_size
    return Launch(
        variables.read_number("OMPI_COMM_WORLD_RANK"),
        size,
        variables.read_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size,
        "127.0.0.1" if one_machine else variables.read_text("MASTER_ADDR", advice),
        variables.read_or_compute_port("PMIX_NAMESPACE", advice="set MASTER_PORT to a free port: mpirun -x MASTER_PORT=29500"),
        "start mpirun with --map-by ppr:{n}:node",
    )


def _parse_task_counts(counts: str) -> list[int]:
    """Return the number of tasks of each node, e.g. [2, 2, 1] for ``2(x2),1``."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(",")]
    if not all(parts):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={counts} is not a list of counts, such as 2(x3),1")
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


_CONNECTION_TIMEOUT = timedelta(minutes=5)  # longest wait until all processes have started


def join_processes(device: str, timeout_minutes: float = 10.0) -> ProcessGroup:
    """Connect the processes that a launcher started, and return their group. Without a launcher, the group has one process.

    Each process has its own GPU if there are GPUs. ``timeout_minutes`` : longest time that a process waits for the others.
    """
    launch = find_launch(os.environ)
    where = pick_device(device) if launch is None else choose_process_device(device, launch)
    if launch is None or launch.size == 1:
        return ProcessGroup(device=where)
    timeout = timedelta(minutes=timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    has_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun itself runs the store
    prefix = f"vse {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # torchrun's store outlives a restart of the processes
    try:
        store = PrefixStore(prefix, _connect_to_store(launch, launch.rank == 0 and not has_server, launch.size))
        distributed.init_process_group(backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.size)
        watch = ProcessWatch(PrefixStore(prefix, _connect_to_store(launch, False, None)), launch.rank, launch.size)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"process {launch.rank} of {launch.size} could not meet the others at {launch.address}:{launch.port} ({reason}); "
            "check that all of them have started. MASTER_PORT sets another port and, on several machines, MASTER_ADDR another "
            "host"
        ) from None
    return ProcessGroup(launch.rank, launch.size, where, store, watch, timeout)


def _connect_to_store(launch: Launch, is_server: bool, n_processes: int | None) -> Any:
    """Return a connection to the store through which the processes find each other.

    ``is_server`` : whether this process runs the store.
    ``n_processes`` : number of processes to wait for; None: do not wait.
    """
    waits = n_processes is not None
    return TCPStore(launch.address, launch.port, n_processes, is_server, timeout=_CONNECTION_TIMEOUT, wait_for_workers=waits)


def choose_process_device(device: str, launch: Launch) -> torch.device:
    """Return the GPU whose index is the rank of this process on its machine, or the CPU if no GPU is requested or present.

    A single process on a machine gets the GPU that ``device`` names, if it names one.

    ``device`` : requested device, such as ``auto``. Raises UserError if there are fewer GPUs than processes on this machine,
    or if ``device`` names one GPU for several processes.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    kind, _, number = name.partition(":")
    n_gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if not n_gpus:
        return pick_device(device)
    rank, n_processes = launch.local_rank, launch.local_size
    if number and n_processes > 1:
        raise UserError(f"--device {device}: {n_processes} processes would share one GPU; --device cuda gives each its own")
    if n_processes > n_gpus:
        raise UserError(
            f"{n_processes} processes on a machine with {n_gpus} GPU{'s' * (n_gpus > 1)}, but each needs a GPU of its own; "
            f"{launch.advice.format(n=n_gpus)}, or add --device cpu"
        )
    return pick_device(name if number else f"cuda:{rank}")
