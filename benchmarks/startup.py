"""Start-up time of the commands: processor seconds of each command on a demo with almost nothing to compute.

Claims, in multiples of the time of a program that only imports torch: ``--help`` and usage errors take at most 0.2,
``vse-data check`` and ``vse doctor`` 0.25, and ``vse-table``, which imports pandas, 0.45. ``vse-eval``, ``vse-extract``,
``vse-train`` and ``vse-search`` take at most 1.15 on a quiet machine, and ``vse-report``, which imports matplotlib, 1.5.
``snakemake -n`` plans all results and tables of the demo in 3.3.
Limits: the time includes the processing of a demo of 110 images, resized to 32 x 32 pixels, so it is an upper bound.
Each round runs everything once in a new folder, and the numbers are medians over rounds. The row ``ten commands`` is
the sum over the commands that ``snakemake results/demo_vsepp.html`` runs.

    python benchmarks/startup.py
    python benchmarks/startup.py --before OTHER_CHECKOUT

With ``--before`` every command of that checkout runs too, in turn, in a column ``before_s``.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from common import report

from vse.eval.tables import published_table_names
from vse.pipeline.presets.presets import list_preset_names

ROOT = Path(__file__).parents[1]
COMMANDS = ("data", "extract", "train", "embed", "eval", "report", "table", "search", "serve")
SHARDS = 4
TINY = f"""
n_images: 110
shards: {SHARDS}
features: {{ fc7: {{ model: squeezenet1_1, weights: random, layer: features.2, grid: 8, resize: 32, crop: 32 }} }}
experiment: {{ model: {{ dim: 32, word_dim: 16 }}, train: {{ epochs: 2 }} }}
"""
EXTRACT = "extract cnn --dataset data/demo/dataset.json --feature fc7"
WORKFLOW = [
    "data demo --out data/demo --images 110",
    *(f"{EXTRACT} --shard {k}" for k in range(SHARDS)),
    "extract merge --dataset data/demo/dataset.json --out features/demo_fc7.h5",
    "train --features features/demo_fc7.h5",
    "embed runs/demo_vsepp/seed-0",
    "eval runs/demo_vsepp/seed-0/test.h5 --out results/demo_vsepp.json",
    "report results/demo_vsepp.json --out results/demo_vsepp.html",
]
FURTHER = [
    "data check data/demo/dataset.json",
    "vse doctor",
    "table summary results/demo_vsepp.json --out summary.csv",
    "search runs/demo_vsepp/seed-0 circle",
]
STARTS = [*WORKFLOW, *FURTHER]
HELPS = [f"{command} --help" for command in (*COMMANDS, "vse")]
ERRORS = [f"{command} --no-such-option" for command in COMMANDS]
PLAN = "snakemake -n, all results and tables"


def cpu_seconds(program: list[str], tree: Path, folder: Path, code: int = 0) -> float:
    """Run a Python program in ``folder`` with the package of the checkout ``tree``; return its processor seconds.

    Raises ``AssertionError`` if the exit code is not ``code``.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree / "_vse"), "VSE_PRESETS": str(folder / "presets")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with (folder / "said").open("wb") as said:
        line = [sys.executable, *program]
        process = subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code, (program, (folder / "said").read_text())
    return used.ru_utime + used.ru_stime


def command_line(tree: Path, line: str) -> list[str]:
    """Return the arguments with which Python runs a command as the console script of the checkout ``tree`` does."""
    command, *arguments = line.split()
    settings = configparser.ConfigParser()
    settings.read(tree / "setup.cfg", encoding="utf-8")
    script = command if command == "vse" else f"vse-{command}"
    (target,) = re.findall(rf"^{script} *= *(.+)$", settings["options.entry_points"]["console_scripts"], re.MULTILINE)
    module, _, function = target.partition(":")
    return ["-c", f"import sys; from {module} import {function} as main; sys.exit(main())", *arguments]


def dry_run(tree: Path) -> list[str]:
    """Return the arguments with which Python runs Snakemake, to plan every result and every table of the demo."""
    results = [f"results/demo_{name}.json" for name in list_preset_names("experiments")]
    published = [f"{name}.{suffix}" for name in published_table_names() for suffix in ("csv", "tex")]
    tables = [f"results/tables/{file}" for file in ("summary_demo.csv", "ladder_demo.csv", *published)]
    options = ["--dry-run", "--quiet", "all", "--cores", "2", "--config", "dataset=demo"]
    return ["-m", "snakemake", "--snakefile", str(tree / "Snakefile"), *options, "--", *results, *tables]


def measured_once(tree: Path) -> dict[str, float]:
    """Run every command once, in a new folder, and return the processor seconds of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "presets" / "datasets").mkdir(parents=True)
        (folder / "presets" / "datasets" / "demo.yaml").write_text(TINY)
        measured = {"import torch": cpu_seconds(["-c", "import torch"], tree, folder)}
        for line in [*HELPS, *STARTS]:
            measured[line] = cpu_seconds(command_line(tree, line), tree, folder)
        for line in ERRORS:
            measured[line] = cpu_seconds(command_line(tree, line), tree, folder, code=2)
        (empty := folder / "empty").mkdir()  # without results, and without the preset of the small demo
        measured[PLAN] = cpu_seconds(dry_run(tree), tree, empty)
    return measured


def rows(rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    """Return medians over rounds: of the slowest ``--help`` and usage error, of every start, and of the ten commands."""
    torch = median(measured["import torch"] for measured in rounds["now"])
    groups = {
        "import torch": ["import torch"],
        "--help, the slowest": [max(HELPS, key=lambda line: median(m[line] for m in rounds["now"]))],
        "a usage error, the slowest": [max(ERRORS, key=lambda line: median(m[line] for m in rounds["now"]))],
        **{line if line.startswith("vse ") else f"vse-{line}": [line] for line in dict.fromkeys(STARTS)},
        "ten commands": WORKFLOW,
        PLAN: [PLAN],
    }
    table = []
    for name, lines in groups.items():
        seconds = {when: median(sum(m[line] for line in lines) for m in of) for when, of in rounds.items()}
        row: dict[str, object] = {"start": name, "cpu_s": round(seconds["now"], 2)}
        if "before" in seconds:
            row["before_s"] = round(seconds["before"], 2)
        table.append({**row, "beyond_torch_s": round(seconds["now"] - torch, 2)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout to measure too")
    arguments = parser.parse_args()
    trees = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for when, tree in trees.items():
            rounds[when].append(measured_once(tree))
    report("startup", rows(rounds))


if __name__ == "__main__":
    main()
