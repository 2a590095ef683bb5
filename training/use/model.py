"""Load the model of a trained run with its best weights, and a split as inputs of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vse.features.backbones.transformer import Transformer
from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.features.data_checks import belongs_to_dataset
from vse.features.exchange.embeddings import read_backbone
from vse.features.extractors.cnn import rebuild_cnn_extractor
from vse.features.extractors.text import load_text_input_encoder
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.errors import UserError
from vse.training.data.images import CachedImageFeatures, EvaluationImages, PhotoFeatures, build_photo_crops
from vse.training.data.pairs import (
    CaptionInputs,
    CaptionsEncodedOnRead,
    CaptionsLoadedAtFirstRead,
    Pairs,
    RetrievalSplit,
    select_images_with_features,
)
from vse.training.kinds import InputKind, to_input_kind
from vse.training.model_inputs import check_same_backbone, describe_model_inputs, load_caption_inputs
from vse.training.models.build import Model, build_model
from vse.training.models.trainable_cnn import TrainableCnn
from vse.training.options import RunFileOptions
from vse.training.use.open_run import OpenedRun, load_weights, open_run


@dataclass(frozen=True)
class TrainedRun(OpenedRun):
    """An opened run with its model, which has the best weights, and a split as inputs of the model."""

    transformer: Transformer | None
    vocabulary: Vocabulary
    model: Model
    split: RetrievalSplit
    weights_sha256: str
    vocabulary_sha256: str


def load_run(
    run: Path,
    split: str | None,
    files: RunFileOptions = RunFileOptions(),
    device: str = "auto",
    allow_unfinished: bool = False,
) -> TrainedRun:
    """Load a trained run or a packed model, and a split or (None) all splits as inputs of the model.

    For ``files`` see :class:`RunFileOptions`.

    ``split`` may name several splits, see :meth:`vse.pipeline.dataset.dataset.Dataset.parse_splits`.
    Raises UserError if the training did not finish, unless ``allow_unfinished`` is set.
    """
    return load_opened_run(open_run(run, files, device, allow_unfinished), split, files)


def load_opened_run(
    opened: OpenedRun, split: str | None, files: RunFileOptions = RunFileOptions(), last_epoch: bool = False
) -> TrainedRun:
    """Load the model of an opened run, and a split as inputs of the model; see :func:`load_run`.

    The model has the best weights or, with ``last_epoch``, those of the last epoch.
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
    if caption_cache is not None and not is_encoded:  # its encoder reads any captions

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
    as_read = RetrievalSplit(pairs, images, captions)
    return TrainedRun(
        **vars(opened),
        transformer=transformer,
        vocabulary=vocabulary,
        model=model,
        split=as_read,
        weights_sha256=weights_sha256,
        vocabulary_sha256=vocabulary_sha256,
    )


def load_backbone_run(trained: TrainedRun, cache: FeatureCache, split: str | None) -> TrainedRun | None:
    """Load the run whose embeddings are the features in a cache, or return None if an extractor computed the features.

    Raises UserError if the cache does not name the run, or if the run has other weights now.
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
