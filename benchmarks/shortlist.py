"""TOD-Net by shortlist: processor time and ranks, compared with a complete scoring of trained models.

Claims: with the first 1,000 images and their captions, ``vse-embed --shortlist`` scores a quarter of the pairs at most, is
more than three times as fast, and has the ranks of the complete scoring.
Limits: the complete time is extrapolated from the first quarter of the captions; both programs run in turns on one thread.
The ranks are compared with those of the scores in ``test.h5`` of each run, for all queries.

    python benchmarks/shortlist.py runs/f8k_folds_todnet_minilm/seed-*
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from common import report
from torch import Tensor

from vse.eval.files.embeddings import read_embeddings
from vse.eval.ranking.ranks import ranks_from_blocks
from vse.training.experiment import ExperimentConfig
from vse.training.models.similarities.todnet import TodNetSimilarity, score_shortlist
from vse.training.run.folder import RunFolder
from vse.training.solvers.encode import MAX_TILE_CAPTIONS, MAX_TILE_IMAGES


def load_similarity(run: Path, dim: int) -> TodNetSimilarity:
    similarity = RunFolder(run).read_settings(ExperimentConfig).model.similarity.build(dim)
    weights = RunFolder(run).read_best_weights()
    similarity.load_state_dict({name.removeprefix("similarity."): weight for name, weight in weights.items()})
    assert isinstance(similarity, TodNetSimilarity)
    return similarity.eval()


def score_tiles(similarity: TodNetSimilarity, images: Tensor, captions: Tensor) -> None:
    with torch.inference_mode():
        for rows in torch.split(images, MAX_TILE_IMAGES):
            for columns in torch.split(captions, MAX_TILE_CAPTIONS):
                similarity((rows,), (columns,))


def compare(run: Path, n_images: int) -> dict[str, object]:
    """Return a row for the first images of the test split of a run."""
    whole = read_embeddings(run / "test.h5")
    n_images = min(n_images, len(whole.image_ids))
    chosen = np.flatnonzero(whole.image_of_caption() < n_images)
    complete = whole.select(np.arange(n_images), chosen)
    assert complete.pooled_vectors is not None
    images, captions = (torch.tensor(side) for side in complete.pooled_vectors)  # those of the backbone
    image_of_caption = torch.from_numpy(complete.image_of_caption())
    similarity, few = load_similarity(run, images.shape[1]), captions[: len(captions) // 4]
    started = time.process_time()
    score_tiles(similarity, images, few)
    complete_s = (time.process_time() - started) * len(captions) / len(few)
    started = time.process_time()
    blocks, scored = score_shortlist(similarity, images, captions, image_of_caption)
    shortlist_s = time.process_time() - started
    exact, found = ranks_from_blocks(*complete.score_blocks()), ranks_from_blocks(*blocks)
    return {
        "run": "/".join(run.parts[-2:]),
        "images": n_images,
        "captions": len(captions),
        **{f"scored_{name}": f"{share:.1%}" for name, share in scored.items()},
        "complete_cpu_s": round(complete_s, 1),
        "shortlist_cpu_s": round(shortlist_s, 1),
        "times_faster": round(complete_s / shortlist_s, 2),
        "ranks": len(exact.i2t) + len(exact.t2i),
        "ranks_that_differ": int((exact.i2t != found.i2t).sum() + (exact.t2i != found.t2i).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="runs of TOD-Net with their complete scores in test.h5")
    parser.add_argument("--images", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report("shortlist_f8k", [compare(run, arguments.images) for run in arguments.runs])


if __name__ == "__main__":
    main()
