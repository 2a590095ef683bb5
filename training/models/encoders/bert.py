"""A caption encoder with a pretrained transformer, such as BERT, that can be frozen or trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vse.features.backbones.transformer import (
    TINY_MODEL_NAME,
    Transformer,
    build_tiny_transformer,
    find_embeddings_and_layers,
    read_transformer,
)
from vse.pipeline.errors import UserError
from vse.training.kinds import BatchVectors, InputKind, pad_sets
from vse.training.models.encoders.base import Encoder, EncoderSettings, EncoderSpec, xavier_linear
from vse.training.models.encoders.pooling import GeneralisedPooling, WordAugmentation

_CPU_BATCH_SIZE = 32


class BertSettings(EncoderSettings):
    """A pretrained transformer, and a linear map of the outputs of its last layer (TOD-Net paper, section IV-A)."""

    name: Literal["bert"] = "bert"
    input_kinds: ClassVar = (InputKind.TOKENS,)
    model: str = Field(
        "bert-large-uncased",
        description="a model of the Hugging Face hub such as BERT, MiniLM or RoBERTa, or its local folder; tiny: 2 layers "
        "of width 32 with random weights and the words of the training captions, for demos",
    )
    states: Literal["pooled", "all"] = Field(
        "pooled", description="representation of a caption: pooled, one vector; all, the set of the vectors of its tokens"
    )
    pooling: Literal["mean", "first", "gpo"] = Field(
        "mean",
        description="pooling of the last layer's outputs: mean, over the tokens; first, the output of the first token; "
        "gpo, generalised pooling of the mapped outputs (VSE-infinity)",
    )
    size_augmentation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the words that is selected in each training step; half of the selected words become the mask, "
        "a tenth random tokens, and the rest are removed (VSE-infinity: 0.2)",
    )
    frozen_layers: int = Field(
        0, ge=0, description="number of first layers that are not trained; above 0, token embeddings are not trained either"
    )
    max_length: PositiveInt | None = Field(
        None,
        description="length in tokens at which captions are truncated, special tokens included; null: the limit of the model",
    )
    gradient_checkpointing: bool = Field(False, description="compute each layer twice instead of storing its activations")

    @model_validator(mode="after")
    def _check_pooling(self) -> BertSettings:
        if self.states == "all" and self.pooling != "mean":
            raise ValueError("pooling goes with states: pooled; states: all keeps the vector of every token")
        return self

    def output_kind(self, kind: InputKind) -> InputKind:
        return InputKind.SETS if self.states == "all" else InputKind.VECTORS

    def load_transformer(self, weights_dir: Path | None, words: Callable[[], Iterable[str]]) -> Transformer | None:
        if self.model == TINY_MODEL_NAME:
            return build_tiny_transformer(words(), self.max_length)
        return read_transformer(self.model, weights_dir, self.max_length)

    def build(self, spec: EncoderSpec) -> Encoder:
        assert spec.transformer is not None, "tokens belong to a transformer"
        return BertEncoder(spec.transformer, spec.dim, self)


class BertEncoder(Encoder):
    """The transformer ``network``, and a linear map of the output of every token or of the pooled outputs."""

    def __init__(self, transformer: Transformer, dim: int, settings: BertSettings) -> None:
        super().__init__()
        self.network: Any = transformer.load_network()
        self.dim = dim
        self.linear = xavier_linear(int(self.network.config.hidden_size), dim)
        self.states, self.pooling = settings.states, settings.pooling
        self.gpo = GeneralisedPooling() if settings.pooling == "gpo" else None
        share = settings.size_augmentation
        self.augmentation = _build_augmentation(transformer, share) if share else None
        embeddings, layers = find_embeddings_and_layers(self.network, transformer.name)
        n_frozen = settings.frozen_layers
        if n_frozen > len(layers):
            raise UserError(f"frozen_layers: {n_frozen} of {transformer.name}, which has {len(layers)} layers")
        self._frozen_modules = [embeddings, *layers[:n_frozen]] if n_frozen else []
        for module in self._frozen_modules:
            module.requires_grad_(False)
        for layer in layers[n_frozen:] if settings.gradient_checkpointing else []:
            layer.forward = _wrap_in_checkpoint(layer.forward)

    def forward(self, tokens: Int[Tensor, "n n_tokens"], mask: Bool[Tensor, "n n_tokens"]) -> BatchVectors:
        """Return the embeddings. A CPU encodes captions of similar lengths together, which halves the padding."""
        if self.augmentation is not None:
            tokens, mask = self.augmentation(tokens, mask)
        if tokens.device.type != "cpu" or len(tokens) <= _CPU_BATCH_SIZE:
            return self._encode(tokens, mask)
        lengths = mask.sum(1)
        order = lengths.argsort(stable=True)
        parts = []
        for rows in torch.split(order, _CPU_BATCH_SIZE):
            longest = int(lengths[rows[-1]])
            parts.append(pad_sets(self._encode(tokens[rows, :longest], mask[rows, :longest]), mask.shape[1]))
        back = order.argsort()
        return tuple(torch.cat(tensors)[back] for tensors in zip(*parts, strict=True))

    def _encode(self, tokens: Tensor, mask: Tensor) -> BatchVectors:
        states = self.network(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        if self.states == "all":
            return self.linear(states), mask
        if self.pooling == "first":
            return (self.linear(states[:, 0]),)
        if self.gpo is not None:
            return (self.gpo(self.linear(states), mask),)
        weights = mask / mask.sum(1, keepdim=True)
        return (self.linear((states * weights[:, :, None]).sum(1)),)

    def train(self, mode: bool = True) -> BertEncoder:
        """Set training or evaluation mode for all layers that are trained. Frozen layers stay in evaluation mode."""
        super().train(mode)
        for module in self._frozen_modules:
            module.train(False)
        return self

    def weights_without_decay(self) -> list[Tensor]:
        return [self.network.get_input_embeddings().weight]


def _build_augmentation(transformer: Transformer, share: float) -> WordAugmentation:
    tokenizer = transformer.tokenizer
    index_of = tokenizer.get_vocab()
    mask_token = next((index_of[name] for name in ("[MASK]", "<mask>") if name in index_of), None)
    if mask_token is None:
        raise UserError(f"size_augmentation: {transformer.name} has no mask token; set it to 0")
    special = {*tokenizer.encode("").ids, transformer.pad_index, mask_token}
    continuations = [index for token, index in index_of.items() if token.startswith("##")]
    return WordAugmentation(share, 1 + max(index_of.values()), special, mask_token, transformer.pad_index, continuations)


def _wrap_in_checkpoint(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``forward`` without stored activations: the backward pass computes them again, with the same dropout."""

    def run(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    return run
