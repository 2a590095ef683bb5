from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from tests.training.models.encoders.test_recurrent import CAPTIONS, LENGTHS, pad_sets
from vse.training.kinds import InputKind
from vse.training.models.encoders.base import EncoderSpec
from vse.training.models.encoders.recurrent import SruEncoder, SruLayer, SruLayers, SruSettings


def made(**settings: object) -> SruEncoder:
    torch.manual_seed(0)
    encoder = SruSettings.model_validate({"layers": 2, **settings}).build(
        EncoderSpec(InputKind.WORDS, input_dim=20, dim=4, word_dim=5)
    )
    assert isinstance(encoder, SruEncoder)
    return encoder


def test_a_caption_is_the_last_layer_s_last_state_or_the_set_of_all_whatever_the_padding() -> None:
    encoder, every = made(dropout=0.0), made(dropout=0.0, states="all")
    slow = [slow_layers(encoder.recurrent, encoder.words.weight[words]) for words in CAPTIONS]
    for extra, value in ((0, 0), (4, 0), (2, 13)):
        torch.testing.assert_close(encoder(pad_sets(extra, value), LENGTHS), (torch.stack([own[-1] for own in slow]),))
        states, mask = every(pad_sets(extra, value), LENGTHS)
        torch.testing.assert_close(states[mask], torch.cat(slow))
        assert mask.sum(1).tolist() == LENGTHS.tolist()
    encoder = made(head={"widths": [6, 3]}).eval()
    assert encoder.dim == 3
    assert encoder(pad_sets(), LENGTHS)[0].shape == (3, 3)


INPUT_DIM, STATE_DIM = 5, 4
N_WORDS = [6, 3, 3, 1]
SIZES = [4, 3, 3, 1, 1, 1]


def slow_layer(layer: SruLayer, inputs: Tensor) -> Tensor:
    """The states of one caption (n_words, input_dim), from the equations of a single number of the state."""
    wide = layer.weight.shape[0] == 4 * STATE_DIM
    cell, states = [torch.zeros((), dtype=inputs.dtype)] * STATE_DIM, []
    for x in inputs:
        state = []
        for i in range(STATE_DIM):
            candidate, forget, reset = (layer.weight[k * STATE_DIM + i] @ x for k in range(3))
            forget = 1 / (1 + torch.exp(-(forget + layer.bias[i])))
            reset = 1 / (1 + torch.exp(-(reset + layer.bias[STATE_DIM + i])))
            cell[i] = forget * cell[i] + (1 - forget) * candidate
            passed = layer.weight[3 * STATE_DIM + i] @ x if wide else x[i]
            state.append(reset * torch.tanh(cell[i]) + (1 - reset) * passed)
        states.append(torch.stack(state))
    return torch.stack(states)


def slow_layers(network: SruLayers, inputs: Tensor) -> Tensor:
    for layer in network.layers:
        assert isinstance(layer, SruLayer)
        inputs = slow_layer(layer, inputs)
    return inputs


def layers_made(input_dim: int = INPUT_DIM, n_layers: int = 3, dropout: float = 0.0) -> SruLayers:
    torch.manual_seed(0)
    network = SruLayers(input_dim, STATE_DIM, n_layers, dropout).double()
    for layer in network.layers:
        assert isinstance(layer, SruLayer)
        nn.init.normal_(layer.bias)
    return network


def random_captions(input_dim: int = INPUT_DIM) -> list[Tensor]:
    return [torch.randn(length, input_dim, dtype=torch.float64, requires_grad=True) for length in N_WORDS]


@pytest.mark.parametrize("input_dim", [INPUT_DIM, STATE_DIM], ids=["another length", "the state's length"])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_states_and_gradients_are_those_of_the_equations(input_dim: int, n_layers: int) -> None:
    network, sequences = layers_made(input_dim, n_layers), random_captions(input_dim)
    packed = pack_sequence(sequences)
    assert packed.batch_sizes.tolist() == SIZES
    computed = network(packed.data, SIZES)
    slow = pack_sequence([slow_layers(network, sequence) for sequence in sequences]).data
    torch.testing.assert_close(computed, slow, rtol=1e-12, atol=1e-14)
    weights = torch.linspace(-1, 2, slow.numel(), dtype=torch.float64).view_as(slow)
    of_both = (
        torch.autograd.grad((weights * states).sum(), [*sequences, *network.parameters()], retain_graph=True)
        for states in (computed, slow)
    )
    torch.testing.assert_close(*of_both, rtol=1e-10, atol=1e-12)


def test_long_captions_and_autocast_do_no_harm() -> None:
    network = layers_made(n_layers=4).float()
    rows = torch.randn(2000, INPUT_DIM, requires_grad=True)
    states = network(rows, [1] * 2000)
    states.sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    assert bool(torch.isfinite(states).all() and torch.isfinite(rows.grad).all())
    network, rows = layers_made().float(), torch.randn(sum(SIZES), INPUT_DIM)
    with torch.autocast("cpu", torch.bfloat16):
        low = network(rows, SIZES)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, network(rows, SIZES), rtol=0.05, atol=0.05)


def test_dropout_takes_one_mask_for_all_words_of_a_caption() -> None:
    layer = SruLayer(1000, 1000, input_dropout=0.0, dropout=0.25)
    rows = torch.randn(sum(SIZES), 1000)
    torch.manual_seed(1)
    kept = layer(rows, SIZES) != rows  # where a state's own part is dropped, the input passes
    by_caption = [[], [], [], []]  # type: list[list[Tensor]]
    start = 0
    for size in SIZES:
        for caption in range(size):
            by_caption[caption].append(kept[start + caption])
        start += size
    for masks in by_caption:
        assert all(torch.equal(mask, masks[0]) for mask in masks)
        assert masks[0].float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert not torch.equal(by_caption[0][0], by_caption[1][0])
    assert torch.equal(layer.eval()(rows, SIZES) != rows, torch.ones_like(rows, dtype=torch.bool))


def test_the_highway_passes_dropped_inputs_and_the_last_state_is_not_dropped() -> None:
    layer = SruLayer(STATE_DIM, STATE_DIM, input_dropout=0.9999, dropout=0.0)
    rows = torch.randn(3, STATE_DIM)
    torch.manual_seed(0)
    torch.testing.assert_close(layer(rows, [1, 1, 1]), rows / 2)  # the cell is 0, both gates are a half
    rates = [(layer.input_dropout, layer.dropout) for layer in SruLayers(5, 4, 3, 0.25).layers]
    assert rates == [(0.25, 0.25), (0.25, 0.25), (0.25, 0.0)]


def test_weights_start_as_in_the_authors_package() -> None:
    torch.manual_seed(0)
    layer = SruLayer(300, 200, input_dropout=0.25, dropout=0.25)
    bound = math.sqrt(3 / 300 * 0.75)
    assert tuple(layer.weight.shape) == (4 * 200, 300)
    assert layer.weight[200:].abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert layer.weight[:200].abs().max().item() == pytest.approx(bound * math.sqrt(0.75), rel=1e-3)
    assert not layer.bias.any()
