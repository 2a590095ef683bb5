"""Training by gradients: epochs of steps, validation, and the state that a bit-exact resume needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from vse.eval.ranking.metrics import RECALLS
from vse.features.backbones import autocast
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.errors import UserError
from vse.train.data.captions import Captions
from vse.train.data.images import TrainingImages
from vse.train.data.pairs import Pairs, Split
from vse.train.data.samplers import batches_of_epoch
from vse.train.losses.objective import Batch, Objective
from vse.train.models.build import TwoBranchModel
from vse.train.run.processes import Processes
from vse.train.solvers.base import Progress, Solver
from vse.train.solvers.negatives import HardNegatives

log = logging.getLogger(__name__)

_FIRST_STEPS = 100  # before these nothing counts as a collapse
_LOOK = 20  # steps between looks at the loss: each look waits for the GPU


class Trainer(Solver):
    """Training by gradients, with Adam.

    Parameters
    ----------
    experiment : every setting
    pairs, images, captions : what is trained on
    val : what is validated on
    model : what is trained
    seed : of the order of the pairs, of random crops, of dropout and of wrong pairs
    processes : that train together
    listing : where hard negatives are noted, if they are wanted
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        pairs: Pairs,
        images: TrainingImages,
        captions: Captions,
        val: Split,
        model: TwoBranchModel,
        seed: int,
        processes: Processes,
        listing: HardNegatives | None = None,
    ) -> None:
        super().__init__(experiment, pairs, val, model, processes)
        self.settings, self.epochs, self.patience = experiment.train, experiment.train.epochs, experiment.train.early_stop
        self.images, self.captions = images, captions
        self.seed = seed
        self.listing = listing
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # the epoch's loss, and if all were alike
        words = [] if model.word_encoder is None else [model.word_encoder.words.weight]
        others = [weight for weight in model.parameters() if not any(weight is word for word in words)]
        groups = [{"params": others, "weight_decay": self.settings.weight_decay}, {"params": words, "weight_decay": 0.0}]
        self.optimizer = torch.optim.Adam(groups, lr=self.settings.learning_rate, fused=True)

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, in the middle of an epoch too.

        The order of an epoch's pairs, the crops of their images, dropout and drawn pairs depend on the seed, the epoch, the
        pair and the step alone.
        """
        return {
            **super().state(),
            "totals": self._totals.tolist(),
            "optimizer": self.optimizer.state_dict(),
            "negatives": [self.listing.finished, self.listing.running] if self.listing else [[], []],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        super().restore(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))
        if self.listing:
            self.listing.finished, self.listing.running = state["negatives"]

    def described(self, row: Mapping[str, float]) -> str:
        return f"loss {row['loss']:.3g}, {row['pairs_per_s']:.0f} pairs/s"

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Train the rest of an epoch and validate; adds its row to the progress."""
        progress = self.progress
        learning_rate = self.settings.learning_rate * self.settings.decay ** (progress.epoch // self.settings.decay_after)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._train(save)
        loss, alike = (self._totals / max(1, progress.pairs)).tolist()
        row = {"epoch": progress.epoch + 1, "learning_rate": learning_rate, "loss": loss}
        if self.processes.first:
            with self.stoppable(save):
                row |= self.validate()
        collapsed = self.processes.broadcast(int(self.processes.first and self._is_collapsed(row, alike)))
        if collapsed:
            self._tell_of_collapse(progress.epoch + 1, loss)
        row |= {"seconds": round(progress.seconds, 2), "pairs_per_s": round(progress.pairs / max(progress.seconds, 1e-9), 1)}
        if self.listing:
            self.listing.end_epoch()
        self._totals.zero_()
        self.progress = Progress(progress.epoch + 1, [*progress.rows, row])

    def _train(self, save: Callable[[], None]) -> None:
        """The steps of the epoch that are left."""
        progress, settings = self.progress, self.settings
        batches = batches_of_epoch(settings.sampling, self.pairs.image_of, settings.batch_size, self.seed, progress.epoch)
        left = batches[progress.step :]
        warmup = self.experiment.warmup
        name = warmup.loss if progress.epoch < warmup.epochs else self.experiment.loss.name
        objective = Objective(name, self.experiment.loss, self.model, settings.compile)
        shares = [self.processes.share(batch) for batch in left]
        stream = self.images.of_pairs(shares, self.pairs.image_of, self.seed, progress.epoch)
        self.model.train()
        before, saved, started = progress.seconds, time.monotonic(), time.perf_counter()
        rsum = f"{progress.rows[-1].get('rsum', 0):.1f}" if progress.rows else "-"
        with tqdm(
            total=len(batches),
            initial=progress.step,
            desc=f"epoch {progress.epoch + 1}/{settings.epochs}",
            unit="batch",
            disable=None if self.processes.first else True,
        ) as bar:
            for batch, seen in zip(left, stream, strict=True):
                self._totals += torch.stack(self.step(batch, seen, objective))
                progress.step += 1
                progress.pairs += len(batch)
                progress.seconds = before + time.perf_counter() - started
                bar.update()
                if progress.step % _LOOK == 0:
                    rate = f"{progress.pairs / progress.seconds:.0f}"
                    bar.set_postfix(loss=f"{self._finite_loss():.3g}", rsum=rsum, pairs_per_s=rate)
                if self.processes.any(self.interruption.signal is not None):
                    self._finite_loss()
                    save()
                    raise self.interrupted()
                if time.monotonic() - saved > 60 * settings.save_minutes:
                    self._finite_loss()
                    save()
                    saved = time.monotonic()
        self._finite_loss()

    def step(self, batch: NDArray[np.int64], seen: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """One update; the loss of the batch and what it would be if all embeddings were alike.

        ``batch`` holds the numbers of all its pairs, ``seen`` what the model reads of the images of this process's share.
        """
        share = self.processes.share(batch)
        torch.manual_seed(self._seed(1 + self.processes.rank))
        images, captions = self._embedded(seen, share)
        images, captions = (self.processes.gathered(side, len(batch)) for side in (images, captions))
        texts = self.pairs.text_of[batch] if self.experiment.loss.lambda3 else batch
        cost = objective(Batch(images, captions, self.pairs.image_of[batch], texts), self._seed(0))
        self.optimizer.zero_grad(set_to_none=True)
        cost.loss.backward()  # type: ignore[no-untyped-call]
        self.processes.sum_gradients(self.model.parameters(), whole=self.model.of_similarity())
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.listing and cost.scores is not None and cost.negatives is not None:
            margin = self.experiment.loss.margin
            self.listing.add(self.progress.epoch + 1, batch.tolist(), cost.scores, cost.negatives, margin)
        return cost.loss.detach().double(), cost.collapsed_loss.double()

    def _seed(self, use: int) -> int:
        """A seed of this step, another one for each use."""
        entropy = [self.seed, self.progress.epoch, self.progress.step, use]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _embedded(self, seen: Tensor, share: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Embeddings of a share of a batch, which has no pairs at all if there are more processes than pairs."""
        if not len(share):
            images, captions = torch.zeros(2, 0, self.experiment.model.embedding_dim, device=self.device, requires_grad=True)
            return images, captions
        with autocast(self.settings.precision, self.device):
            images = self.model.embed_images(seen.to(self.device, non_blocking=True))
            return images, self.model.embed_captions(*self.captions.of(share))

    def _finite_loss(self) -> float:
        """The epoch's mean loss so far; :class:`UserError` if the training has diverged."""
        loss = float(self._totals[0]) / max(1, self.progress.pairs)
        if not np.isfinite(loss):
            raise UserError(
                f"epoch {self.progress.epoch + 1}, step {self.progress.step}: the loss is {loss}; the last good checkpoint is "
                "kept. Try a lower learning rate"
            )
        return loss

    def _is_collapsed(self, row: Mapping[str, float], alike: float) -> bool:
        """Whether the epoch's loss is what it is if all embeddings are alike, and validation finds no more than chance.

        The first steps of any training look like that.
        """
        chance = 200.0 * sum(RECALLS) / len(self.val.pairs.images)
        steps = (self.progress.epoch + 1) * self.progress.step
        return steps >= _FIRST_STEPS and alike > 0 and abs(row["loss"] - alike) < 0.02 * alike and row["rsum"] <= 2 * chance

    def _tell_of_collapse(self, epoch: int, loss: float) -> None:
        """Stop, or only say so."""
        what = (
            f"epoch {epoch}: the loss sat at its collapse value, {loss:.3f} per pair, for the whole epoch, as if all "
            "embeddings were alike (2 x batch x margin for the max of hinges)"
        )
        cure = "Warm up with the sum of hinges (--set warmup.epochs=1), or lower the learning rate"
        if self.settings.on_collapse == "stop":
            raise UserError(f"{what}; the last good checkpoint is kept. {cure}; --set train.on_collapse=warn goes on")
        log.warning("%s. If it does not leave: %s", what, cure[0].lower() + cure[1:])
