"""Score only the pairs that are likely to change a rank, chosen by the scores of the backbone.

The right pairs of each query are scored first. The best of their scores is the query's threshold: another candidate changes
the rank only if it reaches this threshold. TOD-Net starts as its backbone and moves most scores little. Pairs are therefore
scored in rounds, first those whose backbone score is highest above, or least below, the threshold. The last round is the
first one in which no pair reaches its threshold. This is a check and no proof: a later pair could still reach its threshold.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vse.eval.ranking.ranks import ScoreBlocks, blocks_from_scores, split_into_slices
from vse.features.backbones.device import move_tensor
from vse.pipeline.errors import UserError
from vse.training.models.similarities.todnet import PairScorer, TodNetSimilarity

ROUND_SHARE = 0.05  # share of all pairs in a round
MIN_ROUND = 2**16  # smallest number of pairs in a round; a smaller round would be a weak check
_SAMPLE = 2**20  # number of pairs from which the size of a round is estimated
_ROWS_PER_BLOCK = 512

log = logging.getLogger(__name__)


def require_shortlist_similarity(run: Path, similarity: nn.Module) -> TodNetSimilarity:
    """Return ``similarity``. Raises UserError, naming ``run``, unless ``similarity`` is a TOD-Net with a condition."""
    if isinstance(similarity, TodNetSimilarity) and similarity.has_condition:
        return similarity
    raise UserError(f"{run}: --shortlist is for a TOD-Net with a condition, whose pairs take long; leave it out")


def score_shortlist(
    similarity: TodNetSimilarity,
    images: Float[Tensor, "n_images dim"],
    captions: Float[Tensor, "n_captions dim"],
    image_of_caption: Int[Tensor, " n_captions"],
    min_round: int = MIN_ROUND,
) -> tuple[tuple[ScoreBlocks, ScoreBlocks | None], dict[str, float]]:
    """Return scores i2t and t2i, and the share of the pairs that the model scored. The ranks should be those of all scores.

    All other pairs are ranked behind these, in the order of the backbone's scores. The second scores are None if both
    directions have the same. The first round has all pairs whose backbone score is above the threshold, and a twentieth of all
    pairs. Each later round has a twentieth of all pairs, and at least ``min_round`` pairs, so small sets are scored
    completely. The similarity must have a condition.
    """
    device = next(similarity.parameters()).device
    images, captions, image_of_caption = (move_tensor(one, device) for one in (images, captions, image_of_caption))
    matrices, shares = [], {}
    for direction, name in enumerate(("i2t", "t2i") if similarity.has_directions else ("both",)):
        with torch.inference_mode():
            scorer = similarity.build_pair_scorer(direction, (images,), (captions,))
            scores = similarity.score_undeformed(images, captions)
            own = scorer(image_of_caption, torch.arange(len(captions), device=device))
            # An image without captions is no query: no candidate reaches its threshold.
            best = own.new_full((len(images),), torch.inf).scatter_reduce(0, image_of_caption, own, "amax", include_self=False)
            thresholds = {
                "i2t": best[:, None].expand_as(scores),
                "t2i": own.expand_as(scores),
                "both": torch.minimum(best[:, None], own),
            }[name]
            shares[name] = _score_rounds(name, scores, thresholds, scorer, (image_of_caption, own), min_round)
        matrices.append(blocks_from_scores(scores.cpu(), image_of_caption.cpu()))
    return (matrices[0], matrices[1] if len(matrices) > 1 else None), shares


def _score_rounds(
    name: str,
    scores: Float[Tensor, "n_images n_captions"],
    thresholds: Float[Tensor, "n_images n_captions"],
    scorer: PairScorer,
    own_pairs: tuple[Tensor, Tensor],
    min_round: int,
) -> float:
    """Replace the backbone's ``scores`` that may reach ``thresholds`` by the model's, and return the share of scored pairs.

    All other scores are shifted by one constant, to below the lowest score of the model.

    ``own_pairs`` has the image of each caption, and the model's score of this pair.
    """
    n_images, n_captions = scores.shape
    share = max(ROUND_SHARE, min_round / scores.numel())
    drawn = torch.randint(scores.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(0)).to(scores.device)
    places = drawn // n_captions, drawn % n_captions
    gaps = (thresholds[places] - scores[places]).sort().values
    is_scored = torch.zeros_like(scores, dtype=torch.bool)
    columns = torch.arange(n_captions, device=scores.device)
    scores[own_pairs[0], columns], is_scored[own_pairs[0], columns] = own_pairs[1], True
    margin, n_reached = gaps.new_zeros(()), 1
    while n_reached and margin < torch.inf:
        position = int(torch.searchsorted(gaps, margin)) + round(share * len(gaps))
        margin = gaps[position] if position < len(gaps) else gaps.new_tensor(torch.inf)
        n_reached = 0
        for rows in split_into_slices(n_images, _ROWS_PER_BLOCK):
            images, captions = torch.nonzero(~is_scored[rows] & (thresholds[rows] - scores[rows] <= margin), as_tuple=True)
            images = images + rows.start
            found = scorer(images, captions)
            n_reached += int((found >= thresholds[images, captions]).sum())
            scores[images, captions], is_scored[images, captions] = found, True
        scored = float(is_scored.float().mean())
        log.info("%s: %.0f%% of the pairs are scored; the last round had %d that change a rank", name, 100 * scored, n_reached)
    if not is_scored.all():
        scores[~is_scored] += scores[is_scored].min() - scores[~is_scored].max() - 1
    return round(scored, 4)
