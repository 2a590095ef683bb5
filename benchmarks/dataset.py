"""Time of reading a dataset.json of COCO's size, and of splitting its captions into words.

The file is parsed the first time, and read from its copy in columns later.

Claims: a search or an evaluation reads 5,000 test images with their captions from the copy in less than half a second, where
parsing the complete file takes many seconds. The default tokeniser takes at most twice the time of ``str.lower`` and
``str.split``.
Limits: captions are made up, of 10 words. The limit of the first read (``parsed``) is Python's JSON parser (``json``).
``checked`` is the first read of the copy, which also checks all its values; ``columns`` and ``columns_all`` are later reads
of a split and of all images. ``sha256`` is one read of the file with its checksum. A later read needs it only if the file
has changed. ``words`` and ``split`` are the tokeniser and its limit; ``vocabulary`` counts all words and replaces each
word by its number. These three do not include the reading of the captions. Each measurement has a process of its own, and
time is its processor time. It includes the libraries that the read imports.

    python benchmarks/dataset.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from common import report

from vse.pipeline.dataset.captions import IMPORT_TOKENISER, TOKENISERS, Vocabulary
from vse.pipeline.dataset.dataset import load_dataset_file, parquet_copy_path

EACH, WORDS, TEST = 5, 10, 5000


def make(path: Path, n_images: int) -> None:
    rng = np.random.default_rng(0)
    words = [f"word{k}" for k in range(10_000)]
    images = []
    for imgid in range(n_images):
        sentences = []
        for sentid in range(EACH * imgid, EACH * imgid + EACH):
            tokens = [words[int(k) % len(words)] for k in rng.zipf(1.3, WORDS)]
            sentences.append({"sentid": sentid, "imgid": imgid, "raw": " ".join(tokens), "tokens": tokens})
        split = "test" if imgid < TEST else "train"
        images.append({"imgid": imgid, "filename": f"{imgid:012d}.jpg", "split": split, "sentences": sentences})
    path.write_text(json.dumps({"dataset": "made_up", "images": images}))


def measure(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    started = time.process_time()
    work()
    return round(time.process_time() - started, 2)


def number_words(captions: list[list[str]]) -> object:
    """Build the vocabulary of captions, and replace their words by numbers."""
    vocabulary = Vocabulary.build(captions)
    return [vocabulary.encode(tokens) for tokens in captions]


def read_texts(path: Path) -> list[str]:
    return [sentence["raw"] for image in json.loads(path.read_bytes())["images"] for sentence in image["sentences"]]


WORKS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "sha256": lambda path: lambda: hashlib.file_digest(path.open("rb"), "sha256"),
    "json": lambda path: lambda: json.loads(path.read_bytes()),
    "parsed": lambda path: lambda: load_dataset_file(path),
    "checked": lambda path: lambda: list(load_dataset_file(path).split("test")),
    "columns": lambda path: lambda: list(load_dataset_file(path).split("test")),
    "columns_all": lambda path: lambda: list(load_dataset_file(path).images),
    "split": lambda path: partial(list, (text.lower().split() for text in read_texts(path))),
    "words": lambda path: partial(list, (TOKENISERS[IMPORT_TOKENISER](text) for text in read_texts(path))),
    "vocabulary": lambda path: partial(number_words, [text.split() for text in read_texts(path)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[8000, 31_000, 123_287])
    parser.add_argument("--one", nargs=2, metavar=("WORK", "FILE"), help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.one:
        name, file = arguments.one
        print(json.dumps(measure(WORKS[name](Path(file)))))
        return
    rows = []
    for n_images in arguments.images:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dataset.json"
            make(path, n_images)
            row: dict[str, object] = {"images": n_images, "captions": EACH * n_images, "mb": round(path.stat().st_size / 1e6)}
            for name in WORKS:
                command = [sys.executable, __file__, "--one", name, str(path)]
                taken = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                row[f"{name}_cpu_s"] = taken
                if name == "parsed":
                    time.sleep(3)  # the check of a file that was written just now is not remembered
            there = parquet_copy_path(path)
            rows.append(row | {"columns_mb": round(there.stat().st_size / 1e6) if there.exists() else 0})
        print(rows[-1], file=sys.stderr, flush=True)
    report("dataset", rows)


if __name__ == "__main__":
    main()
