"""Time that ACE adds to a training step of VSE++, by the number of candidates that it samples from.

Claim: a step is feasible on a processor even if all 145,000 captions and 29,000 images of a data set of Flickr30K's size
are candidates. Limits: features (1280 numbers) and captions (11 words) are made up; batches have 128 pairs, embeddings
1024 dimensions, and the generator has its default settings. A step includes both encoders, gradients and both optimisers.
The script measures five steps for each number of candidates, and reports the fastest.

    python benchmarks/ace.py
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

from common import report, seconds

from training import make_up
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.experiment import load_experiment
from vse.training.options import TrainInputs
from vse.training.prepare import prepare_task
from vse.training.processes.launchers import join_processes
from vse.training.run.folder import RunFolder
from vse.training.run.inputs import open_inputs
from vse.training.solvers.retrieval import RetrievalTrainer


def step_seconds(cache_file: Path, experiment: str, repeats: int, *sets: str) -> float:
    """Return the shortest time of a step."""
    cache = open_cache(cache_file)
    settings = load_experiment(experiment, None, sets)
    inputs = open_inputs(cache, load_dataset_file(cache.dataset_file), settings, RunFolder(Path("none")), 0, TrainInputs())
    task, _ = prepare_task(settings, inputs, 0, join_processes("cpu"), 0)
    trainer = RetrievalTrainer(task)
    image_indices = task.pairs.image_indices
    objective = task.loss.build_objective(task.model.similarity)
    batches = settings.train.sampling.build_epoch_batches(image_indices, settings.train.batch_size, 0, 0)[: repeats + 1]
    task.model.train()

    def step(batch: object, seen: object) -> None:
        trainer.step(batch, seen, objective)

    taken = [
        seconds(lambda batch=batch, seen=seen: step(batch, seen))
        for batch, seen in zip(batches, task.image_inputs.read_batches(batches, image_indices, 0, 0), strict=True)
    ]
    return min(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=29_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = make_up(Path(folder), {"train": arguments.images, "val": 100}, 1280, 7000, 4)
        for precision in ("fp32", "bf16"):
            how = (f"train.precision={precision}",)
            base = step_seconds(cache, "vsepp", arguments.repeats, *how)
            rows.append({"candidates": "none", "precision": precision, "step_s": f"{base:.3f}", "ratio": "1.00"})
            for candidates in ("batch", 1_000, 10_000, "all"):
                taken = step_seconds(cache, "ace", arguments.repeats, *how, f"adversary.candidates={candidates}")
                captions, images = (arguments.images * each if candidates == "all" else candidates for each in (5, 1))
                named = candidates if candidates == "batch" else f"{captions} captions and {images} images"
                ratio = f"{taken / base:.2f}"
                rows.append({"candidates": named, "precision": precision, "step_s": f"{taken:.3f}", "ratio": ratio})
    report("ace", rows)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")


if __name__ == "__main__":
    main()
