from __future__ import annotations

import os
import shutil
from pathlib import Path

from vse.features.extraction import hash_shard_images


def states(cache: Path) -> list[str]:
    return [hash_shard_images(cache.parent.parent / "data" / "dataset.json", cache, k, 3) for k in range(3)]


def test_the_state_is_that_of_the_images_content(own_cache: Path) -> None:
    images = sorted((own_cache.parent.parent / "data" / "images").iterdir())
    made = states(own_cache)
    assert len(set(made)) == 3
    for image in images:
        os.utime(image)
    assert states(own_cache) == made
    shutil.copy2(images[0], images[-1])
    changed = states(own_cache)
    assert changed[:2] == made[:2]
    assert changed[2] != made[2]


def test_it_is_the_same_before_the_shards_are_made(own_cache: Path) -> None:
    made = states(own_cache)
    shutil.rmtree(own_cache.with_suffix(".shards"))
    assert states(own_cache) == made


def test_a_missing_image_and_a_missing_data_set_are_states_too(own_cache: Path) -> None:
    made = states(own_cache)
    sorted((own_cache.parent.parent / "data" / "images").iterdir())[0].unlink()
    assert states(own_cache)[0] != made[0]
    (own_cache.parent.parent / "data" / "dataset.json").unlink()
    assert states(own_cache) == ["", "", ""]
