"""Embeddings of a split from a model, in blocks; and the file of them that the evaluator reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vse.eval.embeddings import Embeddings, write_embeddings
from vse.features.cache import open_cache
from vse.features.hardware import pick_device
from vse.features.reader import FeatureReader
from vse.pipeline.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.train.batches import Pairs
from vse.train.model import TwoBranchModel
from vse.train.run import RunFolder

_BLOCK = 512


def encode(
    model: TwoBranchModel, pairs: Pairs, device: torch.device
) -> tuple[Float[Tensor, "n_images dim"], Float[Tensor, "n_captions dim"]]:
    """Embeddings of all images and all captions of ``pairs``, in their order, on the CPU."""
    model.eval()
    with torch.inference_mode():
        images = [
            model.image_encoder(pairs.features(pairs.image_rows[k : k + _BLOCK]).to(device)).cpu()
            for k in range(0, len(pairs.images), _BLOCK)
        ]
        captions = []
        for k in range(0, len(pairs), _BLOCK):
            words, lengths = pairs.words(np.arange(k, min(k + _BLOCK, len(pairs))))
            captions.append(model.caption_encoder(words.to(device), lengths).cpu())
    return torch.cat(images), torch.cat(captions)


def embed_split(
    run: Path, out: Path, split: str = "test", features: Path | None = None, captions: Path | None = None, device: str = "auto"
) -> Path:
    """Write the embeddings of a split by the best weights of a run; returns ``out``.

    ``features`` and ``captions`` name other places of the cache and of ``dataset.json`` than those in ``run.json``.
    """
    folder = RunFolder(run)
    experiment, record = folder.experiment(), folder.record()
    cache = open_cache(features or folder.feature_file())
    if cache.key != record["features"]["key"]:
        raise UserError(f"{cache.path} is not the cache that {run} was trained on (its key differs); train again or name it")
    dataset = load_dataset_file(captions or cache.captions)
    if dataset.name != cache.dataset:
        raise UserError(f"{cache.path} holds features of {cache.dataset!r}, but {dataset.path} is {dataset.name!r}")
    vocabulary = folder.vocabulary()
    pairs = Pairs(dataset.split(split), FeatureReader(cache, experiment.train.memory_gb), vocabulary)
    where = pick_device(device)
    model = TwoBranchModel(experiment.model, cache.dim, len(vocabulary))
    model.load_state_dict(folder.best_weights())
    images, sentences = encode(model.to(where), pairs, where)
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
