"""Localise phrases with a trained run: score the candidate boxes of a split, or find a phrase in one photo."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.files.phrase_scores import PhraseScores, write_phrase_scores
from vse.features.backbones.device import OUT_OF_MEMORY_ADVICE, wrap_memory_errors
from vse.features.cache.feature_cache import FeatureCache, read_input_hashes
from vse.features.cache.rows import sha256_bytes
from vse.features.data_checks import belongs_to_dataset
from vse.features.extractors.text import TextInputEncoder, load_text_input_encoder
from vse.pipeline.dataset.columns import IdIndex, caption_ids
from vse.pipeline.dataset.dataset import Dataset, list_phrase_texts
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_bytes
from vse.pipeline.files.outputs import check_output
from vse.training.data.images import Indices
from vse.training.data.pairs import Pairs, encode_texts, select_images_with_features
from vse.training.models.build import Model
from vse.training.options import RunInputOptions, RunSearchOptions
from vse.training.phrases.arrays import PhraseArrays, RegionFeatures, RegionInputs, check_phrase_cache
from vse.training.phrases.task import (
    PhraseInputs,
    PhraseSettings,
    PhraseSplit,
    build_evaluation_split,
    build_phrase_model,
    compute_sentence_scores,
    open_phrase_features,
    score_candidates,
    score_embedded_pairs,
)
from vse.training.use.open_run import OpenedRun, load_weights, open_run

if TYPE_CHECKING:
    from vse.eval.search.top_k import PhraseCandidates

log = logging.getLogger(__name__)


class PhrasesEncodedOnRead:
    """Phrases that are encoded when they are read, by the encoder that computed the vectors of the training phrases.

    ``texts`` : texts of the phrases, in the order of their indices.
    ``encoder`` : encoder that computed the vectors in ``cache``.
    ``cache`` : cache of the training phrases.
    ``device`` : device of the returned vectors.
    """

    def __init__(self, texts: Sequence[str], encoder: TextInputEncoder, cache: FeatureCache, device: torch.device) -> None:
        self._texts, self._encoder, self._cache, self._device = texts, encoder, cache, device

    def read(self, indices: Indices) -> tuple[Tensor, ...]:
        texts = [self._texts[index] for index in indices.tolist()]
        return encode_texts(self._cache, self._encoder, [(text, text.split(" ")) for text in texts], self._device)


def save_phrase_scores(
    opened: OpenedRun,
    out: Path,
    split: str,
    files: RunInputOptions = RunInputOptions(),
    leak_entry: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write the scores of each phrase of a split with the candidate boxes in the phrase's image, and return ``out``.

    ``leak_entry`` : provenance entry with the number of images of the split that were training images; empty without any.
    """
    model, scored = _load_model_and_split(opened, split, files)
    pairs, scores = scored.phrases, score_candidates(model, scored)
    _check_finite(opened, scores)
    if n_missed := int((scored.region_inputs.candidates.region_counts[pairs.image_indices] == 0).sum()):
        log.warning("%d phrases are of images without a candidate, and count as missed", n_missed)
    written = PhraseScores(
        phrase_ids=pairs.phrase_ids,
        image_ids=pairs.image_ids[pairs.image_indices],
        caption_ids=pairs.caption_ids,
        offsets=scored.score_offsets,
        scores=scores,
        boxes=scored.region_inputs.candidates.boxes[scored.candidate_indices],
        truth=pairs.truth_boxes,
        types=np.asarray(pairs.phrase_types, np.str_),
        dataset=opened.dataset.name,
        split=split,
        experiment=opened.experiment.name,
        seed=opened.record["seed"],
        provenance=json.dumps({**opened.build_provenance(out), **leak_entry}, sort_keys=True),
        trained_on=opened.other_training_data_name,
        **_find_phrase_hashes(opened, pairs),
    )
    return write_phrase_scores(out, written)


def save_sentence_scores(
    opened: OpenedRun,
    out: Path,
    split: str,
    files: RunInputOptions = RunInputOptions(),
    leak_entry: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write the score of each caption of a split with each image, and return ``out``.

    The score of a caption is computed from the scores of its phrases.

    ``leak_entry`` : provenance entry with the number of images of the split that were training images; empty without any.
    """
    model, scored = _load_model_and_split(opened, split, files)
    pairs = Pairs(select_images_with_features(opened.dataset, [split], opened.image_cache))
    index_of_caption = {sentid: index for index, sentid in enumerate(pairs.caption_ids.tolist())}
    caption_indices = np.asarray([index_of_caption[sentid] for sentid in scored.phrases.caption_ids.tolist()], np.int64)
    scores = compute_sentence_scores(model, scored, caption_indices, len(pairs))
    _check_finite(opened, scores)
    written = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        coco_ids=pairs.coco_ids,
        **opened.find_photo_and_caption_hashes(pairs.images),
        scores=scores,
        n_phrases=np.bincount(caption_indices, minlength=len(pairs)),
        n_regions=scored.region_inputs.candidates.region_counts,
        dataset=opened.dataset.name,
        split=split,
        experiment=opened.experiment.name,
        seed=opened.record["seed"],
        similarity=opened.experiment.model.similarity.name,
        provenance=json.dumps({**opened.build_provenance(out), **leak_entry}, sort_keys=True),
        trained_on=opened.other_training_data_name,
    )
    return write_embeddings(out, written)


def _rank_boxes(
    run: Path, photo: Path, text: str, files: RunInputOptions, device: str
) -> tuple[Float[np.ndarray, "n 4"], Float[np.ndarray, " n"]]:
    """Return the candidate boxes of a photo and their scores for a phrase, best first."""
    opened = open_run(run, files, device, allow_unfinished=True)
    phrase_settings, phrases = _require_phrase_settings(opened), opened.caption_cache
    assert phrases is not None, "a run of phrases reads a cache of them"
    same = (read_input_hashes(opened.image_cache) == sha256_bytes(read_image_bytes(photo))).all(1)
    if not same.any():
        raise UserError(
            f"{photo}: none of the images of {opened.image_cache.path}, so it has no candidate boxes; extract those of your "
            "album with the same settings, and name its cache with --features"
        )
    model = _load_best_model(opened, phrase_settings)
    reader = load_text_input_encoder(phrases, files.weights_dir, str(opened.device))
    inputs = encode_texts(phrases, reader, [(text.lower(), opened.split_into_words(text))], opened.device)
    if not text.strip() or not inputs[0].any():
        raise UserError(f"{text!r}: none of its words is known to {phrases.feature!r}")
    candidates = RegionFeatures(opened.image_cache, opened.image_cache.ids[same][:1], opened.device)
    all_rows = np.arange(len(candidates))
    with torch.inference_mode():
        region_inputs = RegionInputs(candidates, None, phrase_settings.coordinates, opened.device)
        regions = model.embed_images(region_inputs.read(all_rows))[0]
        scores = score_embedded_pairs(model, regions, model.embed_captions(*inputs)[0], all_rows, np.zeros_like(all_rows))
    best = np.argsort(-scores, kind="stable")
    return candidates.boxes[best], scores[best]


def _require_phrase_settings(opened: OpenedRun) -> PhraseSettings:
    phrase_settings = opened.experiment.solver
    if not isinstance(phrase_settings, PhraseSettings):
        raise UserError(f"{opened.folder.path}: matches images and captions, and does not localise phrases")
    return phrase_settings


def _load_model_and_split(opened: OpenedRun, split: str, files: RunInputOptions) -> tuple[Model, PhraseSplit]:
    phrase_settings, phrases = _require_phrase_settings(opened), opened.caption_cache
    assert phrases is not None, "a run of phrases reads a cache of them"
    model = _load_best_model(opened, phrase_settings)
    images = select_images_with_features(opened.dataset, [split], opened.image_cache)
    texts = _open_phrase_inputs(opened.dataset, phrases, files, opened.device)
    return model, build_evaluation_split(opened.dataset, images, opened.image_cache, texts, phrase_settings, opened.device)


def _check_finite(opened: OpenedRun, scores: Float[np.ndarray, "..."]) -> None:
    if not np.isfinite(scores).all():
        raise UserError(f"{opened.folder.path}: scores are not finite (NaN or infinite); nothing is written")


def _load_best_model(opened: OpenedRun, phrase_settings: PhraseSettings) -> Model:
    model = build_phrase_model(opened.experiment.model, phrase_settings, opened.image_cache, opened.caption_cache).to(
        opened.device
    )
    load_weights(opened.folder, model)
    return model


def _find_phrase_hashes(opened: OpenedRun, phrases: PhraseArrays) -> dict[str, Any]:
    """Return the hashes of the image file and of the caption of each phrase, as ``photo_hashes`` and ``caption_hashes``.

    ``photo_hashes`` is None if the hash of an image file is not known.
    """
    images = [opened.dataset.images[row] for row in opened.dataset.find_image_rows(phrases.image_ids).tolist()]
    hashes = opened.find_photo_and_caption_hashes(images)
    rows = {
        "photo_hashes": phrases.image_indices,
        "caption_hashes": IdIndex(caption_ids(images)).find_rows(phrases.caption_ids),
    }
    return {name: None if values is None else values[rows[name]] for name, values in hashes.items()}


def _open_phrase_inputs(dataset: Dataset, phrases: FeatureCache, files: RunInputOptions, device: torch.device) -> PhraseInputs:
    """Return the vectors of the phrases of a data set, from the cache ``phrases`` if it belongs to this data set.

    Otherwise, the encoder that computed this cache encodes the phrases.
    """
    if belongs_to_dataset(phrases, dataset):
        check_phrase_cache(phrases, dataset)
        return open_phrase_features(phrases, device)
    return PhrasesEncodedOnRead(
        list_phrase_texts(dataset), load_text_input_encoder(phrases, files.weights_dir, str(device)), phrases, device
    )


def find_phrase(
    run: Path,
    photo: Path,
    phrase: str,
    request: RunSearchOptions = RunSearchOptions(),
    files: RunInputOptions = RunInputOptions(),
    device: str = "auto",
) -> PhraseCandidates:
    """Return the candidate boxes in a photo with their scores for a phrase, best first.

    The boxes are read from the feature cache. Raises UserError if the cache has no image whose file has the same bytes as
    ``photo``, if no word of the phrase is known, or if ``request`` has an option that applies only to a search in a split.
    """
    from vse.eval.search.top_k import PhraseCandidates  # imports faiss

    split_options = ("split", "corpus", "index", "index_type", "rerank")
    if given := [f"--{name.replace('_', '-')}" for name in split_options if getattr(request, name) is not None]:
        raise UserError(f"--image searches one photo, and {given[0]} is of a split; leave it out")
    if request.html is not None:
        from vse.eval.report.pages import PHRASE_PAGE_KIND

        check_output(request.html, PHRASE_PAGE_KIND, [photo])
    with wrap_memory_errors(OUT_OF_MEMORY_ADVICE):
        boxes, scores = _rank_boxes(run, photo, phrase, files, device)
    hit = PhraseCandidates(phrase, boxes, scores)
    if request.html is not None:
        from vse.eval.report.pages import write_phrase_page

        log.info("%s: the best box in the photo", write_phrase_page(request.html, photo, [hit], str(run)))
    return hit
