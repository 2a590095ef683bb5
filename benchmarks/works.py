"""Sources of the numbers of docs/performance.md: benchmark, row and column of each.

:data:`WORKS` has a row of the table for each benchmarked program; change it to change the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

RESULTS = Path(__file__).parent / "results"
MACHINES = {"amd-epyc": "AMD EPYC", "intel-xeon-processor": "Intel Xeon"}  # in order of preference


@dataclass(frozen=True)
class Cell:
    """The source of a number: a column of a benchmark's newest CSV, in the only row whose other columns have these values."""

    csv: str
    column: str
    where: Mapping[str, object]


def cell(csv: str, column: str, **where: object) -> Cell:
    return Cell(csv, column, where)


@dataclass(frozen=True)
class Work:
    """A row of the table.

    unit : the unit of all numbers; a unit with ``/`` is a rate, and more is better
    now : time (or rate) of our program
    peer, limit : name and time of an alternative program, and of the least that the machine needs
    to_reach : the target; ``(1.5, "limit")`` is 1.5 times the limit, ``(5, "")`` is 5 of the unit
    """

    work: str
    unit: str
    now: Cell
    peer: tuple[str, Cell] | None = None
    limit: tuple[str, Cell] | None = None
    to_reach: tuple[float, str] | None = None


_HELP, _ERROR = ({"start": f"{what}, the slowest"} for what in ("--help", "a usage error"))
_SCORED, _MAPPED = {"images": 5000}, {"reader": "plain array, mapped"}
_FREE, _BUSY = {"neighbour": "none"}, {"neighbour": "one busy core"}
_TODNET = "f8k_folds_todnet_minilm/seed-0"
_TORCH = ("import torch", cell("startup", "cpu_s", start="import torch"))


def _start(command: str, line: str, needs_torch: bool = True) -> Work:
    """Return the row of a command's start-up, including its work on an almost empty demo.

    The target is 1.15 times the import of torch or, for a command that needs no torch, 0.5 s.
    """
    now = cell("startup", "cpu_s", start=f"{command} {line}".strip())
    limit, to_reach = (_TORCH, (1.15, "limit")) if needs_torch else (None, (0.5, ""))
    return Work(f"start-up of `{command}`", "s", now, limit=limit, to_reach=to_reach)


def _training(precision: str, threads: int, factor: float) -> Work:
    rate = partial(cell, "training", "pairs_per_cpu_s", threads=threads)
    return Work(
        f"training, {precision}, {'one thread' if threads == 1 else 'two threads'}",
        "pairs/cpu-s",
        rate(loop=f"ours, {precision}"),
        peer=("published code, fp32", rate(loop="published, fp32")),
        limit=("matrix products alone", rate(loop=f"limit, {precision}")),
        to_reach=(factor, "limit"),
    )


def _step(preset: str, factor: float | None = None) -> Work:
    step = partial(cell, "steps", preset=preset)
    return Work(
        f"training step of `{preset}`, fp32",
        "s",
        step("step_cpu_s"),
        limit=("matrix products alone", step("products_cpu_s")),
        to_reach=None if factor is None else (factor, "limit"),
    )


def _dataset(what: str, column: str, limit: tuple[str, str] | None = None, factor: float | None = None) -> Work:
    """Return a row on a ``dataset.json`` of COCO's size."""
    seconds = partial(cell, "dataset", images=123_287)
    return Work(
        f"{what}, 123,287 images",
        "s",
        seconds(column=f"{column}_cpu_s"),
        limit=None if limit is None else (limit[0], seconds(column=f"{limit[1]}_cpu_s")),
        to_reach=None if factor is None else (factor, "limit"),
    )


def _scan_scores(attention: str) -> Work:
    scores = partial(cell, "scan", work="scores of 1000 x 5000", attention=attention, precision="fp32")
    return Work(
        f"scores of SCAN {attention}, a million pairs", "s", scores("ours_s"), peer=("published code", scores("published_s"))
    )


def _texts(encoder: str, peer: str) -> Work:
    rate = partial(cell, "text", encoder=encoder, precision="fp32", device="cpu")
    return Work(f"captions by `{encoder}`, fp32", "captions/s", rate("ours_per_s"), peer=(peer, rate("library_per_s")))


WORKS = (
    Work(
        "exact ranks, 5,000 x 25,000 x 1,024, one thread",
        "s",
        cell("ranks", "ours_cpu_s", **_SCORED),
        peer=("FAISS, top 10 in both directions", cell("ranks", "faiss_top_10_cpu_s", **_SCORED)),
        limit=("matrix product", cell("ranks", "sgemm_cpu_s", **_SCORED)),
        to_reach=(1.5, "limit"),
    ),
    Work(
        "memory of exact ranks, 50,000 images",
        "MB",
        cell("ranks_memory", "own_mb", images=50_000),
        limit=("500 images", cell("ranks_memory", "own_mb", images=500)),
    ),
    Work(
        "`vse-eval`, 5,000 x 25,000 x 1,024",
        "s",
        cell("evaluation", "ours_cpu_s", **_SCORED),
        peer=("published code", cell("evaluation", "published_cpu_s", **_SCORED)),
    ),
    *(
        Work(f"the demo, until its {until} {verb} written", "s", cell("demo", "cpu_s", until=until), to_reach=(goal, ""))
        for until, verb, goal in (("features", "are", 90), ("report", "is", 200))
    ),
    Work(
        "two seeds of the demo, both at once on one core each",
        "s",
        cell("seeds", "wall_s", trainings="both at once"),
        peer=("one after the other on two cores", cell("seeds", "wall_s", trainings="one after the other")),
    ),
    Work(
        "`--help`, the slowest command",
        "s",
        cell("startup", "cpu_s", **_HELP),
        to_reach=(0.5, ""),
    ),
    Work(
        "a usage error, the slowest command",
        "s",
        cell("startup", "cpu_s", **_ERROR),
        to_reach=(0.5, ""),
    ),
    _start("vse-data check", "data/demo/dataset.json", needs_torch=False),
    _start("vse doctor", "", needs_torch=False),
    _start("vse-table", "summary results/demo_vsepp.json --out summary.csv", needs_torch=False),
    _start("vse-eval", "runs/demo_vsepp/seed-0/test.h5 --out results/demo_vsepp.json"),
    _start("vse-train", "--features features/demo_fc7.h5"),
    _start("vse-extract", "cnn --dataset data/demo/dataset.json --feature fc7 --shard 0"),
    Work(
        "`vse-search` with an index, 5,000 images",
        "s",
        cell("searching", "cpu_s", search="cold", **_SCORED),
        limit=("import torch", cell("searching", "cpu_s", search="import torch")),
        to_reach=(1.54, "limit"),
    ),
    Work(
        "a second query in the same process",
        "s",
        cell("searching", "cpu_s", search="in process", **_SCORED),
        to_reach=(0.05, ""),
    ),
    Work(
        "an exact query, 1,000,000 images x 512",
        "ms",
        cell("index_one_query", "ours_cpu_ms"),
        peer=("FAISS", cell("index_one_query", "faiss_cpu_ms")),
        limit=("sum of all numbers", cell("index_one_query", "one_read_cpu_ms")),
        to_reach=(1.1, "peer"),
    ),
    *(_training(precision, n, factor) for precision, factor in (("bf16", 2.5), ("fp32", 1.3)) for n in (1, 2)),
    Work(
        "training on an idle machine, two threads",
        "pairs/s",
        cell("waiting", "pairs_per_s", waiting="ours", **_FREE),
        peer=("OpenMP's default", cell("waiting", "pairs_per_s", waiting="default of OpenMP", **_FREE)),
    ),
    Work(
        "training next to one busy core, two threads",
        "pairs/s",
        cell("waiting", "pairs_per_s", waiting="ours", **_BUSY),
        peer=("OpenMP's default", cell("waiting", "pairs_per_s", waiting="default of OpenMP", **_BUSY)),
        limit=("one thread", cell("waiting", "pairs_per_s", waiting="one thread", **_BUSY)),
    ),
    Work(
        "reading a batch of 128 rows, memory-mapped",
        "ms",
        cell("reading", "ms_per_batch", reader="ours, mapped"),
        peer=("h5py", cell("reading", "ms_per_batch", reader="h5py, virtual views")),
        limit=("a plain array", cell("reading", "ms_per_batch", **_MAPPED)),
        to_reach=(1.5, "limit"),
    ),
    Work(
        "extraction of `effnet`, fp32",
        "images/cpu-s",
        cell("extraction", "extract_images_per_cpu_s", preset="effnet"),
        peer=("timm and a DataLoader", cell("extraction", "timm_images_per_cpu_s", preset="effnet")),
        limit=("the network alone, batch norms not folded", cell("extraction", "forward_images_per_cpu_s", preset="effnet")),
        to_reach=(1 / 1.2, "limit"),
    ),
    Work(
        "EM of HGLMM, Gaussian mixture",
        "s",
        cell("hglmm_em", "cpu_s", what="ours, gaussian"),
        peer=("scikit-learn", cell("hglmm_em", "cpu_s", what="scikit-learn, gaussian")),
        to_reach=(1.15, "peer"),
    ),
    Work(
        "EM of HGLMM, hybrid mixture",
        "s",
        cell("hglmm_em", "cpu_s", what="ours, hybrid"),
        peer=("scikit-learn, Gaussian", cell("hglmm_em", "cpu_s", what="scikit-learn, gaussian")),
    ),
    Work(
        "tf-idf of 30,000 captions, float16",
        "s",
        cell("tfidf", "cpu_s", preset="tfidf", what="ours, float16"),
        limit=("scikit-learn, sparse", cell("tfidf", "cpu_s", preset="tfidf", what="scikit-learn, sparse (limit)")),
        to_reach=(0.2, ""),
    ),
    Work(
        "Fisher vectors of 1,000 words",
        "s",
        cell("hglmm_speed", "ours_s", what="Fisher vectors, single precision, as the encoder"),
        peer=(
            "a loop over single numbers",
            cell("hglmm_speed", "loop_s", what="Fisher vectors, single precision, as the encoder"),
        ),
    ),
    Work(
        "captions by `hglmm`, 6,000 numbers",
        "captions/cpu-s",
        cell("hglmm_encoding", "captions_per_cpu_s", preset="hglmm"),
        limit=("projection on the principal components alone", cell("hglmm_encoding", "projection_per_cpu_s", preset="hglmm")),
        to_reach=(2, "limit"),
    ),
    _texts("minilm", "sentence-transformers"),
    _texts("clip_text", "OpenCLIP"),
    _step("infonce_minilm_effnet", 1.4),
    _step("twobranch_effnet"),
    *(_step(preset, 1.3) for preset in ("scan_t2i_avg", "scan_i2t_avg")),
    *map(_step, ("phrase_embedding_effnet", "phrase_network_effnet")),
    *map(_scan_scores, ("t2i", "i2t")),
    Work(
        "scores of TOD-Net, 1,000 x 5,000, by shortlist",
        "s",
        cell("shortlist_f8k", "shortlist_cpu_s", run=_TODNET),
        peer=("all pairs", cell("shortlist_f8k", "complete_cpu_s", run=_TODNET)),
        to_reach=(600, ""),
    ),
    _dataset("first read of `dataset.json`", "parsed", ("Python's JSON parser", "json"), 2),
    _dataset("later read of `dataset.json`, one split", "columns"),
    _dataset("splitting captions into words", "words", ("`str.lower` and `str.split`", "split"), 2),
    Work("import of 1,000,000 pairs", "s", cell("large_data", "cpu_s", step="import", pairs=1_000_000), to_reach=(40, "")),
    Work(
        "planning of all results and tables of the demo by Snakemake",
        "s",
        cell("startup", "cpu_s", start="snakemake -n, all results and tables"),
        to_reach=(10, ""),
    ),
    Work(
        "planning by Snakemake, 123,287 photographs",
        "s",
        cell("planning", "cpu_s", photos=123_287, state="extracted"),
        limit=("import of Snakemake", cell("planning", "import_cpu_s", photos=123_287, state="extracted")),
    ),
    Work(
        "a query to `vse-serve`, 32 clients, 100,000 images x 512",
        "ms",
        cell("clients", "cpu_ms", what="server", when="now", clients=32),
        peer=("one client", cell("clients", "cpu_ms", what="server", when="now", clients=1)),
        limit=("one read", cell("clients", "cpu_ms", what="one read", when="now", clients=0)),
    ),
)


def newest(name: str, avx2: bool = False) -> Path | None:
    """Return the CSV of a benchmark: from the first machine of :data:`MACHINES` that has one, with the newest torch.

    avx2 : whether the benchmark ran as on a processor with AVX2 alone
    """
    candidates, places = [], list(MACHINES)
    for path in RESULTS.glob(f"{name}_*.csv"):
        suffix = "_avx2" if avx2 else ""
        if (match := re.fullmatch(rf"{name}_([a-z0-9-]+)_(\d+)-cores_torch-([\d.]+){suffix}", path.stem)) is not None:
            machine, cores, version = match.groups()
            place = places.index(machine) if machine in MACHINES else len(places)
            candidates.append((-place, tuple(map(int, version.split("."))), int(cores), path))
    return max(candidates)[-1] if candidates else None


def machine_of(name: str, avx2: bool = False) -> str:
    """Return the processor, its instruction set, cores and torch version of a benchmark's CSV, in words."""
    path = newest(name, avx2)
    if path is None:
        return ""
    machine, cores, torch = path.stem.removeprefix(f"{name}_").removesuffix("_avx2").split("_")
    table = table_of(name, avx2)
    known = "instructions" in table.columns and not table.empty
    processor = MACHINES.get(machine, machine) + (f" with {table['instructions'].iloc[0]}" if known else "")
    return ", ".join((processor, cores.replace("-", " "), torch.replace("-", " ")))


@cache
def table_of(name: str, avx2: bool = False) -> pd.DataFrame:
    path = newest(name, avx2)
    return pd.DataFrame() if path is None else pd.read_csv(path)


def value_of(asked: Cell | None, avx2: bool = False) -> float:
    """Return the number of a cell, NaN if it is not measured. Raises ``ValueError`` if several rows fit."""
    if asked is None:
        return np.nan
    table = table_of(asked.csv, avx2)
    if not {asked.column, *asked.where} <= set(table.columns):
        return np.nan
    for column, wanted in asked.where.items():
        table = table[table[column] == wanted]
    if len(table) > 1:
        raise ValueError(f"{len(table)} rows of {newest(asked.csv)} fit {dict(asked.where)}")
    return np.nan if table.empty else float(table[asked.column].iloc[0])


def measured(works: Iterable[Work] = WORKS, avx2: bool = False) -> pd.DataFrame:
    """Return a table of docs/performance.md: a row for each program, with its numbers, its target and its machine.

    avx2 : whether the programs ran as on a processor with AVX2 alone
    """
    rows = []
    for work in works:
        peer_is, peer = work.peer or ("", None)
        limit_is, limit = work.limit or ("", None)
        numbers = {name: value_of(source, avx2) for name, source in (("now", work.now), ("peer", peer), ("limit", limit))}
        factor, of = work.to_reach or (np.nan, "")
        goal = _times(work.unit, numbers[of], factor) if of else factor
        rows.append(
            {
                "work": work.work,
                "unit": work.unit,
                **numbers,
                "to_reach": goal,
                "peer_is": peer_is,
                "limit_is": limit_is,
                "to_reach_is": f"{factor:.3g} x {'alternative' if of == 'peer' else of}" if of else "",
                "times_limit": ratio(work.unit, numbers["now"], numbers["limit"]),
                "machine": machine_of(work.now.csv, avx2),
                **_facts_of(work.now.csv, avx2),
            }
        )
    return pd.DataFrame(rows)


def _facts_of(name: str, avx2: bool) -> dict[str, Any]:
    """Return the highest load while a benchmark ran, and the other programs that it imported."""
    table = table_of(name, avx2)
    if "running_threads" not in table.columns:
        return {"running_threads": np.nan, "peers": ""}
    return {
        "running_threads": float(table["running_threads"].max()),
        "peers": str(table["peers"].astype("string").fillna("").iloc[0]),
    }


def ratio(unit: str, one: float, other: float) -> float:
    """Return one time divided by another; for rates, by how much the first one is slower."""
    return other / one if "/" in unit else one / other


def _times(unit: str, value: float, factor: float) -> float:
    return value / factor if "/" in unit else value * factor
