"""What holds for every similarity that is registered, and for one that scores the directions differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.models.similarities.sides import embeddings, unit
from vse.pipeline.errors import UserError
from vse.train.kinds import Encoded, Kind, select
from vse.train.models.similarities import SIMILARITIES
from vse.train.models.similarities.base import Scores, Similarity


def compared(name: str) -> tuple[Encoded, Encoded]:
    """Three images and five captions of unit vectors, as sets of one to four where the similarity compares sets."""
    settings = SIMILARITIES[name]
    images, captions = (side.detach() for side in unit(*embeddings(12, 20, 6, torch.float32)))
    of_images, of_captions = images.view(3, 4, 6), captions.view(5, 4, 6)
    masks = (torch.arange(4) < torch.tensor(counts)[:, None] for counts in ([4, 1, 3], [2, 4, 1, 3, 4]))
    sides = (of_images, of_captions)
    return tuple(
        (side, mask) if kind == Kind.SETS else (side[:, 0],)
        for side, mask, kind in zip(sides, masks, (settings.images, settings.captions), strict=True)
    )


def by_direction(scores: Scores) -> tuple[Tensor, ...]:
    return scores if isinstance(scores, tuple) else (scores,)


ROWS, COLUMNS = torch.tensor([2, 0, 0, 1]), torch.tensor([1, 1, 0, 4])
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SIMILARITIES if name != "todnet"),
    ("todnet", {"condition": "caption"}),
    ("euclidean", {"floor": 0.5}),
    ("order", {"form": "norm"}),
    ("network", {"widths": [6]}),
    ("scan", {"attention": "i2t", "aggregation": "lse"}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_pairs_are_scored_as_the_matrix_is(name: str, settings: dict[str, Any]) -> None:
    similarity = SIMILARITIES[name](**settings).build(6)
    images, captions = compared(name)
    scores = similarity(images, captions)
    assert scores.shape == (3, 5)
    torch.testing.assert_close(similarity.score_pairs(images, captions, ROWS, COLUMNS), scores[ROWS, COLUMNS])


@pytest.mark.parametrize("name", list(SIMILARITIES))
def test_a_score_depends_on_its_image_and_caption_alone(name: str) -> None:
    similarity = SIMILARITIES[name]().build(6)
    images, captions = compared(name)
    part = similarity(select(images, slice(1, 3)), select(captions, slice(2, 4)))
    for some, every in zip(by_direction(part), by_direction(similarity(images, captions)), strict=True):
        torch.testing.assert_close(some, every[1:, 2:4])


class Directional(Similarity):
    """Twice the inner product for one direction, three times for the other."""

    def forward(self, images: Encoded, captions: Encoded) -> tuple[Tensor, Tensor]:
        scores = images[0] @ captions[0].T
        return 2 * scores, 3 * scores


def test_single_pairs_have_no_direction() -> None:
    images, captions = embeddings(3, 5, 6)
    with pytest.raises(UserError, match="a loss of single pairs has no direction"):
        Directional().score_pairs((images,), (captions,), ROWS, COLUMNS)
