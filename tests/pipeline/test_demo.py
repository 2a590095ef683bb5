from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vse.pipeline.dataset.captions import ascii_words
from vse.pipeline.demo import SYNONYMS, compose_captions, create_demo
from vse.pipeline.demo_scenes import IMAGE_SIZE, compose_scene, draw_scene

SEEDS = st.integers(0, 2**32)


def test_the_same_seed_draws_the_same_files_whatever_their_number_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed, n_images in (("a", 3, 12), ("b", 3, 12), ("c", 4, 6), ("d", 3, 6)):
        create_demo(tmp_path / name, n_images, seed)
    files = [p.relative_to(tmp_path / "a") for p in sorted((tmp_path / "a").rglob("*")) if p.is_file()]
    assert len(files) == 13
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    a, c, d = ((tmp_path / name / "images" / "demo_000005.jpg").read_bytes() for name in "acd")
    assert a == d != c


def test_the_default_splits_have_four_thousand_five_hundred_and_a_thousand_images(demo: Path) -> None:
    splits = [image["split"] for image in json.loads(demo.read_text())["images"]]
    assert [splits.count(s) for s in ("train", "val", "test")] == [48, 6, 12]  # 4,000 : 500 : 1,000


@given(SEEDS)
def test_objects_lie_in_the_image_and_do_not_overlap(seed: int) -> None:
    boxes = [item.box for item in compose_scene(np.random.default_rng(seed)).objects]
    assert 1 <= len(boxes) <= 4
    for x1, y1, x2, y2 in boxes:
        assert 0 <= x1 < x2 <= IMAGE_SIZE
        assert 0 <= y1 < y2 <= IMAGE_SIZE
    for k, a in enumerate(boxes):
        assert all(a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1] for b in boxes[:k])


@given(SEEDS)
def test_a_box_contains_all_pixels_of_its_object(seed: int) -> None:
    scene = compose_scene(np.random.default_rng(seed))
    bare = draw_scene(type(scene)(scene.background, ()), np.random.default_rng(1))
    full = draw_scene(scene, np.random.default_rng(1))
    changed = (np.asarray(bare) != np.asarray(full)).any(axis=2)
    for x1, y1, x2, y2 in (item.box for item in scene.objects):
        assert changed[y1:y2, x1:x2].any()
        changed[y1:y2, x1:x2] = False
    assert not changed.any()


@given(SEEDS)
def test_five_captions_state_different_facts_and_a_phrase_names_its_objects(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = compose_scene(rng)
    captions = compose_captions(scene, rng)
    assert len({caption.raw for caption in captions}) == len({caption.facts for caption in captions}) == 5
    for caption in captions:
        tokens = ascii_words(caption.raw)
        for phrase in caption.phrases:
            assert phrase.n_tokens > 0
            assert phrase.first_token + phrase.n_tokens <= len(tokens)
            words = set(tokens[phrase.first_token : phrase.first_token + phrase.n_tokens])
            named = [scene.objects[k] for k in phrase.object_indices]
            concepts = [(item.shape, item.colour, item.texture) for item in named] or [(scene.background,)]
            for known in concepts if len(named) < 2 else []:
                assert words & {w for concept in known for text in SYNONYMS[concept] for w in ascii_words(text)}
            if len(named) > 1:
                assert words & {"two", "three", "four"}
        assert any(phrase.object_indices for phrase in caption.phrases)


def test_every_phrase_of_an_object_has_its_box_in_a_jpeg_file(demo: Path) -> None:
    for image in json.loads(demo.read_text())["images"]:
        for phrase in (p for sentence in image["sentences"] for p in sentence["phrases"]):
            assert len(phrase["boxes"]) == len(phrase["objects"])
            assert (phrase["kind"] == "scene") == (not phrase["boxes"])
    with Image.open(demo.parent / "images" / "demo_000000.jpg") as picture:
        assert (picture.format, picture.size) == ("JPEG", (IMAGE_SIZE, IMAGE_SIZE))
