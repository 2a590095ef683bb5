"""Captions through a pretrained text encoder: a vector each, or the states of their tokens.

Captions that no cache has, encoded as those of a cache were: a text that is searched for, another data set's captions.
"""

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

from vse.features.backbones.device import describe_device, memory_guard, moved, pick_device, versions
from vse.features.backbones.networks import autocast
from vse.features.backbones.precision import precision_on, rebuilt_precision
from vse.features.backbones.texts import load_text_backbone
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.rows import Item, Rows, ids_of
from vse.features.extractors.captions import encoder_of
from vse.features.settings.base import Extractor
from vse.features.settings.texts import TextConfig
from vse.pipeline.errors import UserError
from vse.pipeline.files.inputs import wrap_read_errors
from vse.pipeline.progress import progress_bar

_HASHES = {"weights_sha256": "weights", "tokenizer_sha256": "tokenizer", "network_sha256": "settings of the network"}


class TextExtractor(Extractor):
    """A pretrained text encoder ready to turn captions into vectors, by one feature preset.

    Parameters
    ----------
    config : the preset
    weights_dir : folder whose folder or file with the model's name stands in for a download
    device : ``auto`` takes a GPU if there is one
    """

    config: TextConfig
    reads_raw: ClassVar[bool] = True

    def __init__(self, config: TextConfig, weights_dir: Path | None = None, device: str = "auto") -> None:
        self.device = pick_device(device)
        self.asked_precision = config.precision
        self.config = config.model_copy(update={"precision": precision_on(self.device, config.precision, "texts")})
        self.backbone = backbone = load_text_backbone(config, weights_dir)
        backbone.network.to(self.device)
        self.weights_sha256 = backbone.weights_sha256
        self.extra = {"tokenizer_sha256": backbone.reading_sha256}
        if backbone.network_sha256:
            self.extra["network_sha256"] = backbone.network_sha256
        self.notes = {
            "weights": config.weights,
            "revision": config.revision,
            "seed": config.seed,
            "longest": backbone.longest,
            "device": describe_device(self.device),
            "arithmetic": self.config.precision,
            "versions": {**versions(), **{name: metadata.version(name) for name in backbone.libraries}},
            **backbone.notes,
        }

    def extract(self, items: Sequence[Item], skip_bad: bool = False) -> Rows:
        """Make the rows of captions, in order; those that are longer than the encoder reads are counted."""
        with progress_bar(total=len(items), desc=self.described, unit=self.config.of.removesuffix("s")) as progress:
            parts, n_cut = self._encoded(self._texts(items), np.dtype(self.config.dtype), progress.update)
        sources = np.stack([item.source() for item in items])
        offsets = None
        if self.config.row_kind == "sets":
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            features = np.concatenate(parts)
        else:
            features = np.stack(parts)
        counts = {f"{self.config.of} cut to {self.backbone.longest} tokens": n_cut}
        return Rows(ids_of(items), features, sources, offsets, counts=counts)

    def encoded(self, captions: Sequence[Item]) -> tuple[Tensor, ...]:
        """Captions as a model reads them: (vectors (n, dim),), or (states (n, longest, dim), mask (n, longest)) of tokens."""
        parts = [torch.from_numpy(part) for part in self._encoded(self._texts(captions), np.dtype(np.float32))[0]]
        if self.config.row_kind == "vectors":
            return (torch.stack(parts),)
        lengths = torch.tensor([len(part) for part in parts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), mask

    def _texts(self, items: Sequence[Item]) -> list[str]:
        """Captions as they were written, or phrases as their words with blanks between them."""
        if self.config.of == "captions":
            return [item.raw for item in items]
        return [" ".join(self.config.words_read(item.tokens)) for item in items]

    def _encoded(
        self, texts: Sequence[str], dtype: np.dtype[Any], done: Any = lambda n: None
    ) -> tuple[list[NDArray[Any]], int]:
        """The vector (dim,), or the states (n_tokens, dim), of each text, and how many texts were cut."""
        tokens, n_cut = self.backbone.tokenized(texts)
        made: list[NDArray[Any]] = [np.empty(0)] * len(texts)
        with memory_guard("lower batch_tokens with --set, or --set precision=bf16"):
            for numbers in _batches([len(row) for row in tokens], self.config.batch_tokens):
                batch = [tokens[number] for number in numbers]
                vectors = self._forward(batch).cpu().numpy().astype(dtype)
                for number, row, vector in zip(numbers, batch, vectors, strict=True):
                    made[number] = vector[: len(row)].copy() if self.config.row_kind == "sets" else vector
                done(len(batch))
        return made, n_cut

    def _forward(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """The vectors (n, dim) of a batch of tokens, or their states (n, width, dim)."""
        width = max(map(len, batch))
        tokens = torch.tensor([[*row, *[self.backbone.pad] * (width - len(row))] for row in batch])
        mask = torch.arange(width) < torch.tensor([[len(row)] for row in batch])
        tokens, mask = moved(tokens, self.device), moved(mask, self.device)
        with torch.inference_mode(), autocast(self.config.precision, self.device):
            vectors = self._pooled(tokens, mask).float()
        return normalize(vectors, dim=-1) if self.config.normalize else vectors

    def _pooled(self, tokens: Tensor, mask: Tensor) -> Tensor:
        if self.config.pooling == "own":
            return self.backbone.pooled(tokens, mask)
        states = self.backbone.states(tokens, mask)
        if self.config.pooling == "tokens":
            return states
        if self.config.pooling == "first":
            return states[:, 0]
        return (states.float() * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]


def _batches(lengths: Sequence[int], bound: int) -> Iterator[list[int]]:
    """Numbers of captions that run together, the longest first, so that little is padded and memory fails early if at all."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    while order:
        n = max(1, bound // max(1, lengths[order[0]]))
        yield order[:n]
        order = order[n:]


def rebuild_text_extractor(cache: FeatureCache, weights_dir: Path | None = None, device: str = "auto") -> TextExtractor:
    """Load the text encoder that made a cache, for other texts.

    One of bf16 computes in fp32 on a device without bf16. Raises UserError if the encoder is not at hand, or is another one.
    """
    made = cache.provenance
    with wrap_read_errors(cache.path, "a cache of a text encoder's vectors, by its provenance"):
        beside = {key: made[key] for key in ("weights", "seed", "revision") if key in made}
        if "revision" in beside and not str(made["config"]["model"]).startswith("open_clip/"):
            beside["revision"] = made.get("commit", beside["revision"])  # a branch may have moved on
        config = TextConfig(name=cache.feature, **beside, **made["config"])
        config = config.model_copy(update={"precision": rebuilt_precision(config.precision)})
    extractor = TextExtractor(config, weights_dir, device)
    now = {"weights_sha256": extractor.weights_sha256, **extractor.extra}
    for name, what in _HASHES.items():
        if now.get(name) != made.get(name):
            raise UserError(
                f"{cache.path} was made with another {what} of {config.model} than is there now (SHA-256 differs)"
                if name == "tokenizer_sha256"
                else f"{cache.path} was made with other {what} of {config.model} than are there now (SHA-256 differ)"
            )
    return extractor


class CaptionReader(Protocol):
    """What turns captions, given as words and as they were written, into what a model reads of them.

    ``reads_raw`` tells which of the two it reads.
    """

    reads_raw: ClassVar[bool]

    def encoded(self, captions: Sequence[Item]) -> tuple[Tensor, ...]:
        """(vectors (n, dim),), or (sets (n, longest, dim), mask (n, longest)), float32."""


def caption_reader(cache: FeatureCache, weights_dir: Path | None = None, device: str = "auto") -> CaptionReader:
    """What made a cache of captions: the encoder beside it, or the pretrained one that its provenance names.

    :class:`vse.pipeline.errors.UserError` if that is not at hand, or another one is there.
    """
    if cache.provenance.get("config", {}).get("extractor") == "text":
        return rebuild_text_extractor(cache, weights_dir, device)
    return encoder_of(cache, device)
