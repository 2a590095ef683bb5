"""SCAN from a cache to metrics: on regions and on positions, with an image of no region, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.eval.slow_ranks import slow_ranks
from tests.train.adversaries.conftest import SCAN
from tests.train.conftest import experiment
from tests.train.models.similarities.test_scan import slow_score
from vse.features.cache.feature_cache import merge_shards
from vse.features.cache.rows import Identity, Rows
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.train.models.similarities.scan import ScanSettings
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing
from vse.train.solvers.encode import encode
from vse.train.training import train
from vse.train.use.embed import embed_split
from vse.train.use.model import load_run

T2I = ["model.similarity={name: scan, aggregation: lse}", SCAN[1]]


@pytest.fixture(scope="module")
def some_empty(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Regions of the demo, of which every fifth image has none. Read only."""
    ids = np.asarray([image.imgid for image in load_dataset_file(demo).images], np.int64)
    counts = np.where(np.arange(len(ids)) % 5 == 0, 0, 1 + np.arange(len(ids)) % 4)
    n = int(counts.sum())
    rng = np.random.default_rng(0)
    rows = Rows(
        ids,
        rng.normal(size=(n, 16)).astype(np.float16),
        np.zeros((len(ids), 32), np.uint8),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes=np.zeros((n, 4), np.float32),
        scores=np.ones(n, np.float32),
        image_size=np.full((len(ids), 2), 32, np.int32),
    )
    out = tmp_path_factory.mktemp("empty") / "features.h5"
    write_shard(shard_path(out, 0, 1), Identity("demo", "regions", "image", {}), rows)
    return merge_shards(out, 1, demo, ids)


@pytest.mark.parametrize("sets", [T2I, SCAN], ids=["t2i", "i2t"])
@pytest.mark.parametrize("features", ["positions", "some_empty"])
def test_scores_that_are_written_are_those_of_each_pair_alone(
    features: str, sets: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """And ranks of validation those of such scores, whatever captions were padded to."""
    run = train(request.getfixturevalue(features), experiment(*sets, "train.epochs=1"), out=tmp_path / "run")
    found = load_run(run, "val", device="cpu")
    settings = found.experiment.model.similarity
    assert isinstance(settings, ScanSettings)
    images, captions = encode(found.model, found.split, found.device)
    regions, words = (
        [side.unpack(torch.tensor([row]))[0][0].double() for row in range(len(side))] for side in (images, captions)
    )
    slow = np.asarray([[slow_score(image, caption, settings).item() for caption in words] for image in regions])
    with h5py.File(embed_split(run, tmp_path / "val.h5", "val")) as file:
        np.testing.assert_allclose(file["scores"], slow, atol=2e-6)
    i2t, t2i = slow_ranks(slow.round(6), found.split.pairs.image_of.tolist())
    rsum = sum(100 * np.mean(np.asarray(ranks) < k) for ranks in (i2t, t2i) for k in (1, 5, 10))
    assert RunFolder(run).record()["best_rsum"] == pytest.approx(rsum, abs=2)


def test_a_batch_of_one_more_than_the_batch_size_has_a_last_batch_of_few(positions: Path, tmp_path: Path) -> None:
    """Of 240 pairs 2 are left over; their images and captions are a batch like any other."""
    run = train(positions, experiment(*SCAN, "train.batch_size=119", "train.epochs=1"), out=tmp_path / "run")
    assert RunFolder(run).record()["state"] == "finished"


@pytest.mark.parametrize(
    ("features", "sets", "message"),
    [
        ("cache", T2I, r"the similarity 'scan' compares sets of images, and the image encoder 'linear' makes vectors of the"),
        (
            "positions",
            [T2I[0]],
            r"'scan' compares sets of captions, and the caption encoder 'gru' makes vectors of the captions",
        ),
        ("positions", [*T2I, "loss.lambda3=0.1"], "lambda3 and lambda4 compare unit vectors of one side; the similarity scan"),
        ("positions", [*T2I, "model.normalize_image=false"], "similarity: scan takes unit vectors, so normalize_image: true"),
        ("positions", [*T2I, "model.similarity.aggregation=mean"], r"aggregation: .*'avg', 'lse', 'sum' or 'max'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    features: str,
    sets: list[str],
    message: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        train(request.getfixturevalue(features), experiment(*sets), out=tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_aggregation_is_refused(positions: Path, tmp_path: Path) -> None:
    train(positions, experiment(*T2I, "train.epochs=1"), out=tmp_path / "run")
    changed = experiment(*T2I, "train.epochs=1", "model.similarity.aggregation=max")
    with pytest.raises(UserError, match="holds a run with other settings .*model.similarity.aggregation: lse -> max"):
        train(positions, changed, out=tmp_path / "run", existing=Existing(resume=True))


@pytest.mark.slow
def test_bf16_learns_as_fp32_does(positions: Path, tmp_path: Path) -> None:
    losses = [
        RunFolder(train(positions, experiment(*SCAN, f"train.precision={precision}"), out=tmp_path / precision)).checkpoint()[
            "rows"
        ][-1]["loss"]
        for precision in ("fp32", "bf16")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    assert losses[0] != losses[1]
