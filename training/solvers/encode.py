"""Embeddings of the images and captions of a split, their scores and ranks, and embeddings of a training batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor, nn

from vse.eval.ranking.metrics import Ranks
from vse.eval.ranking.ranks import ScoreBlocks, ranks_from_blocks, ranks_from_embeddings, split_into_slices
from vse.features.backbones.device import move_tensor
from vse.features.backbones.networks import autocast
from vse.training.data.pairs import RetrievalSplit
from vse.training.kinds import BatchVectors, InputKind, PackedEmbeddings, pack_embeddings, pad_sets
from vse.training.models.build import Model
from vse.training.models.encoders.base import l2_normalize
from vse.training.processes.group import postpone_gradient_sum

_ROWS_PER_BLOCK = 512  # images or captions that are embedded at once
_PHOTOS_PER_BLOCK = 64  # photos that a CNN embeds at once
MAX_TILE_IMAGES, MAX_TILE_CAPTIONS = 64, 256  # largest numbers of images and captions whose pairs are scored at once
_MIN_TILE_CAPTIONS = 8  # kernels compute the rows of smaller tiles differently
_MAX_TILE_PAIRS = 2**23  # pairs of vectors in a tile; tiles of large sets have fewer captions
_WIDTH_MULTIPLE = 4  # the number of vectors of a caption is padded to a multiple of this number


def encode_split(model: Model, split: RetrievalSplit, device: torch.device) -> tuple[PackedEmbeddings, PackedEmbeddings]:
    """Return the embeddings of all images and all captions of a split, in their order, on the CPU."""
    return encode_images(model, split, device), encode_captions(model, split)


def encode_images(
    model: Model, split: RetrievalSplit, device: torch.device, rows: NDArray[np.int64] | None = None
) -> PackedEmbeddings:
    """Return the embeddings of a split's images, on the CPU. ``rows`` has the indices of the images; None: all images."""
    block_size = _ROWS_PER_BLOCK if model.cnn is None else _PHOTOS_PER_BLOCK
    rows = np.arange(len(split.pairs.images)) if rows is None else rows
    batches = (
        tuple(move_tensor(tensor, device) for tensor in split.image_inputs.read_images(block))
        for block in _split_into_blocks(rows, block_size)
    )
    return _embed_batches(model, model.embed_images, batches)


def encode_captions(model: Model, split: RetrievalSplit, rows: NDArray[np.int64] | None = None) -> PackedEmbeddings:
    """Return the embeddings of a split's captions, on the CPU. ``rows`` has their indices; None: all captions."""
    rows = np.arange(len(split.pairs)) if rows is None else rows
    batches = (split.caption_inputs.read(block) for block in _split_into_blocks(rows, _ROWS_PER_BLOCK))
    return _embed_batches(model, model.embed_captions, batches)


def pool_embeddings(embeddings: PackedEmbeddings) -> NDArray[np.float32]:
    """Return a single vector for each image or caption, (n, dim): for a set, the normalised mean of its unit vectors.

    A search by a slow model, which scores every pair, can first choose candidates by these vectors.
    """
    if embeddings.lengths is None:
        return embeddings.vectors.numpy()
    means = []
    for rows in _split_into_blocks(np.arange(len(embeddings)), _ROWS_PER_BLOCK):
        vectors, mask = embeddings.unpack(torch.from_numpy(rows))
        means.append((l2_normalize(vectors) * mask[:, :, None]).sum(1))
    return l2_normalize(torch.cat(means)).numpy()


def pool_sets(embeddings: PackedEmbeddings, factor: int) -> PackedEmbeddings:
    """Replace the n vectors of each set by at most ceil(n / ``factor``) unit vectors, the means of similar vectors.

    Similar vectors are found by hierarchical clustering with Ward's criterion (Clavié et al., 2024, "Reducing the Footprint of
    Multi-Vector Retrieval with Minimal Performance Impact via Token Pooling").
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # lazy, because a training does not need scipy

    assert embeddings.lengths is not None
    parts, lengths = [], []
    for vectors in torch.split(l2_normalize(embeddings.vectors), embeddings.lengths.tolist()):
        n_clusters = -(-len(vectors) // factor)
        pooled = vectors
        if n_clusters < len(vectors):
            labels = torch.from_numpy(fcluster(linkage(vectors.numpy(), "ward"), n_clusters, "maxclust")).long() - 1
            sums = vectors.new_zeros(int(labels.max()) + 1, vectors.shape[1]).index_add_(0, labels, vectors)
            pooled = l2_normalize(sums)
        parts.append(pooled)
        lengths.append(len(pooled))
    return PackedEmbeddings(torch.cat(parts), torch.tensor(lengths))


def build_embeddings_fields(model: Model, images: PackedEmbeddings, captions: PackedEmbeddings) -> dict[str, Any]:
    """Return the vectors and their ``similarity``, by the fields of :class:`vse.eval.files.split.Embeddings`.

    If the model compares single vectors, ``images`` and ``captions`` are the embeddings. If the model must score every pair,
    ``pooled_images`` and ``pooled_captions`` have a single vector for each image and caption, see :func:`pool_embeddings`.
    ``captions`` is then set only if the model embeds captions as single vectors. Fields without content are None.
    """
    similarity, pairwise = model.config.similarity, model.scores_every_pair
    return {
        "images": None if pairwise else images.vectors.numpy(),
        "captions": captions.vectors.numpy() if similarity.caption_kind == InputKind.VECTORS else None,
        "pooled_images": pool_embeddings(images) if pairwise else None,
        "pooled_captions": pool_embeddings(captions) if pairwise else None,
        "similarity": similarity.ranking_similarity or "cosine",
    }


def _split_into_blocks(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _embed_batches(
    model: Model, embed: Callable[..., BatchVectors], batches: Iterable[tuple[Tensor, ...]]
) -> PackedEmbeddings:
    model.eval()
    with torch.inference_mode():
        return pack_embeddings(tuple(tensor.cpu() for tensor in embed(*batch)) for batch in batches)


class PairScores:
    """The model's scores of images with captions, computed in tiles so that memory never holds the full matrix.

    A tile holds the scores of a few images with a few captions. The width of a caption is its number of vectors, rounded up to
    a multiple of 4. All tiles of captions of one width have the same shape. The arithmetic of a pair then does not depend on
    the other pairs of its tile, as :func:`ranks_from_blocks` requires.

    ``depends_on_direction`` : True if the score of a pair depends on the direction of the search.
    """

    def __init__(self, model: Model, images: PackedEmbeddings, captions: PackedEmbeddings, precision: str = "fp32") -> None:
        self._model, self._images, self._captions = model.eval(), images, captions
        self._precision = precision
        self._device = next(model.parameters(), torch.empty(0)).device
        self._image_width = int(_count_vectors_per_item(images).max())
        self._caption_widths = -(-_count_vectors_per_item(captions) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        self._images_per_tile = min(MAX_TILE_IMAGES, _next_power_of_two(len(images)))
        self._captions_per_tile_by_width = {
            width: self._count_captions_per_tile(width, count)
            for width, count in Counter(self._caption_widths.tolist()).items()
        }
        self._last_scores: tuple[slice, slice | Tensor | None, tuple[Tensor, Tensor]] | None = None
        first = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            scores = model.similarity(*(self._build_tile(side, first, 1, None) for side in (images, captions)))
        self.depends_on_direction = isinstance(scores, tuple)

    def __call__(self, rows: slice, columns: slice | Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scores of the images ``rows`` with the captions ``columns`` (None: all), on the CPU.

        The first matrix has the scores with images as queries (i2t), the second with captions as queries (t2i). Both are
        equal if scores do not depend on the direction.
        """
        if self._last_scores is None or self._last_scores[0] != rows or self._last_scores[1] is not columns:
            self._last_scores = rows, columns, self._score(rows, columns)
        return self._last_scores[2]

    def score_blocks(self, image_of_caption: Int[Tensor, " n_captions"]) -> tuple[ScoreBlocks, ScoreBlocks | None]:
        """Return the scores of all pairs in blocks of images: with images as queries, and with captions as queries.

        The second result is None if scores do not depend on the direction.
        """
        n_images = len(self._images)
        i2t = ScoreBlocks(n_images, image_of_caption, MAX_TILE_IMAGES, lambda rows, columns: self(rows, columns)[0])
        if not self.depends_on_direction:
            return i2t, None
        return i2t, ScoreBlocks(n_images, image_of_caption, MAX_TILE_IMAGES, lambda rows, columns: self(rows, columns)[1])

    def _score(self, rows: slice, columns: slice | Tensor | None) -> tuple[Tensor, Tensor]:
        n_rows = rows.stop - rows.start
        indices = columns if isinstance(columns, Tensor) else torch.arange(len(self._captions))[columns or slice(None)]
        images = self._build_tile(self._images, torch.arange(rows.start, rows.stop), self._images_per_tile, self._image_width)
        i2t, t2i = torch.empty(2, n_rows, len(indices), device=self._device)
        with torch.inference_mode(), autocast(self._precision, self._device):
            for positions, size, width in self._iterate_tiles(indices):
                scores = self._model.similarity(images, self._build_tile(self._captions, indices[positions], size, width))
                directions = scores if isinstance(scores, tuple) else (scores, scores)
                i2t[:, positions], t2i[:, positions] = (tile[:n_rows, : len(positions)].float() for tile in directions)
        return i2t.cpu(), t2i.cpu()

    def _iterate_tiles(self, indices: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the captions of each tile, as positions in ``indices``, and the shape of the tile.

        The shape is the number of captions in the tile and the number of vectors of each caption, both with padding.
        """
        widths = self._caption_widths[indices]
        for width in sorted(set(widths.tolist())):
            size = self._captions_per_tile_by_width[width]
            for positions in torch.split((widths == width).nonzero()[:, 0], size):
                yield positions, size, width

    def _count_captions_per_tile(self, width: int, n: int) -> int:
        """Return the number of captions in a tile for ``n`` captions with ``width`` vectors each.

        This number is a power of 2, because matrix products of other sizes may round differently.
        """
        fitting = max(1, _MAX_TILE_PAIRS // (self._images_per_tile * self._image_width * width))
        return min(MAX_TILE_CAPTIONS, 1 << (fitting.bit_length() - 1), max(_MIN_TILE_CAPTIONS, _next_power_of_two(n)))

    def _build_tile(self, embeddings: PackedEmbeddings, indices: Tensor, size: int, width: int | None) -> BatchVectors:
        """Return the embeddings at ``indices`` on the device, padded to the shape of a tile.

        Copies of the first embedding pad the tile to ``size`` embeddings. Zeros pad each set to ``width`` vectors
        (None: to the largest set).
        """
        rows = embeddings.unpack(torch.cat([indices, indices[:1].expand(size - len(indices))]), width)
        return tuple(part.to(self._device) for part in rows)


def compute_ranks(
    model: Model,
    images: PackedEmbeddings,
    captions: PackedEmbeddings,
    image_of_caption: Int[Tensor, " n_captions"],
    precision: str = "fp32",
) -> Ranks:
    """Rank all captions for each image and all images for each caption, and return the exact ranks of the right answers.

    ``image_of_caption`` : index of each caption's image.
    ``precision`` : ``fp32`` or ``bf16``; used only by a model that scores every pair.
    """
    ranking_similarity = model.config.similarity.ranking_similarity
    if ranking_similarity is not None:
        return ranks_from_embeddings(images.vectors, captions.vectors, image_of_caption, ranking_similarity)
    return ranks_from_blocks(*PairScores(model, images, captions, precision).score_blocks(image_of_caption))


def _next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _count_vectors_per_item(embeddings: PackedEmbeddings) -> Int[Tensor, " n"]:
    return torch.ones(len(embeddings), dtype=torch.int64) if embeddings.lengths is None else embeddings.lengths


def score_with_bank(
    model: Model,
    bank_split: RetrievalSplit,
    device: torch.device,
    n_images: int,
    images: PackedEmbeddings,
    captions: PackedEmbeddings,
    pool_regions: int | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Return the scores of ``images`` and ``captions`` with a bank of other captions and images.

    The scores show later which images and captions are hubs (similar to many queries). The bank has ``n_images`` random images
    of ``bank_split``, drawn with the seed 0, and all captions of these images. The result is two fields of an embeddings file:
    ``bank_scores_images`` (len(images), n_bank_captions) and ``bank_scores_captions`` (len(captions), n_bank_images).

    ``pool_regions`` : factor by which :func:`pool_sets` reduces the number of regions of each bank image; None: not reduced.
        ``images`` must already be reduced by this factor.
    """
    rows = np.sort(np.random.default_rng(0).permutation(len(bank_split.pairs.images))[:n_images])
    caption_rows = np.flatnonzero(np.isin(bank_split.pairs.image_indices, rows))
    bank_images = encode_images(model, bank_split, device, rows)
    if pool_regions is not None:
        bank_images = pool_sets(bank_images, pool_regions)
    with_images = PairScores(model, bank_images, captions)
    with_captions = PairScores(model, images, encode_captions(model, bank_split, caption_rows))
    slices = split_into_slices(len(images), MAX_TILE_IMAGES)
    bank_slices = split_into_slices(len(rows), MAX_TILE_IMAGES)
    return {
        "bank_scores_images": torch.cat([with_captions(part, None)[1] for part in slices]).numpy(),
        "bank_scores_captions": torch.cat([with_images(part, None)[0] for part in bank_slices]).T.contiguous().numpy(),
    }


class EncoderPair(nn.Module):
    """The image encoder and the caption encoder of a model as one module, so that processes can exchange gradients."""

    def __init__(self, model: Model, precision: str, device: torch.device) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for name, part in model.named_children() if name != "similarity")
        self._embed_functions = model.embed_images, model.embed_captions
        self._kinds, self._dim = model.embedding_kinds, model.dim
        self._precision, self._device = precision, device

    @property
    def has_batch_norms(self) -> bool:
        """True if a batch normalisation uses the statistics of the batch."""
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in self.modules())

    def forward(self, images: BatchVectors, captions: BatchVectors) -> tuple[BatchVectors, BatchVectors]:
        """Return the embeddings of images and captions.

        If there are no images, return empty tensors that depend on every parameter. Each parameter then has a gradient of 0,
        as the sum of gradients over processes requires.
        """
        if not len(images[0]):
            nothing = sum(weight.flatten()[:0].sum() for weight in self.parameters() if weight.requires_grad)
            empty_images, empty_captions = (self._build_empty_embeddings(kind, nothing) for kind in self._kinds)
            return empty_images, empty_captions
        embed_images, embed_captions = self._embed_functions
        with autocast(self._precision, self._device):
            return embed_images(*images), embed_captions(*captions)

    def _build_empty_embeddings(self, kind: InputKind, nothing: Tensor | int) -> BatchVectors:
        if kind == InputKind.VECTORS:
            return (torch.zeros(0, self._dim, device=self._device) + nothing,)
        vectors = torch.zeros(0, 1, self._dim, device=self._device) + nothing
        return vectors, torch.zeros(0, 1, dtype=torch.bool, device=self._device)


def seed_random_numbers(seed: int, device: torch.device) -> None:
    """Seed torch's random numbers on the CPU and on ``device``.

    On the CPU this is faster than ``torch.manual_seed``, which prepares the seeds of all devices. That takes a millisecond, 2%
    of a step of a small model.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)


class BatchEmbedder:
    """A forward and a backward pass of both encoders for a batch, which can be split into chunks to save memory.

    If there are several chunks, only their embeddings are kept, and each chunk is embedded again for its gradients (gradient
    cache: Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").

    ``encoders`` : the encoders.
    ``summing_encoders`` : the encoders in the wrapper of :meth:`ProcessGroup.wrap_encoders`, which sums gradients over the
        processes.
    ``seed`` : seed of random numbers in the encoders, such as dropout.
    """

    def __init__(self, encoders: nn.Module, summing_encoders: nn.Module, seed: int) -> None:
        self._encoders, self._summing_encoders, self._seed = encoders, summing_encoders, seed

    def embed(self, chunks: list[tuple[BatchVectors, BatchVectors]], ends_update: bool) -> tuple[BatchVectors, BatchVectors]:
        """Return the embeddings of the images and of the captions of all chunks.

        ``chunks`` : model inputs for the images and for the captions of each chunk.
        ``ends_update`` : whether an update of the weights follows this batch, so that :meth:`backward` sums the gradients
            over the processes.
        """
        self._chunks, self._ends_update = chunks, ends_update
        if len(chunks) == 1:
            with postpone_gradient_sum(self._summing_encoders, not ends_update):
                self._joined = self._embed_chunk(self._summing_encoders, 0)
            return self._joined
        with torch.no_grad():
            parts = [self._embed_chunk(self._encoders, k) for k in range(len(chunks))]
        images, captions = (_join_chunks(list(side)) for side in zip(*parts, strict=True))
        for side in (images, captions):
            side[0].requires_grad_()
        self._joined = images, captions
        return self._joined

    def backward(self, cost: Tensor) -> None:
        """Add the gradients of a cost of the last embedded batch to the gradients of the encoders."""
        with postpone_gradient_sum(self._summing_encoders, not self._ends_update):
            cost.backward()  # type: ignore[no-untyped-call]
        if len(self._chunks) == 1:
            return
        start = 0
        for k, (images, _) in enumerate(self._chunks):
            rows = slice(start, start + len(images[0]))
            with postpone_gradient_sum(self._summing_encoders, not self._ends_update or k < len(self._chunks) - 1):
                sides = self._embed_chunk(self._summing_encoders, k)
                vectors = [(side[0], joined[0].grad) for side, joined in zip(sides, self._joined, strict=True)]
                learned = [(side, gradient) for side, gradient in vectors if side.requires_grad and gradient is not None]
                gradients = [gradient[rows][:, : side.shape[1]] for side, gradient in learned]
                torch.autograd.backward([side for side, _ in learned], gradients)
            start = rows.stop

    def _embed_chunk(self, encoders: nn.Module, k: int) -> tuple[BatchVectors, BatchVectors]:
        seed_random_numbers(self._seed + k, self._chunks[k][0][0].device)
        images, captions = encoders(*self._chunks[k])
        return images, captions


def _join_chunks(parts: list[BatchVectors]) -> BatchVectors:
    longest = max(part[0].shape[1] for part in parts)
    return tuple(torch.cat(list(tensors)) for tensors in zip(*(pad_sets(part, longest) for part in parts), strict=True))
