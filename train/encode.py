"""Embeddings of a split from a model, in blocks; and the file of them that the evaluator reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vse.eval.embeddings import Embeddings, write_embeddings
from vse.features.cache import FeatureCache, open_cache
from vse.features.cnn import CnnExtractor, recreate
from vse.features.hardware import pick_device
from vse.features.reader import FeatureReader
from vse.pipeline.config import ImagesConfig
from vse.pipeline.dataset import Dataset, Image, load_dataset_file
from vse.pipeline.errors import UserError
from vse.train.batches import Pairs, images_of
from vse.train.cnn import TrainableCnn
from vse.train.images import CachedImages, EvaluationImages, Pictures
from vse.train.model import TwoBranchModel
from vse.train.run import RunFolder

_BLOCK = 512
_PICTURES = 64  # at once, where a CNN reads them


def encode(
    model: TwoBranchModel, pairs: Pairs, seen: EvaluationImages, device: torch.device
) -> tuple[Float[Tensor, "n_images dim"], Float[Tensor, "n_captions dim"]]:
    """Embeddings of all images and all captions of ``pairs``, in their order, on the CPU."""
    model.eval()
    n_images = len(pairs.images)
    block = _BLOCK if model.cnn is None else _PICTURES
    with torch.inference_mode():
        images = [
            model.embed_images(seen.of_images(np.arange(k, min(k + block, n_images))).to(device)).cpu()
            for k in range(0, n_images, block)
        ]
        captions = []
        for k in range(0, len(pairs), _BLOCK):
            words, lengths = pairs.words(np.arange(k, min(k + _BLOCK, len(pairs))))
            captions.append(model.embed_captions(words.to(device), lengths).cpu())
    return torch.cat(images), torch.cat(captions)


def embed_split(
    run: Path, out: Path, split: str = "test", features: Path | None = None, captions: Path | None = None, device: str = "auto"
) -> Path:
    """Write the embeddings of a split by the best weights of a run; returns ``out``.

    ``features`` and ``captions`` name other places of the cache and of ``dataset.json`` than those in ``run.json``. A run
    that trained its CNN reads the pictures.
    """
    folder = RunFolder(run)
    experiment, record = folder.experiment(), folder.record()
    cache = open_cache(features or folder.feature_file())
    if cache.key != folder.evaluated()["key"]:
        raise UserError(
            f"{cache.path} is not the cache that {run} is evaluated with (its key differs); train again or name it"
        )
    dataset = load_dataset_file(captions or cache.captions)
    if dataset.name != cache.dataset:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    where = pick_device(device)
    pairs = Pairs(images_of(dataset, [split], cache), folder.vocabulary())
    model, seen = trained(folder, cache, dataset, pairs.images, where)
    images, sentences = encode(model, pairs, seen, where)
    provenance = {
        "features": {cache.feature: cache.key},
        "config": experiment.model_dump(mode="json"),
        "best_epoch": record.get("best_epoch"),
        "versions": record["versions"],
    }
    embeddings = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=np.asarray([caption.sentid for caption in pairs.captions], np.int64),
        caption_image_ids=pairs.caption_image_ids,
        images=images.numpy(),
        captions=sentences.numpy(),
        scores=None,
        dataset=dataset.name,
        split=split,
        experiment=experiment.name,
        seed=record["seed"],
        similarity=experiment.model.similarity,
        provenance=json.dumps(provenance, sort_keys=True),
    )
    return write_embeddings(out, embeddings)


def trained(
    folder: RunFolder, cache: FeatureCache, dataset: Dataset, images: Sequence[Image], device: torch.device
) -> tuple[TwoBranchModel, EvaluationImages]:
    """The model of a run with its best weights, and what it reads of ``images``."""
    settings = folder.experiment()
    cnn, seen = None, None
    if settings.images.finetune:
        extractor = recreate(cache, device=str(device), trained=True)
        cnn = TrainableCnn(extractor, settings.images.batch_norm)
        seen = pictures(extractor, dataset, images, settings.images)
    model = TwoBranchModel(settings.model, cache.dim, len(folder.vocabulary()), cnn).to(device)
    try:
        model.load_state_dict(folder.best_weights())
    except RuntimeError as error:
        raise UserError(
            f"{folder.best_file}: not weights of this run's model ({str(error).splitlines()[-1].strip()})"
        ) from None
    ids = np.asarray([image.imgid for image in images], np.int64)
    return model, seen or CachedImages(FeatureReader(cache, 0, mapped=False), ids, device)


def pictures(
    extractor: CnnExtractor, dataset: Dataset, images: Sequence[Image], settings: ImagesConfig, through: bool = False
) -> Pictures:
    """The pictures of ``images``, as a CNN reads them."""
    if not dataset.pictures:
        raise UserError(f"{dataset.path}: a data set without pictures (its features were imported)")
    paths = [dataset.image_path(image) for image in images]
    ids = np.asarray([image.imgid for image in images], np.int64)
    return Pictures(extractor, paths, ids, settings.random_crop, settings.workers, through)
