"""Losses. A new loss is one file here and one line below.

A ranking loss is a class that derives from :class:`vse.training.losses.ranking.RankingLoss` and defines the method ``cost``.
A loss of single pairs derives from :class:`vse.training.losses.base.PairLoss`.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.training.losses.base import Loss
from vse.training.losses.ranking import build_function_loss

LOSSES: Registry[Loss] = Registry(
    "loss",
    base=Loss,
    from_function=build_function_loss,
    lazy={
        "max": "vse.training.losses.hinges:MaxOfHinges",
        "sum": "vse.training.losses.hinges:SumOfHinges",
        "top": "vse.training.losses.hinges:TopOfHinges",
        "spectrum": "vse.training.losses.hinges:SpectrumOfHinges",
        "infonce": "vse.training.losses.contrastive:InfoNceLoss",
        "sigmoid": "vse.training.losses.contrastive:SigmoidLoss",
        "gce": "vse.training.losses.contrastive:GeneralisedCrossEntropy",
        "logistic": "vse.training.losses.base:LogisticLoss",
    },
)
