"""Localise phrases with a trained run: score the candidate boxes of a split, or find a phrase in a photo."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.files.phrase_scores import PhraseScores, write_phrase_scores
from vse.features.backbones.device import MEMORY_ADVICE, memory_guard
from vse.features.cache.feature_cache import FeatureCache, read_sources
from vse.features.cache.rows import sha256_bytes
from vse.features.data_checks import belongs_to_dataset
from vse.features.extractors.text import CaptionReader, load_caption_reader
from vse.pipeline.dataset.columns import IdIndex, caption_ids
from vse.pipeline.dataset.dataset import Dataset, phrase_texts
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import read_image_bytes
from vse.pipeline.files.outputs import check_output
from vse.training.data.images import Indices
from vse.training.data.pairs import Pairs, encode_like, images_of
from vse.training.models.build import Model
from vse.training.options import RunFiles, SearchRequest
from vse.training.phrases.localisation import PhraseSplit, PhraseVectors, score_candidates, scores_of_pairs, sentence_scores
from vse.training.phrases.pairs import PhrasePairs, check_phrase_cache
from vse.training.phrases.regions import BoxFeatures, RegionInputs
from vse.training.phrases.task import PhraseSettings, cached_phrases, phrase_model, scored_split
from vse.training.use.trained_run import OpenedRun, load_best, open_run

if TYPE_CHECKING:
    from vse.eval.search.top_k import PhraseCandidates

log = logging.getLogger(__name__)


class EncodedPhrases:
    """Phrases of another data set, encoded on access by the encoder of the model's training phrases.

    ``texts`` : the phrases, in the order of their indices.
    ``reader`` : the encoder that computed the cache of phrases on which the model was trained.
    ``cache`` : that cache.
    ``device`` : device of the vectors.
    """

    def __init__(self, texts: Sequence[str], reader: CaptionReader, cache: FeatureCache, device: torch.device) -> None:
        self._phrase_vectors, self._reader, self._cache, self._device = texts, reader, cache, device

    def read(self, indices: Indices) -> tuple[Tensor, ...]:
        texts = [self._phrase_vectors[number] for number in indices.tolist()]
        return encode_like(self._cache, self._reader, [(text, text.split(" ")) for text in texts], self._device)


@dataclass(frozen=True)
class ScoredBoxes:
    """The candidate boxes of a photo for a phrase, best first.

    Boxes are x1, y1, x2, y2 in pixels; x2 and y2 are exclusive.
    """

    boxes: Float[np.ndarray, "n 4"]
    scores: Float[np.ndarray, " n"]


def score_phrases(
    opened: OpenedRun, out: Path, split: str, places: RunFiles = RunFiles(), seen: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write the scores of each phrase of a split with the candidate boxes of its image, and return ``out``.

    ``seen`` is recorded in the file: the number of images of the split on which the run was trained, if any.
    """
    model, scored = _model_and_split(opened, split, places)
    pairs, scores = scored.pairs, score_candidates(model, scored)
    _check_finite(opened, scores)
    if lacking := int((scored.regions.candidates.counts[pairs.image_of] == 0).sum()):
        log.warning("%d phrases are of images without a candidate, and count as missed", lacking)
    written = PhraseScores(
        phrase_ids=pairs.phrase_ids,
        image_ids=pairs.image_ids[pairs.image_of],
        caption_ids=pairs.caption_ids,
        offsets=scored.offsets,
        scores=scores,
        boxes=scored.regions.candidates.boxes[scored.candidates],
        truth=pairs.truths,
        types=np.asarray(pairs.types, np.str_),
        dataset=opened.dataset.name,
        split=split,
        experiment=opened.experiment.name,
        seed=opened.record["seed"],
        provenance=json.dumps({**opened.provenance(out), **seen}, sort_keys=True),
        trained_on=opened.trained_on,
        **_phrase_hashes(opened, pairs),
    )
    return write_phrase_scores(out, written)


def score_sentences(
    opened: OpenedRun, out: Path, split: str, places: RunFiles = RunFiles(), seen: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write the scores of all captions of a split with all images, computed from the captions' phrases, and return ``out``.

    ``seen`` : see :func:`score_phrases`.
    """
    model, scored = _model_and_split(opened, split, places)
    pairs = Pairs(images_of(opened.dataset, [split], opened.cache))
    number_of = {sentid: number for number, sentid in enumerate(pairs.caption_ids.tolist())}
    caption_of = np.asarray([number_of[sentid] for sentid in scored.pairs.caption_ids.tolist()], np.int64)
    scores = sentence_scores(model, scored, caption_of, len(pairs))
    _check_finite(opened, scores)
    written = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        coco_ids=pairs.coco_ids,
        **opened.hashes(pairs.images),
        scores=scores,
        n_phrases=np.bincount(caption_of, minlength=len(pairs)),
        n_regions=scored.regions.candidates.counts,
        dataset=opened.dataset.name,
        split=split,
        experiment=opened.experiment.name,
        seed=opened.record["seed"],
        similarity=opened.experiment.model.similarity.name,
        provenance=json.dumps({**opened.provenance(out), **seen}, sort_keys=True),
        trained_on=opened.trained_on,
    )
    return write_embeddings(out, written)


def localise_phrase(
    run: Path, photo: Path, text: str, places: RunFiles = RunFiles(), device: str = "auto", unfinished: bool = True
) -> ScoredBoxes:
    """Return the candidate boxes of a photo for a phrase, best first, scored by a run that localises phrases.

    The photo must be an image of the data set of ``places.features``, by default of the run's features. It is recognised by
    its bytes. Raises UserError if it is another photo, or if no word of the phrase is known.
    """
    opened = open_run(run, places, device, unfinished)
    reading, phrases = _phrase_settings(opened), opened.caption_cache
    assert phrases is not None, "a run of phrases reads a cache of them"
    same = (read_sources(opened.cache) == sha256_bytes(read_image_bytes(photo))).all(1)
    if not same.any():
        raise UserError(
            f"{photo}: none of the images of {opened.cache.path}, so it has no candidate boxes; extract those of your album "
            "with the same settings, and name its cache with --features"
        )
    model = _best_model(opened, reading)
    reader = load_caption_reader(phrases, places.weights_dir, str(opened.device))
    asked = encode_like(phrases, reader, [(text.lower(), opened.words_of(text))], opened.device)
    if not text.strip() or not asked[0].any():
        raise UserError(f"{text!r}: none of its words is known to {phrases.feature!r}")
    candidates = BoxFeatures(opened.cache, opened.cache.ids[same][:1], opened.device)
    every = np.arange(len(candidates))
    with torch.inference_mode():
        regions = model.embed_images(RegionInputs(candidates, None, reading.coordinates, opened.device).read(every))[0]
        scores = scores_of_pairs(model, regions, model.embed_captions(*asked)[0], every, np.zeros_like(every))
    best = np.argsort(-scores, kind="stable")
    return ScoredBoxes(candidates.boxes[best], scores[best])


def _phrase_settings(opened: OpenedRun) -> PhraseSettings:
    reading = opened.experiment.solver
    if not isinstance(reading, PhraseSettings):
        raise UserError(f"{opened.folder.path}: matches images and captions, and does not localise phrases")
    return reading


def _model_and_split(opened: OpenedRun, split: str, places: RunFiles) -> tuple[Model, PhraseSplit]:
    reading, phrases = _phrase_settings(opened), opened.caption_cache
    assert phrases is not None, "a run of phrases reads a cache of them"
    model = _best_model(opened, reading)
    images = images_of(opened.dataset, [split], opened.cache)
    texts = _phrase_vectors(opened.dataset, phrases, places, opened.device)
    return model, scored_split(opened.dataset, images, opened.cache, texts, reading, opened.device)


def _check_finite(opened: OpenedRun, scores: Float[np.ndarray, "..."]) -> None:
    if not np.isfinite(scores).all():
        raise UserError(f"{opened.folder.path}: scores are not finite (NaN or infinite); nothing is written")


def _best_model(opened: OpenedRun, reading: PhraseSettings) -> Model:
    model = phrase_model(opened.experiment.model, reading, opened.cache, opened.caption_cache).to(opened.device)
    load_best(opened.folder, model)
    return model


def _phrase_hashes(opened: OpenedRun, pairs: PhrasePairs) -> dict[str, Any]:
    """Return the hashes of each phrase's photo and caption, as :class:`PhraseScores` stores them."""
    images = [opened.dataset.images[row] for row in opened.dataset.image_rows(pairs.image_ids).tolist()]
    hashes = opened.hashes(images)
    rows = {"photo_hashes": pairs.image_of, "caption_hashes": IdIndex(caption_ids(images)).find(pairs.caption_ids)}
    return {name: None if values is None else values[rows[name]] for name, values in hashes.items()}


def _phrase_vectors(dataset: Dataset, phrases: FeatureCache, places: RunFiles, device: torch.device) -> PhraseVectors:
    """Return the vectors of the phrases of a data set: from the cache, or for another data set from the same encoder."""
    if belongs_to_dataset(phrases, dataset):
        check_phrase_cache(phrases, dataset)
        return cached_phrases(phrases, device)
    return EncodedPhrases(
        phrase_texts(dataset), load_caption_reader(phrases, places.weights_dir, str(device)), phrases, device
    )


def find_phrase(
    run: Path,
    photo: Path,
    phrase: str,
    request: SearchRequest = SearchRequest(),
    places: RunFiles = RunFiles(),
    device: str = "auto",
) -> PhraseCandidates:
    """Return the candidate boxes of a photo for a phrase, best first. Raises UserError for options of a search in a split."""
    from vse.eval.search.top_k import PhraseCandidates  # imports faiss

    others = ("split", "corpus", "index", "index_type", "rerank")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(request, name) is not None]:
        raise UserError(f"--image searches one photo, and {given[0]} is of a split; leave it out")
    if request.html is not None:
        from vse.eval.report.pages import PHRASE_PAGE_KIND

        check_output(request.html, PHRASE_PAGE_KIND, [photo])
    with memory_guard(MEMORY_ADVICE):
        located = localise_phrase(run, photo, phrase, places, device)
    hit = PhraseCandidates(phrase, located.boxes, located.scores)
    if request.html is not None:
        from vse.eval.report.pages import write_phrase_page

        log.info("%s: the best box in the photo", write_phrase_page(request.html, photo, [hit], str(run)))
    return hit
