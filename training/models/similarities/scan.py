"""Similarities of a set of regions and a set of words: stacked cross attention (SCAN) and late interaction (MaxSim)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch.utils.checkpoint import checkpoint

from vse.training.kinds import BatchVectors, InputKind, is_known_full, select_batch_rows
from vse.training.models.similarities.base import Similarity, SimilaritySettings, safe_sqrt

_EPS = 1e-8  # added to norms, and lower bound on the denominator of a cosine, as in the authors' code
_COSINES_PER_BLOCK = {"cpu": 2**20, "cuda": 2**26}  # number of cosines in memory at a time; on a CPU they fit into its caches
_MAX_STORED_COSINES = 2**26  # for more cosines in a call, the backward pass computes each block again
_N_LENGTH_GROUPS = 4  # number of groups of captions with similar lengths in a training step
_MAX_PLAIN_SHARPNESS = 20.0  # with a higher sharpness, the highest exponent is subtracted first, to avoid overflow


class ScanSettings(SimilaritySettings):
    """Cosines of query vectors with the vectors they attend to, aggregated (SCAN: Lee et al., ECCV 2018, Eqs. 1 to 10).

    With ``attention: t2i`` the queries e_j are the words of a caption, and the context v_k are the regions of an image. With
    ``i2t`` the queries are the regions, and the context are the words.

        a_kj = v_k . e_j,  h_kj = [a_kj]_+ / ||[a_k.]_+||,  w_kj = softmax_k(sharpness h_kj),  R_j = cos(e_j, sum_k w_kj v_k)

    [x]_+ is max(0, x), and the norm is over j. The score aggregates R_j over j. Both directions of retrieval have the same
    score. All vectors are unit vectors.
    """

    name: Literal["scan"] = "scan"
    image_kind: ClassVar = InputKind.SETS
    caption_kind: ClassVar = InputKind.SETS
    needs_unit_length: ClassVar = True
    attention: Literal["t2i", "i2t"] = Field("t2i", description="t2i: words attend to regions; i2t: regions attend to words")
    aggregation: Literal["avg", "lse", "sum", "max"] = Field(
        "avg",
        description="aggregation of the R_j of a pair: avg, their mean; lse, log(sum_j exp(lse_sharpness R_j)) / "
        "lse_sharpness; sum; max",
    )
    sharpness: float = Field(
        9.0, gt=0, le=1000, description="factor of h_kj in the softmax; lambda_1 of the paper, lambda_softmax of the code"
    )
    lse_sharpness: float = Field(
        6.0, gt=0, le=1000, description="factor of R_j in lse; lambda_2 of the paper, lambda_lse of the code"
    )
    raw_feature_norm: Literal["clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "clipped", "softmax", "no_norm"] = Field(
        "clipped_l2norm",
        description="normalisation of a_kj before the softmax, with the names of the code. clipped stands for the rectifier,"
        " and l1norm, l2norm and softmax for a normalisation over the queries j of each k",
    )
    rectifier: Literal["relu", "leaky_relu"] = Field(
        "relu",
        description="rectifier of the clipped norms: relu (the paper), or leaky_relu with slope 0.1 (the authors' code)",
    )

    @property
    def attention_direction(self) -> Literal["t2i", "i2t"]:
        return self.attention

    def build(self, dim: int) -> Similarity:
        return ScanSimilarity(self)


class _Context(NamedTuple):
    """The vectors that queries attend to.

    vectors : (n, n_context, dim)
    mask : (n, n_context)
    gram : inner products (n, n_context, n_context) of the vectors of each context; None: not computed yet
    """

    vectors: Tensor
    mask: Tensor
    gram: Tensor | None = None


class _Queries(NamedTuple):
    """The vectors that attend, prepared for scores with many contexts.

    columns : (dim, n_queries x m), the vectors in the precision of the matrix products
    squares : (n_queries, m), the squared lengths of the vectors
    mask : (n_queries, m)
    """

    columns: Tensor
    squares: Tensor
    mask: Tensor


def _prepare_queries(queries: BatchVectors) -> _Queries:
    vectors, mask = queries
    device = vectors.device.type
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else vectors.dtype
    columns = vectors.transpose(0, 1).reshape(-1, vectors.shape[2]).to(precision).T
    return _Queries(columns, vectors.square().sum(2).T, mask.T)


class ScanSimilarity(Similarity):
    """Scores of sets of regions with sets of words.

    For a query e_j and context vectors v_k, the attended vector sum_k w_kj v_k with attention weights w_kj is never built. Its
    inner product with e_j is sum_k w_kj (v_k . e_j). Its squared length is w_j' G w_j, where G holds the inner products of
    the v_k. The weights need not sum to 1, because a common factor does not change a cosine.
    """

    def __init__(self, settings: ScanSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Float[Tensor, "n_images n_captions"]:
        context, queries = self._context_and_queries(images, captions)
        words_attend = self.settings.attention == "t2i"
        if not torch.is_grad_enabled():  # the arithmetic of a pair must not depend on other pairs
            scores = self._score_all(_Context(*context), _prepare_queries(queries))
            return scores if words_attend else scores.T
        order = captions[1].sum(1).argsort()
        all_words = queries if words_attend else context
        groups = [_trim_padding(select_batch_rows(all_words, rows)) for rows in order.chunk(_N_LENGTH_GROUPS)]
        if words_attend:
            regions, mask = context
            image_context = _Context(regions, mask, _gram_matrices(regions))
            parts = [self._score_all(image_context, _prepare_queries(words)) for words in groups]
        else:
            image_queries = _prepare_queries(queries)
            parts = [self._score_all(_Context(*words), image_queries).T for words in groups]
        return torch.cat(parts, 1)[:, order.argsort()]

    def score_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        context, context_mask, queries, query_mask = self._select_pairs(images, captions, rows, columns)
        with torch.autocast(context.device.type, enabled=False):
            cosines, squares = (context @ queries.transpose(1, 2))[..., None], queries.square().sum(2, keepdim=True)
            return self._aggregate_relevance(
                self._compute_relevance(cosines, _gram_matrices(context), squares, context_mask, query_mask), query_mask
            )[:, 0]

    def compute_attention(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, "k n_context n_queries"]:
        """Return the attention weights of each pair. They sum to 1 for each word or, with i2t, for each region."""
        context, context_mask, queries, query_mask = self._select_pairs(images, captions, rows, columns)
        weights = self._compute_attention_weights((context @ queries.transpose(1, 2))[..., None], context_mask, query_mask)
        return (weights / weights.sum(1, keepdim=True))[..., 0]

    def _context_and_queries(self, images: BatchVectors, captions: BatchVectors) -> tuple[BatchVectors, BatchVectors]:
        """Return the context (the vectors attended to) and the queries (the attending vectors). Padding becomes zeros."""
        sides = [
            (vectors if is_known_full(mask) else vectors * mask[:, :, None], mask) for vectors, mask in (images, captions)
        ]
        context, queries = sides if self.settings.attention == "t2i" else reversed(sides)
        return context, queries

    def _select_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the context vectors, context mask, query vectors and query mask of k pairs of an image and a caption.

        The query mask has the shape (k, n_queries, 1): each context is compared with a single set of queries.
        """
        (context, context_mask), (queries, query_mask) = self._context_and_queries(
            select_batch_rows(images, rows), select_batch_rows(captions, columns)
        )
        return context, context_mask, queries, query_mask[:, :, None]

    def _score_all(self, context: _Context, queries: _Queries) -> Float[Tensor, "n m"]:
        """Return the scores of n contexts with m sets of queries."""
        (n, n_context, _), (n_queries, m) = context.vectors.shape, queries.mask.shape
        device, n_per_context = context.vectors.device.type, n_context * n_queries * m
        size = 2 ** max(0, (_COSINES_PER_BLOCK.get(device, 2**26) // max(1, n_per_context)).bit_length() - 1)
        recompute = torch.is_grad_enabled() and n * n_per_context > _MAX_STORED_COSINES

        def compute_cosines(vectors: Tensor) -> Tensor:
            with torch.autocast(device, enabled=False):
                low = vectors.to(queries.columns.dtype).flatten(0, 1)
                return (low @ queries.columns).to(vectors.dtype).view(len(vectors), n_context, n_queries, m)

        def score_block(vectors: Tensor, mask: Tensor, cosines: Tensor | None, gram: Tensor | None) -> Tensor:
            with torch.autocast(device, enabled=False):
                cosines = compute_cosines(vectors) if cosines is None else cosines
                gram = _gram_matrices(vectors) if gram is None else gram
                relevance = self._compute_relevance(cosines, gram, queries.squares, mask, queries.mask)
                return self._aggregate_relevance(relevance, queries.mask)

        vectors, masks = torch.split(context.vectors, size), torch.split(context.mask, size)
        absent = [None] * len(vectors)
        at_once = torch.is_grad_enabled() and not recompute  # one large product takes less time, also backwards
        cosines = torch.split(compute_cosines(context.vectors), size) if at_once else absent
        grams = absent if context.gram is None else torch.split(context.gram, size)
        return _score_in_blocks(score_block, recompute, vectors, masks, cosines, grams)

    def _compute_relevance(
        self,
        cosines: Float[Tensor, "k n_context n_queries m"],
        gram: Float[Tensor, "k n_context n_context"],
        squares: Float[Tensor, "... n_queries m"],
        context_mask: Bool[Tensor, "k n_context"],
        query_mask: Bool[Tensor, "... n_queries m"],
    ) -> Float[Tensor, "k n_queries m"]:
        """Return R, the cosine of each query with the vector it attends to, or 0 for padding.

        Each of k contexts is compared with each of m sets of queries. For single pairs, m is 1.

        ``cosines`` : cosines of context vectors with queries.
        ``gram`` : inner products of context vectors.
        ``squares`` : squared lengths of queries.
        """
        weights = self._compute_attention_weights(cosines, context_mask, query_mask)
        products = (weights * cosines).sum(1)
        flat = weights.flatten(2)
        attended = (torch.bmm(gram, flat) * flat).sum(1).view_as(products)
        least = _EPS * weights.sum(1)
        return products * torch.maximum(attended * squares, least.square()).rsqrt()

    def _compute_attention_weights(
        self, cosines: Float[Tensor, "k n_context n_queries m"], context_mask: Bool[Tensor, "k n_context"], query_mask: Tensor
    ) -> Float[Tensor, "k n_context n_queries m"]:
        """Return the attention weights of each query, not scaled to the sum 1."""
        exponents = self._compute_softmax_inputs(cosines, query_mask)
        exists = context_mask[:, :, None, None]
        if self.settings.sharpness > _MAX_PLAIN_SHARPNESS:
            exponents = exponents - exponents.detach().masked_fill(~exists, -torch.inf).amax(1, keepdim=True)
        weights = exponents.exp_()
        return weights if is_known_full(context_mask) else weights * exists

    def _compute_softmax_inputs(self, cosines: Tensor, query_mask: Tensor) -> Tensor:
        """Return the inputs of the attention softmax: ``sharpness`` times the cosines, normalised by ``raw_feature_norm``."""
        norm, sharpness = self.settings.raw_feature_norm, self.settings.sharpness
        if norm == "softmax":
            return sharpness * cosines.masked_fill(~query_mask, -torch.inf).softmax(2).masked_fill(~query_mask, 0)
        if norm.startswith("clipped"):
            cosines = cosines.relu() if self.settings.rectifier == "relu" else leaky_relu(cosines, 0.1)
        if norm in ("clipped", "no_norm"):
            return sharpness * cosines
        sums = (cosines.square() if norm.endswith("l2norm") else cosines.abs()).sum(2, keepdim=True)
        return cosines * (sharpness / ((safe_sqrt(sums) if norm.endswith("l2norm") else sums) + _EPS))

    def _aggregate_relevance(
        self, relevance: Float[Tensor, "k n_queries m"], query_mask: Bool[Tensor, "... n_queries m"]
    ) -> Float[Tensor, "k m"]:
        kind, sharpness = self.settings.aggregation, self.settings.lse_sharpness
        if kind == "max":
            return relevance.masked_fill(~query_mask, -torch.inf).amax(1)
        if kind == "lse":
            return (sharpness * relevance).masked_fill(~query_mask, -torch.inf).logsumexp(1) / sharpness
        total = relevance.sum(1)
        return total / query_mask.sum(-2) if kind == "avg" else total


def _gram_matrices(sets: Float[Tensor, "k n dim"]) -> Float[Tensor, "k n n"]:
    with torch.autocast(sets.device.type, enabled=False):
        return sets @ sets.transpose(1, 2)


def _score_in_blocks(score_block: Callable[..., Tensor], recompute: bool, *inputs: Sequence[Tensor | None]) -> Tensor:
    """Return the scores of all blocks. ``inputs`` are tensors that ``torch.split`` divided into these blocks.

    With slices instead of ``split``, the backward pass would add a gradient of the complete tensor for each block.

    recompute : whether the backward pass computes each block again, to save memory
    """
    blocks = zip(*inputs, strict=True)
    if recompute:
        score_block = partial(checkpoint, score_block, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([score_block(*block) for block in blocks])


def _trim_padding(sets: BatchVectors) -> BatchVectors:
    """Cut the sets to the length of the longest one. On a GPU return them unchanged, to avoid a slow read of the mask."""
    vectors, mask = sets
    if mask.device.type != "cpu":
        return sets
    longest = int((mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax())
    return vectors[:, :longest], mask[:, :longest]


class MaxSimSettings(SimilaritySettings):
    """The mean cosine of words with their nearest region (ColBERT: Khattab and Zaharia, SIGIR 2020).

    With ``queries: words``, an image with region vectors v_k and a caption with word vectors e_j have the score
    mean_j max_k cos(e_j, v_k). ColBERT has the sum over the words; the mean makes scores of long and short captions
    comparable. With ``regions`` the roles are exchanged: mean_k max_j cos(e_j, v_k). ``both`` averages the two scores. Both
    directions of retrieval have the same score.
    """

    name: Literal["maxsim"] = "maxsim"
    image_kind: ClassVar = InputKind.SETS
    caption_kind: ClassVar = InputKind.SETS
    needs_unit_length: ClassVar = True
    queries: Literal["words", "regions", "both"] = Field(
        "words", description="words look for their nearest region, regions for their nearest word, or both (the mean)"
    )

    def build(self, dim: int) -> Similarity:
        return MaxSimSimilarity(self)


class MaxSimSimilarity(Similarity):
    """The similarity of :class:`MaxSimSettings`, computed in blocks of images."""

    def __init__(self, settings: MaxSimSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Float[Tensor, "n_images n_captions"]:
        (regions, region_mask), (words, word_mask) = images, captions
        (n, n_regions, _), (m, n_words, _) = regions.shape, words.shape
        n_per_image = n_regions * n_words * m
        size = max(1, _COSINES_PER_BLOCK.get(regions.device.type, 2**26) // max(1, n_per_image))
        recompute = torch.is_grad_enabled() and n * n_per_image > _MAX_STORED_COSINES

        def score_block(regions: Tensor, region_mask: Tensor) -> Tensor:
            cosines = (regions.flatten(0, 1) @ words.flatten(0, 1).T).view(len(regions), n_regions, m, n_words)
            return self._aggregate(cosines, region_mask, word_mask[None])

        return _score_in_blocks(score_block, recompute, torch.split(regions, size), torch.split(region_mask, size))

    def score_pairs(
        self, images: BatchVectors, captions: BatchVectors, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        (regions, region_mask), (words, word_mask) = select_batch_rows(images, rows), select_batch_rows(captions, columns)
        return self._aggregate((regions @ words.transpose(1, 2))[:, :, None], region_mask, word_mask[:, None])[:, 0]

    def _aggregate(
        self,
        cosines: Float[Tensor, "k n_regions m n_words"],
        region_mask: Bool[Tensor, "k n_regions"],
        word_mask: Bool[Tensor, "#k m n_words"],
    ) -> Float[Tensor, "k m"]:
        """Return the scores of k images with m captions from the cosines of their regions and words. Padding is left out."""
        scores = []
        if self.settings.queries != "regions":
            nearest = _exclude_padding(cosines, region_mask[:, :, None, None]).amax(1)
            scores.append((nearest * word_mask).sum(2) / word_mask.sum(2))
        if self.settings.queries != "words":
            nearest = _exclude_padding(cosines, word_mask[:, None]).amax(3)
            scores.append((nearest * region_mask[:, :, None]).sum(1) / region_mask.sum(1)[:, None])
        return sum(scores[1:], start=scores[0]) / len(scores)


def _exclude_padding(cosines: Tensor, mask: Tensor) -> Tensor:
    """Return the cosines with minus infinity where ``mask`` is false."""
    return cosines if is_known_full(mask) else cosines.masked_fill(~mask, -torch.inf)
