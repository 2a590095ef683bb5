"""The training loop: epochs of steps, validation, and the state that a bit-exact resume needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from vse.eval.metrics import RECALLS, metrics
from vse.eval.ranks import ranks_from_embeddings
from vse.features.backbones import autocast
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.errors import Interrupted, UserError
from vse.train.batches import Pairs, shuffled
from vse.train.encode import encode
from vse.train.images import EvaluationImages, TrainingImages
from vse.train.interruption import Interruption, StopNow
from vse.train.losses import Loss, loss_by_name, negative_pairs
from vse.train.model import TwoBranchModel
from vse.train.negatives import HardNegatives
from vse.train.parallel import Processes

log = logging.getLogger(__name__)

_FIRST_STEPS = 100  # before these nothing counts as a collapse
_LOOK = 20  # steps between looks at the loss: each look waits for the GPU


@dataclass
class Progress:
    """What changes while training, beside the weights and the optimiser.

    ``epoch`` epochs are finished, each with its row of ``metrics.csv`` in ``rows``; of the next one ``step`` batches are done,
    of ``pairs`` pairs, in ``seconds``.
    """

    epoch: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    pairs: int = 0
    seconds: float = 0.0

    @property
    def best(self) -> dict[str, float]:
        """The epoch with the highest validation rsum, the first of equals."""
        return max(self.rows, key=lambda row: row["rsum"])

    def finished(self, epochs: int, patience: int | None) -> bool:
        """Whether all ``epochs`` are done, or the last ``patience`` ones have not been better than one before."""
        stale = patience is not None and bool(self.rows) and self.epoch - self.best["epoch"] >= patience
        return self.epoch >= epochs or stale


@dataclass(frozen=True)
class Split:
    """The pairs of a split and what the model reads of their images."""

    pairs: Pairs
    images: EvaluationImages


class Trainer:
    """One training run.

    Parameters
    ----------
    experiment : every setting
    pairs, images : what is trained on
    val : what is validated on
    model : what is trained
    seed : of the order of the pairs and of random crops
    processes : that train together
    listing : where hard negatives are noted, if they are wanted
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        pairs: Pairs,
        images: TrainingImages,
        val: Split,
        model: TwoBranchModel,
        seed: int,
        processes: Processes,
        listing: HardNegatives | None = None,
    ) -> None:
        self.experiment, self.settings = experiment, experiment.train
        self.pairs, self.images, self.val = pairs, images, val
        self.model = model
        self.seed = seed
        self.processes, self.device = processes, processes.device
        self.listing = listing
        self.interruption = Interruption()
        self.progress = Progress()
        self._totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # the epoch's loss, and if all were alike
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.settings.learning_rate, fused=True)

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, in the middle of an epoch too.

        The order of an epoch's pairs and the crops of their images depend on the seed, the epoch and the pair alone.
        """
        return {
            **vars(self.progress),
            "totals": self._totals.tolist(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "negatives": [self.listing.finished, self.listing.running] if self.listing else [[], []],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self._totals.copy_(torch.tensor(state["totals"], dtype=torch.float64))
        self.progress = Progress(**{name: state[name] for name in vars(self.progress)})
        if self.listing:
            self.listing.finished, self.listing.running = state["negatives"]

    def run_epoch(self, save: Callable[[], None]) -> None:
        """Train the rest of an epoch and validate; adds its row to the progress.

        ``save`` is called now and then, and before :class:`Interrupted` is raised for a signal.
        """
        progress = self.progress
        learning_rate = self.settings.learning_rate * self.settings.decay ** (progress.epoch // self.settings.decay_after)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._train(save)
        loss, alike = (self._totals / max(1, progress.pairs)).tolist()
        row = {"epoch": progress.epoch + 1, "learning_rate": learning_rate, "loss": loss}
        if self.processes.first:
            try:
                with self.interruption.obeyed():
                    row |= self.validate()
            except StopNow:
                save()
                raise self._interrupted() from None
        collapsed = self.processes.told(int(self.processes.first and self._is_collapsed(row, alike)))
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
        batches = shuffled(len(self.pairs), settings.batch_size, self.seed, progress.epoch)
        left = batches[progress.step :]
        warmup = self.experiment.warmup
        criterion = loss_by_name(warmup.loss if progress.epoch < warmup.epochs else self.experiment.loss.name)
        criterion = torch.compile(criterion) if settings.compile else criterion
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
                self._totals += torch.stack(self.step(batch, seen, criterion))
                progress.step += 1
                progress.pairs += len(batch)
                progress.seconds = before + time.perf_counter() - started
                bar.update()
                if progress.step % _LOOK == 0:
                    rate = f"{progress.pairs / progress.seconds:.0f}"
                    bar.set_postfix(loss=f"{self._finite_loss():.3f}", rsum=rsum, pairs_per_s=rate)
                if self.processes.any(self.interruption.signal is not None):
                    self._finite_loss()
                    save()
                    raise self._interrupted()
                if time.monotonic() - saved > 60 * settings.save_minutes:
                    self._finite_loss()
                    save()
                    saved = time.monotonic()
        self._finite_loss()

    def step(self, batch: NDArray[np.int64], seen: Tensor, criterion: Loss) -> tuple[Tensor, Tensor]:
        """One update; the loss of the batch and what it would be if all embeddings were alike.

        ``batch`` holds the numbers of all its pairs, ``seen`` what the model reads of the images of this process's share.
        """
        share = self.processes.share(batch)
        images, captions = self._embedded(seen, share)
        images, captions = (self.processes.gathered(side, len(batch)) for side in (images, captions))
        ids = torch.from_numpy(self.pairs.image_ids[self.pairs.image_of[batch]]).to(self.device)
        negatives = negative_pairs(ids, self.experiment.loss.same_image == "mask")
        scores = self.model.similarity(images, captions)
        loss = criterion(scores, negatives, self.experiment.loss)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.processes.sum_gradients(self.model.parameters())
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.listing:
            self.listing.add(self.progress.epoch + 1, batch.tolist(), scores, negatives, self.experiment.loss.margin)
        with torch.no_grad():
            alike = criterion(torch.zeros_like(scores), negatives, self.experiment.loss)
        return loss.detach().double(), alike.double()

    def _embedded(self, seen: Tensor, share: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Embeddings of a share of a batch, which has no pairs at all if there are more processes than pairs."""
        if not len(share):
            images, captions = torch.zeros(2, 0, self.experiment.model.dim, device=self.device, requires_grad=True)
            return images, captions
        words, lengths = self.pairs.words(share)
        with autocast(self.settings.precision, self.device):
            images = self.model.embed_images(seen.to(self.device, non_blocking=True))
            return images, self.model.embed_captions(words.to(self.device, non_blocking=True), lengths)

    def validate(self) -> dict[str, float]:
        """Recalls on the whole validation split, both ways, and their sum."""
        images, captions = encode(self.model, self.val.pairs, self.val.images, self.device)
        owners = torch.from_numpy(self.val.pairs.image_of)
        found = metrics(ranks_from_embeddings(images, captions, owners, self.experiment.model.similarity))
        recalls = {f"{way}_r{k}": found[way][f"r{k}"] for way in ("i2t", "t2i") for k in RECALLS}
        return {**recalls, "rsum": found["rsum"]}

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

    def _interrupted(self) -> Interrupted:
        where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
        return Interrupted(f"stopped in {where}; --resume continues there", self.interruption.signal or 15)
