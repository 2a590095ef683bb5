"""The base classes of solvers: their input, their progress in epochs, validation, and the state for a resume.

``vse-train`` also lists the hardest negatives of each epoch for people to read (VSE++ paper, section 3.7, Fig. 3).
"""

from __future__ import annotations

import csv
import heapq
import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from vse.eval import DEFAULT_KS
from vse.eval.ranking.hubness import diagnose_hubs, mean_cosine, measure_hubs
from vse.eval.ranking.metrics import average_metrics, compute_metrics
from vse.eval.ranking.ranks import blocks_from_embeddings
from vse.eval.ranking.statistics import chance_recall
from vse.features.backbones.device import move_tensor
from vse.pipeline.dataset.dataset import Caption
from vse.pipeline.errors import Interrupted, escape_csv_cell
from vse.pipeline.files.writing import write_text
from vse.training.data.images import TrainingImages
from vse.training.data.pairs import CaptionInputs, Pairs, RetrievalSplit
from vse.training.kinds import PackedEmbeddings, pack_embeddings
from vse.training.losses import LOSSES
from vse.training.losses.base import Loss, QueryScores, hinge_costs
from vse.training.models.build import Model
from vse.training.processes.group import ProcessGroup
from vse.training.processes.interruption import Interruption, StopNow
from vse.training.settings import AdversarySettings, LossWarmupConfig, TrainConfig
from vse.training.solvers.encode import compute_ranks, encode_split

log = logging.getLogger(__name__)

NegativeRow = list[Any]  # values of NEGATIVE_COLUMNS; numbers and texts only, because checkpoints store the rows

NEGATIVE_COLUMNS = (
    "epoch",
    "query",
    "cost",
    "imgid",
    "sentid",
    "negative_imgid",
    "negative_sentid",
    "caption",
    "negative_caption",
)


class HardNegatives:
    """A table of the hardest negatives of each epoch, for images as queries and for captions as queries.

    ``imgid`` is the id of an image, ``sentid`` the id of a caption. If the query is the image ``imgid``, its negative is the
    caption ``negative_sentid``. If the query is the caption ``sentid``, its negative is the image ``negative_imgid``, and
    ``negative_sentid`` is a caption of this image.

    ``n_per_epoch`` : number of rows for each epoch and kind of query; fewer if fewer negatives have a cost.
    ``captions`` : captions of all training pairs, in the order of the pairs.
    """

    def __init__(self, n_per_epoch: int, captions: Sequence[Caption]) -> None:
        self.n_per_epoch = n_per_epoch
        self._captions = captions
        self.finished_rows: list[NegativeRow] = []
        self.epoch_rows: list[NegativeRow] = []

    def add_batch(
        self, epoch: int, pairs: Sequence[int], query_scores: tuple[QueryScores, QueryScores], margin: float
    ) -> None:
        """Add the hardest negatives of a batch, and keep only the ``n_per_epoch`` hardest negatives of the epoch.

        ``epoch`` : number of the epoch, from 1.
        ``pairs`` : index of each pair of the batch among all training pairs.
        ``query_scores`` : scores with images and with captions as queries. An adversary may have
            added columns for its own candidates behind those of the pairs; they are ignored.
        ``margin`` : margin of the hinge costs.
        """
        for query, (scores, positives, negatives) in zip(("image", "caption"), query_scores, strict=True):
            hardest = hinge_costs(scores.detach(), positives, negatives, margin)[:, : len(pairs)].max(1)
            best = torch.topk(hardest.values, min(self.n_per_epoch, len(pairs)))
            rows = best.indices.cpu()
            columns = hardest.indices.cpu()[rows]
            for cost, row, column in zip(best.values.tolist(), rows.tolist(), columns.tolist(), strict=True):
                if cost > 0:
                    positive, negative = self._captions[pairs[row]], self._captions[pairs[column]]
                    ids = [positive.imgid, positive.sentid, negative.imgid, negative.sentid]
                    self.epoch_rows.append([epoch, query, cost, *ids, positive.raw, negative.raw])
        self.epoch_rows = [
            entry
            for query in ("image", "caption")
            for entry in heapq.nlargest(
                self.n_per_epoch, (row for row in self.epoch_rows if row[1] == query), key=lambda row: row[2]
            )
        ]

    def end_epoch(self) -> None:
        self.finished_rows += self.epoch_rows
        self.epoch_rows = []

    def write_csv(self, path: Path) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(NEGATIVE_COLUMNS)
        table.writerows([*entry[:2], f"{entry[2]:.4g}", *map(escape_csv_cell, entry[3:])] for entry in self.finished_rows)
        write_text(path, text.getvalue())


_MAX_MEASURED_PAIRS = 1000  # number of validation pairs on which a similarity computes its own metrics
_NEAR_CHANCE = 3.0  # R@10 counts as near chance up to this multiple of the R@10 of a random order
_MIN_DIAGNOSED_IMAGES = 100  # among fewer validation images, one candidate may rank first for many queries by chance


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """The input of every solver. ``seed`` determines the order of the training pairs, dropout and all sampling."""

    settings: TrainConfig
    loss: Loss
    loss_warmup: LossWarmupConfig
    model: Model
    seed: int
    processes: ProcessGroup

    def select_loss(self, epoch: int) -> Loss:
        """Return the loss of an epoch (0-based): the warm-up loss in the first epochs, then the experiment's loss.

        The warm-up loss takes the settings that every loss has, such as the margin, from the experiment's loss.
        """
        if epoch >= self.loss_warmup.epochs:
            return self.loss
        common = self.loss.model_dump(include=set(Loss.model_fields))
        warmup = LOSSES[self.loss_warmup.loss]
        if self.loss.same_image == "positive" and not warmup.allows_several_positives:
            common["same_image"] = "mask"
        return warmup.model_validate({**common, "name": self.loss_warmup.loss})


@dataclass(frozen=True, kw_only=True)
class RetrievalTask(TrainingTask):
    """The input of a solver that matches images and captions.

    ``hard_negatives`` collects the hardest negatives of each epoch for ``negatives.csv``; None: they are not collected.
    """

    pairs: Pairs
    image_inputs: TrainingImages
    caption_inputs: CaptionInputs
    val_split: RetrievalSplit
    hard_negatives: HardNegatives | None = None
    adversary: AdversarySettings | None = None


@dataclass
class Progress:
    """The progress of a training, without the weights and the optimiser.

    ``epoch`` : number of finished epochs.
    ``rows`` : rows of ``metrics.csv`` of the finished epochs.
    ``step``, ``pairs`` : number of finished batches, and of pairs in them, in the current epoch.
    ``seconds`` : duration of the current epoch so far.
    """

    epoch: int = 0
    rows: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    pairs: int = 0
    seconds: float = 0.0

    @property
    def best_row(self) -> dict[str, float]:
        """The row with the highest validation ``rsum`` (sum of recalls), or the earliest of several such rows."""
        return max((row for row in self.rows if "rsum" in row), key=lambda row: row["rsum"])

    def is_finished(self, epochs: int, patience: int | None) -> bool:
        """Return whether all epochs are finished, or the best epoch is at least ``patience`` epochs ago (None: no limit)."""
        validated = any("rsum" in row for row in self.rows)
        stale = patience is not None and validated and self.epoch - self.best_row["epoch"] >= patience
        return self.epoch >= epochs or stale


class Solver(ABC):
    """The base class of solvers, which train one run epoch by epoch.

    If several processes train, only the first one validates and writes files.
    """

    task: TrainingTask
    epochs: int
    patience: int | None = None  # number of epochs without a better rsum before an early stop
    hard_negatives: HardNegatives | None = None

    def __init__(self, task: TrainingTask) -> None:
        self.task, self.settings, self.model = task, task.settings, task.model
        self.processes, self.device = task.processes, task.processes.device
        self.interruption = Interruption()
        self.progress = Progress()

    @property
    @abstractmethod
    def n_pairs(self) -> int:
        """The number of training pairs."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return the recalls on the validation split, and their sum ``rsum``. The best epoch has the highest ``rsum``."""

    @abstractmethod
    def run_epoch(self, save: Callable[[], None]) -> None:
        """Train the rest of an epoch, validate, and add a row to ``progress``. ``save`` is called to write a checkpoint."""

    @abstractmethod
    def describe_epoch(self, row: Mapping[str, float]) -> str:
        """Return a summary of the epoch's row for the log; an empty text if there is nothing to say."""

    def state(self) -> dict[str, Any]:
        """Return the state for a resume, also in the middle of an epoch. The resume gives bit by bit the same results."""
        return {**vars(self.progress), "model": self.model.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        self.model.load_state_dict(state["model"])
        self.progress = Progress(**{name: state[name] for name in vars(self.progress)})

    def validation_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that are validated and saved, such as a moving average of the model's weights."""
        return self.model.state_dict()

    def use_validation_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are validated, such as averaged weights."""
        return nullcontext()

    @contextmanager
    def validation_context(self, save: Callable[[], None]) -> Iterator[None]:
        """Give the model its validation weights in the caller's ``with`` block. A signal such as Ctrl-C ends it at once.

        After a signal, ``save`` writes a checkpoint, and Interrupted is raised. A resume repeats the validation.
        """
        try:
            with self.use_validation_weights(), self.interruption.raise_on_signal():
                yield
        except StopNow:
            save()
            self.processes.wait_until_others_stop()
            raise self.stop_error() from None

    def learned_loss_parameters(self) -> dict[str, float]:
        """Return the learned parameters of the loss by name, such as the temperature."""
        return {}

    def validates_after(self, epoch: int) -> bool:
        """Return whether the model is validated after an epoch (1-based)."""
        return epoch % self.settings.validate_every == 0 or epoch == self.epochs

    def stop_error(self) -> Interrupted:
        """Return the exception that ends the run after a signal."""
        where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
        return Interrupted(f"stopped in {where}; --resume continues from there", self.interruption.signal or 15)


class RetrievalSolver(Solver):
    """A solver that matches images and captions."""

    task: RetrievalTask

    def __init__(self, task: RetrievalTask) -> None:
        super().__init__(task)
        self.pairs, self.val_split, self.hard_negatives = task.pairs, task.val_split, task.hard_negatives
        self._has_warned = False
        if task.settings.validate_images is not None:
            self.val_split = task.val_split.select_first_images(task.settings.validate_images)

    @property
    def n_pairs(self) -> int:
        return len(self.pairs)

    def validate(self) -> dict[str, float]:
        images, captions = encode_split(self.model, self.val_split, self.device)
        folds = split_into_folds(
            images, captions, torch.from_numpy(self.val_split.pairs.image_indices), self.settings.validate_fold
        )
        measured = average_metrics(
            [compute_metrics(compute_ranks(self.model, *fold, self.settings.precision)) for fold in folds]
        )
        recalls = {
            f"{direction}_r{k}": float(measured[direction][f"r{k}"]) for direction in ("i2t", "t2i") for k in DEFAULT_KS
        }
        self._warn_if_one_direction_failed(images, captions, {name: recalls[f"{name}_r10"] for name in ("i2t", "t2i")})
        return {**recalls, "rsum": float(measured["rsum"]), **self._measure_pairs(images, captions)}

    def _measure_pairs(self, images: PackedEmbeddings, captions: PackedEmbeddings) -> dict[str, float]:
        """Return the similarity's own metrics, measured on the first 1000 validation pairs. Most similarities have none."""
        if not self.model.config.similarity.measures_pairs:
            return {}
        rows = torch.arange(min(len(captions), _MAX_MEASURED_PAIRS))
        sides = images.unpack(torch.from_numpy(self.val_split.pairs.image_indices)[rows]), captions.unpack(rows)
        with torch.no_grad():
            return self.model.similarity.measure_pairs(
                *(tuple(move_tensor(part, self.device) for part in side) for side in sides)
            )

    def _warn_if_one_direction_failed(
        self, images: PackedEmbeddings, captions: PackedEmbeddings, recalls: Mapping[str, float]
    ) -> None:
        """Log a warning with the likely cause, once in a run, if the retrieval of only one direction fails.

        A direction fails if R@10 is at most 1.5 times chance or, if one candidate ranks first for most queries, at most 3
        times chance. Models that score every pair, and splits of fewer than 100 images, are not checked.
        """
        n_images, n_captions = len(images), len(captions)
        chance = {name: chance_recall(name, 10, n_images, n_captions) for name in recalls}
        near_chance = [name for name in recalls if recalls[name] <= _NEAR_CHANCE * chance[name]]
        similarity = self.model.config.similarity.ranking_similarity
        if self._has_warned or len(near_chance) != 1 or similarity is None or n_images < _MIN_DIAGNOSED_IMAGES:
            return
        image_of_caption = torch.from_numpy(self.val_split.pairs.image_indices)
        hubs = measure_hubs(blocks_from_embeddings(images.vectors, captions.vectors, image_of_caption, similarity), None)
        cosines = {name: mean_cosine(side.vectors.numpy()) for name, side in (("images", images), ("captions", captions))}
        for sentence in diagnose_hubs({name: hubs[name] for name in near_chance}, cosines, recalls, chance):
            log.warning("epoch %d: %s", self.progress.epoch + 1, sentence)
            self._has_warned = True


def split_into_folds(
    images: PackedEmbeddings, captions: PackedEmbeddings, image_indices: Int[Tensor, " n_captions"], size: int | None
) -> Iterator[tuple[PackedEmbeddings, PackedEmbeddings, Tensor]]:
    """Yield the images and captions in folds of ``size`` images, without an incomplete last fold.

    A fold has images, all captions of these images, and for each caption the position of its image in the fold.
    If ``size`` is None or at least the number of images, the only fold has all images.
    """
    if size is None or size >= len(images):
        yield images, captions, image_indices
        return
    for start in range(0, len(images) - size + 1, size):
        columns = ((image_indices >= start) & (image_indices < start + size)).nonzero()[:, 0]
        rows = torch.arange(start, start + size)
        yield (
            pack_embeddings([images.unpack(rows)]),
            pack_embeddings([captions.unpack(columns)]),
            image_indices[columns] - start,
        )
