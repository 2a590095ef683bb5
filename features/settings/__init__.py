"""The registry of extractors, and the feature presets that use them.

Each line of the registry has the name of an extractor and the path of its settings class, a subclass of
:class:`vse.features.settings.base.FeatureSettings`. The commands of ``vse-extract``, the workflow and the schema of presets
read the settings class. This package does not import torch: the attribute ``extractor_class_path`` or ``encoder_class_path``
of the settings names the class that computes the feature, and this class is imported only when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from vse.features.settings.base import FeatureSettings, ImageSettings, ImportedSettings
from vse.pipeline.errors import UserError
from vse.pipeline.presets.own_code import is_code_name
from vse.pipeline.presets.parts import Registry
from vse.pipeline.presets.presets import (
    apply_overrides,
    list_preset_names,
    load_dataset_preset,
    merge_settings,
    read_preset_settings,
    validate_settings,
)

EXTRACTORS: Registry[FeatureSettings] = Registry(
    "extractor",
    key="extractor",
    base=ImageSettings,
    lazy={
        "cnn": "vse.features.settings.images:CnnConfig",
        "regions": "vse.features.settings.images:RegionsConfig",
        "boxes": "vse.features.settings.images:BoxesConfig",
        "tfidf": "vse.features.settings.captions:TfidfConfig",
        "mean_vector": "vse.features.settings.captions:MeanVectorConfig",
        "hglmm": "vse.features.settings.captions:HglmmConfig",
        "text": "vse.features.settings.captions:TextConfig",
    },
)
DEFAULT_EXTRACTOR: str = next(iter(EXTRACTORS))  # for a preset that names no extractor


def load_feature_preset(name: str, dataset: str | None = None, sets: Sequence[str] = ()) -> FeatureSettings:
    """Load a feature preset.

    Settings in the preset of the data set ``dataset`` replace settings of the feature preset. The strings ``key=value`` in
    ``sets`` replace both. ``name`` may also be the name of an extractor. If no preset has this name, the extractor's default
    settings are returned; a user's own extractor ``FILE.py:Colours`` then gives a feature named ``colours``. Raises UserError
    if the extractor is unknown or a setting is not valid.
    """
    has_preset = name not in EXTRACTORS or name in list_preset_names("features")
    feature = name.rpartition(":")[2].lower() if is_code_name(name) else name
    content = read_preset_settings("features", name) if has_preset else {"name": feature, "extractor": name}
    if dataset in list_preset_names("datasets"):
        content = merge_settings(content, load_dataset_preset(dataset).features.get(content["name"], {}))
    try:
        extractor = str(content.get("extractor", DEFAULT_EXTRACTOR))
        settings = ImportedSettings if extractor == "imported" else EXTRACTORS[extractor]
    except ValueError as error:
        raise UserError(f"feature {name!r}: {error}") from None
    return validate_settings(settings, "feature", name, apply_overrides(settings, content, sets))


def find_extractor_settings(name: object) -> type[FeatureSettings] | None:
    """Return the settings class of a registered extractor; None for any other name, such as the name of a user's own code."""
    return EXTRACTORS[name] if isinstance(name, str) and not is_code_name(name) and name in EXTRACTORS else None


def list_imported_features() -> list[str]:
    """Return the names of the feature presets whose features are imported instead of extracted."""
    names = list_preset_names("features")
    return [name for name in names if read_preset_settings("features", name).get("extractor") == "imported"]


def has_auto_precision(name: str, dataset: str) -> bool:
    """Return whether a feature's preset has ``precision: auto``, so that each machine chooses the precision itself."""
    try:
        return getattr(load_feature_preset(name, dataset), "precision", None) == "auto"
    except UserError:
        return False
