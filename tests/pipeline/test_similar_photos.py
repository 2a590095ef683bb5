"""Photos that look alike are found by perceptual hashes, and grouped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture
from PIL import ImageFilter

from tests.hostile import NOT_FILES
from vse.pipeline.dataset import duplicates
from vse.pipeline.dataset.duplicates import (
    MAX_DIFFERENT_BITS,
    N_HASH_BITS,
    compute_perceptual_hash,
    find_similar_hashes,
    group_similar_photos,
)
from vse.pipeline.files.images import BadImage


def photo(seed: int, size: tuple[int, int] = (300, 200)) -> Picture.Image:
    """Return soft spots of colour that depend on the seed."""
    spots = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    return Picture.fromarray(spots).resize(size, Picture.Resampling.BICUBIC)


def distance(a: Path, b: Path) -> int:
    return int((compute_perceptual_hash(a) != compute_perceptual_hash(b)).sum())


def test_the_bits_compare_the_lowest_frequencies_with_their_median(tmp_path: Path) -> None:
    photo(3, (32, 32)).convert("L").save(tmp_path / "a.png")
    grey = np.asarray(Picture.open(tmp_path / "a.png"), np.float64)
    wave = [[np.cos(np.pi * u * (2 * x + 1) / 64) for x in range(32)] for u in range(8)]
    low = [sum(grey[y, x] * wave[v][y] * wave[u][x] for y in range(32) for x in range(32)) for v in range(8) for u in range(8)]
    assert compute_perceptual_hash(tmp_path / "a.png").tolist() == [value > np.median(low) for value in low]


def test_16_bits_and_transparency_are_handled(tmp_path: Path) -> None:
    grey = np.asarray(photo(0).convert("L"))
    Picture.fromarray(grey).save(tmp_path / "a.png")
    Picture.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    assert distance(tmp_path / "a.png", tmp_path / "deep.png") <= MAX_DIFFERENT_BITS
    clear = photo(1).convert("RGBA")
    clear.putalpha(Picture.fromarray(255 - grey))
    clear.save(tmp_path / "clear.png")
    Picture.alpha_composite(Picture.new("RGBA", clear.size, "white"), clear).convert("RGB").save(tmp_path / "white.png")
    assert distance(tmp_path / "clear.png", tmp_path / "white.png") <= MAX_DIFFERENT_BITS


def test_a_photo_stays_near_itself_and_far_from_others(tmp_path: Path) -> None:
    original = photo(0)
    original.save(tmp_path / "a.png")
    variants = {
        "small.png": original.resize((150, 100)),
        "squashed.jpg": original.resize((224, 224)),
        "coarse.jpg": original.filter(ImageFilter.GaussianBlur(1)),
        "grey.webp": original.convert("L"),
        "large.jpg": original.resize((1200, 800)),
    }
    for name, variant in variants.items():
        variant.save(tmp_path / name, quality=60)
        assert distance(tmp_path / "a.png", tmp_path / name) <= MAX_DIFFERENT_BITS, name
    for seed in range(1, 9):
        photo(seed).save(tmp_path / "other.png")
        assert distance(tmp_path / "a.png", tmp_path / "other.png") > MAX_DIFFERENT_BITS


@given(st.integers(0, 7), st.integers(0, 5), st.integers(0, N_HASH_BITS), st.integers(0, 2**32 - 1))
def test_near_pairs_are_those_that_a_loop_over_bits_finds(n: int, m: int, most: int, seed: int) -> None:
    """Two hashes are compared at a time."""
    rng = np.random.default_rng(seed)
    hashes, others = rng.random((n, N_HASH_BITS)) < 0.5, rng.random((m, N_HASH_BITS)) < 0.5
    expected = [
        (i, j) for i in range(n) for j in range(m) if sum(x != y for x, y in zip(hashes[i], others[j], strict=True)) <= most
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_HASHES_PER_CHUNK", 2)
        assert find_similar_hashes(hashes, others, most) == expected


def test_a_file_that_is_not_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text("x")
    with pytest.raises(BadImage, match=r"a\.jpg: not a readable image"):
        compute_perceptual_hash(tmp_path / "a.jpg")
    for make in NOT_FILES.values():
        make(tmp_path / "b.jpg")
        with pytest.raises(BadImage, match=r"b\.jpg: no such image file"):
            compute_perceptual_hash(tmp_path / "b.jpg")
        (tmp_path / "b.jpg").rmdir() if (tmp_path / "b.jpg").is_dir() else (tmp_path / "b.jpg").unlink()


def test_a_bomb_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo(0).save(tmp_path / "a.png")
    monkeypatch.setattr(duplicates, "MAX_PIXELS", 59_999)
    with pytest.raises(BadImage, match="300 x 200 pixels are too many"):
        compute_perceptual_hash(tmp_path / "a.png")


def test_photos_are_grouped_with_their_copies(tmp_path: Path) -> None:
    for name, seed, size in (("a", 0, (300, 200)), ("b", 1, (300, 200)), ("c", 0, (150, 100)), ("d", 2, (300, 200))):
        photo(seed, size).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_text("x")
    paths = [tmp_path / f"{name}.png" for name in ("a", "b", "broken", "c", "d")]
    assert group_similar_photos(paths) == [[0, 3], [1], [2], [4]]
    assert group_similar_photos([]) == []


def test_a_chain_of_similar_hashes_is_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of the chain differ in more bits than the limit."""
    steps = range(0, 4 * MAX_DIFFERENT_BITS, MAX_DIFFERENT_BITS)
    hashes = {tmp_path / f"{n}.png": np.arange(N_HASH_BITS) < n for n in [*steps, N_HASH_BITS]}
    monkeypatch.setattr(duplicates, "compute_perceptual_hash", hashes.__getitem__)
    assert group_similar_photos(list(hashes)) == [[0, 1, 2, 3], [4]]
