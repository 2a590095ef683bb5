"""The hardest negatives of an epoch, for people to look at (the VSE++ paper discusses such examples in its appendix A)."""

from __future__ import annotations

import csv
import heapq
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vse.pipeline.dataset import Caption
from vse.pipeline.files import write_text
from vse.train.losses.hinges import hinge_costs

Found = list[Any]  # a row of COLUMNS, plain values: it goes into the checkpoint

COLUMNS = ("epoch", "query", "cost", "imgid", "sentid", "negative_imgid", "negative_sentid", "caption", "negative_caption")


class HardNegatives:
    """Keeps the ``n`` costliest hardest negatives of each direction of the running epoch.

    With the query ``image`` the negative is the caption ``negative_sentid``; with the query ``caption`` it is the image
    ``negative_imgid``, shown by the caption it was paired with.
    """

    def __init__(self, n: int, captions: Sequence[Caption]) -> None:
        self.n = n
        self._captions = captions
        self.finished: list[Found] = []
        self.running: list[Found] = []

    def add(
        self,
        epoch: int,
        pairs: Sequence[int],
        scores: Float[Tensor, "n n"],
        negatives: Bool[Tensor, "n n"],
        margin: float,
    ) -> None:
        """Take note of a batch, whose pairs have these numbers."""
        wrong_caption, wrong_image = hinge_costs(scores.detach(), negatives, margin)
        for query, costs in (("image", wrong_caption), ("caption", wrong_image.T)):
            hardest = costs.max(1)
            best = torch.topk(hardest.values, min(self.n, len(pairs)))
            rows = best.indices.cpu()
            columns = hardest.indices.cpu()[rows]
            for cost, row, column in zip(best.values.tolist(), rows.tolist(), columns.tolist(), strict=True):
                if cost > 0:
                    right, wrong = self._captions[pairs[row]], self._captions[pairs[column]]
                    ids = [right.imgid, right.sentid, wrong.imgid, wrong.sentid]
                    self.running.append([epoch, query, cost, *ids, right.raw, wrong.raw])
        self.running = [
            found
            for query in ("image", "caption")
            for found in heapq.nlargest(self.n, (row for row in self.running if row[1] == query), key=lambda row: row[2])
        ]

    def end_epoch(self) -> None:
        """The running epoch is over."""
        self.finished += self.running
        self.running = []

    def write(self, path: Path) -> None:
        """Write ``negatives.csv``."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows([*found[:2], f"{found[2]:.4g}", *found[3:]] for found in self.finished)
        write_text(path, text.getvalue())
