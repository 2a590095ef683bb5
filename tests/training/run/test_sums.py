from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

import vse
from tests.eval.protocols.test_evaluate import made
from tests.training.conftest import (
    COMMAND,
    Crash,
    Fails,
    Log,
    Patch,
    assert_same,
    done,
    experiment,
    interrupted,
    state,
    weights,
)
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings, write_embeddings, write_scores
from vse.eval.ranking.ranks import blocks_from_scores
from vse.pipeline.errors import Interrupted, UserError
from vse.pipeline.files.writing import sha256_file
from vse.training.cli import embed_main, report_main, train_main
from vse.training.options import TrainOptions
from vse.training.run.folder import RunFolder
from vse.training.solvers import retrieval
from vse.training.training import train

pytestmark = pytest.mark.sampled(2)


def test_a_finished_run_has_the_sums_of_its_files_and_one_without_is_read(run: Path, own_run: Path, caplog: Log) -> None:
    files = RunFolder(run).read_record()["files"]
    names = ("config.yaml", "vocab.json", "best.safetensors", "metrics.csv")
    assert files == {name: sha256_file(run / name) for name in names}
    record = json.loads((own_run / "run.json").read_text())
    del record["files"]
    (own_run / "run.json").write_text(json.dumps(record))
    caplog.set_level("INFO", "vse")
    done(embed_main, own_run)
    assert "run.json: has no checksums of its files" in caplog.text


@pytest.mark.parametrize("file", ["best.safetensors", "vocab.json", "config.yaml"])
@pytest.mark.parametrize("how", ["flip", "cut", "grow"])
def test_a_changed_file_of_a_run_is_refused(file: str, how: str, own_run: Path, fails: Fails) -> None:
    content = bytearray((own_run / file).read_bytes())
    if how == "flip":
        content[random.Random(file).randrange(len(content))] ^= 1 << 3
    (own_run / file).write_bytes({"flip": content, "cut": content[: len(content) // 2], "grow": content + b" "}[how])
    line = fails(embed_main, own_run)
    assert file in line
    assert not (own_run / "test.h5").exists()


@pytest.mark.parametrize("file", ["metrics.csv", "negatives.csv"])
def test_a_changed_table_of_a_run_is_in_no_report(file: str, cache: Path, tmp_path: Path, fails: Fails) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", options=TrainOptions(log_negatives=3))
    result, page = tmp_path / "result.json", tmp_path / "page.html"
    for main, *arguments in ((embed_main, run), (eval_main, run / "test.h5", "--bootstrap", 0, "--out", result)):
        done(main, *arguments)
    text = (run / file).read_text()
    (run / file).write_text(text[:-2] + ("1" if text[-2] != "1" else "2") + "\n")
    assert f"{file}: not what the training wrote" in fails(report_main, result, "--out", page)
    assert not page.exists()


def test_damaged_tables_are_in_no_frame_and_a_resume_writes_them_again(own_run: Path, run: Path, cache: Path) -> None:
    assert len(vse.load(own_run).frame) == 3
    with (own_run / "metrics.csv").open("a") as table:
        table.write("4,,,,,,,,\n")
    with pytest.raises(UserError, match=r"metrics\.csv: not what the training wrote"):
        _ = vse.load(own_run).frame
    (own_run / "run.json").unlink()
    (own_run / "metrics.csv").write_text("damaged")
    train(cache, experiment(), out=own_run, options=TrainOptions(resume=True))
    assert (own_run / "metrics.csv").read_bytes() == (run / "metrics.csv").read_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(value: float, own_run: Path, fails: Fails) -> None:
    stored = safetensors.torch.load_file(own_run / "best.safetensors")
    weights = {name: torch.full_like(weight, value) for name, weight in stored.items()}
    safetensors.torch.save_file(weights, own_run / "best.safetensors")
    record = json.loads((own_run / "run.json").read_text())
    del record["files"]["best.safetensors"]
    (own_run / "run.json").write_text(json.dumps(record))
    assert "are not finite" in fails(embed_main, own_run)


SPOIL: dict[str, Callable[[h5py.File], None]] = {
    "a number of a caption": lambda file: file["captions"].__setitem__((7, 0), 0.5),
    "two images are exchanged": lambda file: file["image_ids"].__setitem__(slice(0, 2), file["image_ids"][:2][::-1]),
    "the split": lambda file: file.attrs.__setitem__("split", "val"),
    "the similarity": lambda file: file.attrs.__setitem__("similarity", "order"),
    "the sum": lambda file: file.attrs.__setitem__("content_sha256", "0" * 64),
    "the sum is no text": lambda file: file.attrs.__setitem__("content_sha256", 3),
    "numbers of COCO": lambda file: file.__setitem__("coco_ids", np.arange(12)),
}


@pytest.mark.parametrize("what", SPOIL)
def test_embeddings_that_were_changed_are_refused(what: str, tmp_path: Path, fails: Fails) -> None:
    path = write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3))
    with h5py.File(path, "a") as file:
        SPOIL[what](file)
    assert "content_sha256 does not match" in fails(eval_main, path, "--out", tmp_path / "r.json")


def test_every_flipped_bit_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    path = write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3))
    content, rng, before = path.read_bytes(), random.Random(0), read_embeddings(path)
    refused = 0
    for _ in range(200):
        spoilt = bytearray(content)
        spoilt[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        try:
            after = read_embeddings(path)
        except UserError:
            refused += 1
        else:
            for name in ("image_ids", "caption_image_ids", "images", "captions", "similarity", "split", "seed"):
                np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)
    assert refused > 50


def test_scores_written_block_by_block_have_a_sum_too(tmp_path: Path, fails: Fails) -> None:
    run = made(n_images=12, n_each=3)
    scores = np.random.default_rng(0).normal(size=(12, 36)).astype(np.float32)
    blocks = blocks_from_scores(scores, torch.from_numpy(run.image_of_caption()))
    path = write_scores(tmp_path / "s.h5", made(n_images=12, n_each=3, images=None, similarity="network"), blocks)
    read_embeddings(path)
    with h5py.File(path, "a") as file:
        file["scores"][11, 35] += 1
    assert "content_sha256 does not match" in fails(eval_main, path, "--out", tmp_path / "r.json")


def test_embeddings_of_another_program_are_read_and_it_is_said(tmp_path: Path, caplog: Log) -> None:
    path = write_embeddings(tmp_path / "e.h5", made(n_images=12, n_each=3))
    with h5py.File(path, "a") as file:
        del file.attrs["content_sha256"]
    caplog.set_level("INFO", "vse")
    read_embeddings(path)
    assert caplog.text.count("e.h5: has no content_sha256") == 1


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a cut checkpoint": ("last.ckpt", lambda content: content[: len(content) // 2]),
    "an empty checkpoint": ("last.ckpt", lambda _: b""),
    "a checkpoint of something else": ("last.ckpt", lambda _: _saved({"epoch": 1})),
    "a cut record": ("run.json", lambda content: content[:50]),
    "a record of nothing": ("run.json", lambda _: b"{}"),
    "cut settings": ("config.yaml", lambda content: content[:40]),
    "other best weights": ("best.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
}


def _saved(state: object) -> bytes:
    buffer = BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(("what", "record"), [*((what, "kept") for what in BROKEN), ("a cut checkpoint", "lost")])
def test_the_workflow_has_no_dead_end(what: str, record: str, run: Path, own_run: Path, cache: Path, caplog: Log) -> None:
    """Snakemake deletes run.json and runs vse-train --resume --overwrite: what cannot be read is trained anew, and said."""
    file, spoil = BROKEN[what]
    (own_run / file).write_bytes(spoil((own_run / file).read_bytes()))
    stored = json.loads((run / "run.json").read_text())
    if file != "run.json":
        (own_run / "run.json").write_text(json.dumps({**stored, "state": "running"}))
        if record == "lost":
            (own_run / "run.json").unlink()
    train(cache, experiment(), out=own_run, options=TrainOptions(resume=True, overwrite=True))
    assert "Training starts from the beginning" in caplog.text or (
        file == "run.json" and "The file is written again" in caplog.text
    )
    assert_same(state(run), state(own_run))
    assert (run / "best.safetensors").read_bytes() == (own_run / "best.safetensors").read_bytes()
    files = RunFolder(own_run).read_record()["files"]
    assert {**files, "metrics.csv": ""} == {**stored["files"], "metrics.csv": ""}, "that one has the seconds of each epoch"


def test_weights_that_change_during_the_training_are_noticed(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    real = retrieval.RetrievalTrainer.describe_epoch

    def describe_epoch(self: retrieval.RetrievalTrainer, row: dict[str, float]) -> str:
        if row["epoch"] == 3:
            (tmp_path / "run" / "best.safetensors").write_bytes(b"junk")
        return real(self, row)

    monkeypatch.setattr(retrieval.RetrievalTrainer, "describe_epoch", describe_epoch)
    with pytest.raises(UserError, match=r"best\.safetensors: was changed during the training"):
        train(cache, experiment(), out=tmp_path / "run")
    monkeypatch.undo()
    train(cache, experiment(), out=tmp_path / "run", options=TrainOptions(resume=True, overwrite=True))
    assert RunFolder(tmp_path / "run").read_record()["state"] == "finished"


@pytest.fixture
def stopped(cache: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Train with this number of listed negatives, and stop in the first epoch."""

    def stop(log_negatives: int) -> Path:
        with interrupted(0), suppress(Interrupted):
            train(cache, experiment(), out=tmp_path / "run", options=TrainOptions(log_negatives=log_negatives))
        return tmp_path / "run"

    return stop


@pytest.mark.parametrize("record", ["kept", "lost"])
@pytest.mark.parametrize(("began", "resumed"), [(0, 3), (3, 2)])
def test_another_number_of_listed_negatives_is_refused(
    began: int, resumed: int, record: str, stopped: Callable[[int], Path], cache: Path, fails: Fails
) -> None:
    run = stopped(began)
    if record == "lost":
        (run / "run.json").unlink()
    arguments = ["--features", cache, *COMMAND, "--out", run, "--resume", "--log-negatives"]
    line = fails(train_main, *arguments, resumed)
    assert f"with --log-negatives {began}, not {resumed}; continue it with --resume --log-negatives {began}" in line
    done(train_main, *arguments, began)
    assert (run / "negatives.csv").exists() == (began > 0)


@pytest.mark.parametrize(("setting", "record"), [("rows", "lost"), ("title", "kept")])
def test_an_edited_row_is_refused(
    setting: str, record: str, stopped: Callable[[int], Path], cache: Path, fails: Fails
) -> None:
    """Compare settings that change no weights, but name the row of a paper's table that a result stands for."""
    run = stopped(0)
    if record == "lost":
        (run / "run.json").unlink()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings[setting] = {"rows": [], "title": "another"}[setting]
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    line = fails(train_main, "--features", cache, *COMMAND, "--out", run, "--resume")
    assert "config.yaml: not what the training wrote" in line


@pytest.fixture
def rsums(monkeypatch: Patch) -> Callable[..., None]:
    """Let each validation find the next of these values, in this process or in one that resumes it."""

    def give(*values: float) -> None:
        found = iter(values)
        recalls = dict.fromkeys(("i2t_r1", "t2i_r1"), 0.0)
        monkeypatch.setattr(retrieval.RetrievalTrainer, "validate", lambda _: {**recalls, "rsum": next(found)})

    return give


@pytest.fixture
def killed_in_epoch_2(cache: Path, tmp_path: Path) -> Callable[[str], RunFolder]:
    """Train, and kill the training in its second epoch, before it calls a method of its run folder."""

    def kill(method: str) -> RunFolder:
        with interrupted(1, of=RunFolder, method=method, crash=True), pytest.raises(Crash):
            train(cache, experiment(), out=tmp_path / "run")
        return RunFolder(tmp_path / "run")

    return kill


KILLED = {"before the new best weights": "save_new_best_weights", "before the checkpoint": "save_checkpoint"}


@pytest.mark.parametrize("when", KILLED)
def test_killed_before_the_checkpoint_where_the_repeated_epoch_is_no_longer_the_best(
    when: str, killed_in_epoch_2: Callable[[str], RunFolder], rsums: Callable[..., None], cache: Path
) -> None:
    rsums(5.0, 6.0)
    folder = killed_in_epoch_2(KILLED[when])
    best = weights(folder.path)
    rsums(4.0, 3.0)  # as on another processor
    train(cache, experiment(), out=folder.path, options=TrainOptions(resume=True))
    record = folder.read_record()
    assert (record["state"], record["best_epoch"], record["best_rsum"]) == ("finished", 1, 5.0)
    assert all(torch.equal(best[name], value) for name, value in weights(folder.path).items())
    assert not folder.new_best_weights_file.exists()


def test_killed_after_checkpoint(
    killed_in_epoch_2: Callable[[str], RunFolder], rsums: Callable[..., None], cache: Path
) -> None:
    rsums(5.0, 6.0)
    folder = killed_in_epoch_2("replace_best_weights")
    best = weights(folder.path, folder.new_best_weights_file.name)
    rsums(4.0)
    train(cache, experiment(), out=folder.path, options=TrainOptions(resume=True))
    assert (folder.read_record()["best_epoch"], folder.read_record()["best_rsum"]) == (2, 6.0)
    assert all(torch.equal(best[name], value) for name, value in weights(folder.path).items())


def test_damaged_best_weights_are_refused_before_a_step_is_trained(
    killed_in_epoch_2: Callable[[str], RunFolder], cache: Path, fails: Fails, monkeypatch: Patch
) -> None:
    folder = killed_in_epoch_2("save_checkpoint")
    content = bytearray(folder.best_weights_file.read_bytes())
    content[-1] ^= 1
    folder.best_weights_file.write_bytes(content)
    monkeypatch.setattr(retrieval.RetrievalTrainer, "step", lambda *_: pytest.fail("a step is trained"))
    line = fails(train_main, "--features", cache, *COMMAND, "--out", folder.path, "--resume")
    assert "best.safetensors: not what the training wrote" in line
