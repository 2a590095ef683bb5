"""Files at the places of outputs: only an output of the same kind is replaced, and no input ever."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import click
import h5py
import numpy as np
import pytest

import vse
from tests.docs.pages import console_scripts
from tests.eval.evaluating import write_result
from tests.eval.protocols.test_evaluate import made
from tests.faults.suite import StartSuite
from tests.pipeline.import_files import photo_bytes, write_photos, write_table
from vse.eval.files.embeddings import write_embeddings
from vse.eval.options import AllEvaluateOptions
from vse.eval.tables.significance import compare_files
from vse.features.settings import EXTRACTORS
from vse.training.use.embed import embed_split


def _npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(12))
    return stream.getvalue()


def _hdf5() -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file["mine"] = np.arange(12)
    return stream.getvalue()


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("mine.txt", "mine")
    return stream.getvalue()


STRANGERS = {
    "a photograph": photo_bytes(5),
    "a picture": photo_bytes(6, "PNG"),
    "a CSV": b"name,age\nAda,36\n",
    "a YAML": b"loss: max\ntrain: { epochs: 3 }\n",
    "notes": "Milk, bread, caf\u00e9\n".encode(),
    "a JSON object": b'{"dataset": "mine", "rows": [1, 2, 3]}\n',
    "a list of JSON": b"[1, 2, 3]\n",
    "an HDF5 file": _hdf5(),
    "an array": _npy(),
    "an archive": _zip(),
    "a page": b"<!doctype html>\n<html><head><title>Mine</title></head><body></body></html>\n",
    "a LaTeX table": b"% \\usepackage{booktabs,graphicx}\n\\begin{tabular}{l}mine\\end{tabular}\n",
    "an empty file": b"",
}


class World(NamedTuple):
    demo: Path
    cache: Path
    run: Path
    folder: Path
    embedded: Path
    result: Path
    comparison: Path


@pytest.fixture(scope="session")
def world(demo: Path, cache: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    world = World(demo, cache, run, folder, *(folder / name for name in ("test.h5", "result.json", "comparison.json")))
    embed_split(run, out=world.embedded)
    write_result([world.embedded], world.result, "full", AllEvaluateOptions(cross_check=False, bootstrap=0))
    write_embeddings(folder / "a.h5", made(experiment="a"))
    write_embeddings(folder / "b.h5", made(experiment="b", noise=2.0))
    compare_files(
        [folder / "a.h5", folder / "b.h5"],
        world.comparison,
        "full",
        options=AllEvaluateOptions(bootstrap=100, cross_check=False),
    )
    write_photos(folder / "photos", ["1.jpg", "2.jpg", "3.jpg"])
    write_table(folder / "photos" / "captions.csv", [{"file": f"{k}.jpg", "caption": f"photo {k}"} for k in (1, 2, 3)])
    np.save(folder / "rows.npy", np.ones((66, 4), np.float32))
    (folder / "rows.txt").write_text("".join(f"{k}\n" for k in range(66)))
    (folder / "f8k" / "Flicker8k_Dataset").mkdir(parents=True)
    (folder / "f8k" / "dataset_flickr8k.json").write_text("{}")
    (folder / "clip").mkdir()
    for name in ("img_emb", "text_emb"):
        np.save(folder / "clip" / f"{name}_0.npy", np.ones((3, 4), np.float32) * [[1], [2], [3]])
    write_table(folder / "clip" / "metadata_0.jsonl", [{"image_path": f"{k}.jpg", "caption": f"photo {k}"} for k in (1, 2, 3)])
    precomp = folder / "precomp"
    precomp.mkdir()
    np.save(precomp / "train_ims.npy", np.eye(3, dtype=np.float32))
    (precomp / "train_caps.txt").write_text("".join(f"photo {k}\n" for k in (1, 2, 3)))
    return world


@dataclass(frozen=True)
class Output:
    """An option for an output: the arguments of a command that writes to a place, and the file that it would replace."""

    arguments: Callable[[World, Path], list[object]]
    place: str = "out.h5"
    replaced: str = ""  # in the place, if that is a folder


CLIP = ("features", "birds_img_emb.h5")


def _precomp(w: World) -> list[object]:
    return [w.folder / "precomp", "--dataset", "p", "--captions-per-image", 1]


PRESETS = {"cnn": "fc7", "text": "minilm"}  # of extractors that have none of their own name
OUTPUTS: dict[tuple[str, str], list[Output]] = {
    ("vse-data demo", "--out"): [
        Output(lambda w, out: ["--images", 6, "--out", out], "demo", "dataset.json"),
        Output(lambda w, out: ["--images", 6, "--out", out], "demo", "images/demo_000003.jpg"),
    ],
    ("vse-data fetch", "--out"): [
        Output(lambda w, out: ["f8k", "--base-url", "http://127.0.0.1:9", "--out", out], "f8k", "caption_datasets.zip")
    ],
    ("vse-data prepare", "--out"): [
        Output(lambda w, out: ["f8k", "--source", w.folder / "f8k", "--out", out], "f8k", "dataset.json")
    ],
    ("vse-data add-phrases", "--out"): [
        Output(lambda w, out: [w.demo, "--entities", w.folder, "--out", out], "phrases", "dataset.json")
    ],
    ("vse-data album", "--out"): [Output(lambda w, out: [w.folder / "photos", "--out", out], "album", "dataset.json")],
    ("vse-data import", "--out"): [
        Output(lambda w, out: [w.folder / "photos", "--out", out], "birds", "dataset.json"),
        Output(lambda w, out: [w.folder / "photos", "--out", out], "birds", "import.failures.jsonl"),
    ],
    ("vse-data import", "--out-features"): [
        Output(lambda w, out: [w.folder / "clip", "--out", out.parent / "birds", "--out-features", out], *CLIP)
    ],
    ("vse-data import-precomp", "--out-features"): [
        Output(lambda w, out: [*_precomp(w), "--out-data", out.parent / "new" / "dataset.json", "--out-features", out])
    ],
    ("vse-data import-precomp", "--out-data"): [
        Output(lambda w, out: [*_precomp(w), "--out-features", out.parent / "p_x.h5", "--out-data", out], "dataset.json")
    ],
    ("vse-data export-precomp", "--out"): [
        Output(lambda w, out: [w.cache, "--out", out], "precomp", name)
        for name in ("test_caps.txt", "test_ims.npy", "dev_ids.txt")
    ],
    ("vse-data import-npy", "--out-features"): [
        Output(
            lambda w, out: [w.folder / "rows.npy", "--dataset", w.demo, "--ids", w.folder / "rows.txt", "--out-features", out]
        )
    ],
    ("vse-data import-tsv", "--out-features"): [],  # written by the same function as that of import-npy
    ("vse-data pack", "--out"): [Output(lambda w, out: [w.cache, "--out", out], "bundle.tar")],
    ("vse-data fetch-features", "--out"): [],  # see tests/features/test_bundle_fetch.py: no other file is replaced
    ("vse-data fetch-features", "--out-data"): [],
    **{
        (f"vse-extract {name}", "--out"): [
            Output(lambda w, out, name=name: ["--dataset", w.demo, "--feature", PRESETS.get(name, name), "--out", out])
        ]
        for name in EXTRACTORS
    },
    ("vse-extract fit", "--out"): [
        Output(lambda w, out: ["--dataset", w.demo, "--feature", "tfidf", "--out", out / "x.h5"], "fitted", name)
        for name in ("x.encoder.safetensors", "x.encoder.json")
    ],
    ("vse-extract merge", "--out"): [Output(lambda w, out: ["--dataset", w.demo, "--out", out])],
    ("vse-train", "--out"): [
        Output(lambda w, out: ["--features", w.cache, "--out", out], "run", name)
        for name in ("config.yaml", "metrics.csv", "vocab.json", "best.safetensors", "run.json")
    ],
    ("vse-embed", "--out"): [Output(lambda w, out: [w.run, "--out", out])],
    ("vse-embed", "--as-features"): [Output(lambda w, out: [w.run, "--as-features", out / "x"], "features", "x_images.h5")],
    ("vse-search", "--index"): [
        Output(lambda w, out: [w.run, "a red circle", "--index", out], "x.faiss"),
        Output(lambda w, out: [w.run, "a red circle", "--index", out / "x.faiss"], "folder", "x.faiss.json"),
    ],
    ("vse-search", "--html"): [Output(lambda w, out: [w.run, "a red circle", "--html", out], "page.html")],
    ("vse-report", "--out"): [Output(lambda w, out: [w.result, "--out", out], "page.html")],
    ("vse-eval", "--out"): [
        Output(lambda w, out: [w.embedded, "--out", out], "result.json"),
        Output(lambda w, out: ["--compare", w.folder / "a.h5", w.folder / "b.h5", "--out", out], "result.json"),
    ],
    ("vse-eval", "--save"): [Output(lambda w, out: ["--ensemble", w.folder / "a.h5", w.folder / "b.h5", "--save", out])],
    ("vse-eval", "--per-query"): [
        Output(lambda w, out: [w.embedded, "--per-query", out], "queries.csv"),
        Output(lambda w, out: [w.embedded, "--per-query", out], "queries.parquet"),
    ],
    ("vse-eval", "--trec"): [
        Output(lambda w, out: [w.embedded, "--trec", out], "trec", name) for name in ("i2t.run", "t2i.qrels")
    ],
    ("vse-table", "--out"): [
        *(Output(lambda w, out: ["summary", w.result, "--out", out], name) for name in ("t.csv", "t.tex")),
        *(Output(lambda w, out: ["ladder", w.result, "--out", out], name) for name in ("t.csv", "t.svg", "t.png")),
        *(Output(lambda w, out: ["significance", w.comparison, "--out", out], name) for name in ("t.csv", "t.tex")),
        *(Output(lambda w, out: ["vsepp_3", "--out", out], name) for name in ("t.csv", "t.tex")),
    ],
}
INPUTS = {
    *("dataset", "photos", "sources", "folder", "features", "files", "cache_file", "runs", "run", "results"),
    *("--source", "--entities", "--against", "--captions", "--images", "--ids", "--dataset", "--notes", "--rates", "--like"),
    *("--weights-dir", "--words", "--features", "--eval-features", "--caption-features", "--truth-features"),
    *("--start-from", "--corpus", "--image", "--data", "--embeddings", "--cxc"),
}
CASES = [(command, output) for (command, _), outputs in OUTPUTS.items() for output in outputs]


def _main(command: str) -> Callable[[list[str]], None]:
    module, _, function = console_scripts()[command.split()[0]].partition(":")
    main: Callable[[list[str]], None] = getattr(importlib.import_module(module), function)
    return main


def _commands() -> Iterator[tuple[str, click.Command]]:
    def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for key, each in command.commands.items():
                yield from below(f"{name} {key}", each)
        else:
            yield name, command

    for name in console_scripts():
        main = _main(name)
        (command,) = (cell.cell_contents for cell in main.__closure__ or () if isinstance(cell.cell_contents, click.Command))
        yield from below(name, command)


def test_every_option_for_a_path_is_an_input_or_is_tried_here_and_goes_with_force() -> None:
    """Add a new option for an output to OUTPUTS, so that a test protects what lies there, and one for an input to INPUTS."""
    paths = {
        (name, option.opts[-1])
        for name, command in _commands()
        for option in command.params
        if isinstance(option.type, click.Path) and option.opts[-1] not in INPUTS
    }
    assert paths == set(OUTPUTS)
    with_force = {name for name, command in _commands() if any("--force" in option.opts for option in command.params)}
    assert with_force == {name for name, _ in OUTPUTS}


def _run(command: str, arguments: list[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command; returns its exit code and what it wrote to the standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        _main(command)([*command.split()[1:], *map(str, arguments)])
    code = stop.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


def test_no_file_of_another_kind_is_replaced(
    world: World, tmp_path: Path, suite_of_faults: StartSuite, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_of_faults("output paths with a file of another kind", len(CASES))
    names = list(STRANGERS)
    for k in range(suite.n_tries):
        command, output = CASES[k % len(CASES)]
        stranger = names[(k + k // len(CASES)) % len(names)]
        place = tmp_path / str(k) / output.place
        target = place / output.replaced if output.replaced else place
        target.parent.mkdir(parents=True)
        target.write_bytes(STRANGERS[stranger])
        before = target.stat().st_mtime_ns
        code, said = _run(command, output.arguments(world, place), capsys)
        detail = f"{command} with {stranger} at {target.relative_to(tmp_path)}: {code} {said[-300:]}"
        untouched = target.is_file() and target.read_bytes() == STRANGERS[stranger] and target.stat().st_mtime_ns == before
        if not untouched:
            suite.record("silent" if code == 0 else "wrong", detail)
        else:
            suite.record("refused" if code == 2 and "Traceback" not in said else "wrong", detail)


AGAIN = [
    *(("vse-data album", "--out"), ("vse-data demo", "--out"), ("vse-data import", "--out"), ("vse-embed", "--out")),
    *(("vse-data import-npy", "--out-features"), ("vse-data export-precomp", "--out"), ("vse-search", "--html")),
    ("vse-report", "--out"),
]
AGAIN = [(command, OUTPUTS[command, option][0]) for command, option in AGAIN]
AGAIN += [(command, output) for command, output in CASES if command in ("vse-eval", "vse-table")]


@pytest.mark.parametrize(("command", "output"), AGAIN, ids=[f"{command} {output.place}" for command, output in AGAIN])
def test_an_earlier_output_is_replaced(
    command: str, output: Output, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--bootstrap", "100", "--no-cross-check"] if command == "vse-eval" else []
    arguments = [*output.arguments(world, tmp_path / output.place), *quick]
    for _ in range(2):
        code, said = _run(command, arguments, capsys)
        assert code == 0, said


@pytest.mark.parametrize("stranger", ["a photograph", "an HDF5 file"])
def test_force_replaces_another_kind(stranger: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, output, given in (
        ("vse-embed", tmp_path / "e.h5", [world.run]),
        ("vse-table", tmp_path / "t.csv", ["summary", world.result]),
    ):
        output.write_bytes(STRANGERS[stranger])
        code, said = _run(command, [*given, "--out", output, "--force"], capsys)
        assert code == 0, said
        assert output.read_bytes() != STRANGERS[stranger]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("by", ["its name", "a hard link", "a symbolic link", "another path"])
def test_no_input_is_replaced(
    by: str, force: list[str], world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    for command, first, source in (("vse-table", ["summary"], world.result), ("vse-eval", [], world.embedded)):
        given = tmp_path / source.name
        shutil.copy(source, given)
        out = {"its name": given, "another path": tmp_path / "folder" / ".." / source.name}.get(
            by, tmp_path / f"{command}.csv"
        )
        if by == "a hard link":
            os.link(given, out)
        if by == "a symbolic link":
            out.symlink_to(given)
        code, said = _run(command, [*first, given, "--out", out, *force], capsys)
        assert (code, "output is also an input" in said) == (2, True), said
        assert given.read_bytes() == source.read_bytes()


def test_python_follows_the_same_rule(world: World, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"
    out.write_bytes(STRANGERS["a CSV"])
    with pytest.raises(vse.UserError, match="is not a table 'summary' of vse-table; .* or replace it with force"):
        vse.table("summary", world.result, out=out)
    assert out.read_bytes() == STRANGERS["a CSV"]
    vse.table("summary", world.result, out=out, force=True)
    vse.table("summary", world.result, out=out)
    with pytest.raises(vse.UserError, match="output is also an input"):
        vse.table("summary", world.result, out=world.result, force=True)
