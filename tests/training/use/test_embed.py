from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests.conftest import TINY_FEATURE
from tests.eval.evaluating import write_result
from tests.training.conftest import Capture, Edit, Fails, done, experiment, weights
from vse.eval.options import AllEvaluateOptions
from vse.eval.tables.ladder import build_ladder
from vse.features.cache.feature_cache import FeatureCache, open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.shards import shards_folder
from vse.features.cli import extract_main
from vse.features.exchange.embeddings import read_backbone
from vse.features.extraction import extract_shards, merge_feature, verify_inputs
from vse.features.extractors.cnn import CnnExtractor
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.files.writing import sha256_file
from vse.training.cli import embed_main
from vse.training.options import TrainInputs
from vse.training.training import train
from vse.training.use.embed import embed_split


def test_embeddings_are_those_of_the_best_weights(cache: Path, own_run: Path) -> None:
    done(embed_main, own_run)
    with h5py.File(own_run / "test.h5") as file, h5py.File(cache) as features:
        assert dict(file.attrs.items()).items() >= {"dataset": "demo", "split": "test", "similarity": "cosine"}.items()
        assert file["images"].shape == (12, 16)
        assert file["captions"].shape == (60, 16)
        rows = {int(i): row for row, i in enumerate(features["ids"][:])}
        first = torch.from_numpy(features["features"][:][[rows[int(i)] for i in file["image_ids"][:]]].astype(np.float32))
        best = weights(own_run)
        slow = first @ best["image_encoder.linear.weight"].T + best["image_encoder.linear.bias"]
        slow = slow / slow.norm(dim=1, keepdim=True)
        np.testing.assert_allclose(file["images"][:], slow, rtol=1e-5, atol=1e-6)


def test_another_cache_and_broken_weights_are_named(
    run: Path, demo: Path, tmp_path: Path, fails: Fails, own_run: Path
) -> None:
    other = tmp_path / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"grid": 1})), other, 2)
    merge_feature(demo, other, 2)
    assert "is not the cache that" in fails(embed_main, run, "--features", other)
    assert "not a run folder" in fails(embed_main, tmp_path / "nowhere")
    assert "no images in split 'tset' (did you mean 'test'?" in fails(embed_main, run, "--split", "tset")
    (own_run / "best.safetensors").write_bytes(b"junk")
    record = json.loads((own_run / "run.json").read_text())
    del record["files"]  # as an earlier version wrote it
    (own_run / "run.json").write_text(json.dumps(record))
    assert "not readable weights" in fails(embed_main, own_run)


FINETUNE = ["images.source=pictures", "images.finetune=true", "train.epochs=1"]


def test_a_fine_tuned_run_embeds_the_photos(own_cache: Path, tmp_path: Path, fails: Fails) -> None:
    run = train(own_cache, experiment(*FINETUNE), out=tmp_path / "run")
    done(embed_main, run)
    photo = sorted((own_cache.parent.parent / "data" / "images").rglob("*.jpg"))[-1]
    photo.write_bytes(b"junk")
    assert f"{photo.name}: not a readable image" in fails(embed_main, run)


def test_cached_captions_are_embedded_from_their_cache(own_cache: Path, tfidf: Path, tmp_path: Path, fails: Fails) -> None:
    assert (own_cache.parent / tfidf.name).exists()
    run = train(own_cache, experiment("caption_feature=tfidf", "train.epochs=1"), out=tmp_path / "run")
    for path in (own_cache.parent / tfidf.name, shards_folder(own_cache.parent / tfidf.name)):
        path.rename(path.with_name(f"moved_{path.name}"))
    moved = own_cache.parent / f"moved_{tfidf.name}"
    assert "demo_tfidf.h5" in fails(embed_main, run)
    assert "is not the cache that" in fails(embed_main, run, "--caption-features", own_cache)
    done(embed_main, run, "--caption-features", moved)


def cost_in(embeddings: Path) -> dict[str, Any]:
    with h5py.File(embeddings) as file:
        cost: dict[str, Any] = json.loads(file.attrs["provenance"])["cost"]
        return cost


def test_embeddings_record_the_cost_of_each_step(cache: Path, tfidf: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", inputs=TrainInputs(caption_features=tfidf))
    cost = cost_in(embed_split(run, tmp_path / "test.h5"))
    record = json.loads((run / "run.json").read_text())
    assert cost["extraction_s"] == {
        "tiny": open_cache(cache).extraction_seconds,
        "tfidf": open_cache(tfidf).extraction_seconds,
    }
    sizes = {"tiny": open_cache(cache).n_bytes, "tfidf": open_cache(tfidf).n_bytes}
    assert cost["cache_mb"] == {name: round(n_bytes / 1e6, 3) for name, n_bytes in sizes.items()}
    assert cost["train_s"] == record["train_seconds"]
    assert cost["model_mb"] == round((run / "best.safetensors").stat().st_size / 1e6, 3)
    assert cost["embed_s"] > 0
    assert all(seconds > 0 for seconds in cost["extraction_s"].values())


def test_each_cache_that_a_run_reads_has_its_cost(bank: Path, tmp_path: Path, own_cache: Path) -> None:
    one = experiment("train.epochs=1")
    run = train(own_cache, one, out=tmp_path / "gone", inputs=TrainInputs(eval_features=bank))
    cost = cost_in(embed_split(run, tmp_path / "test.h5"))
    assert cost["extraction_s"] == {
        "bank": open_cache(bank).extraction_seconds,
        "tiny": open_cache(own_cache).extraction_seconds,
    }
    own_cache.unlink()
    cost = cost_in(embed_split(run, tmp_path / "gone.h5"))
    assert cost["extraction_s"] == {"bank": open_cache(bank).extraction_seconds, "tiny": None}


def test_a_result_repeats_the_costs_of_every_seed_and_adds_its_own(run: Path, cache: Path, tmp_path: Path) -> None:
    other = train(cache, experiment(), seed=1, out=tmp_path / "other")
    files = [embed_split(each, tmp_path / f"{k}.h5") for k, each in enumerate((run, other))]
    result = write_result(files, tmp_path / "r.json", options=AllEvaluateOptions(bootstrap=0))
    said = json.loads(result.read_text())["provenance"]
    assert said["costs"] == [cost_in(file) for file in files]
    assert said["evaluation_s"] > 0
    (row,) = build_ladder([result]).to_dict("records")
    assert row["train_s"] == pytest.approx(sum(cost["train_s"] for cost in said["costs"]) / 2)
    assert row["best"] == "yes"


SIDES = ("images", "captions")
OF_CAPTIONS = ("captions", "caption_ids", "caption_image_ids", "caption_hashes")


def opened(out: Path) -> tuple[FeatureCache, FeatureCache]:
    images, captions = (verify_cache(out.with_name(f"{out.name}_{side}.h5")) for side in SIDES)
    return images, captions


@pytest.fixture(scope="module")
def made(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caches of a run of VSE++, as their common beginning. Read only."""
    out = tmp_path_factory.mktemp("features") / "demo_vsepp-0"
    done(embed_main, run, "--as-features", out)
    return out


@pytest.fixture(scope="module")
def split_files(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The embeddings of the run's splits, a file each. Read only."""
    folder = tmp_path_factory.mktemp("splits")
    for split in ("train", "val", "test"):
        done(embed_main, run, "--split", split, "--out", folder / f"{split}.h5")
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
                np.testing.assert_allclose(reader.read_rows(reader.find_rows(file[ids][:])), file[side][:], rtol=0, atol=1e-6)


def test_both_caches_say_which_run_made_them(made: Path, run: Path, cache: Path) -> None:
    assert read_backbone(open_cache(cache)) is None
    for made_cache in opened(made):
        backbone = read_backbone(made_cache)
        assert backbone.sha256 == sha256_file(run / "best.safetensors")
        assert (backbone.experiment, backbone.more_provenance["seed"]) == ("vsepp", 0)
        assert backbone.run_folder.resolve() == run.resolve()
        assert verify_inputs(made_cache) == "not at hand (embeddings of a model)"


def test_caches_of_other_weights_replace_those_that_are_there(made: Path, cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo_vsepp-0"
    for path in made.parent.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    other = train(cache, experiment("train.epochs=1"), seed=1, out=tmp_path / "other")
    before = [one.key for one in opened(out)]
    done(embed_main, other, "--as-features", out)
    after = opened(out)
    assert all(one.key != key for one, key in zip(after, before, strict=True))
    assert {backbone.sha256 for one in after if (backbone := read_backbone(one))} == {sha256_file(other / "best.safetensors")}


def test_an_image_without_features_has_no_embedding(own_cache: Path, tmp_path: Path) -> None:
    dataset = load_dataset_file(own_cache.parent.parent / "data" / "dataset.json")
    gone = dataset.split("train")[2]
    dataset.image_path(gone).write_bytes(b"junk")
    features = tmp_path / "features" / "demo_tiny.h5"
    extract_shards(dataset.path, CnnExtractor(TINY_FEATURE), features, 1, skip_bad=True)
    run = train(merge_feature(dataset.path, features, 1), experiment("train.epochs=1"), out=tmp_path / "run")
    done(embed_main, run, "--as-features", features.with_name("demo_some"))
    images, captions = opened(features.with_name("demo_some"))
    assert images.skipped_ids == {gone.imgid}
    assert captions.skipped_ids == {caption.sentid for caption in gone.captions}
    assert len(images.ids) == len(dataset.images) - 1


def test_files_of_any_program_make_the_same_caches(made: Path, split_files: list[Path], demo: Path, tmp_path: Path) -> None:
    stripped = []
    for path in reversed(split_files):
        stripped.append(Path(shutil.copy(path, tmp_path)))
        with h5py.File(stripped[-1], "a") as file:
            for name in ("experiment", "seed", "provenance", "content_sha256"):
                del file.attrs[name]
    done(embed_main, *stripped, "--as-features", tmp_path / "demo_theirs", "--captions", demo)
    done(embed_main, *split_files, "--as-features", tmp_path / "demo_ours")
    theirs, ours = opened(tmp_path / "demo_theirs"), opened(tmp_path / "demo_ours")
    for expected, *found in zip(opened(made), theirs, ours, strict=True):
        for one in found:
            np.testing.assert_array_equal(one.ids, expected.ids)
            rows = [FeatureReader(c).read_rows(np.arange(len(c.ids))) for c in (one, expected)]
            np.testing.assert_allclose(*rows, rtol=0, atol=1e-6)
    backbones = [read_backbone(one) for one in (*theirs, *ours)]
    assert backbones[0] == backbones[1]
    assert [(b.experiment, b.run_folder) for b in backbones if b] == [("test", None)] * 2 + [("vsepp", None)] * 2


def test_a_split_without_a_file_is_left_out(split_files: list[Path], demo: Path, tmp_path: Path, capsys: Capture) -> None:
    done(embed_main, *split_files[:2], "--as-features", tmp_path / "demo_some")
    assert "no file has the split test; the caches lack it" in capsys.readouterr().err
    images, captions = opened(tmp_path / "demo_some")
    dataset = load_dataset_file(demo)
    assert images.skipped_ids == {image.imgid for image in dataset.split("test")}
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
        (lambda f: f.__setitem__("scores", np.zeros((6, 30), np.float32)), "holds scores of pairs; embeddings of images and"),
        (
            lambda f: [replaced(f, name, f[name][:-5]) for name in OF_CAPTIONS],
            "5 of 330 captions have no embedding, the first",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(
    how: Callable[[Any], None], message: str, split_files: list[Path], tmp_path: Path, fails: Fails
) -> None:
    bad = edited(split_files[1], tmp_path, how)
    arguments = (split_files[0], bad, split_files[2], "--as-features", tmp_path / "demo_x")
    assert message in fails(embed_main, *arguments)
    assert not list(tmp_path.glob("demo_x*.h5"))


def test_wrong_options_are_one_line(run: Path, split_files: list[Path], cache: Path, tmp_path: Path, fails: Fails) -> None:
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


def test_only_finished_vectors_are_cached(own_run: Path, tmp_path: Path, edit: Edit, fails: Fails, positions: Path) -> None:
    edit(own_run / "run.json", lambda record: record.update(state="collapsed"))
    out = tmp_path / "demo_x"
    assert "its training did not finish (state: collapsed)" in fails(embed_main, own_run, "--as-features", out)
    done(embed_main, own_run, "--as-features", out, "--unfinished")
    assert json.loads(json.dumps(opened(out)[0].provenance["backbone"]))["unfinished"] == "collapsed"
    sets = ["model.similarity=scan", "model.caption_encoder={name: gru, states: all}", "train.epochs=1"]
    run = train(positions, experiment(*sets), out=tmp_path / "pairs")
    line = fails(embed_main, run, "--as-features", tmp_path / "demo_x")
    assert "its model (scan) scores every pair, so single vectors do not stand for it" in line


def test_word_vectors_that_no_file_provided_are_a_changed_setting(demo: Path, cache: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("a 1 2 3\nred 2 1 1\nblue 1 1 1\ncircle 0 2 1\n")

    def changes(experiment_name: str, given: bool, *sets: str, **files: Path) -> list[str]:
        config = experiment("train.epochs=1", *sets, name=experiment_name)
        inputs = TrainInputs(words=words if given and not files else None, **files)
        run = train(cache, config, out=tmp_path / f"{experiment_name}-{given}", inputs=inputs)
        done(embed_main, run)
        with h5py.File(run / "test.h5") as content:
            return [text for text in json.loads(content.attrs["provenance"])["changed_settings"] if "words: file" in text]

    for given in (False, True):
        vectors = tmp_path / f"vectors-{given}.h5"
        option = ["--words", words] if given else []
        done(extract_main, "mean_vector", "--dataset", demo, "--out", vectors, "--shards", 1, *option)
        found = changes("vsepp", given, "caption_feature=mean_vector", caption_features=vectors)
        assert found == ([] if given else ["mean_vector.words: file -> trained on the captions"])
        found = changes(
            "orderpp", given, "model.caption_encoder.name=gru", "model.caption_encoder.train_words=false", "model.word_dim=3"
        )
        assert found == ([] if given else ["model.caption_encoder.words: file -> random vectors that are trained"])
