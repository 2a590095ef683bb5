"""The embeddings of a finished run, or of another program, as feature caches that a model such as TOD-Net trains on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings, experiment_name, parse_provenance, read_embeddings
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.rows import Ids, Kind, row_ids
from vse.features.cache.shards import check_cache_out, feature_at
from vse.features.exchange.embeddings import SIDES, Backbone, backbone_of, cache_paths, write_backbone_cache
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.identity import check_data_of
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.writing import sha256_json
from vse.train.solvers.encode import encode
from vse.train.use.embed import TrainedRun, load_run
from vse.train.use.trained_run import RunPlaces, unfinished_state

log = logging.getLogger(__name__)
_Rows = Mapping[int, NDArray[np.float32]]  # of an id, its vector


def run_as_features(
    run: Path, out: Path, places: RunPlaces = RunPlaces(), device: str = "auto", unfinished: bool = False
) -> list[Path]:
    """Write the embeddings of all splits by the best weights of a run as two caches; returns their paths.

    These are ``<out>_images.h5`` and ``<out>_captions.h5``, of float32 vectors as the run compares them, and both record the
    SHA-256 of its weights. See :func:`vse.train.use.embed.load_run`. :class:`UserError` if the run scores every pair, so that
    vectors are not all that it compares.
    """
    outs = cache_paths(out)
    trained = load_run(run, None, places, device, unfinished)
    for path in outs.values():
        check_cache_out(path, trained.dataset.name, feature_at(path, trained.dataset.name), trained.inputs)
    if trained.model.pairwise:
        raise UserError(
            f"{run}: its model ({trained.model.config.similarity.name}) scores every pair, so single vectors do not stand for "
            "it; take a run whose embeddings are compared as vectors"
        )
    images, captions = encode(trained.model, trained.split, trained.device)
    pairs, cache = trained.split.pairs, trained.cache
    said: dict[str, Any] = {
        "seed": trained.record["seed"],
        "dataset": trained.record["dataset"],
        "features": {one.feature: one.key for one in (cache, trained.caption_cache) if one is not None},
    }
    if state := unfinished_state(trained.record):
        said["unfinished"] = state
    backbone = Backbone(trained.weights_sha256, trained.experiment.name, said, run)
    skipped = dict.fromkeys(cache.skipped, "no features")
    sides: dict[Kind, tuple[Ids, torch.Tensor]] = {
        "image": (pairs.image_ids, images.vectors),
        "text": (pairs.caption_ids, captions.vectors),
    }
    for side, (_, vectors) in sides.items():
        if not torch.isfinite(vectors).all():
            raise UserError(f"{run}: embeddings of {SIDES[side]} are not finite (NaN or infinite); nothing is written")
    rows = {kind: dict(zip(ids.tolist(), vectors.numpy(), strict=True)) for kind, (ids, vectors) in sides.items()}
    return _written(outs, trained.dataset, backbone, rows, skipped)


def files_as_features(files: Sequence[Path], out: Path, captions: Path | None = None) -> list[Path]:
    """Write embeddings files, a file for each split, as two caches; see :func:`run_as_features`.

    Any program may have written them (``docs/formats.md``). ``captions`` is the ``dataset.json``, by default the one that the
    first file names. Splits that no file is of are left out of the caches. :class:`UserError` if the files are not of one
    model and this data set, hold scores, or lack images or captions of their splits.
    """
    outs = cache_paths(out)
    runs = [read_embeddings(file) for file in files]
    (path, first), dataset = (files[0], runs[0]), _dataset(files[0], runs[0], captions)
    for one in outs.values():
        check_cache_out(one, dataset.name, feature_at(one, dataset.name), [*files, dataset.path])
    rows: dict[Kind, dict[int, NDArray[np.float32]]] = {"image": {}, "text": {}}
    for file, run in zip(files, runs, strict=True):
        if run.vectors is None:
            raise UserError(f"{file}: holds scores of pairs; embeddings of images and captions are needed")
        for name in ("dataset", "experiment", "seed", "similarity"):
            if getattr(run, name) != getattr(first, name):
                raise UserError(f"{file} is of {name} {getattr(run, name)!r}, {path} of {getattr(first, name)!r}")
        check_data_of(dataset, run.identity)
        if run.split not in dataset.splits:
            raise UserError(f"{file}: {dataset.path} has no split {run.split!r}{did_you_mean(run.split, dataset.splits)}")
        sides: dict[Kind, tuple[Ids, NDArray[np.float32]]] = {
            "image": (run.image_ids, run.vectors[0]),
            "text": (run.caption_ids, run.vectors[1]),
        }
        for kind, (ids, vectors) in sides.items():
            if len({vectors.shape[1], *(len(vector) for vector in list(rows[kind].values())[:1])}) > 1:
                raise UserError(f"{file}: vectors of {vectors.shape[1]} numbers, in {path} they have others")
            rows[kind] |= dict(zip(ids.tolist(), vectors, strict=True))
    covered = {run.split for run in runs}
    left_out = [split for split in dataset.splits if split not in covered]
    if left_out:
        log.warning("%s: no file is of the split %s, which the caches lack", dataset.path, " or ".join(left_out))
    skipped = {image.imgid: "no embeddings of its split" for split in left_out for image in dataset.split(split)}
    known = {run.source.sha256 for run in runs if run.source is not None}
    said = {"seed": first.seed, "dataset": first.trained_on or first.dataset}
    backbone = Backbone(sha256_json(sorted(known)), experiment_name(path, first), said)
    return _written(outs, dataset, backbone, rows, skipped)


def backbone_run(trained: TrainedRun, cache: FeatureCache, split: str) -> TrainedRun | None:
    """The run whose embeddings a run reads from a cache; None if it reads none, but features of an extractor.

    :class:`UserError` if that run is not where it was, or has other weights by now.
    """
    backbone = backbone_of(cache)
    if backbone is None:
        return None
    made = (
        f"{trained.folder.path} compares embeddings by {backbone.experiment}, and a query of yours must go through that first"
    )
    if backbone.run is None:
        raise UserError(f"{made}; {cache.path} was made from files of embeddings, without the model")
    opened = load_run(backbone.run, split, device=str(trained.device), unfinished=True)
    if opened.weights_sha256 != backbone.sha256:
        raise UserError(f"{made}; {backbone.run} has other weights than those that made {cache.path}: train both again")
    return opened


def _written(
    outs: Mapping[Kind, Path], dataset: Dataset, backbone: Backbone, rows: Mapping[Kind, _Rows], skipped: Mapping[int, str]
) -> list[Path]:
    """Both caches; an id without a vector, whose image is not skipped, is a :class:`UserError`."""
    of_skipped = {c.sentid: skipped[image.imgid] for image in dataset.images if image.imgid in skipped for c in image.captions}
    without: dict[Kind, Mapping[int, str]] = {"image": skipped, "text": of_skipped}
    ids = {kind: row_ids(dataset, kind) for kind in outs}
    for kind, wanted in ids.items():
        missing = [i for i in wanted.tolist() if i not in rows[kind] and i not in without[kind]]
        if missing:
            some = f"{len(missing)} of {len(wanted)} {SIDES[kind]} have no embedding, the first is id {missing[0]}"
            raise UserError(f"{dataset.path}: {some}; embed this very data set")

    def vectors(kind: Kind) -> Callable[[Ids], NDArray[np.float32]]:
        own = rows[kind]
        none = np.empty((0, len(next(iter(own.values())))), np.float32)
        return lambda some: np.stack([own[i] for i in some.tolist()]) if len(some) else none

    return [
        write_backbone_cache(out, dataset, kind, backbone, ids[kind], vectors(kind), without[kind])
        for kind, out in outs.items()
    ]


def _dataset(path: Path, first: Embeddings, captions: Path | None) -> Dataset:
    """The data set that embeddings are of."""
    named = parse_provenance(first).get("captions")
    if captions is None and not isinstance(named, str):
        raise UserError(f"{path}: does not say where its dataset.json is: name it with --captions")
    dataset = load_dataset_file(captions or path.parent / str(named))
    if dataset.name != first.dataset:
        raise UserError(f"{path} holds embeddings of {first.dataset!r}, but {dataset.path} is {dataset.name!r}")
    return dataset
