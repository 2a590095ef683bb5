from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from tests.training.conftest import COMMAND, Fails, Patch, done, experiment, options
from vse.pipeline.errors import UserError
from vse.pipeline.presets import own_code
from vse.pipeline.presets.own_code import CodeNotAllowed, allow_own_code
from vse.training.cli import embed_main, search_main, train_main
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.losses.hinges import MaxOfHinges
from vse.training.losses.ranking import RankingLoss
from vse.training.run.folder import RunFolder

FUNCTION = '''
import torch

def hinges(scores, positives, negatives, margin, sharpness: float = 1.0):
    """The hinges of all negatives, to a power."""
    right = scores.gather(1, positives[:, None])
    costs = (margin - right + scores).clamp(min=0).masked_fill(~negatives, 0)
    return costs.pow(sharpness).sum()
'''
CLASS = '''
from __future__ import annotations
from typing import Literal
from pydantic import Field
from vse.training.losses.hinges import MaxOfHinges

class Half(MaxOfHinges):
    """Half of the max of hinges."""
    name: Literal["half"] = "half"
    share: float = Field(0.5, gt=0)

    def cost(self, scores, positives, negatives):
        return self.share * super().cost(scores, positives, negatives)
'''
OTHERS = '''
from typing import ClassVar
import numpy as np
from torch import nn
from vse.training.data.samplers import Sampler
from vse.training.kinds import InputKind
from vse.training.models.encoders.base import Encoder, EncoderSettings
from vse.training.models.similarities.vectors import CosineSettings, CosineSimilarity

class InOrder(Sampler):
    """All pairs as they come."""
    def batches(self, image_indices, batch_size, rng):
        return [part for part in np.array_split(np.arange(len(image_indices)), max(1, len(image_indices) // batch_size))]

class Twice(CosineSettings):
    """Two maps, one after the other."""

class Tanh(EncoderSettings):
    """A linear map and a tanh."""
    input_kinds: ClassVar = (InputKind.VECTORS,)
    bias: bool = True
    def build(self, sizes):
        return _Tanh(sizes.input_dim, sizes.dim, self.bias)

class _Tanh(Encoder):
    def __init__(self, n_in, dim, bias):
        super().__init__()
        self.dim, self.layer = dim, nn.Linear(n_in, dim, bias=bias)
    def forward(self, vectors):
        return (self.layer(vectors).tanh(),)
'''
CRIES = """
from pathlib import Path
Path("was_run").write_text("")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The working folder, in which a user's own files lie."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@contextmanager
def as_if_new() -> Iterator[None]:
    """A process in which no code has run yet."""
    before = dict(own_code._LOADED_CODE)
    own_code._LOADED_CODE.clear()
    try:
        yield
    finally:
        own_code._LOADED_CODE.update(before)


def test_a_plain_function_is_a_loss_whose_further_parameters_are_settings(folder: Path) -> None:
    (folder / "my_loss.py").write_text(FUNCTION)
    loss = experiment("loss.name=my_loss.py:hinges", "loss.sharpness=2", "loss.margin=0.5").loss
    assert isinstance(loss, RankingLoss)
    scores = torch.tensor([[0.9, 0.8], [0.1, 0.3]])
    cost = loss.cost(scores, torch.tensor([0, 1]), torch.tensor([[False, True], [True, False]]))
    assert cost.item() == pytest.approx((0.5 - 0.9 + 0.8) ** 2 + (0.5 - 0.3 + 0.1) ** 2)
    assert loss.model_dump()["sharpness"] == 2
    assert loss.name == "my_loss.py:hinges"


def test_a_class_is_a_loss_with_its_settings(folder: Path) -> None:
    (folder / "my_loss.py").write_text(CLASS)
    loss = experiment("loss=my_loss.py:Half", "loss.share=0.25").loss
    scores, positives, negatives = torch.rand(3, 3), torch.arange(3), ~torch.eye(3, dtype=torch.bool)
    assert isinstance(loss, MaxOfHinges)
    expected = 0.25 * MaxOfHinges().cost(scores, positives, negatives)
    torch.testing.assert_close(loss.cost(scores, positives, negatives), expected)
    dotted = experiment("loss=vse.training.losses.hinges:MaxOfHinges").loss
    assert (type(dotted).__name__, dotted.name) == ("MaxOfHinges", "vse.training.losses.hinges:MaxOfHinges")
    with pytest.raises(UserError, match=r"unknown setting 'loss\.shares' .did you mean 'loss\.share'"):
        experiment("loss=my_loss.py:Half", "loss.shares=0.25")


def test_samplers_similarities_and_encoders_of_ones_own_train_and_embed(cache: Path, folder: Path) -> None:
    (folder / "mine.py").write_text(OTHERS)
    (folder / "my_loss.py").write_text(FUNCTION)
    parts = {
        "loss": "my_loss.py:hinges",
        "train.sampling": "mine.py:InOrder",
        "model.similarity": "mine.py:Twice",
        "model.image_encoder": "{name: mine.py:Tanh, bias: false}",
    }
    sets = options(*(f"{key}={value}" for key, value in parts.items()))
    done(train_main, "--features", cache, "--out", "run", *COMMAND, *sets)
    copies = sorted(path.name for path in (folder / "run/code").iterdir())
    assert [name.rpartition("-")[0] for name in copies] == ["mine", "my_loss"]
    settings = yaml.safe_load((folder / "run/config.yaml").read_text())
    assert settings["model"]["image_encoder"]["name"] == "mine.py:Tanh"
    assert settings["model"]["image_encoder"]["bias"] is False
    record = json.loads((folder / "run/run.json").read_text())
    assert record["state"] == "finished"
    assert record["files"][copies[1]] == settings["loss"]["code_sha256"]
    done(embed_main, "run")
    done(train_main, "--features", cache, "--out", "run", *COMMAND, *sets, "--resume")


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a loss of somebody's own. Read only."""
    folder = tmp_path_factory.mktemp("theirs")
    loss = folder / "their_loss.py"
    loss.write_text(FUNCTION + CRIES)
    before = Path.cwd()
    os.chdir(folder)
    try:
        done(train_main, "--features", cache, "--out", "run", *COMMAND, "--set", "loss=their_loss.py:hinges")
    finally:
        os.chdir(before)
    (folder / "was_run").unlink()
    return folder


def test_a_run_that_names_code_does_not_run_it_in_silence(trained: Path, folder: Path, fails: Fails) -> None:
    run = trained / "run"
    with as_if_new():
        for main, *further in ((embed_main,), (search_main, "a disc")):
            message = fails(main, run, *further)
            assert "was made with code outside of the package, their_loss.py:hinges" in message
            assert "--allow-code" in message
        assert not (folder / "was_run").exists()
        done(embed_main, run, "--out", "test.h5", "--allow-code")
        assert (folder / "was_run").exists()


def test_a_run_is_opened_where_the_file_was_not_but_not_with_another_copy(trained: Path, folder: Path, fails: Fails) -> None:
    shutil.copytree(trained / "run", trained / "moved")
    (trained / "their_loss.py").rename(trained / "elsewhere.py")
    try:
        with as_if_new():
            done(search_main, trained / "moved", "a disc", "--allow-code")
    finally:
        (trained / "elsewhere.py").rename(trained / "their_loss.py")
    (folder / "was_run").unlink()
    shutil.copytree(trained / "run", folder / "run")
    (copy,) = (folder / "run/code").iterdir()
    with as_if_new():
        copy.write_text(FUNCTION.replace("1.0", "2.0") + CRIES)
        assert f"{copy}: has changed since" in fails(embed_main, folder / "run", "--allow-code")
        copy.unlink()
        assert f"{copy}: no such file" in fails(embed_main, folder / "run", "--allow-code")
    assert not (folder / "was_run").exists()


def test_a_changed_file_is_not_resumed(cache: Path, folder: Path, trained: Path, fails: Fails) -> None:
    shutil.copytree(trained / "run", folder / "run")
    (folder / "their_loss.py").write_text(FUNCTION)
    resumed = ["--features", cache, "--out", "run", *COMMAND, "--set", "loss=their_loss.py:hinges", "--resume"]
    with as_if_new():
        assert "their_loss.py:hinges has changed since run was made" in fails(train_main, *resumed)


def test_code_that_a_preset_names_is_allowed_first(folder: Path, cache: Path, fails: Fails) -> None:
    (folder / "preset_loss.py").write_text(FUNCTION + CRIES)
    (folder / "mine.yaml").write_text("extends: vsepp\nloss: { name: preset_loss.py:hinges, sharpness: 3 }\n")
    message = fails(train_main, "--features", cache, "--experiment", "mine.yaml")
    assert "\n" not in message
    assert "preset_loss.py:hinges is code outside of the package" in message
    assert not (folder / "was_run").exists()
    with allow_own_code():
        assert load_experiment("mine.yaml").loss.model_dump()["sharpness"] == 3


@pytest.mark.parametrize(
    ("text", "setting", "message"),
    [
        (None, "loss=gone.py:hinges", r"gone\.py: No such file"),
        ("x = 1\n", "loss=bad.py:hinges", r"bad\.py: has no class or function 'hinges'"),
        ("hinges = 3\n", "loss=bad.py:hinges", "a loss of your own is a class that .*, or a function, and this is n"),
        ("def hinges(scores): pass\n", "loss=bad.py:hinges", r"bad\.py:1: a loss function takes scores, positives, negatives"),
        ("def hinges(a, b, c, d): pass\n", "loss=bad.py:hinges", r"the setting 'd' of this loss needs a default"),
        ("def hinges(:\n", "loss=bad.py:hinges", r"bad\.py:1: cannot be run \(SyntaxError"),
        ("\n1 / 0\n", "loss=bad.py:hinges", r"bad\.py:2: cannot be run \(ZeroDivisionError"),
        ("", "loss=no.such.module:hinges", r"no\.such\.module cannot be imported"),
        ("def batches(): pass\n", "train.sampling=bad.py:batches", "a sampler of your own is a class that .*Sampler, and"),
        (FUNCTION, "warmup.loss=bad.py:hinges", "must be a loss of the package"),
    ],
)
def test_what_is_wrong_with_ones_own_code_is_one_line(text: str | None, setting: str, message: str, folder: Path) -> None:
    if text is not None:
        (folder / "bad.py").write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        experiment(setting)
    assert "\n" not in str(refusal.value)


def test_settings_of_a_run_cannot_name_files_elsewhere(trained: Path, folder: Path) -> None:
    shutil.copytree(trained / "run", folder / "run")
    config = folder / "run/config.yaml"
    settings = yaml.safe_load(config.read_text())
    (folder / "outside.py").write_text(CRIES)
    for sha256 in ("../../outside", "0" * 64, None):
        settings["loss"] = {"name": "../outside.py:hinges", "code_sha256": sha256}
        config.write_text(yaml.safe_dump(settings))
        with allow_own_code(), pytest.raises(CodeNotAllowed):
            RunFolder(folder / "run").read_settings(ExperimentConfig)
    assert not (folder / "was_run").exists()


def test_the_workflow_knows_the_files_of_a_preset_by_their_sums(folder: Path) -> None:
    (folder / "mine.py").write_text("x = 1\n")
    settings = {"loss": {"name": "mine.py:x"}, "model": {"similarity": "gone.py:y"}, "rows": ["vsepp 1.6", "a.b:c"]}
    assert own_code.hash_code_files(settings) == {"mine.py:x": hashlib.sha256(b"x = 1\n").hexdigest()}
    assert own_code.hash_code_files({"loss": "max"}) == {}
