"""Similarities of images and captions. A new similarity is one file here and one line below.

A similarity is a class of settings, derived from :class:`vse.training.models.similarities.base.SimilaritySettings`. The
method ``build`` returns a network that scores the embeddings of all images with the embeddings of all captions.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.models.similarities.base import SimilaritySettings

SIMILARITIES: Registry[SimilaritySettings] = Registry(
    "similarity",
    base=SimilaritySettings,
    lazy={
        "cosine": "vse.training.models.similarities.vectors:CosineSettings",
        "order": "vse.training.models.similarities.vectors:OrderSettings",
        "euclidean": "vse.training.models.similarities.vectors:EuclideanSettings",
        "network": "vse.training.models.similarities.vectors:SimilarityNetworkSettings",
        "scan": "vse.training.models.similarities.scan:ScanSettings",
        "maxsim": "vse.training.models.similarities.scan:MaxSimSettings",
        "todnet": "vse.training.models.similarities.todnet:TodNetSettings",
    },
)
