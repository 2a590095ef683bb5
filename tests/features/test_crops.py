from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import TINY_FEATURE
from vse.features.crops import crops_of, normalized, read_ahead
from vse.pipeline.feature_config import CnnConfig
from vse.pipeline.image_files import BadImage, decode


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


def slow_random_crops(picture: Image.Image, settings: CnnConfig, image_id: int) -> list[torch.Tensor]:
    """Plain random crops, each from a generator of its own, by the documented seeds."""
    side, small = settings.crop, picture.resize((settings.resize, settings.resize), Image.Resampling.BILINEAR)
    views = []
    for seed in np.random.SeedSequence([settings.crop_seed, image_id]).spawn(settings.n_random):
        rng = np.random.default_rng(seed)
        top, left = (int(rng.integers(settings.resize - side + 1)) for _ in range(2))
        view = small.crop((left, top, left + side, top + side))
        views.append(pixels(view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else view))
    return views


def test_plain_random_crops_are_those_of_a_loop() -> None:
    picture, settings = noise(70, 50), config(resize=40, crop=32, crops="rc_bank", random_crop="plain", n_random=6)
    expected = slow_random_crops(picture, settings, 7)
    assert len({view.numpy().tobytes() for view in expected}) == 6
    assert torch.equal(crops_of(picture, settings, 7), torch.stack(expected))


@pytest.mark.parametrize("kind", ["plain", "resized"])
def test_random_crops_depend_on_the_image_s_id_and_the_seed_alone(kind: str) -> None:
    picture = noise(70, 50)
    settings = config(resize=40, crop=32, crops="rc_bank", random_crop=kind, n_random=4)
    first = crops_of(picture, settings, 7)
    assert torch.equal(crops_of(picture, settings, 7), first)
    assert torch.equal(crops_of(picture, settings.model_copy(update={"n_random": 9}), 7)[:4], first), "more leave the first"
    assert not torch.equal(crops_of(picture, settings, 8), first)
    assert not torch.equal(crops_of(picture, settings.model_copy(update={"crop_seed": 1}), 7), first)


def test_resized_random_crops_cover_8_to_100_percent_and_are_mirrored_half_the_time() -> None:
    """On a picture whose pixels say where they are, a crop's corners say where it was cut."""
    across, down = np.meshgrid(np.arange(200), np.arange(100))
    picture = Image.fromarray(np.stack([across, down, 0 * across], axis=2).astype(np.uint8))
    crops = crops_of(picture, config(crop=32, crops="rc_bank", n_random=300), 0).double()
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
    crops = crops_of(noise(*size), config(crop=32, crops="rc_bank", n_random=3), 0)
    assert crops.shape == (3, 3, 32, 32)


COLOUR = (204, 102, 51)


def saved(mode: str, path: Path) -> Path:
    """A file of one colour in a mode, as that mode can hold it."""
    if mode == "16-bit grey":
        Image.fromarray(np.full((6, 8), 40_000, np.uint16)).save(path)
    elif mode == "1":
        Image.new("1", (8, 6), 1).save(path)
    elif mode in ("PA", "transparent palette"):
        picture = Image.new("P", (8, 6), 0)
        picture.putpalette([*COLOUR, 0, 0, 0])
        picture.save(path, transparency=0)
    elif mode in ("RGBA", "LA"):
        colour = (*COLOUR, 128) if mode == "RGBA" else (90, 0)
        Image.new(mode, (8, 6), colour).save(path)
    elif path.suffix == ".jpg":
        Image.new("RGB", (8, 6), COLOUR).convert(mode).save(path, quality=100)
    else:
        Image.new("RGB", (8, 6), COLOUR).convert(mode).save(path)
    return path


GREY = 127  # of COLOUR, by the weights of ITU-R 601-2


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("x.jpg", "RGB", COLOUR),
        ("x.jpg", "L", (GREY,) * 3),
        ("x.jpg", "CMYK", COLOUR),
        ("x.png", "RGB", COLOUR),
        ("x.png", "P", COLOUR),
        ("x.png", "1", (255,) * 3),
        ("x.png", "16-bit grey", (156,) * 3),
        ("x.png", "RGBA", (229, 178, 153)),
        ("x.png", "LA", (255,) * 3),
        ("x.png", "transparent palette", (255,) * 3),
        ("x.webp", "RGB", COLOUR),
        ("x.webp", "RGBA", (229, 178, 153)),
    ],
)
def test_any_colour_mode_becomes_8_bit_rgb(name: str, mode: str, expected: tuple[int, ...], tmp_path: Path) -> None:
    """Transparent pixels are laid on white; 16 bits are scaled, not clipped."""
    found = decode(saved(mode, tmp_path / name))
    assert (found.mode, found.size) == ("RGB", (8, 6))
    tolerance = 1 if name == "x.png" else 6
    assert np.abs(np.asarray(found, int) - np.asarray(expected)).max() <= tolerance


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_set_upright(orientation: int, tmp_path: Path) -> None:
    """A picture stored as orientation k says is shown as it was before."""
    upright = noise(12, 8)
    how = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transpose that undoes what a viewer does
    stored = upright.transpose(Image.Transpose(how[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(decode(tmp_path / "x.png")), np.asarray(upright))


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"gone\.jpg: no such image file"):
        decode(tmp_path / "gone.jpg")
    with pytest.raises(BadImage, match="no such image file"):
        decode(tmp_path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@given(part=st.floats(0, 0.98))
def test_a_truncated_file_is_refused(suffix: str, tmp_path: Path, part: float) -> None:
    noise(40, 30).save(tmp_path / f"x.{suffix}")
    whole = (tmp_path / f"x.{suffix}").read_bytes()
    (tmp_path / f"cut.{suffix}").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(BadImage, match=rf"cut\.{suffix}: not a readable image"):
        decode(tmp_path / f"cut.{suffix}")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), suffix=st.sampled_from(["jpg", "png", "webp"]))
def test_a_flipped_bit_is_a_picture_or_a_bad_image_never_another_error(
    place: float, bit: int, suffix: str, tmp_path: Path
) -> None:
    noise(20, 16).save(tmp_path / f"x.{suffix}")
    content = bytearray((tmp_path / f"x.{suffix}").read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    with suppress(BadImage):
        assert decode(tmp_path / "x", bytes(content)).mode == "RGB"


@pytest.mark.parametrize("suffix", ["txt", "gif", "bmp", "tiff", "ico"])
def test_other_kinds_of_files_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "txt":
        path.write_text("not a picture")
    else:
        noise(16, 16).save(path)
    path = path.rename(tmp_path / "x.jpg")
    with pytest.raises(BadImage, match="not a readable image"):
        decode(path)


def bomb(side: int) -> bytes:
    """A PNG of a few hundred kilobytes whose header promises side x side pixels, and whose data keep the promise."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(3 * side + 1) * 50)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_000, 20_000, 60_000])
def test_a_decompression_bomb_is_refused_from_its_header(side: int, tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(bomb(side))
    with pytest.raises(BadImage, match=r"bomb\.png: .*(are too many|exceeds limit)"):
        decode(tmp_path / "bomb.png")
