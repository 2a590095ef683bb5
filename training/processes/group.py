"""The exchange of data between several processes that train one model. Each process encodes its share of a batch.

A process computes the loss of the complete batch from the gathered embeddings, or only the terms of the loss for its own
images. The process back-propagates through its own share of the batch. The sum of the gradients over all processes is the
gradient that a single process with the complete batch would compute.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from vse.pipeline.errors import Interrupted, UserError
from vse.training.kinds import BatchVectors, pad_sets
from vse.training.processes.interruption import Interruption, ProcessWatch

_CPU = torch.device("cpu")
_UNUSED = "unused"  # name of a parameter that no computation uses
_POLL_SECONDS = 0.05  # time between two checks whether the first process has finished


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train one model together, and their exchange of data.

    ``rank``, ``size``, ``device`` : rank of this process, number of processes, and device of this process.
    ``store`` : store (``torch.distributed.Store``) through which several processes found each other; None for one process.
    ``watch`` : thread that watches the other processes; None for one process.
    ``timeout`` : longest time that a process waits for the others.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    store: Any = None
    watch: ProcessWatch | None = None
    timeout: timedelta = timedelta(minutes=10)

    @property
    def is_first(self) -> bool:
        """True in the process with rank 0, which validates, writes and logs."""
        return self.rank == 0

    def select_own_share(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this process's share of a batch. The sizes of shares differ by one at most, and a share may be empty."""
        return pairs if self.size == 1 else np.array_split(pairs, self.size)[self.rank]

    def compute_share_sizes(self, n_pairs: int) -> list[int]:
        """Return the sizes of the shares of a batch of ``n_pairs``, in the order of the processes."""
        return [len(part) for part in np.array_split(np.empty(n_pairs), self.size)]

    def gather_embeddings(self, embeddings: BatchVectors, n_pairs: int, adds_gradients: bool = False) -> BatchVectors:
        """Return the embeddings of the complete batch of ``n_pairs``, gathered from all processes.

        Gradients reach only the embeddings of this process. ``adds_gradients`` : True if the processes compute different terms
        of the loss, so that the gradients of an embedding are summed over the processes.
        """
        if self.size == 1:
            return embeddings
        if len(embeddings) == 1:
            return (self.gather_rows(embeddings[0], self.compute_share_sizes(n_pairs), adds_gradients),)
        longest = self._exchange(distributed.all_reduce, torch.tensor([embeddings[1].shape[1]]), distributed.ReduceOp.MAX)
        vectors, mask = pad_sets(embeddings, int(longest.item()))
        sizes = self.compute_share_sizes(n_pairs)
        rows = self.gather_rows(vectors.flatten(1), sizes, adds_gradients)
        return rows.view(n_pairs, *vectors.shape[1:]), self.gather_rows(mask.to(torch.uint8), sizes).bool()

    def gather_rows(
        self, rows: Float[Tensor, "n dim"], sizes: list[int] | None = None, adds_gradients: bool = False
    ) -> Tensor:
        """Return the rows of all processes, in the order of the processes.

        ``sizes`` : number of rows of each process; None if all have the same number.
        ``adds_gradients`` : True to sum the gradients of a row over the processes; False to use only those of this process.
        """
        if self.size == 1:
            return rows
        gathered: Tensor = _GatheredRows.apply(rows, self, sizes or [len(rows)] * self.size, adds_gradients)
        return gathered

    def wrap_encoders(self, encoders: nn.Module) -> nn.Module:
        """Return a wrapper of ``encoders`` that returns the same outputs, and sums the gradients over the processes.

        Gradients are exchanged in groups, as soon as a group is complete, while the backward pass continues.
        """
        trained = [name for name, weight in encoders.named_parameters() if weight.requires_grad and name != _UNUSED]
        if self.size == 1 or not trained:
            return encoders
        # Torch must search for unused parameters, because some encoders have them. It warns if none exists, so one is added.
        encoders.register_parameter(_UNUSED, nn.Parameter(torch.zeros(1, device=self.device)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`broadcast_buffers`")  # the new name of the argument needs torch 2.14
            wrapped = DistributedDataParallel(
                encoders,
                broadcast_buffers=False,
                find_unused_parameters=True,
                init_sync=False,  # all processes start with the same weights
            )
        wrapped.register_comm_hook(
            None, lambda _, bucket: _start_gradient_sum(bucket.buffer())
        )  # by default, torch computes the mean instead of the sum
        return wrapped

    def sum_gradients(self, parameters: Iterable[nn.Parameter], are_complete: bool) -> None:
        """Sum the gradients of a few parameters over the processes, in place. All processes must pass the same parameters.

        ``are_complete`` : True if each process has the gradients of the complete batch. Then the gradients are averaged.
        """
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                self._exchange(distributed.all_reduce, parameter.grad)
                if are_complete:
                    parameter.grad /= self.size

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a value over the processes, without gradients."""
        return value if self.size == 1 else self._exchange(distributed.all_reduce, value.detach().clone())

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True in any process."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.uint8)
        return bool(self._exchange(distributed.all_reduce, flags, distributed.ReduceOp.MAX).item())

    def broadcast(self, number: int) -> int:
        """Send ``number`` from the first process to all processes, and return it."""
        if self.size == 1:
            return number
        return int(self._exchange(distributed.broadcast, torch.tensor([number]), 0).item())

    def wait_for_first(self) -> None:
        """Wait until the first process calls this method. There is no time limit while the first process sends reports.

        Raises DistError if the first process sends no report for longer than ``timeout`` or, if a signal to stop has arrived,
        for a few seconds.
        """
        if self.watch is None:
            return
        self.watch.n_exchanges += 1
        key = f"exchange {self.watch.n_exchanges}"
        if self.is_first:
            self.store.set(key, "")
            return
        silent_since = None
        while not self.store.check([key]):
            time.sleep(_POLL_SECONDS)
            if not self.watch.is_silent(0):
                silent_since = None
                continue
            silent_since = silent_since or time.monotonic()
            is_stopping = self.watch.interruption is not None and self.watch.interruption.signal is not None
            if is_stopping or time.monotonic() - silent_since > self.timeout.total_seconds():
                raise distributed.DistError("the first process is silent")

    def share_signals(self, interruption: Interruption) -> None:
        """Stop all processes, from now on, when a signal to stop reaches any of them.

        ``interruption`` : record of signals to this process.
        """
        if self.watch is not None:
            self.watch.interruption = interruption

    def wait_until_others_stop(self) -> None:
        """Wait until the other processes have also received the signal that stops this process, for a few seconds at most."""
        if self.watch is not None:
            self.watch.wait_until_others_stop()

    @contextmanager
    def explain_failed_exchange(self) -> Iterator[None]:
        """Raise UserError with the rank of the missing process if an exchange of data fails in the caller's ``with`` block.

        Raises Interrupted instead if a signal has stopped the processes.
        """
        try:
            yield
        except RuntimeError as error:
            is_exchange = isinstance(error, distributed.DistError) or "gloo" in str(error)
            if self.watch is None or not (is_exchange or self.watch.find_silent()):
                raise
            stop = self.watch.interruption
            if stop is not None and stop.signal is not None:
                raise Interrupted("stopped with the other processes; --resume continues", stop.signal) from error
            minutes = self.timeout.total_seconds() / 60
            raise UserError(
                f"process {self.rank}: {self.watch.describe_missing()} (the limit of an exchange is {minutes:g} minutes, "
                "train.timeout_minutes); --resume continues from the last checkpoint"
            ) from error

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
            with suppress(RuntimeError):  # fails if another process was lost
                distributed.destroy_process_group()

    def _exchange(self, operation: Callable[..., Any], tensor: Tensor, *arguments: Any) -> Tensor:
        if self.watch is not None:
            self.watch.n_exchanges += 1
        operation(tensor, *arguments)
        return tensor


def postpone_gradient_sum(encoders: nn.Module, postpone: bool) -> AbstractContextManager[None]:
    """Return a context in which encoders keep the gradients of this process, and do not sum them over the processes.

    ``encoders`` : encoders that :meth:`ProcessGroup.wrap_encoders` returned.
    ``postpone`` : False for a context without effect.
    """
    if postpone and isinstance(encoders, DistributedDataParallel):
        return encoders.no_sync()
    return nullcontext()


def _start_gradient_sum(bucket: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[list[Tensor]] = distributed.all_reduce(bucket, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class _GatheredRows(torch.autograd.Function):
    """The autograd function that gathers the rows of all processes.

    The backward pass returns a gradient with respect to the rows of this process. With ``adds_gradients``, this is the
    gradient of the sum of the losses of all processes; otherwise it is the gradient of the loss of this process.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, processes: ProcessGroup, sizes: list[int], adds_gradients: bool) -> Tensor:
        ctx.processes, ctx.sizes, ctx.adds_gradients = processes, sizes, adds_gradients
        padded = rows.new_zeros(max(sizes), rows.shape[1])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        processes._exchange(lambda tensor: distributed.all_gather(parts, tensor), padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        parts = list(torch.split(gradients[0].contiguous(), ctx.sizes))
        own = parts[ctx.processes.rank]
        if ctx.adds_gradients:
            own = torch.empty_like(own)
            ctx.processes._exchange(lambda tensor: distributed.reduce_scatter(tensor, parts), own)
        return own, None, None, None


class _SynchronisedBatchNorm:
    """A batch normalisation that, in training, computes the mean and the variance over the rows of all processes.

    ``torch.nn.SyncBatchNorm`` does the same, but on GPUs only.
    """

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)  # type: ignore[misc, no-any-return]
        rows = inputs.float()
        dims = [0, *range(2, rows.ndim)]
        count = rows.new_tensor([rows.numel() / max(1, rows.shape[1])])
        mean = rows.mean(dims)
        squares = (rows - _as_channel(mean, rows)).square().sum(dims)
        parts = self.processes.gather_rows(torch.cat([count, mean, squares])[None], adds_gradients=True)
        counts = parts[:, :1].detach()
        means, sums = parts[:, 1:].chunk(2, dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (sums + counts * (means - mean).square()).sum(0) / total
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * (total / (total - 1).clamp(min=1)), self.momentum)
        normalised = (rows - _as_channel(mean, rows)) * _as_channel((variance + self.eps).rsqrt(), rows)
        if self.affine:
            normalised = normalised * _as_channel(self.weight, rows) + _as_channel(self.bias, rows)
        normalised = normalised.to(inputs.dtype)
        return self.act(self.drop(normalised)) if hasattr(self, "act") else normalised  # timm's norms include an activation


def synchronise_batch_norms(module: nn.Module, processes: ProcessGroup) -> None:
    """Change every batch normalisation in ``module`` to compute its statistics over the rows of all processes."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.__class__ = _synchronised_class(type(part))  # type: ignore[assignment, arg-type]
            part.processes = processes  # type: ignore[assignment]


def is_synchronised_batch_norm(module: nn.Module) -> bool:
    """Return whether this module is a batch normalisation that :func:`synchronise_batch_norms` has changed."""
    return isinstance(module, _SynchronisedBatchNorm)


@cache
def _synchronised_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Synchronised{kind.__name__}", (_SynchronisedBatchNorm, kind), {})


def _as_channel(values: Tensor, rows: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (rows.ndim - 2))
