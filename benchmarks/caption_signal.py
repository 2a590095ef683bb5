"""Retrieval by a caption feature alone: a linear CCA to an image feature, fitted on the training split, ranks the test split.

The CCA has 256 canonical directions, weighted by their correlations, and compares by cosines. The regularisation is
chosen on the validation split. Chance is R@1/5/10 of 0.1 / 0.5 / 1.0 on 1,000 images. The rows ``shuffled`` fit the CCA
to captions of other images.

    python benchmarks/caption_signal.py --image f8k_effnet_10c.h5 --text f8k_tfidf.h5 f8k_mean_vector.h5 f8k_hglmm.h5
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from common import report
from numpy.typing import NDArray

from vse.eval.ranking.metrics import compute_metrics
from vse.eval.ranking.ranks import ranks_from_embeddings
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.training.solvers.cca import compute_canonical_directions, compute_covariances

DIM, REGULARISATIONS = 256, (1e-2, 1e-1, 0.3, 1.0, 3.0)


class Pairs:
    """Features of a split: images (n, dx), captions (m, dy), and the row of each caption's image."""

    def __init__(self, dataset: Dataset, split: str, image: FeatureReader, text: FeatureReader) -> None:
        images = dataset.split(split)
        self.images = image.read_rows(image.find_rows(i.imgid for i in images)).astype(np.float32)
        self.captions = text.read_rows(text.find_rows(c.sentid for i in images for c in i.captions)).astype(np.float32)
        self.image_of_caption = np.repeat(np.arange(len(images)), [len(i.captions) for i in images])


def recalls_of(train: Pairs, tests: list[Pairs], image_of_caption: NDArray[np.int64]) -> dict[float, list[dict]]:
    """Return the metrics on each of ``tests``, by regularisation.

    ``image_of_caption`` has the row of each training caption's image.
    """
    blocks = [(torch.from_numpy(train.images), torch.from_numpy(train.captions), image_of_caption)]
    fitted = compute_covariances(iter(blocks))
    found = {}
    for r in REGULARISATIONS:
        x, y, correlations = compute_canonical_directions(fitted, DIM, r)
        found[r] = []
        for test in tests:
            images = torch.from_numpy((test.images - fitted.mean_x) @ (x * correlations))
            captions = torch.from_numpy((test.captions - fitted.mean_y) @ (y * correlations))
            unit = (torch.nn.functional.normalize(images.float()), torch.nn.functional.normalize(captions.float()))
            found[r].append(compute_metrics(ranks_from_embeddings(*unit, torch.from_numpy(test.image_of_caption))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    cache = open_cache(arguments.image)
    dataset, image = load_dataset_file(cache.dataset_file), FeatureReader(cache)
    rows = []
    for path in arguments.text:
        text = FeatureReader(open_cache(path))
        train, val, test = (Pairs(dataset, split, image, text) for split in ("train", "val", "test"))
        shuffled = np.random.default_rng(0).permutation(train.image_of_caption)
        for name, image_of_caption in (
            (text.cache.feature, train.image_of_caption),
            (f"{text.cache.feature}, shuffled", shuffled),
        ):
            found = recalls_of(train, [val, test], image_of_caption)
            best = max(found, key=lambda r: found[r][0]["rsum"])
            of_test = found[best][1]
            recalls = {f"{d}_r{k}": round(of_test[d][f"r{k}"], 1) for d in ("i2t", "t2i") for k in (1, 5, 10)}
            row = {"image": cache.feature, "text": name, "dim": text.cache.dim, "regularisation": best}
            rows.append({**row, **recalls, "rsum": round(of_test["rsum"], 1)})
            print(rows[-1], flush=True)
    report(f"caption_signal_{dataset.name}", rows)


if __name__ == "__main__":
    main()
