"""TOD-Net from the embeddings of a run of VSE++ to metrics, ensembles and searches, through the commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.eval.slow_ranks import slow_ranks
from tests.train.conftest import SETS, assert_same, experiment, state, weights
from tests.train.solvers.test_resume import train_with_stops
from tests.train.use.searching import printed
from vse.eval.cli import eval_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.train.cli import embed_main, search_main, train_main
from vse.train.experiment import ExperimentConfig, load_experiment
from vse.train.models.similarities.todnet import TodNetSettings
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing, Extras
from vse.train.solvers.encode import encode, ranks
from vse.train.training import train
from vse.train.use.model import load_run

TOD = [*SETS, "train.restval=false", "train.learning_rate=1e-2", "model.similarity.width=8"]


def todnet(*sets: str) -> ExperimentConfig:
    return load_experiment("todnet_vsepp", sets=[*TOD, *sets])


def command(main: Callable[[list[str]], None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


@pytest.fixture(scope="module")
def frozen(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the images' embeddings by a run of VSE++; that of captions lies beside it. Read only."""
    out = tmp_path_factory.mktemp("work") / "features" / "demo_vsepp-0"
    out.parent.mkdir()
    command(embed_main, run, "--as-features", out)
    return out.with_name("demo_vsepp-0_images.h5")


@pytest.fixture(scope="module")
def trained(frozen: Path) -> Path:
    """A TOD-Net on that, with the scores of the test split. Read only."""
    out = train(frozen, todnet(), out=frozen.parent.parent / "runs" / "demo_todnet_vsepp" / "seed-0")
    command(embed_main, out)
    return out


def scores_of(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(file) as content:
        return content["scores_i2t"][:], content["scores_t2i"][:]


def embeddings_of(run: Path, tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    command(embed_main, run, "--out", tmp_path / "backbone.h5")
    with h5py.File(tmp_path / "backbone.h5") as content:
        return content["images"][:], content["captions"][:]


def test_a_run_says_what_it_was_trained_on(trained: Path) -> None:
    settings = RunFolder(trained).settings(ExperimentConfig)
    assert settings.backbone == "vsepp"
    assert RunFolder(trained).record()["features"]["name"] == "vsepp-0_images"
    assert RunFolder(trained).record()["caption_features"]["name"] == "vsepp-0_captions"


def test_the_changes_of_a_run_are_those_of_its_settings(trained: Path) -> None:
    with h5py.File(trained / "test.h5") as content:
        changed = json.loads(content.attrs["provenance"])["changed_settings"]
    assert "backbone: vsepp_resnet_ft_rv -> vsepp" in changed
    assert not [change for change in changed if change.startswith(("feature", "caption_feature"))]


def test_only_the_map_is_trained(trained: Path) -> None:
    assert {name.split(".")[0] for name in weights(trained)} == {"similarity"}


def test_each_direction_has_the_scores_of_its_condition(trained: Path, run: Path, tmp_path: Path) -> None:
    """Pair by pair, with the target as the condition, from the embeddings of the backbone."""
    images, captions = map(torch.from_numpy, embeddings_of(run, tmp_path))
    (deform,) = load_run(trained, "test", device="cpu").model.similarity.maps
    with torch.no_grad():
        for direction, found in zip(("i2t", "t2i"), scores_of(trained / "test.h5"), strict=True):
            for i, c in ((0, 0), (3, 41), (11, 59), (7, 7)):
                target = captions[c] if direction == "i2t" else images[i]
                mapped = deform(torch.stack([images[i], captions[c]]), target[None])
                assert found[i, c] == pytest.approx(torch.cosine_similarity(*mapped, dim=0).item(), abs=1e-5)
    i2t, t2i = scores_of(trained / "test.h5")
    assert np.abs(i2t - t2i).max() > 1e-3


def test_metrics_are_those_of_both_matrices(trained: Path, tmp_path: Path) -> None:
    command(eval_main, trained / "test.h5", "--out", tmp_path / "r.json")
    i2t, t2i = scores_of(trained / "test.h5")
    image_of = np.repeat(np.arange(12), 5).tolist()
    found = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]
    for direction, of_direction in (("i2t", slow_ranks(i2t, image_of)[0]), ("t2i", slow_ranks(t2i, image_of)[1])):
        for k in (1, 5, 10):
            assert found[direction][f"r{k}"] == pytest.approx(100 * np.mean(np.asarray(of_direction) < k))


def test_before_its_first_step_it_ranks_as_its_backbone(frozen: Path, run: Path, tmp_path: Path) -> None:
    images, captions = embeddings_of(run, tmp_path)
    start = train(frozen, todnet("train.learning_rate=1e-30", "train.epochs=1"), out=tmp_path / "run")
    command(embed_main, start)
    for scores in scores_of(start / "test.h5"):
        np.testing.assert_allclose(scores, images @ captions.T, atol=1e-6)


def test_two_models_are_averaged_direction_by_direction(trained: Path, frozen: Path, tmp_path: Path) -> None:
    other = train(frozen, todnet("model.similarity.condition=query"), seed=1, out=tmp_path / "run")
    command(embed_main, other)
    files = [trained / "test.h5", other / "test.h5"]
    command(eval_main, *files, "--ensemble", "--out", tmp_path / "r.json")
    mean = [sum(pair) / 2 for pair in zip(*map(scores_of, files), strict=True)]
    image_of = np.repeat(np.arange(12), 5).tolist()
    found = json.loads((tmp_path / "r.json").read_text())["protocols"]["full"]
    for direction, of_direction in (("i2t", slow_ranks(mean[0], image_of)[0]), ("t2i", slow_ranks(mean[1], image_of)[1])):
        assert found[direction]["r1"] == pytest.approx(100 * np.mean(np.asarray(of_direction) < 1))


def test_a_text_goes_through_the_backbone_first(trained: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = load_dataset_file(demo).split("test")
    t2i = scores_of(trained / "test.h5")[1]
    lines, _ = printed(capsys, trained, " ".join(images[3].captions[2].tokens), "-k", 4)
    best = np.argsort(-t2i[:, 17])[:4]
    assert [float(line[1]) for line in lines] == pytest.approx(t2i[best, 17], abs=1e-4)
    assert [Path(line[2]).name for line in lines] == [images[row].file for row in best]


def test_so_does_a_photo(trained: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = load_dataset_file(demo)
    i2t = scores_of(trained / "test.h5")[0]
    lines, _ = printed(capsys, trained, dataset.image_path(dataset.split("test")[3]), "-k", 4)
    assert [float(line[1]) for line in lines] == pytest.approx(np.sort(i2t[3])[::-1][:4], abs=2e-3)  # float16 in the cache


def test_the_best_by_the_backbone_s_cosine_are_re_ranked(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, captions = embeddings_of(run, tmp_path)
    with h5py.File(trained / "test.h5") as content:
        np.testing.assert_allclose(content["pooled_images"][:], images, atol=1e-6)
        np.testing.assert_allclose(content["pooled_captions"][:], captions, atol=1e-6)
    command(eval_main, trained / "test.h5", "--rerank", 3, "--rerank", 60, "--out", tmp_path / "r.json")
    few, every = json.loads((tmp_path / "r.json").read_text())["rerank"]
    assert every["lost"]["rsum"] == 0
    near = np.argsort(-(images @ captions.T), axis=0)[:3]
    found = np.mean([c // 5 in near[:, c] for c in range(60)])
    assert few["t2i"]["found"] == pytest.approx(100 * found)
    expected = printed(capsys, trained, "a red square")[0]
    assert printed(capsys, trained, "a red square", "--rerank", 12)[0] == expected


def test_bf16_changes_few_ranks(frozen: Path, tmp_path: Path) -> None:
    run = train(frozen, todnet("train.precision=bf16", "train.epochs=1"), out=tmp_path / "run")
    opened = load_run(run, "test", device="cpu")
    sides = encode(opened.model, opened.split, opened.device)
    image_of = torch.from_numpy(opened.split.pairs.image_of)
    exact, rough = (ranks(opened.model, *sides, image_of, precision) for precision in ("fp32", "bf16"))
    for direction in ("i2t", "t2i"):
        assert np.abs(getattr(exact, direction) - getattr(rough, direction)).mean() < 1


@pytest.mark.slow
@pytest.mark.parametrize("sets", [[], ["model.similarity.transform=mlp", "train.precision=bf16"]])
def test_a_resume_ends_with_the_same_bits(sets: list[str], frozen: Path, tmp_path: Path) -> None:
    identity = ["model.image_encoder=identity", "model.caption_encoder=identity", "caption_feature=vsepp-0_captions"]
    both = [*identity, "model.similarity={name: todnet, width: 8}", *sets]
    train_with_stops(frozen, both, tmp_path / "stopped", [3, 12, 21])
    train(frozen, experiment(*both), out=tmp_path / "whole", extras=Extras(log_negatives=3))
    assert_same(state(tmp_path / "stopped"), state(tmp_path / "whole"))
    assert_same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("sets", [["condition=none"], ["condition=caption"], ["transform=mlp"], ["networks=per_direction"]])
def test_other_forms_are_trained_and_embedded(sets: list[str], frozen: Path, tmp_path: Path) -> None:
    run = train(frozen, todnet("train.epochs=1", *(f"model.similarity.{one}" for one in sets)), out=tmp_path / "run")
    command(embed_main, run)
    with h5py.File(run / "test.h5") as content:
        assert ("scores" in content) == (sets[0] in ("condition=none", "condition=caption"))


def test_the_command_needs_the_images_alone(frozen: Path, tmp_path: Path) -> None:
    arguments = [item for one in [*TOD, "train.epochs=1"] for item in ("--set", one)]
    command(train_main, "--features", frozen, "--experiment", "todnet_vsepp", "--out", tmp_path / "run", *arguments)
    assert RunFolder(tmp_path / "run").record()["caption_features"]["name"] == "vsepp-0_captions"


def test_embeddings_that_do_not_fit_are_refused_in_a_line(
    frozen: Path, cache: Path, positions: Path, tfidf: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    def line(features: Path, *options: object, sets: tuple[str, ...] = ()) -> str:
        settings = [item for one in [*TOD, *sets] for item in ("--set", one)]
        how = ("--experiment", "todnet_vsepp", "--out", tmp_path / "run")
        return fails(train_main, "--features", features, *how, *options, *settings)

    def caches(name: str, *sets: str) -> Path:
        run = train(cache, experiment("train.epochs=1", *sets), seed=1, out=tmp_path / name)
        command(embed_main, run, "--as-features", tmp_path / f"demo_{name}")
        return tmp_path / f"demo_{name}_images.h5"

    other, short, odd = caches("other"), caches("short", "model.dim=8"), caches("odd", "model.dim=5")
    other_captions, short_captions = (path.with_name(path.name.replace("images", "captions")) for path in (other, short))
    assert "not by the same model" in line(frozen, "--caption-features", other_captions)
    assert "not by the same model" in line(frozen, "--caption-features", short_captions)
    assert "images by no run: not by the same model" in line(cache, "--caption-features", other_captions)
    assert "their length is 5" in line(odd)
    assert "ends in" in line(cache, "--caption-features", tfidf)
    assert "not the words of the captions" in line(cache)
    sets_line = line(positions, "--caption-features", tfidf)
    assert "the similarity 'todnet' compares vectors of images, and the image encoder 'identity' makes sets" in sets_line
    other_captions.unlink()
    assert "demo_other_captions.h5: no such feature cache" in line(other)


def test_a_search_refuses_a_backbone_that_changed_or_went(
    own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    backbone, frozen = tmp_path / "backbone", own_cache.with_name("demo_x_images.h5")
    train(own_cache, experiment("train.epochs=1"), out=backbone)
    command(embed_main, backbone, "--as-features", own_cache.with_name("demo_x"))
    own = train(frozen, todnet("train.epochs=1"), out=tmp_path / "run")
    assert len(printed(capsys, own, "a disc")[0]) == 10
    train(own_cache, experiment("train.epochs=1"), seed=1, out=backbone, existing=Existing(overwrite=True))
    assert "has other weights than those that made" in fails(search_main, own, "a disc")
    shutil.rmtree(backbone)
    assert "backbone: not a run folder" in fails(search_main, own, "a disc")


def test_a_search_needs_the_model_that_made_the_embeddings(
    run: Path, demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    files = []
    for split in ("train", "val", "test"):
        files.append(tmp_path / f"{split}.h5")
        command(embed_main, run, "--split", split, "--out", files[-1])
    command(embed_main, *files, "--as-features", tmp_path / "demo_theirs")
    own = train(tmp_path / "demo_theirs_images.h5", todnet("train.epochs=1"), out=tmp_path / "run")
    command(embed_main, own)
    line = fails(search_main, own, "a disc")
    assert "demo_theirs_captions.h5 was made from files of embeddings, without the model" in line


def test_settings_of_the_paper_are_the_preset_s() -> None:
    found = load_experiment("todnet_vsepp")
    assert found.model.similarity == TodNetSettings()
    assert (found.model.image_encoder.name, found.model.caption_encoder and found.model.caption_encoder.name) == (
        "identity",
    ) * 2
    assert (found.train.epochs, found.train.decay_after, found.train.decay, found.train.batch_size) == (30, 15, 0.1, 128)
    assert (found.loss.name, found.loss.margin, found.train.validate_fold, found.seeds) == ("max", 0.2, 1000, [0, 1, 2])
