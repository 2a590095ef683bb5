"""Epochs of gradient steps by Adam or AdamW, with validation and the state for a bit-exact resume."""

from __future__ import annotations

import logging
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vse.features.backbones.device import use_deterministic_algorithms, wrap_memory_errors
from vse.pipeline.progress import progress_bar
from vse.training.losses.base import Loss
from vse.training.processes.interruption import TrainingFailed
from vse.training.solvers.base import Progress, Solver, TrainingTask
from vse.training.solvers.optimisation import OPTIMIZERS, AveragedWeights, Schedule

log = logging.getLogger(__name__)

_MIN_STEPS_TO_COLLAPSE = 100  # a collapse is reported only after this number of steps
_FIRST_SAVE_MINUTES = 1.0  # minutes from the start of a training to its first checkpoint
_STEPS_PER_LOSS_READ = 20  # the loss is read only every 20 steps, because a read waits for the GPU
Indices = NDArray[np.int64]


class GradientSolver(Solver):
    """A solver that trains in epochs of batches, with an update for each batch, or for every ``train.accumulate`` batches.

    A subclass defines the batches of an epoch and the step on a batch. The step calls :meth:`clear_old_gradients`, adds the
    gradients of the batch to the existing gradients, and calls :meth:`update_weights` if :meth:`ends_update` is true.
    ``out_of_memory_advice`` is added to the error message if the memory is too small.
    """

    out_of_memory_advice: ClassVar[str]

    def __init__(self, task: TrainingTask) -> None:
        super().__init__(task)
        self.epochs, self.patience = self.settings.epochs, self.settings.early_stop
        self._loss_totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sums: loss, and loss of equal embeddings
        self.schedule = Schedule(self.settings, self.model)
        ema = self.settings.ema if self.processes.is_first else None
        self.averaged_weights = None if ema is None else AveragedWeights(self.model, ema)
        self._batch_sizes: list[int] = []  # number of pairs of each batch of the running epoch
        learned = task.loss.build_scale()
        self.learned_scale = None if learned is None else learned.to(self.device)
        if self.learned_scale is not None:
            self.schedule.add_loss_parameters(self.learned_scale, task.loss.learning_rate_of_scale)
        self.optimizer = OPTIMIZERS[self.settings.optimizer](self.schedule.build_parameter_groups(), fused=True)

    @abstractmethod
    def batches(self, epoch: int) -> Sequence[Indices]:
        """Return the indices of the pairs of each batch of an epoch (0-based), determined by the seed and the epoch."""

    @abstractmethod
    def train_batches(self, batches: Sequence[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Train on each batch. Yield the loss of the batch, and the loss that it would have if all embeddings were equal."""

    @property
    @abstractmethod
    def near_chance_rsum(self) -> float:
        """The highest validation ``rsum`` (sum of recalls) that counts as no better than chance, such as twice chance."""

    def extra_metrics(self) -> dict[str, float]:
        """Return additional metrics for the epoch's row of ``metrics.csv``."""
        return {}

    def list_losses_that_must_be_finite(self) -> list[tuple[float, str, str]]:
        """Return each loss that must be finite, with its name and advice for a user whose loss is not finite.

        The first loss is the mean loss per pair of the current epoch so far.
        """
        return [(float(self._loss_totals[0]) / max(1, self.progress.pairs), "the loss", "a lower learning rate")]

    def end_epoch(self) -> None:
        """Finish an epoch. The row of the epoch is added to ``progress`` afterwards."""

    def state(self) -> dict[str, Any]:
        state = {**super().state(), "totals": self._loss_totals.tolist(), "optimizer": self.optimizer.state_dict()}
        if self.averaged_weights is not None:
            state["averaged"] = self.averaged_weights.state()
        if self.learned_scale is not None:
            state["loss_weights"] = self.learned_scale.state_dict()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.averaged_weights is not None:
            self.averaged_weights.restore(state["averaged"])
        if self.learned_scale is not None:
            self.learned_scale.load_state_dict(state["loss_weights"])
        self._loss_totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))

    def describe_epoch(self, row: Mapping[str, float]) -> str:
        learned = "".join(f"{name} {row[name]:.4g}, " for name in self.learned_loss_parameters())
        return f"loss {row['loss']:.3g}, {learned}{row['pairs_per_s']:.0f} pairs/s"

    def learned_loss_parameters(self) -> dict[str, float]:
        return {} if self.learned_scale is None else self.learned_scale.temperature_and_bias()

    def run_epoch(self, save: Callable[[], None]) -> None:
        progress = self.progress
        self.schedule.freeze_scheduled_parts(progress.epoch)
        with wrap_memory_errors(self.out_of_memory_advice), use_deterministic_algorithms(self.settings.deterministic):
            self._train_epoch(save)
        loss, collapsed_loss = (self._loss_totals / max(1, progress.pairs)).tolist()
        learning_rate = self.schedule.learning_rate(progress.epoch, self.n_updates - 1, self.n_updates)
        row = {
            "epoch": progress.epoch + 1,
            "learning_rate": learning_rate,
            "loss": loss,
            **self.learned_loss_parameters(),
            **self.extra_metrics(),
        }
        if self.validates_after(progress.epoch + 1):
            if self.processes.is_first:
                with self.validation_context(save):
                    row |= self.validate()
            self.processes.wait_for_first()
        collapsed = self.processes.broadcast(int(self.processes.is_first and self._is_collapsed(row, collapsed_loss)))
        if collapsed:
            self._report_collapse(progress.epoch + 1, loss)
        row |= {"seconds": round(progress.seconds, 2), "pairs_per_s": round(progress.pairs / max(progress.seconds, 1e-9), 1)}
        self.end_epoch()
        self._loss_totals.zero_()
        self.progress = Progress(progress.epoch + 1, [*progress.rows, row])

    def validation_weights(self) -> Mapping[str, Tensor]:
        """Return the weights or, with ``train.ema``, their moving average."""
        return super().validation_weights() if self.averaged_weights is None else self.averaged_weights.weights

    def use_validation_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self.averaged_weights is None else self.averaged_weights.use_in_model()

    @property
    def n_updates(self) -> int:
        """The number of updates in the current epoch. The last update may have fewer batches than the others."""
        return max(1, -(-len(self._batch_sizes) // self.settings.accumulate))

    def clear_old_gradients(self) -> None:
        """Delete the gradients of the last update, unless the current batch belongs to the same update."""
        if self.progress.step % self.settings.accumulate == 0:
            self.optimizer.zero_grad(set_to_none=True)

    def ends_update(self) -> bool:
        """Return whether the current batch is the last one of its update."""
        done = self.progress.step + 1
        return done % self.settings.accumulate == 0 or done == len(self._batch_sizes)

    def scale_cost(self, cost: Tensor, loss: Loss) -> Tensor:
        """Return the cost of the current batch, weighted for an update that accumulates the gradients of several batches.

        If the loss is a mean over pairs, the weight is the batch's share of the pairs of the update. Otherwise it is 1.
        """
        if self.settings.accumulate == 1 or not loss.is_mean_over_queries:
            return cost
        first = self.progress.step - self.progress.step % self.settings.accumulate
        return cost * (
            self._batch_sizes[self.progress.step] / sum(self._batch_sizes[first : first + self.settings.accumulate])
        )

    def update_weights(self) -> None:
        """Clip the gradients of the model and update the weights."""
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        update = self.progress.step // self.settings.accumulate
        self.schedule.set_learning_rates(self.optimizer, self.progress.epoch, update, self.n_updates)
        self.optimizer.step()
        if self.averaged_weights is not None:
            self.averaged_weights.update()
        if self.learned_scale is not None:
            self.learned_scale.clamp_temperature()

    def step_seed(self, stream: int) -> int:
        """Return a seed that is determined by the run's seed, the epoch, the step and ``stream``.

        ``stream`` : number that distinguishes the uses of random numbers in a step.
        """
        parts = [self.task.seed, self.progress.epoch, self.progress.step, stream]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])

    def _train_epoch(self, save: Callable[[], None]) -> None:
        progress = self.progress
        batches = self.batches(progress.epoch)
        self._batch_sizes = [len(batch) for batch in batches]
        if progress.epoch == progress.step == 0:
            self.schedule.warn_if_all_warmup(self.n_updates)
        remaining = batches[progress.step :]
        self.model.train()
        seconds_before, saved_at, started = progress.seconds, time.monotonic(), time.perf_counter()
        save_minutes = self.settings.save_minutes
        if progress.epoch == 0:  # a run may have no checkpoint yet
            save_minutes = min(save_minutes, _FIRST_SAVE_MINUTES)
        rsum = f"{progress.rows[-1]['rsum']:.1f}" if progress.rows and "rsum" in progress.rows[-1] else "-"
        with progress_bar(
            total=len(batches),
            initial=progress.step,
            desc=f"epoch {progress.epoch + 1}/{self.settings.epochs}",
            unit="batch",
            hidden=not self.processes.is_first,
        ) as bar:
            for batch, losses in zip(remaining, self.train_batches(remaining), strict=True):
                self._loss_totals += torch.stack(losses)
                updated = self.ends_update()
                progress.step += 1
                progress.pairs += len(batch)
                progress.seconds = seconds_before + time.perf_counter() - started
                bar.update()
                if progress.step % _STEPS_PER_LOSS_READ == 0:
                    rate = f"{progress.pairs / progress.seconds:.0f}"
                    bar.set_postfix(loss=f"{self._read_finite_mean_loss():.3g}", rsum=rsum, pairs_per_s=rate, refresh=False)
                if not updated:  # a checkpoint has no gradients, so it can only be written after an update
                    continue
                if self.processes.any(self.interruption.signal is not None):
                    self._read_finite_mean_loss()
                    self.interruption.deliver_signal(signal.SIGTERM)  # the signal may have reached another process only
                    save()
                    self.processes.any(False)  # a barrier: wait until the first process has saved
                    raise self.stop_error()
                if time.monotonic() - saved_at > 60 * save_minutes:
                    self._read_finite_mean_loss()
                    save()
                    saved_at, save_minutes = time.monotonic(), self.settings.save_minutes
        self._read_finite_mean_loss()

    def _read_finite_mean_loss(self) -> float:
        """Return the epoch's mean loss so far. Raises :class:`TrainingFailed` if the training has diverged."""
        watched = self.list_losses_that_must_be_finite()
        for value, name, cure in watched:
            if not np.isfinite(value):
                raise TrainingFailed(
                    f"epoch {self.progress.epoch + 1}, step {self.progress.step}: {name} is {value}; the last good "
                    f"checkpoint is kept. Try {cure}",
                    "diverged",
                )
        return watched[0][0]

    def _is_collapsed(self, row: Mapping[str, float], collapsed_loss: float) -> bool:
        """Return whether the mean loss is within 2% of ``collapsed_loss``, and the validation is no better than chance.

        ``collapsed_loss`` is the mean loss that the epoch would have if all embeddings were equal. The result is False in the
        first 100 steps of a training.
        """
        steps = (self.progress.epoch + 1) * self.progress.step
        near = collapsed_loss > 0 and abs(row["loss"] - collapsed_loss) < 0.02 * collapsed_loss
        return steps >= _MIN_STEPS_TO_COLLAPSE and near and row.get("rsum", 0.0) <= self.near_chance_rsum

    def _report_collapse(self, epoch: int, loss: float) -> None:
        collapse = (
            f"epoch {epoch}: the loss stayed at its collapsed value, {loss:.3f} per pair, for the complete epoch, as if all "
            "embeddings were equal (2 x batch x margin for the max of hinges)"
        )
        cure = "Warm up with the sum of hinges (--set warmup.epochs=1), or lower the learning rate"
        if self.settings.on_collapse == "stop":
            raise TrainingFailed(
                f"{collapse}; the last good checkpoint is kept. {cure}; --set train.on_collapse=warn continues the training",
                "collapsed",
            )
        log.warning("%s. If it stays there: %s", collapse, cure[0].lower() + cure[1:])
