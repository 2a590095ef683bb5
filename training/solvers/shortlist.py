"""Score with TOD-Net only the pairs that are likely to change a rank.

The backbone score of a pair is its score without the deformation of TOD-Net. TOD-Net moves most scores only a little from
there. First, TOD-Net scores the right pairs of each query. The best of these scores is the query's threshold: another
candidate changes the rank of the right answer only if it reaches the threshold. The other pairs are scored in rounds, in
descending order of backbone score minus threshold. The rounds end when no pair of a round reaches its threshold. This is a
check and no proof: a pair that was not scored could still reach its threshold.
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
_SAMPLE = 2**20  # number of random pairs by which the lowest scores of a round are chosen
_ROWS_PER_BLOCK = 512

log = logging.getLogger(__name__)


def require_shortlist_similarity(run: Path, similarity: nn.Module) -> TodNetSimilarity:
    """Return ``similarity``. Raises UserError, with the path of the run, if it is not a TOD-Net with a condition."""
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
    """Return the scores i2t and t2i for ranking, and the share of all pairs that the model scored, by direction.

    The ranks of the right answers should be the same as if the model scored all pairs. Pairs that it did not score rank behind
    the others, in the order of their backbone scores. The scores t2i are None, and the only direction is ``both``, if scores
    do not depend on the direction. Each round has a twentieth of all pairs, and at least ``min_round`` pairs, so small sets
    are scored completely. The first round also has all pairs whose backbone score is above the threshold. The similarity must
    have a condition.
    """
    device = next(similarity.parameters()).device
    images, captions, image_of_caption = (move_tensor(one, device) for one in (images, captions, image_of_caption))
    matrices, shares = [], {}
    for direction, name in enumerate(("i2t", "t2i") if similarity.has_directions else ("both",)):
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
            shares[name] = _score_rounds(name, scores, thresholds, scorer, (image_of_caption, right), min_round)
        matrices.append(blocks_from_scores(scores.cpu(), image_of_caption.cpu()))
    return (matrices[0], matrices[1] if len(matrices) > 1 else None), shares


def _score_rounds(
    name: str,
    scores: Float[Tensor, "n_images n_captions"],
    thresholds: Float[Tensor, "n_images n_captions"],
    scorer: PairScorer,
    right_pairs: tuple[Tensor, Tensor],
    min_round: int,
) -> float:
    """Replace the scores of the pairs that may reach their threshold by the model's scores. Return the share of these pairs.

    All other scores are shifted by one constant, so that they are below the lowest score of the model.

    ``name`` : direction, for the log.
    ``scores`` : backbone scores of all pairs, changed in place.
    ``right_pairs`` : index of each caption's image, and the model's score of this image and caption.
    """
    n_images, n_captions = scores.shape
    share = max(ROUND_SHARE, min_round / scores.numel())
    drawn = torch.randint(scores.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(0)).to(scores.device)
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
        log.info("%s: %.0f%% of the pairs are scored; the last round had %d that change a rank", name, 100 * scored, n_reached)
    if not is_scored.all():
        scores[~is_scored] += scores[is_scored].min() - scores[~is_scored].max() - 1
    return round(scored, 4)
