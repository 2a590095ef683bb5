"""What all solvers share: their settings, progress in epochs, validation, and a state to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from vse.eval.defaults import RECALLS
from vse.eval.ranking.metrics import averaged, metrics
from vse.pipeline.errors import Interrupted
from vse.train.data.captions import CaptionInputs
from vse.train.data.images import TrainingImages
from vse.train.data.pairs import Pairs, Split
from vse.train.kinds import Packed, packed
from vse.train.losses import LOSSES
from vse.train.losses.base import Loss
from vse.train.models.build import Model
from vse.train.run.processes import Interruption, Processes, StopNow
from vse.train.settings import AdversarySettings, TrainConfig, WarmupConfig
from vse.train.solvers.encode import encode, ranks
from vse.train.solvers.negatives import HardNegatives


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every solver is given.

    settings, loss, warmup : the experiment's
    model : whose weights are sought
    seed : of the order of the pairs, of dropout and of all that is drawn
    processes : that train together
    """

    settings: TrainConfig
    loss: Loss
    warmup: WarmupConfig
    model: Model
    seed: int
    processes: Processes

    def loss_of(self, epoch: int) -> Loss:
        """The loss of an epoch (from 0): during the warm-up, that of the warm-up with the settings of the experiment's."""
        if epoch >= self.warmup.epochs:
            return self.loss
        shared = self.loss.model_dump(include=set(Loss.model_fields))
        warmup = LOSSES[self.warmup.loss]
        if self.loss.same_image == "positive" and not warmup.several_positives:
            shared["same_image"] = "mask"
        return warmup.model_validate({**shared, "name": self.warmup.loss})


@dataclass(frozen=True, kw_only=True)
class RetrievalTask(Task):
    """What a solver is given that matches images and captions.

    pairs, images, captions : what is trained on
    val : what is validated on
    listing : where hard negatives are listed, if they are wanted
    adversary : the experiment's
    """

    pairs: Pairs
    images: TrainingImages
    captions: CaptionInputs
    val: Split
    listing: HardNegatives | None = None
    adversary: AdversarySettings | None = None


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
        return max((row for row in self.rows if "rsum" in row), key=lambda row: row["rsum"])

    def finished(self, epochs: int, patience: int | None) -> bool:
        """Whether all ``epochs`` are done, or the last ``patience`` ones have not been better than one before."""
        validated = any("rsum" in row for row in self.rows)
        stale = patience is not None and validated and self.epoch - self.best["epoch"] >= patience
        return self.epoch >= epochs or stale


class Solver(ABC):
    """One run, epoch by epoch. The first of several processes validates and writes."""

    task: Task
    epochs: int
    patience: int | None = None  # epochs without a better rsum after which it stops
    listing: HardNegatives | None = None

    def __init__(self, task: Task) -> None:
        self.task, self.settings, self.model = task, task.settings, task.model
        self.processes, self.device = task.processes, task.processes.device
        self.interruption = Interruption()
        self.progress = Progress()

    @property
    @abstractmethod
    def n_pairs(self) -> int:
        """How many pairs it is trained on."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Recalls on the validation split, and their sum, ``rsum``, by which the best epoch is known."""

    @abstractmethod
    def run_epoch(self, save: Callable[[], None]) -> None:
        """Do the rest of an epoch and validate; adds its row to the progress.

        ``save`` is called now and then, and before :class:`Interrupted` is raised for a signal.
        """

    @abstractmethod
    def described(self, row: Mapping[str, float]) -> str:
        """The row of an epoch, for a person."""

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, also in the middle of an epoch."""
        return {**vars(self.progress), "model": self.model.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        self.model.load_state_dict(state["model"])
        self.progress = Progress(**{name: state[name] for name in vars(self.progress)})

    def best_weights(self) -> Mapping[str, Tensor]:
        """The weights that a validation is of, which are kept if it is the best."""
        return self.model.state_dict()

    def with_best_weights(self) -> AbstractContextManager[None]:
        """In this block the model has these weights."""
        return nullcontext()

    @contextmanager
    def stoppable(self, save: Callable[[], None]) -> Iterator[None]:
        """A block that validates: a signal ends the run at once, and what was done in it will be done again."""
        try:
            with self.with_best_weights(), self.interruption.interruptible():
                yield
        except StopNow:
            save()
            raise self.interrupted() from None

    def learned(self) -> dict[str, float]:
        """Numbers that the loss has learned so far, by name."""
        return {}

    def validates(self, epoch: int) -> bool:
        """Whether the model is validated after an epoch (from 1)."""
        return epoch % self.settings.validate_every == 0 or epoch == self.epochs

    def interrupted(self) -> Interrupted:
        """What ends the run for the signal that came."""
        where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
        return Interrupted(f"stopped in {where}; --resume continues there", self.interruption.signal or 15)


class RetrievalSolver(Solver):
    """A run that matches images and captions."""

    task: RetrievalTask

    def __init__(self, task: RetrievalTask) -> None:
        super().__init__(task)
        self.pairs, self.val, self.listing = task.pairs, task.val, task.listing
        if task.settings.validate_images is not None:
            self.val = task.val.first(task.settings.validate_images)

    @property
    def n_pairs(self) -> int:
        return len(self.pairs)

    def validate(self) -> dict[str, float]:
        """Recalls on the validation split in both directions, or their means over its folds, and their sum."""
        images, captions = encode(self.model, self.val, self.device)
        folds = folds_of(images, captions, torch.from_numpy(self.val.pairs.image_of), self.settings.validate_fold)
        measured = averaged([metrics(ranks(self.model, *fold, self.settings.precision)) for fold in folds])
        recalls = {f"{direction}_r{k}": float(measured[direction][f"r{k}"]) for direction in ("i2t", "t2i") for k in RECALLS}
        return {**recalls, "rsum": float(measured["rsum"])}


def folds_of(
    images: Packed, captions: Packed, image_of: Int[Tensor, " n_captions"], size: int | None
) -> Iterator[tuple[Packed, Packed, Tensor]]:
    """Consecutive folds of ``size`` images with their captions, and the image of each caption among those of its fold.

    Images beyond the last whole fold are left out; of fewer images than one, or without a size, all are one fold.
    """
    if size is None or size >= len(images):
        yield images, captions, image_of
        return
    for start in range(0, len(images) - size + 1, size):
        columns = ((image_of >= start) & (image_of < start + size)).nonzero()[:, 0]
        rows = torch.arange(start, start + size)
        yield packed([images.of(rows)]), packed([captions.of(columns)]), image_of[columns] - start
