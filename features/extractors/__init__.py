"""The registry of extractors: each is one file here, with its settings and its code, and one line below.

Nothing else names an extractor. The commands of ``vse-extract``, the workflow's rules and the presets' schema take all they
need from its settings (:class:`vse.features.extractors.settings.FeatureSettings`), which import no torch: where the code of an
extractor does, the settings import it when it runs.
"""

from __future__ import annotations

from vse.features.extractors.settings import FeatureSettings
from vse.pipeline.parts import Registry

# A preset that names no extractor is of the first.
EXTRACTORS: Registry[FeatureSettings] = Registry(
    "extractor",
    key="extractor",
    lazy={
        "cnn": "vse.features.extractors.cnn:CnnConfig",
        "regions": "vse.features.extractors.regions:RegionsConfig",
        "boxes": "vse.features.extractors.boxes:BoxesConfig",
        "tfidf": "vse.features.extractors.tfidf:TfidfConfig",
        "mean_vector": "vse.features.extractors.mean_vector:MeanVectorConfig",
        "hglmm": "vse.features.extractors.hglmm:HglmmConfig",
        "text": "vse.features.extractors.text:TextConfig",
    },
)
DEFAULT: str = next(iter(EXTRACTORS))
