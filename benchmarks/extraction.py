"""How much of an extraction is the network: its time against a bare forward loop on the same images.

Claim: at least 85% of the time is the forward pass.
Limit: random weights, which cost what trained ones cost; the demo's pictures, drawn for this run and enlarged to the
common 500 x 375 pixels of a photograph, so that decoding and resizing cost what they cost there.

    python benchmarks/extraction.py --models vgg19 resnet152 --images 64
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import report, seconds
from PIL import Image

from vse.features.cnn import CnnExtractor
from vse.features.pictures import crops_of, decode, normalized
from vse.pipeline.config import CnnConfig
from vse.pipeline.demo import make_demo


def pictures(folder: Path, n_images: int) -> list[Path]:
    make_demo(folder, n_images)
    paths = sorted((folder / "images").glob("*.jpg"))
    for path in paths:
        with Image.open(path) as picture:
            large = picture.resize((500, 375), Image.Resampling.BICUBIC)
        large.save(path, "JPEG", quality=92)
    return paths


def measure(model: str, precision: str, paths: list[Path]) -> dict[str, object]:
    config = CnnConfig(name=model, model=model, weights="random", precision=precision, batch_size=16)
    extractor = CnnExtractor(config)
    batches = [torch.stack([crops_of(decode(p), config) for p in paths[k : k + 16]]) for k in range(0, len(paths), 16)]
    inputs = [normalized(batch.flatten(0, 1), config, extractor.device) for batch in batches]

    def forward_only() -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            for images in inputs:
                extractor.network(images)

    forward_only()  # warm up
    times = {"forward": [], "extract": []}
    for _ in range(3):
        times["forward"].append(seconds(forward_only))
        times["extract"].append(seconds(lambda: extractor.extract(paths)))
    forward, extract = min(times["forward"]), min(times["extract"])
    return {
        "model": model,
        "precision": precision,
        "images": len(paths),
        "forward_s": round(forward, 2),
        "extract_s": round(extract, 2),
        "forward_share": round(forward / extract, 3),
        "images_per_s": round(len(paths) / extract, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["vgg19", "resnet152"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--images", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = pictures(Path(folder), arguments.images)
        report("extraction", [measure(model, p, paths) for model in arguments.models for p in arguments.precisions])


if __name__ == "__main__":
    main()
