"""Join the processes that a launcher started."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vse.features.backbones.device import pick_device
from vse.pipeline.errors import UserError
from vse.training.processes.group import ProcessGroup
from vse.training.processes.launchers import Launch, find_launch
from vse.training.processes.watch import Watch

_CONNECTION_TIMEOUT = timedelta(minutes=5)  # until all processes have started


def join_processes(device: str, timeout_minutes: float = 10.0) -> ProcessGroup:
    """Join the processes that a launcher started, each with its own GPU if there are GPUs. Without a launcher, join none.

    ``timeout_minutes`` : longest time that a process waits for the others.
    """
    launch = find_launch(os.environ)
    where = pick_device(device) if launch is None else choose_process_device(device, launch)
    if launch is None or launch.size == 1:
        return ProcessGroup(device=where)
    timeout = timedelta(minutes=timeout_minutes)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    has_server = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself then keeps the store
    prefix = f"vse {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # torchrun's store outlives a restart of the processes
    try:
        store = PrefixStore(prefix, _connect(launch, launch.rank == 0 and not has_server, launch.size))
        distributed.init_process_group(backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.size)
        watch = Watch(PrefixStore(prefix, _connect(launch, False, None)), launch.rank, launch.size)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"process {launch.rank} of {launch.size} could not meet the others at {launch.address}:{launch.port} ({reason}); "
            "check that all of them have started. MASTER_PORT sets another port and, on several machines, MASTER_ADDR another "
            "host"
        ) from None
    return ProcessGroup(launch.rank, launch.size, where, store, watch, timeout)


def _connect(launch: Launch, is_server: bool, n_processes: int | None) -> Any:
    """Return a connection to the store through which the processes find each other.

    ``n_processes`` : number of processes to wait for; None: wait for none.
    """
    waits = n_processes is not None
    return TCPStore(launch.address, launch.port, n_processes, is_server, timeout=_CONNECTION_TIMEOUT, wait_for_workers=waits)


def choose_process_device(device: str, launch: Launch) -> torch.device:
    """Return the GPU with the local rank of this process, or the CPU. Raises UserError if there are too few GPUs."""
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
