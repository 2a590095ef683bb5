"""TOD-Net, a similarity that deforms both vectors of a pair, and a shortlist of the pairs that the model has to score."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vse.eval.ranking.ranks import ScoreBlocks, blocks_from_scores, split_into_slices
from vse.features.backbones.device import move_tensor
from vse.pipeline.errors import UserError
from vse.training.kinds import BatchVectors
from vse.training.models.deformations import ConditionalFlow, ConditionalMlp
from vse.training.models.encoders.base import l2_normalize
from vse.training.models.similarities.base import Scores, Similarity, SimilaritySettings

log = logging.getLogger(__name__)

# Scores of the images at ``rows`` with the captions at the same positions in ``columns``.
PairScorer = Callable[[Int[Tensor, " k"], Int[Tensor, " k"]], Float[Tensor, " k"]]

_EPS = 1e-8  # lower bound on the denominator of a cosine
_PAIRS_PER_BLOCK = {"cpu": 2**11, "cuda": 2**15}  # number of pairs that are deformed at a time
_MAX_STORED_NUMBERS = 2**28  # for more numbers in a call, the backward pass computes each block again
_CONDITION_SIDES = {  # vectors that are the conditions, in the directions i2t and t2i
    "target": ("captions", "images"),
    "query": ("images", "captions"),
    "caption": ("captions", "captions"),
    "image": ("images", "images"),
    "none": (None, None),
}


class TodNetSettings(SimilaritySettings):
    """Cosines in a space that is deformed by a condition (TOD-Net: Matsubara, arXiv 2019).

    The score of an image x and a caption y under a condition v is cos(T(x; v), T(y; v)). By default, v is the target of the
    search: the caption y if an image is the query, the image x if a caption is the query. T is by default a flow of coupling
    layers, see :class:`ConditionalFlow`. The available copies of the paper leave some settings blank. Their defaults are our
    choice.
    """

    measures_pairs: ClassVar = True

    name: Literal["todnet"] = "todnet"
    condition: Literal["target", "query", "caption", "image", "none"] = Field(
        "target", description="v: the target or the query of a search, always the caption, always the image, or none"
    )
    transform: Literal["flow", "mlp"] = Field("flow", description="T: a conditional Real-NVP flow, or an MLP of x and v")
    layers: PositiveInt = Field(3, description="number of coupling layers of the flow")
    hidden: PositiveInt | None = Field(
        None, description="number of hidden layers of each network; null: 2 in the flow, 4 in the MLP, as in the paper"
    )
    width: PositiveInt | None = Field(None, description="width of the hidden layers; null: the length of an embedding")
    scale: Literal["exp", "exp_tanh", "sigmoid", "product"] = Field(
        "exp",
        description="factor of the changed half of a coupling layer whose network returns s: exp(s), exp(tanh(s)), "
        "sigmoid(s + 2), or s (product), which may be 0, so that T need not have an inverse",
    )
    identity: bool = Field(
        True,
        description="start with T(x; v) = x: last layers start as 0, and x is added to the output of the MLP. With sigmoid "
        "the factors of the coupling layers start as 0.88",
    )
    kept_first: Literal["first", "second"] = Field(
        "first", description="which half of a vector the first coupling layer keeps: the first or the second half"
    )
    networks: Literal["one", "per_direction"] = Field(
        "one", description="one T for both directions of retrieval, or one for each"
    )
    normalize_before: bool = Field(True, description="normalise vectors and conditions to unit length before T")
    normalize_after: bool = Field(True, description="unit vectors after T; false: scores are inner products")

    def build(self, dim: int) -> Similarity:
        return TodNetSimilarity(self, dim)


class TodNetSimilarity(Similarity):
    """Scores of images with captions in deformed spaces; two matrices if scores depend on the direction.

    If captions or images are conditions of a deformation T, each pair needs a pass through T. Pairs are then scored in
    blocks. For large batches the backward pass computes each block again. ``maps`` holds the deformations: one for both
    directions, or one for each.
    """

    def __init__(self, settings: TodNetSettings, dim: int) -> None:
        super().__init__()
        self.settings = settings
        self._condition_sides = _CONDITION_SIDES[settings.condition]
        self.maps = nn.ModuleList(self._build_deformation(dim) for _ in range(1 if settings.networks == "one" else 2))
        width = settings.width or dim
        per_layer = self._n_hidden_layers * width + dim
        self._numbers_per_pair = per_layer * (settings.layers if settings.transform == "flow" else 1)

    @property
    def _n_hidden_layers(self) -> int:
        return self.settings.hidden or (2 if self.settings.transform == "flow" else 4)

    def _build_deformation(self, dim: int) -> ConditionalFlow | ConditionalMlp:
        settings = self.settings
        widths = [settings.width or dim] * self._n_hidden_layers
        condition_dim = 0 if settings.condition == "none" else dim
        if settings.transform == "mlp":
            return ConditionalMlp(dim, condition_dim, widths, settings.identity)
        if dim % 2:
            raise UserError(
                f"similarity: todnet splits embeddings into halves, but their length is {dim}; "
                "use embeddings of an even length, or similarity.transform=mlp"
            )
        kept = 0 if settings.kept_first == "first" else 1
        return ConditionalFlow(dim, condition_dim, settings.layers, widths, settings.scale, settings.identity, kept)

    def forward(self, images: BatchVectors, captions: BatchVectors) -> Scores:
        vectors = self._prepare_vectors(images, captions)
        i2t = self._score_direction(self.maps[0], self._condition_sides[0], vectors)
        if not self.depends_on_direction:
            return i2t
        return i2t, self._score_direction(self.maps[-1], self._condition_sides[1], vectors)

    @property
    def has_condition(self) -> bool:
        """True if the deformation T has a condition v. Each pair then needs a pass through T."""
        return self._condition_sides[0] is not None

    @property
    def depends_on_direction(self) -> bool:
        """True if the score of a pair depends on the direction."""
        return len(self.maps) == 2 or self._condition_sides[0] != self._condition_sides[1]

    def _prepare_vectors(self, images: BatchVectors, captions: BatchVectors) -> dict[str, Tensor]:
        """Return the vectors by the keys ``images`` and ``captions``, of unit length if ``normalize_before`` is true."""
        vectors = {"images": images[0], "captions": captions[0]}
        return {side: l2_normalize(values) for side, values in vectors.items()} if self.settings.normalize_before else vectors

    def measure_pairs(self, images: BatchVectors, captions: BatchVectors) -> dict[str, float]:
        """Return ``deformation``, the mean distance between a vector x and its deformation T(x; v).

        The mean is over both vectors of each pair and both directions. If scores are cosines, both x and T(x; v) are scaled to
        unit length, so the distance is 0 if T keeps the direction of every vector, and 2 at most.
        """
        vectors = self._prepare_vectors(images, captions)
        distances = []
        for deform, side in zip((self.maps[0], self.maps[-1]), self._condition_sides, strict=True):
            for x in vectors.values():
                deformed = deform(x, None if side is None else vectors[side])
                if self.settings.normalize_after:
                    x, deformed = l2_normalize(x), l2_normalize(deformed)
                distances.append((deformed - x).norm(dim=1).mean())
        return {"deformation": float(torch.stack(distances).mean().detach())}

    def _score_direction(
        self, deform: nn.Module, condition_side: str | None, vectors: dict[str, Tensor]
    ) -> Float[Tensor, "n_images n_captions"]:
        assert isinstance(deform, ConditionalFlow | ConditionalMlp)
        if condition_side is None:
            return self._compare(
                *([part[None] for part in deform.compute_deformed_parts(side, None)] for side in vectors.values())
            )[0]
        if condition_side == "images":
            return self._score_under_conditions(deform, vectors["images"], vectors["captions"])
        return self._score_under_conditions(deform, vectors["captions"], vectors["images"]).T

    def _score_under_conditions(
        self, deform: ConditionalFlow | ConditionalMlp, conditions: Float[Tensor, "k dim"], others: Float[Tensor, "n dim"]
    ) -> Float[Tensor, "k n"]:
        """Return the scores of k vectors (rows) with n vectors of the other kind (columns), such as captions with images.

        Both vectors of a pair are deformed under the condition of the row: the vector of the row itself.
        """
        k, n = len(conditions), len(others)
        size = max(1, _PAIRS_PER_BLOCK.get(conditions.device.type, 2**15) // max(1, n))
        recompute = torch.is_grad_enabled() and k * n * self._numbers_per_pair > _MAX_STORED_NUMBERS

        def score_block(rows: Tensor) -> Tensor:
            own = [part[:, None] for part in deform.compute_deformed_parts(rows, rows)]
            return self._compare(own, deform.compute_deformed_parts(others[None], rows[:, None]))[:, 0]

        parts = [
            checkpoint(score_block, part, use_reentrant=False, preserve_rng_state=False) if recompute else score_block(part)
            for part in torch.split(conditions, size)
        ]
        return torch.cat([*parts, conditions.new_empty(0, n)])

    def _compare(self, first: list[Tensor], second: list[Tensor]) -> Float[Tensor, "b n m"]:
        """Return the cosines or inner products of vectors (b, n, dim) with vectors (b or 1, m, dim).

        Each argument is a list of tensors that together form the vectors, such as their two halves.
        """
        with torch.autocast(first[0].device.type, enabled=False):
            products = _sum_tensors([a @ b.transpose(1, 2) for a, b in zip(first, second, strict=True)])
            if not self.settings.normalize_after:
                return products
            lengths = [_sum_tensors([part.square().sum(2) for part in side]) for side in (first, second)]
            return products * torch.maximum(lengths[0][:, :, None] * lengths[1][:, None], products.new_tensor(_EPS**2)).rsqrt()

    def score_undeformed(
        self, images: Float[Tensor, "n_images dim"], captions: Float[Tensor, "n_captions dim"]
    ) -> Float[Tensor, "n_images n_captions"]:
        """Return the backbone scores: the scores of all pairs without the deformation T."""
        normalize = self.settings.normalize_before or self.settings.normalize_after
        sides = [l2_normalize(side) if normalize else side for side in (images, captions)]
        return sides[0] @ sides[1].T

    def build_pair_scorer(self, direction: int, images: BatchVectors, captions: BatchVectors) -> PairScorer:
        """Return a function that scores given pairs in the direction 0 (i2t) or 1 (t2i). T must have a condition."""
        side, deform = self._condition_sides[direction], self.maps[0 if direction == 0 else -1]
        assert isinstance(deform, ConditionalFlow | ConditionalMlp)
        assert side is not None
        vectors = self._prepare_vectors(images, captions)
        other = vectors["captions" if side == "images" else "images"]
        scorer = _ConditionedPairScorer(deform, vectors[side], other, self.settings.normalize_after)
        return scorer if side == "images" else lambda rows, columns: scorer(columns, rows)


class _ConditionedPairScorer:
    """A function that scores given pairs of an image and a caption, with one of both as the condition of the deformation T.

    Terms that depend on the condition alone are computed once for each condition. All blocks of pairs have the same shape, so
    that the arithmetic of a pair does not depend on the other pairs. ``normalize`` : whether scores are cosines.
    """

    def __init__(
        self,
        deform: ConditionalFlow | ConditionalMlp,
        conditions: Float[Tensor, "k dim"],
        others: Float[Tensor, "n dim"],
        normalize: bool,
    ) -> None:
        self._deform, self._others, self._normalize = deform, others, normalize
        self._pairs_per_block = _PAIRS_PER_BLOCK.get(conditions.device.type, 2**15)
        self._deformed_conditions, *self._projections = self._map_blocks(
            lambda rows: [torch.cat(deform.compute_deformed_parts(rows, rows), 1), *deform.project_condition(rows)], conditions
        )

    def __call__(self, conditions: Int[Tensor, " p"], others: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return the scores of p pairs.

        Pair k has the vector in row ``conditions[k]`` as the condition, and the other vector in row ``others[k]``.
        """
        if not len(conditions):
            return self._deformed_conditions.new_empty(0)
        return self._map_blocks(self._score_block, torch.stack([conditions, others], 1))[0]

    def _score_block(self, pairs: Int[Tensor, "p 2"]) -> list[Tensor]:
        conditions, projections = self._deformed_conditions[pairs[:, 0]], [p[pairs[:, 0]] for p in self._projections]
        deformed = torch.cat(self._deform.compute_deformed_parts(self._others[pairs[:, 1]], None, projections), 1)
        products = (conditions * deformed).sum(1)
        if not self._normalize:
            return [products]
        lengths = conditions.square().sum(1) * deformed.square().sum(1)
        return [products * lengths.clamp(min=_EPS**2).rsqrt()]

    def _map_blocks(self, function: Callable[[Tensor], list[Tensor]], rows: Tensor) -> list[Tensor]:
        """Apply ``function`` to blocks of rows, and join the results. All blocks have the same number of rows.

        The last block is padded with copies of its first row. The results for these copies are dropped.
        """
        parts = []
        for part in torch.split(rows, self._pairs_per_block):
            padding = part[:1].expand(self._pairs_per_block - len(part), -1)
            parts.append([result[: len(part)] for result in function(torch.cat([part, padding]))])
        return [torch.cat(results) for results in zip(*parts, strict=True)]


def _sum_tensors(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


PAIR_SHARE_PER_ROUND = 0.05  # share of all pairs that a round of :func:`score_shortlist` scores
MIN_PAIRS_PER_ROUND = 2**16  # smallest number of pairs in a round; a smaller round would be a weak check
_N_SAMPLED_PAIRS = 2**20  # number of random pairs from which the lowest backbone score of a round is estimated
_ROWS_PER_BLOCK = 512


def require_shortlist_similarity(run: Path, similarity: nn.Module) -> TodNetSimilarity:
    """Return ``similarity`` if it is a TOD-Net with a condition; otherwise raise UserError with the path ``run``."""
    if isinstance(similarity, TodNetSimilarity) and similarity.has_condition:
        return similarity
    raise UserError(f"{run}: --shortlist is for a TOD-Net with a condition, whose pairs take long; leave it out")


def score_shortlist(
    similarity: TodNetSimilarity,
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    min_pairs_per_round: int = MIN_PAIRS_PER_ROUND,
) -> tuple[tuple[ScoreBlocks, ScoreBlocks | None], dict[str, float]]:
    """Return scores for ranking (i2t and t2i). The slow model scores only promising pairs of an image and a caption.

    The right answers should have the same ranks as if the model scored all pairs. The backbone score of a pair is the score
    without the deformation T. The threshold of a pair is the highest score that the model gives a right answer to the query.
    The model scores pairs in rounds, in descending order of the backbone score minus the threshold. The rounds end when no
    pair of a round reaches its threshold. All remaining pairs rank last, in the order of their backbone scores. A round has
    about 5% of all pairs, and at least about ``min_pairs_per_round``. The first round also has all pairs whose backbone score
    is above the threshold.

    The second result is the share of all pairs that the model scored, by direction. If scores do not depend on the direction,
    the scores t2i are None, and the only direction is ``both``. The threshold of a pair is then the lower of its thresholds
    with the image as the query and with the caption as the query.
    """
    device = next(similarity.parameters()).device
    images, captions, image_of_caption = (move_tensor(one, device) for one in (images, captions, image_of_caption))
    matrices, shares = [], {}
    for direction, name in enumerate(("i2t", "t2i") if similarity.depends_on_direction else ("both",)):
        with torch.inference_mode():
            scorer = similarity.build_pair_scorer(direction, (images,), (captions,))
            scores = similarity.score_undeformed(images, captions)
            right = scorer(image_of_caption, torch.arange(len(captions), device=device))
            # An image without captions is not a query, so its threshold is infinite.
            best = right.new_full((len(images),), torch.inf)
            best.scatter_reduce_(0, image_of_caption, right, "amax", include_self=False)
            thresholds = {
                "i2t": best[:, None].expand_as(scores),
                "t2i": right.expand_as(scores),
                "both": torch.minimum(best[:, None], right),
            }[name]
            shares[name] = _score_in_rounds(name, scores, thresholds, scorer, (image_of_caption, right), min_pairs_per_round)
        matrices.append(blocks_from_scores(scores.cpu(), image_of_caption.cpu()))
    return (matrices[0], matrices[1] if len(matrices) > 1 else None), shares


def _score_in_rounds(
    direction: str,
    scores: Float[Tensor, "n_images n_captions"],
    thresholds: Float[Tensor, "n_images n_captions"],
    scorer: PairScorer,
    right_pairs: tuple[Tensor, Tensor],
    min_pairs_per_round: int,
) -> float:
    """Replace the scores of the pairs that may reach their threshold by the model's scores. Return the share of these pairs.

    All other scores are shifted by one constant, so that they are below the lowest score of the model.

    ``direction`` : direction for the log, or ``both``.
    ``scores``, ``thresholds`` : backbone scores of all pairs, changed in place, and thresholds (:func:`score_shortlist`).
    ``scorer`` : function that returns the model's scores of given pairs.
    ``right_pairs`` : for each caption, the index of the image to which it belongs, and the model's score of both.
    """
    n_images, n_captions = scores.shape
    share = max(PAIR_SHARE_PER_ROUND, min_pairs_per_round / scores.numel())
    drawn = torch.randint(scores.numel(), (_N_SAMPLED_PAIRS,), generator=torch.Generator().manual_seed(0)).to(scores.device)
    sample = drawn // n_captions, drawn % n_captions
    gaps = (thresholds[sample] - scores[sample]).sort().values
    is_scored = torch.zeros_like(scores, dtype=torch.bool)
    columns = torch.arange(n_captions, device=scores.device)
    scores[right_pairs[0], columns], is_scored[right_pairs[0], columns] = right_pairs[1], True
    margin, n_reached = gaps.new_zeros(()), 1
    while n_reached and margin < torch.inf:
        position = int(torch.searchsorted(gaps, margin)) + round(share * len(gaps))
        margin = gaps[position] if position < len(gaps) else gaps.new_tensor(torch.inf)
        n_reached = 0
        for rows in split_into_slices(n_images, _ROWS_PER_BLOCK):
            images, captions = torch.nonzero(~is_scored[rows] & (thresholds[rows] - scores[rows] <= margin), as_tuple=True)
            images = images + rows.start
            exact = scorer(images, captions)
            n_reached += int((exact >= thresholds[images, captions]).sum())
            scores[images, captions], is_scored[images, captions] = exact, True
        scored = float(is_scored.float().mean())
        counts = 100 * scored, n_reached
        log.info("%s: %.0f%% of the pairs are scored; the last round had %d that change a rank", direction, *counts)
    if not is_scored.all():
        scores[~is_scored] += scores[is_scored].min() - scores[~is_scored].max() - 1
    return round(scored, 4)
