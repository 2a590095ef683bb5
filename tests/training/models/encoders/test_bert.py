from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tests.transformers_made import WORDS, make_bert
from vse.features.backbones.transformer import read_transformer
from vse.pipeline.errors import UserError
from vse.training.data.pairs import TokenIndices
from vse.training.kinds import InputKind
from vse.training.models.encoders.base import EncoderSpec
from vse.training.models.encoders.bert import BertEncoder, BertSettings

CPU = torch.device("cpu")
CAPTIONS = ["a red disc on the grass", "two zebras", "", "a blue square under a green triangle beside a red disc"]
DIM = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert") / "bert")


def made(folder: Path, **settings: Any) -> BertEncoder:
    torch.manual_seed(0)
    config = BertSettings(model=str(folder), **settings)
    transformer = config.load_transformer(None, list)
    encoder = config.build(EncoderSpec(InputKind.TOKENS, transformer.tokenizer.get_vocab_size(), DIM, 99, transformer))
    assert isinstance(encoder, BertEncoder)
    return encoder.eval()


def read(folder: Path, captions: list[str] = CAPTIONS) -> tuple[Tensor, Tensor]:
    return TokenIndices(captions, read_transformer(str(folder)), CPU).read(np.arange(len(captions)))


def slow_states(folder: Path, encoder: BertEncoder, caption: str) -> Tensor:
    """The outputs of the library's model for one caption, mapped one by one."""
    tokens = read_transformer(str(folder)).tokenizer.encode(caption).ids
    model = transformers.BertModel.from_pretrained(folder).eval()
    states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return torch.stack([encoder.linear.weight @ state + encoder.linear.bias for state in states])


def gradients(encoder: BertEncoder, vectors: Tensor) -> dict[str, Tensor | None]:
    weights = torch.linspace(-1, 2, vectors.numel()).view_as(vectors)
    (weights * vectors).sum().backward()  # type: ignore[no-untyped-call]
    found = {name: weight.grad for name, weight in encoder.named_parameters()}
    encoder.zero_grad(set_to_none=True)
    return found


def test_a_caption_is_its_mapped_tokens_pooled_or_the_set_of_them(folder: Path) -> None:
    encoder = made(folder)
    slow = [slow_states(folder, encoder, caption) for caption in CAPTIONS]
    (means,) = encoder(*read(folder))
    torch.testing.assert_close(means, torch.stack([sum(states) / len(states) for states in slow]))  # type: ignore[arg-type]
    (firsts,) = made(folder, pooling="first")(*read(folder))
    torch.testing.assert_close(firsts, torch.stack([states[0] for states in slow]))
    sets, mask = made(folder, states="all")(*read(folder))
    for k, states in enumerate(slow):
        assert mask[k].sum() == len(states)
        torch.testing.assert_close(sets[k, : len(states)], states)
    encoder = made(folder, pooling="gpo")
    torch.testing.assert_close(encoder(*read(folder))[0], encoder.gpo(*made(folder, states="all")(*read(folder))))


def test_words_are_masked_and_left_out_in_training_alone_and_special_tokens_stay(folder: Path) -> None:
    captions = [" ".join(WORDS[:6])] * 40
    encoder = made(folder, states="all", size_augmentation=0.6)
    tokens, mask = read(folder, captions)
    torch.testing.assert_close(encoder(tokens, mask), made(folder, states="all")(tokens, mask))
    encoder.train()
    changed, left = encoder.augmentation(tokens, mask)
    tokenizer = read_transformer(str(folder)).tokenizer
    assert left.sum() < mask.sum()
    assert (changed == tokenizer.token_to_id("[MASK]")).any()
    for own, there in zip(changed, left, strict=True):
        assert [tokenizer.id_to_token(int(own[there][end])) for end in (0, -1)] == ["[CLS]", "[SEP]"]
    transformer = read_transformer(str(folder))
    nameless = replace(transformer, tokenizer_json=transformer.tokenizer_json.replace("[MASK]", "[HOLE]"))
    with pytest.raises(UserError, match="size_augmentation: .*bert has no mask token; set it to 0"):
        BertSettings(size_augmentation=0.2).build(
            EncoderSpec(InputKind.TOKENS, nameless.tokenizer.get_vocab_size(), DIM, 99, nameless)
        )


@given(
    captions=st.lists(st.lists(st.sampled_from([*WORDS, "zebra", "☂"]), max_size=9).map(" ".join), min_size=2, max_size=6),
    data=st.data(),
)
def test_order_padding_and_neighbours_change_nothing(folder: Path, captions: list[str], data: st.DataObject) -> None:
    encoder = made(folder)
    (vectors,) = encoder(*read(folder, captions))
    order = data.draw(st.permutations(range(len(captions))))
    (others,) = encoder(*read(folder, [captions[k] for k in order]))
    torch.testing.assert_close(others, vectors[order])
    tokens, mask = read(folder, captions)
    (wider,) = encoder(*(torch.nn.functional.pad(part, (0, 3)) for part in (tokens, mask)))
    torch.testing.assert_close(wider, vectors)
    (alone,) = encoder(*read(folder, captions[:1]))
    torch.testing.assert_close(alone, vectors[:1])


def test_dropout_is_off_in_evaluation_and_in_frozen_layers(folder: Path, tmp_path: Path) -> None:
    encoder = made(folder, frozen_layers=1)
    encoder.train()
    dropping = {name for name, module in encoder.named_modules() if isinstance(module, torch.nn.Dropout) and module.training}
    assert dropping
    assert all(name.startswith("network.encoder.layer.1.") for name in dropping)
    found = gradients(encoder, encoder(*read(folder))[0])
    without = {name for name, gradient in found.items() if gradient is None}
    assert without == {name for name in found if name.startswith(("network.embeddings.", "network.encoder.layer.0."))}
    whole = made(folder)
    assert None not in gradients(whole, whole(*read(folder))[0]).values()
    without = make_bert(tmp_path / "without", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    for place, drops in ((folder, True), (without, False)):
        encoder = made(place)
        (steady,) = encoder(*read(place))
        assert torch.equal(steady, encoder(*read(place))[0])
        encoder.train()
        assert torch.equal(steady, encoder(*read(place))[0]) != drops


@pytest.mark.parametrize("frozen", [0, 1])
def test_checkpointed_gradients_are_the_plain_ones_with_the_same_dropout(frozen: int, folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        encoder = made(folder, gradient_checkpointing=checkpointing, frozen_layers=frozen)
        encoder.train()
        runs = []
        for layer in encoder.network.encoder.layer:
            layer.attention.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        torch.manual_seed(1)
        found.append(gradients(encoder, encoder(*read(folder))[0]))
        assert len(runs) == (2 + (2 - frozen) if checkpointing else 2), "which layers were computed twice"
    for name, plain in found[0].items():
        other = found[1][name]
        assert (plain is None) == (other is None), name
        if plain is not None and other is not None:
            torch.testing.assert_close(other, plain, rtol=0, atol=0)


def test_steps_in_bf16_are_near_those_in_fp32(folder: Path) -> None:
    encoder = made(folder)
    with torch.autocast("cpu", torch.bfloat16):
        (rough,) = encoder(*read(folder))
    (exact,) = encoder(*read(folder))
    assert torch.nn.functional.cosine_similarity(rough.float(), exact).min() > 0.999


def test_word_embeddings_do_not_decay_and_settings_that_do_not_fit_are_refused(folder: Path) -> None:
    encoder = made(folder)
    (without_decay,) = encoder.weights_without_decay()
    assert without_decay is encoder.network.embeddings.word_embeddings.weight
    with pytest.raises(UserError, match="frozen_layers: 3 of .*bert, which has 2 layers"):
        made(folder, frozen_layers=3)
    with pytest.raises(ValidationError, match="pooling goes with states: pooled"):
        BertSettings(states="all", pooling="first")
