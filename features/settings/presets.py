"""Feature presets, checked against the settings of the extractor that they name."""

from __future__ import annotations

from collections.abc import Sequence

from vse.features.settings import DEFAULT, EXTRACTORS
from vse.features.settings.base import FeatureSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.presets import (
    apply_overrides,
    known_presets,
    load_dataset,
    merge_settings,
    read_preset,
    validate_settings,
)


def load_feature(name: str, dataset: str | None = None, sets: Sequence[str] = ()) -> FeatureSettings:
    """The feature preset ``name`` as ``dataset`` changes it, with ``key=value`` settings on top."""
    content = read_preset("features", name)
    if dataset in known_presets("datasets"):
        content = merge_settings(content, load_dataset(dataset).features.get(content["name"], {}))
    try:
        settings = EXTRACTORS[str(content.get("extractor", DEFAULT))]
    except ValueError as error:
        raise UserError(f"feature {name!r}: {error}") from None
    return validate_settings(settings, "feature", name, apply_overrides(settings, content, sets))


def leaves_precision_open(name: str, dataset: str) -> bool:
    """Return whether the preset of a feature says ``precision: auto``, so that a cache of it may be in any precision."""
    try:
        return getattr(load_feature(name, dataset), "precision", None) == "auto"
    except UserError:
        return False
