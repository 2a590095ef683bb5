"""Files at the places of outputs: only an output of the same kind is replaced, and no input ever."""

from __future__ import annotations

import importlib
import io
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
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
from vse.eval.protocols.compare import compare_files
from vse.features.settings import EXTRACTORS
from vse.training.use.embed import embed_split


def _bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def _write_hdf5(stream: io.BytesIO) -> None:
    with h5py.File(stream, "w") as file:
        file["mine"] = np.arange(12)


STRANGERS = {
    "a photograph": photo_bytes(5), "a picture": photo_bytes(6, "PNG"), "a CSV": b"name,age\nAda,36\n",
    "a YAML": b"loss: max\ntrain: { epochs: 3 }\n", "notes": "Milk, bread, caf\u00e9\n".encode(),
    "a JSON object": b'{"dataset": "mine", "rows": [1, 2, 3]}\n', "a list of JSON": b"[1, 2, 3]\n",
    "an HDF5 file": _bytes(_write_hdf5), "an array": _bytes(lambda stream: np.save(stream, np.arange(12))),
    "an archive": _bytes(lambda stream: np.savez(stream, mine=np.arange(12))),
    "a page": b"<!doctype html>\n<html><head><title>Mine</title></head><body></body></html>\n",
    "a LaTeX table": b"% \\usepackage{booktabs,graphicx}\n\\begin{tabular}{l}mine\\end{tabular}\n", "an empty file": b"",
}  # fmt: skip


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
    noises = {"a": 1.0, "b": 2.0}
    compared = [write_embeddings(folder / f"{k}.h5", made(experiment=k, noise=noise)) for k, noise in noises.items()]
    compare_files(compared, world.comparison, "full", options=AllEvaluateOptions(bootstrap=100, cross_check=False))
    write_photos(folder / "photos", files := ["1.jpg", "2.jpg", "3.jpg"])
    write_table(folder / "photos" / "captions.csv", [{"file": file, "caption": f"photo {file}"} for file in files])
    np.save(folder / "rows.npy", np.ones((66, 4), np.float32))
    first = json.loads(demo.read_text())["images"][0]["filename"]
    (folder / "de.json").write_text(json.dumps({first: ["ein Bild"]}))
    (folder / "rows.txt").write_text("".join(f"{k}\n" for k in range(66)))
    (folder / "f8k" / "Flicker8k_Dataset").mkdir(parents=True)
    (folder / "f8k" / "dataset_flickr8k.json").write_text("{}")
    (folder / "clip").mkdir()
    for name in ("img_emb", "text_emb"):
        np.save(folder / "clip" / f"{name}_0.npy", np.ones((3, 4), np.float32) * [[1], [2], [3]])
    write_table(folder / "clip" / "metadata_0.jsonl", [{"image_path": file, "caption": f"photo {file}"} for file in files])
    choices = [{"filename": Path(files[0]).name, "caption": "a dog", "negative_caption": "a cat"}]
    (folder / "sugarcrepe.json").write_text(json.dumps(choices))
    (folder / "precomp").mkdir()
    np.save(folder / "precomp" / "train_ims.npy", np.eye(3, dtype=np.float32))
    (folder / "precomp" / "train_caps.txt").write_text("".join(f"photo {k}\n" for k in (1, 2, 3)))
    return world


PRESETS = {"cnn": "fc7", "text": "minilm"}  # of extractors that have none of their own name
TABLES = {"summary {result}": "csv tex", "ladder {result}": "csv svg png", "significance {comparison}": "csv tex"}
PRECOMP = "vse-data import-precomp {folder}/precomp --dataset p --captions-per-image 1"
ROWS = "{folder}/rows.npy --dataset {demo} --ids {folder}/rows.txt"
# Commands that end with an option for an output and its value; behind a colon the files in it that they would replace.
LINES = [
    "vse-data demo --images 6 --out demo: demo/dataset.json demo/images/demo_000003.jpg",
    "vse-data fetch f8k --base-url http://127.0.0.1:9 --out f8k: f8k/caption_datasets.zip",
    "vse-data prepare f8k --source {folder}/f8k --out f8k: f8k/dataset.json",
    "vse-data add-phrases {demo} --entities {folder} --out phrases: phrases/dataset.json",
    "vse-data album {folder}/photos --out album: album/dataset.json",
    "vse-data folds {demo} --out folds: folds/fold-0.json folds/fold-4.json",
    "vse-data noise {demo} --rate 0.1 --out noise.json",
    "vse-data swap-phrases {demo} --out swapped: swapped/dataset.json swapped/choices.json",
    "vse-data import-choices {folder}/sugarcrepe.json --images {folder}/photos --out c: c/dataset.json c/choices.json",
    "vse-data add-captions {demo} --language de --file {folder}/de.json --out demo_de: demo_de/dataset.json",
    "vse-data import {folder}/photos --out birds: birds/dataset.json birds/import.failures.jsonl",
    "vse-data import {folder}/clip --out birds --out-features features: features/birds_img_emb.h5",
    f"{PRECOMP} --out-data new/dataset.json --out-features out.h5",
    f"{PRECOMP} --out-features p_x.h5 --out-data dataset.json",
    "vse-data export-precomp {cache} --out out: out/test_caps.txt out/test_ims.npy out/dev_ids.txt",
    f"vse-data import-npy {ROWS} --out-features out.h5",
    "vse-data convert {demo} --out converted: converted/dataset.parquet",
    "vse-data pack {cache} --out bundle.tar",
    *(f"vse-extract {name} --dataset {{demo}} --feature {PRESETS.get(name, name)} --out out.h5" for name in EXTRACTORS),
    "vse-extract fit --dataset {demo} --feature tfidf --out fitted/x.h5: fitted/x.encoder.safetensors fitted/x.encoder.json",
    "vse-extract merge --dataset {demo} --out out.h5",
    "vse-train --features {cache} --out r: r/config.yaml r/metrics.csv r/vocab.json r/best.safetensors r/run.json",
    "vse-embed {run} --out out.h5",
    "vse-embed {run} --as-features features/x: features/x_images.h5",
    "vse-search {run} 'a red circle' --index x.faiss",
    "vse-search {run} 'a red circle' --index folder/x.faiss: folder/x.faiss.json",
    "vse-search {run} 'a red circle' --html page.html",
    "vse-report {result} --out page.html",
    "vse-eval {embedded} --out result.json",
    "vse-eval --compare {folder}/a.h5 {folder}/b.h5 --out result.json",
    "vse-eval --ensemble {folder}/a.h5 {folder}/b.h5 --save out.h5",
    "vse-eval {embedded} --per-query queries.csv",
    "vse-eval {embedded} --per-query queries.parquet",
    "vse-eval {embedded} --trec trec: trec/i2t.run trec/t2i.qrels",
    *(f"vse-table {given} --out t.{kind}" for given, kinds in TABLES.items() for kind in kinds.split()),
    *(f"vse-table vsepp_3 --out t.{kind}" for kind in ("csv", "tex")),
]
ELSEWHERE = {  # written as import-npy writes; fetched as tests/features/test_bundle_fetch.py has it: no other file is replaced
    ("vse-data import-tsv", "--out-features"),
    *(("vse-data fetch-features", option) for option in ("--out", "--out-data")),
}
SPLIT = [line.partition(": ") for line in LINES]
CASES = [(line, replaced) for line, _, files in SPLIT for replaced in files.split() or line.split()[-1:]]


def _name_and_option(line: str) -> tuple[str, str]:
    words = line.split()
    return " ".join(words[: 2 if words[0] in ("vse-data", "vse-extract") else 1]), words[-2]


INPUTS = {
    *("dataset", "photos", "sources", "folder", "features", "files", "cache_file", "runs", "run", "results"),
    *("--source", "--entities", "--against", "--captions", "--images", "--ids", "--dataset", "--notes", "--rates", "--like"),
    *("--weights-dir", "--words", "--features", "--eval-features", "--caption-features", "--truth-features"),
    *(
        "--noise",
        "--from-index",
        "--file",
        "--start-from",
        "--corpus",
        "--image",
        "--data",
        "--embeddings",
        "--cxc",
        "--qrels",
        "--choices",
    ),
}


def _main(command: str) -> Callable[[list[str]], None]:
    module, _, function = console_scripts()[command].partition(":")
    main: Callable[[list[str]], None] = getattr(importlib.import_module(module), function)
    return main


def _commands() -> Iterator[tuple[str, click.Command]]:
    def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for key in command.list_commands(context):
                each = command.get_command(context, key)
                assert each is not None
                yield from below(f"{name} {key}", each)
        else:
            yield name, command

    for name in [name for name in console_scripts() if name != "vse"]:  # its commands are those of the other scripts
        main = _main(name)
        (command,) = (cell.cell_contents for cell in main.__closure__ or () if isinstance(cell.cell_contents, click.Command))
        yield from below(name, command)


def test_every_option_for_a_path_is_an_input_or_is_tried_here_and_goes_with_force() -> None:
    """Add a new option for an output to LINES, so that a test protects what lies there, and one for an input to INPUTS."""
    paths = {
        (name, option.opts[-1])
        for name, command in _commands()
        for option in command.params
        if isinstance(option.type, click.Path) and option.opts[-1] not in INPUTS
    }
    tried = {_name_and_option(line) for line, _ in CASES} | ELSEWHERE
    assert paths == tried
    with_force = {name for name, command in _commands() if any("--force" in option.opts for option in command.params)}
    assert with_force == {name for name, _ in tried}


def _run(capsys: pytest.CaptureFixture[str], command: str, *arguments: object) -> tuple[int, str]:
    """Run a command; returns its exit code and what it wrote to the standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        _main(command)([*map(str, arguments)])
    code = stop.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


def test_no_file_of_another_kind_is_replaced(
    world: World,
    tmp_path: Path,
    suite_of_faults: StartSuite,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suite = suite_of_faults("output paths with a file of another kind", len(CASES))
    names = list(STRANGERS)
    for k in range(suite.n_tries):
        line, replaced = CASES[k % len(CASES)]
        stranger = names[(k + k // len(CASES)) % len(names)]
        target = tmp_path / str(k) / replaced
        target.parent.mkdir(parents=True)
        monkeypatch.chdir(tmp_path / str(k))
        target.write_bytes(STRANGERS[stranger])
        before = target.stat().st_mtime_ns
        code, said = _run(capsys, *shlex.split(line.format(**world._asdict())))
        untouched = target.is_file() and target.read_bytes() == STRANGERS[stranger] and target.stat().st_mtime_ns == before
        kept = "refused" if code == 2 and "Traceback" not in said else "wrong"
        lost = "silent" if code == 0 else "wrong"
        suite.record(kept if untouched else lost, f"{line} with {stranger} at {replaced}: {code} {said[-300:]}")


AGAIN = (
    *("vse-data album", "vse-data demo", "vse-data import ", "vse-embed {run} --out", "vse-data import-npy"),
    *("vse-data export-precomp", "vse-search {run} 'a red circle' --html", "vse-report", "vse-eval", "vse-table"),
)


@pytest.mark.parametrize("line", [line for line, *_ in SPLIT if line.startswith(AGAIN) and "clip" not in line])
def test_an_earlier_output_is_replaced(
    line: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--bootstrap", "100", "--no-cross-check"] if line.startswith("vse-eval") else []
    for _ in range(2):
        code, said = _run(capsys, *shlex.split(line.format(**world._asdict())), *quick)
        assert code == 0, said


@pytest.mark.parametrize("stranger", ["a photograph", "an HDF5 file"])
def test_force_replaces_another_kind(stranger: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, output, given in (
        ("vse-embed", tmp_path / "e.h5", [world.run]),
        ("vse-table", tmp_path / "t.csv", ["summary", world.result]),
    ):
        output.write_bytes(STRANGERS[stranger])
        code, said = _run(capsys, command, *given, "--out", output, "--force")
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
        code, said = _run(capsys, command, *first, given, "--out", out, *force)
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
