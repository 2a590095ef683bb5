"""Speed of this checkout compared with another checkout of the project; their runs take turns.

Each run is a process of its own. It runs the timed code twice and reports the processor time of the second run, on one
thread. The numbers are medians over rounds, and ``times_faster`` is the median of the ratios of the rounds. The data are
random, of the sizes that docs/performance.md names. An extraction folds batch norms if the checkout can do so.

    git worktree add ../before v0.1.0
    python benchmarks/before.py ../before
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

from common import report
from evaluation import made
from extraction import pictures

from training import make_up

HERE = Path(__file__).parent
IMAGES, PICTURES = 256, 64
TIMED = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import torch
torch.set_num_threads(1)
{setup}
for _ in range(2):
    started = time.process_time()
    {line}
    taken = time.process_time() - started
print(taken)
"""
TRAINING = """
from training import Data, OurLoop, Path, load_experiment
loop = OurLoop(load_experiment("vsepp"), Data.load(Path("made-up.h5"), 1), 0, PRECISION)
"""
MIXTURE = """
import numpy as np
from vse.features.extractors import mixture
from vse.features.extractors.mixture import fit_mixture
data = torch.from_numpy(np.random.default_rng(0).laplace(size=(5000, 300)))
draw = getattr(mixture, "draw_initial_mixture", None) or mixture.initial_mixture  # the name in older checkouts
start = draw(data, 30, 0)
"""
RANKS = """
from vse.eval.ranking.ranks import ranks_from_embeddings
image_of_caption = torch.arange(25_000) // 5
images = torch.nn.functional.normalize(torch.randn(5000, 1024), dim=1)
captions = torch.nn.functional.normalize(images[image_of_caption] + 0.3 * torch.randn(25_000, 1024), dim=1)
"""
QUERY = """
import numpy as np
try:
    from vse.eval.search.top_k import search_exactly
except ImportError:  # the name in earlier checkouts
    from vse.eval.search.top_k import exact_search as search_exactly
rng = np.random.default_rng(0)
corpus, query = rng.standard_normal((1_000_000, 512), np.float32), rng.standard_normal((1, 512), np.float32)
"""
EXTRACTION = """
import extraction
from extraction import CnnConfig, CnnExtractor, Path
ExtractorInput = getattr(extraction, "ExtractorInput", None) or extraction.Item  # the name in older checkouts
items = [ExtractorInput(k, path) for k, path in enumerate(sorted(Path("images").glob("*.jpg")))]
folds = {"fold_batch_norm": True} if "fold_batch_norm" in CnnConfig.model_fields else {}
settings = {"model": "timm/tf_efficientnet_lite0", "weights": "random", "batch_size": 16, "workers": 1, **folds}
extractor = CnnExtractor(CnnConfig(name="effnet", precision=PRECISION, **settings), device="cpu")
"""


class Compared(NamedTuple):
    """A benchmarked program: its preparation and its timed line, and how to report the seconds.

    The reported number is ``times`` multiplied by the seconds or, if ``unit`` is a rate, divided by them.
    """

    setup: str
    line: str
    unit: str = "s"
    times: float = 1

    def number(self, seconds: float) -> float:
        """Return seconds converted to the unit."""
        return self.times / seconds if "/" in self.unit else self.times * seconds


def _training(precision: str) -> Compared:
    return Compared(TRAINING.replace("PRECISION", repr(precision)), "loop.epoch()", "pairs/cpu-s", 5 * IMAGES)


def _extraction(precision: str) -> Compared:
    return Compared(EXTRACTION.replace("PRECISION", repr(precision)), "extractor.extract(items)", "images/cpu-s", PICTURES)


COMPARED = {
    "ranks": Compared(RANKS, "ranks_from_embeddings(images, captions, image_of_caption)"),
    "evaluation": Compared("import vse", "vse.evaluate('coco.h5')"),
    "query": Compared(QUERY, "search_exactly(corpus, query, 10)", "ms", 1000),
    "training, fp32": _training("fp32"),
    "training, bf16": _training("bf16"),
    "extraction": _extraction("fp32"),
    "extraction, bf16": _extraction("bf16"),
    "EM, gaussian": Compared(MIXTURE, "fit_mixture(data, start, 10, 'gaussian')"),
    "EM, hybrid": Compared(MIXTURE, "fit_mixture(data, start, 10, 'hybrid')"),
}


def make_inputs(folder: Path) -> None:
    """Write the input files of the programs."""
    made(folder / "coco.h5")
    pictures(folder, PICTURES)
    make_up(folder, {"train": IMAGES, "val": 10}, 4096, 3000, 1)


def cpu_seconds(tree: Path, work: Compared, folder: Path, variables: Mapping[str, str] = MappingProxyType({})) -> float:
    """Return the processor time of a program's second run in ``folder``, with the package of the checkout ``tree``.

    ``variables`` are further environment variables of the process.
    """
    program = TIMED.format(benchmarks=str(HERE), setup=work.setup, line=work.line)
    environment = {**os.environ, "PYTHONPATH": str(tree / "_vse"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(said.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--works", nargs="+", choices=COMPARED, default=list(COMPARED))
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "now": HERE.parent}
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for name in arguments.works:
            work, rounds = COMPARED[name], []
            for _ in range(arguments.rounds):
                rounds.append({when: cpu_seconds(tree, work, folder) for when, tree in trees.items()})
                print(name, rounds[-1], flush=True)
            numbers = {when: round(work.number(median(one[when] for one in rounds)), 3) for when in trees}
            ratio = round(median(one["before"] / one["now"] for one in rounds), 2)
            rows.append({"work": name, "unit": work.unit, **numbers, "times_faster": ratio})
    report("before", rows)


if __name__ == "__main__":
    main()
