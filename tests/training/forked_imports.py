"""What the server of :mod:`tests.training.forked` imports and reads once, for all processes that it forks."""

from __future__ import annotations

from importlib import import_module

import PIL.Image

from vse.training.experiment import load_experiment

for name in (
    "torch._dynamo",  # which torch imports in the first step of an optimiser, and which takes seconds
    "torch.utils.serialization",
    "numpy.ma",
    "vse.training.cli",
    "vse.training.solvers.retrieval",
    "vse.training.training",
    "vse.training.use.embed",
):
    import_module(name)
PIL.Image.preinit()
load_experiment("vsepp", "demo")  # reads the files of all presets
