"""Three images with one, three and seven captions, ties and duplicates among them: every figure by hand.

The images are the first three axes, so a caption's numbers are its scores. For each caption the rank of its image, and for
each image the rank of its best caption, equal scores against the model.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import result_of
from vse.eval.files.embeddings import Embeddings, write_embeddings

#          scores with A, B, C    image  rank of it
CAPTIONS = [
    ((0.50, 0.50, 0.25), "A", 1),  # B ties
    ((0.25, 0.75, 0.50), "B", 0),
    ((0.75, 0.25, 0.50), "B", 2),
    ((0.25, 0.75, 0.50), "B", 0),  # twice the same
    ((0.50, 0.50, 0.50), "C", 2),  # all tie
    ((0.00, 0.00, 1.00), "C", 0),
    ((0.00, 0.00, 1.00), "C", 0),  # twice the same
    ((0.75, 0.50, 0.50), "C", 2),
    ((0.25, 0.50, 0.25), "C", 2),
    ((0.00, 0.25, 0.25), "C", 1),
    ((1.00, 0.00, 0.50), "C", 1),
]
# Four captions of others are as near to A as its own, or nearer.
# A has its caption at the fifth place, B its own at 1, 2 and 8, C at 1, 2, 6, 7, 8, 10 and 11.
AP = (1 / 5, (1 + 1 + 3 / 8) / 3, (1 + 1 + 3 / 6 + 4 / 7 + 5 / 8 + 6 / 10 + 7 / 11) / 7)


def gain(*places: int) -> float:
    return sum(1 / log2(1 + place) for place in places)


NDCG = (gain(5) / gain(1), gain(1, 2, 8) / gain(1, 2, 3), gain(1, 2, 6, 7, 8, 10) / gain(1, 2, 3, 4, 5, 6, 7))
I2T = {"r1": 200 / 3, "r5": 100, "r10": 100, "medr": 1, "meanr": 1 + 4 / 3}
I2T |= {"ndcg10": 100 * sum(NDCG) / 3, "mrr": 100 * (1 / 5 + 1 + 1) / 3, "map": 100 * sum(AP) / 3}
# Four captions have their image at the first place, three at the second, four at the third.
T2I = {"r1": 400 / 11, "r5": 100, "r10": 100, "medr": 2, "meanr": 2}
T2I |= {"ndcg10": 100 * (4 + 3 * gain(2) + 4 * gain(3)) / 11}
T2I |= dict.fromkeys(("mrr", "map"), 100 * (4 + 3 / 2 + 4 / 3) / 11)


def golden() -> Embeddings:
    captions = np.array([[*scores, 0.5] for scores, _, _ in CAPTIONS], np.float32)
    images, ids = np.eye(3, 4, dtype=np.float32), np.arange(len(CAPTIONS)) + 100
    of = np.array([{"A": 30, "B": 10, "C": 20}[image] for _, image, _ in CAPTIONS])
    named = {"experiment": "by_hand", "seed": 0}
    return Embeddings(np.array([30, 10, 20]), ids, of, "golden", "test", images, captions, **named)


def some_captions(run: Embeddings, rows: Any) -> Embeddings:
    return replace(run, **{name: getattr(run, name)[rows] for name in ("captions", "caption_ids", "caption_image_ids")})


def as_scores(run: Embeddings) -> Embeddings:
    return replace(run, images=None, captions=None, scores=run.images @ run.captions.T, similarity="network")


def shuffled(run: Embeddings) -> Embeddings:
    return some_captions(run, np.random.default_rng(0).permutation(len(run.caption_ids)))


def evaluated(tmp_path: Path, run: Embeddings) -> dict[str, Any]:
    """What the evaluation writes; it asks FAISS, too, where there are embeddings."""
    return result_of([write_embeddings(tmp_path / "e.h5", run)], bootstrap=1000)


@pytest.mark.parametrize("form", [lambda run: run, as_scores, shuffled])
def test_every_figure_is_the_one_by_hand(form: Any, tmp_path: Path) -> None:
    result = evaluated(tmp_path, form(golden()))
    assert (result["n_images"], result["n_captions"], result["split"]) == (3, 11, "test")
    full = result["protocols"]["full"]
    assert full["i2t"] == pytest.approx(I2T)
    assert full["t2i"] == pytest.approx(T2I)
    assert full["rsum"] == pytest.approx(200 / 3 + 400 / 11 + 400)
    assert full["mean_recall"] == pytest.approx(full["rsum"] / 6)
    for direction in ("i2t", "t2i"):
        for name, (low, high) in full["ci95"][direction].items():
            assert low <= full[direction][name] <= high
    # Complete images are drawn: no sample is below the worst image, A, or above the best, B.
    assert full["ci95"]["t2i"]["r1"] == pytest.approx([0, 200 / 3])
