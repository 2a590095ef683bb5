"""Similarities of images and captions. A new similarity is one file here and one line below.

A similarity is a class of settings, derived from :class:`vse.train.models.similarities.base.SimilaritySettings`, whose
``build`` returns a network from the embeddings to the scores of all images with all captions.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.train.models.similarities.base import SimilaritySettings

SIMILARITIES: Registry[SimilaritySettings] = Registry(
    "similarity",
    base=SimilaritySettings,
    lazy={
        "cosine": "vse.train.models.similarities.vectors:CosineSettings",
        "order": "vse.train.models.similarities.order:OrderSettings",
        "euclidean": "vse.train.models.similarities.vectors:EuclideanSettings",
        "network": "vse.train.models.similarities.network:SimilarityNetworkSettings",
        "scan": "vse.train.models.similarities.scan:ScanSettings",
        "todnet": "vse.train.models.similarities.todnet:TodNetSettings",
    },
)
