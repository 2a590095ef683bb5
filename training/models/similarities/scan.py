"""Stacked cross attention (SCAN): each word attends to the regions of an image, or each region to the words of a caption."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch.utils.checkpoint import checkpoint

from vse.training.kinds import Encoded, Kind, select
from vse.training.models.similarities.base import Similarity, SimilaritySettings, root_or_zero

_EPS = 1e-8  # added to norms, and the smallest denominator of a cosine, as in the authors' code
_BLOCK = {"cpu": 2**20, "cuda": 2**26}  # cosines of regions and words at a time; on a CPU they fit into its caches
_KEPT = 2**26  # up to this number of cosines in a call, everything is stored for the backward pass
_GROUPS = 4  # groups of captions with similar lengths in a training step
_STEEP = 20.0  # above this sharpness, exponents are relative to the highest, against overflow


class ScanSettings(SimilaritySettings):
    """Aggregated cosines of query vectors with the context they attend to (SCAN: Lee et al., ECCV 2018, Eqs. 1 to 10).

    With ``t2i`` the words e_j of a caption attend to the regions v_k of an image; with ``i2t``, regions to words:

        a_kj = v_k . e_j,  h_kj = [a_kj]_+ / ||[a_k.]_+||,  w_kj = softmax_k(sharpness h_kj),  R_j = cos(e_j, sum_k w_kj v_k)

    and the score aggregates R_j over j. Both directions of retrieval have the same score. All vectors are unit vectors.
    """

    name: Literal["scan"] = "scan"
    images: ClassVar = Kind.SETS
    captions: ClassVar = Kind.SETS
    needs_unit_length: ClassVar = True
    attention: Literal["t2i", "i2t"] = Field("t2i", description="t2i: words attend to regions; i2t: regions attend to words")
    aggregation: Literal["avg", "lse", "sum", "max"] = Field(
        "avg",
        description="how the R_j of a pair are aggregated: mean, log(sum_j exp(lse_sharpness R_j)) / lse_sharpness, sum, max",
    )
    sharpness: float = Field(9.0, gt=0, le=1000, description="lambda_1 of the paper, lambda_softmax of the code")
    lse_sharpness: float = Field(6.0, gt=0, le=1000, description="lambda_2 of the paper, lambda_lse of the code; for lse only")
    raw_feature_norm: Literal["clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "clipped", "softmax", "no_norm"] = Field(
        "clipped_l2norm",
        description="normalisation of a_kj before the softmax, with the names of the code: clipped: the rectifier; l1norm, "
        "l2norm, softmax: over the queries j of each k",
    )
    rectifier: Literal["relu", "leaky_relu"] = Field(
        "relu",
        description="rectifier of the clipped norms: relu (the paper), or leaky_relu with slope 0.1 (the authors' code)",
    )

    @property
    def attends(self) -> Literal["t2i", "i2t"]:
        return self.attention

    def build(self, dim: int) -> Similarity:
        return Scan(self)


class Scan(Similarity):
    """Scores of sets of regions with sets of words.

    Attended vectors are not computed. The product of one with a query is e_j . sum_k w_kj v_k = sum_k w_kj a_kj. Its length is
    |sum_k w_kj v_k|^2 = w_j' G w_j, where G has the inner products of the vectors of one set. Softmaxes are not normalised,
    because cosines do not depend on it. For large batches the backward pass computes each block of pairs again.
    """

    def __init__(self, settings: ScanSettings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, images: Encoded, captions: Encoded) -> Float[Tensor, "n_images n_captions"]:
        if not torch.is_grad_enabled():  # the arithmetic of a pair must not depend on other pairs
            return self._score_all(images, captions)
        order = captions[1].sum(1).argsort()
        groups = order.chunk(_GROUPS)
        return torch.cat([self._score_all(images, _trim_padding(select(captions, group))) for group in groups], 1)[
            :, order.argsort()
        ]

    def score_pairs(
        self, images: Encoded, captions: Encoded, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, " k"]:
        context, context_mask, queries, query_mask = self._select_pairs(images, captions, rows, columns)
        with torch.autocast(context.device.type, enabled=False):
            cosines, squares = (context @ queries.transpose(1, 2))[..., None], queries.square().sum(2, keepdim=True)
            return self._aggregate(self._relevance(cosines, _gram(context), squares, context_mask, query_mask), query_mask)[
                :, 0
            ]

    def attention(
        self, images: Encoded, captions: Encoded, rows: Int[Tensor, " k"], columns: Int[Tensor, " k"]
    ) -> Float[Tensor, "k n_context n_queries"]:
        """Return the weights w of single pairs: over regions for each word or, with i2t, over words for each region."""
        context, context_mask, queries, query_mask = self._select_pairs(images, captions, rows, columns)
        weights = self._weights((context @ queries.transpose(1, 2))[..., None], context_mask, query_mask)
        return (weights / weights.sum(1, keepdim=True))[..., 0]

    def _sides(self, images: Encoded, captions: Encoded) -> tuple[Encoded, Encoded]:
        """Return the context (the vectors attended to) and the queries (the attending vectors), with zeros for padding."""
        sides = [(vectors * mask[:, :, None], mask) for vectors, mask in (images, captions)]
        context, queries = sides if self.settings.attention == "t2i" else reversed(sides)
        return context, queries

    def _select_pairs(
        self, images: Encoded, captions: Encoded, rows: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the context vectors, their mask, the query vectors and their mask (k, n_queries, 1) of single pairs."""
        (context, context_mask), (queries, query_mask) = self._sides(select(images, rows), select(captions, columns))
        return context, context_mask, queries, query_mask[:, :, None]

    def _score_all(self, images: Encoded, captions: Encoded) -> Float[Tensor, "n_images n_captions"]:
        (context, context_mask), (queries, query_mask) = self._sides(images, captions)
        (n, n_context, dim), (m, n_queries) = context.shape, query_mask.shape
        of_one = n_context * n_queries * m
        size = 2 ** max(0, (_BLOCK.get(context.device.type, 2**26) // max(1, of_one)).bit_length() - 1)
        again = torch.is_grad_enabled() and n * of_one > _KEPT
        products = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device := context.device.type) else context.dtype
        )
        low, columns = context.to(products), queries.transpose(0, 1).reshape(-1, dim).to(products).T
        squares = queries.square().sum(2).T

        def block(rows: slice) -> Tensor:
            with torch.autocast(device, enabled=False):
                cosines = (low[rows].flatten(0, 1) @ columns).to(context.dtype).view(-1, n_context, n_queries, m)
                relevance = self._relevance(cosines, _gram(context[rows]), squares, context_mask[rows], query_mask.T)
                return self._aggregate(relevance, query_mask.T)

        blocks = [slice(start, start + size) for start in range(0, n, size)]
        parts = [
            checkpoint(block, rows, use_reentrant=False, preserve_rng_state=False) if again else block(rows) for rows in blocks
        ]
        scores = torch.cat([*parts, context.new_empty(0, m)])
        return scores if self.settings.attention == "t2i" else scores.T

    def _relevance(
        self,
        cosines: Float[Tensor, "k n_context n_queries m"],
        gram: Float[Tensor, "k n_context n_context"],
        squares: Float[Tensor, "... n_queries m"],
        context_mask: Bool[Tensor, "k n_context"],
        query_mask: Bool[Tensor, "... n_queries m"],
    ) -> Float[Tensor, "k n_queries m"]:
        """Return R, the cosine of each query with its attended vector, or 0 for padding.

        ``cosines`` are those of context and queries, ``gram`` the inner products of the context, ``squares`` the squared query
        lengths.
        """
        weights = self._weights(cosines, context_mask, query_mask)
        products = (weights * cosines).sum(1)
        flat = weights.flatten(2)
        attended = (torch.bmm(gram, flat) * flat).sum(1).view_as(products)
        least = _EPS * weights.sum(1)
        return products * torch.maximum(attended * squares, least.square()).rsqrt()

    def _weights(
        self, cosines: Float[Tensor, "k n_context n_queries m"], context_mask: Bool[Tensor, "k n_context"], query_mask: Tensor
    ) -> Float[Tensor, "k n_context n_queries m"]:
        """Return the attention weights of each query, not normalised: a common factor does not change the cosine."""
        exponents = self._exponents(cosines, query_mask)
        there = context_mask[:, :, None, None]
        if self.settings.sharpness > _STEEP:
            exponents = exponents - exponents.detach().masked_fill(~there, -torch.inf).amax(1, keepdim=True)
        weights = exponents.exp_()
        return weights if bool(context_mask.all()) else weights * there

    def _exponents(self, cosines: Tensor, query_mask: Tensor) -> Tensor:
        """Return the exponents of the softmax, sharpness times h.

        h are the cosines, normalised over the queries (dimension 2) as ``raw_feature_norm`` states.
        """
        norm, sharpness = self.settings.raw_feature_norm, self.settings.sharpness
        if norm == "softmax":
            return sharpness * cosines.masked_fill(~query_mask, -torch.inf).softmax(2).masked_fill(~query_mask, 0)
        if norm.startswith("clipped"):
            cosines = cosines.relu() if self.settings.rectifier == "relu" else leaky_relu(cosines, 0.1)
        if norm in ("clipped", "no_norm"):
            return sharpness * cosines
        sums = (cosines.square() if norm.endswith("l2norm") else cosines.abs()).sum(2, keepdim=True)
        return cosines * (sharpness / ((root_or_zero(sums) if norm.endswith("l2norm") else sums) + _EPS))

    def _aggregate(
        self, relevance: Float[Tensor, "k n_queries m"], query_mask: Bool[Tensor, "... n_queries m"]
    ) -> Float[Tensor, "k m"]:
        kind, sharpness = self.settings.aggregation, self.settings.lse_sharpness
        if kind == "max":
            return relevance.masked_fill(~query_mask, -torch.inf).amax(1)
        if kind == "lse":
            return (sharpness * relevance).masked_fill(~query_mask, -torch.inf).logsumexp(1) / sharpness
        total = relevance.sum(1)
        return total / query_mask.sum(-2) if kind == "avg" else total


def _gram(sets: Float[Tensor, "k n dim"]) -> Float[Tensor, "k n n"]:
    return sets @ sets.transpose(1, 2)


def _trim_padding(sets: Encoded) -> Encoded:
    vectors, mask = sets
    longest = int((mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax())
    return vectors[:, :longest], mask[:, :longest]
