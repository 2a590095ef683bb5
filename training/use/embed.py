"""Write the embeddings that a trained run computes: of a split, or of all splits as feature caches for another model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import (
    EMBEDDINGS_KIND,
    Embeddings,
    experiment_name,
    parse_provenance,
    read_embeddings,
    write_embeddings,
    write_scores,
)
from vse.eval.files.phrase_scores import PHRASE_SCORES_KIND
from vse.features.backbones.device import OUT_OF_MEMORY_ADVICE, wrap_memory_errors
from vse.features.cache.rows import FeatureKind as RowKind
from vse.features.cache.rows import Ids, list_row_ids
from vse.features.cache.shards import check_cache_output, parse_feature_name
from vse.features.data_checks import compute_data_checksums
from vse.features.exchange.embeddings import KIND_PLURALS, Backbone, build_cache_paths, write_embeddings_cache
from vse.pipeline.dataset.captions import UNKNOWN_ID
from vse.pipeline.dataset.dataset import Dataset, load_dataset_file
from vse.pipeline.dataset.identity import build_identity, check_recorded_data, describe_data_differences
from vse.pipeline.dataset.languages import build_language_fields
from vse.pipeline.errors import UserError, did_you_mean
from vse.pipeline.files.outputs import check_output
from vse.pipeline.files.writing import sha256_json
from vse.training.data.pairs import CaptionsLoadedAtFirstRead, TokenIndices, select_images_with_features
from vse.training.models.similarities.todnet import require_shortlist_similarity, score_shortlist
from vse.training.options import EmbedRequest, RunInputOptions
from vse.training.run.folder import RunFolder
from vse.training.run.inputs import count_leaked_images
from vse.training.solvers.encode import PairScores, build_embeddings_fields, encode_split, pool_sets, score_with_bank
from vse.training.use.localise import save_phrase_scores, save_sentence_scores
from vse.training.use.model import TrainedRun, load_opened_run, load_run
from vse.training.use.open_run import OpenedRun, find_unfinished_state, open_run, read_recorded_identity
from vse.training.use.stored_correction import check_correctable, store_correction

log = logging.getLogger(__name__)
_VectorsById = Mapping[int, NDArray[np.float32]]


def embed_split(
    run: Path,
    out: Path | None = None,
    split: str = "test",
    files: RunInputOptions = RunInputOptions(),
    device: str = "auto",
    allow_unfinished: bool = False,
    allow_leak: bool = False,
    sentences: bool = False,
    last_epoch: bool = False,
    pool_regions: int | None = None,
    bank_images: int | None = None,
    shortlist: bool = False,
) -> Path:
    """Embed a split with the best weights of a run, write the embeddings to ``out``, and return ``out``.

    ``out`` : by default ``<split>.h5`` in the run folder, or ``<dataset>_<split>.h5`` for another data set than the training
        data. ``_sentences``, ``_last``, ``_pooled_<pool_regions>`` or ``_shortlist`` follows the split if the option is set.
    ``files`` : files that replace those that the run names. ``allow_unfinished`` : accept a run whose training did not finish.
    ``allow_leak`` : accept a run that was trained on images of the split; otherwise such images raise UserError.
    ``sentences`` : for a run that localises phrases: write the scores of captions with images.
    ``last_epoch`` : use the weights of the last epoch.
    ``pool_regions`` : mean number of similar regions of an image that are averaged to one vector
        (:func:`vse.training.solvers.encode.pool_sets`); None: write all regions.
    ``bank_images`` : number of random training images. The scores with these images and their captions are also written.
    ``shortlist`` : for a TOD-Net similarity: score only the pairs that are likely to change a rank
        (:func:`vse.training.models.similarities.todnet.score_shortlist`).

    For a model that compares vectors, the vectors are written. For a model that scores pairs, the scores are written, and also
    one vector for each image and caption, so that a search can choose candidates. For a run that localises phrases, the scores
    of phrases with candidate boxes are written or, with ``sentences``, the scores of captions with images.
    """
    opened = open_run(run, files, device, allow_unfinished)
    if out is None:
        suffixes = {"_sentences": sentences, "_last": last_epoch, f"_pooled_{pool_regions}": pool_regions is not None}
        suffixes |= {"_shortlist": shortlist}
        name = f"{split}{''.join(suffix for suffix, is_given in suffixes.items() if is_given)}.h5"
        out = run / name if opened.other_training_data_name is None else _choose_path_for_other_data(opened, split, name)
    localises = opened.experiment.solver.reads_phrases
    kind = PHRASE_SCORES_KIND if localises and not sentences else EMBEDDINGS_KIND
    check_output(out, kind, [*RunFolder(run).output_files, *opened.input_paths])
    restval = opened.experiment.train.restval
    n_images = len(opened.dataset.split(split))
    n_seen = count_leaked_images(opened.folder, restval, opened.image_cache, opened.dataset, split, allow_leak)
    leak_entry = {"images_trained_on": {"images": n_seen, "of": n_images}} if n_seen else {}
    if last_epoch and (localises or not opened.experiment.solver.uses_loss):
        raise UserError(f"{run}: --last-epoch is for runs on captions with epochs of gradient steps; leave it out")
    for option, value in {
        "--pool-regions": pool_regions,
        "--bank-images": bank_images,
        "--shortlist": shortlist or None,
    }.items():
        if value is not None and localises:
            raise UserError(f"{run}: {option} is for runs on captions; leave it out")
    if localises:
        write = save_sentence_scores if sentences else save_phrase_scores
        return write(opened, out, split, files, leak_entry)
    if sentences:
        raise UserError(f"{run}: matches images and captions, and not phrases, whose scores --sentences are; leave it out")
    trained = load_opened_run(opened, split, files, last_epoch)
    if not len(trained.split.pairs):
        raise UserError(f"{trained.dataset.path}: no image of split {split!r} has a caption; vse-search searches such images")
    started = time.perf_counter()
    images, captions = encode_split(trained.model, trained.split, trained.device)
    if pool_regions is not None:
        if images.lengths is None:
            raise UserError(f"{run}: has one vector for each image, so there are no regions to pool; leave --pool-regions out")
        images = pool_sets(images, pool_regions)
    shortlisted = require_shortlist_similarity(run, trained.model.similarity) if shortlist else None
    bank_scores: dict[str, Any] = {}
    if bank_images is not None:
        if not trained.model.scores_every_pair:
            raise UserError(
                f"{run}: has one vector for each image, so --correct needs no stored scores; leave --bank-images out"
            )
        if "train" in opened.dataset.parse_splits(split):
            raise UserError(f"--bank-images takes images of the training split; leave it out for --split {split}")
        bank = load_opened_run(opened, "train", files, last_epoch)
        bank_scores = score_with_bank(bank.model, bank.split, bank.device, bank_images, images, captions, pool_regions)
    provenance = {**opened.build_provenance(out), **leak_entry}
    if last_epoch:
        provenance["training"] |= {"selection": "last epoch"}
        provenance["best_epoch"] = None
        _record_changed_option(provenance, "epoch", "best", "last")
    if images.lengths is not None:
        vectors_per_image = len(images.vectors) / len(images)
        provenance["regions"] = {"per_image": vectors_per_image, "bytes_per_image": 4 * vectors_per_image * trained.model.dim}
    if pool_regions is not None:
        _record_changed_option(provenance, "pool_regions", "none", str(pool_regions))
    if shortlist:
        _record_changed_option(provenance, "pairs", "all", "shortlist")
    inputs = trained.split.caption_inputs
    inputs = inputs.inputs if isinstance(inputs, CaptionsLoadedAtFirstRead) else inputs
    if isinstance(inputs, TokenIndices):
        provenance["cut_captions"] = inputs.n_truncated_captions
    elif trained.caption_cache is None:
        provenance["unknown_words"] = count_unknown_words(trained)
    for side, embedded in (("images", images), ("captions", captions)):
        if not torch.isfinite(embedded.vectors).all():
            raise UserError(f"{run}: embeddings of {side} are not finite (NaN or infinite); nothing is written")

    def provenance_json() -> str:
        cost = {**provenance["cost"], "embed_s": round(time.perf_counter() - started, 4)}
        return json.dumps({**provenance, "cost": cost}, sort_keys=True)

    pairs = trained.split.pairs
    embeddings = Embeddings(
        image_ids=pairs.image_ids,
        caption_ids=pairs.caption_ids,
        caption_image_ids=pairs.caption_image_ids,
        dataset=trained.dataset.name,
        split=split,
        experiment=trained.experiment.name,
        seed=trained.record["seed"],
        provenance=provenance_json(),
        trained_on=trained.other_training_data_name,
        fold=trained.dataset.fold or None,
        coco_ids=None if shortlist else pairs.coco_ids,  # with COCO ids, vse-eval would run protocols that need all scores
        **build_language_fields(pairs.caption_languages),
        **build_embeddings_fields(trained.model, images, captions),
        **bank_scores,
        **trained.find_photo_and_caption_hashes(pairs.images),
    )
    if not trained.model.scores_every_pair:
        return write_embeddings(out, embeddings)
    image_of_caption = torch.from_numpy(pairs.image_indices)
    if shortlisted is not None:
        blocks, provenance["shortlist"] = score_shortlist(shortlisted, images.vectors, captions.vectors, image_of_caption)
    else:
        blocks = PairScores(trained.model, images, captions).score_blocks(image_of_caption)
    return write_scores(out, embeddings, *blocks, provenance_json)


def _record_changed_option(provenance: dict[str, Any], option: str, default: str, value: str) -> None:
    """Record an option of ``vse-embed`` as a changed setting in ``provenance``, and in the label of the run if it has one."""
    provenance["changed_settings"].append(f"{option}: {default} -> {value}")
    config = provenance["config"]
    if config.get("label"):
        provenance["config"] = {**config, "label": f"{config['label']}, {option}={value}"}


def _choose_path_for_other_data(opened: OpenedRun, split: str, name: str) -> Path:
    """Return ``<dataset>_<name>`` in the run folder, the default output file for data that the run was not trained on.

    If this file exists and has the embeddings of other data of the same name, a checksum is added to the data set's name.
    """
    out = opened.folder.path / f"{opened.dataset_label}_{name}"
    existing = read_recorded_identity(out) if out.is_file() else None
    images = select_images_with_features(opened.dataset, [split], opened.image_cache)
    if existing is None or not describe_data_differences(
        build_identity(images, opened.find_photo_and_caption_hashes(images)["photo_hashes"]), existing
    ):
        return out
    log.warning("%s: of another data set of this name, and is kept", out)
    return out.with_name(
        f"{opened.dataset.name}-{compute_data_checksums(opened.image_cache, opened.dataset).short_hash}_{name}"
    )


def count_unknown_words(trained: TrainedRun) -> dict[str, int]:
    """Count the words in the captions of the split that are not in the vocabulary (unknown words), and log their share.

    Returns the number of unknown words (key ``words``), the number of all words (key ``of``), and the number of captions with
    an unknown word (key ``captions``).
    """
    counts = {"words": 0, "of": 0, "captions": 0}
    by_language: dict[str, list[int]] = {}
    for caption in trained.split.pairs.captions:
        numbers = trained.vocabulary.encode(caption.tokens)[1:-1]
        unknown = numbers.count(UNKNOWN_ID)
        counts["captions"] += bool(unknown)
        of_language = by_language.setdefault(caption.language, [0, 0])
        of_language[0] += unknown
        of_language[1] += len(numbers)
    for language, (unknown, total) in by_language.items():
        counts["words"] += unknown
        counts["of"] += total
        if unknown:
            share, where = 100 * unknown / total, f"captions in {language}" if language else "captions"
            log.info("%s: %d of %d words (%.1f%%) in %s are unknown", trained.dataset.path, unknown, total, share, where)
    return counts


def cache_run_embeddings(
    run: Path, out: Path, files: RunInputOptions = RunInputOptions(), device: str = "auto", allow_unfinished: bool = False
) -> list[Path]:
    """Embed all splits with the best weights of a run, write the embeddings as two feature caches, and return their paths.

    The caches are ``<out>_images.h5`` and ``<out>_captions.h5``. ``files`` replace the files that the run names. Raises
    UserError if the model scores pairs, or if the training did not finish and ``allow_unfinished`` is False.
    """
    outs = build_cache_paths(out)
    trained = load_run(run, None, files, device, allow_unfinished)
    for path in outs.values():
        check_cache_output(path, trained.dataset.name, parse_feature_name(path, trained.dataset.name), trained.input_paths)
    if trained.model.scores_every_pair:
        raise UserError(
            f"{run}: its model ({trained.model.config.similarity.name}) scores every pair, so single vectors do not stand "
            "for it; take a run whose embeddings are compared as vectors"
        )
    images, captions = encode_split(trained.model, trained.split, trained.device)
    pairs, cache = trained.split.pairs, trained.image_cache
    facts: dict[str, Any] = {
        "seed": trained.record["seed"],
        "dataset": trained.record["dataset"],
        "features": {one.feature: one.key for one in (cache, trained.caption_cache) if one is not None},
    }
    if state := find_unfinished_state(trained.record):
        facts["unfinished"] = state
    backbone = Backbone(trained.weights_sha256, trained.experiment.name, facts, run)
    skipped = dict.fromkeys(cache.skipped_ids, "no features")
    sides: dict[RowKind, tuple[Ids, torch.Tensor]] = {
        "image": (pairs.image_ids, images.vectors),
        "text": (pairs.caption_ids, captions.vectors),
    }
    for side, (_, vectors) in sides.items():
        if not torch.isfinite(vectors).all():
            raise UserError(f"{run}: embeddings of {KIND_PLURALS[side]} are not finite (NaN or infinite); nothing is written")
    rows = {kind: dict(zip(ids.tolist(), vectors.numpy(), strict=True)) for kind, (ids, vectors) in sides.items()}
    return _write_caches(outs, trained.dataset, backbone, rows, skipped)


def cache_file_embeddings(files: Sequence[Path], out: Path, dataset_file: Path | None = None) -> list[Path]:
    """Convert embeddings files, one for each split, to ``<out>_images.h5`` and ``<out>_captions.h5``; return these paths.

    The two files are feature caches. Other programs may have written the embeddings files (``docs/formats.md``).
    ``dataset_file`` is the path of ``dataset.json``, by default the path in the first file. Raises UserError if the files
    belong to several models or to another data set, contain scores, or lack images or captions of their splits.
    """
    outs = build_cache_paths(out)
    runs = [read_embeddings(file) for file in files]
    (path, first), dataset = (files[0], runs[0]), _load_dataset(files[0], runs[0], dataset_file)
    for one in outs.values():
        check_cache_output(one, dataset.name, parse_feature_name(one, dataset.name), [*files, dataset.path])
    rows: dict[RowKind, dict[int, NDArray[np.float32]]] = {"image": {}, "text": {}}
    for file, run in zip(files, runs, strict=True):
        if run.vectors is None:
            raise UserError(f"{file}: holds scores of pairs; embeddings of images and captions are needed")
        for name in ("dataset", "experiment", "seed", "similarity"):
            if getattr(run, name) != getattr(first, name):
                raise UserError(f"{file} is of {name} {getattr(run, name)!r}, {path} of {getattr(first, name)!r}")
        check_recorded_data(dataset, run.identity)
        if run.split not in dataset.splits:
            raise UserError(f"{file}: {dataset.path} has no split {run.split!r}{did_you_mean(run.split, dataset.splits)}")
        sides: dict[RowKind, tuple[Ids, NDArray[np.float32]]] = {
            "image": (run.image_ids, run.vectors[0]),
            "text": (run.caption_ids, run.vectors[1]),
        }
        for kind, (ids, vectors) in sides.items():
            if len({vectors.shape[1], *(len(vector) for vector in list(rows[kind].values())[:1])}) > 1:
                raise UserError(f"{file}: vectors of {vectors.shape[1]} numbers, in {path} they have others")
            rows[kind] |= dict(zip(ids.tolist(), vectors, strict=True))
    covered = {run.split for run in runs}
    left_out = [split for split in dataset.splits if split not in covered]
    if left_out:
        log.warning("%s: no file has the split %s; the caches lack it", dataset.path, " or ".join(left_out))
    skipped = {image.imgid: "no embeddings of its split" for split in left_out for image in dataset.split(split)}
    sha256s = {run.source.sha256 for run in runs if run.source is not None}
    facts = {"seed": first.seed, "dataset": first.trained_on or first.dataset}
    backbone = Backbone(sha256_json(sorted(sha256s)), experiment_name(path, first), facts)
    return _write_caches(outs, dataset, backbone, rows, skipped)


def _write_caches(
    outs: Mapping[RowKind, Path],
    dataset: Dataset,
    backbone: Backbone,
    rows: Mapping[RowKind, _VectorsById],
    skipped: Mapping[int, str],
) -> list[Path]:
    """Write the image cache and the caption cache, and return their paths.

    ``rows`` has the vectors by image id and by caption id. ``backbone`` is the model that computed them. ``skipped`` has the
    ids of images that may lack a vector, each with the reason. The captions of these images may lack a vector, too. Raises
    UserError if any other image or caption lacks a vector.
    """
    skipped_images = [image for image in dataset.images if image.imgid in skipped]
    skipped_captions = {c.sentid: skipped[image.imgid] for image in skipped_images for c in image.captions}
    without: dict[RowKind, Mapping[int, str]] = {"image": skipped, "text": skipped_captions}
    ids = {kind: list_row_ids(dataset, kind) for kind in outs}
    for kind, wanted in ids.items():
        missing = [i for i in wanted.tolist() if i not in rows[kind] and i not in without[kind]]
        if missing:
            some = f"{len(missing)} of {len(wanted)} {KIND_PLURALS[kind]} have no embedding, the first is id {missing[0]}"
            raise UserError(f"{dataset.path}: {some}; embed this very data set")

    def build_vector_reader(kind: RowKind) -> Callable[[Ids], NDArray[np.float32]]:
        by_id = rows[kind]
        empty = np.empty((0, len(next(iter(by_id.values())))), np.float32)
        return lambda item_ids: np.stack([by_id[i] for i in item_ids.tolist()]) if len(item_ids) else empty

    return [
        write_embeddings_cache(out, dataset, kind, backbone, ids[kind], build_vector_reader(kind), without[kind])
        for kind, out in outs.items()
    ]


def _load_dataset(path: Path, first: Embeddings, dataset_file: Path | None) -> Dataset:
    named = parse_provenance(first).get("captions")
    if dataset_file is None and not isinstance(named, str):
        raise UserError(f"{path}: does not say where its dataset.json is: name it with --captions")
    dataset = load_dataset_file(dataset_file or path.parent / str(named))
    if dataset.name != first.dataset:
        raise UserError(f"{path} holds embeddings of {first.dataset!r}, but {dataset.path} is {dataset.name!r}")
    return dataset


def embed_runs(request: EmbedRequest) -> list[Path]:
    """Run ``vse-embed`` and return the written files. Raises UserError for options that exclude each other.

    See :func:`embed_split` or, with ``as_features``, :func:`cache_run_embeddings` and :func:`cache_file_embeddings`.
    """
    runs, files, as_features = request.runs, request.files, request.as_features
    device, allow_unfinished = request.device, request.allow_unfinished
    if as_features is None and len(runs) > 1:
        raise UserError(f"{runs[1]}: a second run; vse-embed takes one, and several files only with --as-features")
    if as_features is not None and (request.out is not None or request.split is not None):
        raise UserError("--as-features names its own files, of all splits; leave --out and --split out")
    if request.correct is not None and (as_features is not None or request.last_epoch):
        raise UserError("--correct is for searches by the best weights; leave it out, or --as-features and --last-epoch")
    if as_features is not None and request.last_epoch:
        raise UserError("--as-features writes the embeddings by the best weights; leave --last-epoch out")
    if as_features is not None and (request.pool_regions is not None or request.bank_images is not None or request.shortlist):
        raise UserError(
            "--pool-regions, --bank-images and --shortlist are for files of embeddings; leave them or --as-features out"
        )
    if as_features is not None and request.sentences:
        raise UserError("--sentences writes scores instead of features; leave it out, or --as-features")
    if request.correct is not None:
        check_correctable(request.correct, runs[0])
    with wrap_memory_errors(OUT_OF_MEMORY_ADVICE):
        if as_features is None:
            split, allow_leak = request.split or "test", request.allow_leak
            kind = request.sentences, request.last_epoch, request.pool_regions, request.bank_images, request.shortlist
            written = [embed_split(runs[0], request.out, split, files, device, allow_unfinished, allow_leak, *kind)]
            if request.correct is not None:
                bank = [
                    embed_split(runs[0], runs[0] / f"{split}.h5", split, files, device, allow_unfinished)
                    for split in ("train", "val")
                ]
                written += [*bank, store_correction(runs[0], request.correct, *bank)]
            return written
        if not runs[0].is_dir():
            return cache_file_embeddings(runs, as_features, files.captions)
        if len(runs) > 1:
            raise UserError(f"{runs[1]}: a second run; --as-features takes one run, or files of embeddings")
        return cache_run_embeddings(runs[0], as_features, files, device, allow_unfinished)
