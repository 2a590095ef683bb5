from __future__ import annotations

import pytest
import torch
from torch import nn

from vse.pipeline.config import ModelConfig
from vse.train.encoders import CaptionEncoder, ImageEncoder
from vse.train.model import TwoBranchModel


def test_image_weights_are_xavier_uniform_and_the_bias_is_zero() -> None:
    torch.manual_seed(0)
    linear = ImageEncoder(400, 200).linear
    weight, bound = linear.weight.detach(), (6 / 600) ** 0.5
    assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=1e-2)
    assert not linear.bias.any()


@pytest.mark.parametrize("normalize", [True, False])
def test_images_are_mapped_linearly_and_normalised_on_request(normalize: bool) -> None:
    encoder = ImageEncoder(6, 4, normalize)
    features = torch.rand(3, 6)
    slow = features @ encoder.linear.weight.T + encoder.linear.bias
    slow = slow / slow.norm(dim=1, keepdim=True) if normalize else slow
    torch.testing.assert_close(encoder(features), slow)


def test_a_zero_image_stays_finite() -> None:
    embeddings = ImageEncoder(6, 4)(torch.zeros(1, 6))
    embeddings.sum().backward()
    assert torch.isfinite(embeddings).all()


def slow_gru(encoder: CaptionEncoder, words: list[int]) -> torch.Tensor:
    """The GRU's equations word by word, unit length at the end."""
    gru = encoder.gru
    state = torch.zeros(gru.hidden_size)
    for word in words:
        given = gru.weight_ih_l0 @ encoder.words.weight[word] + gru.bias_ih_l0
        kept = gru.weight_hh_l0 @ state + gru.bias_hh_l0
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = given.chunk(3), kept.chunk(3)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        state = (1 - update) * new + update * state
    return state / state.norm()


def test_a_caption_is_the_state_after_its_last_word_whatever_the_padding() -> None:
    torch.manual_seed(0)
    encoder = CaptionEncoder(20, 5, 7)
    captions = [[1, 5, 2], [1, 9, 8, 7, 6, 2], [1, 2]]
    lengths = torch.tensor([len(c) for c in captions])
    padded = nn.utils.rnn.pad_sequence([torch.tensor(c) for c in captions], batch_first=True)
    slow = torch.stack([slow_gru(encoder, words) for words in captions])
    torch.testing.assert_close(encoder(padded, lengths), slow)


def test_word_embeddings_start_between_minus_and_plus_a_tenth() -> None:
    weights = CaptionEncoder(1000, 30, 4).words.weight
    assert 0.099 < weights.abs().max().item() <= 0.1


def test_scores_are_inner_products_of_every_image_with_every_caption() -> None:
    model = TwoBranchModel(ModelConfig(dim=4, word_dim=3, normalize_image=False), 6, 10)
    features, words, lengths = torch.rand(2, 6), torch.tensor([[1, 4, 2], [1, 5, 2]]), torch.tensor([3, 3])
    images, captions = model.image_encoder(features), model.caption_encoder(words, lengths)
    slow = [[sum(a * b for a, b in zip(i, c, strict=True)) for c in captions.tolist()] for i in images.tolist()]
    torch.testing.assert_close(model(features, words, lengths), torch.tensor(slow))
