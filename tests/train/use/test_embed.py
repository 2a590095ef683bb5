"""A trained run, and the file of a split that vse-embed writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.train.conftest import experiment, weights
from vse.features.cache.shards import shards_folder
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.cnn import CnnExtractor
from vse.train.cli import embed_main
from vse.train.training import train


def test_embeddings_are_those_of_the_best_weights(cache: Path, own_run: Path) -> None:
    run = own_run
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run)])
    assert stop.value.code == 0
    with h5py.File(run / "test.h5") as file, h5py.File(cache) as features:
        assert dict(file.attrs.items()).items() >= {"dataset": "demo", "split": "test", "similarity": "cosine"}.items()
        assert file["images"].shape == (12, 16)
        assert file["captions"].shape == (60, 16)
        rows = {int(i): row for row, i in enumerate(features["ids"][:])}
        first = torch.from_numpy(features["features"][:][[rows[int(i)] for i in file["image_ids"][:]]].astype(np.float32))
        best = weights(run)
        slow = first @ best["image_encoder.linear.weight"].T + best["image_encoder.linear.bias"]
        slow = slow / slow.norm(dim=1, keepdim=True)
        np.testing.assert_allclose(file["images"][:], slow, rtol=1e-5, atol=1e-6)


def test_a_run_is_not_embedded_with_another_cache(run: Path, demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    other = tmp_path / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"grid": 1})), other, 2)
    merge(demo, other, 2)
    assert "is not the cache that" in fails(embed_main, run, "--features", other)
    assert "not a run folder" in fails(embed_main, tmp_path / "nowhere")
    assert "no images in split 'tset' (did you mean 'test'?" in fails(embed_main, run, "--split", "tset")


def test_broken_weights_are_named(own_run: Path, fails: Callable[..., str]) -> None:
    run = own_run
    (run / "best.safetensors").write_bytes(b"junk")
    record = json.loads((run / "run.json").read_text())
    del record["files"]  # as an earlier version wrote it
    (run / "run.json").write_text(json.dumps(record))
    assert "not readable weights" in fails(embed_main, run)


FINETUNE = ["images.source=pictures", "images.finetune=true", "train.epochs=1"]


def test_a_fine_tuned_run_embeds_the_photos(own_cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(own_cache, experiment(*FINETUNE), out=tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run)])
    assert stop.value.code == 0
    photo = sorted((own_cache.parent.parent / "data" / "images").rglob("*.jpg"))[-1]
    photo.write_bytes(b"junk")
    assert f"{photo.name}: not a readable image" in fails(embed_main, run)


def test_a_run_on_cached_captions_is_embedded_with_them_alone(
    own_cache: Path, tfidf: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    assert (own_cache.parent / tfidf.name).exists()
    run = train(own_cache, experiment("caption_feature=tfidf", "train.epochs=1"), out=tmp_path / "run")
    for path in (own_cache.parent / tfidf.name, shards_folder(own_cache.parent / tfidf.name)):
        path.rename(path.with_name(f"moved_{path.name}"))
    moved = own_cache.parent / f"moved_{tfidf.name}"
    assert "demo_tfidf.h5" in fails(embed_main, run)
    assert "is not the cache that" in fails(embed_main, run, "--caption-features", own_cache)
    with pytest.raises(SystemExit) as stop:
        embed_main([str(run), "--caption-features", str(moved)])
    assert stop.value.code == 0
