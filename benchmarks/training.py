"""Speed of our trainer compared with a reimplementation of the published VSE++ training loop.

Claims: on a processor, ours trains at least 1.2 times as many pairs a second in float32. In bf16, on a processor that
multiplies bf16 natively, it trains at least 2 times as many. The time is at most 1.3 times (2.5 times in bf16) the limit.
Both learn the same: validation recall has the same course, within noise. The rows ``limit`` compute only the matrix
products of a step, each kind as one large product, as if a recurrent network had no steps: image and word projections,
states, scores, and their gradients.
Limits: the published loop gets captions as word indices, where the authors' code tokenises each caption at every visit.
Without ``--cache``, features and captions are made up: 4,096 numbers, 11 words a caption, a vocabulary of about 2,500
words. All loops start with the same weights and have the same order of pairs. They take turns epoch by epoch, so that
other load slows all of them equally.

    python benchmarks/training.py
    python benchmarks/training.py --cache f8k_effnet.h5 --epochs 4 --experiments vsepp vse0

The first command measures the speed. With ``--epochs`` all loops train for that number of epochs, and are validated after
each.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import precisions, report
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from vse.eval.ranking.metrics import compute_metrics
from vse.eval.ranking.ranks import ranks_from_embeddings
from vse.features.cache.feature_cache import FeatureCache, merge_shards, open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import CacheIdentity, FeatureRows
from vse.features.cache.shards import shard_path, shard_slice, write_shard
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.data.images import CachedImageFeatures
from vse.training.data.pairs import Pairs, RetrievalSplit, WordIndices, describe_model_inputs, select_images_with_features
from vse.training.data.samplers import ShuffledSampler
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.models.build import Model, build_model
from vse.training.processes.group import ProcessGroup
from vse.training.solvers.base import RetrievalTask
from vse.training.solvers.retrieval import RetrievalTrainer

CPU = torch.device("cpu")
MEASURED = {"vsepp": load_experiment("vsepp")}
RATES = ("pairs_per_s", "pairs_per_cpu_s")
Item = tuple[Tensor, Tensor, int, int]


def make_up(folder: Path, counts: Mapping[str, int], dim: int, n_words: int, n_shards: int) -> Path:
    """Write a made-up data set and its cache, and return the path of the cache; one shard is in memory at a time.

    ``counts`` has the number of images of each split; an image has five captions. Lengths of captions and frequencies of
    words resemble those of Flickr8k: 11 +- 4 words, and about 450 different words in a batch of 128 captions.
    """
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, n_words + 1) ** 1.1
    splits = [split for split, count in counts.items() for _ in range(count)]
    dataset_file = folder / "dataset.json"
    with dataset_file.open("w") as file:
        file.write('{"dataset": "made-up", "pictures": false, "images": [')
        for imgid, split in enumerate(splits):
            lengths = np.clip(rng.gamma(8, 1.4, 5).round().astype(int), 3, 40)
            words = iter(rng.choice(n_words, lengths.sum(), p=frequency / frequency.sum()))
            captions = [[f"word{next(words)}" for _ in range(length)] for length in lengths]
            sentences = [
                {"tokens": tokens, "raw": " ".join(tokens), "imgid": imgid, "sentid": 5 * imgid + k}
                for k, tokens in enumerate(captions)
            ]
            image = {"filename": f"{imgid:012d}.jpg", "imgid": imgid, "split": split, "sentences": sentences}
            file.write(("," if imgid else "") + json.dumps(image))
        file.write("]}")
    cache, ids = folder / "made-up.h5", np.arange(len(splits))
    for index in range(n_shards):
        mine = ids[shard_slice(len(ids), index, n_shards)]
        features = rng.standard_normal((len(mine), dim), np.float32)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        rows = FeatureRows(mine, features.astype(np.float16), np.zeros((len(mine), 32), np.uint8))
        write_shard(shard_path(cache, index, n_shards), CacheIdentity("made-up", "made-up", "image", {}), rows)
    return merge_shards(cache, n_shards, dataset_file, ids)


@dataclass(frozen=True)
class Data:
    """A cache, its vocabulary, and the pairs of the training and the validation split."""

    cache: FeatureCache
    vocabulary: Vocabulary
    train: Pairs
    val: Pairs

    @classmethod
    def load(cls, path: Path, min_count: int) -> Data:
        cache = open_cache(path)
        dataset = load_dataset_file(cache.dataset_file)
        images = select_images_with_features(dataset, ["train"], cache)
        vocabulary = Vocabulary.build((c.tokens for image in images for c in image.captions), min_count)
        return cls(cache, vocabulary, Pairs(images), Pairs(select_images_with_features(dataset, ["val"], cache)))

    def model(self, experiment: ExperimentConfig, seed: int) -> Model:
        torch.manual_seed(seed)
        return build_model(experiment.model, *describe_model_inputs(self.cache, None, None, self.vocabulary))


class Items(Dataset[Item]):
    """One item per caption: the feature of its image, its word indices, its own index and that of its image."""

    def __init__(self, data: Data, pairs: Pairs) -> None:
        reader = FeatureReader(data.cache)
        self.features = reader.read_rows(reader.find_rows(pairs.image_ids)).astype(np.float32)
        self.words = [data.vocabulary.encode(caption.tokens) for caption in pairs.captions]
        self.image_indices = pairs.image_indices

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Item:
        image = int(self.image_indices[index])
        return torch.tensor(self.features[image]), torch.tensor(self.words[index]), index, image


def collate(items: list[Item]) -> tuple[Tensor, Tensor, list[int], tuple[int, ...]]:
    """Return features, words padded to the longest caption, which comes first, lengths, and indices of the captions."""
    items.sort(key=lambda item: len(item[1]), reverse=True)
    features, captions, numbers, _ = zip(*items, strict=True)
    lengths = [len(caption) for caption in captions]
    words = torch.zeros(len(captions), max(lengths), dtype=torch.long)
    for row, caption in enumerate(captions):
        words[row, : lengths[row]] = caption
    return torch.stack(features), words, lengths, numbers


def unit_length(vectors: Tensor) -> Tensor:
    return vectors / vectors.pow(2).sum(1, keepdim=True).sqrt()


class PublishedModel(nn.Module):
    """A linear image encoder, and word embeddings with a GRU on packed sequences, with the weights of ``ours``."""

    def __init__(self, ours: Model, normalize_image: bool) -> None:
        super().__init__()
        self.linear = copy.deepcopy(ours.image_encoder.linear)
        self.words = copy.deepcopy(ours.caption_encoder.words)
        self.gru = copy.deepcopy(ours.caption_encoder.recurrent)
        self.normalize_image = normalize_image

    def images(self, features: Tensor) -> Tensor:
        embeddings = self.linear(features)
        return unit_length(embeddings) if self.normalize_image else embeddings

    def captions(self, words: Tensor, lengths: list[int]) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        last = torch.tensor(lengths)[:, None, None].expand(-1, 1, states.shape[2]) - 1
        return unit_length(states.gather(1, last).squeeze(1))


def hinges(scores: Tensor, margin: float, hardest: bool) -> Tensor:
    positives = scores.diag()
    of_captions = (margin + scores - positives[:, None]).clamp(min=0)
    of_images = (margin + scores - positives[None, :]).clamp(min=0)
    same = torch.eye(len(scores)) > 0.5
    of_captions, of_images = of_captions.masked_fill_(same, 0), of_images.masked_fill_(same, 0)
    if hardest:
        of_captions, of_images = of_captions.max(1)[0], of_images.max(0)[0]
    return of_captions.sum() + of_images.sum()


def cpu_seconds() -> float:
    """Return the processor time of this process so far, and of the ended processes that it started."""
    return sum(os.times()[:4])


class PublishedLoop:
    """The published loop in float32, with ``workers`` loader processes."""

    def __init__(self, experiment: ExperimentConfig, data: Data, seed: int, workers: int = 0) -> None:
        self.name = "published, fp32" + (f", {workers} loader processes" if workers else "")
        self.experiment, self.data, self.seed, self.workers = experiment, data, seed, workers
        self.train, self.val = Items(data, data.train), Items(data, data.val)
        self.model = PublishedModel(data.model(experiment, seed), experiment.model.normalize_image)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=experiment.train.learning_rate)
        self.epochs = 0

    def epoch(self) -> dict[str, float]:
        """Train an epoch and validate; return the mean loss of a pair, rsum, pairs per second and per processor second."""
        settings, loss_settings = self.experiment.train, self.experiment.loss
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.decay ** (self.epochs // settings.decay_after)
        started, cpu_started, total, n_pairs = time.perf_counter(), cpu_seconds(), 0.0, 0
        batches = ShuffledSampler().build_epoch_batches(self.train.image_indices, settings.batch_size, self.seed, self.epochs)
        for features, words, lengths, _ in DataLoader(
            self.train, batch_sampler=[batch.tolist() for batch in batches], collate_fn=collate, num_workers=self.workers
        ):
            images, captions = self.model.images(features), self.model.captions(words, lengths)
            self.optimizer.zero_grad()
            loss = hinges(images @ captions.t(), loss_settings.margin, hardest=loss_settings.name == "max")
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
            self.optimizer.step()
            total += loss.item()
            n_pairs += len(lengths)
        rates = {
            "pairs_per_s": n_pairs / (time.perf_counter() - started),
            "pairs_per_cpu_s": n_pairs / (cpu_seconds() - cpu_started),
        }
        self.epochs += 1
        return {"loss": total / n_pairs, "rsum": self.validate(), **rates}

    @torch.no_grad()
    def validate(self) -> float:
        captions = torch.empty(len(self.val), self.experiment.model.dim)
        for _, words, lengths, numbers in DataLoader(self.val, 128, collate_fn=collate):
            captions[list(numbers)] = self.model.captions(words, lengths)
        images = self.model.images(torch.from_numpy(self.val.features))
        return compute_metrics(ranks_from_embeddings(images, captions, torch.from_numpy(self.val.image_indices)))["rsum"]


class TimedTrainer(RetrievalTrainer):
    """A trainer that records the processor time at the end of an epoch's steps, before validation."""

    def validate(self) -> dict[str, float]:
        self.cpu_ended = cpu_seconds()
        return super().validate()


class OurLoop:
    """The trainer of this project."""

    def __init__(self, experiment: ExperimentConfig, data: Data, seed: int, precision: str) -> None:
        self.name = f"ours, {precision}"
        settings = experiment.train.model_copy(update={"precision": precision, "on_collapse": "warn"})
        train, val = (
            RetrievalSplit(
                pairs,
                CachedImageFeatures(FeatureReader(data.cache, 0), pairs.image_ids, CPU, 2),
                WordIndices(pairs.captions, data.vocabulary, CPU),
            )
            for pairs in (data.train, data.val)
        )
        task = RetrievalTask(
            settings=settings,
            loss=experiment.loss,
            loss_warmup=experiment.warmup,
            pairs=train.pairs,
            image_inputs=train.image_inputs,
            caption_inputs=train.caption_inputs,
            val_split=val,
            model=data.model(experiment, seed),
            seed=seed,
            processes=ProcessGroup(),
        )
        self.trainer = TimedTrainer(task)

    def epoch(self) -> dict[str, float]:
        started = cpu_seconds()
        self.trainer.run_epoch(save=lambda: None)
        rate = len(self.trainer.pairs) / (self.trainer.cpu_ended - started)
        return {**self.trainer.progress.rows[-1], "pairs_per_cpu_s": rate}


class ProductsAlone:
    """The matrix products of our steps alone, as few and as large as possible."""

    def __init__(self, experiment: ExperimentConfig, data: Data, precision: str) -> None:
        self.name = f"limit, {precision}"
        self.n_pairs, self.batch_size = len(data.train), experiment.train.batch_size
        words = [data.vocabulary.encode(caption.tokens) for caption in data.train.captions]
        batch, dim = self.batch_size, experiment.model.dim
        of_batches = [words[k : k + batch] for k in range(0, len(words) - batch + 1, batch)]
        n_words = round(statistics.mean(sum(map(len, some)) for some in of_batches))
        n_different = round(statistics.mean(len({word for one in some for word in one}) for some in of_batches))
        word_dim = experiment.model.word_dim
        # rows, input size, output size, and number of passes (forward, and one or two backward)
        shapes = [
            (batch, data.cache.dim, dim, 2),
            (n_different, word_dim, 3 * dim, 3),
            (n_words, dim, 3 * dim, 3),
            (batch, dim, batch, 3),
        ]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.products: list[tuple[Tensor, Tensor]] = []
        for rows, read, made, passes in shapes:
            left, weight, gradient = (torch.randn(*size).to(dtype) for size in ((rows, read), (read, made), (rows, made)))
            self.products += [(left, weight), (gradient.t(), left), (gradient, weight.t())][:passes]

    def epoch(self) -> dict[str, float]:
        started, cpu_started = time.perf_counter(), cpu_seconds()
        for _ in range(0, self.n_pairs, self.batch_size):
            for left, right in self.products:
                left @ right
        return {
            "pairs_per_s": self.n_pairs / (time.perf_counter() - started),
            "pairs_per_cpu_s": self.n_pairs / (cpu_seconds() - cpu_started),
        }


def speeds(data: Data, threads: int, rounds: int) -> list[dict[str, object]]:
    """Return the medians over rounds; the first round warms up."""
    torch.set_num_threads(threads)
    experiment = MEASURED["vsepp"]
    loops = [
        PublishedLoop(experiment, data, 0),
        PublishedLoop(experiment, data, 0, workers=2),
        *(OurLoop(experiment, data, 0, precision) for precision in precisions()),
        *(ProductsAlone(experiment, data, precision) for precision in precisions()),
    ]
    found: dict[str, list[dict[str, float]]] = {loop.name: [] for loop in loops}
    for _ in range(1 + rounds):
        for loop in loops:
            found[loop.name].append({rate: value for rate, value in loop.epoch().items() if rate in RATES})
            print(f"{threads} threads, {loop.name}: {found[loop.name][-1]}", flush=True)
    medians = {
        name: {rate: statistics.median(value[rate] for value in values[1:]) for rate in RATES}
        for name, values in found.items()
    }
    base = medians[loops[0].name]
    return [
        {
            "threads": threads,
            "loop": name,
            **{rate: round(median[rate]) for rate in RATES},
            **{rate.replace("pairs", "ratio"): round(median[rate] / base[rate], 2) for rate in RATES},
        }
        for name, median in medians.items()
    ]


def curves(data: Data, name: str, seed: int, epochs: int) -> list[dict[str, object]]:
    """Train all loops, and return a row for each of their epochs."""
    experiment = load_experiment(name)
    loops = [PublishedLoop(experiment, data, seed), *(OurLoop(experiment, data, seed, p) for p in precisions())]
    rows: list[dict[str, object]] = []
    for epoch in range(1, epochs + 1):
        for loop in loops:
            row = loop.epoch()
            rows.append(
                {
                    "dataset": data.cache.dataset,
                    "feature": data.cache.feature,
                    "experiment": name,
                    "seed": seed,
                    "epoch": epoch,
                    "loop": loop.name,
                    "loss": round(row["loss"], 4),
                    "rsum": round(row["rsum"], 1),
                    **{rate: round(row[rate]) for rate in RATES},
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="train on this cache instead of made-up data")
    parser.add_argument("--images", type=int, default=512, help="number of made-up training images, with five captions each")
    parser.add_argument("--dim", type=int, default=4096, help="length of a made-up feature")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads to use; --epochs uses only the last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="train this number of epochs and validate, instead of measuring the speed")
    parser.add_argument("--experiments", nargs="+", default=["vsepp"], help="for --epochs; max or sum of hinges")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="for --epochs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache or make_up(Path(folder), {"train": arguments.images, "val": 100}, arguments.dim, 3000, 2)
        data = Data.load(cache, min_count=4 if arguments.cache else 1)
        if arguments.epochs is None:
            report("training", [row for threads in arguments.threads for row in speeds(data, threads, arguments.rounds)])
            return
        torch.set_num_threads(arguments.threads[-1])
        runs = [(name, seed) for name in arguments.experiments for seed in arguments.seeds]
        rows = []
        for name, seed in runs:
            rows += curves(data, name, seed, arguments.epochs)
            report("training_curves", rows)


if __name__ == "__main__":
    main()
