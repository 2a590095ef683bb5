"""Test that a damaged or hostile preset or ``--set`` quickly ends a command with one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.hostile import NOT_FILES, refused, refused_or_done
from tests.pipeline.conftest import Patch
from vse.features.cli import extract_main
from vse.training.cli import train_main

SUITE = "hostile presets"

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED_LAUGHS = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{below}'] * 9)}]}}\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NOT_YAML = {
    "half": "loss: {margin: [", "two documents": "a: 1\n---\nb: 2", "a key twice": "seeds: [0]\nseeds: [1]",
    "a billion laughs": LAUGHS, "a billion merged laughs": MERGED_LAUGHS,
    "billions of presets": f"presets:\n  mine: {{}}\n{LAUGHS}", "an alias of itself": "a: &a [*a]",
    "a mapping in itself": "a: &a {b: *a}", "an alias of nothing": "a: *b", "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep mappings": "{a: " * 50_000 + "}" * 50_000, "deep blocks": "\n".join(" " * k + "a:" for k in range(2000)),
    "deep entries": "- " * 20_000 + "a", "a date that is none": "a: 2024-99-99", "5,000 digits": f"a: {'9' * 5000}",
    "beyond 64 bits": f"a: {2**64}", "sixties": f"a: {'1:' * 3000}1", "a class": "a: !!python/object/apply:os.system [id]",
    "another tag": "a: !mine b", "a bool that is none": "a: !!bool maybe", "a number that is none": "a: !!int x",
    "bytes that are none": "a: !!binary x", "a list as a key": "? [a]\n: b", "a value sign": "a: =",
    "a merge of a number": "<<: 3", "a zero byte": "a: \0", "a reinforce_loss": 'a: "\\ud800"', "bytes": b"\xff\xfe\xff",
    "a tab": "\ta: b", "a text": "a", "a family of nothing": "presets: 3", "a family of lists": "presets: {mine: [a]}",
    "a family beside others": "presets: {}\n1: 2\na: b", "a name that is a path": "presets: {../../x: {}}",
    "a name that is a number": "presets: {1: {}}", "a name that is a date": "presets: {2024-01-01: {}}",
    "extends a list": "extends: [vsepp]", "extends a number": "extends: 3", "extends itself": "extends: mine.yaml",
    "extends a path of nothing": "extends: /nowhere/x.yaml", "extends a long name": f"extends: {'x' * 5000}",
    "extends a zero byte": 'extends: "a\\0b.yaml"', "a loss that is a list": "loss: [max]",
    "a loss whose name is a list": "loss: {name: [max]}", "a margin that is a date": "loss: {margin: 2024-01-01}",
    "a margin that is infinite": "loss: {margin: .inf}", "a rate that is no number": "train: {learning_rate: .nan}",
    "a feature that is a list": "feature: [fc7]", "seeds that are text": "seeds: abc", "no seeds": "seeds: []",
    "a key that is a number": "1: 2", "a key that is nothing": "null: 1",
    "a key deep inside that is a number": "train: {1: 2}", "a group that is a list": "train: [1]",
    "a part in a part": "model: {similarity: {name: {name: order}}}", "a set": "train: !!set {a, b}",
    "an ordered map": "train: !!omap [a: 1]",
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_YAML)
def test_what_is_no_preset_is_refused(kind: str, cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    content = NOT_YAML[kind]
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(train_main, "--features", cache, "--experiment", "mine.yaml", "--out", "run")
    refused(extract_main, "cnn", "--dataset", cache.parent.parent / "data" / "dataset.json", "--feature", "mine.yaml")
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", NOT_FILES)
def test_a_preset_that_is_no_file_is_refused(kind: str, cache: Path, tmp_path: Path) -> None:
    preset = NOT_FILES[kind](tmp_path / "mine.yaml")
    assert f"{preset}: " in refused(train_main, "--features", cache, "--experiment", preset, "--out", tmp_path / "run")


def test_presets_that_extend_each_other_without_end_are_refused(cache: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    family = tmp_path / "experiments" / "family.yaml"
    family.parent.mkdir()
    family.write_text("presets:\n" + "".join(f"  a{k}: {{extends: a{k + 1}}}\n" for k in range(2000)) + "  a2000: {}\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))
    assert "extends more than 50" in refused(train_main, "--features", cache, "--experiment", "a0", "--out", tmp_path / "run")


SETS = {
    "no value": "train.epochs", "half": "loss={margin: [", "a date that is none": "train.epochs=2024-99-99",
    "beyond 64 bits": f"train.epochs={2**64}", "infinity": "train.learning_rate=.inf", "not a number": "loss.margin=.nan",
    "deep lists": f"train={'[' * 100_000}{']' * 100_000}", "a list for a name": "loss=[max]",
    "a class": "loss=!!python/name:os.system", "a zero byte": "loss=a\0b", "an alias": "loss=*a", "laughs": f"train={LAUGHS}",
    "a deep key": f"{'a.' * 2000}b=1", "dots": "....=1", "no key": "=1", "an escape sequence": "\x1b[2J\x07=1",
    "a long key": f"{'x' * 5000}=1", "a reinforce_loss": "loss=\udcff",
}  # fmt: skip


@pytest.mark.parametrize("kind", SETS)
def test_a_setting_that_is_none_is_refused(kind: str, cache: Path, demo: Path, tmp_path: Path) -> None:
    refused(train_main, "--features", cache, "--set", SETS[kind], "--out", tmp_path / "run")
    refused(extract_main, "cnn", "--dataset", demo, "--set", SETS[kind], "--out", tmp_path / "f.h5")


YAML_PARTS = ["loss", "train", "extends", "a", ":", " ", "\n", "  ", "- ", "[", "]", "{", "}", "&a", "*a", "<<", "!!", "?"]
YAML_PARTS += ["|", ">", "'", '"', "#", "1", ".inf", "2024-01-01", "null", ",", "\t", "crop", "grid"]
yaml_text = st.lists(st.sampled_from(YAML_PARTS) | st.text(max_size=2), max_size=25).map("".join)
no_shrinking = settings(phases=[Phase.explicit, Phase.generate])  # an example is short anyway


@no_shrinking
@given(text=yaml_text)
def test_any_text_is_no_traceback(text: str, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8", errors="replace")
    refused(extract_main, "cnn", "--dataset", demo, "--feature", tmp_path / "mine.yaml", "--out", tmp_path / "f.h5")


@no_shrinking
@given(key=st.sampled_from(["crop", "grid", "model", "layer", "mean", "weights", "extractor", "dtype"]), text=yaml_text)
def test_any_value_of_a_setting_is_no_traceback(key: str, text: str, demo: Path, tmp_path: Path) -> None:
    arguments = ["cnn", "--dataset", demo, "--out", tmp_path / "f.h5", "--weights-dir", tmp_path]
    refused_or_done(extract_main, *arguments, "--set", f"{key}={text}", "--set", "grid=none")
