from __future__ import annotations

import os
import shutil
import signal
import socket
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.training import forked
from tests.training.conftest import COMMAND, Patch, experiment, options, state
from tests.training.toy_similarity import ToySettings
from vse.pipeline.errors import UserError
from vse.training.models.similarities import SIMILARITIES
from vse.training.processes.group import ProcessGroup
from vse.training.processes.launchers import Launch, choose_process_device, find_launch
from vse.training.training import train

CASES = {
    "max of hinges": ["train.batch_size=50"],  # the last batch has 40 pairs
    "sum of hinges, masked, three batches an update, a running mean of weights": [
        *("loss.name=sum", "loss.same_image=mask"),
        "train.batch_size=34",  # 8 batches, the last of 2 pairs, of which the last update has 2
        *("train.accumulate=3", "train.ema=0.8", "train.schedule=cosine", "train.optimizer=adamw", "train.weight_decay=0.1"),
    ],
    "order embeddings": ["model.similarity=order", "train.batch_size=50"],
    "two linear branches, neighbourhood sampling": [
        "model.image_encoder={name: branch, widths: [9]}",
        "model.caption_encoder={name: lstm, head: {widths: [9]}}",
        *("model.similarity=euclidean", "loss.name=top", "loss.lambda4=0.1", "train.sampling=neighbourhood"),
        "train.learning_rate=2e-5",  # Adam makes much of the rounding of a gradient that is almost 0
    ],
    "infonce by blocks, temperature learned": [
        "loss={name: infonce, learned: true, same_image: positive, block: 12}",
        "train.batch_size=51",
    ],
    "infonce, each process with its own images": [
        "loss={name: infonce, temperature: 0.2, same_image: mask}",
        *("train.batch_size=34", "train.accumulate=2", "model.similarity=euclidean"),
    ],
    "nested infonce": ["loss={name: infonce, learned: true, nested: [4, 8]}", "train.batch_size=50"],
    "sigmoid, each process with its own images": ["loss={name: sigmoid, same_image: positive}", "train.batch_size=34"],
    "batch normalisation in both branches": [
        "model.image_encoder={name: branch, widths: [12, 9], dropout: 0}",
        "model.caption_encoder={name: lstm, head: {widths: [12, 9], dropout: 0, batch_norm: after_first}}",
        *("train.batch_size=51", "train.learning_rate=1e-9"),  # Adam makes much of the gradient of a bias that is normalised
    ],
    "similarity network": ["model.similarity=network", "model.similarity.widths=[6]", "loss.name=logistic"],
    "fine-tuning": ["images.source=pictures", "images.finetune=true", "train.batch_size=34"],
    "fine-tuning with batch normalisation": [
        *("images.source=pictures", "images.finetune=true", "images.batch_norm=train", "train.batch_size=50"),
        "train.learning_rate=1e-9",
    ],
}


def arguments(cache: Path, out: Path, sets: list[str]) -> list[object]:
    return ["--features", cache, "--out", out, "--threads", 1, *COMMAND, *options("train.epochs=1", *sets)]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("max of hinges", 3),
        ("sum of hinges, masked, three batches an update, a running mean of weights", 3),
        ("order embeddings", 2),
        ("two linear branches, neighbourhood sampling", 2),
        ("infonce by blocks, temperature learned", 2),
        ("infonce, each process with its own images", 3),
        ("nested infonce", 2),
        ("sigmoid, each process with its own images", 2),
        ("batch normalisation in both branches", 2),
        ("similarity network", 2),
        ("fine-tuning", 2),
        ("fine-tuning with batch normalisation", 2),
    ],
)
def test_losses_gradients_and_updates_are_those_of_one_process(name: str, processes: int, cache: Path, tmp_path: Path) -> None:
    train(cache, experiment("train.epochs=1", *CASES[name]), out=tmp_path / "one")
    codes, log = forked.run_together(arguments(cache, tmp_path / "several", CASES[name]), processes, tmp_path)
    assert codes == [0] * processes, log
    one, several = state(tmp_path / "one"), state(tmp_path / "several")
    assert_close(one["rows"], several["rows"])
    assert_close(one["model"], several["model"])
    assert_close(one.get("averaged"), several.get("averaged"))
    assert_close(one["optimizer"]["state"], several["optimizer"]["state"])  # running means of gradients and of their squares
    assert log.count("epoch 1: loss") == 1, "the first process alone writes and logs"


@pytest.mark.slow
def test_gathered_sets_of_different_lengths_are_those_of_one_process(regions: Path, tmp_path: Path) -> None:
    sets = ["model.similarity=toy", "model.caption_encoder={name: gru, states: all}", "train.batch_size=34", "train.epochs=1"]
    SIMILARITIES.add(ToySettings)
    try:
        train(regions, experiment(*sets), out=tmp_path / "one")
    finally:
        SIMILARITIES.remove("toy")
    codes, log = forked.run_together(arguments(regions, tmp_path / "several", sets), 3, tmp_path, forked.train_toy)
    assert codes == [0, 0, 0], log
    for part in ("rows", "model"):
        assert_close(state(tmp_path / "one")[part], state(tmp_path / "several")[part])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "processes"),
    [("max of hinges", 1), ("sigmoid, each process with its own images", 2), ("fine-tuning", 1)],
)
def test_chunks_have_the_gradients_of_the_complete_batch(name: str, processes: int, cache: Path, tmp_path: Path) -> None:
    train(cache, experiment("train.epochs=1", *CASES[name]), out=tmp_path / "whole")
    chunked = [*CASES[name], "train.chunk=7"]
    codes, log = forked.run_together(arguments(cache, tmp_path / "chunks", chunked), processes, tmp_path)
    assert codes == [0] * processes, log
    whole, chunks = state(tmp_path / "whole"), state(tmp_path / "chunks")
    for part in ("rows", "model"):
        assert_close(whole[part], chunks[part])


@pytest.mark.slow
def test_chunks_of_sets_are_padded_like_the_complete_batch(regions: Path, tmp_path: Path) -> None:
    sets = ["model.similarity=maxsim", "model.caption_encoder={name: gru, states: all}", "train.epochs=1"]
    for name, further in (("whole", []), ("chunks", ["train.chunk=5"])):
        train(regions, experiment(*sets, *further), out=tmp_path / name)
    for part in ("rows", "model"):
        assert_close(state(tmp_path / "whole")[part], state(tmp_path / "chunks")[part])


def test_what_cannot_be_embedded_in_chunks_is_refused(cache: Path, tmp_path: Path) -> None:
    branch = "model.image_encoder={name: branch, widths: [12, 9]}"
    with pytest.raises(UserError, match="train.chunk: batch normalisation"):
        train(cache, experiment("train.chunk=7", branch, "model.dim=9"), out=tmp_path / "run")
    with pytest.raises(UserError, match="train.chunk: an adversary"):
        train(cache, experiment("train.chunk=7", "adversary=ace", name="vsepp"), out=tmp_path / "run")


def assert_close(a: Any, b: Any) -> None:
    """Within 1e-5, whatever is nested in it."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    elif isinstance(a, dict):
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
    elif a is None:
        assert b is None
    else:
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)


def start_training(cache: Path, folder: Path, epochs: int, *more: object) -> tuple[list[ForkServerProcess], list[Path]]:
    """Three processes that train, after their first epoch."""
    sets = ["train.batch_size=50", f"train.epochs={epochs}"]
    processes, files = forked.start_together([*arguments(cache, folder / "run", sets), *more], 3, folder)
    while processes[0].is_alive() and not (folder / "run" / "metrics.csv").exists():
        processes[0].join(timeout=0.05)
    return processes, files


def finish(processes: list[ForkServerProcess], files: list[Path]) -> tuple[list[int | None], list[str]]:
    """The exit codes of the processes, and what each has said."""
    for process in processes:
        process.join()
    return [process.exitcode for process in processes], [file.read_text() for file in files]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_signal_to_any_process_ends_all_with_a_checkpoint_that_any_number_resumes(
    rank: int, cache: Path, tmp_path: Path
) -> None:
    sets = ["train.batch_size=50", "train.epochs=3"]
    stopped = partial(forked.train_until_a_signal, rank, 6)
    codes, log = forked.run_together(arguments(cache, tmp_path / "run", sets), 3, tmp_path, stopped)
    assert codes == [143, 143, 143], log
    assert log.count("stopped in epoch 2") == 3, log
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    for run, size in (("run", 1), ("resumed", 2)):
        codes, log = forked.run_together([*arguments(cache, tmp_path / run, sets), "--resume"], size, tmp_path)
        assert codes == [0] * size, log
        assert "continuing after epoch 1, step 2" in log
    train(cache, experiment(*sets), out=tmp_path / "one")
    for run in ("run", "resumed"):
        assert_close(state(tmp_path / "one")["rows"], state(tmp_path / run)["rows"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (1, signal.SIGKILL),
        (1, signal.SIGSTOP),
        (0, signal.SIGSTOP),
    ],
)
def test_a_process_that_does_not_answer_is_named_and_ends_the_others(
    rank: int, number: signal.Signals, cache: Path, tmp_path: Path
) -> None:
    minutes = 0.1 if number == signal.SIGSTOP else 1  # a killed process closes its connections, so nobody waits for long
    processes, files = start_training(cache, tmp_path, 1000, "--set", f"train.timeout_minutes={minutes}")
    pid = processes[rank].pid
    assert pid is not None
    os.kill(pid, number)
    others = [other for other in range(3) if other != rank]
    codes, said = finish([processes[other] for other in others], [files[other] for other in others])
    processes[rank].kill()
    assert codes == [2, 2], said
    for words in said:
        assert f"no answer from process {rank} (on {socket.gethostname()}) of 3" in words
        assert "--resume continues from the last checkpoint" in words


def test_a_refusal_ends_all_processes(cache: Path, own_run: Path, tmp_path: Path) -> None:
    codes, log = forked.run_together(arguments(cache, own_run, ["loss.margin=0.3"]), 2, tmp_path)
    assert 0 not in codes
    assert log.count("vse-train: error:") == 2
    assert "loss.margin: 0.2 -> 0.3" in log
    assert "the first process reported an error" in log


@pytest.mark.parametrize("n", [1, 2, 7, 128])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_make_up_the_batch_in_its_order(n: int, size: int) -> None:
    batch = np.arange(n) + 100
    shares = [ProcessGroup(rank, size).select_own_share(batch) for rank in range(size)]
    assert np.concatenate(shares).tolist() == batch.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture
def two_gpus(monkeypatch: Patch, tmp_path: Path) -> list[str]:
    """A machine with two GPUs, as torch would speak of it; returns the devices on which something was made."""
    touched: list[str] = []
    empty = torch.empty
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "empty", lambda *size, device: touched.append(str(device)) or empty(*size))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"test-{number}"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return touched


def launch(rank: int, size: int) -> Launch:
    found = find_launch(forked.variables("torchrun", rank, size, "29500"))
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_takes_the_gpu_of_its_number(device: str, rank: int, two_gpus: list[str], monkeypatch: Patch) -> None:
    assert choose_process_device(device, launch(rank, 2)) == torch.device("cuda", rank)
    assert two_gpus == [f"cuda:{rank}"]


@pytest.mark.parametrize(
    ("device", "processes", "message"),
    [
        (
            "auto",
            3,
            "3 processes on a machine with 2 GPUs, but each needs a GPU of its own; start torchrun with --nproc-per-node 2",
        ),
        ("cuda", 4, "4 processes on a machine with 2 GPUs"),
        ("cuda:0", 2, "--device cuda:0: 2 processes would share one GPU; --device cuda gives each its own"),
    ],
)
def test_too_few_gpus_are_refused(device: str, processes: int, message: str, two_gpus: list[str], monkeypatch: Patch) -> None:
    with pytest.raises(UserError) as refused:
        choose_process_device(device, launch(0, processes))
    assert str(refused.value).startswith(message)
    assert two_gpus == []


def test_more_processes_than_gpus_may_share_the_processor(two_gpus: list[str], monkeypatch: Patch) -> None:
    assert choose_process_device("cpu", launch(2, 3)) == torch.device("cpu")
