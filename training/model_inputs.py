"""The inputs of a model for images and captions. Captions are read as features, tokens or words."""

from __future__ import annotations

import torch

from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.features.exchange.embeddings import read_backbone
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.errors import UserError
from vse.training.data.images import CachedFeatures
from vse.training.data.pairs import CaptionInputs, Pairs, TokenIndices, WordIndices
from vse.training.kinds import InputKind, to_input_kind
from vse.training.models.build import InputSpec, ModelConfig
from vse.training.models.encoders.linear import IdentitySettings


def check_same_backbone(model: ModelConfig, images: FeatureCache, captions: FeatureCache | None) -> None:
    """Raise :class:`UserError` if a model without encoders would compare vectors of different pretrained networks."""
    encoders = model.image_encoder, model.caption_encoder
    if captions is None or not all(isinstance(encoder, IdentitySettings) for encoder in encoders):
        return
    theirs, ours = read_backbone(images), read_backbone(captions)
    if (theirs and theirs.sha256) != (ours and ours.sha256):
        of_images, of_captions = (by.experiment if by else "no run" for by in (theirs, ours))
        raise UserError(
            f"{captions.path} holds captions by {of_captions}, {images.path} images by {of_images}: not by the same model; "
            "use two caches that the same vse-embed --as-features wrote"
        )


def describe_model_inputs(
    images: FeatureCache, captions: FeatureCache | None, transformer: Transformer | None, vocabulary: Vocabulary
) -> tuple[InputSpec, InputSpec]:
    """Return the inputs of a model for images and for captions."""
    if captions is not None:
        return describe_cache_input(images), describe_cache_input(captions)
    if transformer is not None:
        n_tokens = transformer.tokenizer.get_vocab_size()
        return describe_cache_input(images), InputSpec(InputKind.TOKENS, n_tokens, "the captions", transformer)
    return describe_cache_input(images), InputSpec(InputKind.WORDS, len(vocabulary), "the captions")


def load_caption_inputs(
    cache: FeatureCache | None,
    transformer: Transformer | None,
    vocabulary: Vocabulary,
    pairs: Pairs,
    device: torch.device,
    memory_gb: float = 0,
    used_gb: float = 0,
) -> CaptionInputs:
    """Return the captions as inputs of the model: features of a cache, tokens of a transformer, or words.

    ``memory_gb`` : limit on the memory of all cached features of the training, in units of 1e9 bytes.
    ``used_gb`` : part of this memory that the image features already use.
    """
    if cache is not None:
        return CachedFeatures(FeatureReader(cache, 0, mapped=False), pairs.caption_ids, device, memory_gb, used_gb)
    if transformer is not None:
        return TokenIndices([caption.raw for caption in pairs.captions], transformer, device)
    return WordIndices(pairs.captions, vocabulary, device)


def describe_cache_input(cache: FeatureCache) -> InputSpec:
    """Return the model's input for the rows of a cache."""
    return InputSpec(to_input_kind(cache.row_kind), cache.dim, f"the feature {cache.feature!r}")
