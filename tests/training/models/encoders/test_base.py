from __future__ import annotations

import pytest
import torch
from torch import nn

from vse.training.kinds import InputKind
from vse.training.models.encoders.base import Encoder, EncoderSpec, l2_normalize, xavier_linear
from vse.training.models.encoders.linear import IdentitySettings, LinearEncoder, LinearSettings


def test_a_linear_map_starts_xavier_uniform_and_its_bias_at_zero() -> None:
    torch.manual_seed(0)
    linear = xavier_linear(400, 200)
    weight, bound = linear.weight.detach(), (6 / 600) ** 0.5
    assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=1e-2)
    assert not linear.bias.any()


def test_unit_length_of_zeros_and_of_half_precision_is_finite() -> None:
    vectors = torch.zeros(1, 4, requires_grad=True)
    unit = l2_normalize(vectors)
    unit.sum().backward()
    assert not unit.any()
    assert vectors.grad.isfinite().all()
    vectors = torch.full((1, 3), 300.0, dtype=torch.float16)  # whose squares would overflow
    assert l2_normalize(vectors).dtype == torch.float32
    torch.testing.assert_close(l2_normalize(vectors), torch.full((1, 3), 3**-0.5))


def identity(kind: InputKind = InputKind.VECTORS) -> Encoder:
    return IdentitySettings().build(EncoderSpec(kind, input_dim=6, dim=4, word_dim=99))


def test_vectors_and_sets_stay_as_they_are() -> None:
    encoder, vectors = identity(), torch.rand(3, 6)
    assert encoder.dim == 6
    assert torch.equal(encoder(vectors)[0], vectors)
    assert not list(encoder.parameters())
    vectors, mask = torch.rand(2, 3, 6), torch.tensor([[True, True, True], [True, False, False]])
    embeddings, same_mask = identity(InputKind.SETS)(vectors, mask)
    assert torch.equal(embeddings, vectors)
    assert same_mask is mask


def linear_encoder(kind: InputKind = InputKind.VECTORS) -> LinearEncoder:
    torch.manual_seed(0)
    encoder = LinearSettings().build(EncoderSpec(kind, input_dim=6, dim=4, word_dim=99))
    assert isinstance(encoder, LinearEncoder)
    nn.init.normal_(encoder.linear.bias)
    return encoder


def test_each_vector_is_mapped_by_itself() -> None:
    """W x + b (VSE++ paper, Eq. 1)."""
    encoder, vectors = linear_encoder(), torch.rand(3, 6)
    weight, bias = encoder.linear.weight, encoder.linear.bias
    torch.testing.assert_close(encoder(vectors)[0], torch.stack([weight @ vector + bias for vector in vectors]))
    encoder, vectors = linear_encoder(InputKind.SETS), torch.rand(2, 3, 6)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    embeddings, same_mask = encoder(vectors, mask)
    assert same_mask is mask
    torch.testing.assert_close(embeddings, vectors @ encoder.linear.weight.T + encoder.linear.bias)


def test_a_set_does_not_depend_on_its_padding_and_a_solver_finds_the_layer() -> None:
    encoder, vectors, mask = linear_encoder(InputKind.SETS), torch.rand(2, 3, 6), torch.arange(3) < torch.tensor([[2], [1]])
    longer = torch.cat([vectors, torch.full((2, 2, 6), 9.0)], 1)
    for padded in (longer, longer.masked_fill(~nn.functional.pad(mask, (0, 2))[:, :, None], -7.0)):
        embeddings, longer_mask = encoder(padded, nn.functional.pad(mask, (0, 2)))
        torch.testing.assert_close(embeddings[longer_mask], encoder(vectors, mask)[0][mask])
    encoder = linear_encoder()
    assert encoder.single_linear_layer() is encoder.linear
