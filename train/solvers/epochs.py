"""Epochs of gradient steps by Adam or AdamW, with validation, and the state that a bit-exact resume needs."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vse.features.backbones.device import deterministic_algorithms, memory_guard
from vse.pipeline.progress import progress_bar
from vse.train.losses.base import Loss
from vse.train.run.processes import TrainingFailed
from vse.train.solvers.base import Progress, Solver, Task
from vse.train.solvers.optimisation import OPTIMIZERS, AveragedWeights, Schedule

log = logging.getLogger(__name__)

_FIRST_STEPS = 100  # before these nothing counts as a collapse
_LOOK = 20  # steps between looks at the loss: each look waits for the GPU
Numbers = NDArray[np.int64]


class GradientSolver(Solver):
    """Epochs of batches, an update for each, or for every ``train.accumulate`` of them.

    A subclass says what the batches of an epoch are, and what a step does: it calls :meth:`start_step`, adds the gradients of
    a batch to those that are there, and calls :meth:`take_step` if it :meth:`ends_update`.

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
        ema = self.settings.ema if self.processes.first else None
        self.averaged = None if ema is None else AveragedWeights(self.model, ema)
        self._sizes: list[int] = []  # pairs of each batch of the running epoch
        learned = task.loss.weights()
        self.loss_weights = None if learned is None else learned.to(self.device)
        if self.loss_weights is not None:
            self.schedule.add_loss(self.loss_weights, task.loss.own_rate)
        self.optimizer = OPTIMIZERS[self.settings.optimizer](self.schedule.groups(), fused=True)

    @abstractmethod
    def batches(self, epoch: int) -> Sequence[Numbers]:
        """The numbers of the pairs of each batch of an epoch (from 0); they depend on the seed and the epoch alone."""

    @abstractmethod
    def updates(self, batches: Sequence[Numbers]) -> Iterator[tuple[Tensor, Tensor]]:
        """Take a step for each of the batches of the running epoch that are left, see :meth:`start_step`.

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
        state = {**super().state(), "totals": self._totals.tolist(), "optimizer": self.optimizer.state_dict()}
        if self.averaged is not None:
            state["averaged"] = self.averaged.state()
        if self.loss_weights is not None:
            state["loss_weights"] = self.loss_weights.state_dict()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        super().restore(state)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.averaged is not None:
            self.averaged.restore(state["averaged"])
        if self.loss_weights is not None:
            self.loss_weights.load_state_dict(state["loss_weights"])
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))

    def described(self, row: Mapping[str, float]) -> str:
        learned = "".join(f"{name} {row[name]:.4g}, " for name in self.learned())
        return f"loss {row['loss']:.3g}, {learned}{row['pairs_per_s']:.0f} pairs/s"

    def learned(self) -> dict[str, float]:
        return {} if self.loss_weights is None else self.loss_weights.values()

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Train the rest of an epoch and validate; adds its row to the progress."""
        progress = self.progress
        self.schedule.start_epoch(progress.epoch)
        with memory_guard(self.out_of_memory), deterministic_algorithms(self.settings.deterministic):
            self._train(save)
        loss, collapsed_loss = (self._totals / max(1, progress.pairs)).tolist()
        learning_rate = self.schedule.rate(progress.epoch, self.n_updates - 1, self.n_updates)
        row = {"epoch": progress.epoch + 1, "learning_rate": learning_rate, "loss": loss, **self.learned(), **self.measured()}
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

    def best_weights(self) -> Mapping[str, Tensor]:
        """The weights or, if they are averaged, their running mean."""
        return super().best_weights() if self.averaged is None else self.averaged.weights

    def with_best_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self.averaged is None else self.averaged.in_place()

    @property
    def n_updates(self) -> int:
        """Updates of the running epoch; of the last one there may be fewer batches than of the others."""
        return max(1, -(-len(self._sizes) // self.settings.accumulate))

    def start_step(self) -> None:
        """Forget the gradients of the last update, unless the batch at hand adds to them."""
        if self.progress.step % self.settings.accumulate == 0:
            self.optimizer.zero_grad(set_to_none=True)

    def ends_update(self) -> bool:
        """Whether the batch at hand is the last one of its update."""
        done = self.progress.step + 1
        return done % self.settings.accumulate == 0 or done == len(self._sizes)

    def weighed(self, cost: Tensor, loss: Loss) -> Tensor:
        """What the batch at hand adds to the cost of its update, as if all batches of the update were one.

        Costs that are sums add up; those that are means count by their share of the pairs.
        """
        if self.settings.accumulate == 1 or not loss.averages:
            return cost
        first = self.progress.step - self.progress.step % self.settings.accumulate
        return cost * (self._sizes[self.progress.step] / sum(self._sizes[first : first + self.settings.accumulate]))

    def take_step(self) -> None:
        """Update the weights against the gradients that are there; those of the model are clipped."""
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        update = self.progress.step // self.settings.accumulate
        self.schedule.set_rates(self.optimizer, self.progress.epoch, update, self.n_updates)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update()
        if self.loss_weights is not None:
            self.loss_weights.bound()

    def step_seed(self, stream: int) -> int:
        """A seed for what the next step draws, by the seed, the epoch, the step and the use that is made of it."""
        parts = [self.task.seed, self.progress.epoch, self.progress.step, stream]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])

    def _train(self, save: Callable[[], None]) -> None:
        """The steps of the epoch that are left."""
        progress = self.progress
        batches = self.batches(progress.epoch)
        self._sizes = [len(batch) for batch in batches]
        if progress.epoch == progress.step == 0:
            self.schedule.check_warmup(self.n_updates)
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
                updated = self.ends_update()
                progress.step += 1
                progress.pairs += len(batch)
                progress.seconds = before + time.perf_counter() - started
                bar.update()
                if progress.step % _LOOK == 0:
                    rate = f"{progress.pairs / progress.seconds:.0f}"
                    bar.set_postfix(loss=f"{self._finite_loss():.3g}", rsum=rsum, pairs_per_s=rate, refresh=False)
                if not updated:  # a checkpoint has no gradients
                    continue
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
