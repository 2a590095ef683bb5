"""A list of the hardest negatives of each epoch, for people to read (as in the VSE++ paper, section 3.7, Fig. 3)."""

from __future__ import annotations

import csv
import heapq
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vse.pipeline.dataset.dataset import Caption
from vse.pipeline.errors import escape_csv_cell
from vse.pipeline.files.writing import write_text
from vse.training.losses.base import QueryScores, hinge_costs

NegativeRow = list[Any]  # a row with the columns COLUMNS; plain values, because checkpoints store it

NEGATIVE_COLUMNS = (
    "epoch",
    "query",
    "cost",
    "imgid",
    "sentid",
    "negative_imgid",
    "negative_sentid",
    "caption",
    "negative_caption",
)


class HardNegatives:
    """A list of the ``n_per_epoch`` negatives with the highest costs in each epoch, for images and for captions as queries.

    For an image as the query, the negative is the caption ``negative_sentid``. For a caption, the negative is the image
    ``negative_imgid``, and ``negative_sentid`` is a caption of this image.
    """

    def __init__(self, n: int, captions: Sequence[Caption]) -> None:
        self.n_per_epoch = n
        self._captions = captions
        self.finished_rows: list[NegativeRow] = []
        self.epoch_rows: list[NegativeRow] = []

    def add_batch(
        self, epoch: int, pairs: Sequence[int], query_scores: tuple[QueryScores, QueryScores], margin: float
    ) -> None:
        """Add the hardest negatives of a batch.

        ``pairs`` : indices of the pairs of the batch.
        ``query_scores`` : scores, with images and with captions as queries; columns after those of the batch are ignored.
        """
        for query, (scores, positives, negatives) in zip(("image", "caption"), query_scores, strict=True):
            own = slice(len(pairs))
            hardest = hinge_costs(scores.detach(), positives, negatives, margin)[:, own].max(1)
            best = torch.topk(hardest.values, min(self.n_per_epoch, len(pairs)))
            rows = best.indices.cpu()
            columns = hardest.indices.cpu()[rows]
            for cost, row, column in zip(best.values.tolist(), rows.tolist(), columns.tolist(), strict=True):
                if cost > 0:
                    positive, negative = self._captions[pairs[row]], self._captions[pairs[column]]
                    ids = [positive.imgid, positive.sentid, negative.imgid, negative.sentid]
                    self.epoch_rows.append([epoch, query, cost, *ids, positive.raw, negative.raw])
        self.epoch_rows = [
            entry
            for query in ("image", "caption")
            for entry in heapq.nlargest(
                self.n_per_epoch, (row for row in self.epoch_rows if row[1] == query), key=lambda row: row[2]
            )
        ]

    def end_epoch(self) -> None:
        self.finished_rows += self.epoch_rows
        self.epoch_rows = []

    def write_csv(self, path: Path) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(NEGATIVE_COLUMNS)
        table.writerows([*entry[:2], f"{entry[2]:.4g}", *map(escape_csv_cell, entry[3:])] for entry in self.finished_rows)
        write_text(path, text.getvalue())
