"""A data set of three images whose phrases and boxes a person can count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Of each image: its split and, for each caption, its words with the phrases and their boxes.
Caption = tuple[str, list[tuple[int, int, list[list[float]]]]]
BALLS: Caption = ("A man throws two balls", [(0, 2, [[0, 0, 20, 40]]), (3, 2, [[30, 0, 40, 10], [50, 20, 60, 30]])])
IMAGES: list[tuple[str, list[Caption]]] = [
    ("train", [BALLS, ("a man at night", [(0, 2, [[0, 0, 20, 40]]), (3, 1, [])])]),
    ("train", [("the empty beach", [(0, 3, [])])]),
    ("test", [("two balls on a red hat", [(0, 2, [[10, 10, 20, 20]]), (3, 3, [[0.5, 0, 62, 40.25]])])]),
]
TEXTS = ["a man", "two balls", "night", "the empty beach", "a red hat"]
TRUTHS = {0: [[0, 0, 20, 40], [30, 0, 60, 30]], 2: [[10, 10, 20, 20], [0.5, 0, 62, 40.25]]}
"""The last box reaches beyond its image, which is 60 x 40."""


def drawn_phrases(folder: Path) -> Path:
    """Write the data set ``drawn`` to a folder; returns its ``dataset.json``."""
    (folder / "images").mkdir(parents=True)
    images, sentid = [], 0
    for imgid, (split, captions) in enumerate(IMAGES):
        pixels = np.random.default_rng(imgid).integers(0, 255, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((60, 40), Image.Resampling.NEAREST).save(folder / "images" / f"{imgid}.png")
        sentences: list[dict[str, Any]] = []
        for text, phrases in captions:
            marked = [{"first_token": first, "n_tokens": n, "boxes": boxes} for first, n, boxes in phrases]
            sentences.append({"sentid": sentid, "raw": text, "tokens": text.split(), "phrases": marked})
            sentid += 1
        images.append({"imgid": imgid, "filename": f"{imgid}.png", "split": split, "sentences": sentences})
    path = folder / "dataset.json"
    path.write_text(json.dumps({"dataset": "drawn", "images": images}))
    return path


def without_phrases(folder: Path) -> Path:
    """Write the data set without the marks of its phrases."""
    path = drawn_phrases(folder)
    content = json.loads(path.read_text())
    for sentence in (sentence for image in content["images"] for sentence in image["sentences"]):
        del sentence["phrases"]
    path.write_text(json.dumps(content))
    return path
