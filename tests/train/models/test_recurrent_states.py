from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_sequence

from vse.train.models.recurrent_states import last_states

N_WORDS, WORD_DIM, DIM = 11, 4, 5
EXACT = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-10}}

KINDS = {"gru": nn.GRU, "lstm": nn.LSTM}

Made = tuple[nn.GRU | nn.LSTM, Tensor]


def make(kind: str, dtype: torch.dtype, word_dim: int = WORD_DIM, dim: int = DIM) -> Made:
    torch.manual_seed(0)
    table = torch.randn(N_WORDS, word_dim, dtype=dtype, requires_grad=True)
    return KINDS[kind](word_dim, dim, batch_first=True).to(dtype), table


def drawn(lengths: list[int], n_words: int = N_WORDS) -> list[Tensor]:
    """Captions of these lengths, of some words."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(n_words, (length,), generator=generator) for length in lengths]


def packed(captions: list[Tensor]) -> PackedSequence:
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


BATCHES = {
    "equal lengths": drawn([6, 6, 6]),
    "unequal lengths": drawn([3, 9, 1, 5, 5, 2]),
    "one word each": drawn([1, 1, 1, 1]),
    "one caption": drawn([7]),
    "one caption of one word": drawn([1]),
    "ascending": drawn([1, 2, 3, 4, 5]),
    "two words over and over": drawn([8, 3, 12], n_words=2),
    "one word over and over": drawn([4, 4, 9], n_words=1),
    "64 captions": drawn([k % 17 + 1 for k in range(64)]),
}


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_those_of_torch(kind: str, batch: str, dtype: torch.dtype) -> None:
    made, words = make(kind, dtype), packed(BATCHES[batch])
    found, expected = (with_gradients(compute(*made, words), made) for compute in (last_states, of_torch))
    assert len(found) == 1 + 5
    torch.testing.assert_close(found, expected, **EXACT[dtype])


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10), n_words=st.integers(1, N_WORDS))
@pytest.mark.parametrize("kind", KINDS)
def test_captions_of_any_lengths_give_the_states_and_gradients_of_torch(kind: str, lengths: list[int], n_words: int) -> None:
    made, words = make(kind, torch.float64), packed(drawn(lengths, n_words))
    found, expected = (with_gradients(compute(*made, words), made) for compute in (last_states, of_torch))
    torch.testing.assert_close(found, expected, **EXACT[torch.float64])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    network, table = make(kind, torch.float64, word_dim=2, dim=3)
    words = packed(drawn([3, 1, 4]))
    assert torch.autograd.gradcheck(lambda *_: last_states(network, table, words), (table, *network.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_captions_keep_their_order(kind: str) -> None:
    made, captions = make(kind, torch.float64), BATCHES["unequal lengths"]
    alone = torch.cat([last_states(*made, packed([caption])) for caption in captions])
    torch.testing.assert_close(last_states(*made, packed(captions)), alone)
    backwards = last_states(*made, packed(captions[::-1]))
    torch.testing.assert_close(backwards.flip(0), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_captions_that_are_sorted_already_need_no_order(kind: str) -> None:
    made = make(kind, torch.float64)
    captions = sorted(BATCHES["unequal lengths"], key=len, reverse=True)
    lengths = torch.tensor([len(caption) for caption in captions])
    words = pack_padded_sequence(pad_sequence(captions, batch_first=True), lengths, batch_first=True)
    assert words.unsorted_indices is None
    torch.testing.assert_close(last_states(*made, words), last_states(*made, packed(captions)))


@pytest.mark.parametrize("kind", KINDS)
def test_words_that_do_not_occur_get_no_gradient(kind: str) -> None:
    network, table = make(kind, torch.float64)
    last_states(network, table, packed([torch.tensor([3, 5]), torch.tensor([5])])).sum().backward()
    assert table.grad.any(1).nonzero().flatten().tolist() == [3, 5]


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
    made, words = make(kind, torch.float32, word_dim=24, dim=32), packed(BATCHES["64 captions"])
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


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradients_are_needed(kind: str) -> None:
    made, words = make(kind, torch.float32), packed(BATCHES["unequal lengths"])
    expected = last_states(*made, words).detach()
    with torch.inference_mode():
        found = last_states(*made, words)
    assert found.is_inference()
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(last_states(*made, words), expected)
