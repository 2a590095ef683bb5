"""Select the combinations of a ladder that can be trained. A ladder is a preset that combines features with experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vse.features.settings import load_feature
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import load_ladder
from vse.pipeline.presets.schema import ComposedName
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.kinds import InputKind, to_input_kind
from vse.training.models.build import InputSpec, check_compatibility


def trainable_combinations(ladder: str, dataset: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the names of a ladder's combinations that can be trained, and a dict of the reasons why the others cannot.

    A ladder combines each of its image and caption features with each of its experiments. An experiment may be unable to read
    a feature: encoders, similarities and solvers accept only some of words, vectors and sets. Raises :class:`UserError` if the
    ladder or an experiment is invalid, if the ladder lists a feature of captions as one of images or the reverse, or if no
    combination can be trained.
    """
    fits, misfits = [], {}
    for combination in load_ladder(ladder).combinations():
        reason = find_misfit_reason(combination, load_experiment(combination.name, dataset), dataset)
        if reason is None:
            fits.append(combination.name)
        else:
            misfits[combination.name] = reason
    if not fits:
        name, reason = next(iter(misfits.items()))
        raise UserError(f"ladder {ladder!r}: no combination can be trained; the reason for the first ({name}): {reason}")
    return fits, misfits


def correctable_combinations(names: Sequence[str], dataset: str | None = None) -> list[str]:
    """Return the names whose models compare vectors by inner products, as a correction of hubs needs."""
    return [name for name in names if load_experiment(name, dataset).model.similarity.ranking_similarity == "cosine"]


def find_misfit_reason(combination: ComposedName, experiment: ExperimentConfig, dataset: str | None = None) -> str | None:
    """Return the reason why the experiment of a combination cannot read its features, or None if it can."""
    image_input = InputSpec(_input_kind(combination.feature, "image", dataset), 1, f"the feature {combination.feature!r}")
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
        caption_input = InputSpec(_input_kind(caption_feature, "text", dataset), 1, f"the feature {caption_feature!r}")
    try:
        check_compatibility(experiment.model, image_input, caption_input)
    except UserError as refusal:
        return str(refusal)
    return None


def _input_kind(feature: str, medium: Literal["image", "text"], dataset: str | None) -> InputKind:
    """Return whether a feature has vectors or sets. Raises UserError if it is not a feature of ``medium``."""
    settings = load_feature(feature, dataset)
    if settings.kind != medium or settings.text_unit != "captions":
        found = "phrases" if settings.text_unit == "phrases" else "images" if settings.kind == "image" else "captions"
        required = "images" if medium == "image" else "captions"
        raise UserError(f"the ladder uses the feature {feature!r} for {required}, but it is a feature of {found}")
    return to_input_kind(settings.row_kind)
