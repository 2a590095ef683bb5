"""The registry of extractors: each is one file here, with its settings and its code, and one line in ``_PARTS``.

Nothing else names an extractor. The commands of ``vse-extract``, the workflow's rules and the presets' schema take all they
need from its settings (:class:`vse.features.extractors.settings.FeatureSettings`), which import no torch: where the code of an
extractor does, the settings import it when it runs.
"""

from __future__ import annotations

from importlib import import_module

from vse.features.extractors.settings import FeatureSettings
from vse.pipeline.parts import Registry

# Module of this folder and class of settings. A preset that names no extractor is of the first.
_PARTS = (
    "cnn:CnnConfig",
    "regions:RegionsConfig",
    "boxes:BoxesConfig",
    "tfidf:TfidfConfig",
    "mean_vector:MeanVectorConfig",
    "hglmm:HglmmConfig",
)


def _settings(part: str) -> type[FeatureSettings]:
    module, _, name = part.partition(":")
    settings: type[FeatureSettings] = getattr(import_module(f"{__name__}.{module}"), name)
    return settings


EXTRACTORS: Registry[FeatureSettings] = Registry("extractor", *map(_settings, _PARTS), key="extractor")
DEFAULT: str = next(iter(EXTRACTORS))
