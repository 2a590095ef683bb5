from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vse.pipeline.config import BranchesConfig
from vse.train.models.encoders import Branch, LinearEncoder, WordEncoder, unit_length


def test_a_linear_map_starts_xavier_uniform_and_its_bias_at_zero() -> None:
    torch.manual_seed(0)
    for linear in (LinearEncoder(400, 200).linear, Branch(400, [200, 9], BranchesConfig()).linears[0]):
        weight, bound = linear.weight.detach(), (6 / 600) ** 0.5
        assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=1e-2)
        assert not linear.bias.any()


def test_images_are_mapped_linearly() -> None:
    encoder = LinearEncoder(6, 4)
    features = torch.rand(3, 6)
    torch.testing.assert_close(encoder(features), features @ encoder.linear.weight.T + encoder.linear.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_length_divides_each_row_by_its_norm(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5, dtype=dtype)
    torch.testing.assert_close(unit_length(rows), rows / rows.square().sum(1, keepdim=True).sqrt())


def test_unit_length_of_a_zero_row_stays_zero_and_finite() -> None:
    rows = torch.zeros(1, 4, requires_grad=True)
    unit = unit_length(rows)
    unit.sum().backward()
    assert not unit.any()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_unit_length_of_half_precision_is_taken_in_float32() -> None:
    rows = torch.full((1, 3), 300.0, dtype=torch.float16)  # whose squares would overflow
    assert unit_length(rows).dtype == torch.float32
    torch.testing.assert_close(unit_length(rows), torch.full((1, 3), 3**-0.5))


def branch(widths: list[int], **settings: Any) -> Branch:
    """With a bias, and statistics, that are not those of the start."""
    torch.manual_seed(0)
    made = Branch(5, widths, BranchesConfig(layers="nonlinear", **settings)).double()
    for tensor in [*made.linears.parameters(), *([] if made.batch_norm is None else made.batch_norm.parameters())]:
        nn.init.normal_(tensor)
    return made


def normalized(rows: Tensor, norm: nn.BatchNorm1d, training: bool) -> Tensor:
    """By the statistics of the batch, the variance being the mean square; or by the running ones."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean = rows.mean(0) if training else norm.running_mean
    variance = (rows - mean).square().mean(0) if training else norm.running_var
    return (rows - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def slow_branch(made: Branch, features: Tensor, place: str, training: bool) -> Tensor:
    """Formulas of three layers: fully connected, batch normalisation in one of two places, ReLU."""
    assert made.batch_norm is not None
    weights = [(layer.weight, layer.bias) for layer in made.linears]
    first = features @ weights[0][0].T + weights[0][1]
    if place == "after_first":
        first = normalized(first, made.batch_norm, training)
    second = torch.relu(first) @ weights[1][0].T + weights[1][1]
    last = torch.relu(second) @ weights[2][0].T + weights[2][1]
    return normalized(last, made.batch_norm, training) if place == "after_last" else last


@pytest.mark.parametrize(("place", "training"), list(product(["after_last", "after_first"], [True, False])))
def test_nonlinear_layers_have_relu_between_them_and_one_batch_normalisation(place: str, training: bool) -> None:
    made, features = branch([7, 6, 4], batch_norm=place, dropout=0), torch.randn(8, 5, dtype=torch.float64)
    assert made.batch_norm is not None
    assert made.batch_norm.num_features == (4 if place == "after_last" else 7)
    for _ in range(3):
        made.train()(torch.randn(8, 5, dtype=torch.float64))
    slow = slow_branch(made, features, place, training)
    torch.testing.assert_close(made.train(training)(features), slow)


@pytest.mark.parametrize("momentum", [0.1, 0.9])
@pytest.mark.parametrize("place", ["after_last", "after_first"])
def test_a_batch_has_its_share_in_the_running_statistics(place: str, momentum: float) -> None:
    made = branch([3, 4], batch_norm=place, batch_norm_momentum=momentum, dropout=0)
    assert made.batch_norm is not None
    features = torch.randn(6, 5, dtype=torch.float64)
    first = made.linears[0](features)
    seen = first if place == "after_first" else made.linears[1](first.relu())
    made.train()(features)
    torch.testing.assert_close(made.batch_norm.running_mean, momentum * seen.mean(0).detach())
    torch.testing.assert_close(made.batch_norm.running_var, (1 - momentum) + momentum * seen.var(0).detach())


def test_a_linear_branch_is_its_first_layer_alone() -> None:
    made, features = branch([4]), torch.randn(3, 5, dtype=torch.float64)
    assert made.batch_norm is None
    for training in (True, False):
        torch.testing.assert_close(made.train(training)(features), features @ made.linears[0].weight.T + made.linears[0].bias)


def test_dropout_is_behind_each_relu_and_in_training_alone() -> None:
    made, features = branch([2000, 1500, 3], dropout=0.3), torch.randn(2, 5, dtype=torch.float64)
    inputs: list[Tensor] = []
    for layer in made.linears:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    for training in (True, True, False):
        made.train(training)(features)
    passes = [inputs[start : start + 3] for start in (0, 3, 6)]
    for training, seen in zip((True, True, False), passes, strict=True):
        for number in (1, 2):
            relu = made.linears[number - 1](seen[number - 1]).relu().detach()
            kept = seen[number] != 0
            torch.testing.assert_close(seen[number][kept], relu[kept] / (0.7 if training else 1))
            share = (kept & (relu > 0)).sum() / (relu > 0).sum()
            assert share.item() == pytest.approx(0.7 if training else 1, abs=0.05)
    assert not torch.equal(passes[0][1], passes[1][1])


def test_a_branch_without_dropout_is_the_same_twice() -> None:
    made, features = branch([6, 3], dropout=0).train(), torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(made(features), made(features))


def slow_gru(encoder: WordEncoder, words: list[int]) -> Tensor:
    """The GRU's equations word by word."""
    gru = encoder.recurrent
    state = torch.zeros(gru.hidden_size)
    for word in words:
        given = gru.weight_ih_l0 @ encoder.words.weight[word] + gru.bias_ih_l0
        kept = gru.weight_hh_l0 @ state + gru.bias_hh_l0
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = given.chunk(3), kept.chunk(3)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        state = (1 - update) * new + update * state
    return state


def slow_lstm(encoder: WordEncoder, words: list[int]) -> Tensor:
    """The LSTM's equations word by word; the state is what it gives out, not its cell."""
    lstm = encoder.recurrent
    state, cell = torch.zeros(2, lstm.hidden_size)
    for word in words:
        given = lstm.weight_ih_l0 @ encoder.words.weight[word] + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ state + lstm.bias_hh_l0
        write, keep, new, show = given.chunk(4)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
        state = torch.sigmoid(show) * torch.tanh(cell)
    return state


RECURRENT = {"gru": slow_gru, "lstm": slow_lstm}
CAPTIONS = [[1, 5, 2], [1, 9, 8, 7, 6, 2], [1, 2]]
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])


def padded(extra: int = 0, value: int = 0) -> Tensor:
    words = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in CAPTIONS], batch_first=True, padding_value=value)
    return nn.functional.pad(words, (0, extra), value=value)


@pytest.mark.parametrize("recurrent", RECURRENT)
def test_a_caption_is_the_state_after_its_last_word_whatever_the_padding(recurrent: Any) -> None:
    torch.manual_seed(0)
    encoder = WordEncoder(20, 5, 7, recurrent)
    slow = torch.stack([RECURRENT[recurrent](encoder, words) for words in CAPTIONS])
    for extra, value in ((0, 0), (4, 0), (2, 13)):
        torch.testing.assert_close(encoder(padded(extra, value), LENGTHS), slow)
    parameters = list(encoder.parameters())
    weights = torch.linspace(-1, 2, slow.numel()).view_as(slow)
    found, expected = (
        torch.autograd.grad((weights * states).sum(), parameters) for states in (encoder(padded(), LENGTHS), slow)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recurrent", RECURRENT)
def test_captions_of_a_batch_do_not_see_each_other(recurrent: Any) -> None:
    encoder = WordEncoder(20, 5, 7, recurrent)
    together = encoder(padded(), LENGTHS)
    alone = [encoder(torch.tensor([caption]), torch.tensor([len(caption)])) for caption in CAPTIONS]
    torch.testing.assert_close(together, torch.cat(alone))


def test_word_embeddings_start_between_minus_and_plus_a_tenth() -> None:
    weights = WordEncoder(1000, 30, 4).words.weight
    assert 0.099 < weights.abs().max().item() <= 0.1
