"""How much of an extraction is the network: its speed against a bare forward loop, and against decoding alone.

Claim: on a processor at least 85% of the time is the forward pass. On a GPU (``--device cuda --precisions bf16
--compile``) the three figures say what the limit is.
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

from vse.features.backbones import autocast
from vse.features.cnn_extractor import CnnExtractor
from vse.features.crops import crops_of, normalized
from vse.features.extractors.cnn import CnnConfig
from vse.features.read_ahead import read_ahead
from vse.features.rows import Item
from vse.pipeline.demo import make_demo
from vse.pipeline.image_files import decode


def pictures(folder: Path, n_images: int) -> list[Path]:
    make_demo(folder, n_images)
    paths = sorted((folder / "images").glob("*.jpg"))
    for path in paths:
        with Image.open(path) as picture:
            large = picture.resize((500, 375), Image.Resampling.BICUBIC)
        large.save(path, "JPEG", quality=92)
    return paths


def measure(model: str, precision: str, paths: list[Path], arguments: argparse.Namespace) -> dict[str, object]:
    size = arguments.batch_size
    settings = {"weights": "random", "precision": precision, "batch_size": size, "compile": arguments.compile}
    config = CnnConfig(name=model, model=model, workers=arguments.workers, **settings)
    extractor = CnnExtractor(config, device=arguments.device)
    items = [Item(k, path) for k, path in enumerate(paths)]
    batches = [torch.stack([crops_of(decode(p), config) for p in paths[k : k + size]]) for k in range(0, len(paths), size)]
    inputs = [normalized(batch.flatten(0, 1), config.mean, config.std, extractor.device) for batch in batches]

    def forward_only() -> None:
        with torch.inference_mode(), autocast(precision, extractor.device):
            outputs = [extractor._forward(images) for images in inputs]
            outputs[-1].sum().item()  # wait for the device

    def decode_only() -> None:
        for _ in read_ahead(paths, lambda path: crops_of(decode(path), config), config.workers, 2 * size):
            pass

    works = {"forward": forward_only, "decode": decode_only, "extract": lambda: extractor.extract(items)}
    for work in works.values():
        work()  # warm up
    times = {what: min(seconds(work) for _ in range(3)) for what, work in works.items()}
    rates = {f"{what}_images_per_s": round(len(paths) / value, 1) for what, value in times.items()}
    return {
        "model": model,
        "device": extractor.device.type,
        "precision": precision,
        "compiled": config.compile,
        "images": len(paths),
        **rates,
        "forward_share": round(times["forward"] / times["extract"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["vgg19", "resnet152"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="threads that decode")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = pictures(Path(folder), arguments.images)
        report("extraction", [measure(model, p, paths, arguments) for model in arguments.models for p in arguments.precisions])


if __name__ == "__main__":
    main()
