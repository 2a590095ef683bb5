"""Phrases as arrays: what each names, where, and which cache rows belong to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.phrases.some_regions import CPU, Caches, World, make_caches, world_of
from vse.features.cache.feature_cache import open_cache
from vse.pipeline.dataset.dataset import load_dataset_file, mentions, phrase_texts
from vse.pipeline.errors import UserError
from vse.train.phrases.pairs import check_phrase_cache, phrase_pairs, truth_regions
from vse.train.phrases.regions import BoxFeatures


def test_each_phrase_of_the_images_is_there_once(few: Path) -> None:
    dataset = load_dataset_file(few)
    images, texts = dataset.split("train")[::-1], phrase_texts(dataset)
    found = phrase_pairs(dataset, images)
    expected = {m.phrase_id: m for m in mentions(dataset) if m.image.split == "train"}
    assert sorted(found.phrase_ids.tolist()) == sorted(expected)
    assert (np.diff(found.image_of) >= 0).all()
    for row, number in enumerate(found.phrase_ids.tolist()):
        mention = expected[number]
        assert images[found.image_of[row]] == mention.image
        assert (found.caption_ids[row], texts[found.text_of[row]]) == (mention.caption.sentid, mention.text)
        assert found.types[row] == "/".join(mention.phrase.types)
        assert found.has_box[row] == (mention.phrase.truth is not None)
        if mention.phrase.truth is not None:
            assert tuple(found.truths[row].tolist()) == mention.phrase.truth
    located = phrase_pairs(dataset, images, located=True)
    assert located.phrase_ids.tolist() == found.phrase_ids[found.has_box].tolist()


def test_a_chain_is_of_one_image_and_a_phrase_without_one_stands_alone(
    own_demo: Path, edit: Callable[[Path, Callable[[Any], None]], Path]
) -> None:
    box = {"boxes": [[1, 1, 20, 20]], "first_token": 0, "n_tokens": 1}

    def mark(content: Any) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                sentence.pop("phrases", None)
        for image in content["images"][:2]:
            for sentence, chain in zip(image["sentences"], ("7", "7", "", ""), strict=False):
                sentence["phrases"] = [{**box, "chain": chain}]

    dataset = load_dataset_file(edit(own_demo, mark))
    found = phrase_pairs(dataset, dataset.images[:2]).chain_of.tolist()
    assert [found.count(chain) for chain in found] == [2, 2, 1, 1] * 2


def test_images_without_phrases_are_one_line(few: Path) -> None:
    dataset = load_dataset_file(few)
    with pytest.raises(UserError, match="no phrase with a box in these images"):
        phrase_pairs(dataset, [], located=True)


def test_the_truth_of_a_pair_is_the_region_with_its_box(world: World) -> None:
    for pair, region in enumerate(world.truth_of.tolist()):
        truth = region - len(world.candidates)
        assert world.truths.image_of[truth] == world.pairs.image_of[pair]
        assert world.truths.boxes[truth].tolist() == world.pairs.truths[pair].tolist()


def test_a_truth_that_no_cache_has_is_named(world: World, caches: Caches) -> None:
    cache = open_cache(caches.candidates)
    other = BoxFeatures(cache, world.pairs.image_ids, CPU)
    with pytest.raises(
        UserError, match=r"x.h5: \d+ of \d+ ground-truth boxes have no features, the first is \(.*\) of image \d+"
    ):
        truth_regions(world.pairs, other, "x.h5")


def test_phrases_that_changed_since_are_one_line(
    own_demo: Path, tmp_path: Path, edit: Callable[[Path, Callable[[Any], None]], Path]
) -> None:
    caches = make_caches(own_demo, tmp_path / "features")
    cache = open_cache(caches.phrases)
    check_phrase_cache(cache, load_dataset_file(own_demo))
    assert len(world_of(caches).pairs)

    def rename(content: Any) -> None:
        for image in content["images"]:
            for sentence in image["sentences"]:
                sentence["tokens"] = ["crimson" if token == "red" else token for token in sentence["tokens"]]

    edit(own_demo, rename)
    with pytest.raises(UserError, match="not the phrases of .*, the first is '.*crimson.*'; extract it again"):
        check_phrase_cache(cache, load_dataset_file(own_demo))
