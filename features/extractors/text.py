"""Settings of ``vse-extract text``; the code is in :mod:`vse.features.text_extractor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from vse.features.extractors.libraries import LIBRARIES, Library
from vse.features.extractors.settings import WEIGHT_SUFFIXES, Job, Option, TextSettings

if TYPE_CHECKING:
    from vse.features.extractors.extractor import Extractor

_OPEN_CLIP = "open_clip/"


class TextConfig(TextSettings):
    """Vectors of captions, or of their tokens, from a pretrained text encoder.

    Any model of sentence-transformers or transformers by its name on the Hugging Face hub (BERT, MiniLM, E5, GTE, ...), or
    the text tower of an OpenCLIP model. Captions are read as they were written, not as lower-case words.
    """

    options: ClassVar[tuple[Option, ...]] = ("weights_dir",)
    default_preset: ClassVar[str | None] = "minilm"
    reads_raw: ClassVar[bool] = True

    extractor: Literal["text"] = "text"
    model: str = Field(description="a model of the Hugging Face hub, such as intfloat/e5-base-v2, or open_clip/<model>")
    weights: str = Field(
        "pretrained",
        description="pretrained, random, or a folder with the model; of OpenCLIP a name that it knows, or a .pth or "
        ".safetensors file",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a download from the hub; none: the newest")
    seed: int = Field(0, ge=0, description="seed of random weights")
    pooling: Literal["own", "mean", "first", "tokens"] = Field(
        "own",
        description="own: the model's own vector, the mean if its folder names none; mean, first: of the last layer's states; "
        "tokens: these states themselves, a vector per token",
    )
    prompt: str | None = Field(
        None, description="text before each caption, which some models want; none: the model's own default, mostly none"
    )
    max_length: int | None = Field(
        None, ge=3, description="tokens of a caption that are read, special ones counted; none: as many as the model reads"
    )
    normalize: bool = Field(True, description="L2-normalise each vector")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32", description="fp32, or autocast to bf16; auto: bf16 where the device has it, else fp32"
    )
    batch_tokens: PositiveInt = Field(2048, description="tokens that run through the network at once, padding counted")

    @classmethod
    def how(cls) -> set[str]:
        """The weights are known by their hash; batches do not change what is computed."""
        return super().how() | {"weights", "revision", "seed", "batch_tokens"}

    def triggers(self) -> dict[str, Any]:
        """And the revision that is asked for."""
        return {**super().triggers(), "revision": self.revision}

    @property
    def row_kind(self) -> Literal["vectors", "crops", "sets"]:
        """A vector per caption, or the set of its tokens' states."""
        return "sets" if self.pooling == "tokens" else "vectors"

    @property
    def most_vectors(self) -> int | None:
        return None if self.pooling == "tokens" else 1

    @property
    def network_reads(self) -> int:
        return 1

    @property
    def open_clip(self) -> str | None:
        """The name of the OpenCLIP model; None for a model of the hub."""
        return self.model.removeprefix(_OPEN_CLIP) if self.model.startswith(_OPEN_CLIP) else None

    @property
    def library(self) -> Library:
        """The library that the model comes from."""
        return LIBRARIES["sentence_transformers" if self.open_clip is None else "open_clip"]

    @property
    def extra(self) -> str | None:
        """That of the model's library."""
        return self.library.extra

    @property
    def from_files(self) -> bool:
        """Whether ``weights`` names a folder of the user or, of OpenCLIP, a file."""
        if self.open_clip is not None:
            return self.weights.endswith(WEIGHT_SUFFIXES)
        return self.weights not in ("pretrained", "random")

    def files(self) -> list[str]:
        """A folder or file of weights."""
        return [self.weights] if self.from_files else []

    @model_validator(mode="after")
    def _fits(self) -> TextConfig:
        if self.open_clip is not None and self.pooling == "first":
            raise ValueError(f"pooling: first of {self.model} knows no word of the caption, since no token sees a later one")
        if self.revision is not None and (self.open_clip is not None or self.from_files):
            raise ValueError("revision goes with a model that is downloaded from the Hugging Face hub")
        return self

    def build(self, job: Job) -> Extractor:
        """The network with its weights and its tokenizer."""
        from vse.features.text_extractor import TextExtractor

        return TextExtractor(self, job.weights_dir, job.device)
