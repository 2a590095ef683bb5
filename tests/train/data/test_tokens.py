from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.transformers_made import WORDS, make_bert
from vse.features.backbones.transformer import Transformer, read_transformer
from vse.train.data import captions as tokens
from vse.train.data.captions import TokenIndices

CPU = torch.device("cpu")
TEXTS = [" ".join(WORDS[:n]) for n in (3, 0, 12, 1, 7)]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return read_transformer(str(make_bert(tmp_path_factory.mktemp("bert"), pad_token_id=4)), max_length=9)


@given(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_tokens_are_padded_with_the_model_s_own_number_and_masked(transformer: Transformer, numbers: list[int]) -> None:
    padded, mask = TokenIndices(TEXTS, transformer, CPU).read(np.asarray(numbers))
    encoded = [transformer.tokenizer.encode(TEXTS[number]).ids for number in numbers]
    longest = max(map(len, encoded))
    assert padded.tolist() == [ids + [4] * (longest - len(ids)) for ids in encoded]
    assert mask.tolist() == [[True] * len(ids) + [False] * (longest - len(ids)) for ids in encoded]


def test_captions_that_are_cut_are_counted_in_one_line(transformer: Transformer, caplog: pytest.LogCaptureFixture) -> None:
    assert TokenIndices(TEXTS, transformer, CPU).n_cut == 1, "7 words and 2 special tokens just fit"
    assert caplog.messages == [
        f"1 of 5 captions are longer than the 9 tokens that {transformer.name} reads, and are truncated"
    ]
    caplog.clear()
    assert TokenIndices(TEXTS[:2], transformer, CPU).n_cut == 0
    assert not caplog.messages


def test_many_captions_are_read_in_parts(transformer: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TokenIndices(TEXTS, transformer, CPU).read(np.arange(5))
    monkeypatch.setattr(tokens, "_AT_ONCE", 2)
    for part, other in zip(TokenIndices(TEXTS, transformer, CPU).read(np.arange(5)), whole, strict=True):
        assert torch.equal(part, other)
