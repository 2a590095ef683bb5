"""Build the task of a solver (pairs, images, captions and model) from the input files of a run."""

from __future__ import annotations

import logging

import numpy as np
import torch

from vse.features.cache.feature_cache import FeatureCache
from vse.features.cache.reader import FeatureReader
from vse.features.extractors.cnn import read_cnn_config, rebuild_cnn_extractor
from vse.features.extractors.text import load_text_input_encoder
from vse.pipeline.dataset.captions import Vocabulary
from vse.pipeline.dataset.columns import count_languages
from vse.pipeline.errors import UserError
from vse.pipeline.progress import progress_bar
from vse.training.data.images import CachedImageFeatures, EvaluationImages, TrainingImages, build_photo_crops
from vse.training.data.pairs import (
    CaptionInputs,
    CaptionsWithChangedTexts,
    Pairs,
    RetrievalSplit,
    check_same_backbone,
    describe_model_inputs,
    encode_texts,
    load_caption_inputs,
    select_images_with_features,
)
from vse.training.experiment import ExperimentConfig
from vse.training.kinds import InputKind
from vse.training.models.build import MODEL_PARTS, Model, TrainableCnn, build_model
from vse.training.phrases.task import (
    PhraseSettings,
    PhraseTask,
    build_phrase_model,
    build_training_split,
    build_validation_split,
    check_phrase_inputs,
)
from vse.training.processes.group import ProcessGroup
from vse.training.run.folder import RunFolder
from vse.training.run.inputs import RunInputs, initialise_word_embeddings
from vse.training.solvers.base import HardNegatives, RetrievalTask, TrainingTask

log = logging.getLogger(__name__)
_TEXTS_PER_BLOCK = 1000


def prepare_task(
    experiment: ExperimentConfig, inputs: RunInputs, seed: int, processes: ProcessGroup, log_negatives: int
) -> tuple[TrainingTask, Vocabulary]:
    """Build the task of a solver (model, data and settings) from the input files of a run. Return task and vocabulary.

    ``log_negatives`` : number of hardest negatives to list for each epoch and direction; 0 for no list.
    """
    if isinstance(experiment.solver, PhraseSettings):
        if log_negatives:
            raise UserError("--log-negatives lists captions and images, and training on phrases ranks neither")
        if inputs.noise is not None:
            raise UserError("--noise makes pairs of images and captions wrong, and training on phrases reads none")
        if experiment.train.languages:
            raise UserError("train.languages selects captions, and training on phrases reads all of them; leave it out")
        return _prepare_phrase_task(experiment, experiment.solver, inputs, seed, processes)
    dataset, settings = inputs.dataset, experiment.train
    if settings.restval and "restval" not in dataset.splits:
        raise UserError(
            f"{dataset.path}: no images in split 'restval', which train.restval requires; "
            "--set train.restval=false trains without them"
        )
    splits = ["train", "restval"] if settings.restval else ["train"]
    if inputs.noise is not None and (unread := set(inputs.noise.splits).difference(splits)):
        raise UserError(f"{inputs.noise_file}: changes captions of split {min(unread)!r}, which this training does not read")
    pairs = Pairs(select_images_with_features(inputs.training_dataset, splits, inputs.image_cache, True, settings.languages))
    val = Pairs(select_images_with_features(dataset, ["val"], inputs.eval_image_cache, True, settings.languages))
    if not settings.languages and len(languages := count_languages(pairs.images)) > 1:
        log.info("trains on captions in %s; --languages chooses some of them", ", ".join(sorted(filter(None, languages))))
    if len(pairs) < 2:
        raise UserError(f"{dataset.path}: one training caption has no negatives; at least two are needed")
    if log_negatives and not (experiment.solver.uses_loss and experiment.loss.has_query_scores):
        name, ranks = experiment.solver.name, False
        if experiment.solver.uses_loss:
            name, ranks = experiment.loss.name, experiment.loss.is_ranking
        fault = "with loss.block keeps no scores" if ranks else "ranks nothing"
        raise UserError(f"--log-negatives lists what a ranking loss finds hardest; {name} {fault}")
    check_same_backbone(experiment.model, inputs.image_cache, inputs.caption_cache)
    if inputs.start_run is not None:
        vocabulary = inputs.start_run.read_vocabulary()
    else:
        vocabulary = Vocabulary.from_counts(pairs.count_words(), settings.min_count)
    images, val_images, cnn = _build_image_inputs(experiment, inputs, pairs, val, processes)
    used_gb = images.size_in_memory_gb if isinstance(images, CachedImageFeatures) else 0
    texts = inputs.caption_cache, inputs.transformer, vocabulary
    captions = load_caption_inputs(*texts, pairs, processes.device, _feature_memory_gb(experiment), used_gb)
    if inputs.noise is not None and inputs.noise.tokens and inputs.caption_cache is not None:
        captions = _apply_caption_noise(captions, pairs, inputs.caption_cache, inputs, processes.device)
    split = RetrievalSplit(val, val_images, load_caption_inputs(*texts, val, processes.device))
    torch.manual_seed(seed)
    model = build_model(experiment.model, *describe_model_inputs(inputs.image_cache, *texts), cnn).to(processes.device)
    if inputs.word_vector_file is not None:
        initialise_word_embeddings(model, vocabulary, inputs.word_vector_file)
    if inputs.start_run is not None:
        _load_and_freeze_start_weights(model, inputs.start_run, inputs, experiment)
    hard_negatives = HardNegatives(log_negatives, pairs.captions) if log_negatives else None
    task = RetrievalTask(
        settings=settings,
        loss=experiment.loss,
        loss_warmup=experiment.warmup,
        pairs=pairs,
        image_inputs=images,
        caption_inputs=captions,
        val_split=split,
        model=model,
        seed=seed,
        processes=processes,
        hard_negatives=hard_negatives,
        adversary=experiment.adversary,
    )
    return task, vocabulary


def _apply_caption_noise(
    cached: CaptionInputs, pairs: Pairs, cache: FeatureCache, inputs: RunInputs, device: torch.device
) -> CaptionInputs:
    """Return the captions of ``pairs`` as inputs of the model. Some captions have wrong words, as the noise file demands.

    ``cached`` : vectors of the same captions with the correct words, from ``cache``. Only captions with wrong words are
        encoded again.
    """
    assert inputs.noise is not None
    if cached.kind != InputKind.VECTORS:
        raise UserError(
            f"{inputs.noise_file}: has wrong words, but {cache.path} holds {cache.describe()}; train on words, or on a cache "
            "with one vector for each caption"
        )
    encoder = load_text_input_encoder(cache, inputs.weights_dir, str(device))
    rows = np.flatnonzero(np.isin(pairs.caption_ids, inputs.noise.sentids))
    texts = [(pairs.captions[row].raw, pairs.captions[row].tokens) for row in rows]
    parts = [
        encode_texts(cache, encoder, texts[start : start + _TEXTS_PER_BLOCK], device)[0]
        for start in progress_bar(range(0, len(texts), _TEXTS_PER_BLOCK), desc="captions with wrong words", unit="block")
    ]
    return CaptionsWithChangedTexts(cached, rows, torch.cat(parts))


def _prepare_phrase_task(
    experiment: ExperimentConfig, phrase_settings: PhraseSettings, inputs: RunInputs, seed: int, processes: ProcessGroup
) -> tuple[TrainingTask, Vocabulary]:
    check_phrase_inputs(inputs)
    settings, device = experiment.train, processes.device
    train, truth_indices = build_training_split(inputs, phrase_settings, settings, device)
    val = build_validation_split(inputs, phrase_settings, settings, device)
    torch.manual_seed(seed)
    model = build_phrase_model(experiment.model, phrase_settings, inputs.image_cache, inputs.caption_cache).to(device)
    if inputs.start_run is not None:
        _load_and_freeze_start_weights(model, inputs.start_run, inputs, experiment)
    words = (caption.tokens for image in inputs.dataset.split("train") for caption in image.captions)
    task = PhraseTask(
        settings=settings,
        loss=experiment.loss,
        loss_warmup=experiment.warmup,
        model=model,
        seed=seed,
        processes=processes,
        train_split=train,
        truth_indices=truth_indices,
        val_split=val,
    )
    return task, Vocabulary.build(words, settings.min_count)


def _feature_memory_gb(experiment: ExperimentConfig) -> float:
    return experiment.train.memory_gb if experiment.train.features_in_memory else 0


def _build_image_inputs(
    experiment: ExperimentConfig, inputs: RunInputs, pairs: Pairs, val: Pairs, processes: ProcessGroup
) -> tuple[TrainingImages, EvaluationImages, TrainableCnn | None]:
    """Return the training and the validation images as inputs of the model, and the CNN that the run trains, or None."""
    settings, device = experiment.images, processes.device
    cached = CachedImageFeatures(FeatureReader(inputs.eval_image_cache, 0, mapped=False), val.image_ids, device)
    if settings.source == "cache":
        reader = FeatureReader(inputs.image_cache, 0, mapped=False)
        return CachedImageFeatures(reader, pairs.image_ids, device, _feature_memory_gb(experiment)), cached, None
    extractor = rebuild_cnn_extractor(
        inputs.image_cache, inputs.weights_dir, str(device), allow_positions=True, trainable=settings.finetune
    )
    if not settings.finetune:
        return build_photo_crops(extractor, inputs.dataset, pairs.images, settings, as_features=True), cached, None
    crops = build_photo_crops(extractor, inputs.dataset, pairs.images, settings)
    cnn = TrainableCnn(extractor, settings.batch_norm, settings.gradient_checkpointing, experiment.train.compile)
    val_config = read_cnn_config(inputs.eval_image_cache, allow_positions=True)
    return crops, build_photo_crops(extractor, inputs.dataset, val.images, settings, config=val_config), cnn


def _load_and_freeze_start_weights(model: Model, base: RunFolder, inputs: RunInputs, experiment: ExperimentConfig) -> None:
    """Load the best weights of the run ``base`` into the modules that the setting ``start_parts`` names (by default all).

    If ``base`` did not train the CNN, the CNN of ``model`` keeps its weights. With the setting ``freeze``, the loaded modules
    are not trained. Raises UserError if the weights do not fit the model, or if all modules would be frozen.
    """
    parts = experiment.start_parts or [part for part in MODEL_PARTS if getattr(model, part) is not None]
    if inputs.word_vector_file is not None and "caption_encoder" in parts:
        raise UserError(
            f"{inputs.word_vector_file}: the word embeddings are already loaded from {base.path}; remove the word vectors"
        )
    tokens = inputs.transformer if "caption_encoder" in parts else None
    if tokens is not None and base.read_transformer().tokenizer_json != tokens.tokenizer_json:
        raise UserError(f"{base.tokenizer_file}: not the tokenizer of {tokens.name}; start from a run of the same model")
    prefixes = tuple(f"{part}." for part in parts)
    best, sha256 = base.read_best_weights_with_sha256()
    if sha256 != inputs.start_weights_sha256:
        raise UserError(f"{base.best_weights_file}: was replaced during the start of this run; start it again")
    weights = {name: weight for name, weight in best.items() if name.startswith(prefixes)}
    expected = {name: weight for name, weight in model.state_dict().items() if name.startswith(prefixes)}
    wrong = [name for name in weights if name not in expected or expected[name].shape != weights[name].shape]
    missing = [name for name in expected if name not in weights and not name.startswith("cnn.")]
    if wrong or missing:
        raise UserError(
            f"{base.best_weights_file}: weights of another model ({(wrong + missing)[0]} does not fit); start from a run with "
            "the same model settings and a feature of the same length"
        )
    model.load_state_dict(weights, strict=False)
    if experiment.freeze:
        model.freeze(*parts)
        if not any(weight.requires_grad for weight in model.parameters()):
            raise UserError("freeze: no part of the model is left to train; list only the parts to freeze in start_parts")
