"""Solvers find the weights of a model, epoch by epoch. A new solver is one file here and one line below."""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.train.settings import SolverSettings

SOLVERS: Registry[SolverSettings] = Registry(
    "solver",
    base=SolverSettings,
    lazy={
        "gradient": "vse.train.settings:GradientSettings",
        "cca": "vse.train.solvers.cca:CcaSettings",
        "ridge": "vse.train.solvers.closed_form:RidgeSettings",
        "csa": "vse.train.solvers.closed_form:CsaSettings",
        "asif": "vse.train.solvers.closed_form:AsifSettings",
        "none": "vse.train.solvers.none:NoTrainingSettings",
        "phrases": "vse.train.phrases.solvers:PhraseGradientSettings",
        "phrases_cca": "vse.train.phrases.solvers:PhraseCcaSettings",
    },
)
