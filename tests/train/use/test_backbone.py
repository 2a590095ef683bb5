"""Embeddings of a run, or of another program, as feature caches: what is in them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.train.conftest import experiment
from vse.features.cache.feature_cache import FeatureCache, open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.exchange.embeddings import read_backbone
from vse.features.extraction import verify_sources
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.files.writing import sha256_file
from vse.train.cli import embed_main
from vse.train.training import train

SIDES = ("images", "captions")
OF_CAPTIONS = ("captions", "caption_ids", "caption_image_ids", "caption_hashes")


def embedded(*arguments: object) -> None:
    """Run vse-embed, which must succeed."""
    with pytest.raises(SystemExit) as stop:
        embed_main([str(argument) for argument in arguments])
    assert stop.value.code == 0


def opened(out: Path) -> tuple[FeatureCache, FeatureCache]:
    images, captions = (verify_cache(out.with_name(f"{out.name}_{side}.h5")) for side in SIDES)
    return images, captions


@pytest.fixture(scope="module")
def made(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caches of a run of VSE++, as their common beginning. Read only."""
    out = tmp_path_factory.mktemp("features") / "demo_vsepp-0"
    embedded(run, "--as-features", out)
    return out


@pytest.fixture(scope="module")
def split_files(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The embeddings of the run's splits, a file each. Read only."""
    folder = tmp_path_factory.mktemp("splits")
    for split in ("train", "val", "test"):
        embedded(run, "--split", split, "--out", folder / f"{split}.h5")
    return [folder / f"{split}.h5" for split in ("train", "val", "test")]


def test_the_caches_have_the_embeddings_of_all_splits(made: Path, run: Path, demo: Path, split_files: list[Path]) -> None:
    images, captions = opened(made)
    dataset = load_dataset_file(demo)
    assert images.ids.tolist() == [image.imgid for image in dataset.images]
    assert captions.ids.tolist() == [caption.sentid for image in dataset.images for caption in image.captions]
    assert (images.feature, captions.feature) == ("vsepp-0_images", "vsepp-0_captions")
    assert (images.dtype, images.row_kind, images.kind, captions.kind) == (np.float32, "vectors", "image", "text")
    for path in split_files:
        with h5py.File(path) as file:
            for cache, side, ids in zip((images, captions), SIDES, ("image_ids", "caption_ids"), strict=True):
                reader = FeatureReader(cache)
                # The caches were computed in other batches, and matrix products of other sizes may round differently.
                np.testing.assert_allclose(reader.rows(reader.positions(file[ids][:])), file[side][:], rtol=0, atol=1e-6)


def test_both_caches_say_which_run_made_them(made: Path, run: Path) -> None:
    for cache in opened(made):
        backbone = read_backbone(cache)
        assert backbone.sha256 == sha256_file(run / "best.safetensors")
        assert (backbone.experiment, backbone.details["seed"]) == ("vsepp", 0)
        assert backbone.run.resolve() == run.resolve()
        assert verify_sources(cache) == "not at hand (embeddings of a model)"


def test_other_features_have_no_backbone(cache: Path) -> None:
    assert read_backbone(open_cache(cache)) is None


def test_caches_of_other_weights_replace_those_that_are_there(made: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo_vsepp-0"
    for path in made.parent.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    other = train(cache, experiment("train.epochs=1"), seed=1, out=tmp_path / "other")
    before = [one.key for one in opened(out)]
    embedded(other, "--as-features", out)
    after = opened(out)
    assert all(one.key != key for one, key in zip(after, before, strict=True))
    assert {backbone.sha256 for one in after if (backbone := read_backbone(one))} == {sha256_file(other / "best.safetensors")}


def test_an_image_without_features_has_no_embedding(own_cache: Path, tmp_path: Path) -> None:
    """Nor have its captions; a training on the caches leaves it out, too."""
    from tests.conftest import TINY_FEATURE
    from vse.features.extraction import extract_shards, merge
    from vse.features.extractors.cnn import CnnExtractor

    dataset = load_dataset_file(own_cache.parent.parent / "data" / "dataset.json")
    gone = dataset.split("train")[2]
    dataset.image_path(gone).write_bytes(b"junk")
    features = tmp_path / "features" / "demo_tiny.h5"
    extract_shards(dataset.path, CnnExtractor(TINY_FEATURE), features, 1, skip_bad=True)
    run = train(merge(dataset.path, features, 1), experiment("train.epochs=1"), out=tmp_path / "run")
    embedded(run, "--as-features", features.with_name("demo_some"))
    images, captions = opened(features.with_name("demo_some"))
    assert images.skipped == {gone.imgid}
    assert captions.skipped == {caption.sentid for caption in gone.captions}
    assert len(images.ids) == len(dataset.images) - 1


def test_files_of_any_program_make_the_same_caches(made: Path, split_files: list[Path], demo: Path, tmp_path: Path) -> None:
    """In any order; the sum of the files stands for the weights, and the dataset.json is named, as they may not say it."""
    stripped = []
    for path in reversed(split_files):
        stripped.append(Path(shutil.copy(path, tmp_path)))
        with h5py.File(stripped[-1], "a") as file:
            for name in ("experiment", "seed", "provenance", "content_sha256"):
                del file.attrs[name]
    embedded(*stripped, "--as-features", tmp_path / "demo_theirs", "--captions", demo)
    embedded(*split_files, "--as-features", tmp_path / "demo_ours")
    theirs, ours = opened(tmp_path / "demo_theirs"), opened(tmp_path / "demo_ours")
    for expected, *found in zip(opened(made), theirs, ours, strict=True):
        for one in found:
            np.testing.assert_array_equal(one.ids, expected.ids)
            rows = [FeatureReader(c).rows(np.arange(len(c.ids))) for c in (one, expected)]
            np.testing.assert_allclose(*rows, rtol=0, atol=1e-6)
    backbones = [read_backbone(one) for one in (*theirs, *ours)]
    assert backbones[0] == backbones[1]
    assert [(b.experiment, b.run) for b in backbones if b] == [("test", None)] * 2 + [("vsepp", None)] * 2


def test_a_split_without_a_file_is_left_out(
    split_files: list[Path], demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded(*split_files[:2], "--as-features", tmp_path / "demo_some")
    assert "no file has the split test; the caches lack it" in capsys.readouterr().err
    images, captions = opened(tmp_path / "demo_some")
    dataset = load_dataset_file(demo)
    assert images.skipped == {image.imgid for image in dataset.split("test")}
    assert len(captions.ids) == 54 * 5


def edited(path: Path, folder: Path, how: Callable[[Any], None]) -> Path:
    copy = Path(shutil.copy(path, folder))
    with h5py.File(copy, "a") as file:
        del file.attrs["content_sha256"]
        how(file)
    return copy


def replaced(file: Any, name: str, values: Any) -> None:
    del file[name]
    file[name] = values


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda f: f.attrs.__setitem__("seed", 5), "is of seed 5, "),
        (lambda f: f.attrs.__setitem__("experiment", "other"), "is of experiment 'other', "),
        (lambda f: f.attrs.__setitem__("split", "val2"), "has no split 'val2' (did you mean 'val'?"),
        (lambda f: [replaced(f, side, f[side][:, :8]) for side in SIDES], "vectors of 8 numbers"),
        (lambda f: replaced(f, "image_ids", f["image_ids"][:] + 10**6), "6 of 66 images have no embedding, the first is id"),
        (
            lambda f: f.__setitem__("scores", np.zeros((len(f["image_ids"]), len(f["caption_ids"])), np.float32)),
            "holds scores of pairs; embeddings of images and captions are needed",
        ),
        (
            lambda f: [replaced(f, name, f[name][:-5]) for name in OF_CAPTIONS],
            "5 of 330 captions have no embedding, the first is id",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(
    how: Callable[[Any], None], message: str, split_files: list[Path], tmp_path: Path, fails: Callable[..., str]
) -> None:
    bad = edited(split_files[1], tmp_path, how)
    arguments = (split_files[0], bad, split_files[2], "--as-features", tmp_path / "demo_x")
    assert message in fails(embed_main, *arguments)
    assert not list(tmp_path.glob("demo_x*.h5"))


def test_what_cannot_be_written_is_refused_in_a_line(
    run: Path, split_files: list[Path], cache: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    out = tmp_path / "demo_x"
    assert "so leave .h5 out" in fails(embed_main, run, "--as-features", tmp_path / "demo_x.h5")
    assert "leave --out and --split out" in fails(embed_main, run, "--as-features", out, "--split", "val")
    assert "takes one run, or files" in fails(embed_main, run, run, "--as-features", out)
    assert "a second run; vse-embed takes one" in fails(embed_main, run, run)
    assert "not a run folder" in fails(embed_main, tmp_path, "--as-features", out)
    stripped = edited(split_files[0], tmp_path, lambda file: file.attrs.__delitem__("provenance"))
    assert "name it with --captions" in fails(embed_main, stripped, "--as-features", out)
    (tmp_path / "demo_y_images.h5").write_bytes(b"mine")
    assert "is not a feature cache" in fails(embed_main, run, "--as-features", tmp_path / "demo_y")


def test_an_unfinished_run_is_asked_for(
    own_run: Path, tmp_path: Path, edit: Callable[[Path, Callable[[Any], None]], Path], fails: Callable[..., str]
) -> None:
    edit(own_run / "run.json", lambda record: record.update(state="collapsed"))
    out = tmp_path / "demo_x"
    assert "its training did not finish (state: collapsed)" in fails(embed_main, own_run, "--as-features", out)
    embedded(own_run, "--as-features", out, "--unfinished")
    assert json.loads(json.dumps(opened(out)[0].provenance["backbone"]))["unfinished"] == "collapsed"


def test_a_run_that_scores_pairs_has_no_vectors(positions: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    sets = ["model.similarity=scan", "model.caption_encoder={name: gru, states: all}", "train.epochs=1"]
    run = train(positions, experiment(*sets), out=tmp_path / "run")
    line = fails(embed_main, run, "--as-features", tmp_path / "demo_x")
    assert "its model (scan) scores every pair, so single vectors do not stand for it" in line
