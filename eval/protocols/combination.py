"""An image-sentence model and a phrase model together: Eq. 8 of the two-branch paper (Wang et al., TPAMI 2018, section 5.6).

D(x, y) = (1 - alpha) d(x, y) + alpha d_rp(x, y), where d is the distance of an image and a sentence, and d_rp the mean over
the sentence's phrases of the distance to their best region. Scores are distances with a minus: what is higher is nearer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vse.eval.files.embeddings import Embeddings, read_embeddings, same_split
from vse.eval.ranking.metrics import metrics
from vse.eval.ranking.ranks import ScoreBlocks, ranks_from_blocks
from vse.pipeline.errors import UserError

log = logging.getLogger(__name__)
ALPHAS = tuple(k / 10 for k in range(11))
Member = tuple[Path, Embeddings]
Matrices = dict[str, NDArray[np.float32]]
_NAMES: tuple[Literal["scores", "scores_i2t", "scores_t2i"], ...] = ("scores", "scores_i2t", "scores_t2i")


@dataclass(frozen=True)
class Share:
    """The share ``alpha`` of phrases in a score, and the mean rsum of each on the validation split, if it was chosen there."""

    alpha: float
    validated: dict[float, float] | None = None

    def said(self, phrases: Embeddings) -> dict[str, Any]:
        """What a result says of it, and of how much of the split of ``phrases`` the image-sentence model decides alone."""
        assert phrases.n_phrases is not None
        assert phrases.n_regions is not None
        chosen = {} if self.validated is None else {"rsum_val": {f"{alpha:g}": rsum for alpha, rsum in self.validated.items()}}
        return {
            "alpha": self.alpha,
            **chosen,
            "n_captions_without_phrases": int(np.count_nonzero(phrases.n_phrases == 0)),
            "n_images_without_regions": int(np.count_nonzero(phrases.n_regions == 0)),
        }


def both_streams(members: Sequence[Member]) -> tuple[Member, Member] | None:
    """The image-sentence model and the phrase model of an ensemble, in this order; None if it has no phrase model.

    :class:`UserError` if it is of more, or of two phrase models.
    """
    by_phrases = [member for member in members if member[1].of_phrases]
    if not by_phrases:
        return None
    others = [member for member in members if not member[1].of_phrases]
    if len(by_phrases) != 1 or len(others) != 1:
        raise UserError(
            f"{by_phrases[0][0]} holds scores of phrases, which are combined with one model of images and sentences; this "
            f"ensemble has {len(others)} of these, and {len(by_phrases)} of phrases"
        )
    return others[0], by_phrases[0]


def phrases_of(members: Sequence[Member]) -> Embeddings:
    """The phrase model's scores among the members of an ensemble that has one."""
    return next(run for _, run in members if run.of_phrases)


def share_of_phrases(by_seed: Sequence[Sequence[Member]], alpha: float | None) -> Share | None:
    """``alpha`` if it is given, else that of :data:`ALPHAS` with the highest mean rsum of all seeds on the validation split.

    None of an ensemble without a phrase model. The files of the validation split lie beside the members': ``val.h5`` beside
    ``test.h5``, and ``val_sentences.h5``; :class:`UserError` names one that is not there.
    """
    streams = [both_streams(members) for members in by_seed]
    both = [members for members in streams if members is not None]
    if not both:
        if alpha is not None:
            raise UserError("--alpha is the share of phrases, and no file holds scores of phrases (vse-embed --sentences)")
        return None
    if alpha is not None:
        if not 0 <= alpha <= 1:
            raise UserError(f"--alpha {alpha:g}: the share of phrases is between 0 and 1")
        return Share(alpha)
    sums = np.zeros(len(ALPHAS))
    for members in both:
        sentences, phrases = (_validation_file(*member) for member in members)
        nearness = _nearness(sentences[1])
        for k, one in enumerate(ALPHAS):
            ranks = ranks_from_blocks(*combined_scores(sentences, phrases, one, nearness).score_blocks())
            sums[k] += metrics(ranks)["rsum"]
    validated = dict(zip(ALPHAS, (sums / len(both)).tolist(), strict=True))
    best = max(ALPHAS, key=lambda one: validated[one])
    log.info("alpha %g by validation: rsum %.1f, without phrases %.1f", best, validated[best], validated[0.0])
    return Share(best, validated)


def combined_scores(sentences: Member, phrases: Member, alpha: float, nearness: Matrices | None = None) -> Embeddings:
    """The image-sentence model's embeddings with the scores of Eq. 8 (n_images, n_captions) in place of its own.

    d is the Euclidean distance of embeddings that are compared by inner products, and of any other model its score with a
    minus; ``nearness`` is -d, if it is known. Where a caption has no phrase, or an image no region, D = d. The whole matrix
    is held, or two if the scores of the image-sentence model depend on the direction.
    """
    same_split(*sentences, *phrases)
    (_, model), (_, of_phrases) = sentences, phrases
    assert of_phrases.scores is not None
    assert of_phrases.n_phrases is not None
    assert of_phrases.n_regions is not None
    alone = (of_phrases.n_regions == 0)[:, None] | (of_phrases.n_phrases == 0)
    by_phrases = np.asarray(of_phrases.scores[:], np.float32)
    found: dict[str, Any] = dict.fromkeys(_NAMES)
    for name, scores in (nearness or _nearness(model)).items():
        found[name] = np.where(alone, scores, (1 - alpha) * scores + alpha * by_phrases).astype(np.float32)
    return replace(model, images=None, captions=None, pooled_images=None, pooled_captions=None, **found)


def _nearness(model: Embeddings) -> Matrices:
    """-d of all pairs, or those of each direction, by the name of the scores whose place they take."""
    i2t, t2i = model.score_blocks()
    if t2i is not None:
        return {"scores_i2t": _dense(i2t), "scores_t2i": _dense(t2i)}
    scores = _dense(i2t)
    if model.vectors is None or model.similarity != "cosine":
        return {"scores": scores}
    images, captions = (np.einsum("nd,nd->n", side, side) for side in model.vectors)
    squares: NDArray[np.float32] = (images[:, None] + captions - 2 * scores).clip(min=0)
    return {"scores": -np.sqrt(squares)}


def _dense(blocks: ScoreBlocks) -> NDArray[np.float32]:
    """All scores (n_images, n_captions)."""
    scores = torch.empty(blocks.n_images, len(blocks.image_of_caption))
    for start in range(0, blocks.n_images, blocks.rows):
        rows = slice(start, min(start + blocks.rows, blocks.n_images))
        scores[rows] = blocks.score(rows, None)
    dense: NDArray[np.float32] = scores.numpy()
    return dense


def _validation_file(path: Path, run: Embeddings) -> Member:
    """The file of the validation split that lies beside that of another one."""
    name = path.name.replace(run.split, "val", 1)
    beside = path.with_name(name)
    if run.split == "val" or name == path.name:
        raise UserError(f"{path}: alpha is chosen on the validation split, and the file is not named by another; give --alpha")
    if not beside.exists():
        option = " --sentences" if run.of_phrases else ""
        raise UserError(
            f"{beside}: no such file, and alpha is chosen by it: write it with vse-embed {path.parent} --split val{option}, "
            "or give --alpha"
        )
    read = read_embeddings(beside)
    if read.split != "val" or read.experiment != run.experiment or read.seed != run.seed:
        raise UserError(f"{beside}: not of the split val and of the model of {path}; write it again, or give --alpha")
    return beside, read
