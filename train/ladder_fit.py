"""Which combinations of a ladder fit together: what a model takes is what its features are."""

from __future__ import annotations

from vse.features.feature_presets import load_feature
from vse.pipeline.composed import Composed
from vse.pipeline.errors import UserError
from vse.pipeline.presets import load_ladder
from vse.train.experiment import ExperimentConfig, load_experiment
from vse.train.kinds import Kind, kind_of_rows
from vse.train.models.build import Input, check_fit


def fitting(ladder: str, dataset: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The composed experiments of a ladder, on ``dataset``, that can be trained, and for each other one why it cannot.

    An encoder reads words, single vectors or sets, and a similarity compares vectors or sets; some solvers read no words.
    Whatever contradicts that is left out. :class:`UserError` if something is wrong with the ladder or an experiment itself,
    if a feature is not of what it stands for, or if nothing is left.
    """
    fits, misfits = [], {}
    for made in load_ladder(ladder).combinations():
        why = misfit(made, load_experiment(made.name, dataset), dataset)
        if why is None:
            fits.append(made.name)
        else:
            misfits[made.name] = why
    if not fits:
        name, why = next(iter(misfits.items()))
        raise UserError(f"ladder {ladder!r}: no combination fits together, the first ({name}): {why}")
    return fits, misfits


def misfit(made: Composed, experiment: ExperimentConfig, dataset: str | None = None) -> str | None:
    """Why a composed experiment cannot read its features; None if it can."""
    image_input = Input(_kind_of(made.feature, "image", dataset), 1, f"the feature {made.feature!r}")
    if experiment.solver.reads_phrases:
        return f"the solver {experiment.solver.name!r} reads phrases, not captions"
    if made.caption_feature is None:
        encoder = experiment.model.caption_encoder
        tokens = encoder is not None and Kind.TOKENS in encoder.takes
        caption_input = Input(Kind.TOKENS if tokens else Kind.WORDS, 1, "the captions")
        if not experiment.solver.reads_words:
            return f"the solver {experiment.solver.name!r} reads captions as vectors, not as words"
    else:
        caption_input = Input(_kind_of(made.caption_feature, "text", dataset), 1, f"the feature {made.caption_feature!r}")
    try:
        check_fit(experiment.model, image_input, caption_input)
    except UserError as refusal:
        return str(refusal)
    return None


def _kind_of(feature: str, kind: str, dataset: str | None) -> Kind:
    """What the rows of a feature are read as; :class:`UserError` if it is none of images, or of captions."""
    settings = load_feature(feature, dataset)
    if settings.kind != kind or settings.text_rows != "captions":
        of = "phrases" if settings.text_rows == "phrases" else "images" if settings.kind == "image" else "captions"
        wanted = "images" if kind == "image" else "captions"
        raise UserError(f"the feature {feature!r} is of {of}, and a ladder sets it where one of {wanted} stands")
    return kind_of_rows(settings.row_kind)
