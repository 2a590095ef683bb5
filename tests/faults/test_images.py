"""Damaged and unusual images through ``decode``, ``image_size`` and ``compute_perceptual_hash``, and through two commands."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_FEATURE
from tests.faults.suite import StartSuite
from tests.hostile import hanging_is_an_error, refused
from tests.pipeline.import_files import write_table
from tests.training.conftest import done
from vse.cli import data_main as main
from vse.features.cli import extract_main
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.dataset.duplicates import compute_perceptual_hash
from vse.pipeline.files.images import BadImage, decode_image, read_image_size

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
LONG = 30_000
_EXIF_ORIENTATION = 0x0112


def photo(width: int = 60, height: int = 44) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def saved(image: Image.Image, kind: str, orientation: int = 1, **settings: Any) -> bytes:
    exif = Image.Exif()
    exif[_EXIF_ORIENTATION] = orientation
    stream = io.BytesIO()
    image.save(stream, kind, **({"exif": exif} if orientation > 1 else {}), **settings)
    return stream.getvalue()


def deep() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 65536, (44, 60)).astype(np.uint16))


IMAGES: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: saved(photo(), "JPEG"), "progressive JPEG": lambda: saved(photo(), "JPEG", progressive=True),
    "JPEG with restarts": lambda: saved(photo(), "JPEG", subsampling=0, restart_marker_blocks=2),
    "CMYK JPEG": lambda: saved(photo().convert("CMYK"), "JPEG"), "grey JPEG": lambda: saved(photo().convert("L"), "JPEG"),
    "turned JPEG": lambda: saved(photo(), "JPEG", orientation=6), "30,000 x 1 JPEG": lambda: saved(photo(LONG, 1), "JPEG"),
    "PNG": lambda: saved(photo(), "PNG"), "16-bit PNG": lambda: saved(deep(), "PNG"),
    "palette PNG": lambda: saved(photo().quantize(16), "PNG"),
    "transparent PNG": lambda: saved(photo().convert("RGBA"), "PNG"),
    "turned PNG": lambda: saved(photo(), "PNG", orientation=5), "1 x 30,000 PNG": lambda: saved(photo(1, LONG), "PNG"),
    "WebP": lambda: saved(photo(), "WEBP"), "lossless WebP": lambda: saved(photo(), "WEBP", lossless=True),
    "turned WebP": lambda: saved(photo(), "WEBP", orientation=8), "1 x 16,000 WebP": lambda: saved(photo(1, 16_000), "WEBP"),
}  # fmt: skip
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"\0\0\0\0IEND\xaeB`\x82", "WebP": b""}


def flipped(content: bytes, _: str, rng: random.Random) -> bytes:
    place, changed = rng.randrange(len(content)), bytearray(content)
    changed[place] ^= rng.randrange(1, 256)
    return bytes(changed)


def overwritten(content: bytes, _: str, rng: random.Random) -> bytes:
    place, patch = rng.randrange(len(content)), rng.randbytes(rng.randrange(1, 64))
    return (content[:place] + patch + content[place + len(patch) :])[: len(content)]


DAMAGES: dict[str, Callable[[bytes, str, random.Random], bytes]] = {
    "cut": lambda content, kind, rng: content[: rng.randrange(len(content))],
    "cut and closed": lambda content, kind, rng: content[: rng.randrange(2, len(content))] + ENDS[kind],
    "zero tail": lambda content, kind, rng: content[: rng.randrange(len(content) - 1)].ljust(len(content), b"\0"),
    "flipped": flipped,
    "overwritten": overwritten,
}
# JPEG and WebP have no checksums: other bytes inside of their data are other pixels, which no reader can tell.
VISIBLE = {"JPEG": [*DAMAGES][:3], "PNG": [*DAMAGES], "WebP": [*DAMAGES][:2]}


def outcome(path: Path, content: bytes) -> Image.Image | str | None:
    """Return the image, or None if it is refused; a text says what else happens."""
    path.write_bytes(content)
    results: list[Image.Image | str | None] = []
    for read in (decode_image, read_image_size, compute_perceptual_hash):
        try:
            with hanging_is_an_error():
                results.append(read(path))
        except BadImage as fault:
            if str(path) not in str(fault) or "\n" in str(fault):
                return f"the message is {str(fault)!r}"
            results.append(None)
        except (Exception, AssertionError) as error:
            return f"{read.__name__}: {error!r}"
    image, size, _ = results
    if isinstance(image, Image.Image) and (image.mode != "RGB" or image.size != size):
        return f"{image.mode} {image.size}, and its size is {size}"
    return image


def test_damage_that_can_be_seen_is_refused(suite_of_faults: StartSuite, tmp_path: Path) -> None:
    suite, rng = suite_of_faults("truncated images, and PNG images with changed bytes", 40), random.Random(0)
    for number in range(suite.n_tries):
        name = [*IMAGES][number % len(IMAGES)]
        kind = name.split()[-1] if name.split()[-1] in VISIBLE else "JPEG"
        content = IMAGES[name]()
        damage = rng.choice(VISIBLE[kind])
        found = outcome(tmp_path / "x", DAMAGES[damage](content, kind, rng))
        detail = f"try {number}, {name}, {damage}"
        if isinstance(found, str):
            suite.record("wrong", f"{detail}: {found}")
        elif found is None:
            suite.record("refused", detail)
        else:
            same = np.array_equal(np.asarray(found), np.asarray(decode_image(Path("x"), content)))
            suite.record("harmless" if same else "silent", detail)


def test_other_bytes_in_a_format_without_checksums_do_no_more_than_change_pixels(
    suite_of_faults: StartSuite, tmp_path: Path
) -> None:
    suite, rng = suite_of_faults("JPEG and WebP images with changed bytes", 40), random.Random(0)
    names = [name for name in IMAGES if "PNG" not in name]
    for number in range(suite.n_tries):
        name, damage = names[number % len(names)], rng.choice(("flipped", "overwritten"))
        found = outcome(tmp_path / "x", DAMAGES[damage](IMAGES[name](), "", rng))
        detail = f"try {number}, {name}, {damage}"
        if isinstance(found, str):
            suite.record("wrong", f"{detail}: {found}")
        else:
            suite.record("refused" if found is None else "harmless", detail)


def test_every_kind_is_imported_and_extracted_or_named(tmp_path: Path) -> None:
    birds = tmp_path / "birds"
    birds.mkdir()
    for number, make in enumerate(IMAGES.values()):
        (birds / f"{number}.img").write_bytes(make())
    rows = [{"file": f"{number}.img", "caption": f"gull {number}"} for number in range(len(IMAGES))]
    table, file = write_table(tmp_path / "captions.csv", rows), tmp_path / "data" / "dataset.json"
    done(main, "import", birds, "--captions", table, "--out", tmp_path / "data")
    assert len(load_dataset_file(file).images) == len(IMAGES)
    settings = TINY_FEATURE.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    settings |= {"resize": 256, "resize_mode": "shorter"}
    (tmp_path / "tiny.yaml").write_text("\n".join(f"{key}: {value}" for key, value in settings.items()))
    arguments = ["cnn", "--dataset", file, "--feature", tmp_path / "tiny.yaml", "--shards", 1, "--out", tmp_path / "f.h5"]
    assert "--skip-bad" in refused(extract_main, *arguments)
    done(extract_main, *arguments, "--skip-bad")
    listed = (tmp_path / "f.h5.failures.jsonl").read_text().splitlines()
    assert len(listed) == sum("," in name for name in IMAGES)
    assert all("for the network" in line for line in listed)
