"""Made-up caches of candidate boxes, of ground-truth regions and of phrases, whose vectors know what they show."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.features.cache.feature_cache import merge_shards, open_cache
from vse.features.cache.rows import CacheIdentity, FeatureRows, sha256_bytes
from vse.features.cache.shards import shard_path, write_shard
from vse.pipeline.dataset.dataset import Dataset, list_mentions, list_phrase_texts, load_dataset_file
from vse.pipeline.dataset.images import iou
from vse.pipeline.files.images import decode_image, read_image_bytes
from vse.training.experiment import ExperimentConfig, load_experiment
from vse.training.phrases.arrays import PhraseArrays, RegionFeatures, build_phrase_arrays, find_truth_regions

CPU = torch.device("cpu")
DIM, TEXT_DIM = 12, 10
Array = NDArray[Any]

SMALL = ["feature=candidates", "truth_feature=truths", "caption_feature=some_phrases"]
SMALL += [f"model.{side}_encoder={{name: branch, widths: [{width}, 8]}}" for side, width in (("image", 16), ("caption", 14))]
SMALL += ["train.epochs=2", "train.batch_size=40"]
LINEAR = ["model.image_encoder.widths=[8]", "model.caption_encoder.widths=[8]"]


def small(*sets: str, name: str = "phrase_embedding") -> ExperimentConfig:
    """A preset on these caches."""
    return load_experiment(name, sets=[*SMALL, *sets])


@dataclass(frozen=True)
class Caches:
    """Where the three caches of a data set lie."""

    candidates: Path
    truths: Path
    phrases: Path


def make_caches(dataset_file: Path, folder: Path, n: int = 7, **of_truths: Any) -> Caches:
    """Caches of a drawn data set: up to ``n`` candidates an image, some near a truth and some anywhere.

    ``of_truths`` are settings that the cache of ground-truth regions records.
    """
    dataset, rng = load_dataset_file(dataset_file), np.random.default_rng(0)
    texts = list_phrase_texts(dataset)
    meanings = {text: _meaning(text, DIM) for text in texts}
    named: dict[int, list[tuple[Array, str]]] = {image.imgid: [] for image in dataset.images}
    for mention in list_mentions(dataset):
        if mention.phrase.truth_box is not None:
            named[mention.image.imgid].append((np.float32(mention.phrase.truth_box), mention.text))
    sizes = [decode_image(dataset.image_path(image)).size for image in dataset.images]
    truths = [_different([box for box, _ in named[image.imgid]]) for image in dataset.images]
    proposed = [_proposed(own, size, int(rng.integers(1, n + 1)), rng) for own, size in zip(truths, sizes, strict=True)]
    made = {}
    for name, boxes, recorded in (("candidates", proposed, {}), ("truths", truths, of_truths)):
        vectors = [_seen(some, named[image.imgid], meanings, rng) for some, image in zip(boxes, dataset.images, strict=True)]
        made[name] = write_regions(folder / f"{dataset.name}_{name}.h5", dataset, boxes, vectors, sizes, recorded)
    phrases = write_phrases(folder / f"{dataset.name}_some_phrases.h5", dataset, texts)
    return Caches(made["candidates"], made["truths"], phrases)


def write_regions(
    out: Path,
    dataset: Dataset,
    boxes: Sequence[Array],
    vectors: Sequence[Array],
    sizes: Sequence[tuple[int, int]],
    recorded: Mapping[str, Any] | None = None,
) -> Path:
    """A cache of regions, in two shards."""
    ids = np.asarray([image.imgid for image in dataset.images], np.int64)
    config = {"extractor": "boxes", **(recorded or {})}
    identity = CacheIdentity(dataset.name, out.stem.removeprefix(f"{dataset.name}_"), "image", {"config": config})
    for index, part in enumerate(np.array_split(np.arange(len(ids)), 2)):
        sources = [sha256_bytes(read_image_bytes(dataset.image_path(dataset.images[k]))) for k in part]
        offsets = np.cumsum([0, *(len(boxes[k]) for k in part)])
        features, flat = (np.concatenate([side[k] for k in part]).astype(np.float32) for side in (vectors, boxes))
        of_images = np.asarray([sizes[k] for k in part], np.int32)
        rows = FeatureRows(ids[part], features, np.stack(sources), offsets, flat, flat[:, 0], of_images)
        write_shard(shard_path(out, index, 2), identity, rows)
    return merge_shards(out, 2, dataset.path, ids)


def write_phrases(out: Path, dataset: Dataset, texts: Sequence[str], of: str = "phrases") -> Path:
    """A cache of phrases: the mean of a made-up vector for each word."""
    ids = np.arange(len(texts))
    identity = CacheIdentity(dataset.name, "some_phrases", "text", {"config": {"extractor": "tfidf", "of": of}})
    sources = np.stack([sha256_bytes(text.encode()) for text in texts])
    vectors = np.stack([_meaning(text, TEXT_DIM) for text in texts]).astype(np.float32)
    write_shard(shard_path(out, 0, 1), identity, FeatureRows(ids, vectors, sources))
    return merge_shards(out, 1, dataset.path, ids)


@dataclass(frozen=True)
class World:
    """The training pairs of made-up caches, their candidates and truths, and the number of each pair's truth."""

    pairs: PhraseArrays
    candidates: RegionFeatures
    truths: RegionFeatures
    truth_indices: NDArray[np.int64]

    def box(self, region: int) -> Array:
        """The box of a region, be it a candidate or a truth."""
        n = len(self.candidates)
        found: Array = self.candidates.boxes[region] if region < n else self.truths.boxes[region - n]
        return found

    def overlap(self, region: int, pair: int) -> float:
        """The IoU of a region with the truth of a pair."""
        return float(iou(self.box(region)[None], self.pairs.truth_boxes[pair][None])[0, 0])

    def candidates_of(self, pair: int) -> list[int]:
        """The candidates of the image of a pair."""
        return [k for k in range(len(self.candidates)) if self.candidates.image_indices[k] == self.pairs.image_indices[pair]]


def world_of(caches: Caches) -> World:
    """What a sampler is given."""
    cache, truths = open_cache(caches.candidates), open_cache(caches.truths)
    dataset = load_dataset_file(cache.dataset_file)
    pairs = build_phrase_arrays(dataset, dataset.split("train"), only_with_box=True)
    regions, true = (RegionFeatures(one, pairs.image_ids, CPU) for one in (cache, truths))
    return World(pairs, regions, true, len(regions) + find_truth_regions(pairs, true, "truths"))


def _meaning(text: str, dim: int) -> Array:
    return np.mean([np.random.default_rng(zlib.crc32(word.encode())).normal(size=dim) for word in text.split()], axis=0)


def _different(boxes: list[Array]) -> Array:
    return np.asarray(list(dict.fromkeys(map(tuple, boxes))), np.float32).reshape(-1, 4)


def _proposed(truths: Array, size: tuple[int, int], n: int, rng: np.random.Generator) -> Array:
    """Boxes of whole pixels inside the image: each truth moved a little, as far as there are, then any."""
    sides = np.tile(size, 2)
    moved = truths[:n] + rng.integers(-3, 4, size=(min(n, len(truths)), 4))
    corners = np.sort(rng.integers(0, np.asarray(size) - 4, size=(n - len(moved), 2, 2)), axis=1)
    anywhere = np.concatenate([corners[:, 0], corners[:, 1] + 4], axis=1)
    boxes = np.clip(np.concatenate([moved, anywhere]), 0, sides)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    return boxes.astype(np.float32)


def _seen(boxes: Array, named: list[tuple[Array, str]], meanings: dict[str, Array], rng: np.random.Generator) -> Array:
    """What is named, as far as a box overlaps it, and some noise."""
    seen = 0.1 * rng.normal(size=(len(boxes), DIM))
    for truth, text in named:
        seen += iou(boxes, truth[None]) ** 2 * meanings[text]
    return seen
