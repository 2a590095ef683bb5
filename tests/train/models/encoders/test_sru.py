"""Words read by SRUs: what is a caption, whatever its batch and its padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.train.models.test_sru_layers import slow_layers
from vse.train.kinds import Kind
from vse.train.models.encoders.base import Sizes
from vse.train.models.encoders.recurrent import Sru, SruEncoder

CAPTIONS = [[1, 5, 2], [1, 9, 8, 7, 6, 2], [1, 2]]
LENGTHS = torch.tensor([len(caption) for caption in CAPTIONS])


def made(**settings: object) -> SruEncoder:
    torch.manual_seed(0)
    encoder = Sru.model_validate({"layers": 2, **settings}).build(Sizes(Kind.WORDS, input_dim=20, dim=4, word_dim=5))
    assert isinstance(encoder, SruEncoder)
    return encoder


def padded(extra: int = 0, value: int = 0) -> Tensor:
    words = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in CAPTIONS], batch_first=True, padding_value=value)
    return nn.functional.pad(words, (0, extra), value=value)


def test_a_caption_is_the_last_layers_state_after_its_last_word_whatever_the_padding() -> None:
    encoder = made(dropout=0.0)
    slow = torch.stack([slow_layers(encoder.recurrent, encoder.words.weight[words])[-1] for words in CAPTIONS])
    for extra, value in ((0, 0), (4, 0), (2, 13)):
        torch.testing.assert_close(encoder(padded(extra, value), LENGTHS), (slow,))


def test_with_all_states_a_caption_is_the_set_of_them() -> None:
    encoder = made(dropout=0.0, states="all")
    states, mask = encoder(padded(), LENGTHS)
    slow = torch.cat([slow_layers(encoder.recurrent, encoder.words.weight[words]) for words in CAPTIONS])
    torch.testing.assert_close(states[mask], slow)
    assert mask.sum(1).tolist() == LENGTHS.tolist()


def test_captions_of_a_batch_do_not_see_each_other() -> None:
    encoder = made().eval()
    (together,) = encoder(padded(), LENGTHS)
    for row, caption in enumerate(CAPTIONS):
        torch.testing.assert_close(encoder(torch.tensor([caption]), LENGTHS[row : row + 1])[0][0], together[row])


def test_a_head_reads_the_last_state() -> None:
    encoder = made(head={"widths": [6, 3]}).eval()
    assert encoder.dim == 3
    assert encoder(padded(), LENGTHS)[0].shape == (3, 3)


def test_dropout_depends_on_torchs_generator_alone() -> None:
    encoder = made(dropout=0.5).train()

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        states: Tensor = encoder(padded(), LENGTHS)[0]
        return states

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("layers", [1, 4])
def test_there_are_as_many_layers_as_are_asked_for(layers: int) -> None:
    assert len(made(layers=layers).recurrent.layers) == layers
    assert (Sru().layers, Sru().dropout) == (4, 0.25)
