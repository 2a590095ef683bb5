from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.models.similarities.sides import embeddings, unit
from vse.training.kinds import BatchVectors, InputKind
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities import vectors as network_module
from vse.training.models.similarities.vectors import SimilarityNetwork, SimilarityNetworkSettings


def compared(name: str) -> tuple[BatchVectors, BatchVectors]:
    """Three images and five captions of unit vectors, as sets of one to four where the similarity compares sets."""
    settings = SIMILARITIES[name]
    images, captions = (side.detach() for side in unit(*embeddings(12, 20, 6, torch.float32)))
    of_images, of_captions = images.view(3, 4, 6), captions.view(5, 4, 6)
    masks = (torch.arange(4) < torch.tensor(counts)[:, None] for counts in ([4, 1, 3], [2, 4, 1, 3, 4]))
    sides = (of_images, of_captions)
    return tuple(
        (side, mask) if kind == InputKind.SETS else (side[:, 0],)
        for side, mask, kind in zip(sides, masks, (settings.image_kind, settings.caption_kind), strict=True)
    )


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


NETWORK_DIM = 4


def network(*widths: int) -> SimilarityNetwork:
    torch.manual_seed(0)
    made = SimilarityNetworkSettings(widths=list(widths)).build(NETWORK_DIM)
    assert isinstance(made, SimilarityNetwork)
    for layer in made.linears:
        torch.nn.init.normal_(layer.bias)
    return made


def network_sides(n_images: int, n_captions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images, captions = (torch.randn(n, NETWORK_DIM, generator=generator, requires_grad=True) for n in (n_images, n_captions))
    return images, captions


def slow_score(made: SimilarityNetwork, image: Tensor, caption: Tensor) -> Tensor:
    """Fully connected layers with ReLU on the product, and a last one without."""
    vector = image * caption
    for layer in made.linears[:-1]:
        vector = torch.relu(layer.weight @ vector + layer.bias)
    return (made.linears[-1].weight @ vector + made.linears[-1].bias)[0]


@given(
    widths=st.sampled_from([(), (5,), (5, 3)]),
    n_images=st.integers(0, 6),
    n_captions=st.integers(1, 6),
    block=st.integers(1, 40),
)
def test_a_network_scores_the_product_of_each_pair_in_blocks_of_any_size(
    widths: tuple[int, ...], n_images: int, n_captions: int, block: int
) -> None:
    made, (images, captions) = network(*widths), network_sides(n_images, n_captions)
    assert [layer.out_features for layer in made.linears] == [*widths, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_module, "_PAIRS_PER_BLOCK", block)
        scores = made((images,), (captions,))
    slow = [[slow_score(made, image, caption) for caption in captions] for image in images]
    assert scores.shape == (n_images, n_captions)
    torch.testing.assert_close(scores.tolist(), [[score.item() for score in row] for row in slow], rtol=1e-4, atol=1e-6)
    weights = torch.linspace(-1, 2, scores.numel()).view_as(scores)
    wanted = [images, captions, *made.parameters()]
    total = sum((weights[i, j] * slow[i][j] for i in range(n_images) for j in range(n_captions)), start=0 * images.sum())
    gradients = (torch.autograd.grad(loss, wanted, materialize_grads=True) for loss in ((weights * scores).sum(), total))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
