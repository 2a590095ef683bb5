"""What all solvers share: progress in epochs, validation, and a state to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vse.eval.ranking.metrics import RECALLS, metrics
from vse.pipeline.config import ExperimentConfig
from vse.pipeline.errors import Interrupted
from vse.train.data.pairs import Pairs, Split
from vse.train.models.build import TwoBranchModel
from vse.train.run.interruption import Interruption, StopNow
from vse.train.run.processes import Processes
from vse.train.solvers.encode import encode, ranks
from vse.train.solvers.negatives import HardNegatives


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


class Solver(ABC):
    """One run, epoch by epoch. The first of several ``processes`` validates and writes.

    Parameters
    ----------
    experiment : every setting
    pairs : what is trained on
    val : what is validated on
    model : whose weights are sought
    processes : that train together
    """

    epochs: int
    patience: int | None = None  # epochs without a better rsum after which it stops
    listing: HardNegatives | None = None

    def __init__(
        self, experiment: ExperimentConfig, pairs: Pairs, val: Split, model: TwoBranchModel, processes: Processes
    ) -> None:
        self.experiment = experiment
        self.pairs, self.val = pairs, val
        self.model = model
        self.processes, self.device = processes, processes.device
        self.interruption = Interruption()
        self.progress = Progress()

    @abstractmethod
    def run_epoch(self, save: Callable[[], None]) -> None:
        """Do the rest of an epoch and validate; adds its row to the progress.

        ``save`` is called now and then, and before :class:`Interrupted` is raised for a signal.
        """

    @abstractmethod
    def described(self, row: Mapping[str, float]) -> str:
        """The row of an epoch, for a person."""

    def state(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, in the middle of an epoch too."""
        return {**vars(self.progress), "model": self.model.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` gave."""
        self.model.load_state_dict(state["model"])
        self.progress = Progress(**{name: state[name] for name in vars(self.progress)})

    @contextmanager
    def stoppable(self, save: Callable[[], None]) -> Iterator[None]:
        """In this block a signal ends the run at once: what was done in it will be done again."""
        try:
            with self.interruption.interruptible():
                yield
        except StopNow:
            save()
            raise self.interrupted() from None

    def validate(self) -> dict[str, float]:
        """Recalls on the whole validation split, both directions, and their sum."""
        images, captions = encode(self.model, self.val, self.device)
        image_of_caption = torch.from_numpy(self.val.pairs.image_of)
        found = metrics(ranks(self.model, images, captions, image_of_caption, self.experiment.train.precision))
        recalls = {f"{direction}_r{k}": found[direction][f"r{k}"] for direction in ("i2t", "t2i") for k in RECALLS}
        return {**recalls, "rsum": found["rsum"]}

    def interrupted(self) -> Interrupted:
        """What ends the run for the signal that came."""
        where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
        return Interrupted(f"stopped in {where}; --resume continues there", self.interruption.signal or 15)
