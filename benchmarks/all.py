"""Run every benchmark whose inputs are there, one after the other, and write down how many minutes each took.

The commands are those of the docstrings, except those with a comment, and those that name a file or folder that is not there
(the features and runs of Flickr8k, for instance). One that fails does not stop the others; the exit code is then 1. Each
writes its own CSV, and docs/performance.md is made from them: ``python -m benchmarks.performance``. Nothing else should run on
the machine meanwhile.

    python -m benchmarks.all
    python -m benchmarks.all --only ranks training --dry-run
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


def commands() -> dict[str, list[list[str]]]:
    """Of each script the commands of its docstring that can run here, without ``python``."""
    runnable = {}
    for path in sorted(HERE.glob("*.py")):
        said = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").replace("\\\n", " ")
        lines = re.findall(rf"^    python (benchmarks/{path.name}\b[^#\n]*)$", said, re.MULTILINE)
        if ready := [words for words in map(shlex.split, lines) if is_ready(words)]:
            runnable[path.stem] = ready
    return runnable


def is_ready(words: list[str]) -> bool:
    """Whether the files and folders that a command names are there."""
    named = [word.rpartition("=")[2] for word in words]
    return all((ROOT / name).exists() for name in named if "/" in name or name.endswith((".h5", ".json", ".txt")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(commands()), help="of these scripts")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    arguments = parser.parse_args()
    rows, failed = [], []
    for name, lines in commands().items():
        for words in lines if arguments.only is None or name in arguments.only else []:
            print(f"$ python {shlex.join(words)}", flush=True)
            if arguments.dry_run:
                continue
            started = time.perf_counter()
            if subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode:
                failed.append(shlex.join(words))
            else:
                minutes = round((time.perf_counter() - started) / 60, 1)
                rows.append({"script": f"{name}.py", "arguments": shlex.join(words[1:]), "minutes": minutes})
    if rows and arguments.only is None:
        from benchmarks.common import report

        report("all", rows)
    print(*(f"failed: {line}" for line in failed), sep="\n", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
