"""Speed of an extraction compared with the bare network, with timm and a DataLoader, and with decoding alone.

Claims: on a processor, an extraction with the preset ``effnet`` is at least 1.2 times as fast as the bare network, because
the preset folds batch norms into convolutions. Its vectors differ by less than 1e-5 of their largest number. On a GPU
(``--device cuda --compile``) the rates show what limits the speed.
Columns: ``extract`` is the extraction with the preset, and ``plain`` the same without folding, in fp32. ``forward`` is
the unfolded network alone, on pixels in memory, in batches of 4 on a processor, where larger batches are not faster.
``timm`` decodes, resizes and computes as in timm's documentation, with torch's DataLoader. ``drift`` is the largest
difference from the vectors in fp32 without folding, divided by their largest number. ``cosine`` is the smallest cosine
with them.
Limits: weights are random; these take the same time as trained weights, but their drift differs. Vectors are kept in
float32. Images are those of the demo, enlarged to 500 x 375 pixels, a common size of photographs, so that decoding and
resizing take as long as for these. On a processor the rates are by processor time of one thread, medians of runs that
take turns; on a GPU they are by wall time.

    python benchmarks/extraction.py
    python benchmarks/extraction.py --presets fc7 resnet --images 32
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from common import report
from PIL import Image

from vse.features.backbones.networks import autocast, load_backbone
from vse.features.cache.rows import ExtractorInput
from vse.features.extractors.cnn import CnnExtractor, cut_crops, normalize_pixels
from vse.features.extractors.images import load_in_threads
from vse.features.settings import load_feature_preset
from vse.features.settings.images import CnnConfig
from vse.pipeline.demo import create_demo
from vse.pipeline.files.images import decode_image


def load_config(preset: str) -> CnnConfig:
    """Return the settings of a preset, with random weights and vectors in float32."""
    return CnnConfig.model_validate(load_feature_preset(preset, sets=["weights=random", "dtype=float32"]).model_dump())


MEASURED = {"effnet": load_config("effnet")}


def pictures(folder: Path, n_images: int) -> list[Path]:
    create_demo(folder, n_images)
    paths = sorted((folder / "images").glob("*.jpg"))
    for path in paths:
        with Image.open(path) as picture:
            large = picture.resize((500, 375), Image.Resampling.BICUBIC)
        large.save(path, "JPEG", quality=92)
    return paths


class Opened(torch.utils.data.Dataset[torch.Tensor]):
    """Images opened as in timm's documentation: by Pillow, with timm's transformation for the network."""

    def __init__(self, paths: list[Path], network: torch.nn.Module) -> None:
        import timm.data

        self.paths = paths
        self.transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> torch.Tensor:
        with Image.open(self.paths[place]) as image:
            pixels: torch.Tensor = self.transform(image.convert("RGB"))
        return pixels


def measure(preset: str, paths: list[Path], arguments: argparse.Namespace) -> dict[str, object]:
    config, device = load_config(preset), torch.device(arguments.device)
    config = config.model_copy(update={"compile": arguments.compile})
    extractor = CnnExtractor(config, device=arguments.device)
    plain = CnnExtractor(config.model_copy(update={"precision": "fp32", "fold_batch_norm": False}), device=arguments.device)
    size, precision = config.batch_size, extractor.config.precision
    items = [ExtractorInput(k, path) for k, path in enumerate(paths)]
    crops = torch.cat([cut_crops(decode_image(path), config) for path in paths])
    at_once = 4 if device.type == "cpu" else size
    inputs = [normalize_pixels(some, config.mean, config.std, device) for some in crops.split(at_once)]

    def forward_only() -> None:
        with torch.inference_mode(), autocast(precision, extractor.device):
            outputs = [plain._forward(images) for images in inputs]
            outputs[-1].sum().item()  # wait for the device

    def decode_only() -> None:
        for _ in load_in_threads(paths, lambda path: cut_crops(decode_image(path), config), config.workers, 2 * size):
            pass

    works = {
        "forward": forward_only,
        "decode": decode_only,
        "extract": lambda: extractor.extract(items),
        "plain": lambda: plain.extract(items),
    }
    if config.model.startswith("timm/"):
        network = load_backbone(plain.config).to(device)
        loader = torch.utils.data.DataLoader(Opened(paths, network), size)

        def by_timm() -> None:
            with torch.inference_mode(), autocast(precision, device):
                outputs = [network(images.to(device)) for images in loader]
                outputs[-1].sum().item()

        works["timm"] = by_timm
    clock, unit = (time.process_time, "cpu_s") if device.type == "cpu" else (time.perf_counter, "s")
    times: dict[str, list[float]] = {what: [] for what in works}
    for turn in range(1 + arguments.rounds):
        for what, work in works.items():
            started = clock()
            work()
            if turn:  # the first run warms up
                times[what].append(clock() - started)
    expected, vectors = (e.extract(items[: 4 * size]).features.astype(np.float32) for e in (plain, extractor))
    cosines = (expected * vectors).sum(-1) / np.linalg.norm(expected, axis=-1) / np.linalg.norm(vectors, axis=-1)
    medians = {what: median(values) for what, values in times.items()}
    return {
        "preset": preset,
        "device": device.type,
        "precision": precision,
        "compiled": config.compile,
        "images": len(paths),
        **{f"{what}_images_per_{unit}": round(len(paths) / medians[what], 1) for what in medians},
        "times_forward": round(medians["forward"] / medians["extract"], 3),
        "drift": f"{np.abs(vectors - expected).max() / np.abs(expected).max():.1e}",
        "cosine": round(float(cosines.min()), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(MEASURED))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = pictures(Path(folder), arguments.images)
        report("extraction", [measure(preset, paths, arguments) for preset in arguments.presets])


if __name__ == "__main__":
    main()
