"""Words read by a GRU or an LSTM, against their equations word by word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from vse.train.kinds import Kind
from vse.train.models.encoders import CAPTION_ENCODERS
from vse.train.models.encoders.base import Sizes
from vse.train.models.encoders.recurrent import Gru, RecurrentEncoder

VOCABULARY_SIZE, WORD_DIM, DIM = 20, 5, 7


def slow_gru(encoder: RecurrentEncoder, words: list[int]) -> list[Tensor]:
    """The GRU's equations: the state after each word."""
    gru = encoder.recurrent
    states = [torch.zeros(DIM)]
    for word in words:
        given = gru.weight_ih_l0 @ encoder.words.weight[word] + gru.bias_ih_l0
        kept = gru.weight_hh_l0 @ states[-1] + gru.bias_hh_l0
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = given.chunk(3), kept.chunk(3)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        states.append((1 - update) * new + update * states[-1])
    return states[1:]


def slow_lstm(encoder: RecurrentEncoder, words: list[int]) -> list[Tensor]:
    """The LSTM's equations; a state is what it gives out, not its cell."""
    lstm = encoder.recurrent
    states, cell = [torch.zeros(DIM)], torch.zeros(DIM)
    for word in words:
        given = lstm.weight_ih_l0 @ encoder.words.weight[word] + lstm.bias_ih_l0
        given = given + lstm.weight_hh_l0 @ states[-1] + lstm.bias_hh_l0
        write, keep, new, show = given.chunk(4)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
        states.append(torch.sigmoid(show) * torch.tanh(cell))
    return states[1:]


SLOW: dict[str, Callable[[RecurrentEncoder, list[int]], list[Tensor]]] = {"gru": slow_gru, "lstm": slow_lstm}
CAPTIONS = [[1, 5, 2], [1, 9, 8, 7, 6, 2], [1, 2]]
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])


def made(name: str, **settings: Any) -> RecurrentEncoder:
    torch.manual_seed(0)
    sizes = Sizes(Kind.WORDS, VOCABULARY_SIZE, DIM, WORD_DIM)
    encoder = CAPTION_ENCODERS[name](**settings).build(sizes)
    assert isinstance(encoder, RecurrentEncoder)
    return encoder


def padded(extra: int = 0, value: int = 0) -> Tensor:
    words = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in CAPTIONS], batch_first=True, padding_value=value)
    return nn.functional.pad(words, (0, extra), value=value)


def gradients(states: Tensor, encoder: RecurrentEncoder) -> tuple[Tensor, ...]:
    """Of a sum of the states in which every number weighs differently."""
    weights = torch.linspace(-1, 2, states.numel()).view_as(states)
    return torch.autograd.grad((weights * states).sum(), list(encoder.parameters()), retain_graph=True)


@pytest.mark.parametrize("name", SLOW)
def test_a_caption_is_the_state_after_its_last_word_whatever_the_padding(name: str) -> None:
    encoder = made(name)
    slow = torch.stack([SLOW[name](encoder, words)[-1] for words in CAPTIONS])
    for extra, value in ((0, 0), (4, 0), (2, 13)):
        (states,) = encoder(padded(extra, value), LENGTHS)
        torch.testing.assert_close(states, slow)
        torch.testing.assert_close(gradients(states, encoder), gradients(slow, encoder), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SLOW)
def test_with_all_states_a_caption_is_the_set_of_them_whatever_the_padding(name: str) -> None:
    encoder = made(name, states="all")
    slow = torch.stack([state for words in CAPTIONS for state in SLOW[name](encoder, words)])
    for extra, value in ((0, 0), (4, 0), (2, 13)):
        states, mask = encoder(padded(extra, value), LENGTHS)
        assert mask.tolist() == [[column < len(words) for column in range(6)] for words in CAPTIONS]
        torch.testing.assert_close(states[mask], slow)
        torch.testing.assert_close(gradients(states[mask], encoder), gradients(slow, encoder), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SLOW)
def test_the_last_of_all_states_is_the_last_state(name: str) -> None:
    (last,), (states, mask) = made(name)(padded(), LENGTHS), made(name, states="all")(padded(), LENGTHS)
    torch.testing.assert_close(states[torch.arange(3), mask.sum(1) - 1], last)


@pytest.mark.parametrize("states", ["last", "all"])
@pytest.mark.parametrize("name", SLOW)
def test_captions_of_a_batch_do_not_see_each_other(name: str, states: str) -> None:
    encoder = made(name, states=states)
    together = encoder(padded(), LENGTHS)[0]
    for row, caption in enumerate(CAPTIONS):
        alone = encoder(torch.tensor([caption]), torch.tensor([len(caption)]))[0][0]
        torch.testing.assert_close(together[row, : len(caption)] if states == "all" else together[row], alone)


@pytest.mark.parametrize("name", SLOW)
def test_a_head_reads_the_last_state(name: str) -> None:
    plain, encoder = made(name), made(name, head={"widths": [6, 4]}).eval()
    assert encoder.dim == 4
    torch.testing.assert_close(encoder(padded(), LENGTHS), encoder.head(*plain(padded(), LENGTHS)))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", SLOW)
def test_pooled_states_are_one_vector_by_generalised_pooling(name: str, bidirectional: bool) -> None:
    settings = {"bidirectional": bidirectional}
    encoder, plain = made(name, states="pooled", **settings), made(name, states="all", **settings)
    for extra, value in ((0, 0), (3, 13)):
        (pooled,) = encoder(padded(extra, value), LENGTHS)
        torch.testing.assert_close(pooled, encoder.pooling(*plain(padded(), LENGTHS)))


@pytest.mark.parametrize("states", ["last", "all", "pooled"])
def test_words_are_masked_and_left_out_in_training_alone(states: str) -> None:
    encoder, plain = made("gru", states=states, size_augmentation=0.6), made("gru", states=states)
    words, lengths = padded().repeat(30, 1), LENGTHS.repeat(30)
    changed = encoder(words, lengths)
    if states == "all":
        assert changed[1].sum() < lengths.sum()
    else:
        assert len(changed[0].unique(dim=0)) > 3
    torch.testing.assert_close(encoder.eval()(words, lengths), plain(words, lengths))
    assert encoder.state_dict().keys() == plain.state_dict().keys()


def test_a_head_does_not_go_with_all_states() -> None:
    with pytest.raises(ValidationError, match="a head reads the last state; it does not go with states: all"):
        Gru.model_validate({"states": "all", "head": {"widths": [4]}})


def test_words_become_vectors_or_sets() -> None:
    assert Gru.takes == (Kind.WORDS,)
    assert Gru().gives(Kind.WORDS) == Kind.VECTORS
    assert Gru(states="all").gives(Kind.WORDS) == Kind.SETS
    assert Gru(states="pooled").gives(Kind.WORDS) == Kind.VECTORS


def test_word_embeddings_start_between_minus_and_plus_a_tenth_and_do_not_decay() -> None:
    encoder = Gru().build(Sizes(Kind.WORDS, 1000, 4, 30))
    assert isinstance(encoder, RecurrentEncoder)
    assert 0.099 < encoder.words.weight.abs().max().item() <= 0.1
    assert encoder.undecayed() == [encoder.words.weight]


def test_the_networks_are_torchs() -> None:
    assert isinstance(made("gru").recurrent, nn.GRU)
    assert isinstance(made("lstm").recurrent, nn.LSTM)
