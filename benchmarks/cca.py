"""Time and memory of CCA at COCO's size: 4,096 numbers an image, 6,000 a caption, five captions an image.

Claim: the memory stays under 3 GB, whatever the number of images. Limits: the vectors are made up. The script sums
covariances over ``--blocks`` blocks of 1,024 images and extrapolates the time to COCO's 111 blocks (113,287 images).
Reading the cache is not part of it. Memory is the peak of the resident memory in units of 1e9 bytes, libraries included.

    python benchmarks/cca.py
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator

import numpy as np
import torch
from common import report, seconds
from numpy.typing import NDArray
from torch import Tensor

from vse.pipeline.command import count_allowed_cores
from vse.training.solvers.cca import Covariances, compute_canonical_directions, compute_covariances

IMAGES, BLOCK, PER_IMAGE, DIM_X, DIM_Y, DIRECTIONS = 113_287, 1024, 5, 4096, 6000, 256


def blocks(n: int) -> Iterator[tuple[Tensor, Tensor, NDArray[np.int64]]]:
    """Yield blocks of images and captions that share 50 directions."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, dim, generator=generator) for dim in (DIM_X, DIM_Y))
    image_of_caption = np.repeat(np.arange(BLOCK), PER_IMAGE)
    for _ in range(n):
        shared = torch.randn(BLOCK, 50, generator=generator)
        images = torch.rand(BLOCK, DIM_X, generator=generator) + 0.1 * shared @ x
        yield (
            images,
            torch.rand(len(image_of_caption), DIM_Y, generator=generator) + 0.1 * shared[image_of_caption] @ y,
            image_of_caption,
        )


def peak_gb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=count_allowed_cores())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    drawing = seconds(lambda: [None for _ in blocks(arguments.blocks)])
    found: list[Covariances] = []
    summing = seconds(lambda: found.append(compute_covariances(blocks(arguments.blocks)))) - drawing
    rows: list[dict[str, object]] = [
        {
            "phase": "covariances",
            "blocks": arguments.blocks,
            "threads": arguments.threads,
            "seconds": round(summing, 1),
            "seconds_of_coco": round(summing / arguments.blocks * IMAGES / BLOCK),
            "peak_gb": peak_gb(),
        }
    ]
    solving = seconds(lambda: compute_canonical_directions(found[0], DIRECTIONS, 0.1))
    rows.append(
        {
            **rows[0],
            "phase": "directions, of one regularisation",
            "seconds": round(solving, 1),
            "seconds_of_coco": round(solving),
            "peak_gb": peak_gb(),
        }
    )
    report("cca", rows)


if __name__ == "__main__":
    main()
