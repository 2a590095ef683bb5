"""Solvers, which find the weights of a model epoch by epoch. A new solver is one file here and one line below."""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.settings import SolverSettings

SOLVERS: Registry[SolverSettings] = Registry(
    "solver",
    base=SolverSettings,
    lazy={
        "gradient": "vse.training.settings:GradientSettings",
        "cca": "vse.training.solvers.cca:CcaSettings",
        "ridge": "vse.training.solvers.closed_form:RidgeSettings",
        "csa": "vse.training.solvers.closed_form:CsaSettings",
        "asif": "vse.training.solvers.closed_form:AsifSettings",
        "none": "vse.training.solvers.closed_form:NoTrainingSettings",
        "phrases": "vse.training.phrases.solvers:PhraseGradientSettings",
        "phrases_cca": "vse.training.phrases.solvers:PhraseCcaSettings",
    },
)
