"""The warning of a training in which one direction of retrieval fails, because all captions point into one direction."""

from __future__ import annotations

import numpy as np
import pytest

import vse
from tests.training.conftest import Log


def vectors(n: int, seed: int, cone: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, captions and the image of each caption; ``cone`` moves all captions along one direction."""
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((n, 16)).astype(np.float32)
    image_of = np.repeat(np.arange(n), 2)
    captions = images[image_of] + 0.1 * rng.standard_normal((2 * n, 16)).astype(np.float32)
    captions /= np.linalg.norm(captions, axis=1, keepdims=True)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    shift = np.zeros(16, np.float32)
    shift[0] = cone
    return images, captions + shift, image_of


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_narrow_cone_of_captions_is_named_once(caplog: Log) -> None:
    """Captions near (1, 0, ...) all find the image that lies most in this direction."""
    for cone, expected in ((0.0, 0), (40.0, 1)):
        caplog.clear()
        images, captions, image_of = vectors(300, 0, cone)
        sets = {"solver": "none", "model.image_encoder": "identity", "model.caption_encoder": "identity", "loss.name": "max"}
        vse.fit(images, captions, image_of, experiment="vsepp", validation=vectors(150, 1, cone), sets=sets)
        warned = [record.getMessage() for record in caplog.records if "t2i: one candidate is the first" in record.getMessage()]
        assert len(warned) == expected
        assert all("all captions point into nearly the same direction" in line for line in warned)
