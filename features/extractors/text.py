"""The extractor ``text``, a pretrained text encoder, and functions that load the encoder of a cache for new texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from vse.features.backbones.device import (
    choose_precision,
    choose_query_precision,
    collect_library_versions,
    describe_device,
    move_tensor,
    pick_device,
    wrap_memory_errors,
)
from vse.features.backbones.networks import autocast
from vse.features.backbones.texts import load_text_backbone
from vse.features.backbones.weight_files import add_weights_hint, find_weights_setting
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.rows import ExtractorInput, FeatureRows, list_input_ids
from vse.features.extractors.captions import load_cache_encoder
from vse.features.settings.base import Extractor
from vse.features.settings.captions import TextConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.progress import progress_bar

_DIFFERENCE_TEXTS = {  # words for messages, by the hash that differs
    "weights_sha256": "other weights",
    "tokenizer_sha256": "another tokenizer",
    "network_sha256": "other network settings",
}


class TextExtractor(Extractor):
    """A pretrained text encoder that computes the vectors of captions with the settings of a feature preset.

    config : settings of the preset
    weights_dir : folder in which a folder (for OpenCLIP, a file) with the model's name replaces a download
    device : ``auto``, or a device of torch
    """

    config: TextConfig
    reads_raw_text: ClassVar[bool] = True

    def __init__(self, config: TextConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        self.device = pick_device(device)
        self.requested_precision = config.precision
        self.config = config.model_copy(update={"precision": choose_precision(self.device, config.precision, "texts")})
        self.backbone = backbone = load_text_backbone(config, weights_dir)
        backbone.network.to(self.device)
        self.weights_sha256 = backbone.weights_sha256
        self.extra_hashes = {"tokenizer_sha256": backbone.tokenizer_sha256}
        if backbone.settings_sha256:
            self.extra_hashes["network_sha256"] = backbone.settings_sha256
        self.provenance = {
            "weights": config.weights,
            "revision": config.revision,
            "seed": config.seed,
            "longest": backbone.max_length,
            "device": describe_device(self.device),
            "arithmetic": self.config.precision,
            "versions": {**collect_library_versions(), **{name: metadata.version(name) for name in backbone.distributions}},
            **backbone.provenance,
        }

    def extract(self, items: Sequence[ExtractorInput], skip_bad: bool = False) -> FeatureRows:
        """Return the rows of captions, in order. The number of truncated captions is in the rows' ``counts``, for the log."""
        with progress_bar(total=len(items), desc=self.progress_label, unit=self.config.of.removesuffix("s")) as progress:
            parts, n_truncated = self._encode(self._collect_texts(items), np.dtype(self.config.dtype), progress.update)
        input_hashes = np.stack([item.hash_input() for item in items])
        offsets = None
        if self.config.row_kind == "sets":
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            features = np.concatenate(parts)
        else:
            features = np.stack(parts)
        counts = {f"{self.config.of} cut to {self.backbone.max_length} tokens": n_truncated}
        return FeatureRows(list_input_ids(items), features, input_hashes, offsets, counts=counts)

    def encode_inputs(self, captions: Sequence[ExtractorInput]) -> tuple[Tensor, ...]:
        """Return a tuple with one tensor, the vectors (n, dim) of the captions.

        With ``pooling: tokens``, the tuple has token states (n, n_tokens, dim) and a mask (n, n_tokens), False for padding.
        """
        parts = [torch.from_numpy(part) for part in self._encode(self._collect_texts(captions), np.dtype(np.float32))[0]]
        if self.config.row_kind == "vectors":
            return (torch.stack(parts),)
        lengths = torch.tensor([len(part) for part in parts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), mask

    def _collect_texts(self, items: Sequence[ExtractorInput]) -> list[str]:
        if self.config.of == "captions":
            return [item.raw for item in items]
        return [" ".join(self.config.select_words(item.tokens)) for item in items]

    def _encode(
        self, texts: Sequence[str], dtype: np.dtype[Any], report_progress: Any = lambda n: None
    ) -> tuple[list[NDArray[Any]], int]:
        """Return an array for each text, and the number of truncated texts. ``report_progress`` gets the size of each batch.

        The array is the text's vector (dim,) or, with ``pooling: tokens``, its token states (n_tokens, dim).
        """
        tokens, n_truncated = self.backbone.tokenize(texts)
        encoded: list[NDArray[Any]] = [np.empty(0)] * len(texts)
        with wrap_memory_errors("lower batch_tokens with --set, or --set precision=bf16"):
            for indices in _split_into_batches([len(row) for row in tokens], self.config.batch_tokens):
                batch = [tokens[index] for index in indices]
                vectors = self._forward(batch).cpu().numpy().astype(dtype)
                for index, row, vector in zip(indices, batch, vectors, strict=True):
                    encoded[index] = vector[: len(row)].copy() if self.config.row_kind == "sets" else vector
                report_progress(len(batch))
        return encoded, n_truncated

    def _forward(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors (n, dim) of a batch of texts, given as token ids.

        With ``pooling: tokens``, return the states of their tokens, padded to the longest text: (n, width, dim).
        """
        width = max(map(len, batch))
        tokens = torch.tensor([[*row, *[self.backbone.pad_id] * (width - len(row))] for row in batch])
        mask = torch.arange(width) < torch.tensor([[len(row)] for row in batch])
        tokens, mask = move_tensor(tokens, self.device), move_tensor(mask, self.device)
        with torch.inference_mode(), autocast(self.config.precision, self.device):
            vectors = self._pool_states(tokens, mask).float()
        return normalize(vectors, dim=-1) if self.config.normalize else vectors

    def _pool_states(self, tokens: Tensor, mask: Tensor) -> Tensor:
        if self.config.pooling == "own":
            return self.backbone.compute_text_vectors(tokens, mask)
        states = self.backbone.compute_token_states(tokens, mask)
        if self.config.pooling == "tokens":
            return states
        if self.config.pooling == "first":
            return states[:, 0]
        return (states.float() * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]


def _split_into_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of text indices, the longest texts first; a batch has at most ``max_tokens`` tokens with padding."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    while order:
        n = max(1, max_tokens // max(1, lengths[order[0]]))
        yield order[:n]
        order = order[n:]


def rebuild_text_extractor(cache: FeatureCache, weights_dir: Path | None = None, device: str = "auto") -> TextExtractor:
    """Load the text encoder that computed a cache, to encode other texts.

    The file of weights is found by its SHA-256 (:mod:`vse.features.backbones.weight_files`). A bf16 encoder computes in fp32
    on a device without bf16. Raises UserError if the encoder is missing or has changed.
    """
    provenance = cache.provenance
    found = find_weights_setting(provenance, cache.model_folder, weights_dir)
    with wrap_read_errors(cache.path, "a cache of a text encoder's vectors, by its provenance"):
        sources = {key: provenance[key] for key in ("weights", "seed", "revision") if key in provenance}
        if "revision" in sources and not str(provenance["config"]["model"]).startswith("open_clip/"):
            sources["revision"] = provenance.get("commit", sources["revision"])  # a branch may have another commit now
        sources = found or sources  # a folder has no revision
        config = TextConfig(name=cache.feature, **sources, **provenance["config"])
        config = config.model_copy(update={"precision": choose_query_precision(config.precision)})
    try:
        extractor = TextExtractor(config, weights_dir, device)
    except UserError as missing:
        raise add_weights_hint(provenance, config.model, missing) from None
    hashes = {"weights_sha256": extractor.weights_sha256, **extractor.extra_hashes}
    for name, part in _DIFFERENCE_TEXTS.items():
        if hashes.get(name) != provenance.get(name):
            error = UserError(f"{cache.path} was computed with {part} of {config.model}: {name} differs from the current one")
            raise add_weights_hint(provenance, config.model, error)
    return extractor


class TextInputEncoder(Protocol):
    """An encoder of captions: a fitted :class:`CaptionEncoder`, or a :class:`TextExtractor`.

    reads_raw_text : True if the encoder reads raw text, False if the encoder reads words
    """

    reads_raw_text: ClassVar[bool]

    def encode_inputs(self, captions: Sequence[ExtractorInput]) -> tuple[Tensor, ...]:
        """Return a tuple with one tensor, the vectors (n, dim) float32 of the captions.

        For an encoder with a vector for each token, the tuple has vectors (n, n_tokens, dim) and a mask (n, n_tokens), False
        for padding.
        """


def load_text_input_encoder(cache: FeatureCache, weights_dir: Path | None = None, device: str = "auto") -> TextInputEncoder:
    """Load the encoder that computed a cache of captions. Raises UserError if the encoder is missing or has changed."""
    if cache.provenance.get("config", {}).get("extractor") == "text":
        return rebuild_text_extractor(cache, weights_dir, device)
    if "imported" in cache.provenance:
        raise UserError(f"{cache.path}: another program computed these vectors of captions, so it must encode new texts, too")
    return load_cache_encoder(cache, device)
