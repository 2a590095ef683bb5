"""Several processes that train as one: each encodes its share of a batch and receives the embeddings of all.

Every process computes the loss of the complete batch from the gathered embeddings, so negatives are global, and
back-propagates through its own share only. The sum of the gradients over all processes is the gradient of one process with
the complete batch. A launcher starts the processes (:mod:`vse.training.run.launchers`); without one there is a single process.

Ctrl-C and SIGTERM end a training after the current step and a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from vse.features.backbones.device import pick_device
from vse.pipeline.errors import UserError
from vse.training.kinds import BatchVectors, pad_sets
from vse.training.run.launchers import Launch, find_launch

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CPU = torch.device("cpu")
_CONNECTION_TIMEOUT = timedelta(minutes=5)  # until all processes have started
_VALIDATION_TIMEOUT = timedelta(hours=6)  # of the other processes, while the first one validates


class TrainingFailed(UserError):
    """A training that diverged or collapsed. ``state`` (``diverged`` or ``collapsed``) is recorded in ``run.json``."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class StopNow(Exception):
    """A signal arrived in a block of :meth:`Interruption.raise_on_signal`."""


class Interruption:
    """A record of Ctrl-C or SIGTERM. The training ends after the current step; then another Ctrl-C ends the process at once.

    Another SIGTERM is ignored. ``signal`` is the number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._raises_on_signal = False

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Catch Ctrl-C and SIGTERM in this block. Outside the main thread, signals are not caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def raise_on_signal(self) -> Iterator[None]:
        """Raise :class:`StopNow` in this block as soon as a signal arrives."""
        self._raises_on_signal = True
        try:
            if self.signal is not None:
                raise StopNow
            yield
        finally:
            self._raises_on_signal = False

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # at a time limit, SLURM sends SIGTERM to srun and to the training, and srun forwards its own
        self.signal = number
        if self._raises_on_signal:
            raise StopNow


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process among ``size`` processes, and its device."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_first(self) -> bool:
        """True in the process that validates, writes and logs."""
        return self.rank == 0

    def own_share(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this process's share of a batch, which may be empty; the sizes of shares differ by one at most."""
        return pairs if self.size == 1 else np.array_split(pairs, self.size)[self.rank]

    def gather_embeddings(self, embeddings: BatchVectors, n_pairs: int) -> BatchVectors:
        """Return the embeddings of the complete batch, in order. Gradients reach only the share of this process."""
        if self.size == 1:
            return embeddings
        if len(embeddings) == 1:
            return (_GatheredShares.apply(embeddings[0], self, n_pairs),)
        longest = torch.tensor([embeddings[1].shape[1]])
        distributed.all_reduce(longest, distributed.ReduceOp.MAX)
        vectors, mask = pad_sets(embeddings, int(longest.item()))
        rows = _GatheredShares.apply(vectors.flatten(1), self, n_pairs)
        return rows.view(n_pairs, *vectors.shape[1:]), _GatheredShares.apply(mask.to(torch.uint8), self, n_pairs).bool()

    def sum_gradients(self, parameters: Iterable[nn.Parameter], complete: Iterable[nn.Parameter] = ()) -> None:
        """Sum the gradients of ``parameters`` over processes, except parameters that are also in ``complete``.

        The gradients of ``complete`` are already those of the complete batch in every process.
        """
        if self.size == 1:
            return
        for parameter in complete:
            if parameter.grad is not None:
                parameter.grad /= self.size
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in wanted], dtype=torch.uint8)
        distributed.all_reduce(used, distributed.ReduceOp.MAX)
        for parameter, is_used in zip(wanted, used.tolist(), strict=True):
            if is_used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                distributed.all_reduce(parameter.grad)

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True in any process."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.uint8)
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
        return bool(flags.item())

    def broadcast(self, number: int) -> int:
        """Return, in every process, the ``number`` that the first process passes."""
        if self.size == 1:
            return number
        value = torch.tensor([number])
        distributed.broadcast(value, 0)
        return int(value.item())

    def close(self) -> None:
        if self.size > 1:
            distributed.destroy_process_group()


def join_processes(device: str) -> ProcessGroup:
    """Join the processes that a launcher started, each with its own GPU if there are GPUs. Without a launcher, join none."""
    launch = find_launch(os.environ)
    if launch is None:
        return ProcessGroup(device=pick_device(device))
    where = choose_process_device(device, launch)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    if distributed.is_torchelastic_launched():
        distributed.init_process_group(backend, timeout=_VALIDATION_TIMEOUT)
    else:
        group = {"store": _connect(launch), "rank": launch.rank, "world_size": launch.size}
        distributed.init_process_group(backend, timeout=_VALIDATION_TIMEOUT, **group)
    return ProcessGroup(launch.rank, launch.size, where)


def _connect(launch: Launch) -> Any:
    """Return the store through which the processes find each other. Raises UserError if the others do not connect."""
    try:
        address = launch.address, launch.port, launch.size, launch.rank == 0
        return distributed.TCPStore(*address, timeout=_CONNECTION_TIMEOUT)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"process {launch.rank} of {launch.size} could not meet the others at {launch.address}:{launch.port} ({reason}); "
            "check that all of them have started. MASTER_PORT sets another port and, on several machines, MASTER_ADDR another "
            "host"
        ) from None


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


class _GatheredShares(torch.autograd.Function):
    """Concatenation of the shares of all processes. The gradient is that of this process's share."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, processes: ProcessGroup, n_pairs: int) -> Tensor:
        lengths = [len(part) for part in np.array_split(np.empty(n_pairs), processes.size)]
        padded = embeddings.new_zeros(max(lengths), embeddings.shape[1])
        padded[: len(embeddings)] = embeddings
        parts = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(parts, padded)
        start = sum(lengths[: processes.rank])
        ctx.mine = slice(start, start + lengths[processes.rank])
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.mine], None, None
