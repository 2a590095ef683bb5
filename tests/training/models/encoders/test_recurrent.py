from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from vse.training.kinds import InputKind
from vse.training.models.encoders import CAPTION_ENCODERS
from vse.training.models.encoders.base import EncoderSpec
from vse.training.models.encoders.recurrent import GruSettings, RecurrentEncoder

VOCABULARY_SIZE, WORD_DIM, DIM = 20, 5, 7
CAPTIONS = [[1, 5, 2], [1, 9, 8, 7, 6, 2], [1, 2]]
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])


NAMES = ["gru", "lstm"]


def made(name: str, **settings: Any) -> RecurrentEncoder:
    torch.manual_seed(0)
    spec = EncoderSpec(InputKind.WORDS, VOCABULARY_SIZE, DIM, WORD_DIM)
    encoder = CAPTION_ENCODERS[name](**settings).build(spec)
    assert isinstance(encoder, RecurrentEncoder)
    return encoder


def pad_sets(extra: int = 0, value: int = 0, captions: list[list[int]] = CAPTIONS) -> Tensor:
    words = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in captions], batch_first=True, padding_value=value)
    return nn.functional.pad(words, (0, extra), value=value)


def gradients(states: Tensor, encoder: RecurrentEncoder) -> tuple[Tensor, ...]:
    """Of the words and of the four arrays of the network, for a sum in which each number has a weight of its own."""
    weights = torch.linspace(-1, 2, states.numel(), dtype=states.dtype).view_as(states)
    return torch.autograd.grad((weights * states).sum(), list(encoder.parameters()), retain_graph=True)


@pytest.mark.parametrize("states", ["last", "all"])
@pytest.mark.parametrize("name", NAMES)
@given(
    captions=st.lists(st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=12), min_size=1, max_size=20),
    extra=st.integers(0, 4),
    value=st.integers(0, VOCABULARY_SIZE - 1),
)
def test_a_caption_is_its_last_state_or_the_set_of_all_by_torch_s_own_network_whatever_the_padding(
    name: str, states: str, captions: list[list[int]], extra: int, value: int
) -> None:
    encoder, lengths = made(name, states=states).double(), list(map(len, captions))
    alone = [encoder.recurrent(encoder.words.weight[words][None])[0][0] for words in captions]
    slow = torch.cat(alone) if states == "all" else torch.stack([own[-1] for own in alone])
    fast, *mask = encoder(pad_sets(extra, value, captions), torch.tensor(lengths))
    if states == "all":
        assert mask[0].tolist() == [[column < n for column in range(max(lengths))] for n in lengths]
        fast = fast[mask[0]]
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(fast, encoder), gradients(slow, encoder), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_states_without_gradients_differ_by_rounding_and_those_in_bfloat16_are_near(name: str) -> None:
    encoder = made(name)
    (exact,) = encoder(pad_sets(), LENGTHS)
    with torch.inference_mode():
        torch.testing.assert_close(encoder(pad_sets(), LENGTHS)[0], exact, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        (rough,) = encoder(pad_sets(), LENGTHS)
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact), "products are in bfloat16"
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.02)
    for a, b in zip(gradients(rough, encoder), gradients(exact, encoder), strict=True):
        assert a.dtype == torch.float32
        assert nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99


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
    encoder = GruSettings().build(EncoderSpec(InputKind.WORDS, 1000, 4, 30))
    assert isinstance(encoder, RecurrentEncoder)
    assert 0.099 < encoder.words.weight.abs().max().item() <= 0.1
    assert encoder.weights_without_decay() == [encoder.words.weight]
    with pytest.raises(ValidationError, match="a head reads the last state; it does not go with states: all"):
        GruSettings.model_validate({"states": "all", "head": {"widths": [4]}})
