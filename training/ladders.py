"""Select the combinations of a ladder that can be trained. A ladder is a preset that combines features with experiments."""

from __future__ import annotations

from vse.features.settings import load_feature
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import load_ladder
from vse.pipeline.presets.schema import ComposedName
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.kinds import Kind, kind_of_rows
from vse.training.models.build import Input, check_fit


def trainable_combinations(ladder: str, dataset: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the names of the combinations of a ladder that can be trained, and for each of the others the reason why not.

    A ladder combines each of its image and caption features with each of its experiments. Some do not fit: an encoder reads
    words, single vectors or sets, a similarity compares vectors or sets, and some solvers cannot read words. Raises
    :class:`UserError` if the ladder or an experiment is invalid, if a feature is not of the required kind, or if no
    combination can be trained.
    """
    fits, misfits = [], {}
    for made in load_ladder(ladder).combinations():
        why = find_misfit(made, load_experiment(made.name, dataset), dataset)
        if why is None:
            fits.append(made.name)
        else:
            misfits[made.name] = why
    if not fits:
        name, why = next(iter(misfits.items()))
        raise UserError(f"ladder {ladder!r}: no combination can be trained; the reason for the first ({name}): {why}")
    return fits, misfits


def find_misfit(made: ComposedName, experiment: ExperimentConfig, dataset: str | None = None) -> str | None:
    """Return the reason why the experiment of a combination cannot read its features, or None if it can."""
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
    settings = load_feature(feature, dataset)
    if settings.kind != kind or settings.text_rows != "captions":
        of = "phrases" if settings.text_rows == "phrases" else "images" if settings.kind == "image" else "captions"
        wanted = "images" if kind == "image" else "captions"
        raise UserError(f"the ladder uses the feature {feature!r} for {wanted}, but it is a feature of {of}")
    return kind_of_rows(settings.row_kind)
