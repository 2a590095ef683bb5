"""The registry of extractors: each is one line below.

Nothing else names an extractor. The commands of ``vse-extract``, the workflow's rules and the presets' schema read all they
need from its settings (:class:`vse.features.settings.base.FeatureSettings`). Nothing in this package imports torch, so that a
workflow which only reads presets starts quickly. The settings name the class that computes the feature. It is imported when it
runs.
"""

from __future__ import annotations

from vse.features.settings.base import FeatureSettings
from vse.pipeline.presets.parts import Registry

# A preset that names no extractor is of the first.
EXTRACTORS: Registry[FeatureSettings] = Registry(
    "extractor",
    key="extractor",
    lazy={
        "cnn": "vse.features.settings.images:CnnConfig",
        "regions": "vse.features.settings.images:RegionsConfig",
        "boxes": "vse.features.settings.images:BoxesConfig",
        "tfidf": "vse.features.settings.texts:TfidfConfig",
        "mean_vector": "vse.features.settings.texts:MeanVectorConfig",
        "hglmm": "vse.features.settings.texts:HglmmConfig",
        "text": "vse.features.settings.texts:TextConfig",
    },
)
DEFAULT: str = next(iter(EXTRACTORS))
