"""A trained run put to use: its model, and the file of a split's embeddings or scores that the evaluator reads."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vse.eval.files.embeddings import EMBEDDINGS, Embeddings, write_embeddings, write_scores
from vse.eval.files.phrase_scores import PHRASE_SCORES
from vse.features.backbones.transformer import Transformer
from vse.features.cache.reader import FeatureReader
from vse.features.data_checks import data_sums, holds_texts_of
from vse.features.extractors.cnn import rebuild_cnn_extractor
from vse.features.extractors.text import caption_reader
from vse.pipeline.dataset.captions import UNKNOWN, Vocabulary
from vse.pipeline.dataset.identity import data_differences, identity_of_images
from vse.pipeline.errors import UserError
from vse.pipeline.files.outputs import check_out
from vse.train.data.captions import CaptionInputs, CaptionsOnDemand, EncodedCaptions, TokenNumbers
from vse.train.data.images import CachedImages, EvaluationImages, photo_crops
from vse.train.data.pairs import Pairs, Split, images_of
from vse.train.kinds import Kind
from vse.train.models.build import Model, build_model
from vse.train.models.trainable_cnn import TrainableCnn
from vse.train.prepare import check_one_space, model_inputs, read_captions
from vse.train.run.folder import RunFolder
from vse.train.solvers.encode import PairScores, encode, pooled
from vse.train.use.localise import score_phrases, score_sentences
from vse.train.use.trained_run import OpenedRun, RunPlaces, identity_in, images_trained_on, load_best, open_run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun(OpenedRun):
    """A run's model with its best weights, and a split as that model reads it."""

    transformer: Transformer | None
    vocabulary: Vocabulary
    model: Model
    split: Split
    weights_sha256: str
    vocabulary_sha256: str


def load_run(
    run: Path, split: str | None, places: RunPlaces = RunPlaces(), device: str = "auto", unfinished: bool = False
) -> TrainedRun:
    """A trained run, and a split for it, or all of its data set (None); a run that trained its CNN reads the photos.

    ``places`` are where its caches and data set were moved, or those of another data set, made by the same extractors.
    :class:`UserError` if its training did not finish, unless ``unfinished`` ones will do.
    """
    return load_opened(open_run(run, places, device, unfinished), split, places)


def load_opened(opened: OpenedRun, split: str | None, places: RunPlaces = RunPlaces()) -> TrainedRun:
    """The model of an opened run, and a split for it; see :func:`load_run`."""
    folder, experiment, dataset, where = opened.folder, opened.experiment, opened.dataset, opened.device
    cache, caption_cache = opened.cache, opened.caption_cache
    if experiment.solver.reads_phrases:
        raise UserError(f"{folder.path}: localises phrases, and embeds no images and captions; vse-embed writes its scores")
    pairs = Pairs(images_of(dataset, list(dataset.splits) if split is None else [split], cache))
    images: EvaluationImages
    cnn = None
    if experiment.images.finetune:
        extractor = rebuild_cnn_extractor(cache, device=str(where), trained=True, positions=True)
        cnn = TrainableCnn(extractor, experiment.images.batch_norm)
        images = photo_crops(extractor, dataset, pairs.images, experiment.images)
    else:
        images = CachedImages(FeatureReader(cache, 0, mapped=False), pairs.image_ids, where)
    check_one_space(experiment.model, cache, caption_cache)
    vocabulary, vocabulary_sha256 = folder.read_vocabulary()
    encoder = experiment.model.caption_encoder
    transformer = folder.read_transformer() if encoder is not None and Kind.TOKENS in encoder.takes else None
    captions: CaptionInputs
    if caption_cache is not None and not holds_texts_of(caption_cache, dataset):  # its encoder reads any captions
        reader = caption_reader(caption_cache, places.weights_dir, str(where))
        captions = EncodedCaptions(pairs.captions, reader, caption_cache, where)
    else:
        read = partial(read_captions, caption_cache, transformer, vocabulary, pairs, where)
        captions = read() if caption_cache is not None else CaptionsOnDemand(Kind.TOKENS if transformer else Kind.WORDS, read)
    model = build_model(experiment.model, *model_inputs(cache, caption_cache, transformer, vocabulary), cnn).to(where)
    weights_sha256 = load_best(folder, model)
    as_read = Split(pairs, images, captions)
    return TrainedRun(
        **vars(opened),
        transformer=transformer,
        vocabulary=vocabulary,
        model=model,
        split=as_read,
        weights_sha256=weights_sha256,
        vocabulary_sha256=vocabulary_sha256,
    )


def embed_split(
    run: Path,
    out: Path | None = None,
    split: str = "test",
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
    unfinished: bool = False,
    leak: bool = False,
    sentences: bool = False,
) -> Path:
    """Write the embeddings of a split by the best weights of a run; returns ``out``. See :func:`load_run`.

    Without ``out`` that is ``<split>.h5`` in the run's folder or, of another data set, ``<dataset>_<split>.h5``.
    :class:`UserError` if the run was trained on images of that split, unless a ``leak`` is allowed.

    Of a run that localises phrases it is a file of phrase scores, see :func:`vse.train.use.localise.score_phrases`; with
    ``sentences`` ``<split>_sentences.h5``, scores of captions by their phrases, see
    :func:`vse.train.use.localise.score_sentences`.

    Of a model that scores every pair, the file has the scores, written block by block, of each direction if they depend on it,
    single vectors of captions for the protocol ``sentence``, and pooled vectors of both sides, for a re-ranking.
    """
    opened = open_run(run, places, device, unfinished)
    if out is None:
        name = f"{split}_sentences.h5" if sentences else f"{split}.h5"
        out = run / name if opened.trained_on is None else _name_of_other_data(opened, split, name)
    localises = opened.experiment.solver.reads_phrases
    kind = PHRASE_SCORES if localises and not sentences else EMBEDDINGS
    check_out(out, kind, [*RunFolder(run).files, *opened.inputs])
    restval = opened.experiment.train.restval
    n_seen = images_trained_on(opened.folder, restval, opened.cache, opened.dataset, split, leak)
    seen = {"images_trained_on": {"images": n_seen, "of": len(opened.dataset.split(split))}} if n_seen else {}
    if localises:
        write = score_sentences if sentences else score_phrases
        return write(opened, out, split, places, seen)
    if sentences:
        raise UserError(f"{run}: matches images and captions, and not phrases, whose scores --sentences are; leave it out")
    trained = load_opened(opened, split, places)
    if not len(trained.split.pairs):
        raise UserError(
            f"{trained.dataset.path}: no image of the split {split!r} has a caption; vse-search searches such images"
        )
    started = time.perf_counter()
    images, captions = encode(trained.model, trained.split, trained.device)
    provenance = {**opened.provenance(out), **seen}
    inputs = trained.split.captions
    inputs = inputs.inputs if isinstance(inputs, CaptionsOnDemand) else inputs
    if isinstance(inputs, TokenNumbers):
        provenance["cut_captions"] = inputs.n_cut
    elif trained.caption_cache is None:
        provenance["unknown_words"] = unknown_words(trained)
    for side, embedded in (("images", images), ("captions", captions)):
        if not torch.isfinite(embedded.vectors).all():
            raise UserError(f"{run}: embeddings of {side} are not finite (NaN or infinite); nothing is written")

    def said() -> str:
        cost = {**provenance["cost"], "embed_s": round(time.perf_counter() - started, 4)}
        return json.dumps({**provenance, "cost": cost}, sort_keys=True)

    pairs, similarity = trained.split.pairs, trained.experiment.model.similarity
    ranked_by, pairwise = similarity.ranked_by, trained.model.pairwise
    embeddings = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        images=None if pairwise else images.vectors.numpy(),
        captions=captions.vectors.numpy() if similarity.captions == Kind.VECTORS else None,
        pooled_images=pooled(images) if pairwise else None,
        pooled_captions=pooled(captions) if pairwise else None,
        dataset=trained.dataset.name,
        split=split,
        experiment=trained.experiment.name,
        seed=trained.record["seed"],
        similarity="cosine" if ranked_by is None else ranked_by,
        provenance=said(),
        trained_on=trained.trained_on,
        coco_ids=pairs.coco_ids,
        **trained.hashes(pairs.images),
    )
    if not pairwise:
        return write_embeddings(out, embeddings)
    i2t, t2i = PairScores(trained.model, images, captions).blocks(torch.from_numpy(pairs.image_of))
    return write_scores(out, embeddings, i2t, t2i, said)


def _name_of_other_data(opened: OpenedRun, split: str, name: str) -> Path:
    """Return the file of the embeddings of another data set, one for each data set, even if some share their name."""
    out = opened.folder.path / f"{opened.data_label}_{name}"
    there = identity_in(out) if out.is_file() else None
    images = images_of(opened.dataset, [split], opened.cache)
    if there is None or not data_differences(identity_of_images(images, opened.hashes(images)["photo_hashes"]), there):
        return out
    log.warning("%s: of another data set of this name, and is kept", out)
    return out.with_name(f"{opened.dataset.name}-{data_sums(opened.cache, opened.dataset).short}_{name}")


def unknown_words(trained: TrainedRun) -> dict[str, int]:
    """How many ``words`` of the captions are not in the vocabulary, ``of`` how many, and how many ``captions`` have one."""
    counts = {"words": 0, "of": 0, "captions": 0}
    for caption in trained.split.pairs.captions:
        numbers = trained.vocabulary.encode(caption.tokens)[1:-1]
        unknown = numbers.count(UNKNOWN)
        counts["words"] += unknown
        counts["of"] += len(numbers)
        counts["captions"] += bool(unknown)
    if counts["words"]:
        log.info(
            "%s: %d of the captions' %d words (%.1f%%) are none of the training captions'",
            trained.dataset.path,
            counts["words"],
            counts["of"],
            100 * counts["words"] / counts["of"],
        )
    return counts
