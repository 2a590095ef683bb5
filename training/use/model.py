"""Load the model of a trained run with the best weights, and encode a split, a new text or a new photo with this model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.features.data_checks import belongs_to_dataset
from vse.features.exchange.embeddings import read_backbone
from vse.features.extractors.cnn import CnnExtractor, rebuild_cnn_extractor
from vse.features.extractors.text import TextInputEncoder, load_text_input_encoder
from vse.pipeline.dataset.captions import PAD_ID, UNKNOWN_ID, Vocabulary
from vse.pipeline.errors import UserError
from vse.training.data.images import (
    CachedImageFeatures,
    EvaluationImages,
    PhotoFeatures,
    build_photo_crops,
    compute_photo_features,
)
from vse.training.data.pairs import (
    CaptionInputs,
    CaptionsEncodedOnRead,
    CaptionsLoadedAtFirstRead,
    Pairs,
    RaggedIndices,
    RetrievalSplit,
    TokenIndices,
    check_same_backbone,
    describe_model_inputs,
    encode_texts,
    load_caption_inputs,
    select_images_with_features,
)
from vse.training.kinds import BatchVectors, InputKind, to_input_kind
from vse.training.models.build import Model, TrainableCnn, build_model
from vse.training.models.encoders.recurrent import RecurrentSettings
from vse.training.models.recurrent_states import STEP_ROW_MULTIPLE
from vse.training.options import RunInputOptions
from vse.training.use.open_run import OpenedRun, load_weights, open_run


@dataclass(frozen=True)
class TrainedRun(OpenedRun):
    """An opened run with its trained model, and with the images and captions of a split as inputs of the model."""

    transformer: Transformer | None
    vocabulary: Vocabulary
    model: Model
    split: RetrievalSplit
    weights_sha256: str
    vocabulary_sha256: str


def load_run(
    run: Path,
    split: str | None,
    files: RunInputOptions = RunInputOptions(),
    device: str = "auto",
    allow_unfinished: bool = False,
) -> TrainedRun:
    """Load a trained run or a packed model, and the images and captions of a split as inputs of the model.

    ``split`` may name several splits, such as ``train,val``; None loads all splits. ``files`` : options with input files that
    replace the files that the run names. Raises UserError if the training did not finish, unless ``allow_unfinished`` is set.
    """
    return load_opened_run(open_run(run, files, device, allow_unfinished), split, files)


def load_opened_run(
    opened: OpenedRun, split: str | None, files: RunInputOptions = RunInputOptions(), last_epoch: bool = False
) -> TrainedRun:
    """Load the model of an opened run, and the images and captions of a split as inputs of the model.

    ``split`` may name several splits, such as ``train,val``; None loads all splits. ``files`` : options with input files that
    replace the files that the run names. The model has the best weights or, with ``last_epoch``, those of the last epoch.
    """
    folder, experiment, dataset, where = opened.folder, opened.experiment, opened.dataset, opened.device
    cache, caption_cache = opened.image_cache, opened.caption_cache
    if experiment.solver.reads_phrases:
        raise UserError(f"{folder.path}: localises phrases, and embeds no images and captions; vse-embed writes its scores")
    splits = list(dataset.splits) if split is None else dataset.parse_splits(split)
    pairs = Pairs(select_images_with_features(dataset, splits, cache) if splits else ())
    images: EvaluationImages
    cnn = None
    if experiment.images.finetune:
        extractor = rebuild_cnn_extractor(cache, device=str(where), random_weights=True, allow_positions=True)
        cnn = TrainableCnn(extractor, experiment.images.batch_norm)
        images = build_photo_crops(extractor, dataset, pairs.images, experiment.images)
    elif cache.has_rows:
        images = CachedImageFeatures(FeatureReader(cache, 0, mapped=False), pairs.image_ids, where)
    else:
        load = partial(rebuild_cnn_extractor, cache, files.weights_dir, str(where), allow_positions=True)
        images = PhotoFeatures([dataset.image_path(image) for image in pairs.images], pairs.image_ids, load)
    check_same_backbone(experiment.model, cache, caption_cache)
    vocabulary, vocabulary_sha256 = folder.read_vocabulary_with_sha256()
    encoder = experiment.model.caption_encoder
    transformer = folder.read_transformer() if encoder is not None and InputKind.TOKENS in encoder.input_kinds else None
    captions: CaptionInputs
    is_encoded = caption_cache is None or (
        caption_cache.has_rows
        and belongs_to_dataset(caption_cache, dataset)
        and (dataset.name == caption_cache.dataset or bool(np.isin(pairs.caption_ids, caption_cache.ids).all()))
    )
    if caption_cache is not None and not is_encoded:  # encode the captions with the encoder of the cache

        def open_encoder(cache: FeatureCache = caption_cache) -> CaptionInputs:
            reader = load_text_input_encoder(cache, files.weights_dir, str(where))
            return CaptionsEncodedOnRead(pairs.captions, reader, cache, where)

        captions = CaptionsLoadedAtFirstRead(to_input_kind(caption_cache.row_kind), open_encoder)
    else:
        read = partial(load_caption_inputs, caption_cache, transformer, vocabulary, pairs, where)
        captions = (
            read()
            if caption_cache is not None
            else CaptionsLoadedAtFirstRead(InputKind.TOKENS if transformer else InputKind.WORDS, read)
        )
    model = build_model(experiment.model, *describe_model_inputs(cache, caption_cache, transformer, vocabulary), cnn).to(where)
    weights_sha256 = load_weights(folder, model, last_epoch)
    return TrainedRun(
        **vars(opened),
        transformer=transformer,
        vocabulary=vocabulary,
        model=model,
        split=RetrievalSplit(pairs, images, captions),
        weights_sha256=weights_sha256,
        vocabulary_sha256=vocabulary_sha256,
    )


def load_backbone_run(trained: TrainedRun, cache: FeatureCache, split: str | None) -> TrainedRun | None:
    """Load the run whose embeddings are the features in ``cache`` (the backbone). Return None if no run computed the features.

    ``trained`` : run that reads the cache.
    ``split`` : split to load for the backbone; None: all splits.

    Raises UserError if the cache does not name the folder of the backbone, or if the weights in this folder have changed.
    """
    backbone = read_backbone(cache)
    if backbone is None:
        return None
    reason = (
        f"{trained.folder.path} compares embeddings by {backbone.experiment}, and a query of yours must go through that first"
    )
    if backbone.run_folder is None:
        raise UserError(f"{reason}; {cache.path} was made from files of embeddings, without the model")
    opened = load_run(backbone.run_folder, split, device=str(trained.device), allow_unfinished=True)
    if opened.weights_sha256 != backbone.sha256:
        raise UserError(
            f"{reason}; {backbone.run_folder} has other weights than those that made {cache.path}: train both again"
        )
    return opened


_VECTORISED_NUMBERS = 32  # torch rounds the end of a row differently if the length is not a multiple of this number
_MAX_GROUP_WORDS = sum(range(STEP_ROW_MULTIPLE + 1))  # most words of texts that are encoded together; see the check below
_MAX_QUOTED_LENGTH = 80  # characters of a query in an error message
Query = str | Image.Image
"""A text, or a photo in RGB."""


@dataclass(frozen=True)
class EncodedQuery:
    """The embedding of a query, or the embeddings of several texts.

    ``vectors`` : embeddings on the CPU. A single query is a batch of 1.
    ``remark`` : message about words that are unknown to the model, or an empty string.
    """

    vectors: BatchVectors
    remark: str = ""


class QueryEncoder:
    """The networks that encode a new text or photo with a run. A network is loaded when it is first needed.

    First, the networks that computed the run's features compute the features of the query. Then the encoders of the run read
    these features. If the features are embeddings by another run (the backbone), the query encoder of that run computes them.

    ``split`` : split to load for the backbone; None: all splits.
    ``weights_dir`` : folder of pretrained networks.
    """

    def __init__(self, trained: TrainedRun, split: str | None, weights_dir: Path | None = None) -> None:
        self._trained, self._split, self._weights_dir = trained, split, weights_dir

    def load(self, by_photo: bool) -> None:
        """Load the networks for photos (``by_photo``) or for texts. Raises UserError if they are missing or unsuitable."""
        backbone = self._photo_backbone_encoder if by_photo else self._text_backbone_encoder
        if backbone is not None:
            backbone.load(by_photo)
        elif by_photo:
            _ = self._extractor
        else:
            _ = self._caption_input_encoder

    def encode(self, query: Query) -> EncodedQuery:
        """Return the embedding of a query. Raises UserError if a text has no word, or no word that the model knows."""
        if isinstance(query, str):
            (self._text_backbone_encoder or self)._check_has_known_word(query)
            return self.encode_texts([query])
        if self._photo_backbone_encoder is None:
            return self._encode_photo(query)
        return self._embed_features(self._photo_backbone_encoder.encode(query), self._trained.model.embed_images)

    def encode_all(self, queries: Sequence[Query]) -> list[EncodedQuery | UserError]:
        """Return the embedding of each query, or the error that :meth:`encode` would raise for the query.

        Texts are encoded in groups if their embeddings stay bit-identical (:attr:`encodes_texts_together`).
        """
        encoded: dict[int, EncodedQuery | UserError] = {}
        group: list[int] = []
        n_words = 0
        for position, query in enumerate(queries):
            try:
                if isinstance(query, str) and len(queries) > 1 and self.encodes_texts_together:
                    self._check_has_known_word(query)
                    self._check_has_word(query)
                    words = len(self._trained.split_into_words(query))
                    if group and (len(group) == STEP_ROW_MULTIPLE or n_words + words > _MAX_GROUP_WORDS):
                        encoded |= self._encode_group(queries, group)
                        group, n_words = [], 0
                    group.append(position)
                    n_words += words
                else:
                    encoded[position] = self.encode(query)
            except UserError as error:
                encoded[position] = error
        encoded |= self._encode_group(queries, group)
        return [encoded[position] for position in range(len(queries))]

    @cached_property
    def encodes_texts_together(self) -> bool:
        """True if the embedding of a text is bit-identical when it is encoded alone and in a group of texts.

        This is possible only on a CPU and for a GRU or LSTM. For 1 to 16 texts, the products of their states have the same
        shape (see :mod:`vse.training.models.recurrent_states`). But the product of the word vectors with the input weights has
        more rows for more different words, and a library may round a larger product differently. Therefore 16 texts of 1 to
        16 words are encoded alone, and the longest 2, 4, 8 and 16 of them together, and the embeddings are compared.
        """
        trained, settings = self._trained, self._trained.experiment.model.caption_encoder
        if (
            not isinstance(settings, RecurrentSettings)
            or trained.caption_cache is not None
            or (settings.states, settings.head) != ("last", None)
            or trained.device.type != "cpu"
            or trained.model.dim % _VECTORISED_NUMBERS
            or len(trained.vocabulary.words) < STEP_ROW_MULTIPLE
        ):
            return False
        words = cycle(trained.vocabulary.words[-_MAX_GROUP_WORDS:])
        texts = [" ".join(islice(words, n)) for n in range(1, STEP_ROW_MULTIPLE + 1)]
        alone = torch.cat([self._encode_texts([text], allow_unknown=True).vectors[0] for text in texts])
        return all(
            torch.equal(self._encode_texts(texts[-n:], allow_unknown=True).vectors[0], alone[-n:]) for n in (2, 4, 8, 16)
        )

    def _encode_group(self, queries: Sequence[Query], positions: Sequence[int]) -> dict[int, EncodedQuery | UserError]:
        """Encode the texts at these positions of ``queries`` together, and return the embeddings by position."""
        texts = [str(queries[position]) for position in positions]
        if not texts:
            return {}
        (vectors,) = self._encode_texts(texts, allow_unknown=False).vectors
        return {
            position: EncodedQuery((vectors[row : row + 1],), self._describe_unknown_words([text]))
            for row, (position, text) in enumerate(zip(positions, texts, strict=True))
        }

    def encode_texts(self, texts: Sequence[str], allow_unknown: bool = False) -> EncodedQuery:
        """Return the embeddings of texts.

        Raises UserError if a text has no word. Also raises UserError if the run's caption feature, such as TF-IDF, knows no
        word of a text, unless ``allow_unknown`` is set.
        """
        backbone = self._text_backbone_encoder
        if backbone is None:
            return self._encode_texts(texts, allow_unknown)
        return self._embed_features(backbone.encode_texts(texts, allow_unknown), self._trained.model.embed_captions)

    def require_caption_encoder(self) -> TextInputEncoder:
        """Return the encoder that computed the run's caption cache. Raises UserError if the encoder is missing."""
        assert self._caption_input_encoder is not None, "the run reads captions as words or tokens"
        return self._caption_input_encoder

    def _embed_features(self, features: EncodedQuery, embed: Callable[..., BatchVectors]) -> EncodedQuery:
        with torch.inference_mode():
            embedded = tuple(part.cpu() for part in embed(*(part.to(self._trained.device) for part in features.vectors)))
        return EncodedQuery(embedded, features.remark)

    @cached_property
    def _photo_backbone_encoder(self) -> QueryEncoder | None:
        return self._load_backbone_encoder(self._trained.image_cache)

    @cached_property
    def _text_backbone_encoder(self) -> QueryEncoder | None:
        return self._load_backbone_encoder(self._trained.caption_cache)

    def _load_backbone_encoder(self, cache: FeatureCache | None) -> QueryEncoder | None:
        """Return the query encoder of the run that computed the features in a cache, or None if no run computed them."""
        backbone = None if cache is None else load_backbone_run(self._trained, cache, self._split)
        return None if backbone is None else QueryEncoder(backbone, self._split, self._weights_dir)

    @cached_property
    def _caption_input_encoder(self) -> TextInputEncoder | None:
        cache = self._trained.caption_cache
        return None if cache is None else load_text_input_encoder(cache, self._weights_dir, str(self._trained.device))

    @cached_property
    def _extractor(self) -> CnnExtractor:
        trained = self._trained
        trains_cnn, reads_sets = trained.model.cnn is not None, trained.image_cache.row_kind == "sets"
        return rebuild_cnn_extractor(
            trained.image_cache, self._weights_dir, str(trained.device), random_weights=trains_cnn, allow_positions=reads_sets
        )

    def _check_has_known_word(self, text: str) -> None:
        trained = self._trained
        words = text.split() if trained.transformer is not None else trained.list_unicode_words(text)
        if words and "".join(self._list_unknown_words(text)) == "".join(words):
            raise UserError(f"{_quote(text)}: none of its words is {self._describe_known_words()}")

    def _check_has_word(self, text: str) -> None:
        trained, reader = self._trained, self._caption_input_encoder
        as_written = trained.transformer is not None or (reader is not None and reader.reads_raw_text)
        if not (text.strip() if as_written else trained.list_unicode_words(text)):
            raise UserError(f"{_quote(text)}: no word to search for")

    def _describe_unknown_words(self, texts: Sequence[str]) -> str:
        """Return a message that lists the words of the texts that the model does not know, or an empty string."""
        unknown = ", ".join(dict.fromkeys(word for text in texts for word in self._list_unknown_words(text)))
        return f"not {self._describe_known_words()}: {unknown}" if unknown else ""

    def _list_unknown_words(self, text: str) -> list[str]:
        """Return the words of a text that the model does not know, or no words if the run reads a caption cache."""
        trained = self._trained
        if trained.transformer is not None:
            return trained.transformer.find_unknown_words(text)
        if trained.caption_cache is not None:
            return []
        return [word for word in trained.list_unicode_words(text) if trained.vocabulary.encode([word])[1] == UNKNOWN_ID]

    def _describe_known_words(self) -> str:
        transformer = self._trained.transformer
        return "a word of the training captions" if transformer is None else f"known to the tokenizer of {transformer.name}"

    def _encode_texts(self, texts: Sequence[str], allow_unknown: bool) -> EncodedQuery:
        trained, reader = self._trained, self._caption_input_encoder
        tokens = [trained.split_into_words(text) for text in texts]
        for text in texts:
            self._check_has_word(text)
        remark = self._describe_unknown_words(texts)
        inputs: BatchVectors
        if trained.transformer is not None:
            inputs = TokenIndices(texts, trained.transformer, trained.device).read(np.arange(len(texts)))
        elif trained.caption_cache is None or reader is None:
            indices = [trained.vocabulary.encode(words) for words in tokens]
            padded, lengths = RaggedIndices(indices).pad(np.arange(len(texts)), PAD_ID)
            inputs = torch.from_numpy(padded).to(trained.device), torch.from_numpy(lengths)
        else:
            inputs = encode_texts(trained.caption_cache, reader, list(zip(texts, tokens, strict=True)), trained.device)
            for text, vector in zip(texts, inputs[0], strict=True):
                if not (allow_unknown or vector.any()):
                    raise UserError(f"{_quote(text)}: none of its words is known to {trained.caption_cache.feature!r}")
        with torch.inference_mode():
            return EncodedQuery(tuple(part.cpu() for part in trained.model.embed_captions(*inputs)), remark)

    def _encode_photo(self, photo: Image.Image) -> EncodedQuery:
        trained, extractor = self._trained, self._extractor
        crops = extractor.prepare(photo, 0)[None]
        inputs = (crops,) if trained.model.cnn is not None else compute_photo_features(extractor, crops)
        with torch.inference_mode():
            return EncodedQuery(
                tuple(part.cpu() for part in trained.model.embed_images(*(part.to(trained.device) for part in inputs)))
            )


def _quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED_LENGTH else f"{text[:_MAX_QUOTED_LENGTH]}…")
