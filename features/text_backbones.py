"""Pretrained text encoders: a tokenizer and a network, whichever library they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vse.pipeline.files import sha256_json

if TYPE_CHECKING:
    from vse.features.extractors.text import TextConfig


class TextBackbone(ABC):
    """A tokenizer and a network that reads its tokens, in evaluation mode.

    Attributes
    ----------
    network : what moves to a device
    longest : tokens of a caption that are read, special ones counted
    pad : what a batch is padded with
    weights_sha256 : of all that was learnt
    reading_sha256 : of how a text becomes tokens: the tokenizer, the prompt, the maximal length
    network_sha256 : of what else decides the vectors, such as the layers' sizes; "" if the model's name alone does
    notes : where things came from
    """

    libraries: ClassVar[Sequence[str]]  # distributions whose versions are worth noting
    network: nn.Module
    longest: int
    pad: int
    weights_sha256: str
    reading_sha256: str
    network_sha256: str = ""
    notes: Mapping[str, Any] = {}

    @abstractmethod
    def tokenized(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
        """The tokens of each text, at most ``longest``, and how many texts were cut."""

    @abstractmethod
    def pooled(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n dim"]:
        """The model's own vector of each text, from its padded tokens."""

    @abstractmethod
    def states(self, tokens: Int[Tensor, "n width"], mask: Bool[Tensor, "n width"]) -> Float[Tensor, "n width dim"]:
        """The last layer's state of each token; those of padding mean nothing."""


def load_text_backbone(config: TextConfig, weights_dir: Path | None = None) -> TextBackbone:
    """The text encoder of a feature preset, on the CPU.

    What ``weights_dir`` holds stands in for a download: a folder with the last part of the model's name, or for OpenCLIP a
    file. :class:`vse.pipeline.errors.UserError` if the library or the weights are missing.
    """
    config.library.load(config.model)
    if config.open_clip is not None:
        from vse.features.open_clip_text import OpenClipText

        return OpenClipText(config, weights_dir)
    from vse.features.sentence_text import SentenceText

    return SentenceText(config, weights_dir)


def tokenizer_sha256(tokenizer: Any, *reading: object) -> str:
    """SHA-256 of a tokenizer of transformers and of what else decides a text's tokens, whatever version wrote its file."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        import json

        whole = json.loads(backend.to_str())
        content = {name: whole[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens")}
    return sha256_json([content, *reading])
