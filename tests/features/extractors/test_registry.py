"""An extractor is one new file and one edited line, and its settings import nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks, patched

ROOMS = ("pipeline", "features", "train", "eval")
HEAVY = ("torch", "torchvision", "h5py", "sklearn", "faiss", "scipy", "gensim", "timm")


def test_the_guide_adds_an_extractor_by_one_new_file_and_one_edited_line() -> None:
    code = [block for block in blocks("docs/howto/extractor.md") if block.title.startswith(tuple(f"{r}/" for r in ROOMS))]
    for name in ("colours", "letters"):
        of_extractor = [block for block in code if name in block.text]
        new = [block for block in of_extractor if block.language != "diff"]
        edits = [block for block in of_extractor if block.language == "diff"]
        assert [block.title for block in new] == [f"features/extractors/{name}.py"]
        assert not (ROOT / new[0].title).exists()
        assert [block.title for block in edits] == ["features/settings/__init__.py"]
        lines = [line for line in edits[0].text.splitlines() if line.startswith(("+", "-"))]
        assert lines == [f'+        "{name}": "vse.features.extractors.{name}:{name.title()}Config",']
    text = (ROOT / "features/settings/__init__.py").read_text(encoding="utf-8")
    for block in code:
        text = patched(text, block.text) if block.language == "diff" else text
    compile(text, "features/settings/__init__.py", "exec")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["cnn", "--help"], ["fit", "--help"], ["cnn"], ["cnn", "--dataset"], ["merge", "--shards", "x"], ["nothing"]],
)
def test_help_and_usage_errors_import_nothing_that_computes(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom vse.features.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert stop.code in (0, 2)\n"
        f"print('heavy:', *sorted({set(HEAVY)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_reading_presets_as_the_workflow_does_imports_nothing_that_computes() -> None:
    program = (
        "import sys\nfrom vse.features.settings import load_feature\n"
        "for name in ('fc7', 'regions', 'boxes', 'hglmm', 'clip'):\n    load_feature(name, 'demo').triggers()\n"
        f"print('heavy:', *sorted({set(HEAVY)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "heavy:\n"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["cache.reader", "exchange.arrays", "extractors.captions", "extractors.cnn"])
def test_torchvision_is_imported_only_where_it_runs(module: str) -> None:
    program = f"import sys, vse.features.{module}\nassert 'torchvision' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
