from __future__ import annotations

import torch

from vse.train.kinds import Kind
from vse.train.models.build import Input, ModelConfig, build_model
from vse.train.models.encoders.base import Encoder, Sizes
from vse.train.models.encoders.linear import IdentitySettings


def made(kind: Kind = Kind.VECTORS) -> Encoder:
    return IdentitySettings().build(Sizes(kind, input_dim=6, dim=4, word_dim=99))


def test_vectors_stay_as_they_are_and_their_length_is_that_of_the_space() -> None:
    encoder, vectors = made(), torch.rand(3, 6)
    assert encoder.dim == 6
    assert torch.equal(encoder(vectors)[0], vectors)
    assert not list(encoder.parameters())


def test_sets_keep_their_mask() -> None:
    vectors, mask = torch.rand(2, 3, 6), torch.tensor([[True, True, True], [True, False, False]])
    embeddings, same_mask = made(Kind.SETS)(vectors, mask)
    assert torch.equal(embeddings, vectors)
    assert same_mask is mask


def test_a_model_of_two_compares_cached_vectors_by_their_cosine() -> None:
    config = ModelConfig.model_validate({"image_encoder": "identity", "caption_encoder": "identity"})
    model = build_model(config, Input(Kind.VECTORS, 6, "images"), Input(Kind.VECTORS, 6, "captions"))
    images, captions = torch.randn(3, 6), torch.randn(5, 6)
    expected = [[float(torch.cosine_similarity(i, c, dim=0)) for c in captions] for i in images]
    torch.testing.assert_close(model((images,), (captions,)), torch.tensor(expected))
