"""Caption features: an encoder fitted on the training captions, then a vector per caption."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vse.features.backbones.device import pick_device, versions
from vse.features.backbones.model_folder import tensors_sha256
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.rows import Item, Rows, ids_of
from vse.features.settings import EXTRACTORS
from vse.features.settings.base import Extractor, Job
from vse.features.settings.captions import CaptionCorpus, CaptionEncoder, CaptionSettings, phrase_words
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file, mentions
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import WatchedFile
from vse.pipeline.files.writing import lock_for_writing, sha256_json, write_bytes, write_json
from vse.pipeline.presets.presets import list_changes
from vse.pipeline.progress import progress_bar

FORMAT = "vse-encoder-1"
log = logging.getLogger(__name__)


def encoder_path(cache: Path) -> Path:
    """``features/demo_hglmm.h5`` -> ``features/demo_hglmm.encoder.safetensors``."""
    return cache.with_suffix(".encoder.safetensors")


class CaptionExtractor(Extractor):
    """A fitted encoder, ready to turn captions into vectors; :class:`UserError` if it was fitted with other settings."""

    config: CaptionSettings

    @classmethod
    def from_job(cls, config: CaptionSettings, job: Job) -> Self:
        """Return the extractor with the encoder next to the cache, which is fitted first if the job asks for it."""
        encoder_file = encoder_path(job.out)
        if job.fit:
            fit_encoder(job.dataset, config, encoder_file, job.device, job.words)
        return cls(config, encoder_file, job.device)

    def __init__(self, config: CaptionSettings, encoder_file: Path, device: str = "auto") -> None:
        fitted = _read(encoder_file)
        if fitted is None:
            raise UserError(f"{encoder_file}: no such encoder, or its bytes changed; fit it again with vse-extract fit")
        _refuse_other(encoder_file, fitted, {"config": config.content()}, "config")
        self.config = config
        self.encoder = config.encoder_class().from_tensors(fitted.tensors, pick_device(device))
        self.encoder.words_read = config.words_read
        self.weights_sha256 = fitted.metadata["sha256"]
        self.notes = {
            "encoder": encoder_file.name,
            "versions": {**versions(), "scikit-learn": metadata.version("scikit-learn")},
        }

    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of captions, in order; those without a known word are zeros, and are counted."""
        chunk, parts, rows_are = self.config.chunk, [], self.config.of
        kept = getattr(torch, self.config.dtype)  # torch rounds to float16 many times as fast as NumPy
        with progress_bar(total=len(items), desc=self.described, unit=rows_are.removesuffix("s")) as progress:
            for k in range(0, len(items), chunk):
                (vectors,) = self.encoder.encoded(items[k : k + chunk])
                parts.append(vectors.to(kept).numpy())
                progress.update(len(vectors))
        features = np.concatenate(parts)
        unknown = int((~features.any(axis=1)).sum())
        sources = np.stack([item.source() for item in items])
        return Rows(ids_of(items), features, sources, counts={f"{rows_are} without a known word": unknown})


@dataclass(frozen=True)
class FittedTensors:
    """Content of an encoder's file: its tensors, and what it was fitted with."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def fit_encoder(
    dataset_file: Path, config: CaptionSettings, out: Path, device: str = "auto", words: Path | None = None
) -> Path:
    """Fit the encoder of a caption feature on the training captions and write it; returns the file.

    ``words`` is the file of word vectors, before that of the preset; without either they are trained on the training
    captions. A file that is there, undamaged and of the same settings, words and captions is kept; one of others is refused
    with what changed.
    """
    words = config.word_file(words)
    watched = WatchedFile(words) if words is not None and words.is_file() else None
    corpus = corpus_of(load_dataset_file(dataset_file), config)
    inputs = {
        "config": config.content(),
        f"training_{config.of}_sha256": sha256_json(corpus.training),
        "version": 1,
        **config.inputs(corpus, words),
    }
    with lock_for_writing(out):
        fitted = _read(out)
        if fitted is not None:
            _refuse_other(out, fitted, inputs)
            log.info("%s: fitted, kept", out)
            return out
        started = time.perf_counter()
        tensors = {name: tensor.contiguous() for name, tensor in config.fit(corpus, words, device).tensors().items()}
        if watched is not None:
            watched.check()
        # Beside the encoder, whose bytes are the same each time.
        write_json(out.with_suffix(".json"), {"seconds": round(time.perf_counter() - started, 4)})
        return _write(out, config, inputs, tensors)


def corpus_of(dataset: Dataset, config: CaptionSettings) -> CaptionCorpus:
    """What the encoder of a feature of captions or of phrases is fitted on; :class:`UserError` if no phrase is there."""
    sentences = [caption.tokens for image in dataset.split("train") for caption in image.captions]
    if config.of == "captions":
        words = frozenset(word for image in dataset.images for caption in image.captions for word in caption.tokens)
        return CaptionCorpus(sentences, words, sentences)
    phrases = [(mention.image.split, config.words_read(mention.text.split(" "))) for mention in mentions(dataset)]
    training = [words for split, words in phrases if split == "train"]
    if not training:
        raise UserError(f"{dataset.path}: no training caption marks phrases, on which {config.name} is fitted")
    return CaptionCorpus(
        training, frozenset(word for _, words in phrases for word in words), [phrase_words(words) for words in sentences]
    )


def _write(out: Path, config: CaptionSettings, inputs: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    sha256 = tensors_sha256(tensors)
    metadata = {"format": FORMAT, "extractor": config.extractor_name(), "inputs": inputs, "sha256": sha256}
    one_key = {"vse": json.dumps(metadata, sort_keys=True)}  # several would be written in an order that changes
    return write_bytes(out, safetensors.torch.save(tensors, one_key))


def load_encoder(path: Path, device: str = "auto") -> CaptionEncoder:
    """A fitted encoder; :class:`UserError` if the file is missing or its content is not what was written."""
    fitted = _read(path)
    if fitted is None:
        raise UserError(f"{path}: no such encoder, or its bytes changed; fit it again with vse-extract fit")
    return _rebuilt(path, fitted, device)


def encoder_of(cache: FeatureCache, device: str = "auto") -> CaptionEncoder:
    """The encoder that made a cache of captions and lies beside it; :class:`UserError` if another one is there."""
    path = encoder_path(cache.path)
    fitted = _read(path)
    if fitted is None or fitted.metadata["sha256"] != cache.provenance.get("weights_sha256"):
        what = "no such encoder, or its bytes changed" if fitted is None else f"not the encoder that made {cache.path}"
        raise UserError(f"{path}: {what}; text must be encoded as the captions of that cache were")
    return _rebuilt(path, fitted, device)


def _rebuilt(path: Path, fitted: FittedTensors, device: str) -> CaptionEncoder:
    """The encoder of a file."""
    name = fitted.metadata["extractor"]
    if name not in EXTRACTORS or not issubclass(settings := EXTRACTORS[name], CaptionSettings):
        raise UserError(f"{path}: fitted by the extractor {name!r}, which is not installed here")
    encoder = settings.encoder_class().from_tensors(fitted.tensors, pick_device(device))
    made = fitted.metadata["inputs"]["config"]
    if made.get("of") == "phrases":
        encoder.words_read = partial(phrase_words, drop_stop_words=made.get("stop_words") == "drop")
    return encoder


def _refuse_other(path: Path, fitted: FittedTensors, inputs: dict[str, Any], *only: str) -> None:
    made = fitted.metadata["inputs"]
    changes = list_changes({key: made[key] for key in only} if only else made, inputs)
    if changes:
        raise UserError(
            f"{path} was fitted with other settings ({'; '.join(changes[:4])}); "
            "delete it and its features to regenerate them, or write to another --out"
        )


def _read(path: Path) -> FittedTensors | None:
    """An encoder's file if it is there and its tensors are those that were written."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["vse"])
        fitted = FittedTensors(safetensors.torch.load_file(path), metadata)
        undamaged = metadata["format"] == FORMAT and metadata["sha256"] == tensors_sha256(fitted.tensors)
    except (SafetensorError, OSError, ValueError, KeyError):
        return None
    return fitted if undamaged else None
