"""The similarity network against loops over its pairs, in blocks of any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vse.train.models.similarities import network as network_module
from vse.train.models.similarities.network import SimilarityNetwork, SimilarityNetworkSettings

DIM = 4


def network(*widths: int) -> SimilarityNetwork:
    torch.manual_seed(0)
    made = SimilarityNetworkSettings(widths=list(widths)).build(DIM)
    assert isinstance(made, SimilarityNetwork)
    for layer in made.linears:
        torch.nn.init.normal_(layer.bias)
    return made


def sides(n_images: int, n_captions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images, captions = (torch.randn(n, DIM, generator=generator, requires_grad=True) for n in (n_images, n_captions))
    return images, captions


def slow_score(made: SimilarityNetwork, image: Tensor, caption: Tensor) -> Tensor:
    """Fully connected layers with ReLU on the product, and a last one without."""
    vector = image * caption
    for layer in made.linears[:-1]:
        vector = torch.relu(layer.weight @ vector + layer.bias)
    return (made.linears[-1].weight @ vector + made.linears[-1].bias)[0]


@pytest.mark.parametrize("widths", [(), (5,), (5, 3)])
def test_a_score_is_what_layers_make_of_the_product(widths: tuple[int, ...]) -> None:
    """Fully connected layers with ReLU, of the given widths and then of 1."""
    made, (images, captions) = network(*widths), sides(6, 5)
    assert [layer.out_features for layer in made.linears] == [*widths, 1]
    rows, columns = torch.tensor([0, 5, 2, 2]), torch.tensor([4, 0, 1, 1])
    slow = torch.stack([slow_score(made, images[i], captions[j]) for i, j in zip(rows, columns, strict=True)])
    torch.testing.assert_close(made.score_pairs((images,), (captions,), rows, columns), slow)
    with torch.no_grad():
        for parameter in made.linears[-1].parameters():
            parameter.neg_()
    negated = made.score_pairs((images,), (captions,), rows, columns)
    torch.testing.assert_close(negated, -slow, msg="a ReLU follows the last layer")


@given(n_images=st.integers(0, 6), n_captions=st.integers(1, 6), block=st.integers(1, 40))
def test_all_pairs_are_scored_in_blocks_of_any_size(n_images: int, n_captions: int, block: int) -> None:
    made, (images, captions) = network(5, 3), sides(n_images, n_captions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_module, "_BLOCK", block)
        scores = made((images,), (captions,))
    slow = [[slow_score(made, image, caption) for caption in captions] for image in images]
    assert scores.shape == (n_images, n_captions)
    torch.testing.assert_close(scores.tolist(), [[score.item() for score in row] for row in slow], rtol=1e-4, atol=1e-6)
    weights = torch.linspace(-1, 2, scores.numel()).view_as(scores)
    wanted = [images, captions, *made.parameters()]
    total = sum((weights[i, j] * slow[i][j] for i in range(n_images) for j in range(n_captions)), start=0 * images.sum())
    gradients = (torch.autograd.grad(loss, wanted, materialize_grads=True) for loss in ((weights * scores).sum(), total))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_more_pairs_than_a_block_holds() -> None:
    made, (images, captions) = network(3), sides(200, 190)
    assert len(images) * len(captions) > network_module._BLOCK
    with torch.inference_mode():
        scores = made((images,), (captions,))
        for row in (0, 99, 199):
            rows, columns = torch.full((190,), row), torch.arange(190)
            torch.testing.assert_close(scores[row], made.score_pairs((images,), (captions,), rows, columns))
