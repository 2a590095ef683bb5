"""Settings of a training that presets need before any of its code runs: images, optimisation, solvers and adversaries.

A solver or an adversary is one file with a subclass of its settings and its code, and one line in the registry of its kind.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, SerializeAsAny, field_validator, model_validator

from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.presets.own_code import is_code_name
from vse.pipeline.presets.parts import import_object, part_field
from vse.pipeline.presets.schema import Settings
from vse.train.data.samplers import SAMPLERS
from vse.train.data.samplers.base import Sampler
from vse.train.data.samplers.shuffled import Shuffled
from vse.train.losses import LOSSES

Undecayed = Literal["words", "embeddings", "biases", "norms", "vectors"]


class ImagesConfig(Settings):
    """What a training step sees of an image: its cached features, or a random crop through the CNN that made the cache."""

    source: Literal["cache", "pictures"] = Field(
        "cache", description="cache: the cached vector, or a random one of a crop bank; pictures: a new random crop each time"
    )
    finetune: bool = Field(False, description="train the CNN too (source: pictures)")
    random_crop: Literal["resized", "plain"] | None = Field(
        None, description="kind of random crops, as in a feature's settings; none: as the cache's own settings say"
    )
    batch_norm: Literal["frozen", "train"] = Field(
        "frozen", description="whether a fine-tuned CNN keeps its batch norms' statistics; its dropout is always off"
    )
    gradient_checkpointing: bool = Field(False, description="compute the CNN twice instead of keeping its activations")
    workers: int = Field(2, ge=0, description="threads that decode photos ahead")

    @model_validator(mode="after")
    def _fits(self) -> ImagesConfig:
        if self.finetune and self.source != "pictures":
            raise ValueError("finetune needs source: pictures")
        if self.batch_norm == "train" and self.gradient_checkpointing:
            raise ValueError("batch_norm: train does not go with gradient_checkpointing, which would count each batch twice")
        return self


class WarmupConfig(Settings):
    """Another loss for the first epochs (the curriculum of the VSE++ paper, section 3.6); the paper's runs have none."""

    loss: str = Field("sum", description="the loss of the first epochs, one of the package")
    epochs: int = Field(0, ge=0)

    @field_validator("loss")
    @classmethod
    def _is_of_the_package(cls, name: str) -> str:
        if is_code_name(name):
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
    sampling: Annotated[SerializeAsAny[Sampler], part_field(SAMPLERS)] = Shuffled()
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


class AdversarySettings(Settings):
    """Settings of an adversary, chosen by its ``name``."""

    name: str
    learning_rate: float = Field(2e-4, gt=0, description="of the adversary's own Adam")
    clip: float | None = Field(None, gt=0, description="bound on the global norm of the adversary's gradient; none: no bound")
    every: PositiveInt = Field(1, description="steps of the model for one of the adversary")

    def build(self, opponent: Any) -> Any:
        """The adversary of a model, with its first weights drawn from torch's default generator.

        :class:`vse.pipeline.errors.UserError` if it does not go with the model, the loss or the features.
        """
        raise NotImplementedError


class SolverSettings(Settings):
    """Settings of a solver, chosen by its ``name``.

    Attributes
    ----------
    uses_loss : whether it minimises the experiment's loss
    learns : whether it changes any weight
    reads_words : whether captions may be read as words
    reads_phrases : whether it matches regions and phrases, not images and captions
    """

    code: ClassVar[str]
    """The class of the solver, ``module:Class``. It is imported when it runs."""

    name: str
    uses_loss: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reads_words: ClassVar[bool] = True
    reads_phrases: ClassVar[bool] = False

    def check_inputs(self, images: FeatureCache, captions: FeatureCache | None) -> None:
        """:class:`vse.pipeline.errors.UserError` if caches of images and captions (none: words) are not what it can read."""

    def build(self, task: Any) -> Any:
        """Return the solver of a task. Raises UserError if it cannot solve the task.

        The class that :attr:`code` names is imported here. A solver with its settings and its code in one file overrides this
        method instead.
        """
        return import_object(self.code)(task)


class GradientSettings(SolverSettings):
    """Gradient descent by Adam (VSE++ paper, section 3.2) or AdamW; its settings are the group ``train``."""

    code: ClassVar[str] = "vse.train.solvers.adam:Trainer"

    name: Literal["gradient"] = "gradient"
