"""Adversaries, which make the batches of a training harder. A new adversary is one file here and one line below.

An adversary is a class of settings, derived from :class:`vse.training.adversaries.base.AdversarySettings`. Its ``build``
returns a network that is trained against the model.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.settings import AdversarySettings

ADVERSARIES: Registry[AdversarySettings] = Registry(
    "adversary",
    base=AdversarySettings,
    lazy={
        "ace": "vse.training.adversaries.ace:AceSettings",
        "compositional": "vse.training.adversaries.compositional:CompositionalSettings",
    },
)
