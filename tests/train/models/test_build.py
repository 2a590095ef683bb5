from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vse.pipeline.config import BranchesConfig, ModelConfig
from vse.train.models.build import TwoBranchModel
from vse.train.models.encoders import Branch, LinearEncoder, WordEncoder
from vse.train.models.similarities import cosine, euclidean, order

FEATURE_DIM, CAPTION_DIM, N_WORDS = 6, 9, 12
WORDS, LENGTHS = torch.tensor([[1, 4, 2, 0], [1, 5, 7, 2]]), torch.tensor([3, 4])
SIDES = ("image_widths", "caption_widths")


def model(cached: bool = False, layers: Any = "none", **settings: Any) -> TwoBranchModel:
    """A model in evaluation; its branches end in 4 numbers, without them embeddings have 5."""
    torch.manual_seed(0)
    widths = {"image_widths": [7, 3, 4], "caption_widths": [8, 4]} if layers == "nonlinear" else {n: [4] for n in SIDES}
    branches = BranchesConfig(layers=layers, **widths)
    config = ModelConfig(dim=5, word_dim=3, branches=branches, **settings)
    return TwoBranchModel(config, FEATURE_DIM, N_WORDS, caption_dim=CAPTION_DIM if cached else None).eval()


def captions(cached: bool) -> tuple[Tensor, ...]:
    return (torch.rand(2, CAPTION_DIM),) if cached else (WORDS, LENGTHS)


def unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
def test_images_are_of_unit_length_on_request_and_captions_always(normalize: bool, absolute: bool) -> None:
    made, features = model(normalize_image=normalize, absolute=absolute), torch.randn(3, FEATURE_DIM)
    image, caption = made.image_encoder(features), made.word_encoder(WORDS, LENGTHS)
    image, caption = unit(image) if normalize else image, unit(caption)
    image, caption = (image.abs(), caption.abs()) if absolute else (image, caption)
    torch.testing.assert_close(made.embed_images(features), image)
    torch.testing.assert_close(made.embed_captions(WORDS, LENGTHS), caption)


def test_scores_are_inner_products_of_every_image_with_every_caption() -> None:
    made, features = model(normalize_image=False), torch.rand(2, FEATURE_DIM)
    images, sentences = made.image_encoder(features), unit(made.word_encoder(WORDS, LENGTHS))
    slow = [[sum(a * b for a, b in zip(i, c, strict=True)) for c in sentences.tolist()] for i in images.tolist()]
    torch.testing.assert_close(made(features, WORDS, LENGTHS), torch.tensor(slow))


def test_a_zero_image_stays_finite() -> None:
    made = model()
    embeddings = made.embed_images(torch.zeros(1, FEATURE_DIM))
    embeddings.sum().backward()
    assert embeddings.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in made.image_encoder.parameters())


@pytest.mark.parametrize(("cached", "layers"), list(product([False, True], ["none", "linear", "nonlinear"])))
def test_both_sides_go_through_their_encoders_and_meet(cached: bool, layers: str) -> None:
    made, features, sentences = model(cached, layers), torch.randn(2, FEATURE_DIM), captions(cached)
    vectors = sentences[0] if made.word_encoder is None else made.word_encoder(*sentences)
    images, texts = made.embed_images(features), made.embed_captions(*sentences)
    assert images.shape == texts.shape == (2, made.config.embedding_dim) == (2, 5 if layers == "none" else 4)
    torch.testing.assert_close(images, unit(made.image_encoder(features)))
    torch.testing.assert_close(texts, unit(made.caption_encoder(vectors)))
    torch.testing.assert_close(made(features, *sentences), images @ texts.T)


@pytest.mark.parametrize(("cached", "layers"), list(product([False, True], ["none", "linear", "nonlinear"])))
def test_what_encodes_depends_on_the_settings(cached: bool, layers: str) -> None:
    made = model(cached, layers)
    kind: type[nn.Module] = LinearEncoder if layers == "none" else Branch
    assert isinstance(made.image_encoder, kind)
    assert isinstance(made.caption_encoder, nn.Identity if layers == "none" and not cached else kind)
    assert (made.word_encoder is None) == cached
    if isinstance(made.image_encoder, Branch):
        shapes = [tuple(layer.weight.shape) for layer in made.image_encoder.linears]
        assert shapes == ([(4, 6)] if layers == "linear" else [(7, 6), (3, 7), (4, 3)])


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
def test_words_are_read_by_a_gru_or_an_lstm(recurrent: str) -> None:
    made = model(recurrent=recurrent)
    assert isinstance(made.word_encoder, WordEncoder)
    assert type(made.word_encoder.recurrent) is {"gru": nn.GRU, "lstm": nn.LSTM}[recurrent]


def test_every_parameter_learns() -> None:
    for cached, layers, similarity in product(
        [False, True], ["none", "linear", "nonlinear"], ["cosine", "euclidean", "network"]
    ):
        made = model(cached, layers, similarity=similarity, network_widths=[6]).train()
        scores = made(torch.randn(2, FEATURE_DIM), *captions(cached))
        (scores * torch.tensor([[1.0, -2.0], [0.5, 3.0]])).sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.mark.parametrize(
    ("settings", "compare"),
    [
        ({"similarity": "cosine"}, cosine),
        ({"similarity": "euclidean"}, euclidean),
        ({"similarity": "euclidean", "distance_floor": 0.5}, lambda i, c: euclidean(i, c, 0.5)),
        ({"similarity": "order"}, order),
        ({"similarity": "order", "order_form": "norm"}, lambda i, c: order(i, c, "norm")),
    ],
)
def test_pairs_are_scored_as_the_matrix_is(settings: dict[str, Any], compare: Any) -> None:
    made = model(layers="linear", **settings)
    images, sentences = made.embed_images(torch.randn(3, FEATURE_DIM)), made.embed_captions(WORDS, LENGTHS)
    rows, columns = torch.tensor([2, 0, 0, 1]), torch.tensor([1, 1, 0, 0])
    torch.testing.assert_close(made.score_pairs(images, sentences, rows, columns), compare(images, sentences)[rows, columns])
    assert not made.pairwise


def test_a_network_scores_pairs_one_by_one() -> None:
    made = model(layers="nonlinear", similarity="network", network_widths=[6])
    images, sentences = made.embed_images(torch.randn(3, FEATURE_DIM)), made.embed_captions(WORDS, LENGTHS)
    rows, columns = torch.tensor([2, 0, 0, 1]), torch.tensor([1, 1, 0, 0])
    matrix = made.similarity(images, sentences)
    torch.testing.assert_close(made.score_pairs(images, sentences, rows, columns), matrix[rows, columns])
    assert made.pairwise


def test_embeddings_are_float32_under_autocast() -> None:
    made = model(layers="nonlinear").train()
    with torch.autocast("cpu", torch.bfloat16):
        images, sentences = made.embed_images(torch.randn(2, FEATURE_DIM)), made.embed_captions(WORDS, LENGTHS)
    assert images.dtype == sentences.dtype == torch.float32
    for rows in (images, sentences):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))
