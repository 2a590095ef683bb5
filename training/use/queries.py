"""Encode a new text or photo with a trained run. Each encoder is loaded once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vse.features.cache.feature_cache import FeatureCache
from vse.features.extractors.cnn import CnnExtractor, rebuild_cnn_extractor
from vse.features.extractors.text import TextInputEncoder, load_text_input_encoder
from vse.pipeline.dataset.captions import UNKNOWN_ID
from vse.pipeline.errors import UserError
from vse.training.data.pairs import TokenIndices, encode_texts
from vse.training.kinds import BatchVectors, add_full_mask
from vse.training.use.model import TrainedRun, load_backbone_run

Query = str | Image.Image
"""A text, or a photo in RGB."""


@dataclass(frozen=True)
class EncodedQuery:
    """The embedding of a query.

    ``vectors`` : embedding on the CPU, a batch of 1.
    ``remark`` : message about words that are unknown to the model.
    """

    vectors: BatchVectors
    remark: str = ""


class QueryEncoder:
    """The networks that encode a query: those that computed the run's features, and then the run's encoders."""

    def __init__(self, trained: TrainedRun, split: str, weights_dir: Path | None = None) -> None:
        self._trained, self._split, self._weights_dir = trained, split, weights_dir

    def load(self, by_photo: bool) -> None:
        """Load the networks for photos or texts. Raises UserError if networks are missing, or cannot read such queries."""
        backbone = self._photo_backbone_encoder if by_photo else self._text_backbone_encoder
        if backbone is not None:
            backbone.load(by_photo)
        elif by_photo:
            _ = self._extractor
        else:
            _ = self._caption_encoder

    def encode(self, query: Query) -> EncodedQuery:
        """Return the embedding of a query. Raises UserError if the query has nothing to search for."""
        by_photo = isinstance(query, Image.Image)
        backbone = self._photo_backbone_encoder if by_photo else self._text_backbone_encoder
        if backbone is None:
            return self._encode_photo(query) if isinstance(query, Image.Image) else self._encode_text(query)
        features = backbone.encode(query)
        model, device = self._trained.model, self._trained.device
        embed = model.embed_images if by_photo else model.embed_captions
        with torch.inference_mode():
            embedded = tuple(part.cpu() for part in embed(*(part.to(device) for part in features.vectors)))
        return EncodedQuery(embedded, features.remark)

    @cached_property
    def _photo_backbone_encoder(self) -> QueryEncoder | None:
        return self._load_backbone_encoder(self._trained.image_cache)

    @cached_property
    def _text_backbone_encoder(self) -> QueryEncoder | None:
        return self._load_backbone_encoder(self._trained.caption_cache)

    def _load_backbone_encoder(self, cache: FeatureCache | None) -> QueryEncoder | None:
        backbone = None if cache is None else load_backbone_run(self._trained, cache, self._split)
        return None if backbone is None else QueryEncoder(backbone, self._split, self._weights_dir)

    @cached_property
    def _caption_encoder(self) -> TextInputEncoder | None:
        cache = self._trained.caption_cache
        return None if cache is None else load_text_input_encoder(cache, self._weights_dir, str(self._trained.device))

    @cached_property
    def _extractor(self) -> CnnExtractor:
        trained = self._trained
        own, sets = trained.model.cnn is not None, trained.image_cache.row_kind == "sets"
        return rebuild_cnn_extractor(
            trained.image_cache, self._weights_dir, str(trained.device), random_weights=own, allow_positions=sets
        )

    def _encode_text(self, text: str) -> EncodedQuery:
        trained, reader, remark = self._trained, self._caption_encoder, ""
        tokens = trained.split_into_words(text)
        as_written = trained.transformer is not None or (reader is not None and reader.reads_raw_text)
        if not (text.strip() if as_written else tokens):
            raise UserError(f"{text!r}: no word to search for")
        if trained.transformer is not None:
            if unknown := trained.transformer.find_unknown_words(text):
                remark = f"not known to the tokenizer of {trained.transformer.name}: {', '.join(unknown)}"
            inputs: BatchVectors = TokenIndices([text], trained.transformer, trained.device).read(np.zeros(1, np.int64))
        elif trained.caption_cache is None or reader is None:
            words = trained.vocabulary.encode(tokens)
            unknown = [token for token, number in zip(tokens, words[1:-1], strict=True) if number == UNKNOWN_ID]
            if unknown:
                remark = f"not a word of the training captions: {', '.join(unknown)}"
            inputs = torch.tensor([words], device=trained.device), torch.tensor([len(words)])
        else:
            inputs = encode_texts(trained.caption_cache, reader, [(text, tokens)], trained.device)
            if not inputs[0].any():
                raise UserError(f"{text!r}: none of its words is known to {trained.caption_cache.feature!r}")
        with torch.inference_mode():
            return EncodedQuery(tuple(part.cpu() for part in trained.model.embed_captions(*inputs)), remark)

    def _encode_photo(self, photo: Image.Image) -> EncodedQuery:
        trained, extractor = self._trained, self._extractor
        crops = extractor.prepare(photo, 0)[None]
        inputs: BatchVectors
        if trained.model.cnn is not None:
            inputs = (crops,)
        else:
            vectors = extractor.compute_features(crops)
            sets = trained.image_cache.row_kind == "sets"
            inputs = add_full_mask(vectors) if sets else (vectors if vectors.ndim == 2 else vectors.mean(1),)
        with torch.inference_mode():
            return EncodedQuery(
                tuple(part.cpu() for part in trained.model.embed_images(*(part.to(trained.device) for part in inputs)))
            )
