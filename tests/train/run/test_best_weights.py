"""Whenever a training is killed, a resume finds the best weights that its checkpoint names, and refuses any others at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.train.conftest import COMMAND, experiment, weights
from vse.train.cli import train_main
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing
from vse.train.solvers import adam
from vse.train.training import train


class Killed(Exception):
    """A training ends here, as if by SIGKILL."""


@pytest.fixture
def rsums(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let each validation find the next of these values, in this process or in one that resumes it."""

    def give(*values: float) -> None:
        found = iter(values)
        recalls = dict.fromkeys(("i2t_r1", "t2i_r1"), 0.0)
        monkeypatch.setattr(adam.Trainer, "validate", lambda _: {**recalls, "rsum": next(found)})

    return give


@pytest.fixture
def killed_in_epoch_2(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RunFolder]:
    """Train, and kill the training in its second epoch, before it calls a method of its run folder."""

    def kill(method: str) -> RunFolder:
        calls: Iterator[int] = iter(range(10))
        real = getattr(RunFolder, method)

        def killed(self: RunFolder, *arguments: object) -> object:
            if next(calls) == 1:
                raise Killed
            return real(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, method, killed)
            with pytest.raises(Killed):
                train(cache, experiment(), out=tmp_path / "run")
        return RunFolder(tmp_path / "run")

    return kill


KILLED = {"before the new best weights": "save_next_best", "before the checkpoint": "save_checkpoint"}


@pytest.mark.parametrize("when", KILLED)
def test_killed_before_the_checkpoint_where_the_repeated_epoch_is_no_longer_the_best(
    when: str, killed_in_epoch_2: Callable[[str], RunFolder], rsums: Callable[..., None], cache: Path
) -> None:
    rsums(5.0, 6.0)
    folder = killed_in_epoch_2(KILLED[when])
    best = weights(folder.path)
    rsums(4.0, 3.0)  # as on another processor
    train(cache, experiment(), out=folder.path, existing=Existing(resume=True))
    record = folder.record()
    assert (record["state"], record["best_epoch"], record["best_rsum"]) == ("finished", 1, 5.0)
    assert all(torch.equal(best[name], value) for name, value in weights(folder.path).items())
    assert not folder.next_best_file.exists()


def test_killed_after_the_checkpoint_the_new_best_weights_are_kept(
    killed_in_epoch_2: Callable[[str], RunFolder], rsums: Callable[..., None], cache: Path
) -> None:
    rsums(5.0, 6.0)
    folder = killed_in_epoch_2("take_next_best")
    best = weights(folder.path, folder.next_best_file.name)
    rsums(4.0)
    train(cache, experiment(), out=folder.path, existing=Existing(resume=True))
    assert (folder.record()["best_epoch"], folder.record()["best_rsum"]) == (2, 6.0)
    assert all(torch.equal(best[name], value) for name, value in weights(folder.path).items())


def test_damaged_best_weights_are_refused_before_a_step_is_trained(
    killed_in_epoch_2: Callable[[str], RunFolder], cache: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = killed_in_epoch_2("save_checkpoint")
    content = bytearray(folder.best_file.read_bytes())
    content[-1] ^= 1
    folder.best_file.write_bytes(content)
    monkeypatch.setattr(adam.Trainer, "step", lambda *_: pytest.fail("a step is trained"))
    line = fails(train_main, "--features", cache, *COMMAND, "--out", folder.path, "--resume")
    assert "best.safetensors: not what the training wrote" in line
