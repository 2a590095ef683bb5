from __future__ import annotations

import pytest
import torch

from vse.train.models.encoders.base import unit_length, xavier_linear


def test_a_linear_map_starts_xavier_uniform_and_its_bias_at_zero() -> None:
    torch.manual_seed(0)
    linear = xavier_linear(400, 200)
    weight, bound = linear.weight.detach(), (6 / 600) ** 0.5
    assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=1e-2)
    assert not linear.bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)], ids=["vectors", "sets"])
def test_unit_length_divides_each_vector_by_its_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    vectors = torch.randn(*shape, dtype=dtype)
    torch.testing.assert_close(unit_length(vectors), vectors / vectors.square().sum(-1, keepdim=True).sqrt())


def test_unit_length_of_a_zero_vector_stays_zero_and_finite() -> None:
    vectors = torch.zeros(1, 4, requires_grad=True)
    unit = unit_length(vectors)
    unit.sum().backward()
    assert not unit.any()
    assert vectors.grad.isfinite().all()


def test_unit_length_of_half_precision_is_taken_in_float32() -> None:
    vectors = torch.full((1, 3), 300.0, dtype=torch.float16)  # whose squares would overflow
    assert unit_length(vectors).dtype == torch.float32
    torch.testing.assert_close(unit_length(vectors), torch.full((1, 3), 3**-0.5))
