from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import TINY_FEATURE
from tests.training.data.caches import PLACES, cached, made_by_hand, rows_by_id, spoil
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.extractors.cnn import CnnExtractor, cut_crops
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError
from vse.pipeline.files.images import decode_image
from vse.training.data.images import CachedImageFeatures, Indices, PhotoCrops

N_IMAGES, N_CROPS = 66, 3
IMAGE_OF = np.repeat(np.arange(N_IMAGES), 5)


@pytest.fixture(scope="module")
def crop_bank(bank: Path) -> FeatureCache:
    """Three random crops of each image of the demo, each of unit length."""
    return open_cache(bank)


def cut(order: Sequence[int], size: int) -> list[Indices]:
    return [np.asarray(order[start : start + size], np.int64) for start in range(0, len(order), size)]


def each_pair(
    images: CachedImageFeatures | PhotoCrops, batches: Sequence[Indices], image_indices: Indices, seed: int, epoch: int
) -> dict[int, Tensor]:
    """What is handed out for each pair."""
    inputs = images.read_batches(batches, image_indices, seed, epoch)
    parts = [zip(pairs.tolist(), seen, strict=True) for pairs, (seen,) in zip(batches, inputs, strict=True)]
    return {pair: tensor for part in parts for pair, tensor in part}


def same(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[pair], b[pair]) for pair in a)


def test_a_bank_is_the_same_from_memory(crop_bank: FeatureCache) -> None:
    ids = np.random.default_rng(0).permutation(N_IMAGES)
    kept, mapped = (cached(crop_bank, where, ids) for where in ("in memory", "mapped"))
    batches = cut(np.random.default_rng(1).permutation(len(IMAGE_OF)), 32)
    for epoch in range(3):
        assert same(each_pair(kept, batches, IMAGE_OF, 4, epoch), each_pair(mapped, batches, IMAGE_OF, 4, epoch))
    assert torch.equal(*(images.read_images(np.arange(N_IMAGES))[0] for images in (kept, mapped)))


def crops_drawn(cache: FeatureCache, images: CachedImageFeatures, epoch: int, seed: int = 0) -> list[int]:
    """The number of the crop that each pair was given; it is one of its image's."""
    stored = rows_by_id(cache)
    drawn = []
    for pair, vector in sorted(each_pair(images, cut(range(len(IMAGE_OF)), 64), IMAGE_OF, seed, epoch).items()):
        equal = (stored[int(cache.ids[IMAGE_OF[pair]])] == vector.numpy()).all(1)
        assert equal.sum() == 1, "exactly one crop of the image"
        drawn.append(int(equal.argmax()))
    return drawn


@pytest.mark.parametrize("where", PLACES)
def test_a_pair_is_given_a_crop_of_its_image_that_seed_and_epoch_change(where: str, crop_bank: FeatureCache) -> None:
    images = cached(crop_bank, where)
    first = crops_drawn(crop_bank, images, epoch=0)
    assert crops_drawn(crop_bank, images, epoch=0) == first
    for other in (crops_drawn(crop_bank, images, epoch=1), crops_drawn(crop_bank, images, epoch=0, seed=1)):
        agree = np.mean(np.equal(first, other))
        assert 0.2 < agree < 0.47, "as of two independent draws among three"
    of_images = np.reshape(first, (N_IMAGES, 5))
    assert (of_images.min(1) < of_images.max(1)).mean() > 0.9, "the captions of an image see several of its crops"


def test_all_crops_are_drawn_equally_often(crop_bank: FeatureCache) -> None:
    images = cached(crop_bank, "in memory")
    drawn = np.asarray([crops_drawn(crop_bank, images, epoch) for epoch in range(12)])
    counts = np.bincount(drawn.ravel(), minlength=N_CROPS)
    expected = drawn.size / N_CROPS
    assert ((counts - expected) ** 2 / expected).sum() < 14, "chi square of two degrees of freedom: once in a thousand"
    per_image = drawn.reshape(12, N_IMAGES, 5).transpose(1, 0, 2).reshape(N_IMAGES, -1)
    assert all(set(crops) == set(range(N_CROPS)) for crops in per_image), "each image shows all of its crops"
    per_pair = [np.unique(crops).size for crops in drawn.T]
    assert np.mean(per_pair) > 2.9, "so does each pair, sooner or later"


@given(order=st.permutations(range(40)), sizes=st.tuples(*[st.integers(1, 40)] * 2), n_processes=st.integers(1, 5))
def test_crops_ignore_batch_sizes(crop_bank: FeatureCache, order: list[int], sizes: tuple[int, int], n_processes: int) -> None:
    images, image_indices = cached(crop_bank), IMAGE_OF[:40]
    expected = each_pair(images, cut(range(40), sizes[0]), image_indices, 3, 8)
    batches = cut(order, sizes[1])
    assert same(each_pair(images, batches, image_indices, 3, 8), expected)
    shares: dict[int, Tensor] = {}
    for rank in range(n_processes):
        mine = [np.array_split(batch, n_processes)[rank] for batch in batches]
        shares |= each_pair(images, mine, image_indices, 3, 8)
    assert same(shares, expected)
    done = len(batches) // 2
    first, rest = (each_pair(images, part, image_indices, 3, 8) for part in (batches[:done], batches[done:]))
    assert same(first | rest, expected)


@pytest.mark.parametrize("where", PLACES)
def test_a_bank_stands_for_an_image_by_the_mean_of_its_crops(where: str, crop_bank: FeatureCache, tmp_path: Path) -> None:
    features = np.random.default_rng(0).random((N_IMAGES, N_CROPS, 4), dtype=np.float32)
    for made in (crop_bank, made_by_hand(tmp_path, features, range(N_IMAGES), bank=True)):
        stored = rows_by_id(made)
        mean = np.stack([stored[image_id].mean(0) for image_id in (40, 2, 7)])
        if made is crop_bank:
            mean /= np.linalg.norm(mean, axis=1, keepdims=True)
        (vectors,) = cached(made, where, [2, 40, 7]).read_images(np.asarray([1, 0, 2]))
        np.testing.assert_allclose(vectors, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", PLACES)
def test_a_bank_with_a_nan_is_refused_with_its_id(where: str, tmp_path: Path) -> None:
    features = np.random.default_rng(0).random((6, N_CROPS, 4), dtype=np.float32)
    path = made_by_hand(tmp_path, features, [30, 10, 50, 20, 60, 40], bank=True).path
    spoil(path, 60, np.nan)
    with pytest.raises(UserError, match="the features of id 60 are not finite"):
        cached(open_cache(path), where).read_images(np.arange(6))
    with pytest.raises(UserError, match="the features of id 60 are not finite"):
        list(cached(open_cache(path), where).read_batches([np.arange(99)], np.repeat(4, 99), 0, 0))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("shape", [(4,), (N_CROPS, 4)], ids=["vectors", "bank"])
def test_a_share_of_a_batch_may_be_empty(where: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    images = cached(made_by_hand(tmp_path, np.ones((6, *shape), np.float16), range(6), bank=len(shape) > 1), where)
    batches = [np.asarray([2, 0]), np.empty(0, np.int64), np.asarray([1])]
    assert [part.shape for (part,) in images.read_batches(batches, np.arange(3), 0, 0)] == [(2, 4), (0, 4), (1, 4)]


PHOTO_OF = np.repeat(np.arange(6), 5)
BATCHES = cut(np.random.default_rng(0).permutation(30), 8)

MakePhotos = Callable[..., PhotoCrops]


@pytest.fixture(scope="module")
def extractor() -> CnnExtractor:
    return CnnExtractor(TINY_FEATURE.model_copy(update={"resize": 40, "batch_size": 3}))


def val_photos(dataset_file: Path) -> tuple[list[Path], Indices]:
    dataset = load_dataset_file(dataset_file)
    images = dataset.split("val")
    return [dataset.image_path(image) for image in images], np.asarray([image.imgid for image in images])


@pytest.fixture
def photos(demo: Path, extractor: CnnExtractor) -> MakePhotos:
    """The six validation photos of the demo."""

    def make(**options: object) -> PhotoCrops:
        return PhotoCrops(extractor, *val_photos(demo), **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("kind", ["plain", "resized", None])  # the last is that of the cache, resized
def test_pixels_are_a_crop_of_the_file(kind: str | None, photos: MakePhotos, demo: Path, extractor: CnnExtractor) -> None:
    paths, ids = val_photos(demo)
    config = extractor.config.model_copy(update={"crops": "rc_bank", "n_random": 1, "random_crop": kind or "resized"})
    for pair, pixels in each_pair(photos(random_crop=kind), BATCHES, PHOTO_OF, 3, 2).items():
        number = PHOTO_OF[pair]
        assert pixels.dtype == torch.uint8
        assert torch.equal(pixels, cut_crops(decode_image(paths[number]), config, int(ids[number]), (3, 2, pair)))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_crop_of_a_photo_depends_on_its_pair_alone(workers: int, photos: MakePhotos) -> None:
    images, numbers = photos(workers=workers), np.asarray([5, 1, 1, 0, 3, 2, 4, 5])
    assert torch.equal(*(photos(workers=n).read_images(numbers)[0] for n in (workers, 1)))
    whole = each_pair(photos(workers=0), BATCHES, PHOTO_OF, 1, 2)
    assert same(each_pair(images, cut(range(30), 7), PHOTO_OF, 1, 2), whole), "cut in another direction"
    rest = each_pair(images, BATCHES[2:], PHOTO_OF, 1, 2)
    assert same(rest, {pair: whole[pair] for pair in rest}), "resumed after two batches"
    shares = [[batch[rank::2] for batch in BATCHES] for rank in range(2)]
    both = [each_pair(images, mine, PHOTO_OF, 1, 2) for mine in shares]
    assert same(both[0] | both[1], whole), "shared by two processes"


@pytest.mark.parametrize("crops", ["1c", "10c", "10c_bank", "rc_bank"])
def test_a_frozen_network_hands_out_the_features_of_the_crops(crops: str, demo: Path) -> None:
    extractor = CnnExtractor(TINY_FEATURE.model_copy(update={"resize": 40, "batch_size": 3, "crops": crops}))
    pixels, features = (
        each_pair(PhotoCrops(extractor, *val_photos(demo), as_features=as_features), BATCHES, PHOTO_OF, 0, 1)
        for as_features in (False, True)
    )
    for pair, vector in features.items():
        assert not vector.is_inference(), "gradients of what is computed from it can be taken"
        torch.testing.assert_close(vector, extractor.compute_features(pixels[pair][None]).flatten())
        assert vector.norm().item() == pytest.approx(1)


@pytest.mark.parametrize("crops", ["1c", "10c", "10c_bank", "rc_bank"])
def test_photos_are_evaluated_on_fixed_crops(crops: str, demo: Path) -> None:
    config = TINY_FEATURE.model_copy(update={"resize": 40, "crops": crops})
    paths, ids = val_photos(demo)
    (pixels,) = PhotoCrops(CnnExtractor(config), paths, ids).read_images(np.asarray([4, 0]))
    fixed = config.model_copy(update={"crops": "10c" if crops == "10c" else "1c"})
    assert torch.equal(pixels, torch.stack([cut_crops(decode_image(paths[number]), fixed) for number in (4, 0)]))


@pytest.mark.parametrize("as_features", [False, True])
def test_a_share_of_photos_may_be_empty(as_features: bool, photos: MakePhotos) -> None:
    batches = [np.asarray([2, 0]), np.empty(0, np.int64), np.asarray([1])]
    parts = [part for (part,) in photos(as_features=as_features).read_batches(batches, PHOTO_OF, 0, 0)]
    assert [len(part) for part in parts] == [2, 0, 1]
    assert len({part.shape[1:] for part in parts}) == 1
    assert not list(photos(as_features=as_features).read_batches([], PHOTO_OF, 0, 0))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_missing_photo_is_named(workers: int, own_demo: Path, extractor: CnnExtractor) -> None:
    paths, ids = val_photos(own_demo)
    images = PhotoCrops(extractor, paths, ids, workers=workers)
    paths[4].unlink()
    with pytest.raises(UserError, match=f"{paths[4]}: no such image file"):
        list(images.read_batches(BATCHES, PHOTO_OF, 0, 0))
    with pytest.raises(UserError, match=f"{paths[4]}: no such image file"):
        images.read_images(np.arange(6))
    assert len(images.read_images(np.arange(4))[0]) == 4
