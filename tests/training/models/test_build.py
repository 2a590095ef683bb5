from __future__ import annotations

from itertools import product
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.training.conftest import Patch
from vse.pipeline.errors import UserError
from vse.training.kinds import Encoded, Kind
from vse.training.models.build import PARTS, Input, Model, ModelConfig, build_model
from vse.training.models.similarities import SIMILARITIES
from vse.training.models.similarities.base import Similarity, SimilaritySettings

FEATURE_DIM, CAPTION_DIM, VOCABULARY_SIZE = 6, 9, 12
IMAGES, REGIONS = Input(Kind.VECTORS, FEATURE_DIM, "'fc7'"), Input(Kind.SETS, FEATURE_DIM, "'regions'")
WORDS_INPUT, CACHED_INPUT = Input(Kind.WORDS, VOCABULARY_SIZE, "the captions"), Input(Kind.VECTORS, CAPTION_DIM, "'tfidf'")
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


def test_zeros_and_half_precision_give_finite_unit_vectors() -> None:
    made = model()
    (embeddings,) = made.embed_images(torch.zeros(1, FEATURE_DIM))
    embeddings.sum().backward()
    assert embeddings.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in made.image_encoder.parameters())
    made = model(layers="nonlinear").train()
    with torch.autocast("cpu", torch.bfloat16):
        sides = made.embed_images(torch.randn(2, FEATURE_DIM)), made.embed_captions(WORDS, LENGTHS)
    for (vectors,) in sides:
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize(("cached", "layers"), list(product([False, True], LAYERS)))
def test_both_sides_go_through_their_encoders_and_meet(cached: bool, layers: str) -> None:
    made, features, texts = model(cached, layers), torch.randn(2, FEATURE_DIM), captions(cached)
    (images,), (sentences,) = made.embed_images(features), made.embed_captions(*texts)
    assert images.shape == sentences.shape == (2, made.dim) == (2, 5 if layers == "none" else 4)
    torch.testing.assert_close(images, unit(made.image_encoder(features)[0]))
    torch.testing.assert_close(sentences, unit(made.caption_encoder(*texts)[0]))
    torch.testing.assert_close(made((features,), texts), images @ sentences.T)


@pytest.mark.parametrize(("read", "usual"), [(WORDS_INPUT, "gru"), (CACHED_INPUT, "linear")])
def test_captions_have_a_usual_encoder_that_can_be_replaced(read: Input, usual: str) -> None:
    made = build_model(ModelConfig(dim=5, word_dim=3), IMAGES, read)
    assert made.config.caption_encoder.name == usual
    named = ModelConfig.model_validate({"caption_encoder": {"name": "lstm", "states": "all"}})
    assert named.with_caption_encoder(read.kind) == named


def test_every_parameter_learns() -> None:
    similarities = ["cosine", "euclidean", {"name": "network", "widths": [6]}]
    for cached, layers, similarity in product([False, True], LAYERS, similarities):
        made = model(cached, layers, similarity=similarity).train()
        scores = made((torch.randn(2, FEATURE_DIM),), captions(cached))
        (scores * torch.tensor([[1.0, -2.0], [0.5, 3.0]])).sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())


class PairedSets(SimilaritySettings):
    """The mean over regions and words of how well they fit, weighed differently in each direction."""

    name: Literal["paired_sets"] = "paired_sets"
    images: ClassVar = Kind.SETS
    captions: ClassVar = Kind.SETS

    def build(self, dim: int) -> Similarity:
        return MeanOfSets()


class MeanOfSets(Similarity):
    def forward(self, images: Encoded, captions: Encoded) -> tuple[Tensor, Tensor]:
        image_means, caption_means = (
            (vectors * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True) for vectors, mask in (images, captions)
        )
        scores = image_means @ caption_means.T
        return scores, -scores


@pytest.fixture
def paired_sets(monkeypatch: Patch) -> None:
    monkeypatch.setitem(SIMILARITIES._parts, "paired_sets", PairedSets)


@pytest.mark.usefixtures("paired_sets")
def test_sets_of_both_sides_are_scored_in_both_directions_whatever_their_padding() -> None:
    settings = {"similarity": "paired_sets", "caption_encoder": {"name": "gru", "states": "all"}}
    torch.manual_seed(0)
    made = build_model(ModelConfig.model_validate({"dim": 5, "word_dim": 3, **settings}), REGIONS, WORDS_INPUT)
    regions, mask = torch.randn(3, 4, FEATURE_DIM), torch.arange(4) < torch.tensor([4, 2, 1])[:, None]
    (vectors, same_mask), (states, inside) = made.embed_images(regions, mask), made.embed_captions(WORDS, LENGTHS)
    assert made.embedding_kinds == (Kind.SETS, Kind.SETS)
    assert made.pairwise
    assert torch.equal(same_mask, mask)
    for embeddings in (vectors, states):
        torch.testing.assert_close(embeddings.norm(dim=2)[: len(embeddings), 0], torch.ones(len(embeddings)))
    sides = (vectors, mask), (states, inside)
    means = [torch.stack([one[part].mean(0) for one, part in zip(*side, strict=True)]) for side in sides]
    expected = means[0] @ means[1].T
    torch.testing.assert_close(made((regions, mask), (WORDS, LENGTHS)), (expected, -expected))
    longer = torch.cat([regions, torch.full((3, 2, FEATURE_DIM), 5.0)], 1), nn.functional.pad(mask, (0, 2))
    torch.testing.assert_close(made(longer, (WORDS, LENGTHS)), (expected, -expected))


BRANCH = {"name": "branch", "widths": [4]}
STATES = {"name": "lstm", "states": "all"}
REFUSED = [
    ({"image_encoder": BRANCH}, REGIONS, WORDS_INPUT, "the image encoder 'branch' reads vectors, not the sets of 'regions'"),
    ({"caption_encoder": "gru"}, IMAGES, CACHED_INPUT, "the caption encoder 'gru' reads words, not the vectors of 'tfidf'"),
    ({"caption_encoder": "linear"}, IMAGES, WORDS_INPUT, "the caption encoder 'linear' reads vectors or sets, not the words"),
    (
        {},
        REGIONS,
        WORDS_INPUT,
        "the similarity 'cosine' compares vectors of images, and the image encoder 'linear' makes sets",
    ),
    (
        {"caption_encoder": STATES, "similarity": "order"},
        *(IMAGES, WORDS_INPUT),
        "the similarity 'order' compares vectors of captions, and the caption encoder 'lstm' makes sets of the captions",
    ),
    (
        {"image_encoder": BRANCH},
        IMAGES,
        WORDS_INPUT,
        "the image encoder 'branch' ends in 4 numbers, the caption encoder 'gru'",
    ),
]


@pytest.mark.parametrize(("settings", "images", "texts", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(settings: dict[str, Any], images: Input, texts: Input, message: str) -> None:
    with pytest.raises(UserError) as refused:
        build_model(ModelConfig.model_validate({"dim": 5, "word_dim": 3, **settings}), images, texts)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def frozen(*parts: str) -> Model:
    """A model with dropout and batch normalisation on both sides, and a network as similarity."""
    made = model(True, "nonlinear", similarity={"name": "network", "widths": [6]})
    made.freeze(*parts)
    return made.train()


FREEZABLE = [part for part in PARTS if part != "cnn"]


@pytest.mark.parametrize("part", FREEZABLE)
def test_a_frozen_part_stays_in_evaluation_and_gets_no_gradient(part: str) -> None:
    made = frozen(part)
    for mode in (True, False, True):
        made.train(mode)
        for name in FREEZABLE:
            training = {module.training for module in getattr(made, name).modules()}
            assert training == {mode and name != part}
    before = {name: value.clone() for name, value in getattr(made, part).state_dict().items()}
    made((torch.randn(4, FEATURE_DIM),), (torch.randn(4, CAPTION_DIM),)).sum().backward()
    for name in FREEZABLE:
        gradients = [parameter.grad for parameter in getattr(made, name).parameters()]
        assert all((gradient is None) == (name == part) for gradient in gradients)
    after = getattr(made, part).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "running statistics, too"


class Mean(nn.Module):
    """Stands for a CNN: the mean colour of an image's crops."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.float().mean((1, 3, 4))


def test_pixels_go_through_the_cnn_first() -> None:
    torch.manual_seed(0)
    made = build_model(ModelConfig(dim=5, word_dim=3), Input(Kind.VECTORS, 3, "photos"), WORDS_INPUT, Mean())
    pixels = torch.randint(0, 256, (2, 1, 3, 4, 4), dtype=torch.uint8)
    expected = unit(made.image_encoder(pixels.float().mean((1, 3, 4)))[0])
    torch.testing.assert_close(made.embed_images(pixels), (expected,))
