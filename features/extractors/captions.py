"""Fit the encoders of caption features to training captions, save them, and compute vectors with them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vse.features.backbones.device import collect_library_versions, pick_device
from vse.features.backbones.model_folder import hash_tensors
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.rows import ExtractorInput, FeatureRows, RowBlocks, list_input_ids
from vse.features.settings import find_extractor_settings
from vse.features.settings.base import ExtractionArguments, Extractor
from vse.features.settings.captions import CaptionCorpus, CaptionEncoder, FittedCaptionSettings, select_phrase_words
from vse.pipeline.dataset.columns import count_words
from vse.pipeline.dataset.dataset import Dataset, list_mentions, load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import WatchedFile
from vse.pipeline.files.writing import lock_for_writing, sha256_json_list, write_bytes, write_json
from vse.pipeline.presets.presets import list_setting_changes
from vse.pipeline.progress import progress_bar

ENCODER_FILE_FORMAT = "vse-encoder-1"
PACKED_ENCODER_NAME = "caption_encoder.safetensors"  # name of the encoder's file in a packed model
log = logging.getLogger(__name__)


def encoder_path(cache: Path) -> Path:
    """Return the path of a cache's encoder: ``demo_hglmm.encoder.safetensors`` next to ``demo_hglmm.h5``."""
    return cache.with_suffix(".encoder.safetensors")


class CaptionExtractor(Extractor):
    """An extractor that computes caption vectors with a fitted encoder.

    Raises UserError if the encoder's file is missing or damaged, or if the encoder was fitted with other settings.
    """

    version = FittedCaptionSettings.extractor_version
    config: FittedCaptionSettings

    @classmethod
    def from_arguments(cls, config: FittedCaptionSettings, arguments: ExtractionArguments) -> Self:
        """Return the extractor with the encoder in the file next to the cache ``arguments.out``.

        If ``arguments.must_fit_encoder`` is True, the encoder is fitted and written to this file first.
        """
        encoder_file = encoder_path(arguments.out)
        if arguments.must_fit_encoder:
            fit_encoder(arguments.dataset, config, encoder_file, arguments.device, arguments.word_file)
        return cls(config, encoder_file, arguments.device)

    def __init__(self, config: FittedCaptionSettings, encoder_file: Path, device: str = "auto") -> None:
        fitted = _read_encoder(encoder_file)
        _check_fit_inputs(encoder_file, fitted, {"config": config.list_cache_key_settings()}, "config")
        self.config = config
        self.encoder = config.encoder_class().from_tensors(fitted.tensors, pick_device(device))
        self.encoder.select_words = config.select_words
        self.weights_sha256 = fitted.metadata["sha256"]
        words = fitted.metadata["inputs"].get("words_sha256", "needs none")
        self.provenance = {
            "encoder": encoder_file.name,
            **({} if words else {"word_vectors": "trained on the captions"}),
            "versions": {**collect_library_versions(), "scikit-learn": metadata.version("scikit-learn")},
        }

    def extract(self, items: Sequence[ExtractorInput], skip_bad: bool = False) -> FeatureRows:
        """Return the rows of captions, in order. The vectors are computed later, block by block, when the rows are written.

        Captions without a known word get zeros, and their number is reported.
        """
        counts = {f"{self.config.of} without a known word": 0}
        shape, dtype = (len(items), self.encoder.dim), np.dtype(self.config.dtype)
        features = RowBlocks(shape, dtype, self._encode_blocks(items, counts))
        return FeatureRows(list_input_ids(items), features, np.stack([item.hash_input() for item in items]), counts=counts)

    def _encode_blocks(self, items: Sequence[ExtractorInput], counts: dict[str, int]) -> Iterator[NDArray[Any]]:
        """Yield the vectors of captions in blocks, and count the captions whose vector is zero.

        The only entry of ``counts`` holds this number; its key describes the number for the log.
        """
        chunk, (name,) = self.config.chunk, counts
        dtype = getattr(torch, self.config.dtype)  # torch rounds to float16 many times as fast as NumPy
        with progress_bar(total=len(items), desc=self.progress_label, unit=self.config.of.removesuffix("s")) as progress:
            for k in range(0, len(items), chunk):
                (vectors,) = self.encoder.encode_inputs(items[k : k + chunk])
                block = vectors.to(dtype)
                counts[name] += int((~block.any(dim=1)).sum())
                yield block.numpy()
                progress.update(len(block))


@dataclass(frozen=True)
class EncoderFile:
    """The content of an encoder's file: its tensors by name, and the settings and hashes of its fit (``metadata``)."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def fit_encoder(
    dataset_file: Path, config: FittedCaptionSettings, out: Path, device: str = "auto", word_file: Path | None = None
) -> Path:
    """Fit the encoder of a caption feature to the training captions, write the encoder to ``out`` and return ``out``.

    ``word_file``, a file of word vectors, replaces the preset's file. If there is neither, word vectors are trained on the
    captions. An undamaged encoder at ``out`` is kept. Raises UserError, which names the differences, if this encoder
    was fitted with other settings, word vectors or captions.
    """
    word_file = config.find_word_file(word_file)
    watched = WatchedFile(word_file) if word_file is not None and word_file.is_file() else None
    corpus = build_corpus(load_dataset_file(dataset_file), config)
    inputs = {
        "config": config.list_cache_key_settings(),
        f"training_{config.of}_sha256": sha256_json_list(corpus.fit_texts),
        "version": 1,
        **config.hash_fit_inputs(corpus, word_file),
    }
    with lock_for_writing(out):
        fitted = _try_read_encoder(out)
        if fitted is not None:
            _check_fit_inputs(out, fitted, inputs)
            log.info("%s: fitted, kept", out)
            return out
        started = time.perf_counter()
        tensors = {name: tensor.contiguous() for name, tensor in config.fit(corpus, word_file, device).tensors().items()}
        if watched is not None:
            watched.check_unchanged()
        # The duration goes to a separate file, so that the encoder's file has the same bytes for the same inputs.
        write_json(out.with_suffix(".json"), {"seconds": round(time.perf_counter() - started, 4)})
        return _write_encoder(out, config, inputs, tensors)


def build_corpus(dataset: Dataset, config: FittedCaptionSettings) -> CaptionCorpus:
    """Return the texts to which an encoder is fitted.

    Raises UserError if the encoder reads phrases, but no training caption has annotated phrases.
    """
    sentences = [caption.tokens for image in dataset.split("train") for caption in image.captions]
    if config.of == "captions":
        words = frozenset(count_words(dataset.images))
        return CaptionCorpus(sentences, words, sentences)
    phrases = [(mention.image.split, config.select_words(mention.text.split(" "))) for mention in list_mentions(dataset)]
    training = [words for split, words in phrases if split == "train"]
    if not training:
        raise UserError(f"{dataset.path}: no training caption marks phrases, but {config.name} must be fitted to phrases")
    return CaptionCorpus(
        training,
        frozenset(word for _, words in phrases for word in words),
        [select_phrase_words(words) for words in sentences],
    )


def _write_encoder(out: Path, config: FittedCaptionSettings, inputs: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    sha256 = hash_tensors(tensors)
    metadata = {"format": ENCODER_FILE_FORMAT, "extractor": config.extractor_name(), "inputs": inputs, "sha256": sha256}
    one_key = {"vse": json.dumps(metadata, sort_keys=True)}  # safetensors writes several keys in varying order
    return write_bytes(out, safetensors.torch.save(tensors, one_key))


def load_encoder(path: Path, device: str = "auto") -> CaptionEncoder:
    """Load a fitted encoder. Raises UserError if the file is missing or damaged."""
    return _build_encoder(path, _read_encoder(path), device)


def load_cache_encoder(cache: FeatureCache, device: str = "auto") -> CaptionEncoder:
    """Load the encoder next to a cache of captions. Raises UserError if another encoder computed the cache."""
    path = encoder_path(cache.path) if cache.model_folder is None else cache.model_folder / PACKED_ENCODER_NAME
    fitted = _try_read_encoder(path)
    if fitted is None or fitted.metadata["sha256"] != cache.provenance.get("weights_sha256"):
        problem = "no such encoder, or its bytes changed" if fitted is None else f"not the encoder that computed {cache.path}"
        raise UserError(f"{path}: {problem}; text must be encoded in the same way as the captions of that cache")
    return _build_encoder(path, fitted, device)


def _build_encoder(path: Path, fitted: EncoderFile, device: str) -> CaptionEncoder:
    name = fitted.metadata["extractor"]
    settings = find_extractor_settings(name)
    if settings is None or not issubclass(settings, FittedCaptionSettings):
        raise UserError(f"{path}: fitted by the extractor {name!r}, but it is not installed here")
    encoder = settings.encoder_class().from_tensors(fitted.tensors, pick_device(device))
    config = fitted.metadata["inputs"]["config"]
    if config.get("of") == "phrases":
        encoder.select_words = partial(select_phrase_words, drop_stop_words=config.get("stop_words") == "drop")
    return encoder


def _check_fit_inputs(path: Path, fitted: EncoderFile, inputs: dict[str, Any], *names: str) -> None:
    """Raise UserError if the recorded inputs of an encoder's fit (settings and hashes) differ from ``inputs``.

    ``names`` are the entries to compare; if there are none, all entries are compared.
    """
    recorded = fitted.metadata["inputs"]
    changes = list_setting_changes({name: recorded[name] for name in names} if names else recorded, inputs)
    if changes:
        raise UserError(
            f"{path} was fitted with other settings ({'; '.join(changes[:4])}); delete it and its features to regenerate "
            "them, or write to another --out"
        )


def _read_encoder(path: Path) -> EncoderFile:
    fitted = _try_read_encoder(path)
    if fitted is None:
        raise UserError(f"{path}: no such encoder, or its bytes changed; fit it again with vse-extract fit")
    return fitted


def _try_read_encoder(path: Path) -> EncoderFile | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["vse"])
        fitted = EncoderFile(safetensors.torch.load_file(path), metadata)
        undamaged = metadata["format"] == ENCODER_FILE_FORMAT and metadata["sha256"] == hash_tensors(fitted.tensors)
    except (SafetensorError, OSError, ValueError, KeyError):
        return None
    return fitted if undamaged else None
