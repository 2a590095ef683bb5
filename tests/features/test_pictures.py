from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_FEATURE
from vse.features import pictures
from vse.features.pictures import BadImage, crops_of, decode, normalized, read_ahead
from vse.pipeline.config import CnnConfig


def config(**changes: object) -> CnnConfig:
    return TINY_FEATURE.model_copy(update=changes)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def pixels(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def test_square_resize_squashes_and_takes_the_centre() -> None:
    picture = noise(100, 60)
    small = pixels(picture.resize((40, 40), Image.Resampling.BILINEAR))
    assert torch.equal(crops_of(picture, config(resize=40, crop=32))[0], small[:, 4:36, 4:36])


def test_shorter_side_resize_keeps_the_shape() -> None:
    picture = noise(100, 50)
    small = pixels(picture.resize((80, 40), Image.Resampling.BILINEAR))
    found = crops_of(picture, config(resize=40, crop=32, resize_mode="shorter"))
    assert torch.equal(found[0], small[:, 4:36, 24:56])


def test_ten_crops_are_corners_centre_and_their_mirrors() -> None:
    picture = noise(48, 48)
    whole = pixels(picture.resize((40, 40), Image.Resampling.BILINEAR))
    places = [(0, 0), (0, 8), (8, 0), (8, 8), (4, 4)]
    expected = [whole[:, top : top + 32, left : left + 32] for top, left in places]
    expected += [view.flip(2) for view in expected]
    assert torch.equal(crops_of(picture, config(resize=40, crop=32, crops="10c")), torch.stack(expected))


def test_pixels_are_normalised_by_mean_and_deviation() -> None:
    white = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    found = normalized(white, (0.5, 0.4, 0.0), (0.5, 0.2, 1.0), torch.device("cpu"))
    torch.testing.assert_close(found[0, :, 0, 0], torch.tensor([1.0, 3.0, 1.0]))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("ahead", [1, 4, 100])
def test_read_ahead_keeps_the_order(workers: int, ahead: int) -> None:
    assert list(read_ahead(range(40), lambda k: k * k, workers, ahead)) == [k * k for k in range(40)]


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA"])
def test_any_colour_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("x.jpg" if mode in ("L", "CMYK") else "x.png")
    noise(8, 8).convert(mode).save(path)
    assert decode(path).mode == "RGB"


def test_a_turned_picture_is_set_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(8, 4).save(tmp_path / "x.jpg", exif=exif)
    assert decode(tmp_path / "x.jpg").size == (4, 8)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"gone\.jpg: no such image file"):
        decode(tmp_path / "gone.jpg")


def test_a_truncated_jpeg_is_refused(demo: Path, tmp_path: Path) -> None:
    whole = (demo.parent / "images" / "demo_000000.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadImage, match=r"cut\.jpg: not a readable image .*truncated"):
        decode(tmp_path / "cut.jpg")


@pytest.mark.parametrize("suffix", ["txt", "gif", "bmp"])
def test_other_kinds_of_files_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "txt":
        path.write_text("not a picture")
    else:
        noise(8, 8).save(path)
    with pytest.raises(BadImage, match="not a readable image"):
        decode(path)


def test_too_many_pixels_are_refused_from_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(20, 20).save(tmp_path / "x.png")
    monkeypatch.setattr(pictures, "MAX_PIXELS", 399)
    with pytest.raises(BadImage, match="20 x 20 pixels are too many"):
        decode(tmp_path / "x.png")
