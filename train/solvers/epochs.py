"""Epochs of gradient steps by Adam, with validation, and the state that a bit-exact resume needs; whatever a step is of."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vse.features.hardware import deterministic_algorithms, memory_guard
from vse.pipeline.progress import progress_bar
from vse.train.run.interruption import TrainingFailed
from vse.train.solvers.base import Progress, Solver, Task
from vse.train.solvers.schedule import Schedule

log = logging.getLogger(__name__)

_FIRST_STEPS = 100  # before these nothing counts as a collapse
_LOOK = 20  # steps between looks at the loss: each look waits for the GPU
Numbers = NDArray[np.int64]


class GradientSolver(Solver):
    """Epochs of batches, a step of Adam for each.

    A subclass says what the batches of an epoch are, and what a step does.

    Attributes
    ----------
    out_of_memory : what a user can do then
    """

    out_of_memory: ClassVar[str]

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.epochs, self.patience = self.settings.epochs, self.settings.early_stop
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # the epoch's loss, and the collapsed loss
        self.schedule = Schedule(self.settings, self.model)
        self.optimizer = torch.optim.Adam(self.schedule.groups(), fused=True)

    @abstractmethod
    def batches(self, epoch: int) -> Sequence[Numbers]:
        """The numbers of the pairs of each batch of an epoch (from 0); they depend on the seed and the epoch alone."""

    @abstractmethod
    def updates(self, batches: Sequence[Numbers]) -> Iterator[tuple[Tensor, Tensor]]:
        """Take a step for each of the batches of the running epoch that are left.

        Of each the loss, and what it would be if all embeddings were equal.
        """

    @property
    @abstractmethod
    def hopeless(self) -> float:
        """A validation rsum up to which the model is no better than chance."""

    def measured(self) -> dict[str, float]:
        """What else is to be said of the epoch that ends."""
        return {}

    def watched_losses(self) -> list[tuple[float, str, str]]:
        """Values that must be finite, what each is, and what else to try; first the epoch's mean loss so far."""
        return [(float(self._totals[0]) / max(1, self.progress.pairs), "the loss", "a lower learning rate")]

    def end_epoch(self) -> None:
        """Called when an epoch is done, before its row is added."""

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, also in the middle of an epoch.

        What an epoch draws depends on the seed, the epoch, the pair and the step alone.
        """
        return {**super().state(), "totals": self._totals.tolist(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        super().restore(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))

    def described(self, row: Mapping[str, float]) -> str:
        return f"loss {row['loss']:.3g}, {row['pairs_per_s']:.0f} pairs/s"

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Train the rest of an epoch and validate; adds its row to the progress."""
        progress = self.progress
        learning_rate = self.schedule.start_epoch(progress.epoch, self.optimizer)
        with memory_guard(self.out_of_memory), deterministic_algorithms(self.settings.deterministic):
            self._train(save)
        loss, collapsed_loss = (self._totals / max(1, progress.pairs)).tolist()
        row = {"epoch": progress.epoch + 1, "learning_rate": learning_rate, "loss": loss, **self.measured()}
        if self.processes.first and self.validates(progress.epoch + 1):
            with self.stoppable(save):
                row |= self.validate()
        collapsed = self.processes.broadcast(int(self.processes.first and self._is_collapsed(row, collapsed_loss)))
        if collapsed:
            self._report_collapse(progress.epoch + 1, loss)
        row |= {"seconds": round(progress.seconds, 2), "pairs_per_s": round(progress.pairs / max(progress.seconds, 1e-9), 1)}
        self.end_epoch()
        self._totals.zero_()
        self.progress = Progress(progress.epoch + 1, [*progress.rows, row])

    def take_step(self) -> None:
        """Step against the gradients that are there, clipped."""
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()

    def step_seed(self, stream: int) -> int:
        """A seed for what the next step draws, by the seed, the epoch, the step and the use that is made of it."""
        parts = [self.task.seed, self.progress.epoch, self.progress.step, stream]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])

    def _train(self, save: Callable[[], None]) -> None:
        """The steps of the epoch that are left."""
        progress = self.progress
        batches = self.batches(progress.epoch)
        left = batches[progress.step :]
        self.model.train()
        before, saved, started = progress.seconds, time.monotonic(), time.perf_counter()
        rsum = f"{progress.rows[-1]['rsum']:.1f}" if progress.rows and "rsum" in progress.rows[-1] else "-"
        with progress_bar(
            total=len(batches),
            initial=progress.step,
            desc=f"epoch {progress.epoch + 1}/{self.settings.epochs}",
            unit="batch",
            hidden=not self.processes.first,
        ) as bar:
            for batch, losses in zip(left, self.updates(left), strict=True):
                self._totals += torch.stack(losses)
                progress.step += 1
                progress.pairs += len(batch)
                progress.seconds = before + time.perf_counter() - started
                bar.update()
                if progress.step % _LOOK == 0:
                    rate = f"{progress.pairs / progress.seconds:.0f}"
                    bar.set_postfix(loss=f"{self._finite_loss():.3g}", rsum=rsum, pairs_per_s=rate, refresh=False)
                if self.processes.any(self.interruption.signal is not None):
                    self._finite_loss()
                    save()
                    raise self.interrupted()
                if time.monotonic() - saved > 60 * self.settings.save_minutes:
                    self._finite_loss()
                    save()
                    saved = time.monotonic()
        self._finite_loss()

    def _finite_loss(self) -> float:
        """The epoch's mean loss so far; :class:`UserError` if the training has diverged."""
        watched = self.watched_losses()
        for value, what, cure in watched:
            if not np.isfinite(value):
                raise TrainingFailed(
                    f"epoch {self.progress.epoch + 1}, step {self.progress.step}: {what} is {value}; the last good checkpoint "
                    f"is kept. Try {cure}",
                    "diverged",
                )
        return watched[0][0]

    def _is_collapsed(self, row: Mapping[str, float], collapsed_loss: float) -> bool:
        """Whether the epoch's loss is that of equal embeddings, and validation, if there was one, is no better than chance.

        The first steps of any training look like that.
        """
        steps = (self.progress.epoch + 1) * self.progress.step
        near = collapsed_loss > 0 and abs(row["loss"] - collapsed_loss) < 0.02 * collapsed_loss
        return steps >= _FIRST_STEPS and near and row.get("rsum", 0.0) <= self.hopeless

    def _report_collapse(self, epoch: int, loss: float) -> None:
        """Stop, or only say so."""
        what = (
            f"epoch {epoch}: the loss stayed at its collapsed value, {loss:.3f} per pair, for the whole epoch, as if all "
            "embeddings were equal (2 x batch x margin for the max of hinges)"
        )
        cure = "Warm up with the sum of hinges (--set warmup.epochs=1), or lower the learning rate"
        if self.settings.on_collapse == "stop":
            raise TrainingFailed(
                f"{what}; the last good checkpoint is kept. {cure}; --set train.on_collapse=warn goes on", "collapsed"
            )
        log.warning("%s. If it does not leave: %s", what, cure[0].lower() + cure[1:])
