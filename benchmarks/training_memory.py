"""Peak memory of ``vse-train`` by phase on a cache of COCO's size, with features in memory and memory-mapped.

Claims: on a processor, training takes under 4 GB with the features in memory, and under 2 GB with ``features_in_memory:
false``.
Limits: features (113,287 x 4096 float16) and captions (566,435, of 11 words from a vocabulary of 11,000) are made up;
1,000 images are for validation. The model is VSE++ with the paper's settings. SIGTERM ends the training after ``--steps``
steps, so it writes a checkpoint, but does not validate. Memory is resident memory in units of 1e9 bytes. It includes
pages that are mapped from files (``file_gb``: the cache and the libraries), though the system can reclaim these. The row
``whole`` is the peak that the system records; the script samples the phases fifty times a second.

    python benchmarks/training_memory.py --steps 300
    python benchmarks/training_memory.py --steps 10000 --set train.epochs=1    # a whole epoch, and its validation
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
import tempfile
import termios
from contextlib import suppress
from pathlib import Path

from common import report

from training import make_up
from vse.pipeline.command import count_allowed_cores

IMAGES, VAL, DIM, WORDS, SHARDS = 113_287, 1_000, 4096, 11_000, 64
KINDS = {"VmRSS": "peak_gb", "RssAnon": "anon_gb", "RssFile": "file_gb"}


def resident(pid: int) -> dict[str, float]:
    """Return the resident memory of a process, in total and by kind; an empty dictionary once it has ended."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {KINDS[name]: int(value.split()[0]) * 1024 / 1e9 for name, _, value in lines if name in KINDS}


def train(cache: Path, out: Path, in_memory: bool, steps: int, threads: int, sets: list[str]) -> list[dict[str, object]]:
    """Run ``vse-train``, stop it after ``steps`` steps, and return the peak memory of each phase.

    The phases are ``captions``, until the command opens the first shard; ``features``, until it creates the run folder;
    ``training``, until the signal; and ``saving``.
    """
    sets = [f"train.features_in_memory={str(in_memory).lower()}", *sets]
    command = ["vse-train", "--features", str(cache), "--out", str(out), "--device", "cpu", "--threads", str(threads)]
    command += [argument for setting in sets for argument in ("--set", setting)]
    screen, terminal = os.openpty()  # the command prints its progress only on a terminal
    termios.tcsetwinsize(terminal, (24, 120))
    program = str(Path(sys.executable).parent / command[0])
    pid = os.posix_spawn(program, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, terminal, 2)])
    phase, peaks, done, text = "captions", {}, 0, ""
    ended = 0
    while not ended:
        if select.select([screen], [], [], 0.02)[0]:
            text = (text + os.read(screen, 65536).decode(errors="replace"))[-2000:]
            done = max([done, *(int(step) for step in re.findall(r"(\d+)/\d+ \[", text))])
        peak = peaks.setdefault(phase, dict.fromkeys(KINDS.values(), 0.0))
        peak.update({kind: max(value, peak[kind]) for kind, value in resident(pid).items()})
        if phase == "captions" and is_open(pid, f"{cache.stem}.shards"):
            phase = "features"
        elif phase == "features" and (out / "run.json").exists():
            phase = "training"
        elif phase == "training" and done >= steps:
            os.kill(pid, signal.SIGTERM)
            phase = "saving"
        ended, status, used = os.wait4(pid, os.WNOHANG)
    os.close(terminal)
    os.close(screen)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 128 + signal.SIGTERM) or not (out / "last.ckpt").exists():
        sys.exit(f"{' '.join(command)} ended with {code}:\n{text}")
    peaks["whole"] = {"peak_gb": used.ru_maxrss * 1024 / 1e9, "anon_gb": None, "file_gb": None}
    return [
        {
            "features_in_memory": in_memory,
            "settings": " ".join(sets[1:]),
            "threads": threads,
            "steps": done,
            "phase": phase,
            **{kind: value and round(value, 2) for kind, value in peak.items()},
        }
        for phase, peak in peaks.items()
    ]


def is_open(pid: int, folder: str) -> bool:
    """Return whether a process has a file of a folder open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if link.readlink().parent.name == folder:
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=count_allowed_cores())
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="a setting of vse-train")
    parser.add_argument("--dir", type=Path, help="folder of the made-up cache (1.1 GB), which later runs reuse")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        cache = folder / "made-up.h5"
        if not cache.exists():
            make_up(folder, {"train": IMAGES - VAL, "val": VAL}, DIM, WORDS, SHARDS)
        with tempfile.TemporaryDirectory(dir=folder) as runs:
            rows = []
            for in_memory in (False, True):
                out = Path(runs, f"in_memory_{in_memory}")
                rows += train(cache, out, in_memory, arguments.steps, arguments.threads, arguments.sets)
            report("training_memory", rows)


if __name__ == "__main__":
    main()
