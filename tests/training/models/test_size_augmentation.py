from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vse.training.models.encoders.pooling import WordAugmentation, drop_elements

PAD, START, END, UNKNOWN = range(4)
WORDS = 500


def masks(sizes: list[int]) -> Tensor:
    return torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0, 0.999), st.integers(0, 99))
def test_sets_lose_members_but_never_all(sizes: list[int], share: float, seed: int) -> None:
    torch.manual_seed(seed)
    mask = masks(sizes)
    left = drop_elements(mask, share)
    assert left.any(1).all()
    assert not (left & ~mask).any()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_the_share_of_a_set_that_is_left_out_is_as_asked(share: float) -> None:
    torch.manual_seed(0)
    mask = masks([40] * 2000)
    assert 1 - drop_elements(mask, share).double().mean().item() == pytest.approx(share, abs=0.01)


def captions(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Between a start and an end, each word a number of its own; it is never among those that are drawn."""
    mask = masks([length + 2 for length in lengths])
    words = torch.arange(mask.shape[1]).expand(mask.shape).add(WORDS).masked_fill(~mask, PAD).clone()
    words[:, 0] = START
    words[torch.arange(len(lengths)), torch.tensor(lengths) + 1] = END
    return words, mask


def drawable(share: float, continued: Sequence[int] = ()) -> WordAugmentation:
    """An augmentation in which a word that is drawn for another is below ``WORDS``, so that it is known as such."""
    n_words = WORDS + 100
    made = WordAugmentation(share, n_words, [PAD, START, END, UNKNOWN, *range(WORDS, n_words)], UNKNOWN, PAD, continued)
    made.special_word_mask[WORDS:] = False
    return made


def test_a_fifth_of_the_words_is_drawn_of_which_half_are_masked_a_tenth_changed_and_the_others_left_out() -> None:
    torch.manual_seed(0)
    words, mask = captions([50] * 2000)
    left, their_mask = drawable(0.2)(words, mask)
    n = 50 * 2000
    assert (left == UNKNOWN).sum().item() / n == pytest.approx(0.1, abs=0.005)
    assert (left >= WORDS).sum().item() / n == pytest.approx(0.8, abs=0.005)
    assert ((left > UNKNOWN) & (left < WORDS)).sum().item() / n == pytest.approx(0.02, abs=0.002)
    assert (mask.sum() - their_mask.sum()).item() / n == pytest.approx(0.08, abs=0.005)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.floats(0.01, 0.999), st.integers(0, 99))
def test_what_is_left_keeps_its_order_its_ends_and_no_gaps(lengths: list[int], share: float, seed: int) -> None:
    torch.manual_seed(seed)
    words, mask = captions(lengths)
    left, their_mask = drawable(share)(words, mask)
    assert left.shape == their_mask.shape
    assert their_mask.sum(1).max() == left.shape[1]
    for own, there, before in zip(left, their_mask, words, strict=True):
        caption = own[there]
        assert there.tolist() == sorted(there.tolist(), reverse=True)
        assert (own[~there] == PAD).all()
        assert (caption[0], caption[-1]) == (START, END)
        same = [word for word in caption.tolist() if word >= WORDS]
        assert same == [word for word in before.tolist() if word in same]


def test_pieces_of_a_word_share_its_fate() -> None:
    torch.manual_seed(0)
    words, mask = captions([2] * 4000)
    words[:, 2] = WORDS + 2
    left, their_mask = drawable(0.9, continued=[WORDS + 2])(words, mask)
    lengths = their_mask.sum(1)
    assert set(lengths.tolist()) == {2, 4}
    masked = (left == UNKNOWN).sum(1)
    assert set(masked.tolist()) == {0, 2}


def test_captions_stay_in_evaluation_and_never_become_empty() -> None:
    words, mask = captions([3, 5])
    for still in (drawable(0.9).eval(), drawable(0.0)):
        left, their_mask = still(words, mask)
        assert torch.equal(left, words)
        assert torch.equal(their_mask, mask)
    torch.manual_seed(0)
    words, mask = torch.full((2000, 1), WORDS), torch.ones(2000, 1, dtype=torch.bool)
    left, their_mask = drawable(0.99)(words, mask)
    assert their_mask.all()
    assert (left == UNKNOWN).double().mean().item() == pytest.approx(0.495, abs=0.05)
    torch.manual_seed(0)
    made = WordAugmentation(0.9, 4, [PAD, START, END, UNKNOWN], UNKNOWN)
    made.special_word_mask[UNKNOWN] = False
    left, _ = made(torch.full((50, 3), UNKNOWN), torch.ones(50, 3, dtype=torch.bool))
    assert set(left.unique().tolist()) <= {PAD, UNKNOWN}
