"""A copy of the repository in which the commands of the documentation are run, with a demo of 22 pictures."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.docs.pages import ROOT, Block, console_scripts, patched
from tests.forked import PYTEST, PYTHON, SNAKEMAKE, TORCHRUN, Scripts
from tests.pipeline.entities_files import annotation, thing, write_entities, write_photo
from vse.pipeline.demo import create_demo

ROOMS = ("pipeline", "features", "training", "eval")
COPIED = (*ROOMS, "_vse", "config", "profiles", "tests", "Snakefile", "setup.cfg", "pyproject.toml")
MADE = ("__pycache__", "*.h5", "*.shards", "*.failures.jsonl", "*.encoder.safetensors", ".*")
FC7 = "model: squeezenet1_1\nlayer: features.2\nweights: random\ngrid: 2\nresize: 32\ncrop: 32\n"
GRID = f"{FC7}positions: true\n"
CLIP = [("laion2b_s34b_b79k", "random"), ("ViT-B-32", "clip_tiny")]
# In files that pages write, what takes seconds, and what takes its place.
LARGE = {
    "model: vgg11\nlayer: features.6": "model: squeezenet1_1\nlayer: features.4",
    "model: { dim: 256, word_dim: 100 }\n  train: { epochs: 12,": "model: { dim: 32, word_dim: 16 }\n  train: { epochs: 5,",
}
DEMO = """
n_images: 22
shards: 2
features:
  fc7_10c: { crop: 28 }
  hglmm: { trained_dim: 20, pca: 50 }
  boxes_effnet_levels: &boxes
    { model: squeezenet1_1, weights: random, layers: [features.1, features.4], pool: 2, shorter: 32, longer: 48, n_boxes: 8,
      thin_edges: true }
  boxes_effnet_levels_truth: *boxes
experiment:
  model: { dim: 32, word_dim: 16 }
  train: { epochs: 2 }
experiments:
  bert_minilm_effnet: { feature: fc7, model: { caption_encoder: { model: tiny, frozen_layers: 0 } } }
"""
SMALLER = [
    ("pipeline/demo.py", "DEFAULT_N_IMAGES = 5500", "DEFAULT_N_IMAGES = 22"),
    ("eval/options.py", "N_IMAGES_PER_FOLD = 1000", "N_IMAGES_PER_FOLD = 4"),
    ("_vse/vse/quickstart.py", "MIN_PAIRS_FOR_SPLIT = 1000", "MIN_PAIRS_FOR_SPLIT = 22"),
]
# Places that the documentation leaves open: a folder with all that is published of three data sets, weights, word vectors.
PLACES = {
    "=/where/they/are": "published",
    "=/photographs": "published",
    "=/weights": "published",
    "=/glove.": "published/glove.",
}


class World:
    """The copy ``folder``; commands run in it, with what earlier blocks of their page exported."""

    def __init__(self, work: Path) -> None:
        self.folder, self._exported = work / "vse", work / "exported"
        self._changed = False  # the code, since the commands were imported
        for name in COPIED:
            source, target = ROOT / name, self.folder / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*MADE))
            else:
                shutil.copy(source, target)
        self._shrink()
        self._draw(create_demo(work / "drawn", 22, seed=3))
        self.environment = self._environment(self.folder / "_vse")  # found before the installed package
        self._scripts = Scripts(console_scripts() | SNAKEMAKE | PYTEST | PYTHON | TORCHRUN, self.environment)
        self.environment["PATH"] = f"{self._scripts.bin}:{self.environment['PATH']}"
        self._scripts.start()

    def close(self) -> None:
        """End what was started."""
        self._scripts.close()

    def begin(self) -> None:
        """Forget what the page before exported."""
        self._exported.unlink(missing_ok=True)

    def do(self, block: Block, skipped: tuple[str, ...]) -> str:
        """Write a block's file or run its commands, but those that begin as one of ``skipped``; returns the output."""
        if block.says("skip: ") is not None:
            return ""
        if block.title:
            target = self.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            text = patched(target.read_text(), block.text) if block.language == "diff" else block.text
            for large, small in LARGE.items():
                text = text.replace(large, small)
            target.write_text(text)
            self._changed |= block.title.startswith(tuple(f"{room}/" for room in ROOMS))
            return ""
        if self._changed:
            self._scripts.start()
            self._changed = False
        if block.language == "python":
            return self.run(f"python - <<'END'\n{block.text}\nEND")
        parts = [[part for part in line.split(" && ") if not part.startswith(skipped)] for line in block.commands]
        script = "\n".join(" && ".join(kept) for kept in parts if kept)
        if block.says("dry-run: ") is not None:
            script = re.sub(r"^snakemake ", "snakemake --dry-run ", script, flags=re.M)
        return self.run(with_replacement(block, script), expected=2 if block.says("fails") is not None else 0)

    def do_cells(self, cells: Sequence[Block]) -> str:
        """Run python blocks as the cells of one notebook; returns the output."""
        run = [block for block in cells if block.says("skip: ") is None]
        program = [(f"{block.page}:{block.line}", with_replacement(block, block.text)) for block in run]
        (self.folder / "cells.json").write_text(json.dumps(program))
        return self.run("python -m tests.docs.cells cells.json")

    def run(self, script: str, expected: int = 0) -> str:
        """The output of a script, both streams; it must end with the code ``expected``."""
        for place, folder in PLACES.items():
            script = script.replace(place, f"={self.folder / folder}")
        script = f". {self._exported} 2>/dev/null || true\nset -euo pipefail\n{script}\nexport -p >{self._exported}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == expected, f"exit code {done.returncode} of\n{script}\n{done.stdout}"
        return done.stdout

    def _shrink(self) -> None:
        """A small demo, folds as small as its test split, and a small network for the features that every example reads."""
        (self.folder / "config/datasets/demo.yaml").write_text(DEMO)
        (self.folder / "config/features/fc7.yaml").write_text(FC7)
        for name in ("effnet_grid", "effnet_map"):
            (self.folder / f"config/features/{name}.yaml").write_text(GRID)
        for name in ("clip", "clip_text"):  # whose weights would be downloaded
            preset = self.folder / f"config/features/{name}.yaml"
            text = preset.read_text()
            for old, new in CLIP:
                assert old in text
                text = text.replace(old, new)
            preset.write_text(text)
        for module, old, new in SMALLER:
            text = (self.folder / module).read_text()
            assert text.count(old) == 1, f"{module}: {old}"
            (self.folder / module).write_text(text.replace(old, new))

    def _draw(self, dataset: Path) -> None:
        """What the documentation takes as given: ``birds``, German captions, an index of noise, and ``published`` files."""
        images = json.loads(dataset.read_text())["images"]
        (self.folder / "birds").mkdir()
        shutil.copytree(dataset.parent / "images", self.folder / "birds/images")
        with (self.folder / "birds/captions.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["file", "caption"])
            rows.writerows([image["filename"], s["raw"]] for image in images for s in image["sentences"][:2])
        german = {image["filename"]: [f"Ein Bild, Nummer {image['imgid']}"] for image in images}
        (self.folder / "captions_de.json").write_text(json.dumps(german))
        n_train_images = sum(image["split"] == "train" for image in images)
        np.save(self.folder / "index.npy", np.roll(np.arange(n_train_images), 1))
        published = self.folder / "published"
        published.mkdir()
        for name, folder in (("coco", "images"), ("flickr30k", "flickr30k-images"), ("flickr8k", "images")):
            shutil.copy(dataset, published / f"dataset_{name}.json")
            shutil.copytree(dataset.parent / "images", published / folder, dirs_exist_ok=True)
        write_entities(published, {"11": "[/EN#1/people A man] waves .\n"}, {"11": annotation([thing("1", (11, 21, 50, 60))])})
        for split, numbers in {"train": "11\n", "val": "", "test": ""}.items():
            (published / f"{split}.txt").write_text(numbers)
        write_photo(published / "flickr30k-images/11.jpg")
        (published / "glove.6B.50d.txt").write_text("a" + 50 * " 0.1" + "\n")

    def _environment(self, package: Path) -> dict[str, str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        dropped = ("VSE_", "SLURM_", "COV_", "PYTHONDONTWRITEBYTECODE")
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(dropped)},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(package),
            "HOME": str(self.folder.parent),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait leave the cores to others
            "VSE_COCO_DIR": str(self.folder / "published"),
            "PET_MASTER_PORT": str(port),  # of torchrun
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),  # no network
        }


def with_replacement(block: Block, script: str) -> str:
    """The script of a block with what its directive replaces."""
    if (replaced := block.says("replace ")) is None:
        return script
    old, _, new = replaced.partition(":")[0].partition(" by ")
    assert old in script, f"{old} is not there to be replaced"
    return script.replace(old, new)
