from __future__ import annotations

import csv
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from tests.conftest import TINY_FEATURE
from tests.train.conftest import COMMAND, experiment
from vse.features.box_extractor import BoxesExtractor
from vse.features.cnn_extractor import CnnExtractor
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.boxes import BoxesConfig
from vse.features.shards import shards_folder
from vse.train.cli import embed_main, train_main
from vse.train.run.folder import RunFolder
from vse.train.solvers import adam as trainer_module
from vse.train.training import train

BOXES = BoxesConfig(
    name="x",
    model="squeezenet1_1",
    weights="random",
    map="features.1",
    layer="features.2",
    pool=8,
    shorter=32,
    longer=48,
    n_boxes=4,
)


def weights(run: Path, file: str = "best.safetensors") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / file)


def test_a_run_leaves_all_its_files(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    files = {path.name for path in run.iterdir()}
    assert files == {"config.yaml", "vocab.json", "metrics.csv", "best.safetensors", "last.ckpt", "run.json"}
    record = RunFolder(run).record()
    assert (record["state"], record["epochs"], record["seed"], record["dataset"]) == ("finished", 3, 0, "demo")
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 3
    rows = table(run)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    best = max(rows, key=lambda row: float(row["rsum"]))
    assert (float(best["epoch"]), float(best["rsum"])) == (record["best_epoch"], record["best_rsum"])


def test_the_learning_rate_falls_to_a_tenth(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    rates = [float(row["learning_rate"]) for row in table(run)]
    assert rates == pytest.approx([2e-4, 2e-4, 2e-5])


def test_a_second_call_of_a_finished_run_changes_nothing(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
    train(cache, experiment(), out=run)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()} == before


def test_the_same_seed_gives_the_same_weights_and_another_does_not(cache: Path, tmp_path: Path) -> None:
    a, b = (weights(train(cache, experiment(), 1, tmp_path / name)) for name in "ab")
    other = weights(train(cache, experiment(), 2, tmp_path / "c"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["image_encoder.linear.weight"], other["image_encoder.linear.weight"])


def test_training_fits_the_training_pairs(cache: Path, tmp_path: Path) -> None:
    sets = ("train.epochs=12", "train.learning_rate=0.01", "train.decay_after=12")
    run = train(cache, experiment(*sets, name="vse0"), out=tmp_path / "run")
    losses = [float(row["loss"]) for row in table(run)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_warm_up_uses_another_loss_for_the_first_epochs(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment("warmup.epochs=2"), out=tmp_path / "run")
    losses = [float(row["loss"]) for row in table(run)]
    assert losses[1] > 5 * losses[2], "a sum of 31 hinges each direction, then a maximum"


def table(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))


class Stop(Exception):
    pass


@pytest.mark.parametrize("epochs_done", [0, 1, 2, 3])
def test_resuming_after_any_epoch_is_bit_exact(
    epochs_done: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(cache, experiment(), out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        steps = iter(range(10**6))
        real = trainer_module.Trainer.step

        def step(self: trainer_module.Trainer, *arguments: object) -> tuple[float, float]:
            if next(steps) == 8 * epochs_done + 3:  # in the middle of the next epoch
                raise Stop
            return real(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(trainer_module.Trainer, "step", step)
        with suppress(Stop):
            train(cache, experiment(), out=tmp_path / "cut")
    resumed = train(cache, experiment(), out=tmp_path / "cut", resume=True)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name])
    final, again = RunFolder(whole).checkpoint(), RunFolder(resumed).checkpoint()
    assert all(torch.equal(final["model"][name], again["model"][name]) for name in final["model"])


@pytest.mark.slow
def test_killed_ten_times_then_resumed_gives_the_same_weights(cache: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments of the training, each time resumed; the final weights must not show it."""
    chance = random.Random(1)

    def command(folder: str) -> list[str]:
        arguments = ["--features", str(cache), "--out", str(tmp_path / folder), "--resume", "--threads", "1", *COMMAND]
        arguments += ["--set", "train.epochs=25"]
        return [sys.executable, "-c", "from vse.train.cli import train_main; train_main()", *arguments]

    def epochs() -> int:
        table = tmp_path / "killed" / "metrics.csv"
        return len(table.read_text().splitlines()) if table.exists() else 0

    for _ in range(10):
        process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        enough = epochs() + chance.randrange(3)
        while process.poll() is None and epochs() <= enough:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=chance.uniform(0.005, 0.05))
        process.kill()
        process.communicate()
    for folder in ("killed", "whole"):
        subprocess.run(command(folder), check=True, capture_output=True)
    killed, whole = (RunFolder(tmp_path / folder) for folder in ("killed", "whole"))
    a, b = killed.checkpoint(), whole.checkpoint()
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in b["model"])
    assert killed.best_file.read_bytes() == whole.best_file.read_bytes()


def test_other_settings_do_not_overwrite_a_run(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    before = weights(run)
    line = fails(train_main, "--features", cache, "--out", run, *COMMAND, "--set", "loss.margin=0.3")
    assert "loss.margin: 0.2 -> 0.3" in line
    assert "--overwrite" in line
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


COLLAPSED = ["train.learning_rate=1e-9", "loss.margin=500", "train.batch_size=2"]


def test_a_collapse_for_a_whole_epoch_stops_with_the_cure(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    sets = [argument for setting in COLLAPSED for argument in ("--set", setting)]
    line = fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, *sets)
    assert "epoch 1: the loss sat at its collapse value" in line
    assert "2 x batch x margin for the max" in line
    assert "--set warmup.epochs=1" in line


def test_a_collapse_can_be_told_only(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = train(cache, experiment(*COLLAPSED, "train.on_collapse=warn"), out=tmp_path / "run")
    assert "the loss sat at its collapse value" in caplog.text
    assert RunFolder(run).record()["state"] == "finished"


def test_a_cache_of_another_data_set_is_refused(
    cache: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    own_demo.write_text(own_demo.read_text().replace('"dataset": "demo"', '"dataset": "f8k"', 1))
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", tmp_path / "run")
    assert "holds features of 'demo'" in line
    assert not (tmp_path / "run").exists()


def test_captions_of_images_without_features_are_named(
    cache: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    text = own_demo.read_text().replace('"imgid": 7,', '"imgid": 7007,')
    own_demo.write_text(text)
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", tmp_path / "run")
    assert "1 of 48 images have no features, the first is id 7007" in line
    assert not (tmp_path / "run").exists()


POSITIONS = {"positions": True, "layer": "features.2", "grid": 2}


@pytest.mark.parametrize(("what", "said"), [("positions", "66 image rows of 4 x 64"), ("regions", "regions of 64")])
def test_features_that_are_not_one_vector_per_image_are_refused(
    what: str, said: str, demo: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    positions = TINY_FEATURE.model_copy(update=POSITIONS)
    out = tmp_path / "f" / "demo_x.h5"
    extract_shards(demo, BoxesExtractor(BOXES) if what == "regions" else CnnExtractor(positions), out, 1)
    line = fails(train_main, "--features", merge(demo, out, 1), "--out", tmp_path / "run")
    assert f"{said} float16; one vector per image, or a bank of them from crops, is needed" in line


def test_a_nan_in_the_features_stops_with_its_id(own_cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    shard = sorted(shards_folder(own_cache).glob("*.h5"))[0]
    with h5py.File(shard, "r+") as file:
        file["features"][4, 1] = np.nan
    line = fails(train_main, "--features", own_cache, "--out", tmp_path / "run", *COMMAND)
    assert "the features of id 4 are not finite" in line


def test_bad_usage_is_one_line(cache: Path, tmp_path: Path, own_cache: Path, fails: Callable[..., str]) -> None:
    out = ["--out", tmp_path / "run"]
    assert "no such feature cache" in fails(train_main, "--features", tmp_path / "x.h5")
    assert "did you mean 'vsepp'" in fails(train_main, "--features", cache, *out, "--experiment", "vspp")
    assert "did you mean 'loss.margin'" in fails(train_main, "--features", cache, *out, "--set", "loss.marign=1")
    assert "did you mean 'max'" in fails(train_main, "--features", cache, *out, "--set", "loss.name=maks")
    assert "Missing option '--features'" in fails(train_main)
    sorted(shards_folder(own_cache).glob("*.h5"))[1].unlink()
    assert "this shard is missing" in fails(train_main, "--features", own_cache, *out)
    assert not (tmp_path / "run").exists()


def test_embeddings_are_those_of_the_best_weights(cache: Path, demo: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
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


def test_a_run_is_not_embedded_with_another_cache(cache: Path, demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    other = tmp_path / "demo_tiny.h5"
    extract_shards(demo, CnnExtractor(TINY_FEATURE.model_copy(update={"grid": 1})), other, 2)
    merge(demo, other, 2)
    assert "is not the cache that" in fails(embed_main, run, "--features", other)
    assert "not a run folder" in fails(embed_main, tmp_path / "nowhere")
    assert "no images in split 'tset' (did you mean 'test'?" in fails(embed_main, run, "--split", "tset")


@pytest.mark.parametrize("file", ["config.yaml", "last.ckpt", "run.json"])
@pytest.mark.parametrize("content", [b"", b"[junk", b"[]"])
def test_a_broken_run_is_named_and_can_be_overwritten(
    file: str, content: bytes, cache: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run")
    if file == "last.ckpt":
        (run / "run.json").unlink()
    (run / file).write_bytes(content)
    arguments = ["--features", cache, "--out", run, *COMMAND, "--set", "train.epochs=1"]
    assert file in fails(train_main, *arguments, "--resume")
    with pytest.raises(SystemExit) as stop:
        train_main([str(a) for a in [*arguments, "--overwrite"]])
    assert stop.value.code == 0


def test_broken_weights_are_named(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run")
    (run / "best.safetensors").write_bytes(b"junk")
    assert "not readable weights" in fails(embed_main, run)


def test_a_lost_record_does_not_cost_the_checkpoint(cache: Path, tmp_path: Path) -> None:
    """Snakemake deletes run.json before it starts a job again."""
    run = train(cache, experiment(), out=tmp_path / "run")
    before = weights(run)
    (run / "run.json").unlink()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "step", lambda *_: calls.append(1))
        train(cache, experiment(), out=run, resume=True, overwrite=True)
    assert not calls
    assert RunFolder(run).record()["state"] == "finished"
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_a_margin_of_zero_trains(cache: Path, tmp_path: Path) -> None:
    train(cache, experiment("loss.margin=0", "train.epochs=1"), out=tmp_path / "run")


def test_other_captions_are_another_run(cache: Path, own_demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment(), out=tmp_path / "run")
    own_demo.write_text(own_demo.read_text().replace("square", "quadrangle"))
    line = fails(train_main, "--features", cache, "--captions", own_demo, "--out", run, "--resume", *COMMAND)
    assert "captions_sha256" in line


def test_an_unknown_device_is_one_line(cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "--device foo: not usable here" in fails(
        train_main, "--features", cache, "--out", tmp_path / "r", "--device", "foo"
    )


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(cache: Path, tmp_path: Path) -> None:
    """No file of this process may grow beyond 20,000 bytes, which the system reports like a full disk: in the write."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    arguments = ["--features", str(cache), "--out", str(tmp_path / "run"), *COMMAND, "--set", "model.dim=64"]
    command = [sys.executable, "-c", limit + "from vse.train.cli import train_main; train_main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"vse-train: error: cannot write {tmp_path}/run/best.safetensors: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "vocab.json", "run.json"}
