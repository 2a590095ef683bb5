from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.training.conftest import (
    COMMAND,
    Capture,
    Fails,
    assert_same,
    done,
    experiment,
    options,
    printed,
    state,
    train_with_stops,
)
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.eval.ranking.ranks import ranks_from_blocks
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.cli import embed_main, search_main, train_main
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.models.similarities.todnet import TodNetSettings
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers.encode import encode_split
from vse.training.training import train
from vse.training.use.embed import embed_split
from vse.training.use.model import load_run

TOD = ["train.restval=false", "train.learning_rate=1e-2", "model.similarity.width=8"]


def todnet(*sets: str) -> ExperimentConfig:
    return experiment(*TOD, *sets, name="todnet_vsepp")


@pytest.fixture(scope="module")
def frozen(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the images' embeddings by a run of VSE++; that of captions lies beside it. Read only."""
    out = tmp_path_factory.mktemp("work") / "features" / "demo_vsepp-0"
    out.parent.mkdir()
    done(embed_main, run, "--as-features", out)
    return out.with_name("demo_vsepp-0_images.h5")


@pytest.fixture(scope="module")
def trained(frozen: Path) -> Path:
    """A TOD-Net on that, with the scores of the test split. Read only."""
    out = train(frozen, todnet(), out=frozen.parent.parent / "runs" / "demo_todnet_vsepp" / "seed-0")
    done(embed_main, out)
    return out


def scores_of(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with h5py.File(file) as content:
        return content["scores_i2t"][:], content["scores_t2i"][:]


def embeddings_of(run: Path, tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    done(embed_main, run, "--out", tmp_path / "backbone.h5")
    with h5py.File(tmp_path / "backbone.h5") as content:
        return content["images"][:], content["captions"][:]


def test_a_run_records_its_features_and_its_changes_and_has_the_weights_of_its_map_alone(trained: Path) -> None:
    settings = RunFolder(trained).read_settings(ExperimentConfig)
    assert settings.backbone == "vsepp"
    assert RunFolder(trained).read_record()["features"]["name"] == "vsepp-0_images"
    assert RunFolder(trained).read_record()["caption_features"]["name"] == "vsepp-0_captions"
    with h5py.File(trained / "test.h5") as content:
        changed = json.loads(content.attrs["provenance"])["changed_settings"]
    assert "backbone: vsepp_resnet_ft_rv -> vsepp" in changed
    assert not [change for change in changed if change.startswith(("feature", "caption_feature"))]
    assert {name.split(".")[0] for name in RunFolder(trained).read_best_weights()} == {"similarity"}


def test_each_direction_has_the_scores_of_its_condition(trained: Path, run: Path, tmp_path: Path) -> None:
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


def test_a_shortlist_has_the_ranks_of_all_pairs_and_its_result_says_so(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    done(embed_main, trained, "--shortlist", "--out", tmp_path / "shortlist.h5")
    complete, shortlist = (
        ranks_from_blocks(*read_embeddings(file).score_blocks()) for file in (trained / "test.h5", tmp_path / "shortlist.h5")
    )
    np.testing.assert_array_equal(shortlist.i2t, complete.i2t)
    np.testing.assert_array_equal(shortlist.t2i, complete.t2i)
    done(eval_main, tmp_path / "shortlist.h5", "--out", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["provenance"]["shortlist"] == {"i2t": 1.0, "t2i": 1.0}  # a small set is scored completely
    assert result["provenance"]["changed_settings"][-1] == "pairs: all -> shortlist"
    assert "map" not in result["protocols"]["full"]["i2t"]


@pytest.mark.parametrize("option", [("--rerank", "5"), ("--correct", "mean"), ("--trec", "trec")])
def test_an_option_that_needs_all_scores_refuses_a_shortlist(
    option: tuple[str, str], trained: Path, tmp_path: Path, fails: Fails
) -> None:
    done(embed_main, trained, "--shortlist", "--out", tmp_path / "shortlist.h5")
    assert f"{option[0]} needs all scores" in fails(eval_main, tmp_path / "shortlist.h5", *option)


def test_models_without_slow_pairs_have_no_shortlist(run: Path, fails: Fails) -> None:
    assert "--shortlist is for a TOD-Net" in fails(embed_main, run, "--shortlist")


def test_a_text_or_a_photo_goes_through_the_backbone_first(trained: Path, demo: Path, capsys: Capture) -> None:
    dataset = load_dataset_file(demo)
    images, (i2t, t2i) = dataset.split("test"), scores_of(trained / "test.h5")
    lines, _ = printed(capsys, trained, " ".join(images[3].captions[2].tokens), "-k", 4)
    best = np.argsort(-t2i[:, 17])[:4]
    assert [float(line[1]) for line in lines] == pytest.approx(t2i[best, 17], abs=1e-4)
    assert [Path(line[2]).name for line in lines] == [images[row].file for row in best]
    lines, _ = printed(capsys, trained, dataset.image_path(dataset.split("test")[3]), "-k", 4)
    assert [float(line[1]) for line in lines] == pytest.approx(np.sort(i2t[3])[::-1][:4], abs=2e-3)  # float16 in the cache


def test_the_best_by_the_backbone_s_cosine_are_re_ranked(trained: Path, run: Path, tmp_path: Path, capsys: Capture) -> None:
    images, captions = embeddings_of(run, tmp_path)
    with h5py.File(trained / "test.h5") as content:
        np.testing.assert_allclose(content["pooled_images"][:], images, atol=1e-6)
        np.testing.assert_allclose(content["pooled_captions"][:], captions, atol=1e-6)
    done(eval_main, trained / "test.h5", "--rerank", 3, "--rerank", 60, "--out", tmp_path / "r.json")
    few, every = json.loads((tmp_path / "r.json").read_text())["rerank"]
    assert every["lost"]["rsum"] == 0
    near = np.argsort(-(images @ captions.T), axis=0)[:3]
    found = np.mean([c // 5 in near[:, c] for c in range(60)])
    assert few["t2i"]["found"] == pytest.approx(100 * found)
    expected = printed(capsys, trained, "a red square")[0]
    assert printed(capsys, trained, "a red square", "--rerank", 12)[0] == expected


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("sets", [[], ["model.similarity.transform=mlp", "train.precision=bf16"]])
def test_a_resume_ends_with_the_same_bits(sets: list[str], frozen: Path, tmp_path: Path) -> None:
    identity = ["model.image_encoder=identity", "model.caption_encoder=identity", "caption_feature=vsepp-0_captions"]
    both = [*identity, "model.similarity={name: todnet, width: 8}", *sets]
    train_with_stops(frozen, experiment(*both), tmp_path / "stopped", [3, 12, 21])
    train(frozen, experiment(*both), out=tmp_path / "whole")
    assert_same(state(tmp_path / "stopped"), state(tmp_path / "whole"))


@pytest.mark.parametrize("sets", [["condition=caption"], ["transform=mlp", "networks=per_direction"]])
def test_other_forms_are_trained_and_embedded(sets: list[str], frozen: Path, tmp_path: Path) -> None:
    run = train(frozen, todnet("train.epochs=1", *(f"model.similarity.{one}" for one in sets)), out=tmp_path / "run")
    done(embed_main, run)
    with h5py.File(run / "test.h5") as content:
        assert ("scores" in content) == (sets == ["condition=caption"])


def test_misfits_are_one_line(frozen: Path, cache: Path, positions: Path, tfidf: Path, tmp_path: Path, fails: Fails) -> None:
    def line(features: Path, *further: object, sets: tuple[str, ...] = ()) -> str:
        how = ("--experiment", "todnet_vsepp", "--out", tmp_path / "run")
        return fails(train_main, "--features", features, *how, *further, *options(*TOD, *sets))

    def caches(name: str, *sets: str) -> Path:
        run = train(cache, experiment("train.epochs=1", *sets), seed=1, out=tmp_path / name)
        done(embed_main, run, "--as-features", tmp_path / f"demo_{name}")
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
    assert "'todnet' requires one vector per image, but the image encoder 'identity' computes several vectors" in sets_line
    other_captions.unlink()
    assert "demo_other_captions.h5: no such feature cache" in line(other)


def test_a_search_needs_the_backbone_as_it_was(own_cache: Path, tmp_path: Path, capsys: Capture, fails: Fails) -> None:
    backbone, frozen = tmp_path / "backbone", own_cache.with_name("demo_x_images.h5")
    train(own_cache, experiment("train.epochs=1"), out=backbone)
    done(embed_main, backbone, "--as-features", own_cache.with_name("demo_x"))
    own = train(frozen, todnet("train.epochs=1"), out=tmp_path / "run")
    assert len(printed(capsys, own, "a disc")[0]) == 10
    train(own_cache, experiment("train.epochs=1"), seed=1, out=backbone, options=TrainOptions(overwrite=True))
    assert "has other weights than those that made" in fails(search_main, own, "a disc")
    shutil.rmtree(backbone)
    assert "backbone: not a run folder" in fails(search_main, own, "a disc")


def test_a_search_needs_the_model_that_made_the_embeddings(run: Path, demo: Path, tmp_path: Path, fails: Fails) -> None:
    files = []
    for split in ("train", "val", "test"):
        files.append(tmp_path / f"{split}.h5")
        done(embed_main, run, "--split", split, "--out", files[-1])
    done(embed_main, *files, "--as-features", tmp_path / "demo_theirs")
    own = train(tmp_path / "demo_theirs_images.h5", todnet("train.epochs=1"), out=tmp_path / "run")
    done(embed_main, own)
    line = fails(search_main, own, "a disc")
    assert "demo_theirs_captions.h5 was made from files of embeddings, without the model" in line


def test_settings_of_the_paper_are_the_preset_s() -> None:
    found = load_experiment("todnet_vsepp")
    assert found.model.similarity == TodNetSettings()
    assert (found.model.image_encoder.name, found.model.caption_encoder.name) == ("identity", "identity")
    assert (found.train.epochs, found.train.decay_after, found.train.decay, found.train.batch_size) == (30, 15, 0.1, 128)
    assert (found.loss.name, found.loss.margin, found.train.validate_fold, found.seeds) == ("max", 0.2, 1000, [0, 1, 2])


NETWORK = ["model.similarity={name: network, widths: [8, 4]}", "loss=logistic", "caption_feature=tfidf"]
NETWORK += ["model.image_encoder={name: branch, widths: [12, 6]}", "train.learning_rate=0.01"]
NETWORK += ["model.caption_encoder={name: branch, widths: [10, 6]}"]


@pytest.fixture(scope="module")
def network(cache: Path, tfidf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A similarity network on cached captions of the demo. Read only."""
    return train(cache, experiment(*NETWORK), out=tmp_path_factory.mktemp("runs") / "network")


def test_the_file_of_a_split_has_scores_and_captions(network: Path, tmp_path: Path) -> None:
    with h5py.File(embed_split(network, tmp_path / "test.h5")) as file:
        content = {name: item[()] for name, item in file.items()}
    pooled, hashes = {"pooled_images", "pooled_captions"}, {"photo_hashes", "caption_hashes"}
    assert content.keys() == {"image_ids", "caption_ids", "caption_image_ids", "scores", "captions", *pooled, *hashes}
    assert content["scores"].shape == (12, 60)
    opened = load_run(network, "test", device="cpu")
    assert opened.model.scores_every_pair
    images, captions = (side.unpack_all() for side in encode_split(opened.model, opened.split, opened.device))
    np.testing.assert_array_equal(content["captions"], captions[0])
    np.testing.assert_allclose(np.linalg.norm(content["captions"], axis=1), 1, rtol=1e-5)
    with torch.inference_mode():
        slow = opened.model.similarity(images, captions)
    np.testing.assert_allclose(content["scores"], slow, rtol=1e-4, atol=1e-6)


def test_unknown_words_and_negatives_are_refused(
    network: Path, fails: Fails, cache: Path, tfidf: Path, tmp_path: Path
) -> None:
    assert "'qwrtz zrtwq': none of its words is known to 'tfidf'" in fails(search_main, network, "qwrtz zrtwq")
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, *options(*NETWORK), "--log-negatives", 3]
    line = fails(train_main, *arguments)
    assert "--log-negatives lists what a ranking loss finds hardest; logistic ranks nothing" in line
    assert not (tmp_path / "run").exists()
