"""What all solvers share: their settings, progress in epochs, validation, and a state to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Int
from pydantic import Field, PositiveInt, SerializeAsAny, field_validator
from torch import Tensor

from vse.eval.defaults import RECALLS
from vse.eval.ranking.metrics import average, metrics
from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.errors import Interrupted
from vse.pipeline.presets.own_code import is_code
from vse.pipeline.presets.parts import part_of
from vse.pipeline.presets.schema import Settings
from vse.train.adversaries.base import AdversarySettings
from vse.train.data.captions import CaptionInputs
from vse.train.data.images import TrainingImages
from vse.train.data.pairs import Pairs, Split
from vse.train.data.samplers import SAMPLERS
from vse.train.data.samplers.base import Sampler
from vse.train.data.samplers.shuffled import Shuffled
from vse.train.kinds import Packed, packed
from vse.train.losses import LOSSES
from vse.train.losses.base import Loss
from vse.train.models.build import Model
from vse.train.run.processes import Interruption, Processes, StopNow
from vse.train.solvers.encode import encode, ranks
from vse.train.solvers.negatives import HardNegatives

Undecayed = Literal["words", "embeddings", "biases", "norms", "vectors"]


class WarmupConfig(Settings):
    """Another loss for the first epochs (the curriculum of the VSE++ paper, section 3.6); the paper's runs have none."""

    loss: str = Field("sum", description="the loss of the first epochs, one of the package")
    epochs: int = Field(0, ge=0)

    @field_validator("loss")
    @classmethod
    def _is_of_the_package(cls, name: str) -> str:
        if is_code(name):
            raise ValueError(f"takes a loss of the package ({', '.join(LOSSES)}); one of your own is the loss of all epochs")
        return name


class TrainConfig(Settings):
    """Optimisation (VSE++ paper, section 3.2)."""

    epochs: PositiveInt = 30
    batch_size: int = Field(128, ge=2)
    learning_rate: float = Field(2e-4, gt=0)
    decay_after: PositiveInt = Field(15, description="epochs between decays of the learning rate")
    decay_at: list[PositiveInt] = Field(
        default_factory=list, description="epochs at whose end it decays; none: after every decay_after epochs"
    )
    decay: float = Field(0.1, gt=0, le=1)
    schedule: Literal["step", "cosine"] = Field(
        "step",
        description="of learning rates: step, the decays above; cosine, from the full rate down to 0 along half a cosine over "
        "all updates of the training, after those of the warm-up (Loshchilov and Hutter, ICLR 2017)",
    )
    warmup_steps: int = Field(
        0, ge=0, description="so many first updates, in which learning rates rise from 0 in equal steps; with either schedule"
    )
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="learning rates of their own, which decay likewise, by the dotted name of a part of the model: "
        "image_encoder, caption_encoder, similarity, cnn, or a module in one, such as caption_encoder.words",
    )
    frozen: dict[str, Annotated[int, Field(ge=0)] | Literal["always"]] = Field(
        default_factory=dict,
        description="parts by the same names -> how many epochs pass before they are trained, or always; until then they are "
        "in evaluation mode",
    )
    optimizer: Literal["adam", "adamw"] = Field(
        "adam",
        description="adam adds weight decay to gradients; adamw takes the share learning rate x weight decay of a weight from "
        "it in each update (Loshchilov and Hutter, ICLR 2019)",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="of the weights that are not undecayed (1e-3 in the two-branch PyTorch port)"
    )
    undecayed: list[Undecayed] = Field(
        default=["words"],
        description="weights that do not decay: words, the embeddings of words and tokens; embeddings, all of them; biases; "
        "norms, the weights and biases of normalisations; vectors, all one-dimensional weights, biases and norms among them",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="validate, and keep as the best, a running mean of the weights, of which each update leaves this share, "
        "e.g. 0.999; none: the weights themselves",
    )
    accumulate: PositiveInt = Field(
        1, description="batches whose gradients make one update; negatives are those of each batch by itself"
    )
    clip: float | None = Field(2.0, gt=0, description="bound on the gradient's global norm; none: no bound")
    sampling: Annotated[SerializeAsAny[Sampler], part_of(SAMPLERS)] = Shuffled()
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32", description="of a training step: fp32, or autocast to bf16; auto: bf16 where the device has it, else fp32"
    )
    deterministic: bool = Field(
        False, description="on a GPU, take algorithms that give the same bits every time, which are slower; a CPU's always do"
    )
    compile: bool = Field(False, description="compile the loss, and a CNN that is trained (torch.compile)")
    restval: bool = Field(False, description="train on the split restval as well (rV of the paper: COCO's 113,287 images)")
    min_count: PositiveInt = Field(4, description="a word needs this many training occurrences to be in the vocabulary")
    validate_every: PositiveInt = Field(1, description="epochs between validations; the last epoch is always validated")
    validate_images: PositiveInt | None = Field(
        None,
        description="validate on the first so many images of the split, the same in every run (1000 in the code of VSE++); "
        "none: on all",
    )
    validate_fold: PositiveInt | None = Field(
        None,
        description="validate among so many images at a time, and take means over these folds (1000 in the TOD-Net paper); "
        "images beyond the last whole fold are left out; none: among all at once",
    )
    early_stop: PositiveInt | None = Field(None, description="stop after so many epochs without a better validation rsum")
    on_collapse: Literal["stop", "warn"] = Field(
        "stop", description="when the loss of a whole epoch is that of equal embeddings: stop, or say so and go on"
    )
    features_in_memory: bool = Field(True, description="keep the training features in memory (a GPU's, if there is one)")
    memory_gb: float = Field(2.0, ge=0, description="unless they are larger, on a CPU; then they are read from files")
    save_minutes: float = Field(10.0, gt=0, description="between checkpoints within an epoch")


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


class SolverSettings(Settings):
    """Settings of a solver, chosen by its ``name``.

    Attributes
    ----------
    uses_loss : whether it minimises the experiment's loss
    learns : whether it changes any weight
    reads_words : whether captions may be read as words
    reads_phrases : whether it matches regions and phrases, not images and captions
    """

    name: str
    uses_loss: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reads_words: ClassVar[bool] = True
    reads_phrases: ClassVar[bool] = False

    def check_inputs(self, images: FeatureCache, captions: FeatureCache | None) -> None:
        """:class:`vse.pipeline.errors.UserError` if caches of images and captions (none: words) are not what it can read."""

    def build(self, task: Task) -> Solver:
        """The solver of a task; :class:`vse.pipeline.errors.UserError` if it cannot solve it."""
        raise NotImplementedError


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
        measured = average([metrics(ranks(self.model, *fold, self.settings.precision)) for fold in folds])
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
