from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from vse.training.kinds import InputKind
from vse.training.models.build import InputSpec, Model, ModelConfig, build_model

FEATURE_DIM, CAPTION_DIM, VOCABULARY_SIZE = 6, 9, 12
IMAGES, REGIONS = InputSpec(InputKind.VECTORS, FEATURE_DIM, "'fc7'"), InputSpec(InputKind.SETS, FEATURE_DIM, "'regions'")
WORDS_INPUT, CACHED_INPUT = (
    InputSpec(InputKind.WORDS, VOCABULARY_SIZE, "the captions"),
    InputSpec(InputKind.VECTORS, CAPTION_DIM, "'tfidf'"),
)
WORDS, LENGTHS = torch.tensor([[1, 4, 2, 0], [1, 5, 7, 2]]), torch.tensor([3, 4])
LAYERS = ["none", "linear", "nonlinear"]


def model(cached: bool = False, layers: str = "none", **settings: Any) -> Model:
    """A model in evaluation; its branches end in 4 numbers, without them embeddings have 5."""
    torch.manual_seed(0)
    image_widths, caption_widths = ([7, 3, 4], [8, 4]) if layers == "nonlinear" else ([4], [4])
    encoders: dict[str, Any] = {}
    if layers != "none":
        encoders["image_encoder"] = {"name": "branch", "widths": image_widths}
        branch = {"widths": caption_widths}
        encoders["caption_encoder"] = {"name": "branch", **branch} if cached else {"name": "gru", "head": branch}
    config = ModelConfig.model_validate({"dim": 5, "word_dim": 3, **encoders, **settings})
    return build_model(config, IMAGES, CACHED_INPUT if cached else WORDS_INPUT).eval()


def captions(cached: bool) -> tuple[Tensor, ...]:
    return (torch.rand(2, CAPTION_DIM),) if cached else (WORDS, LENGTHS)


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
def test_images_are_of_unit_length_on_request_and_captions_always(normalize: bool, absolute: bool) -> None:
    made, features = model(normalize_image=normalize, absolute=absolute), torch.randn(3, FEATURE_DIM)
    (image,), (caption,) = made.image_encoder(features), made.caption_encoder(WORDS, LENGTHS)
    image, caption = unit(image) if normalize else image, unit(caption)
    image, caption = (image.abs(), caption.abs()) if absolute else (image, caption)
    torch.testing.assert_close(made.embed_images(features), (image,))
    torch.testing.assert_close(made.embed_captions(WORDS, LENGTHS), (caption,))


@pytest.mark.parametrize(("cached", "layers"), list(product([False, True], LAYERS)))
def test_both_sides_go_through_their_encoders_and_meet(cached: bool, layers: str) -> None:
    made, features, texts = model(cached, layers), torch.randn(2, FEATURE_DIM), captions(cached)
    (images,), (sentences,) = made.embed_images(features), made.embed_captions(*texts)
    assert images.shape == sentences.shape == (2, made.dim) == (2, 5 if layers == "none" else 4)
    torch.testing.assert_close(images, unit(made.image_encoder(features)[0]))
    torch.testing.assert_close(sentences, unit(made.caption_encoder(*texts)[0]))
    torch.testing.assert_close(made((features,), texts), images @ sentences.T)


@pytest.mark.parametrize(("read", "usual"), [(WORDS_INPUT, "gru"), (CACHED_INPUT, "linear")])
def test_captions_have_a_usual_encoder_that_can_be_replaced(read: InputSpec, usual: str) -> None:
    made = build_model(ModelConfig(dim=5, word_dim=3), IMAGES, read)
    assert made.config.caption_encoder.name == usual
    named = ModelConfig.model_validate({"caption_encoder": {"name": "lstm", "states": "all"}})
    assert named.with_default_caption_encoder(read.kind) == named


def test_every_parameter_learns() -> None:
    similarities = ["cosine", "euclidean", {"name": "network", "widths": [6]}]
    for cached, layers, similarity in product([False, True], LAYERS, similarities):
        made = model(cached, layers, similarity=similarity).train()
        scores = made((torch.randn(2, FEATURE_DIM),), captions(cached))
        (scores * torch.tensor([[1.0, -2.0], [0.5, 3.0]])).sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())
