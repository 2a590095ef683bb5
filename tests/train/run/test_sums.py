"""The files of a run and of embeddings are the ones that were written, or they are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

import vse
from tests.eval.protocols.test_evaluate import made
from tests.train.conftest import experiment
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings, write_embeddings, write_scores
from vse.eval.ranking.ranks import blocks_from_scores
from vse.pipeline.errors import UserError
from vse.pipeline.files.writing import sha256_file
from vse.train.cli import embed_main, report_main
from vse.train.run.folder import RunFolder
from vse.train.run.resume import Existing, Extras
from vse.train.solvers import adam
from vse.train.training import train


def test_a_finished_run_has_the_sums_of_its_files(run: Path) -> None:
    files = RunFolder(run).record()["files"]
    assert files == {
        name: sha256_file(run / name) for name in ("config.yaml", "vocab.json", "best.safetensors", "metrics.csv")
    }


@pytest.mark.parametrize("file", ["best.safetensors", "vocab.json", "config.yaml"])
@pytest.mark.parametrize("how", ["flip", "cut", "grow"])
def test_a_changed_file_of_a_run_is_refused(file: str, how: str, own_run: Path, fails: Callable[..., str]) -> None:
    content = bytearray((own_run / file).read_bytes())
    if how == "flip":
        content[random.Random(file).randrange(len(content))] ^= 1 << 3
    (own_run / file).write_bytes({"flip": content, "cut": content[: len(content) // 2], "grow": content + b" "}[how])
    line = fails(embed_main, own_run)
    assert file in line
    assert not (own_run / "test.h5").exists()


@pytest.mark.parametrize("file", ["metrics.csv", "negatives.csv"])
def test_a_changed_table_of_a_run_is_in_no_report(file: str, cache: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    run = train(cache, experiment("train.epochs=1"), out=tmp_path / "run", extras=Extras(log_negatives=3))
    result, page = tmp_path / "result.json", tmp_path / "page.html"
    for main, *arguments in ((embed_main, run), (eval_main, run / "test.h5", "--bootstrap", 0, "--out", result)):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        assert stop.value.code == 0
    text = (run / file).read_text()
    (run / file).write_text(text[:-2] + ("1" if text[-2] != "1" else "2") + "\n")
    assert f"{file}: not what the training wrote" in fails(report_main, result, "--out", page)
    assert not page.exists()


def test_changed_metrics_are_in_no_frame(own_run: Path) -> None:
    assert len(vse.load(own_run).frame) == 3
    with (own_run / "metrics.csv").open("a") as table:
        table.write("4,,,,,,,,\n")
    with pytest.raises(UserError, match=r"metrics\.csv: not what the training wrote"):
        _ = vse.load(own_run).frame


def test_a_resume_writes_its_tables_again(run: Path, own_run: Path, cache: Path) -> None:
    """Else it would note the sums of tables that were damaged meanwhile."""
    (own_run / "run.json").unlink()
    (own_run / "metrics.csv").write_text("damaged")
    train(cache, experiment(), out=own_run, existing=Existing(resume=True))
    assert (own_run / "metrics.csv").read_bytes() == (run / "metrics.csv").read_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(value: float, own_run: Path, fails: Callable[..., str]) -> None:
    weights = {
        name: torch.full_like(w, value) for name, w in safetensors.torch.load_file(own_run / "best.safetensors").items()
    }
    safetensors.torch.save_file(weights, own_run / "best.safetensors")
    record = json.loads((own_run / "run.json").read_text())
    del record["files"]["best.safetensors"]
    (own_run / "run.json").write_text(json.dumps(record))
    assert "are not finite" in fails(embed_main, own_run)


def test_a_run_without_sums_is_read_and_it_is_said(own_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = json.loads((own_run / "run.json").read_text())
    del record["files"]
    (own_run / "run.json").write_text(json.dumps(record))
    caplog.set_level("INFO", "vse")
    with pytest.raises(SystemExit) as stop:
        embed_main([str(own_run)])
    assert stop.value.code == 0
    assert "run.json: has no checksums of its files" in caplog.text


SPOIL: dict[str, Callable[[h5py.File], None]] = {
    "a number of an image": lambda file: file["images"].__setitem__((3, 1), file["images"][3, 1] + 1e-3),
    "a number of a caption": lambda file: file["captions"].__setitem__((7, 0), 0.5),
    "two images are exchanged": lambda file: file["image_ids"].__setitem__(slice(0, 2), file["image_ids"][:2][::-1]),
    "the split": lambda file: file.attrs.__setitem__("split", "val"),
    "the seed": lambda file: file.attrs.__setitem__("seed", 1),
    "the similarity": lambda file: file.attrs.__setitem__("similarity", "order"),
    "the sum": lambda file: file.attrs.__setitem__("content_sha256", "0" * 64),
    "the sum is no text": lambda file: file.attrs.__setitem__("content_sha256", 3),
    "numbers of COCO": lambda file: file.__setitem__("coco_ids", np.arange(12)),
}


@pytest.mark.parametrize("what", SPOIL)
def test_embeddings_that_were_changed_are_refused(what: str, tmp_path: Path, fails: Callable[..., str]) -> None:
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


def test_scores_written_block_by_block_have_a_sum_too(tmp_path: Path, fails: Callable[..., str]) -> None:
    run = made(n_images=12, n_each=3)
    scores = np.random.default_rng(0).normal(size=(12, 36)).astype(np.float32)
    blocks = blocks_from_scores(scores, torch.from_numpy(run.image_of_caption()))
    path = write_scores(tmp_path / "s.h5", made(n_images=12, n_each=3, images=None, similarity="network"), blocks)
    read_embeddings(path)
    with h5py.File(path, "a") as file:
        file["scores"][11, 35] += 1
    assert "content_sha256 does not match" in fails(eval_main, path, "--out", tmp_path / "r.json")


def test_embeddings_of_another_program_are_read_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("record", ["kept", "lost"])
@pytest.mark.parametrize("what", BROKEN)
def test_what_the_workflow_calls_never_ends_in_a_dead_end(
    what: str, record: str, run: Path, own_run: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Snakemake deletes run.json and runs vse-train --resume --overwrite: what cannot be read is trained anew, and said."""
    from tests.train.conftest import assert_same, experiment, state

    file, spoil = BROKEN[what]
    (own_run / file).write_bytes(spoil((own_run / file).read_bytes()))
    stored = json.loads((run / "run.json").read_text())
    if file != "run.json":
        (own_run / "run.json").write_text(json.dumps({**stored, "state": "running"}))
        if record == "lost":
            (own_run / "run.json").unlink()
    train(cache, experiment(), out=own_run, existing=Existing(resume=True, overwrite=True))
    assert "Training starts from the beginning" in caplog.text or (
        file == "run.json" and "The file is written again" in caplog.text
    )
    assert_same(state(run), state(own_run))
    assert (run / "best.safetensors").read_bytes() == (own_run / "best.safetensors").read_bytes()
    files = RunFolder(own_run).record()["files"]
    assert {**files, "metrics.csv": ""} == {**stored["files"], "metrics.csv": ""}, "that one has the seconds of each epoch"


def test_weights_that_change_during_the_training_are_noticed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.train.conftest import experiment

    real = adam.Trainer.describe

    def described(self: adam.Trainer, row: dict[str, float]) -> str:
        if row["epoch"] == 3:
            (tmp_path / "run" / "best.safetensors").write_bytes(b"junk")
        return real(self, row)

    monkeypatch.setattr(adam.Trainer, "describe", described)
    with pytest.raises(UserError, match=r"best\.safetensors: was changed during the training"):
        train(cache, experiment(), out=tmp_path / "run")
    monkeypatch.undo()
    train(cache, experiment(), out=tmp_path / "run", existing=Existing(resume=True, overwrite=True))
    assert RunFolder(tmp_path / "run").record()["state"] == "finished"
