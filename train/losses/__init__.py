"""Losses. A new loss is one file here and one line below.

A ranking loss is a class of settings, derived from :class:`vse.train.losses.ranking.RankingLoss`, with a method ``cost`` of

- ``scores`` (n, m): the scores of n queries with m candidates,
- ``positives`` (n,): the column of the right candidate of each query,
- ``negatives`` (n, m): True where a candidate is a negative of the query,

that returns a scalar, summed over the queries. It is called once for each direction. A loss of single pairs derives from
:class:`vse.train.losses.pair_loss.PairLoss`.
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
        "max": "vse.train.losses.max_of_hinges:MaxOfHinges",
        "sum": "vse.train.losses.sum_of_hinges:SumOfHinges",
        "top": "vse.train.losses.top_of_hinges:TopOfHinges",
        "spectrum": "vse.train.losses.spectrum_of_hinges:SpectrumOfHinges",
        "infonce": "vse.train.losses.infonce:InfoNce",
        "sigmoid": "vse.train.losses.sigmoid:Sigmoid",
        "logistic": "vse.train.losses.pair_loss:Logistic",
    },
)
