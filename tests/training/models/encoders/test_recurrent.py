from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_sequence

from vse.training.kinds import Kind
from vse.training.models.encoders import CAPTION_ENCODERS
from vse.training.models.encoders.base import EncoderSpec
from vse.training.models.encoders.recurrent import GruSettings, RecurrentEncoder
from vse.training.models.recurrent_states import last_states

VOCABULARY_SIZE, WORD_DIM, DIM = 20, 5, 7
CAPTIONS = [[1, 5, 2], [1, 9, 8, 7, 6, 2], [1, 2]]
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])


NAMES = ["gru", "lstm"]


def made(name: str, **settings: Any) -> RecurrentEncoder:
    torch.manual_seed(0)
    spec = EncoderSpec(Kind.WORDS, VOCABULARY_SIZE, DIM, WORD_DIM)
    encoder = CAPTION_ENCODERS[name](**settings).build(spec)
    assert isinstance(encoder, RecurrentEncoder)
    return encoder


def pad_sets(extra: int = 0, value: int = 0) -> Tensor:
    words = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in CAPTIONS], batch_first=True, padding_value=value)
    return nn.functional.pad(words, (0, extra), value=value)


def gradients(states: Tensor, encoder: RecurrentEncoder) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, states.numel()).view_as(states)
    return torch.autograd.grad((weights * states).sum(), list(encoder.parameters()), retain_graph=True)


@pytest.mark.parametrize("states", ["last", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_a_caption_is_its_last_state_or_the_set_of_all_whatever_the_padding(name: str, states: str) -> None:
    encoder = made(name, states=states)
    of_captions = [encoder.recurrent(encoder.words.weight[words][None])[0][0] for words in CAPTIONS]
    slow = torch.stack([state for own in of_captions for state in (own if states == "all" else own[-1:])])
    for extra, value in ((0, 0), (4, 0), (2, 13)):
        fast, *mask = encoder(pad_sets(extra, value), LENGTHS)
        if states == "all":
            assert mask[0].tolist() == [[column < len(words) for column in range(6)] for words in CAPTIONS]
            fast = fast[mask[0]]
        torch.testing.assert_close(fast, slow)
        torch.testing.assert_close(gradients(fast, encoder), gradients(slow, encoder), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_reads_the_last_state(name: str) -> None:
    plain, encoder = made(name), made(name, head={"widths": [6, 4]}).eval()
    assert encoder.dim == 4
    torch.testing.assert_close(encoder(pad_sets(), LENGTHS), encoder.head(*plain(pad_sets(), LENGTHS)))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_pooled_states_are_one_vector_by_generalised_pooling(name: str, bidirectional: bool) -> None:
    settings = {"bidirectional": bidirectional}
    encoder, plain = made(name, states="pooled", **settings), made(name, states="all", **settings)
    for extra, value in ((0, 0), (3, 13)):
        (pooled,) = encoder(pad_sets(extra, value), LENGTHS)
        torch.testing.assert_close(pooled, encoder.pooling(*plain(pad_sets(), LENGTHS)))


@pytest.mark.parametrize("states", ["last", "all", "pooled"])
def test_words_are_masked_and_left_out_in_training_alone(states: str) -> None:
    encoder, plain = made("gru", states=states, size_augmentation=0.6), made("gru", states=states)
    words, lengths = pad_sets().repeat(30, 1), LENGTHS.repeat(30)
    changed = encoder(words, lengths)
    if states == "all":
        assert changed[1].sum() < lengths.sum()
    else:
        assert len(changed[0].unique(dim=0)) > 3
    torch.testing.assert_close(encoder.eval()(words, lengths), plain(words, lengths))
    assert encoder.state_dict().keys() == plain.state_dict().keys()


def test_word_embeddings_start_small_and_do_not_decay_and_a_head_reads_one_state() -> None:
    encoder = GruSettings().build(EncoderSpec(Kind.WORDS, 1000, 4, 30))
    assert isinstance(encoder, RecurrentEncoder)
    assert 0.099 < encoder.words.weight.abs().max().item() <= 0.1
    assert encoder.undecayed() == [encoder.words.weight]
    with pytest.raises(ValidationError, match="a head reads the last state; it does not go with states: all"):
        GruSettings.model_validate({"states": "all", "head": {"widths": [4]}})


N_WORDS, VECTOR_DIM, STATE_DIM = 11, 4, 5

KINDS = {"gru": nn.GRU, "lstm": nn.LSTM}

Made = tuple[nn.GRU | nn.LSTM, Tensor]


def make(kind: str, dtype: torch.dtype, word_dim: int = VECTOR_DIM, dim: int = STATE_DIM) -> Made:
    torch.manual_seed(0)
    table = torch.randn(N_WORDS, word_dim, dtype=dtype, requires_grad=True)
    return KINDS[kind](word_dim, dim, batch_first=True).to(dtype), table


def drawn(lengths: list[int], n_words: int = N_WORDS) -> list[Tensor]:
    """Captions of these lengths, of some words."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(n_words, (length,), generator=generator) for length in lengths]


def pack(captions: list[Tensor]) -> PackedSequence:
    lengths = torch.tensor([len(caption) for caption in captions])
    return pack_padded_sequence(pad_sequence(captions, batch_first=True), lengths, batch_first=True, enforce_sorted=False)


def of_torch(network: nn.GRU | nn.LSTM, table: Tensor, words: PackedSequence) -> Tensor:
    """The last states of torch's own network, which projects every occurrence of a word."""
    last = network(words._replace(data=nn.functional.embedding(words.data, table)))[1]
    return last[0][0] if isinstance(network, nn.LSTM) else last[0]


def with_gradients(states: Tensor, made: Made) -> list[Tensor]:
    """The states, and the gradients of the words and of the four arrays of the network, for a sum in which each weighs."""
    network, table = made
    weights = torch.linspace(-1, 2, states.numel(), dtype=states.dtype).view_as(states)
    return [states.detach(), *torch.autograd.grad((states * weights).sum(), [table, *network.parameters()])]


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10), n_words=st.integers(1, N_WORDS))
@pytest.mark.parametrize("kind", KINDS)
def test_captions_of_any_lengths_give_the_states_and_gradients_of_torch(kind: str, lengths: list[int], n_words: int) -> None:
    made, words = make(kind, torch.float64), pack(drawn(lengths, n_words))
    found, expected = (with_gradients(compute(*made, words), made) for compute in (last_states, of_torch))
    assert len(found) == 1 + 5
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_sorted_captions_and_states_without_gradients_are_the_same(kind: str) -> None:
    made = make(kind, torch.float64)
    captions = drawn([9, 5, 5, 3, 2, 1])
    lengths = torch.tensor([len(caption) for caption in captions])
    words = pack_padded_sequence(pad_sequence(captions, batch_first=True), lengths, batch_first=True)
    assert words.unsorted_indices is None
    torch.testing.assert_close(last_states(*made, words), last_states(*made, pack(captions)))
    made, words = make(kind, torch.float32), pack(drawn([3, 9, 1, 5, 5, 2]))
    expected = last_states(*made, words).detach()
    with torch.inference_mode():
        found = last_states(*made, words)
    assert found.is_inference()
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(last_states(*made, words), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_that_is_handed_in_stays_as_it_is(kind: str) -> None:
    network, table = make(kind, torch.float64)
    captions = pad_sequence(drawn([3, 3]), batch_first=True)
    states = last_states(network, table, pack_padded_sequence(captions, torch.tensor([3, 3]), batch_first=True))
    given = torch.ones_like(states)
    torch.autograd.grad(states, table, given)
    assert (given == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_close_to_float32(kind: str) -> None:
    made, words = make(kind, torch.float32, word_dim=24, dim=32), pack(drawn([k % 17 + 1 for k in range(64)]))
    exact = with_gradients(last_states(*made, words), made)
    with torch.autocast("cpu", torch.bfloat16):
        states = last_states(*made, words)
    assert states.dtype == torch.float32
    rough = with_gradients(states, made)
    assert not torch.equal(rough[0], exact[0]), "products are in bfloat16"
    torch.testing.assert_close(rough[0], exact[0], rtol=0, atol=0.02)
    for a, b in zip(rough[1:], exact[1:], strict=True):
        assert a.dtype == torch.float32
        assert nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99
