from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_FEATURE
from vse.features.extractors.cnn import cut_crops, normalize_pixels
from vse.features.settings.images import CnnConfig


def config(**changes: object) -> CnnConfig:
    return TINY_FEATURE.model_copy(update=changes)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_square_resize_squashes_and_takes_the_centre() -> None:
    image = noise(100, 60)
    small = pixels(image.resize((40, 40), Image.Resampling.BILINEAR))
    assert torch.equal(cut_crops(image, config(resize=40, crop=32))[0], small[:, 4:36, 4:36])


def test_shorter_side_resize_keeps_the_shape() -> None:
    image = noise(100, 50)
    small = pixels(image.resize((80, 40), Image.Resampling.BILINEAR))
    found = cut_crops(image, config(resize=40, crop=32, resize_mode="shorter"))
    assert torch.equal(found[0], small[:, 4:36, 24:56])


def test_ten_crops_are_corners_centre_and_their_mirrors() -> None:
    image = noise(48, 48)
    whole = pixels(image.resize((40, 40), Image.Resampling.BILINEAR))
    places = [(0, 0), (0, 8), (8, 0), (8, 8), (4, 4)]
    expected = [whole[:, top : top + 32, left : left + 32] for top, left in places]
    expected += [view.flip(2) for view in expected]
    assert torch.equal(cut_crops(image, config(resize=40, crop=32, crops="10c")), torch.stack(expected))


def test_pixels_are_normalised_by_mean_and_deviation() -> None:
    white = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    found = normalize_pixels(white, (0.5, 0.4, 0.0), (0.5, 0.2, 1.0), torch.device("cpu"))
    torch.testing.assert_close(found[0, :, 0, 0], torch.tensor([1.0, 3.0, 1.0]))


def slow_random_crops(image: Image.Image, settings: CnnConfig, image_id: int) -> list[torch.Tensor]:
    """Plain random crops, each from a generator of its own, by the documented seeds."""
    side, small = settings.crop, image.resize((settings.resize, settings.resize), Image.Resampling.BILINEAR)
    views = []
    for seed in np.random.SeedSequence([settings.crop_seed, image_id]).spawn(settings.n_random):
        rng = np.random.default_rng(seed)
        top, left = (int(rng.integers(settings.resize - side + 1)) for _ in range(2))
        view = small.crop((left, top, left + side, top + side))
        views.append(pixels(view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view))
    return views


def test_plain_random_crops_are_those_of_a_loop() -> None:
    image, settings = noise(70, 50), config(resize=40, crop=32, crops="rc_bank", random_crop="plain", n_random=6)
    expected = slow_random_crops(image, settings, 7)
    assert len({view.numpy().tobytes() for view in expected}) == 6
    assert torch.equal(cut_crops(image, settings, 7), torch.stack(expected))


@pytest.mark.parametrize("kind", ["plain", "resized"])
def test_random_crops_depend_on_the_image_s_id_and_the_seed_alone(kind: str) -> None:
    image = noise(70, 50)
    settings = config(resize=40, crop=32, crops="rc_bank", random_crop=kind, n_random=4)
    first = cut_crops(image, settings, 7)
    assert torch.equal(cut_crops(image, settings, 7), first)
    assert torch.equal(cut_crops(image, settings.model_copy(update={"n_random": 9}), 7)[:4], first), "more leave the first"
    assert not torch.equal(cut_crops(image, settings, 8), first)
    assert not torch.equal(cut_crops(image, settings.model_copy(update={"crop_seed": 1}), 7), first)


def test_resized_random_crops_cover_8_to_100_percent_and_are_mirrored_half_the_time() -> None:
    """On a image whose pixels say where they are, a crop's corners say where it was cut."""
    across, down = np.meshgrid(np.arange(200), np.arange(100))
    image = Image.fromarray(np.stack([across, down, 0 * across], axis=2).astype(np.uint8))
    crops = cut_crops(image, config(crop=32, crops="rc_bank", n_random=300), 0).double()
    left, right = crops[:, 0, 16, 0], crops[:, 0, 16, -1]
    height, width = crops[:, 1, -1, 16] - crops[:, 1, 0, 16], (right - left).abs()
    area, aspect = width * height / (31 / 32) ** 2 / 20_000, width / height
    assert 0.06 < area.min() < 0.12
    assert 0.45 < area.max() <= 1
    assert aspect.quantile(0.05) > 0.7
    assert aspect.quantile(0.95) < 1.42
    assert 0.4 < (right < left).double().mean() < 0.6


@pytest.mark.parametrize("size", [(400, 10), (10, 400), (1, 1)])
def test_a_random_crop_of_a_sliver_is_its_middle(size: tuple[int, int]) -> None:
    crops = cut_crops(noise(*size), config(crop=32, crops="rc_bank", n_random=3), 0)
    assert crops.shape == (3, 3, 32, 32)
