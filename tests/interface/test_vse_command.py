"""``vse`` has every command of the package, and ``vse doctor`` says what is installed and what is missing."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, console_scripts
from vse.cli import ABILITY_BY_EXTRA, COMMANDS_BY_TASK, main

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == code
    return "".join(capsys.readouterr())


def test_every_command_of_the_package_is_a_sub_command_of_the_same_name() -> None:
    names = {name for commands in COMMANDS_BY_TASK.values() for name in commands}
    assert {f"vse-{name}" for name in names} >= console_scripts().keys() - {"vse"}


def test_the_help_lists_the_commands_by_task(capsys: Capture) -> None:
    text = answer(capsys, "--help")
    places = [text.index(f"\n{task}:\n") for task in COMMANDS_BY_TASK]
    assert places == sorted(places)
    assert re.search(r"^  train +\w", text, re.M)
    assert answer(capsys, "train", "--help").startswith("Usage: vse train [OPTIONS]")


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: Capture) -> None:
    assert "no command 'trian' (did you mean 'train'?" in answer(capsys, "trian", code=2)
    assert "'--featurs'" in answer(capsys, "train", "--featurs", "x", code=2)
    assert "Did you mean 'check'?" in answer(capsys, "data", "chek", code=2)


def test_a_misspelt_file_or_choice_is_answered_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/f8k").mkdir(parents=True)
    (tmp_path / "data/f8k/dataset.json").touch()
    for wrong in ("data/f8kk/dataset.json", "dta/f8k/dataset.jsn", str(tmp_path / "data/f8k/datast.json")):
        right = str(tmp_path / "data/f8k/dataset.json") if Path(wrong).is_absolute() else "data/f8k/dataset.json"
        assert answer(capsys, "data", "check", wrong, code=2).endswith(f"; did you mean {right}?\n")
    assert "did you mean" not in answer(capsys, "data", "check", "elsewhere/captions.json", code=2)
    assert "did you mean 'ladder'?" in answer(capsys, "table", "laddr", code=2)


DATA_COMMANDS = """
import sys
from vse.cli import load_command
if sys.argv[1] == "all":
    print(*load_command("data").commands)
else:
    load_command("data").main(sys.argv[1:], "vse-data")
"""


def test_commands_of_vse_data_are_found_before_their_module_is_imported() -> None:
    def said(*words: str) -> str:
        done = subprocess.run([sys.executable, "-c", DATA_COMMANDS, *words], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    names = said("all").split()
    assert {"demo", "check", "import-npy", "plan"} < set(names)
    assert re.findall(r"^  ([a-z-]+) ", said("--help").partition("Commands:")[2], re.M) == sorted(names)
    assert "Usage: vse-data import-npy" in said("import-npy", "--help")
    assert "'import-npy'" in said("import-ny")


def test_a_shell_completes_commands_and_options(commands: Path) -> None:
    def completed(words: str) -> set[str]:
        variables = {"_VSE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run([commands / "vse"], env={**os.environ, **variables}, capture_output=True, text=True, check=True)
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("vse tr") == {"train"}
    assert {"check", "import-npy"} < completed("vse data ")
    assert "--features" in completed("vse train --fea")


def test_the_doctor_knows_every_extra_and_the_installation_page_lists_the_same() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert ABILITY_BY_EXTRA.keys() == setup["options.extras_require"].keys()
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    assert ABILITY_BY_EXTRA.keys() == set(re.findall(r"^\| `(\w+)` \|", page, re.M))


def test_the_doctor_says_which_extras_lack_packages(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def version(name: str) -> str:
        if name in ("timm", "openpyxl"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("vse.cli.metadata.version", version)
    text = answer(capsys, "doctor")
    assert "  missing  timm, for image features of timm's networks, such as effnet and dino (lacks timm): " in text
    assert "  missing  xlsx, for spreadsheets of Excel (.xlsx) (lacks openpyxl): " in text
    complete = next(line for line in text.splitlines() if line.startswith("extras ")).split()[1:]
    assert {"text,", "storage,"} < set(complete)
    assert not {"timm,", "xlsx,", "test"} & set(complete)


def test_the_doctor_says_where_weights_are_and_what_misses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("TORCH_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("VSE_WEIGHTS_DIR", str(tmp_path))
    (tmp_path / "vgg19.pth").touch()
    (tmp_path / "all-MiniLM-L6-v2").mkdir()
    (tmp_path / "HF_HOME/hub/models--timm--tf_efficientnet_lite0.in1k").mkdir(parents=True)
    text = answer(capsys, "doctor")
    found, missing = text.split("  missing  weights")
    for model in ("vgg19", "sentence-transformers/all-MiniLM-L6-v2", "timm/tf_efficientnet_lite0"):
        assert f"weights    {model}: {tmp_path}" in found
        assert f" {model}, for " not in missing
    assert "resnet152, for boxes_resnet" in missing
    assert f"put their files into {tmp_path}" in missing
