"""Samplers split the pairs of an epoch into batches. A new sampler is one file here and one line below."""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.data.samplers.base import Sampler

SAMPLERS: Registry[Sampler] = Registry(
    "sampler",
    base=Sampler,
    lazy={
        "shuffled": "vse.training.data.samplers.base:ShuffledSampler",
        "neighbourhood": "vse.training.data.samplers.neighbourhood:NeighbourhoodSampler",
        "by_image": "vse.training.data.samplers.base:GroupedByImageSampler",
        "neighbourhood_added": "vse.training.data.samplers.neighbourhood:NeighbourAddingSampler",
    },
)
