from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.training.conftest import COMMAND, Fails, Log, experiment, options, state, table
from vse.pipeline.errors import UserError
from vse.training.cli import train_main
from vse.training.run.folder import RunFolder
from vse.training.training import train

INFONCE = "loss={name: infonce, learned: true, same_image: positive, learning_rate: 0.01}"
SIGMOID = "loss={name: sigmoid, learning_rate: 0.01}"


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in table(run)]


def test_learned_values_are_in_the_files_of_a_run(cache: Path, tmp_path: Path, caplog: Log, run: Path) -> None:
    with caplog.at_level(logging.INFO):
        learning = train(cache, experiment(SIGMOID), out=tmp_path / "run")
    temperatures, biases = column(learning, "temperature"), column(learning, "bias")
    assert len({0.1, *temperatures}) == len({-10, *biases}) == 4, "they are learned in every epoch"
    learned = json.loads((learning / "run.json").read_text())["learned"]
    assert learned == pytest.approx({"temperature": temperatures[-1], "bias": biases[-1]}, abs=1e-5)
    assert f"temperature {temperatures[0]:.4g}, bias {biases[0]:.4g}, " in caplog.text
    assert f"learned values of the loss: temperature {temperatures[-1]:.4g}, bias {biases[-1]:.4g}" in caplog.text
    assert "temperature" not in table(run)[0]
    assert "learned" not in json.loads((run / "run.json").read_text())
    assert "loss_weights" not in state(run)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_has_them_in_float32_and_the_model_does_not(precision: str, cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(SIGMOID, f"train.precision={precision}", "train.epochs=1"), out=tmp_path / "run")
    saved = state(run)
    dtypes = {name: weight.dtype for name, weight in saved["loss_weights"].items()}
    assert dtypes == {"log_scale": torch.float32, "bias": torch.float32}
    assert not any("log_scale" in name for name in RunFolder(run).read_best_weights())


def test_they_have_a_learning_rate_of_their_own_that_decays_and_no_weight_decay(cache: Path, tmp_path: Path) -> None:
    run = train(cache, experiment(INFONCE, "train.weight_decay=0.1", "train.epochs=3"), out=tmp_path / "run")
    group = state(run)["optimizer"]["param_groups"][-1]
    assert (len(group["params"]), group["weight_decay"]) == (1, 0.0)
    assert group["lr"] == pytest.approx(0.01 * 0.1), "after two epochs"
    usual = train(cache, experiment(INFONCE, "loss.learning_rate=null", "train.epochs=1"), out=tmp_path / "usual")
    assert state(usual)["optimizer"]["param_groups"][-1]["lr"] == pytest.approx(2e-4)


def test_the_temperature_of_infonce_is_held_at_its_least(cache: Path, tmp_path: Path) -> None:
    sets = ("loss.temperature=5", "loss.learning_rate=0.05", "train.learning_rate=0.02", "train.decay=1")
    configs = {least: experiment(INFONCE, *sets, f"loss.least_temperature={least}") for least in ("0.01", "4.5")}
    runs = (train(cache, config, out=tmp_path / least) for least, config in configs.items())
    free, held = (column(run, "temperature") for run in runs)
    assert free[-1] < 4
    assert held[-1] == pytest.approx(4.5)


def test_blocks_list_no_hard_negatives_and_a_warm_up_learns_nothing(cache: Path, tmp_path: Path, fails: Fails) -> None:
    run = train(cache, experiment(INFONCE, "warmup.epochs=2"), out=tmp_path / "run")
    first, second, third = column(run, "temperature")
    assert first == second == pytest.approx(0.07)
    assert third != second
    chosen = [*COMMAND, "--set", INFONCE, "--set", "loss.block=8", "--log-negatives", 3]
    message = fails(train_main, "--features", cache, "--out", tmp_path / "listed", *chosen)
    assert "--log-negatives lists what a ranking loss finds hardest; infonce with loss.block keeps no scores" in message


@pytest.mark.parametrize(("loss", "size", "steps"), [(INFONCE, 32768, 1), (SIGMOID, 200, 2)])
def test_a_batch_has_what_is_left_of_the_data(loss: str, size: int, steps: int, cache: Path, tmp_path: Path) -> None:
    sets = (f"train.batch_size={size}", "loss.block=64", "train.epochs=2", "train.learning_rate=1e-3")
    run = train(cache, experiment(loss, *sets), out=tmp_path / "run")
    assert int(state(run)["optimizer"]["state"][0]["step"]) == 2 * steps
    assert column(run, "loss")[-1] < column(run, "loss")[0]


REFUSED = {
    "model.similarity=network": "loss.block compares single vectors, not by network, which scores pair by pair",
    "model.similarity=scan": "loss.block compares single vectors, not by scan, which scores pair by pair",
    "train.compile=true": "loss.block cannot be combined with train.compile",
    "loss.lambda4=0.1": "loss.block cannot be combined with lambda3 and lambda4",
    "warmup.epochs=1": "loss.block bounds no memory of the warm-up loss sum; warmup.epochs: 0 leaves it out",
    "adversary=ace": "loss.block cannot be combined with an adversary",
    "loss.temperature=0.005": "temperature 0.005 is below least_temperature 0.01",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_does_not_go_with_blocks_is_refused_in_a_line(setting: str, cache: Path, tmp_path: Path, fails: Fails) -> None:
    chosen = [*COMMAND, *options(INFONCE, "loss.block=8", setting)]
    message = fails(train_main, "--features", cache, "--out", tmp_path / "run", *chosen)
    assert REFUSED[setting] in message
    assert len(message.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("loss", "cure"),
    [("sigmoid", "learned: false"), ("{name: infonce, block: 3}", "block: null"), (INFONCE[5:], "learned: false")],
)
def test_phrases_are_matched_by_what_has_nothing_to_learn(loss: str, cure: str) -> None:
    with pytest.raises(UserError, match=f"with phrases the loss (sigmoid|infonce) requires {cure}"):
        experiment(f"loss={loss}", name="phrase_embedding_effnet")
