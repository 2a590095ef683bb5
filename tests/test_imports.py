"""Commands import what they run, and no more: counted in modules, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import console_scripts
from vse.pipeline.dataset.file_formats import convert_dataset

HEAVY = {*("torch", "torchvision", "faiss", "pandas", "matplotlib", "sklearn", "scipy", "cv2", "gensim")}
HEAVY |= {"timm", "open_clip", "transformers", "sentence_transformers", "torch._dynamo"}
COMMANDS = console_scripts()
ASKED = """
import importlib, sys
module, _, function = sys.argv[1].partition(":")
main = getattr(importlib.import_module(module), function)
for line in sys.argv[2:]:
    try:
        main(line.split())
    except SystemExit as stop:
        print("exits with", stop.code or 0, *sys.modules)
"""
SUBCOMMANDS = {"vse-data": ("demo", "fetch", "import-precomp"), "vse-extract": ("merge", "fit")}


def output(program: str, *arguments: object) -> list[str]:
    """The lines that a program prints in a process of its own."""
    line = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_usage_errors_import_nothing_heavy(command: str) -> None:
    expected = {"--help": 0, "--no-such-option": 2} | {f"{name} --help": 0 for name in SUBCOMMANDS.get(command, ())}
    ends = [line.split() for line in output(ASKED, COMMANDS[command], *expected) if line.startswith("exits with ")]
    assert [(int(code), (HEAVY | {"h5py"}) & set(modules)) for _, _, code, *modules in ends] == [
        (code, set()) for code in expected.values()
    ]


def test_reading_presets_as_the_workflow_does_imports_nothing_that_computes() -> None:
    program = (
        "import sys\nfrom vse.features.settings import load_feature_preset\n"
        "for name in ('fc7', 'regions', 'boxes', 'hglmm', 'clip'):\n"
        "    load_feature_preset(name, 'demo').list_rerun_settings()\n"
        "print(*sys.modules)"
    )
    assert not (HEAVY | {"h5py"}) & set(output(program)[-1].split())


MAIN_JOB = """
import sys
from pathlib import Path
from vse.eval.cli import eval_main
from vse.features.cli import extract_main
from vse.training.cli import embed_main, search_main, train_main

cache, folder = map(Path, sys.argv[1:])
run, result = folder / "run", folder / "result.json"
small = [f"--set={text}" for text in ("train.epochs=1", "train.min_count=1", "model.dim=8", "model.word_dim=8")]
tiny = [f"--set={text}" for text in ("model=squeezenet1_1", "layer=features.2", "grid=2", "resize=32", "crop=32")]
steps = [
    (train_main, ["--features", cache, "--out", run, *small]),
    (embed_main, [run, "--out", folder / "test.h5"]),
    (search_main, [run, "a red circle"]),
    (eval_main, [folder / "test.h5", "--out", result]),
    (extract_main, ["cnn", "--dataset", cache.parent.parent / "data" / "dataset.json", "--out", folder / "tiny.h5", *tiny]),
]
imported = []
for main, arguments in steps:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert not stop.code, (main, stop)
    imported.append(" ".join(sys.modules))
print(*imported, sep="\\n")
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_the_steps_of_the_main_job_import_only_what_they_use(cache: Path, tmp_path: Path) -> None:
    steps = output(MAIN_JOB, cache, tmp_path)[-5:]
    training, embedding, search, evaluation, extraction = (HEAVY & set(step.split()) for step in steps)
    assert training == embedding == {"torch"}
    assert evaluation == search == {"torch", "faiss"}
    assert extraction == {"torch", "faiss", "torchvision"}


READS_COLUMNS = """
import sys
from pathlib import Path
from vse.pipeline.dataset.columns import ImageColumns
from vse.pipeline.dataset.parquet_io import ParquetColumns
from vse.pipeline.files.inputs import InputFile

images = list(ImageColumns(ParquetColumns(InputFile(Path(sys.argv[1])))))  # without the check of a new file
print(images[0].captions[0].raw, images[0].split, *sys.modules, sep="\\n")
"""


def test_columns_are_read_without_pandas(tmp_path: Path) -> None:
    caption = {"sentid": 7, "imgid": 1, "raw": "a dog", "tokens": ["a", "dog"]}
    image = {"imgid": 1, "filename": "1.jpg", "split": "test", "sentences": [caption]}
    file = tmp_path / "dataset.json"
    file.write_text(json.dumps({"dataset": "made_up", "images": [image]}))
    text, split, *modules = output(READS_COLUMNS, convert_dataset(file, tmp_path / "columns"))
    assert (text, split) == ("a dog", "test")
    assert "pyarrow" in modules
    assert "pandas" not in modules


def test_the_check_of_a_data_set_imports_no_command_that_reads_features(few: Path) -> None:
    line = next(line for line in output(ASKED, COMMANDS["vse-data"], f"check {few}") if line.startswith("exits with "))
    _, _, code, *modules = line.split()
    assert code == "0"
    assert not {"vse.features", "jaxtyping", "h5py", *HEAVY} & set(modules)


ASKS_WHEN_TORCH_IS_LOADED = """
import importlib.abc, os, sys
from vse.eval.cli import eval_main

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch:", os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
eval_main(["nowhere.h5", "--out", "result.json"])
"""


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"SLURM_CPUS_PER_TASK": "1"}, "PASSIVE None"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "1000"}, "None 1000"),
    ],
)
def test_how_threads_wait_is_settled_before_torch_is_loaded(given: dict[str, str], policy: str) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {key: value for key, value in os.environ.items() if key not in names} | given
    command = [sys.executable, "-c", ASKS_WHEN_TORCH_IS_LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"torch: {policy}"], done.stderr
