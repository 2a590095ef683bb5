"""The training pairs of made-up regions and phrases."""

from __future__ import annotations

import pytest

from tests.train.phrases.some_regions import Caches, World, world_of


@pytest.fixture(scope="session")
def world(caches: Caches) -> World:
    """What a sampler is given of these caches. Read only."""
    return world_of(caches)
