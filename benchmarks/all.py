"""Run every benchmark whose inputs exist, one after the other, and record the minutes that each takes.

The commands come from the docstrings of the scripts. These are left out: commands with a comment, commands with a
placeholder in capitals, and commands that name a missing file or folder, such as the features and runs of Flickr8k. If a
benchmark fails, the others still run, and the exit code is 1. Each benchmark writes its own CSV. Then
``python -m benchmarks.performance`` builds docs/performance.md from these. Run nothing else on the machine meanwhile.

    python -m benchmarks.all
    python -m benchmarks.all --only ranks training --dry-run
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import AVX2, report

HERE = Path(__file__).parent
ROOT = HERE.parent


def commands() -> dict[str, list[list[str]]]:
    """Return the commands that can run here, by script: those of its docstring, without ``python``."""
    runnable = {}
    for path in sorted(HERE.glob("*.py")):
        said = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").replace("\\\n", " ")
        lines = re.findall(rf"^    python (benchmarks/{path.name}\b[^#\n]*)$", said, re.MULTILINE)
        if ready := [words for words in map(shlex.split, lines) if is_ready(words)]:
            runnable[path.stem] = ready
    return runnable


def is_ready(words: list[str]) -> bool:
    """Return whether a command names no placeholder, and the files and folders that it names exist."""
    named = [word.rpartition("=")[2] for word in words]
    paths = [name for name in named if "/" in name or name.endswith((".h5", ".json", ".txt"))]
    return not any(map(str.isupper, named)) and all((ROOT / path).exists() for path in paths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(commands()), help="run only these scripts")
    parser.add_argument("--avx2", action="store_true", help="compute as on a processor without AVX-512 and native bf16")
    parser.add_argument("--dry-run", action="store_true", help="print the commands without running them")
    arguments = parser.parse_args()
    environment = {**os.environ, **(AVX2 if arguments.avx2 else {})}
    rows, failed = [], []
    for name, lines in commands().items():
        for words in lines if arguments.only is None or name in arguments.only else []:
            print(f"$ python {shlex.join(words)}", flush=True)
            if arguments.dry_run:
                continue
            started = time.perf_counter()
            if subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False).returncode:
                failed.append(shlex.join(words))
            else:
                minutes = round((time.perf_counter() - started) / 60, 1)
                rows.append({"script": f"{name}.py", "arguments": shlex.join(words[1:]), "minutes": minutes})
    if rows and arguments.only is None:
        report("all", rows)
    print(*(f"failed: {line}" for line in failed), sep="\n", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
