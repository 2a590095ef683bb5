"""The settings of a training: images, optimisation, solvers and adversaries.

This module does not import the code of solvers and adversaries, so that a preset is checked quickly.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, SerializeAsAny, field_validator, model_validator

from vse.features.cache.feature_cache import FeatureCache
from vse.pipeline.presets.own_code import is_code_name
from vse.pipeline.presets.parts import import_object, part_field
from vse.pipeline.presets.schema import Settings
from vse.training.data.samplers import SAMPLERS, Sampler, ShuffledSampler
from vse.training.losses import LOSSES

WeightGroup = Literal["words", "embeddings", "biases", "norms", "vectors"]


class ImagesConfig(Settings):
    """The settings of the image inputs: cached features, or random crops of photos for the CNN of the cache."""

    source: Literal["cache", "pictures"] = Field(
        "cache",
        description="source of an image: cache, its cached vector (of a random crop, if the cache has several crops of each "
        "image); pictures, a new random crop of the photo each time",
    )
    finetune: bool = Field(False, description="train the CNN, too; needs source: pictures")
    random_crop: Literal["resized", "plain"] | None = Field(
        None,
        description="kind of random crops: resized or plain, as in the settings of vse-extract cnn; null: the kind that the "
        "cache records",
    )
    batch_norm: Literal["frozen", "train"] = Field(
        "frozen",
        description="statistics of the batch norms of a fine-tuned CNN: frozen, they stay; train, each batch updates them; "
        "the CNN's dropout is always off",
    )
    gradient_checkpointing: bool = Field(False, description="compute the CNN twice instead of storing its activations")
    workers: int = Field(2, ge=0, description="number of threads that decode photos in advance")

    @model_validator(mode="after")
    def _check_combinations(self) -> ImagesConfig:
        if self.finetune and self.source != "pictures":
            raise ValueError("finetune needs source: pictures")
        if self.batch_norm == "train" and self.gradient_checkpointing:
            raise ValueError(
                "batch_norm: train cannot be combined with gradient_checkpointing: it would count each batch twice"
            )
        return self


class LossWarmupConfig(Settings):
    """The settings of a warm-up, the first epochs with another loss (VSE++ paper, section 3.6)."""

    loss: str = Field("sum", description="loss of the warm-up: the name of one of the package's losses")
    epochs: int = Field(0, ge=0, description="number of first epochs with the loss of the warm-up; 0: no warm-up")

    @field_validator("loss")
    @classmethod
    def _check_package_loss(cls, name: str) -> str:
        if is_code_name(name):
            raise ValueError(
                f"must be a loss of the package ({', '.join(LOSSES)}); your own can only be the loss of all epochs"
            )
        return name


class TrainConfig(Settings):
    """The settings of the optimisation (VSE++ paper, section 3.2)."""

    epochs: PositiveInt = Field(30, description="number of epochs")
    batch_size: int = Field(128, ge=2, description="number of pairs in a batch")
    learning_rate: float = Field(2e-4, gt=0, description="learning rate before any decay")
    decay_after: PositiveInt = Field(15, description="number of epochs between decays of the learning rate")
    decay_at: list[PositiveInt] = Field(
        default_factory=list,
        description="epochs after which the learning rate decays; if empty: after every decay_after epochs",
    )
    decay: float = Field(0.1, gt=0, le=1, description="factor by which the learning rate decays")
    schedule: Literal["step", "cosine"] = Field(
        "step",
        description="schedule of the learning rates: step, decays by decay_after or decay_at; cosine, from the full rate "
        "down to 0 along half a cosine over all updates after the warm-up (Loshchilov and Hutter, ICLR 2017)",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="number of first updates in which the learning rates rise from 0 in equal steps, in both schedules",
    )
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="learning rates of single modules, by dotted name: image_encoder, caption_encoder, similarity, cnn, or a "
        "module inside one of them, such as caption_encoder.words; these rates follow the same schedule",
    )
    frozen: dict[str, Annotated[int, Field(ge=0)] | Literal["always"]] = Field(
        default_factory=dict,
        description="modules that are not trained at first, and are in evaluation mode then: name of the module (as in "
        "learning_rates), and number of first epochs, or always",
    )
    optimizer: Literal["adam", "adamw"] = Field(
        "adam",
        description="optimiser: adam adds weight decay to the gradients; adamw subtracts learning rate x weight decay x "
        "weight from each weight in each update (Loshchilov and Hutter, ICLR 2019)",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="rate of decay of all weights except the weights that undecayed names (1e-3 in the two-branch PyTorch "
        "port)",
    )
    undecayed: list[WeightGroup] = Field(
        default=["words"],
        description="weights that do not decay: words, the embeddings of words and tokens; embeddings, all embeddings; "
        "biases; norms, the weights and biases of normalisations; vectors, all one-dimensional weights, including biases and "
        "norms",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of an exponential moving average of the weights, e.g. 0.999; the average is validated and saved as "
        "the best weights; null: the weights themselves are validated and saved",
    )
    accumulate: PositiveInt = Field(
        1, description="number of batches whose gradients are summed for one update; negatives come from the same batch only"
    )
    chunk: PositiveInt | None = Field(
        None,
        description="number of pairs that are embedded at a time, for batches that need too much memory. The gradient stays "
        "that of the complete batch, with all its negatives, but each pair is embedded twice (Gao et al., 2021); null: the "
        "complete batch",
    )
    clip: float | None = Field(2.0, gt=0, description="bound on the gradient's global norm; null: no bound")
    sampling: Annotated[SerializeAsAny[Sampler], part_field(SAMPLERS)] = ShuffledSampler()
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32",
        description="precision of a training step: fp32, or bf16 by autocast; auto: bf16 if the device supports it, else fp32",
    )
    deterministic: bool = Field(
        False,
        description="on a GPU, use slower algorithms with bit-identical results in every run; on a CPU, results are always "
        "bit-identical",
    )
    compile: bool = Field(False, description="compile the loss, and the CNN if it is trained (torch.compile)")
    languages: list[str] = Field(
        default_factory=list,
        description="languages of the captions to train and validate on, such as [en, de]; null: all captions",
    )
    restval: bool = Field(False, description="train on the split restval as well (rV in the paper: COCO's 113,287 images)")
    min_count: PositiveInt = Field(
        4, description="least number of occurrences in training captions for a word of the vocabulary"
    )
    validate_every: PositiveInt = Field(
        1, description="number of epochs between validations; the last epoch is always validated"
    )
    validate_images: PositiveInt | None = Field(
        None,
        description="number of first images of the validation split to validate on (1000 in the code of VSE++); null: all",
    )
    validate_fold: PositiveInt | None = Field(
        None,
        description="number of images in a fold of the validation split (1000 in the TOD-Net paper); metrics are means over "
        "the folds, and images beyond the last complete fold are left out; null: no folds",
    )
    early_stop: PositiveInt | None = Field(
        None, description="stop after this number of epochs without a better validation rsum"
    )
    on_collapse: Literal["stop", "warn"] = Field(
        "stop",
        description="action if the model has collapsed, that is, if the mean loss of an epoch is the loss of equal "
        "embeddings: stop, or log a warning and continue",
    )
    features_in_memory: bool = Field(
        True, description="keep the training features in GPU memory or, on a CPU, in memory maps that all processes share"
    )
    memory_gb: float = Field(
        2.0,
        ge=0,
        description="largest size in GB of features that are kept in memory maps; larger features are read in each batch",
    )
    save_minutes: float = Field(
        10.0, gt=0, description="minutes between checkpoints within an epoch; the first is saved after a minute"
    )
    timeout_minutes: float = Field(
        10.0,
        gt=0,
        le=10_000,
        description="in a training with several processes: longest time in minutes that a process waits for the others",
    )


class AdversarySettings(Settings):
    """The settings of an adversary: a network that makes batches harder. ``name`` chooses the adversary."""

    name: str
    learning_rate: float = Field(2e-4, gt=0, description="learning rate of the adversary's own Adam")
    clip: float | None = Field(None, gt=0, description="bound on the global norm of the adversary's gradient; null: no bound")
    every: PositiveInt = Field(1, description="number of steps of the model for each step of the adversary")

    def build(self, opponent: Any) -> Any:
        """Return the adversary. Raises UserError if it does not fit the model, the loss or the features in ``opponent``.

        ``opponent`` : model for which the adversary makes batches harder, with the loss and the data of the model
            (:class:`vse.training.adversaries.base.Opponent`).
        """
        raise NotImplementedError


class SolverSettings(Settings):
    """The settings of a solver: the algorithm that trains a model. ``name`` chooses the solver.

    ``solver_class_path`` : name of the solver's class, ``module:Class``. The module is imported when the solver is built.
    ``uses_loss`` : whether the solver minimises the experiment's loss.
    ``learns`` : whether the solver changes any weight.
    ``accepts_words`` : whether the solver can train on captions as words, and not only as cached vectors.
    ``reads_phrases`` : whether the solver matches regions and phrases instead of images and captions.
    """

    solver_class_path: ClassVar[str]
    name: str
    uses_loss: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    accepts_words: ClassVar[bool] = True
    reads_phrases: ClassVar[bool] = False

    def check_inputs(self, images: FeatureCache, captions: FeatureCache | None) -> None:
        """Raise UserError if the solver cannot read these caches. ``captions`` is None for captions as words or tokens."""

    def build(self, task: Any) -> Any:
        """Return a solver for ``task``: the model, its data and further settings of a training.

        Raises UserError if the solver does not fit the task.
        """
        return import_object(self.solver_class_path)(task)


class GradientSettings(SolverSettings):
    """Gradient descent with Adam (VSE++ paper, section 3.2) or AdamW. All further settings are in :class:`TrainConfig`."""

    solver_class_path: ClassVar[str] = "vse.training.solvers.retrieval:RetrievalTrainer"

    name: Literal["gradient"] = "gradient"
