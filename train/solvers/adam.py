"""Training by gradients: epochs of steps, validation, and the state that a bit-exact resume needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vse.eval.ranking.metrics import RECALLS
from vse.features.backbones import autocast
from vse.features.hardware import deterministic_algorithms, memory_guard, moved
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar
from vse.train.adversaries.base import Opponent
from vse.train.kinds import Encoded, Kind
from vse.train.losses.base import Batch, Objective
from vse.train.models.build import Model
from vse.train.run.interruption import TrainingFailed
from vse.train.solvers.base import Progress, Solver, SolverSettings, Task
from vse.train.solvers.schedule import Schedule

log = logging.getLogger(__name__)

_FIRST_STEPS = 100  # before these nothing counts as a collapse
_COLLAPSED_ENTROPY = 0.05  # of an adversary's draws, in nats, as an epoch's mean
_LOOK = 20  # steps between looks at the loss: each look waits for the GPU
_OUT_OF_MEMORY = (
    "lower train.batch_size, or --set train.features_in_memory=false; train.precision=bf16 takes less, and so does "
    "images.gradient_checkpointing=true where a CNN is trained, and model.caption_encoder.gradient_checkpointing=true where a "
    "transformer is"
)


class GradientSettings(SolverSettings):
    """Gradient descent by Adam (VSE++ paper, section 3.2); its settings are the group ``train``."""

    name: Literal["gradient"] = "gradient"

    def build(self, task: Task) -> Solver:
        return Trainer(task)


class Trainer(Solver):
    """Training by gradients, with Adam.

    An adversary, if the experiment has one, is a second player: it makes each batch harder, and in the same step its own Adam
    updates its weights by its own objective.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.epochs, self.patience = self.settings.epochs, self.settings.early_stop
        model = self.model
        several = self.processes.size > 1
        if several and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in _encoder_modules(model)):
            raise UserError("batch normalisation in an encoder takes one process; the statistics of each would be its own")
        if several and task.adversary is not None:
            raise UserError("an adversary takes one process")
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # the epoch's loss, and the collapsed loss
        self.schedule = Schedule(self.settings, model)
        self.optimizer = torch.optim.Adam(self.schedule.groups(), fused=True)
        self.adversary = None if task.adversary is None else task.adversary.build(self.opponent(task)).to(self.device)
        self._measures: dict[str, Tensor] = {}  # the epoch's sums of what the adversary measures
        if self.adversary is not None and task.adversary is not None:
            self.adversary_optimizer = torch.optim.Adam(
                self.adversary.parameters(), lr=task.adversary.learning_rate, fused=True
            )

    @staticmethod
    def opponent(task: Task) -> Opponent:
        """What the adversary of a task plays against."""
        how = task.settings.batch_size, task.settings.precision, task.processes.device
        return Opponent(task.model, task.loss, task.pairs, task.images, task.captions, *how)

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, also in the middle of an epoch.

        The order of an epoch's pairs, the crops of their images, dropout and drawn pairs depend on the seed, the epoch, the
        pair and the step alone.
        """
        second_player = {}
        if self.adversary is not None:
            second_player = {
                "adversary": self.adversary.state_dict(),
                "adversary_optimizer": self.adversary_optimizer.state_dict(),
                "measures": {name: float(total) for name, total in self._measures.items()},
            }
        return {
            **super().state(),
            "totals": self._totals.tolist(),
            "optimizer": self.optimizer.state_dict(),
            "negatives": [self.listing.finished, self.listing.running] if self.listing else [[], []],
            **second_player,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        super().restore(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))
        if self.listing:
            self.listing.finished, self.listing.running = state["negatives"]
        if self.adversary is not None:
            self.adversary.load_state_dict(state["adversary"])
            self.adversary_optimizer.load_state_dict(state["adversary_optimizer"])
            self._measures = {name: self._totals.new_tensor(total) for name, total in state["measures"].items()}

    def described(self, row: Mapping[str, float]) -> str:
        return f"loss {row['loss']:.3g}, {row['pairs_per_s']:.0f} pairs/s"

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Train the rest of an epoch and validate; adds its row to the progress."""
        progress = self.progress
        learning_rate = self.schedule.start_epoch(progress.epoch, self.optimizer)
        with memory_guard(_OUT_OF_MEMORY), deterministic_algorithms(self.settings.deterministic):
            self._train(save)
        loss, collapsed_loss = (self._totals / max(1, progress.pairs)).tolist()
        row = {"epoch": progress.epoch + 1, "learning_rate": learning_rate, "loss": loss, **self._measured()}
        if self.processes.first and self.validates(progress.epoch + 1):
            with self.stoppable(save):
                row |= self.validate()
        collapsed = self.processes.broadcast(int(self.processes.first and self._is_collapsed(row, collapsed_loss)))
        if collapsed:
            self._report_collapse(progress.epoch + 1, loss)
        row |= {"seconds": round(progress.seconds, 2), "pairs_per_s": round(progress.pairs / max(progress.seconds, 1e-9), 1)}
        if self.listing:
            self.listing.end_epoch()
        self._totals.zero_()
        self._measures = {}
        self.progress = Progress(progress.epoch + 1, [*progress.rows, row])

    def _train(self, save: Callable[[], None]) -> None:
        """The steps of the epoch that are left."""
        progress, settings = self.progress, self.settings
        image_of, seed = self.pairs.image_of, self.task.seed
        batches = settings.sampling.batches_of_epoch(image_of, settings.batch_size, seed, progress.epoch)
        left = batches[progress.step :]
        objective = self.task.loss_of(progress.epoch).objective(self.model.similarity, settings.compile)
        shares = [self.processes.share(batch) for batch in left]
        stream = self.task.images.of_pairs(shares, image_of, seed, progress.epoch)
        self.model.train()
        if self.adversary is not None and progress.step == 0:
            self.adversary.start_epoch(self.model)
        before, saved, started = progress.seconds, time.monotonic(), time.perf_counter()
        rsum = f"{progress.rows[-1]['rsum']:.1f}" if progress.rows and "rsum" in progress.rows[-1] else "-"
        with progress_bar(
            total=len(batches),
            initial=progress.step,
            desc=f"epoch {progress.epoch + 1}/{settings.epochs}",
            unit="batch",
            hidden=not self.processes.first,
        ) as bar:
            for batch, seen in zip(left, stream, strict=True):
                self._totals += torch.stack(self.step(batch, seen, objective))
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
                if time.monotonic() - saved > 60 * settings.save_minutes:
                    self._finite_loss()
                    save()
                    saved = time.monotonic()
        self._finite_loss()

    def step(self, batch: NDArray[np.int64], seen: Encoded, objective: Objective) -> tuple[Tensor, Tensor]:
        """One update; the loss of the batch, and what it would be if all embeddings were equal.

        ``batch`` holds the numbers of all its pairs, ``seen`` what the model reads of the images of this process's share.
        """
        share = self.processes.share(batch)
        torch.manual_seed(self._seed(1 + self.processes.rank))
        images, captions = self._embedded(seen, share)
        images, captions = (self.processes.gathered(side, len(batch)) for side in (images, captions))
        texts = self.pairs.text_of[batch] if self.task.loss.lambda3 else batch
        pairs = Batch(images, captions, self.pairs.image_of[batch], texts, pair_of=batch)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.settings.precision, self.device) if self.model.pairwise else nullcontext():
            if self.adversary is None:
                cost = objective(pairs, self._seed(0))
            else:
                cost, adversary_loss, measures = self.adversary.play(pairs, self.model, objective, self._seed(0))
        if self.adversary is None:
            cost.loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._set_both_gradients(cost.loss, adversary_loss, list(self.adversary.parameters()))
            self._measure({**measures, "loss": adversary_loss.detach()}, len(batch))
        self.processes.sum_gradients(self.model.parameters(), whole=self.model.similarity.parameters())
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.adversary is not None:
            self._step_adversary()
        if self.listing and cost.rankings is not None:
            self.listing.add(self.progress.epoch + 1, batch.tolist(), cost.rankings, self.task.loss.margin)
        return cost.loss.detach().double(), cost.collapsed.double()

    def _set_both_gradients(self, loss: Tensor, adversary_loss: Tensor, adversary_weights: list[nn.Parameter]) -> None:
        """Each player's gradients, of its own objective alone."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        adversary_gradients = torch.autograd.grad(adversary_loss, adversary_weights, allow_unused=True)
        for weight, gradient in zip([*weights, *adversary_weights], [*gradients, *adversary_gradients], strict=True):
            weight.grad = gradient

    def _step_adversary(self) -> None:
        assert self.adversary is not None
        assert self.task.adversary is not None
        if (self.progress.step + 1) % self.task.adversary.every == 0:
            if self.task.adversary.clip is not None:
                nn.utils.clip_grad_norm_(self.adversary.parameters(), self.task.adversary.clip)
            self.adversary_optimizer.step()

    def _measure(self, measures: Mapping[str, Tensor], n_pairs: int) -> None:
        """Add what an adversary measured of a batch to the epoch's sums."""
        for name, value in measures.items():
            total = self._measures.setdefault(name, torch.zeros_like(self._totals[0]))
            total += n_pairs * value.double()

    def _measured(self) -> dict[str, float]:
        """The epoch's means of what the adversary measured; says so if it always draws the same."""
        n_pairs = max(1, self.progress.pairs)
        means = {f"adversary_{name}": float(total) / n_pairs for name, total in self._measures.items()}
        if means.get("adversary_entropy", 1.0) < _COLLAPSED_ENTROPY:
            log.warning(
                "epoch %d: the adversary's entropy is %.2g, it draws the same negative of a query again and again; "
                "--set adversary.entropy_weight=1 holds it up, and so does a lower adversary.learning_rate",
                self.progress.epoch + 1,
                means["adversary_entropy"],
            )
        return means

    def _seed(self, use: int) -> int:
        """A seed of this step, another one for each use."""
        entropy = [self.task.seed, self.progress.epoch, self.progress.step, use]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _embedded(self, seen: Encoded, share: NDArray[np.int64]) -> tuple[Encoded, Encoded]:
        """Embeddings of a share of a batch, which has no pairs at all if there are more processes than pairs."""
        if not len(share):
            images, captions = (_no_embeddings(kind, self.model.dim, self.device) for kind in self.model.gives)
            return images, captions
        with autocast(self.settings.precision, self.device):
            images = self.model.embed_images(*(moved(part, self.device) for part in seen))
            return images, self.model.embed_captions(*self.task.captions.of(share))

    def _finite_loss(self) -> float:
        """The epoch's mean loss so far; :class:`UserError` if the training has diverged."""
        loss = float(self._totals[0]) / max(1, self.progress.pairs)
        of_adversary = float(self._measures.get("loss", 0.0))
        for value, what, cure in (
            (loss, "the loss", "a lower learning rate"),
            (of_adversary, "the adversary's loss", "a lower adversary.learning_rate"),
        ):
            if not np.isfinite(value):
                raise TrainingFailed(
                    f"epoch {self.progress.epoch + 1}, step {self.progress.step}: {what} is {value}; the last good checkpoint "
                    f"is kept. Try {cure}",
                    "diverged",
                )
        return loss

    def _is_collapsed(self, row: Mapping[str, float], collapsed_loss: float) -> bool:
        """Whether the epoch's loss is that of equal embeddings, and validation, if there was one, is no better than chance.

        The first steps of any training look like that.
        """
        chance = 200.0 * sum(RECALLS) / len(self.val.pairs.images)
        steps = (self.progress.epoch + 1) * self.progress.step
        near = collapsed_loss > 0 and abs(row["loss"] - collapsed_loss) < 0.02 * collapsed_loss
        return steps >= _FIRST_STEPS and near and row.get("rsum", 0.0) <= 2 * chance

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


def _encoder_modules(model: Model) -> Iterator[nn.Module]:
    yield from model.image_encoder.modules()
    yield from model.caption_encoder.modules()


def _no_embeddings(kind: Kind, dim: int, device: torch.device) -> Encoded:
    if kind == Kind.VECTORS:
        return (torch.zeros(0, dim, device=device, requires_grad=True),)
    return torch.zeros(0, 1, dim, device=device, requires_grad=True), torch.zeros(0, 1, dtype=torch.bool, device=device)
