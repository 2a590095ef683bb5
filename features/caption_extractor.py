"""Caption features: an encoder fitted on the training captions, then a vector per caption."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import sklearn
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from vse.features.backbones import tensors_sha256
from vse.features.cache import FeatureCache
from vse.features.caption_encoders import CaptionEncoder, Captions, HglmmEncoder, MeanVectorEncoder, TfidfEncoder
from vse.features.extraction import VERSIONS, Extractor, Item, ids_of
from vse.features.hardware import pick_device
from vse.features.shards import Rows
from vse.features.words import WordVectors, read_words, train_words
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.feature_config import HglmmConfig, MeanVectorConfig, TfidfConfig, WordSettings
from vse.pipeline.files import sha256_file, sha256_json, write_bytes
from vse.pipeline.presets import changed_fields

FORMAT = "vse-encoder-1"
CaptionConfig = TfidfConfig | MeanVectorConfig | HglmmConfig
_ENCODERS: dict[str, type[CaptionEncoder]] = {
    "tfidf": TfidfEncoder,
    "mean_vector": MeanVectorEncoder,
    "hglmm": HglmmEncoder,
}
log = logging.getLogger(__name__)


def encoder_path(cache: Path) -> Path:
    """``features/demo_hglmm.h5`` -> ``features/demo_hglmm.encoder.safetensors``."""
    return cache.with_suffix(".encoder.safetensors")


class CaptionExtractor(Extractor):
    """A fitted encoder, ready to turn captions into vectors; :class:`UserError` if it was fitted with other settings."""

    kind = "text"
    config: CaptionConfig

    def __init__(self, config: CaptionConfig, encoder_file: Path, device: str = "auto") -> None:
        fitted = _read(encoder_file)
        if fitted is None:
            raise UserError(f"{encoder_file}: no such encoder, or its bytes changed; make it anew with vse-extract fit")
        _refuse_other(encoder_file, fitted, {"config": config.content()}, "config")
        self.config = config
        self.encoder = _ENCODERS[config.extractor].from_tensors(fitted.tensors, pick_device(device))
        self.weights_sha256 = fitted.metadata["sha256"]
        self.notes = {"encoder": encoder_file.name, "versions": {**VERSIONS, "scikit-learn": sklearn.__version__}}

    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of captions, in order; those without a known word are zeros, and are counted."""
        chunk, parts = self.config.chunk, []
        with tqdm(total=len(items), desc=f"extract {self.config.name}", unit="caption", disable=None) as progress:
            for k in range(0, len(items), chunk):
                vectors = self.encoder.encode([item.tokens for item in items[k : k + chunk]])
                parts.append(vectors.numpy().astype(self.config.dtype))
                progress.update(len(vectors))
        features = np.concatenate(parts)
        unknown = int((~features.any(axis=1)).sum())
        sources = np.stack([item.source() for item in items])
        return Rows(ids_of(items), features, sources, counts={"captions without a known word": unknown})


@dataclass(frozen=True)
class Fitted:
    """An encoder's file, whole: its tensors, and what it was fitted with."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def fit_encoder(dataset_file: Path, config: CaptionConfig, out: Path, device: str = "auto", words: Path | None = None) -> Path:
    """Fit the encoder of a caption feature on the training captions and write it; returns the file.

    ``words`` is the file of word vectors, before that of the preset; without either they are trained on the training
    captions. A file that is there, whole and of the same settings, words and captions is kept; one of others is refused
    with what changed.
    """
    dataset = load_dataset_file(dataset_file)
    words = words or (Path(config.words) if isinstance(config, WordSettings) and config.words else None)
    training = [caption.tokens for image in dataset.split("train") for caption in image.captions]
    inputs = _inputs(dataset, training, config, words)
    fitted = _read(out)
    if fitted is not None:
        _refuse_other(out, fitted, inputs)
        log.info("%s: fitted, kept", out)
        return out
    encoder = _fitted(dataset, training, config, words, device)
    tensors = {name: tensor.contiguous() for name, tensor in encoder.tensors().items()}
    metadata = {"format": FORMAT, "extractor": config.extractor, "inputs": inputs, "sha256": tensors_sha256(tensors)}
    one_key = {"vse": json.dumps(metadata, sort_keys=True)}  # several would be written in an order that changes
    return write_bytes(out, safetensors.torch.save(tensors, one_key))


def load_encoder(path: Path, device: str = "auto") -> CaptionEncoder:
    """A fitted encoder; :class:`UserError` if the file is missing or its content is not what was written."""
    fitted = _read(path)
    if fitted is None:
        raise UserError(f"{path}: no such encoder, or its bytes changed; make it anew with vse-extract fit")
    return _ENCODERS[fitted.metadata["extractor"]].from_tensors(fitted.tensors, pick_device(device))


def encoder_of(cache: FeatureCache, device: str = "auto") -> CaptionEncoder:
    """The encoder that made a cache of captions and lies beside it; :class:`UserError` if another one is there."""
    path = encoder_path(cache.path)
    fitted = _read(path)
    if fitted is None or fitted.metadata["sha256"] != cache.provenance.get("weights_sha256"):
        what = "no such encoder, or its bytes changed" if fitted is None else f"not the encoder that made {cache.path}"
        raise UserError(f"{path}: {what}; a text is encoded as the captions of that cache were")
    return _ENCODERS[fitted.metadata["extractor"]].from_tensors(fitted.tensors, pick_device(device))


def _fitted(dataset: Dataset, training: Captions, config: CaptionConfig, words: Path | None, device: str) -> CaptionEncoder:
    if isinstance(config, TfidfConfig):
        return TfidfEncoder.fit(training, config)
    used = {word for image in dataset.images for caption in image.captions for word in caption.tokens}
    kept, sample = _words(training, config, words, used)
    _report(kept, used)
    if isinstance(config, MeanVectorConfig):
        return MeanVectorEncoder(kept)
    n_words, dim = sample.vectors.shape
    if n_words <= dim:
        raise UserError(
            f"{n_words} words with vectors of {dim} numbers are too few for a mixture: "
            "take shorter vectors (trained_dim) or a file of more words (--words)"
        )
    return HglmmEncoder.fit(kept, training, config, pick_device(device), sample)


def _words(training: Captions, config: WordSettings, words: Path | None, used: set[str]) -> tuple[WordVectors, WordVectors]:
    """The words to keep, and those to fit a mixture to; the rest of a large file is forgotten on return."""
    if words is None:
        log.info("training word vectors on %d captions", len(training))
        found = train_words(training, config.trained_dim, config.trained_epochs, config.min_count, config.seed)
    else:
        found = read_words(words)
    kept = found.only(used, config.keep)
    sample = np.arange(len(found.words))
    if isinstance(config, HglmmConfig) and len(sample) > config.ica_words:
        sample = np.sort(np.random.default_rng(config.seed).permutation(len(sample))[: config.ica_words])
    return kept, WordVectors(tuple(found.words[k] for k in sample), found.vectors[sample])


def _report(words: WordVectors, used: set[str]) -> None:
    known = sum(word in words.rows for word in used)
    log.info("%d of the data set's %d words have a vector", known, len(used))
    if not known:
        raise UserError("not one word of the captions has a vector: is the file of word vectors of this language and case?")


def _inputs(dataset: Dataset, training: Captions, config: CaptionConfig, words: Path | None) -> dict[str, Any]:
    """All that determines an encoder."""
    found: dict[str, Any] = {"config": config.content(), "training_captions_sha256": sha256_json(training), "version": 1}
    if isinstance(config, WordSettings):
        if words is not None and not words.is_file():
            raise UserError(f"{words}: no such file of word vectors")
        found["words_sha256"] = sha256_file(words) if words is not None else None
        found["words_used_sha256"] = sha256_json(sorted({w for i in dataset.images for c in i.captions for w in c.tokens}))
    return found


def _refuse_other(path: Path, fitted: Fitted, inputs: dict[str, Any], *only: str) -> None:
    made = fitted.metadata["inputs"]
    changes = changed_fields({key: made[key] for key in only} if only else made, inputs)
    if changes:
        raise UserError(
            f"{path} was fitted with other settings ({'; '.join(changes[:4])}); "
            "delete it and its features to make them anew, or write to another --out"
        )


def _read(path: Path) -> Fitted | None:
    """An encoder's file if it is there and its tensors are those that were written."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["vse"])
        fitted = Fitted(safetensors.torch.load_file(path), metadata)
        whole = metadata["format"] == FORMAT and metadata["sha256"] == tensors_sha256(fitted.tensors)
    except (SafetensorError, OSError, ValueError, KeyError):
        return None
    return fitted if whole else None
