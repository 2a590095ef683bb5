"""The attention of a trained model between the words of a text and the regions of a photo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vse.eval.files.embeddings import Embeddings
from vse.eval.report.drawings import AttendingRun, PairIds
from vse.eval.search.top_k import Attention, SearchHit
from vse.features.backbones.device import move_tensor
from vse.features.extractors.cnn import VectorBoxes
from vse.features.extractors.images import UnsuitableImageSize
from vse.pipeline.dataset.captions import UNKNOWN_ID
from vse.pipeline.dataset.dataset import Caption
from vse.pipeline.dataset.identity import check_recorded_data
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import BadImage, decode_image
from vse.training.experiment import ExperimentConfig
from vse.training.kinds import BatchVectors, PackedEmbeddings, pack_embeddings
from vse.training.run.folder import RunFolder
from vse.training.use.model import TrainedRun, load_run

log = logging.getLogger(__name__)


class AttentionComputer:
    """The computation of attention between photos and captions with the model of a run.

    Raises UserError if the run reads captions from a cache, because the cache does not contain their words.
    """

    def __init__(self, trained: TrainedRun) -> None:
        side = trained.experiment.model.similarity.attention_direction
        assert side is not None, "a model that does not attend"
        if trained.caption_cache is not None:
            raise UserError(f"{trained.folder.path}: reads captions from a cache, so which words it attends to is not known")
        self.trained, self._direction = trained, side
        self._vector_boxes = VectorBoxes(trained.image_cache)
        self._photo_sizes: dict[Path, tuple[int, int] | None] = {}

    def compute(
        self, size: tuple[int, int] | None, image_id: int | None, text: Caption, image: BatchVectors, caption: BatchVectors
    ) -> Attention | None:
        """Return the attention between a photo and a caption, or None if the size or the boxes of the regions are unknown.

        ``size`` : width and height of the photo; None if the photo cannot be read.
        ``image_id`` : id of the photo; None for a photo that is not in the data set.
        ``text`` : text of the caption.
        ``image``, ``caption`` : embeddings of the photo and the caption, each a set (1, n, dim) with its mask.
        """
        if size is None:
            return None
        try:
            boxes = self._vector_boxes.find_boxes(size, image_id)
        except UnsuitableImageSize:
            return None
        words, first = self._list_words(text), torch.zeros(1, dtype=torch.int64)
        similarity, device = self.trained.model.similarity, self.trained.device
        sides = [tuple(part.to(device) for part in side) for side in (image, caption)]
        with torch.inference_mode():
            weights = similarity.compute_attention(sides[0], sides[1], first, first)[0].cpu()
            score = similarity.score_pairs(sides[0], sides[1], first, first)
        weights = weights if self._direction == "t2i" else weights.T
        if weights.shape != (len(boxes), len(words)) or not np.isfinite(boxes).all():
            return None
        return Attention(self._direction, words, size, boxes, weights.double().numpy(), float(score))

    def embed_images(self, rows: Sequence[int]) -> PackedEmbeddings:
        trained = self.trained
        with torch.inference_mode():
            parts = (
                move_tensor(part, trained.device)
                for part in trained.split.image_inputs.read_images(np.asarray(rows, np.int64))
            )
            return pack_embeddings([tuple(part.cpu() for part in trained.model.embed_images(*parts))])

    def embed_captions(self, rows: Sequence[int]) -> PackedEmbeddings:
        trained = self.trained
        with torch.inference_mode():
            parts = trained.split.caption_inputs.read(np.asarray(rows, np.int64))
            return pack_embeddings([tuple(part.cpu() for part in trained.model.embed_captions(*parts))])

    def read_photo_size(self, photo: Path | None) -> tuple[int, int] | None:
        """Return width and height of an image file, or None if the file cannot be read."""
        if photo is not None and photo not in self._photo_sizes:
            try:
                self._photo_sizes[photo] = decode_image(photo).size
            except BadImage:
                self._photo_sizes[photo] = None
        return None if photo is None else self._photo_sizes[photo]

    def _list_words(self, text: Caption) -> tuple[str, ...]:
        """Return the words or tokens of a caption as the model reads them. Unknown words are in angle brackets."""
        if self.trained.transformer is not None:
            return tuple(self.trained.transformer.tokenize(text.raw))
        start, *indices, end = self.trained.vocabulary.encode(text.tokens)
        vocabulary = self.trained.vocabulary.words
        words = (f"<{token}>" if index == UNKNOWN_ID else token for token, index in zip(text.tokens, indices, strict=True))
        return vocabulary[start], *words, vocabulary[end]


def compute_query_attention(
    attention: AttentionComputer, query: str | Image.Image, encoded_query: BatchVectors, rows: Sequence[int]
) -> list[Attention | None]:
    """Return the attention between a query and each hit. The hits are images for a text, and captions for a photo.

    ``encoded_query`` : embedding of the query.
    ``rows`` : positions of the hits in the split.

    The attention for a hit is None if the photo cannot be read, or if the boxes of its regions are not known.
    """
    trained, pairs = attention.trained, attention.trained.split.pairs
    if isinstance(query, str):
        images, text = attention.embed_images(rows), Caption(0, 0, query, tuple(trained.split_into_words(query)))
        photos = [pairs.images[row] for row in rows]
        sizes = [attention.read_photo_size(trained.dataset.image_path(photo)) for photo in photos]
        return [
            attention.compute(size, photo.imgid, text, images.unpack(torch.tensor([k])), encoded_query)
            for k, (size, photo) in enumerate(zip(sizes, photos, strict=True))
        ]
    captions = attention.embed_captions(rows)
    return [
        attention.compute(query.size, None, pairs.captions[row], encoded_query, captions.unpack(torch.tensor([k])))
        for k, row in enumerate(rows)
    ]


def add_attention(
    trained: TrainedRun, query: str | Image.Image, encoded_query: BatchVectors, hits: Sequence[SearchHit], rows: Sequence[int]
) -> list[SearchHit]:
    """Return the hits of a query, each with its attention if the model computes attention.

    ``encoded_query`` : embedding of the query.
    ``rows`` : positions of the hits in the split.
    """
    if trained.experiment.model.similarity.attention_direction is None or not hits:
        return list(hits)
    try:
        attention = AttentionComputer(trained)
    except UserError as error:
        log.info("%s; so the report does not show where words look", error)
        return list(hits)
    attentions = compute_query_attention(attention, query, encoded_query, rows)
    return [replace(hit, attention=hit_attention) for hit, hit_attention in zip(hits, attentions, strict=True)]


def open_attending_run(run: Path, embeddings: Embeddings) -> AttendingRun | None:
    """Open a run to compute attention for a report on ``embeddings``, a file that the run wrote.

    Returns None if ``run`` is not a run folder, or if the model has no attention. Raises UserError if the run cannot be loaded
    or does not fit the embeddings. The opened run computes the attention for pairs of an image id and a caption id. The result
    for a pair with an unknown id is None.
    """
    folder = RunFolder(run)
    if not folder.config_file.is_file():
        return None
    try:
        attends = folder.read_settings(ExperimentConfig).model.similarity.attention_direction
    except UserError as error:
        log.info("%s; so whether its model attends is not known", error)
        return None
    if attends is None:
        return None
    trained = load_run(run, embeddings.split, device="cpu", allow_unfinished=True)
    if trained.dataset.name != embeddings.dataset:
        raise UserError(f"{run}: reads features of {trained.dataset.name!r}, its embeddings are of {embeddings.dataset!r}")
    check_recorded_data(trained.dataset, embeddings.identity)
    attention, pairs = AttentionComputer(trained), trained.split.pairs
    row_of_image = {int(image_id): row for row, image_id in enumerate(pairs.image_ids)}
    row_of_caption = {int(caption_id): row for row, caption_id in enumerate(pairs.caption_ids)}

    def compute_attentions(pair_ids: Sequence[PairIds]) -> list[Attention | None]:
        known_pairs = {pair for pair in pair_ids if pair[0] in row_of_image and pair[1] in row_of_caption}
        if not known_pairs:
            return [None] * len(pair_ids)
        image_rows = sorted({row_of_image[imgid] for imgid, _ in known_pairs})
        caption_rows = sorted({row_of_caption[sentid] for _, sentid in known_pairs})
        images, captions = attention.embed_images(image_rows), attention.embed_captions(caption_rows)

        def compute_attention(imgid: int, sentid: int) -> Attention | None:
            if (imgid, sentid) not in known_pairs:
                return None
            image, caption = pairs.images[row_of_image[imgid]], pairs.captions[row_of_caption[sentid]]
            return attention.compute(
                attention.read_photo_size(trained.dataset.image_path(image)),
                imgid,
                caption,
                images.unpack(torch.tensor([image_rows.index(row_of_image[imgid])])),
                captions.unpack(torch.tensor([caption_rows.index(row_of_caption[sentid])])),
            )

        return [compute_attention(*pair) for pair in pair_ids]

    return AttendingRun(compute_attentions, trained.input_paths)
