"""Samplers split the pairs of an epoch into batches. A new sampler is one file here and one line below."""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.train.data.samplers.base import Sampler

SAMPLERS: Registry[Sampler] = Registry(
    "sampler",
    base=Sampler,
    lazy={
        "shuffled": "vse.train.data.samplers.base:Shuffled",
        "neighbourhood": "vse.train.data.samplers.neighbourhood:NeighbourhoodSampling",
        "by_image": "vse.train.data.samplers.base:ByImage",
        "neighbourhood_added": "vse.train.data.samplers.neighbourhood:AddedNeighbours",
    },
)
