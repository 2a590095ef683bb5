"""SIGKILL at random moments of every command that writes; what it has left is whole, and when left alone it ends as unharmed.

``pytest -m nightly --tries 30 tests/test_killed.py`` kills each of them 30 times.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from tests.faults.suite import Suite
from tests.features.tiny_text import tiny_bert
from tests.training.conftest import COMMAND as SMALL_MODEL
from tests.training.phrases.some_regions import make_caches
from vse.features.exchange.precomp import export_precomp
from vse.pipeline.dataset.dataset import load_dataset_file

SUITE = "killed commands, each at random moments"
Run = Callable[[str, Path], subprocess.CompletedProcess[str]]

TINY = "--set model=squeezenet1_1 --set layer=features.2 --set grid=2 --set resize=32 --set crop=32 --set weights=random"
REGIONS = "--set model=fasterrcnn_resnet50_fpn --set weights=random --set shorter=32 --set longer=48"
REGIONS += " --set proposals=8 --set min_boxes=4 --set max_boxes=4"
BOXES = "--set model=squeezenet1_1 --set map=features.1 --set layer=features.2 --set pool=8 --set shorter=32 --set longer=48"
BOXES += " --set weights=random --set n_boxes=4"
HGLMM = "--set trained_dim=8 --set trained_epochs=2 --set min_count=1 --set centres=4 --set pca=16"
ARRAYS = "{folder}/f.npy --ids {folder}/ids.txt"
BOTH = "--out-features demo_x.h5 --out-data data/dataset.json"
TEMPORARY = r"\.tmp|\.partial|\.lock|\.unpacking|\.bundle-"
SHARDS = "--shards 12 --threads 1"
TRAIN = " ".join(["vse-train --features {cache} --out run --threads 1 --resume", *SMALL_MODEL])
PHRASES = (
    "vse-train --features {candidates} --experiment phrase_embedding_sampling --out run --threads 1 --resume"
    " --set truth_feature=truths --set caption_feature=some_phrases --set train.batch_size=40"
    " --set model.image_encoder.widths=[16,8] --set model.caption_encoder.widths=[16,8]"
)


class Killed(NamedTuple):
    """A command line; of the files that it makes, which are compared, and whether it writes them once, when they are done."""

    line: str
    files: str = "**/*"
    once: bool = True


COMMANDS = {
    "data demo": Killed("vse-data demo --images 40 --out data"),
    "data album": Killed("vse-data album {images} --out album"),
    "data import-npy": Killed(f"vse-data import-npy {ARRAYS} --dataset {{data}} --out-features demo_x.h5"),
    "data import-precomp": Killed(f"vse-data import-precomp {{precomp}} --dataset demo {BOTH}"),
    "data export-precomp": Killed("vse-data export-precomp {cache} --out precomp"),
    "data pack": Killed("vse-data pack {cache} --out bundle", once=False),
    "data pack .tar": Killed("vse-data pack {cache} --out bundle.tar"),
    "data fetch-features": Killed("vse-data fetch-features {folder}/bundle --out features"),
    "data fetch-features .tar": Killed("vse-data fetch-features {folder}/bundle.tar --out features"),
    "extract cnn": Killed(f"vse-extract cnn --dataset {{few}} --out demo_x.h5 {SHARDS} {TINY}"),
    "extract regions": Killed(f"vse-extract regions --dataset {{few}} --out demo_x.h5 {SHARDS} {REGIONS}"),
    "extract boxes": Killed(f"vse-extract boxes --dataset {{few}} --out demo_x.h5 {SHARDS} {BOXES}"),
    "extract tfidf": Killed(f"vse-extract tfidf --dataset {{data}} --out demo_x.h5 {SHARDS} --set min_count=1"),
    "extract hglmm": Killed(f"vse-extract hglmm --dataset {{few}} --out demo_x.h5 {SHARDS} {HGLMM}"),
    "extract text": Killed(f"vse-extract text --dataset {{data}} --out demo_x.h5 {SHARDS} --set weights={{bert}}"),
    "train": Killed(f"{TRAIN} --set train.epochs=6", "run/best.safetensors", once=False),
    "train phrases": Killed(f"{PHRASES} --set train.epochs=20", "run/best.safetensors", once=False),
    "embed phrases": Killed("vse-embed {phrase_run} --out test.h5 --threads 1"),
    "embed": Killed("vse-embed {run} --out test.h5 --threads 1"),
    "eval": Killed("vse-eval {embeddings} --out result.json --bootstrap 200"),
    "eval --compare": Killed("vse-eval {embeddings} {others} --compare --out compared.json --bootstrap 200"),
    "table .csv": Killed("vse-table summary {result} --out table.csv"),
    "table .tex": Killed("vse-table summary {result} --out table.tex"),
    "report": Killed("vse-report {result} --out report.html --embeddings {embeddings} --queries 4"),
    "search --html": Killed("vse-search {run} 'a red square' --html found.html --threads 1"),
    "search --index": Killed("vse-search {run} 'a red square' --index images.faiss --threads 1"),
}


@pytest.fixture(scope="module")
def run(commands: Path) -> Run:
    """Runs a command line in a folder; it must do what it should."""

    def do(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        done = subprocess.run(["bash", "-c", f"{commands}/{line}"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    return do


@pytest.fixture(scope="module")
def given(demo: Path, few: Path, cache: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the commands read, by the names that their lines have for it."""
    folder = tmp_path_factory.mktemp("given")
    ids = [image.imgid for image in load_dataset_file(demo).images]
    np.save(folder / "f.npy", np.random.default_rng(0).normal(size=(len(ids), 4)).astype(np.float32))
    (folder / "ids.txt").write_text("\n".join(map(str, ids)))
    for seed, name in enumerate(("run", "other")):
        run(f"vse-train --features {cache} --out {name} --seed {seed} --threads 1 {' '.join(SMALL_MODEL)}", folder)
        run(f"vse-embed {name}", folder)
    run("vse-eval run/test.h5 --out result.json --bootstrap 0", folder)
    for name in ("bundle", "bundle.tar"):
        run(f"vse-data pack {cache} --out {name}", folder)
    candidates = make_caches(few, folder / "regions").candidates
    phrases = PHRASES.format(candidates=candidates).replace("--out run", "--out phrases")
    run(f"{phrases} --set train.epochs=1 --overwrite", folder)
    made = {name: folder / path for name, path in {"run": "run", "phrase_run": "phrases", "result": "result.json"}.items()}
    made |= {"embeddings": folder / "run/test.h5", "others": folder / "other/test.h5", "bert": tiny_bert(folder / "bert")}
    made |= {"folder": folder, "images": demo.parent / "images", "data": demo, "few": few, "cache": cache}
    return {**made, "precomp": export_precomp(cache, folder / "precomp"), "candidates": candidates}


def content(path: Path, folder: Path) -> bytes:
    """What a file holds but for dates, times, hashes that cover one, and its folder, in which equal files differ."""
    held = _read_hdf5(path) if path.suffix == ".h5" else path.read_bytes()
    held = re.sub(rb'"(seconds|mtime_ns|\w+_s)": (\{[^}]*\}|[\d.]+)', b"", held)
    return re.sub(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?|[0-9a-f]{64}", b"", held).replace(str(folder).encode(), b"")


def _read_hdf5(path: Path) -> bytes:
    """The data sets and attributes of an HDF5 file, which itself also holds when each was made."""
    parts = []
    with h5py.File(path) as file:
        for name in sorted(file):
            dataset = file[name]
            parts.append(f"{name} {dataset.dtype} {dataset.shape}".encode())
            objects = dataset.dtype == object
            parts.append(repr(list(dataset)).encode() if objects else np.ascontiguousarray(dataset[()]).tobytes())
        parts += [f"{name} {value!r}".encode() for name, value in sorted(file.attrs.items())]
    return b"\n".join(parts)


def files(folder: Path, pattern: str = "**/*", finished: bool = False) -> dict[str, bytes]:
    """The content of files in a folder; if ``finished``, of those whose names say that they are whole."""
    names = {str(path.relative_to(folder)): path for path in folder.glob(pattern) if path.is_file()}
    return {name: content(path, folder) for name, path in names.items() if not (finished and re.search(TEMPORARY, name))}


def kill(script: list[str], folder: Path, after: float) -> int:
    """The exit code of a command that is killed after so many seconds, unless it ends before."""
    process = subprocess.Popen(script, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(after)
    process.kill()
    process.communicate()  # until nobody can write any more
    return process.returncode


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_then_left_alone_gives_the_same_files(
    name: str, given: dict[str, Path], run: Run, commands: Path, tmp_path: Path, suite_of_module: Suite
) -> None:
    rng, (line, pattern, once) = random.Random(name), COMMANDS[name]
    line = line.format(**given)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    start = time.monotonic()
    run(line, whole)
    seconds = time.monotonic() - start
    expected = files(whole, pattern)
    assert expected
    killed.mkdir()
    statuses = []
    while statuses.count(-signal.SIGKILL) < (suite_of_module.n_tries or 2):
        statuses.append(kill(["bash", "-c", f"exec {commands}/{line}"], killed, rng.uniform(0, seconds)))
        if once:
            for path, found in files(killed, pattern, finished=True).items():
                assert found == expected.get(path), f"{path} after {len(statuses)} kills"
        if statuses[-1] == 0:  # nothing is left to be done
            shutil.rmtree(killed)
            killed.mkdir()
    assert set(statuses) <= {0, -signal.SIGKILL}
    run(line, killed)
    assert files(killed, pattern) == expected
    assert files(killed).keys() == files(whole).keys(), "nothing else is left"
    for _ in range(statuses.count(-signal.SIGKILL)):
        suite_of_module.record("harmless")
    print(f"{name}: {statuses.count(-signal.SIGKILL)} kills in {seconds:.2f} s, finished {statuses.count(0)} times")
