"""Try all parts of an experiment that are a user's own code before a training, or a single part for ``vse check``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from vse.features.feature_job import check_extractor
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import ExtractionArguments, ImageSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import is_code_name, load_code
from vse.pipeline.presets.parts import Registry, is_own_part
from vse.pipeline.presets.presets import apply_overrides, validate_settings
from vse.training.experiment import ExperimentConfig
from vse.training.losses import LOSSES
from vse.training.losses.base import Loss
from vse.training.models.encoders import IMAGE_ENCODERS
from vse.training.models.encoders.base import EncoderSettings
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities.base import SimilaritySettings
from vse.training.own_parts.trials import check_encoder, check_loss, check_similarity

_KINDS: dict[type[BaseModel], tuple[str, Registry[Any]]] = {
    SimilaritySettings: ("similarity", SIMILARITIES),
    EncoderSettings: ("encoder", IMAGE_ENCODERS),
    ImageSettings: ("extractor", EXTRACTORS),
}
_N_MORE_NEGATIVES = 3  # candidates that an adversary adds to the four pairs


def check_own_parts(experiment: ExperimentConfig) -> None:
    """Try the loss, the similarity and the encoders of an experiment that are a user's own. Takes less than a second.

    Raises UserError if a part fails, as :func:`check_loss`, :func:`check_similarity` and :func:`check_encoder` do.
    """
    model = experiment.model
    with torch.random.fork_rng(devices=[]):
        if is_own_part(experiment.loss):
            check_loss(experiment.loss, _N_MORE_NEGATIVES if experiment.adversary is not None else 0)
        if is_own_part(model.similarity):
            check_similarity(model.similarity)
        for encoder in (model.image_encoder, model.caption_encoder):
            if encoder is not None and is_own_part(encoder):
                check_encoder(encoder)


def check_part(name: str, sets: tuple[str, ...] = ()) -> str:
    """Try the user's own part ``name``, such as ``my_loss.py:MyLoss``, and return its kind, such as ``loss``.

    ``sets`` : settings of the part, as ``key=value``.

    Raises UserError if the code is not allowed to run, if the part fails, or if it is not a loss, similarity, encoder or
    extractor.
    """
    if not is_code_name(name):
        raise UserError(f"{name!r} names no code of your own; give a file and a name in it, such as my_loss.py:my_loss")
    part = load_code(name).class_or_function
    bases: tuple[type[BaseModel], ...] = (Loss, *_KINDS)
    if isinstance(part, type) and not issubclass(part, bases):
        listed = ", ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise UserError(f"{name}: the class derives from none of {listed}; a loss may also be a function")
    kind, registry = next(
        (found for base, found in _KINDS.items() if isinstance(part, type) and issubclass(part, base)), ("loss", LOSSES)
    )
    content = {registry.key: name, **({"name": "own"} if registry is EXTRACTORS else {})}
    schema = registry[name]
    settings = validate_settings(schema, kind, name, apply_overrides(schema, content, sets))
    if isinstance(settings, ImageSettings):
        check_extractor(settings, ExtractionArguments(Path("dataset.json"), Path("features.h5")))
    elif isinstance(settings, SimilaritySettings):
        check_similarity(settings)
    elif isinstance(settings, EncoderSettings):
        check_encoder(settings)
    elif isinstance(settings, Loss):
        check_loss(settings, _N_MORE_NEGATIVES)
    return kind
