"""Caption features: an encoder fitted on the training captions, then a vector per caption."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import sklearn
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from vse.features.backbones import tensors_sha256
from vse.features.encoders import CaptionEncoder, HglmmEncoder, MeanVectorEncoder, TfidfEncoder
from vse.features.extraction import VERSIONS, Extractor, Item, ids_of
from vse.features.hardware import pick_device
from vse.features.shards import Rows
from vse.features.words import WordVectors, read_words, train_words
from vse.pipeline.config import HglmmConfig, MeanVectorConfig, TfidfConfig, WordSettings
from vse.pipeline.dataset import Dataset, load_dataset_file
from vse.pipeline.errors import UserError
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
    """A fitted encoder, ready to turn captions into vectors."""

    kind = "text"
    config: CaptionConfig

    def __init__(self, config: CaptionConfig, encoder_file: Path, device: str = "auto") -> None:
        self.config = config
        self.encoder = load_encoder(encoder_file, device)
        self.weights_sha256 = _metadata(encoder_file)["sha256"]
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


def fit_encoder(dataset_file: Path, config: CaptionConfig, out: Path, device: str = "auto", words: Path | None = None) -> Path:
    """Fit the encoder of a caption feature on the training captions and write it; returns the file.

    ``words`` is the file of word vectors; without one they are trained on the training captions. A file that is there,
    whole and of the same settings, words and captions is kept; one of others is refused with what changed.
    """
    dataset = load_dataset_file(dataset_file)
    words = Path(config.words) if isinstance(config, WordSettings) and config.words else words
    training = [list(caption.tokens) for image in dataset.split("train") for caption in image.captions]
    inputs = _inputs(dataset, training, config, words)
    if _is_whole(out):
        changes = changed_fields(_metadata(out)["inputs"], inputs)
        if changes:
            raise UserError(
                f"{out} was fitted with other settings ({'; '.join(changes[:4])}); "
                "delete it and its features to make them anew, or write to another --out"
            )
        log.info("%s: fitted, kept", out)
        return out
    encoder = _fitted(dataset, training, config, words, device)
    tensors = {name: tensor.contiguous() for name, tensor in encoder.tensors().items()}
    metadata = {"format": FORMAT, "extractor": config.extractor, "inputs": inputs, "sha256": tensors_sha256(tensors)}
    one_key = {"vse": json.dumps(metadata, sort_keys=True)}  # several would be written in an order that changes
    return write_bytes(out, safetensors.torch.save(tensors, one_key))


def load_encoder(path: Path, device: str = "auto") -> CaptionEncoder:
    """A fitted encoder; :class:`UserError` if the file is missing or its content is not what was written."""
    if not path.is_file():
        raise UserError(f"{path}: no such encoder; fit it with vse-extract fit")
    if not _is_whole(path):
        raise UserError(f"{path}: its bytes changed; delete it and fit it again")
    kind = _ENCODERS[_metadata(path)["extractor"]]
    return kind.from_tensors(safetensors.torch.load_file(path), pick_device(device))


def _fitted(
    dataset: Dataset, training: list[list[str]], config: CaptionConfig, words: Path | None, device: str
) -> CaptionEncoder:
    if isinstance(config, TfidfConfig):
        return TfidfEncoder.fit(training, config)
    if words is None:
        log.info("training word vectors on %d captions", len(training))
        found = train_words(training, config.trained_dim, config.trained_epochs, config.min_count, config.seed)
    else:
        found = read_words(words)
    sample = np.arange(len(found.words))
    if isinstance(config, HglmmConfig) and len(sample) > config.ica_words:
        sample = np.sort(np.random.default_rng(config.seed).permutation(len(sample))[: config.ica_words])
    used = {word for image in dataset.images for caption in image.captions for word in caption.tokens}
    kept = found.only(used, config.keep)
    _report(kept, used)
    if isinstance(config, MeanVectorConfig):
        return MeanVectorEncoder(kept)
    if len(sample) <= found.vectors.shape[1]:
        raise UserError(
            f"{len(sample)} words with vectors of {found.vectors.shape[1]} numbers are too few for a mixture: "
            "take shorter vectors (trained_dim) or a file of more words (--words)"
        )
    sampled = WordVectors(tuple(found.words[k] for k in sample), found.vectors[sample])
    return HglmmEncoder.fit(kept, training, config, pick_device(device), sampled)


def _report(words: WordVectors, used: set[str]) -> None:
    known = sum(word in words.rows for word in used)
    log.info("%d of the data set's %d words have a vector", known, len(used))
    if not known:
        raise UserError("not one word of the captions has a vector: is the file of word vectors of this language and case?")


def _inputs(dataset: Dataset, training: list[list[str]], config: CaptionConfig, words: Path | None) -> dict[str, Any]:
    """All that determines an encoder."""
    found = {"config": config.content(), "training_captions_sha256": sha256_json(training), "version": 1}
    if isinstance(config, WordSettings):
        found["words_sha256"] = sha256_file(words) if words is not None and words.is_file() else str(words)
        found["words_used_sha256"] = sha256_json(sorted({w for i in dataset.images for c in i.captions for w in c.tokens}))
    return found


def _metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, Any] = json.loads((file.metadata() or {}).get("vse", "{}"))
    return metadata


def _is_whole(path: Path) -> bool:
    """Whether an encoder is there and its tensors are those that were written."""
    if not path.is_file():
        return False
    try:
        metadata = _metadata(path)
        return metadata.get("format") == FORMAT and metadata.get("sha256") == tensors_sha256(safetensors.torch.load_file(path))
    except (SafetensorError, OSError, ValueError):
        return False
