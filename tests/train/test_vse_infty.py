"""VSE-infinity trained on sets: with stops to the bit, over several kinds of captions, and put to use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.train.conftest import assert_same, experiment, state, table
from tests.train.solvers.test_resume import train_with_stops
from vse.eval.files.embeddings import read_embeddings
from vse.train.run.resume import Extras
from vse.train.training import train
from vse.train.use.embed import embed_split

WORDS = "{name: gru, states: pooled, bidirectional: true, size_augmentation: 0.2}"
TOKENS = "{name: bert, model: tiny, pooling: gpo, size_augmentation: 0.2}"
TRAINED = ["train.optimizer=adamw", "train.weight_decay=1e-4", "train.undecayed=[]", "warmup.epochs=1"]


def sets(captions: str) -> list[str]:
    return ["model.image_encoder=gpo", f"model.caption_encoder={captions}", *TRAINED]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("captions", "features"), [(WORDS, "regions"), (TOKENS, "positions")], ids=["words, regions", "tokens, positions"]
)
def test_stopped_and_resumed_it_ends_with_the_same_bits(
    captions: str, features: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cache = request.getfixturevalue(features)
    train(cache, experiment(*sets(captions)), out=tmp_path / "whole", extras=Extras(log_negatives=3))
    train_with_stops(cache, sets(captions), tmp_path / "cut", [2, 9])
    assert_same(state(tmp_path / "whole"), state(tmp_path / "cut"))


@pytest.mark.slow
def test_it_learns_and_its_embeddings_are_unit_vectors_that_do_not_change(regions: Path, tmp_path: Path) -> None:
    longer = ["train.epochs=8", "train.decay_after=8", "train.learning_rate=3e-3", "loss.name=sum"]
    run = train(regions, experiment(*sets(WORDS), *longer), out=tmp_path / "run")
    losses = [float(row["loss"]) for row in table(run)]
    assert losses[-1] < 0.7 * losses[0]
    first, again = (read_embeddings(embed_split(run, tmp_path / f"{k}.h5", device="cpu")).vectors for k in range(2))
    assert first is not None
    assert again is not None
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-3)
