"""The settings of an experiment, and checks of ladders: presets that combine several experiments with several features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, model_validator

from vse.features.settings import load_feature_preset
from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import CodeNotAllowed, allow_named_code
from vse.pipeline.presets.parts import part_field
from vse.pipeline.presets.preset_files import parse_yaml
from vse.pipeline.presets.presets import (
    is_experiment,
    list_setting_changes,
    load_experiment_outline,
    load_ladder,
    read_experiment_settings,
    validate_settings,
)
from vse.pipeline.presets.schema import ComposedName, ExperimentOutline
from vse.training.adversaries import ADVERSARIES
from vse.training.kinds import InputKind, to_input_kind
from vse.training.losses import LOSSES
from vse.training.losses.base import Loss, LossContext
from vse.training.losses.hinges import MaxOfHinges
from vse.training.models.build import MODEL_PARTS, InputSpec, ModelConfig, check_compatibility
from vse.training.settings import (
    AdversarySettings,
    GradientSettings,
    ImagesConfig,
    LossWarmupConfig,
    SolverSettings,
    TrainConfig,
)
from vse.training.solvers import SOLVERS

_BRANCH_KEYS_FORMAT = "model.image_encoder.{0} and model.caption_encoder.{0}"


class ExperimentConfig(ExperimentOutline):
    """The settings of an experiment: features, model, loss, optimisation and solver."""

    model_config = ConfigDict(extra="forbid")
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "model.recurrent": "model.caption_encoder.name",
        "model.branches": "model.image_encoder and model.caption_encoder, each { name: branch }",
        "model.branches.layers": _BRANCH_KEYS_FORMAT.format("name"),
        "model.branches.image_widths": "model.image_encoder.widths",
        "model.branches.caption_widths": "model.caption_encoder.widths",
        **{
            f"model.branches.{name}": _BRANCH_KEYS_FORMAT.format(name)
            for name in ("batch_norm", "batch_norm_momentum", "dropout")
        },
        "model.order_form": "model.similarity.form",
        "model.distance_floor": "model.similarity.floor",
        "model.network_widths": "model.similarity.widths",
        "cca": "solver: { name: cca, ... }",
        "cca.regularization": "solver.regularization",
        "cca.power": "solver.power",
    }

    start_parts: list[str] = Field(
        default_factory=list,
        description=f"modules of the model whose weights are loaded from start_from: {', '.join(MODEL_PARTS)}; null: all",
    )
    freeze: bool = Field(False, description="freeze the modules that are loaded from start_from")
    solver: Annotated[SerializeAsAny[SolverSettings], part_field(SOLVERS)] = GradientSettings()
    images: ImagesConfig = ImagesConfig()
    model: ModelConfig = ModelConfig()
    loss: Annotated[SerializeAsAny[Loss], part_field(LOSSES)] = MaxOfHinges()
    warmup: LossWarmupConfig = LossWarmupConfig()
    train: TrainConfig = TrainConfig()
    adversary: Annotated[SerializeAsAny[AdversarySettings] | None, part_field(ADVERSARIES)] = Field(
        None, description="network that is trained against the model to make each batch harder; null: no adversary"
    )

    def with_precision(self, precision: str) -> ExperimentConfig:
        return self.model_copy(update={"train": self.train.model_copy(update={"precision": precision})})

    @model_validator(mode="after")
    def _check_combinations(self) -> ExperimentConfig:
        warmup_loss = LOSSES[self.warmup.loss]
        if self.loss.lambda3 or self.loss.lambda4:
            for ranks, name in (
                (self.loss.is_ranking, self.loss.name),
                (warmup_loss.is_ranking or not self.warmup.epochs, self.warmup.loss),
            ):
                if not ranks:
                    raise ValueError(f"loss.lambda3 and lambda4 require a ranking loss, not {name}")
            if not self.model.similarity.compares_within_modality or not self.model.normalize_image:
                raise ValueError(
                    "loss.lambda3 and lambda4 compare unit vectors of one side; the similarity "
                    f"{self.model.similarity.name} cannot do that, or normalize_image is false"
                )
        self.loss.check_context(
            LossContext(
                self.model.similarity,
                is_compiled=self.train.compile,
                has_adversary=self.adversary is not None,
                reads_phrases=self.solver.reads_phrases,
                warmup_loss=self.warmup.loss if self.warmup.epochs else None,
            )
        )
        if self.loss.nested:
            self._check_nested_dimensions(self.loss.nested)
        unknown = [part for part in self.start_parts if part not in MODEL_PARTS]
        if unknown:
            raise ValueError(f"start_parts: {unknown[0]!r} is not one of {', '.join(MODEL_PARTS)}")
        if (self.start_parts or self.freeze) and self.start_from is None:
            raise ValueError("start_parts and freeze require start_from")
        if not self.solver.uses_loss and (self.images.source != "cache" or self.start_from is not None):
            raise ValueError(f"solver: {self.solver.name} reads cached features only and cannot start from a run")
        if not self.solver.uses_loss and self.adversary is not None:
            raise ValueError(f"solver: {self.solver.name} takes no gradient steps, so it cannot have an adversary")
        if self.adversary is not None and self.train.accumulate > 1:
            raise ValueError("an adversary takes a step for each batch, so it requires train.accumulate: 1")
        if self.solver.reads_phrases and (self.images.source != "cache" or self.adversary is not None):
            raise ValueError(f"solver: {self.solver.name} reads cached regions only and cannot have an adversary")
        if self.truth_feature is not None and not self.solver.reads_phrases:
            raise ValueError(f"truth_feature is for training on phrases; the solver {self.solver.name} does not read it")
        if not self.solver.learns and self.loss != MaxOfHinges():
            raise ValueError(f"solver: {self.solver.name} trains nothing; remove the loss {self.loss.name}")
        return self

    def _check_nested_dimensions(self, dims: Sequence[int]) -> None:
        """Raise ValueError if this experiment cannot train nested embeddings.

        For each n in ``dims``, the first n numbers of a nested embedding are trained as an embedding, too.
        """
        if self.solver.reads_phrases or self.adversary is not None:
            raise ValueError("loss.nested is for training on captions without an adversary")
        if self.model.similarity.ranking_similarity != "cosine" or not self.model.normalize_image:
            raise ValueError(f"loss.nested compares unit vectors by the cosine, not by {self.model.similarity.name}")
        if max(dims) >= self.model.dim or len(set(dims)) < len(dims):
            raise ValueError(f"loss.nested: {list(dims)}: give different numbers below model.dim, {self.model.dim}")


def load_experiment(name: str, dataset: str | None = None, sets: Sequence[str] = ()) -> ExperimentConfig:
    """Load the experiment preset ``name``, and apply changes to its settings.

    ``dataset`` : data set whose preset may change settings of the experiment; None for no such changes.
    ``sets`` : further changes, as ``key=value``.

    A user's own code runs only if ``sets`` names that code, or if all code is allowed (:mod:`vse.pipeline.presets.own_code`).
    Raises :class:`UserError` if the preset is an ensemble: only the members of an ensemble can be trained.
    """
    with allow_named_code(list(_parse_set_values(sets))):
        content = read_experiment_settings(name, dataset, sets, ExperimentConfig)
        if "ensemble_of" in content:
            members = " and ".join(load_experiment_outline(name, dataset).ensemble_of)
            raise UserError(
                f"{name} is an ensemble: train {members}, then average their embeddings with "
                f"vse-eval --ensemble --experiment {name}"
            )
        return validate_settings(ExperimentConfig, "experiment", name, content)


def _parse_set_values(sets: Sequence[str]) -> Iterator[object]:
    """Yield the value of each ``key=value`` in ``sets``. Values that are not YAML are skipped."""
    for item in sets:
        with suppress(Exception):
            yield parse_yaml(item.partition("=")[2])


def list_changed_settings(experiment: ExperimentConfig, dataset: str) -> list[str]:
    """Return a line such as ``loss.margin: 0.2 -> 0.1`` for each setting in which the experiment differs from its preset.

    The preset includes the changes for the data set ``dataset``. The list is empty if the name of the experiment is not that
    of a preset, or if the preset names user code that may not run.
    """
    if not is_experiment(experiment.name):
        return []
    try:
        preset = load_experiment(experiment.name, dataset)
    except CodeNotAllowed:  # the preset names code that has changed or is not allowed
        return []
    read = InputKind.WORDS if experiment.caption_feature is None else InputKind.VECTORS
    preset = preset.model_copy(update={"model": preset.model.with_default_caption_encoder(read)})
    if preset.train.precision == "auto":
        preset = preset.with_precision(experiment.train.precision)
    return list_setting_changes(preset.settings_affecting_weights(), experiment.settings_affecting_weights())


def find_trainable_combinations(ladder: str, dataset: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the names of a ladder's trainable combinations, and by name the reason against each other combination.

    A ladder is a preset that combines features with experiments. A reason is, for example, that a similarity or solver accepts
    only words, only single vectors or only sets. ``dataset`` is the data set whose preset may change settings; None for no
    such changes. Raises :class:`UserError` if the ladder or an experiment is invalid, if the ladder lists a feature of
    captions as a feature of images or the reverse, or if no combination can be trained.
    """
    fits, misfits = [], {}
    for combination in load_ladder(ladder).list_composed_names():
        reason = find_misfit_reason(combination, load_experiment(combination.name, dataset), dataset)
        if reason is None:
            fits.append(combination.name)
        else:
            misfits[combination.name] = reason
    if not fits:
        name, reason = next(iter(misfits.items()))
        raise UserError(f"ladder {ladder!r}: no combination can be trained; the reason for the first ({name}): {reason}")
    return fits, misfits


def select_correctable_experiments(names: Sequence[str], dataset: str | None = None) -> list[str]:
    """Return the names of the experiments whose scores are inner products of vectors.

    Only these scores can be corrected for hubs, the candidates that rank high for many queries. ``dataset`` is the data set
    whose preset may change settings; None for no such changes.
    """
    return [name for name in names if load_experiment(name, dataset).model.similarity.ranking_similarity == "cosine"]


def find_misfit_reason(combination: ComposedName, experiment: ExperimentConfig, dataset: str | None = None) -> str | None:
    """Return the reason why an experiment cannot read the features of a combination, or None if it can read them.

    ``combination`` : image feature and caption feature (None for captions as words) that a ladder gives to the experiment.
    ``dataset`` : data set whose preset may change settings of the features; None for no such changes.
    """
    image_input = InputSpec(_find_input_kind(combination.feature, "image", dataset), 1, f"the feature {combination.feature!r}")
    if experiment.solver.reads_phrases:
        return f"the solver {experiment.solver.name!r} reads phrases, not captions"
    caption_feature = combination.caption_feature
    if caption_feature is None:
        encoder = experiment.model.caption_encoder
        tokens = encoder is not None and InputKind.TOKENS in encoder.input_kinds
        caption_input = InputSpec(InputKind.TOKENS if tokens else InputKind.WORDS, 1, "the captions")
        if not experiment.solver.accepts_words:
            return f"the solver {experiment.solver.name!r} reads captions as vectors, not as words"
    else:
        caption_input = InputSpec(_find_input_kind(caption_feature, "text", dataset), 1, f"the feature {caption_feature!r}")
    try:
        check_compatibility(experiment.model, image_input, caption_input)
    except UserError as refusal:
        return str(refusal)
    return None


def _find_input_kind(feature: str, medium: Literal["image", "text"], dataset: str | None) -> InputKind:
    """Return whether a feature has single vectors or sets. Raises UserError if it is not a feature of ``medium``.

    ``dataset`` is the data set whose preset may change settings of the feature; None for no such changes.
    """
    settings = load_feature_preset(feature, dataset)
    if settings.kind != medium or settings.text_unit != "captions":
        found = "phrases" if settings.text_unit == "phrases" else "images" if settings.kind == "image" else "captions"
        required = "images" if medium == "image" else "captions"
        raise UserError(f"the ladder uses the feature {feature!r} for {required}, but it is a feature of {found}")
    return to_input_kind(settings.row_kind)
