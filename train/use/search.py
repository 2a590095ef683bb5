"""Searching a split, or a file of embeddings, with a run: a text finds images, an image file finds captions."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import read_embeddings
from vse.eval.search.exact import Corpus, Rows, Scores
from vse.eval.search.gpu import use_device
from vse.eval.search.hits import SearchHit
from vse.eval.search.index import Built, StoredRows, build_index, holds_exactly, set_parameters
from vse.eval.search.index_file import Indexed, ids_sha256, is_there, note_file, read_index, write_index
from vse.eval.search.top_k import CANDIDATES, search
from vse.features.cnn_extractor import rebuild_extractor
from vse.features.new_captions import caption_reader
from vse.pipeline.errors import UserError
from vse.pipeline.files import check_out, sha256_json
from vse.pipeline.image_files import decode
from vse.pipeline.vocabulary import UNKNOWN
from vse.train.data.captions import encoded_as
from vse.train.data.tokens import TokenNumbers
from vse.train.kinds import Encoded, packed, whole_sets
from vse.train.solvers.encode import TILE_IMAGES, PairScores, encode_captions, encode_images, pooled
from vse.train.use.attention import with_attention
from vse.train.use.backbone import backbone_run
from vse.train.use.embed import TrainedRun, load_run
from vse.train.use.opened_run import RunPlaces, unfinished_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Searched:
    """One side of a split or of a file: ``name`` is images or captions, ``vectors`` gets their embeddings (n, dim).

    ``ids`` (n,) are theirs, ``image_ids`` (n,) those of the images they belong to; ``of`` gives all that decides the
    vectors; ``known`` tells whether ``dataset.json`` is about these ids.
    """

    name: str
    ids: NDArray[np.int64]
    image_ids: NDArray[np.int64]
    vectors: Callable[[], Corpus]
    of: Callable[[], dict[str, str]]
    known: bool = True


def search_split(
    run: Path,
    query: str | Path,
    k: int = 10,
    split: str = "test",
    *,
    places: RunPlaces = RunPlaces(),
    device: str = "auto",
    corpus: Path | None = None,
    index: Path | None = None,
    index_type: str | None = None,
    index_parameters: str = "",
    rerank: int | None = None,
    page: Path | None = None,
) -> list[SearchHit]:
    """The ``k`` best for a text (images) or for an image file (captions), best first, of a split or of an embeddings file.

    The model is the run's, with its best weights. An image file goes through the CNN that made the run's cache, or through
    the run's own if it trained one; a text through the encoder that made the cache of captions, if the run reads one. Order
    scores re-rank candidates of FAISS, see :func:`vse.eval.search.top_k.search`; a model that compares other than two vectors
    scores all pairs, or with ``rerank`` those with the candidates that FAISS finds by pooled vectors.

    Parameters
    ----------
    run, split, places, device : see :func:`vse.train.use.embed.load_run`; the weights in ``places`` are those of a CNN, for
        an image file, and of a pretrained text encoder, for a text
    corpus : a file of :mod:`vse.eval.files.embeddings`, by this run, that is searched instead of the split
    index : the file of an index; built if it is not there, else read in place of embedding the split. :class:`UserError` if
        it is of other weights, features, split or side, or of another corpus
    index_type : a factory string, see :mod:`vse.eval.search.index`; by default that of the file, or Flat if it is to be built
    index_parameters : how thoroughly it is searched, see :func:`vse.eval.search.index.set_parameters`
    rerank : how many candidates are scored, ``k`` at least
    page : where the results will be written; :class:`UserError` if that is one of the files that are searched with
    """
    if index is None and (index_type is not None or index_parameters):
        raise UserError("--index-type and --index-parameters say what --index is, which names the file; it is missing")
    trained = load_run(run, split, places, device, unfinished=True)
    if state := unfinished_state(trained.record):
        log.warning("%s: its training did not finish (state: %s); these are the best weights so far", run, state)
    use_device(str(trained.device) if trained.device.type == "cuda" else "cpu")
    by_photo = isinstance(query, Path)
    if by_photo and corpus is None and not len(trained.split.pairs):
        raise UserError(f"{trained.dataset.path}: no image of the split {split!r} has a caption for a photo to find")
    read = [*trained.inputs, *([query] if isinstance(query, Path) else []), *([corpus] if corpus else [])]
    if index is not None:
        check_out(index, read)
        check_out(note_file(index), read)
        read += [index, note_file(index)]
    if page is not None:
        check_out(page, read)
    _check_stages(trained, corpus, index, rerank)
    asked = _asked(trained, query, split, places.weights_dir)
    if trained.model.pairwise:
        searched, among = _of_split(trained, split, by_photo), None
        if rerank is not None:
            vectors, candidates = pooled(packed([asked])), max(k, rerank)
            among = _nearest(trained, searched, vectors, candidates, by_photo, index, index_type, index_parameters)[1]
            log.info("scored: the %d of %d %s that pooled vectors find", len(among), len(searched.ids), searched.name)
        scores, rows = _best_pairs(trained, asked, k, by_photo, among)
    else:
        vectors = asked[0].numpy()
        dim = vectors.shape[1]
        searched = _of_split(trained, split, by_photo) if corpus is None else _of_file(trained, corpus, by_photo, dim)
        scores, rows = _nearest(trained, searched, vectors, k, by_photo, index, index_type, index_parameters, rerank)
    hits = _hits(trained, searched, scores, rows, by_photo)
    return hits if page is None or corpus is not None else with_attention(trained, query, asked, hits, rows.tolist())


def _check_stages(trained: TrainedRun, corpus: Path | None, index: Path | None, rerank: int | None) -> None:
    """:class:`UserError` for an option that does not suit how the model's scores are searched."""
    run = trained.folder.path
    if not trained.model.pairwise:
        if rerank is not None and _ranked_by(trained) == "cosine":
            raise UserError(f"{run}: its scores are inner products, of which FAISS finds the highest; leave --rerank out")
    elif corpus is not None:
        raise UserError(f"{run}: its model scores every pair, vectors alone do not tell which is best; leave --corpus out")
    elif index is not None and rerank is None:
        raise UserError(
            f"{run}: its model scores every pair, vectors alone do not tell which is best; leave --index out, or say with "
            "--rerank how many that it finds are to be scored"
        )


def _best_pairs(trained: TrainedRun, asked: Encoded, k: int, by_photo: bool, among: Rows | None = None) -> tuple[Scores, Rows]:
    """Scores and rows of the ``k`` best for one query, every pair of the split, or of some rows, being scored by the model."""
    model, split = trained.model, trained.split
    if among is not None:
        if not len(among):
            return np.empty(0, np.float32), among
        among = np.sort(among)  # those that score the same stand in the order of rows
    if by_photo:
        captions = encode_captions(model, split, among)
        every = PairScores(model, packed([asked]), captions)(slice(0, 1), None)[0][0]
    else:
        images = encode_images(model, split, trained.device, among)
        pairs = PairScores(model, images, packed([asked]))
        spans = (slice(start, start + TILE_IMAGES) for start in range(0, len(images), TILE_IMAGES))
        ends = len(images)
        every = torch.cat([pairs(slice(span.start, min(span.stop, ends)), None)[1][:, 0] for span in spans])
    best = torch.sort(every, descending=True, stable=True)
    rows = best.indices[:k].numpy()
    return best.values[:k].numpy(), rows if among is None else among[rows]


def _nearest(
    trained: TrainedRun,
    searched: _Searched,
    asked: NDArray[np.float32],
    k: int,
    by_photo: bool,
    index: Path | None,
    index_type: str | None,
    index_parameters: str,
    rerank: int | None = None,
) -> tuple[Scores, Rows]:
    """Scores and rows of the ``k`` best vectors for one query, by an index or without one; fewer if an index finds fewer."""
    similarity, candidates = _ranked_by(trained), max(k, rerank or CANDIDATES)
    if similarity != "cosine":
        log.info(
            "%s scores are no inner products: by these FAISS finds %d candidates, exact scores re-rank", similarity, candidates
        )
    if index is None:
        entries, built = searched.vectors(), None
    else:
        built = _index(index, searched, similarity, asked.shape[1], index_type).index
        set_parameters(built, index_parameters)
        entries = StoredRows(built)
    direction = "i2t" if by_photo else "t2i"
    scores, rows = (
        values[0] for values in search(entries, asked, k, similarity, direction=direction, candidates=candidates, index=built)
    )
    there = rows >= 0
    if not there.all():
        log.warning("the index found %d of %d; a higher nprobe or efSearch finds more", there.sum(), len(rows))
    return scores[there], rows[there]


def _index(file: Path, searched: _Searched, similarity: str, dim: int, factory: str | None) -> Built:
    """The index in a file, or, if there is none, a new one that is written there."""
    indexed = Indexed(len(searched.ids), dim, similarity, ids_sha256(searched.ids), searched.of())
    if is_there(file, indexed):
        return read_index(file, indexed, factory)
    vectors = searched.vectors()
    built = build_index(vectors, factory or "Flat", name=searched.name)
    if similarity != "cosine" and not holds_exactly(built.index, vectors):
        raise UserError(
            f"{built.factory}: keeps vectors roughly, and {similarity} scores need them as they are; "
            "Flat, IVF1024,Flat or HNSW32 keep them"
        )
    log.info("%s: built a %s index of %d %s", file, built.factory, len(searched.ids), searched.name)
    write_index(file, built, indexed)
    return built


def _of_split(trained: TrainedRun, split: str, by_photo: bool) -> _Searched:
    pairs = trained.split.pairs

    def of() -> dict[str, str]:
        raw = trained.transformer is not None
        words = [[caption.raw] if raw else caption.tokens for caption in pairs.captions] if by_photo else []
        return {
            "side": "captions" if by_photo else "images",
            "data set": trained.dataset.name,
            "split": split,
            "weights": trained.weights_sha256,
            "model": sha256_json(trained.experiment.model.model_dump(mode="json")),
            "vocabulary": trained.vocabulary_sha256,
            **({} if trained.transformer is None else {"tokenizer": trained.transformer.tokenizer_sha256}),
            "features": trained.cache.key,
            "caption features": trained.caption_cache.key if trained.caption_cache else "",
            "captions": sha256_json(words),
        }

    def vectors() -> Corpus:
        model = trained.model
        return pooled(
            encode_captions(model, trained.split) if by_photo else encode_images(model, trained.split, trained.device)
        )

    if by_photo:
        return _Searched("captions", pairs.caption_ids, pairs.caption_image_ids, vectors, of)
    return _Searched("images", pairs.image_ids, pairs.image_ids, vectors, of)


def _of_file(trained: TrainedRun, file: Path, by_photo: bool, dim: int) -> _Searched:
    embeddings = read_embeddings(file)
    name = "captions" if by_photo else "images"
    vectors = embeddings.captions if by_photo else embeddings.images
    if vectors is None:
        raise UserError(f"{file}: has scores of pairs, and no embeddings of {name} to search")
    similarity = _ranked_by(trained)
    if embeddings.similarity != similarity or vectors.shape[1] != dim:
        there, here = f"{vectors.shape[1]} dimensions by {embeddings.similarity}", f"{dim} by {similarity}"
        raise UserError(f"{file}: not embeddings of {trained.folder.path}, which has {here} (the file: {there})")
    made_by = (embeddings.dataset, embeddings.experiment, embeddings.seed)
    ours = (trained.cache.dataset, trained.experiment.name, trained.record["seed"])
    known = embeddings.dataset == trained.dataset.name
    if any(theirs not in (None, own) for theirs, own in zip(made_by, ours, strict=True)):
        unknown = "" if known else f"; its ids are none of {trained.dataset.path}"
        log.warning("%s says that it is of %s %s, seed %s, not of %s%s", file, *made_by, trained.folder.path, unknown)
    corpus_sha256 = embeddings.source.sha256 if embeddings.source else ""
    ids, image_ids = (embeddings.caption_ids, embeddings.caption_image_ids) if by_photo else [embeddings.image_ids] * 2
    return _Searched(name, ids, image_ids, lambda: vectors, lambda: {"side": name, "corpus": corpus_sha256}, known)


def _hits(trained: TrainedRun, searched: _Searched, scores: Scores, rows: Rows, by_photo: bool) -> list[SearchHit]:
    images = {image.imgid: image for image in trained.dataset.images} if searched.known else {}
    hits = []
    for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
        image_id, caption_id = int(searched.image_ids[row]), int(searched.ids[row]) if by_photo else None
        image = images.get(image_id)
        file = Path(os.path.normpath(trained.dataset.image_path(image))) if image else None
        texts = tuple(c.raw for c in image.captions if caption_id in (None, c.sentid)) if image else ()
        hits.append(SearchHit(score, image_id, file, texts, caption_id))
    return hits


def _ranked_by(trained: TrainedRun) -> str:
    """What single vectors are searched by; of a model that scores every pair these are pooled vectors."""
    return trained.model.config.similarity.ranked_by or "cosine"


def _asked(trained: TrainedRun, query: str | Path, split: str, weights_dir: Path | None) -> Encoded:
    """What the model's encoders give for a query, which goes through the backbone first if the run reads its embeddings."""
    by_photo = isinstance(query, Path)
    cache = trained.cache if by_photo else trained.caption_cache
    backbone = None if cache is None else backbone_run(trained, cache, split)
    if backbone is None:
        return _of_photo(trained, query, weights_dir) if isinstance(query, Path) else _of_text(trained, query, weights_dir)
    embed = trained.model.embed_images if by_photo else trained.model.embed_captions
    embedded = _asked(backbone, query, split, weights_dir)
    with torch.inference_mode():
        return tuple(part.cpu() for part in embed(*(part.to(trained.device) for part in embedded)))


def _of_text(trained: TrainedRun, text: str, weights_dir: Path | None) -> Encoded:
    tokens = trained.words_of(text)
    reader = None
    if trained.caption_cache is not None:
        reader = caption_reader(trained.caption_cache, weights_dir, str(trained.device))
    as_written = trained.transformer is not None or (reader is not None and reader.reads_raw)
    if not (text.strip() if as_written else tokens):
        raise UserError(f"{text!r}: no word to search for")
    if trained.transformer is not None:
        if unknown := trained.transformer.unknown(text):
            log.warning("not known to the tokenizer of %s: %s", trained.transformer.name, ", ".join(unknown))
        asked: Encoded = TokenNumbers([text], trained.transformer, trained.device).of(np.zeros(1, np.int64))
    elif trained.caption_cache is None or reader is None:
        words = trained.vocabulary.encode(tokens)
        unknown = [token for token, number in zip(tokens, words[1:-1], strict=True) if number == UNKNOWN]
        if unknown:
            log.warning("not a word of the training captions: %s", ", ".join(unknown))
        asked = torch.tensor([words], device=trained.device), torch.tensor([len(words)])
    else:
        asked = encoded_as(trained.caption_cache, reader, [(text, tokens)], trained.device)
        if not asked[0].any():
            raise UserError(f"{text!r}: none of its words is known to {trained.caption_cache.feature!r}")
    with torch.inference_mode():
        return tuple(part.cpu() for part in trained.model.embed_captions(*asked))


def _of_photo(trained: TrainedRun, file: Path, weights_dir: Path | None) -> Encoded:
    model = trained.model
    photo = decode(file)
    own, sets = model.cnn is not None, trained.cache.row_kind == "sets"
    extractor = rebuild_extractor(trained.cache, weights_dir, str(trained.device), trained=own, positions=sets)
    crops = extractor.prepare(photo, 0)[None]
    seen: Encoded
    if own:
        seen = (crops,)
    else:
        vectors = extractor.features(crops)
        seen = whole_sets(vectors) if sets else (vectors if vectors.ndim == 2 else vectors.mean(1),)
    with torch.inference_mode():
        return tuple(part.cpu() for part in model.embed_images(*(part.to(trained.device) for part in seen)))
