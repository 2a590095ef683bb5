from __future__ import annotations

import torch
from torch import Tensor, nn

from vse.train.kinds import Kind
from vse.train.models.encoders.base import Encoder, Sizes
from vse.train.models.encoders.linear import Linear, LinearEncoder
from vse.train.models.encoders.mlp import Branch, BranchSettings


def made(kind: Kind = Kind.VECTORS) -> LinearEncoder:
    torch.manual_seed(0)
    encoder = Linear().build(Sizes(kind, input_dim=6, dim=4, word_dim=99))
    assert isinstance(encoder, LinearEncoder)
    nn.init.normal_(encoder.linear.bias)
    return encoder


def mapped(encoder: LinearEncoder, vector: Tensor) -> list[float]:
    """W x + b (VSE++ paper, Eq. 1), number by number."""
    rows = zip(encoder.linear.weight.tolist(), encoder.linear.bias.tolist(), strict=True)
    return [sum((w * x for w, x in zip(row, vector.tolist(), strict=True)), start=bias) for row, bias in rows]


def test_vectors_are_mapped_one_by_one() -> None:
    encoder, vectors = made(), torch.rand(3, 6)
    (embeddings,) = encoder(vectors)
    torch.testing.assert_close(embeddings, torch.tensor([mapped(encoder, vector) for vector in vectors]))


def test_each_vector_of_a_set_is_mapped_and_the_mask_passes_through() -> None:
    encoder, vectors = made(Kind.SETS), torch.rand(2, 3, 6)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    embeddings, same_mask = encoder(vectors, mask)
    assert same_mask is mask
    torch.testing.assert_close(embeddings, torch.tensor([[mapped(encoder, vector) for vector in one] for one in vectors]))


def test_a_set_does_not_depend_on_its_padding() -> None:
    encoder, vectors, mask = made(Kind.SETS), torch.rand(2, 3, 6), torch.tensor([[True, True, False], [True, False, False]])
    longer = torch.cat([vectors, torch.full((2, 2, 6), 9.0)], 1)
    for padded in (longer, longer.masked_fill(~nn.functional.pad(mask, (0, 2))[:, :, None], -7.0)):
        embeddings, longer_mask = encoder(padded, nn.functional.pad(mask, (0, 2)))
        torch.testing.assert_close(embeddings[longer_mask], encoder(vectors, mask)[0][mask])


def test_it_is_the_branch_of_a_single_layer() -> None:
    """With the same weights drawn, and so the same embeddings."""
    torch.manual_seed(3)
    linear: Encoder = LinearEncoder(6, 4)
    torch.manual_seed(3)
    branch = Branch(6, BranchSettings(widths=[4]))
    vectors = torch.rand(5, 6)
    assert torch.equal(linear(vectors)[0], branch(vectors)[0])
    assert linear.dim == branch.dim == 4


def test_it_gives_what_it_takes() -> None:
    assert [Linear().gives(kind) for kind in Linear.takes] == [Kind.VECTORS, Kind.SETS]


def test_a_solver_finds_its_only_layer() -> None:
    encoder = made()
    assert encoder.linear_map() is encoder.linear
