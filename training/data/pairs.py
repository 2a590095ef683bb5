"""Pairs of images and captions, the splits that they form, and captions as inputs of a model.

The inputs are indices of words, tokens of a transformer's own tokenizer, or cached features.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vse.features.backbones.device import move_tensor
from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import ExtractorInput
from vse.features.exchange.embeddings import read_backbone
from vse.features.extractors.text import TextInputEncoder
from vse.pipeline.dataset.captions import PAD_ID, Vocabulary
from vse.pipeline.dataset.columns import (
    IdIndex,
    caption_ids,
    caption_languages,
    coco_ids,
    count_captions_per_image,
    count_words,
    image_ids,
    select_images,
)
from vse.pipeline.dataset.dataset import Caption, Dataset, Image, select_languages
from vse.pipeline.errors import UserError
from vse.training.data.images import CachedFeatures, EvaluationImages
from vse.training.kinds import InputKind, to_input_kind
from vse.training.models.build import InputSpec, ModelConfig
from vse.training.models.encoders.linear import IdentitySettings

log = logging.getLogger(__name__)

_TEXTS_PER_TOKENISER_CALL = 10_000  # texts that are tokenised together


class CaptionInputs(Protocol):
    """Captions as inputs of a model. The class for cached captions is :class:`vse.training.data.images.CachedFeatures`."""

    kind: InputKind

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Return the captions with these indices, in the form of their ``kind``: words, tokens, vectors or sets."""


class CaptionsLoadedAtFirstRead:
    """Captions that are all loaded when the first caption is read."""

    def __init__(self, kind: InputKind, load_inputs: Callable[[], CaptionInputs]) -> None:
        self.kind, self._load_inputs = kind, load_inputs

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        return self.inputs.read(indices)

    @cached_property
    def inputs(self) -> CaptionInputs:
        return self._load_inputs()


class CaptionsEncodedOnRead:
    """Captions that are encoded when they are read, by the text encoder that was fitted to the training captions.

    ``captions`` : the captions, in the order of their indices.
    ``encoder`` : the encoder that computed ``cache``.
    ``cache`` : the cache of captions on which the model was trained.
    ``device`` : device of the features.
    """

    def __init__(
        self, captions: Sequence[Caption], encoder: TextInputEncoder, cache: FeatureCache, device: torch.device
    ) -> None:
        self._captions, self._encoder, self._cache, self._device = captions, encoder, cache, device
        self.kind = to_input_kind(cache.row_kind)

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        captions = [self._captions[index] for index in indices.tolist()]
        return encode_texts(self._cache, self._encoder, [(c.raw, c.tokens) for c in captions], self._device)


class CaptionsWithChangedTexts:
    """Cached captions of a training with a noise file, which replaces some captions by wrong texts on purpose.

    ``cached`` : vectors of all captions with their own texts.
    ``rows`` : (n,) indices of the captions with a wrong text.
    ``vectors`` : (n, dim) vectors of the wrong texts.
    """

    kind = InputKind.VECTORS

    def __init__(self, cached: CaptionInputs, rows: NDArray[np.int64], vectors: Tensor) -> None:
        self._cached, self._index, self._vectors = cached, IdIndex(rows), vectors

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        (vectors,) = self._cached.read(indices)
        found = self._index.find_rows(indices)
        changed = np.flatnonzero(found >= 0)
        if len(changed):
            where = torch.from_numpy(changed).to(vectors.device)
            vectors = vectors.index_copy(0, where, self._vectors[torch.from_numpy(found[changed]).to(vectors.device)])
        return (vectors,)


def encode_texts(
    cache: FeatureCache, encoder: TextInputEncoder, texts: Sequence[tuple[str, Sequence[str]]], device: torch.device
) -> tuple[Tensor, ...]:
    """Encode texts as inputs of a model that was trained on ``cache``: vectors or sets, in the precision of the cache.

    ``encoder`` is the encoder that computed ``cache``. A text is a pair of the raw text and its words.
    """
    items = [ExtractorInput(k, tokens=tuple(words), raw=raw) for k, (raw, words) in enumerate(texts)]
    vectors, *mask = encoder.encode_inputs(items)
    rounded = torch.from_numpy(vectors.numpy().astype(cache.dtype)).float()
    return tuple(part.to(device) for part in (rounded, *mask))


class RaggedIndices:
    """Lists of integers, stored in one flat array so that some of them are padded without a loop. No list may be empty."""

    def __init__(self, lists: Iterable[Sequence[int]]) -> None:
        flat, lengths = array("i"), array("i")
        for indices in lists:
            flat.extend(indices)
            lengths.append(len(indices))
        self._list_lengths = np.asarray(lengths, np.int64)
        self._list_starts = np.cumsum(self._list_lengths) - self._list_lengths
        self._flat_indices = np.asarray(flat)

    def pad(self, rows: NDArray[np.int64], padding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lists at ``rows`` as a matrix (n, longest), filled up with ``padding``, and the lengths (n,)."""
        lengths = self._list_lengths[rows]
        column = np.arange(lengths.max(initial=1))
        inside = column < lengths[:, None]
        padded = np.where(
            inside,
            self._flat_indices[np.minimum(self._list_starts[rows][:, None] + column, len(self._flat_indices) - 1)],
            padding,
        )
        return padded.astype(np.int64), lengths


class WordIndices:
    """Captions as indices of their words in a vocabulary."""

    kind = InputKind.WORDS

    def __init__(self, captions: Sequence[Caption], vocabulary: Vocabulary, device: torch.device) -> None:
        self._word_lists = RaggedIndices(vocabulary.encode(caption.tokens) for caption in captions)
        self._device = device

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return padded word indices (n, longest) and, always on the CPU, the length of each caption (n,)."""
        words, lengths = self._word_lists.pad(indices, PAD_ID)
        return move_tensor(torch.from_numpy(words), self._device), torch.from_numpy(lengths)


class TokenIndices:
    """Captions as indices of the tokens of a transformer.

    ``n_truncated_captions`` : number of captions with more tokens than the transformer reads.
    """

    kind = InputKind.TOKENS

    def __init__(self, texts: Sequence[str], transformer: Transformer, device: torch.device) -> None:
        self.n_truncated_captions = 0
        self._padding, self._device = transformer.pad_index, device
        self._token_lists = RaggedIndices(self._tokenise(texts, transformer))
        if self.n_truncated_captions:
            log.warning(
                "%d of %d captions are longer than the %d tokens that %s reads, and are truncated",
                self.n_truncated_captions,
                len(texts),
                transformer.max_length or transformer.n_positions,
                transformer.name,
            )

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return padded token indices (n, longest), and the mask of the tokens (n, longest)."""
        tokens, lengths = self._token_lists.pad(indices, self._padding)
        mask = np.arange(tokens.shape[1]) < lengths[:, None]
        return move_tensor(torch.from_numpy(tokens), self._device), move_tensor(torch.from_numpy(mask), self._device)

    def _tokenise(self, texts: Sequence[str], transformer: Transformer) -> Iterator[list[int]]:
        for start in range(0, len(texts), _TEXTS_PER_TOKENISER_CALL):
            for encoding in transformer.tokenizer.encode_batch(list(texts[start : start + _TEXTS_PER_TOKENISER_CALL])):
                self.n_truncated_captions += bool(encoding.overflowing)
                yield encoding.ids


class Pairs:
    """All image-caption pairs of some images. Pair k is caption k and its image, whose index is ``image_indices[k]``."""

    def __init__(self, images: Sequence[Image]) -> None:
        self.images = images
        self.image_ids = image_ids(images)
        self.image_indices = np.repeat(np.arange(len(images)), count_captions_per_image(images))

    def __len__(self) -> int:
        return len(self.image_indices)

    @cached_property
    def captions(self) -> list[Caption]:
        """All captions, created at the first access."""
        return [caption for image in self.images for caption in image.captions]

    def count_words(self) -> dict[str, int]:
        """Return the number of occurrences of each word in the captions."""
        return count_words(self.images)

    @property
    def caption_image_ids(self) -> NDArray[np.int64]:
        return self.image_ids[self.image_indices]

    @property
    def caption_ids(self) -> NDArray[np.int64]:
        return caption_ids(self.images)

    @property
    def caption_languages(self) -> list[str]:
        """The language of each caption, such as ``en``, or an empty text if the language is unknown."""
        return caption_languages(self.images)

    @property
    def coco_ids(self) -> NDArray[np.int64] | None:
        """The MS-COCO ids of the images (n_images,), or None if any image lacks one."""
        return coco_ids(self.images)

    @cached_property
    def text_indices(self) -> NDArray[np.int64]:
        """The index of each caption's text (n_pairs,); captions with the same words have the same index."""
        indices: dict[tuple[str, ...], int] = {}
        return np.asarray([indices.setdefault(tuple(c.tokens), len(indices)) for c in self.captions], np.int64)


@dataclass(frozen=True)
class RetrievalSplit:
    """The pairs of a split, and the images and captions of these pairs as inputs of a model."""

    pairs: Pairs
    image_inputs: EvaluationImages
    caption_inputs: CaptionInputs

    def select_first_images(self, n_images: int) -> RetrievalSplit:
        """Return a split of the first ``n_images`` images and all captions of these images."""
        if n_images >= len(self.pairs.images):
            return self
        return RetrievalSplit(Pairs(self.pairs.images[:n_images]), self.image_inputs, self.caption_inputs)


def select_images_with_features(
    dataset: Dataset,
    splits: Sequence[str],
    cache: FeatureCache,
    require_captions: bool = False,
    languages: Sequence[str] = (),
) -> Sequence[Image]:
    """Return the images of ``splits`` that have features in ``cache`` and, with ``require_captions``, also have captions.

    With ``languages``, captions in other languages are dropped from the images. A warning states the number of images that are
    left out. Raises UserError if no image remains.
    """
    of_splits = [dataset.split(split) for split in splits]
    images = of_splits[0] if len(of_splits) == 1 else list(chain.from_iterable(of_splits))
    kept = select_images(images, ~np.isin(image_ids(images), list(cache.skipped_ids)))
    if len(kept) < len(images):
        log.warning("%d images without features (skipped by the extraction) are left out", len(images) - len(kept))
    if not kept:
        raise UserError(f"{cache.path}: no image of this split has features")
    kept = select_languages(kept, languages, dataset.path)
    if require_captions:
        n_images, kept = len(kept), select_images(kept, count_captions_per_image(kept) > 0)
        if len(kept) < n_images:
            log.warning("%d images without captions are left out", n_images - len(kept))
        if not kept:
            raise UserError(f"{dataset.path}: no image of the split {' or '.join(splits)} has a caption")
    return kept


def check_same_backbone(model: ModelConfig, images: FeatureCache, captions: FeatureCache | None) -> None:
    """Raise UserError if a model compares the vectors of two caches directly, and the caches come from different runs.

    A model compares them directly if both encoders are ``identity``. The caches are accepted if the same training run computed
    both, or if no training run of this program computed either of them.
    """
    encoders = model.image_encoder, model.caption_encoder
    if captions is None or not all(isinstance(encoder, IdentitySettings) for encoder in encoders):
        return
    backbones = read_backbone(images), read_backbone(captions)
    image_sha256, caption_sha256 = (backbone and backbone.sha256 for backbone in backbones)
    if image_sha256 != caption_sha256:
        image_run, caption_run = (backbone.experiment if backbone else "no run" for backbone in backbones)
        raise UserError(
            f"{captions.path} holds captions by {caption_run}, {images.path} images by {image_run}: not by the same model; "
            "use two caches that the same vse-embed --as-features wrote"
        )


def describe_model_inputs(
    images: FeatureCache, captions: FeatureCache | None, transformer: Transformer | None, vocabulary: Vocabulary
) -> tuple[InputSpec, InputSpec]:
    """Return the kinds and sizes of a model's inputs for images and for captions."""
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
    """Return the kind (vectors or sets) and size of a model's input that is read from a cache."""
    return InputSpec(to_input_kind(cache.row_kind), cache.dim, f"the feature {cache.feature!r}")
