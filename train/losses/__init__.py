"""Losses. A new loss is one file here and one line below.

A ranking loss is a class of settings that derives from :class:`vse.train.losses.ranking.RankingLoss` and has a method
``cost``. A loss of single pairs derives from :class:`vse.train.losses.pair_loss.PairLoss`.
"""

from __future__ import annotations

from vse.pipeline.presets.parts import Registry
from vse.train.losses.base import Loss
from vse.train.losses.ranking import loss_of_function

LOSSES: Registry[Loss] = Registry(
    "loss",
    base=Loss,
    from_function=loss_of_function,
    lazy={
        "max": "vse.train.losses.hinges:MaxOfHinges",
        "sum": "vse.train.losses.hinges:SumOfHinges",
        "top": "vse.train.losses.hinges:TopOfHinges",
        "spectrum": "vse.train.losses.hinges:SpectrumOfHinges",
        "infonce": "vse.train.losses.contrastive:InfoNce",
        "sigmoid": "vse.train.losses.contrastive:Sigmoid",
        "logistic": "vse.train.losses.pair_loss:Logistic",
    },
)
