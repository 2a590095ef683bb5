from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.hostile import NOT_FILES, NOT_JSON, WRONG_VALUES, changed_bytes, refused, refused_or_done, spoilt_json
from tests.training.conftest import COMMAND
from vse.cli import data_main
from vse.training.cli import embed_main, report_main, train_main

SUITE = "hostile runs"

RECORD: list[tuple[str | int, ...]] = [(name,) for name in ("features", "seed", "versions", "state")]
RECORD += [("features", name) for name in ("name", "key", "path")]
MAY_BE = {"seed": ("a number", "a negative number"), "versions": ("an empty object", "an object")}
MAY_BE |= {"state": ("an empty text", "a text", "a long text", "a path", "an escape sequence", "a zero byte")}
MAY_BE |= {"key": MAY_BE["state"]}  # a cache of another key is other data, which runs can be used on
MAY_BE |= {"name": (*MAY_BE["state"][:2], "a path", "an escape sequence")}


@pytest.mark.parametrize("keys", RECORD, ids=str)
@pytest.mark.parametrize("kind", ["missing", *WRONG_VALUES])
def test_a_wrong_record_is_refused(keys: tuple[str | int, ...], kind: str, own_run: Path, cache: Path, tmp_path: Path) -> None:
    spoilt_json(own_run / "run.json", keys, WRONG_VALUES.get(kind, ...))
    error = refused_or_done(embed_main, own_run, "--features", cache, "--out", tmp_path / "e.h5")
    may_be = kind in MAY_BE.get(str(keys[-1]), ()) or keys[-1] == "path"
    assert error is not None or may_be
    refused_or_done(train_main, "--features", cache, *COMMAND, "--out", own_run, "--resume")


@pytest.mark.parametrize("kind", NOT_JSON)
@pytest.mark.parametrize("name", ["run.json", "vocab.json"])
def test_what_is_no_json_is_refused(name: str, kind: str, own_run: Path, cache: Path, tmp_path: Path) -> None:
    content = NOT_JSON[kind]
    (own_run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert name in refused(embed_main, own_run, "--features", cache, "--out", tmp_path / "e.h5")


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("name", ["run.json", "vocab.json", "config.yaml", "best.safetensors"])
def test_what_is_no_file_is_refused(name: str, kind: str, own_run: Path, cache: Path, tmp_path: Path) -> None:
    NOT_FILES[kind](own_run / name)
    refused(embed_main, own_run, "--features", cache, "--out", tmp_path / "e.h5")


@pytest.mark.parametrize("kind", NOT_FILES)
def test_a_checkpoint_that_is_no_file_is_refused_or_made_anew(kind: str, own_run: Path, cache: Path) -> None:
    unfinished(own_run)
    NOT_FILES[kind](own_run / "last.ckpt")
    refused_or_done(train_main, "--features", cache, *COMMAND, "--out", own_run, "--resume")


def unfinished(run: Path) -> Path:
    return spoilt_json(run / "run.json", ("state",), "running")


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {name: inner for name, inner in {**state, key: value}.items() if inner is not ...}


CHECKPOINTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [state], "nothing": lambda state: {}, "a tensor": lambda state: torch.zeros(3),
    "another epoch": changed("epoch", "x"), "rows of nothing": changed("rows", [None]),
    "rows of texts": changed("rows", [{"rsum": "x", "epoch": "y"}]), "no rows": changed("rows", 3),
    "a model of nothing": changed("model", {}),
    "a model of other shapes": lambda state: {**state, "model": {key: torch.zeros(1) for key in state["model"]}},
    "a model of numbers": lambda state: {**state, "model": dict.fromkeys(state["model"], 3)},
    "an identity of nothing": changed("identity", 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_that_is_none_is_refused(kind: str, own_run: Path, cache: Path) -> None:
    unfinished(own_run)
    state = torch.load(own_run / "last.ckpt", weights_only=True)
    torch.save(CHECKPOINTS[kind](state), own_run / "last.ckpt")
    assert "last.ckpt: not a" in refused(train_main, "--features", cache, *COMMAND, "--out", own_run, "--resume")


@pytest.mark.parametrize("key", ["epoch", "rows", "step", "pairs", "seconds", "model", "identity", "optimiser", "rng"])
def test_a_checkpoint_that_lacks_a_key_is_refused_or_needless(key: str, own_run: Path, cache: Path) -> None:
    unfinished(own_run)
    state = torch.load(own_run / "last.ckpt", weights_only=True)
    state.pop(key, None)
    torch.save(state, own_run / "last.ckpt")
    refused_or_done(train_main, "--features", cache, *COMMAND, "--out", own_run, "--resume")


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(data=st.data(), name=st.sampled_from(["run.json", "vocab.json", "config.yaml", "best.safetensors"]))
def test_any_bytes_are_refused_or_read(data: st.DataObject, name: str, run: Path, cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(run, own)
    (own / name).write_bytes(data.draw(changed_bytes((run / name).read_bytes())))
    refused_or_done(embed_main, own, "--features", cache, "--out", tmp_path / "e.h5")


@pytest.mark.nightly
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_bytes_of_a_checkpoint_are_refused_or_read(data: st.DataObject, run: Path, cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(run, own)
    unfinished(own)
    (own / "last.ckpt").write_bytes(data.draw(changed_bytes((run / "last.ckpt").read_bytes())))
    refused_or_done(train_main, "--features", cache, *COMMAND, "--out", own, "--resume")


@pytest.mark.parametrize("seed", ["-1", str(2**63), "9" * 30, "9" * 5000, "1e3", "0x10", "", "one"])
def test_a_seed_that_is_none_is_refused(seed: str, cache: Path, tmp_path: Path) -> None:
    assert "--seed" in refused(train_main, "--features", cache, *COMMAND, "--out", tmp_path / "run", f"--seed={seed}")
    assert "--seed" in refused(data_main, "demo", "--images", 6, "--out", tmp_path / "data", f"--seed={seed}")
    assert "--seed" in refused(report_main, tmp_path / "none.json", "--out", tmp_path / "page.html", f"--seed={seed}")


def test_the_largest_seed_trains(cache: Path, tmp_path: Path) -> None:
    arguments = [*COMMAND, "--set", "train.epochs=1", "--out", tmp_path / "run", "--seed", 2**63 - 1]
    assert refused_or_done(train_main, "--features", cache, *arguments) is None
