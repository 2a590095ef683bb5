from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.conftest import Log, Patch
from tests.training.data.caches import CPU, PLACES, cached, made_by_hand, regions_by_hand, rows_by_id, spoil
from tests.transformers_made import WORDS, make_bert
from vse.features.backbones.transformer import Transformer, read_transformer
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import FeatureReader
from vse.pipeline.dataset.captions import PAD_ID, Vocabulary
from vse.pipeline.dataset.dataset import Caption, Image, load_dataset_file
from vse.pipeline.errors import UserError
from vse.training.data import images as cached_module
from vse.training.data import pairs as captions_module
from vse.training.data.images import CachedFeatures, compute_memory_budget
from vse.training.data.pairs import Pairs, TokenIndices, WordIndices
from vse.training.kinds import InputKind

DIM = 4
IDS = [30, 10, 50, 20, 60, 40]
COUNTS = [2, 0, 5, 1, 0, 3]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("where", PLACES)
@given(data=st.data())
def test_vectors_belong_to_their_ids_in_any_order(where: str, cache: Path, data: st.DataObject) -> None:
    opened = open_cache(cache)
    ids = data.draw(st.lists(st.sampled_from(opened.ids.tolist()), min_size=1, max_size=8, unique=True))
    numbers = np.asarray(data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=12)))
    stored = rows_by_id(opened)
    expected = torch.from_numpy(np.stack([stored[ids[number]] for number in numbers]))
    images = cached(opened, where, ids)
    assert images.kind == InputKind.VECTORS
    assert (images.size_in_memory_gb > 0) == (where == "in memory")
    (vectors,) = images.read(numbers)
    assert torch.equal(vectors, expected)


def test_images_and_captions_without_features_are_named(cache: Path, tfidf: Path) -> None:
    with pytest.raises(UserError, match="1 of 2 images have no features, the first is id 999"):
        cached(open_cache(cache), image_ids=[3, 999])
    with pytest.raises(UserError, match="1 of 2 captions have no features, the first is id 99999"):
        CachedFeatures(FeatureReader(open_cache(tfidf), 0), np.asarray([0, 99999]), CPU)


SETS = [drawn(count, DIM, seed=k) for k, count in enumerate(COUNTS)]


@pytest.fixture(scope="module")
def some_regions(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return regions_by_hand(tmp_path_factory.mktemp("regions"), SETS, IDS)


@pytest.mark.parametrize("where", PLACES)
@given(numbers=st.lists(st.integers(0, len(IDS) - 1), min_size=1, max_size=9))
def test_regions_are_padded_to_the_longest(where: str, numbers: list[int], some_regions: FeatureCache) -> None:
    images = cached(some_regions, where, IDS)
    assert images.kind == InputKind.SETS
    vectors, mask = images.read(np.asarray(numbers))
    counts = [max(1, COUNTS[number]) for number in numbers]
    assert vectors.dtype == torch.float32
    assert mask.dtype == torch.bool
    assert vectors.shape == (len(numbers), max(counts), DIM)
    assert mask.tolist() == [[column < count for column in range(max(counts))] for count in counts]
    assert not vectors[~mask].any()
    for row, number in enumerate(numbers):
        expected = SETS[number] if COUNTS[number] else np.zeros((1, DIM), np.float32)
        assert np.array_equal(vectors[row][mask[row]], expected), "without a region, one vector of zeros"


@pytest.mark.parametrize("where", PLACES)
def test_positions_are_sets_of_any_finite_numbers(where: str, tmp_path: Path) -> None:
    features = drawn(6, 3, DIM)
    images = cached(made_by_hand(tmp_path, features, IDS), where, [40, 10])
    assert images.kind == InputKind.SETS
    vectors, mask = images.read(np.asarray([1, 0, 1]))
    assert np.array_equal(vectors, features[[1, 5, 1]])
    assert mask.shape == (3, 3)
    assert mask.all()
    features = np.full((6, 4), 3e38, np.float32)
    (vectors,) = cached(made_by_hand(tmp_path, features, range(6)), where).read(np.arange(6))
    assert torch.equal(vectors, torch.from_numpy(features))


@pytest.mark.parametrize("where", PLACES)
def test_a_batch_or_all_of_its_images_may_be_empty(where: str, tmp_path: Path) -> None:
    images = cached(regions_by_hand(tmp_path, [drawn(0, DIM)] * 6, IDS), where)
    vectors, mask = images.read(np.asarray([3, 5]))
    assert torch.equal(vectors, torch.zeros(2, 1, DIM))
    assert mask.tolist() == [[True], [True]]
    none = np.empty(0, np.int64)
    sets = cached(regions_by_hand(tmp_path / "regions", [drawn(2, DIM)] * 6, IDS), where)
    assert [part.shape for part in sets.read(none)] == [(0, 1, DIM), (0, 1)]
    (vectors,) = cached(made_by_hand(tmp_path / "vectors", drawn(6, DIM), IDS), where).read(none)
    assert vectors.shape == (0, DIM)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("kind", "value"), [("vectors", np.nan), ("vectors", -np.inf), ("regions", np.nan)])
def test_a_number_that_is_not_finite_is_refused_with_its_id(where: str, kind: str, value: float, tmp_path: Path) -> None:
    sets = [drawn(count, DIM) for count in COUNTS]
    made = regions_by_hand(tmp_path, sets, IDS) if kind == "regions" else made_by_hand(tmp_path, drawn(6, DIM), IDS)
    spoil(made.path, 50, value)
    cache = open_cache(made.path)
    assert cached(cache, where, [30, 60]).read(np.arange(2))
    with pytest.raises(UserError, match="the features of id 50 are not finite"):
        cached(cache, where, [30, 50]).read(np.arange(2))


@pytest.mark.parametrize(("bytes_allowed", "mapped"), [(46, False), (50, True)])
def test_features_that_fit_into_memory_are_mapped(bytes_allowed: int, mapped: bool, tmp_path: Path) -> None:
    cache = made_by_hand(tmp_path, np.arange(24, dtype=np.float16).reshape(6, 4), range(6))  # 48 bytes
    images = CachedFeatures(FeatureReader(cache, 0, mapped=False), cache.ids, CPU, 1e-9 * bytes_allowed)
    assert images.size_in_memory_gb == pytest.approx(48e-9 if mapped else 0)
    (vectors,) = images.read(np.asarray([3]))
    assert vectors.tolist() == [[12, 13, 14, 15]]
    shards = [str(shard["features"].path) for shard in cache.shard_arrays]
    assert [path in Path("/proc/self/maps").read_text() for path in shards] == [mapped, mapped]


@pytest.mark.parametrize("bytes_allowed", [87, 88])
def test_of_regions_as_many_bytes_as_there_are_vectors_count(bytes_allowed: int, tmp_path: Path) -> None:
    cache = regions_by_hand(tmp_path, [drawn(count, DIM).astype(np.float16) for count in COUNTS], IDS)
    images = CachedFeatures(FeatureReader(cache, 0), cache.ids, CPU, 1e-9 * bytes_allowed)
    assert images.size_in_memory_gb == pytest.approx(88e-9 if bytes_allowed == 88 else 0)


@pytest.mark.parametrize(
    ("device", "memory_gb", "used_gb", "room"),
    [
        ("cpu", 2.0, 0.5, 1.5e9),
        ("cpu", 2.0, 3.0, 0.0),
        ("cuda", 2.0, 3.0, 0.8 * 70e9),  # what is taken there is free no more
        ("cuda", 0.0, 0.0, 0.0),
    ],
)
def test_images_leave_room_for_captions(
    device: str, memory_gb: float, used_gb: float, room: float, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70e9, 80e9))
    assert compute_memory_budget(torch.device(device), memory_gb, used_gb) == pytest.approx(room)


def test_captions_fit_on_a_gpu_beside_images_that_are_larger_than_memory_gb(tfidf: Path, monkeypatch: Patch) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(cached_module, "compute_memory_budget", lambda _, memory, taken: asked.append((memory, taken)) or 70e9)
    opened = open_cache(tfidf)
    captions = CachedFeatures(FeatureReader(opened, 0), opened.ids, CPU, 2.0, used_gb=3.0)
    assert asked == [(2.0, 3.0)]
    assert captions.size_in_memory_gb > 0


@pytest.fixture(scope="module")
def captions(demo: Path) -> list[Caption]:
    return [caption for image in load_dataset_file(demo).split("train") for caption in image.captions]


@given(data=st.data())
def test_words_are_padded_after_the_end(captions: list[Caption], data: st.DataObject) -> None:
    vocabulary = Vocabulary.build((caption.tokens for caption in captions), 9)
    numbers = np.asarray(data.draw(st.lists(st.integers(0, len(captions) - 1), min_size=1, max_size=9)))
    pad_sets, lengths = WordIndices(captions, vocabulary, CPU).read(numbers)
    encoded = [vocabulary.encode(captions[number].tokens) for number in numbers]
    assert lengths.tolist() == [len(words) for words in encoded]
    longest = max(map(len, encoded))
    assert pad_sets.tolist() == [words + [PAD_ID] * (longest - len(words)) for words in encoded]


def test_a_caption_of_nothing_is_a_start_and_an_end() -> None:
    vocabulary = Vocabulary.build([["a"]], 1)
    words = WordIndices([Caption(0, 0, "", ()), Caption(1, 0, "a b", ("a", "b"))], vocabulary, CPU)
    pad_sets, lengths = words.read(np.asarray([0, 1]))
    assert pad_sets.tolist() == [[1, 2, 0, 0], [1, 4, 3, 2]]
    assert lengths.tolist() == [2, 4]


TEXTS = [" ".join(WORDS[:n]) for n in (3, 0, 12, 1, 7)]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return read_transformer(str(make_bert(tmp_path_factory.mktemp("bert"), pad_token_id=4)), max_length=9)


@given(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_tokens_are_padded_with_the_model_s_own_number_and_masked(transformer: Transformer, numbers: list[int]) -> None:
    pad_sets, mask = TokenIndices(TEXTS, transformer, CPU).read(np.asarray(numbers))
    encoded = [transformer.tokenizer.encode(TEXTS[number]).ids for number in numbers]
    longest = max(map(len, encoded))
    assert pad_sets.tolist() == [ids + [4] * (longest - len(ids)) for ids in encoded]
    assert mask.tolist() == [[True] * len(ids) + [False] * (longest - len(ids)) for ids in encoded]


def test_truncated_captions_are_counted_and_read_in_parts(transformer: Transformer, caplog: Log, monkeypatch: Patch) -> None:
    assert TokenIndices(TEXTS, transformer, CPU).n_truncated_captions == 1, "7 words and 2 special captions_module just fit"
    line = f"1 of 5 captions are longer than the 9 tokens that {transformer.name} reads, and are truncated"
    assert caplog.messages == [line]
    caplog.clear()
    assert TokenIndices(TEXTS[:2], transformer, CPU).n_truncated_captions == 0
    assert not caplog.messages
    whole = TokenIndices(TEXTS, transformer, CPU).read(np.arange(5))
    monkeypatch.setattr(captions_module, "_TEXTS_PER_TOKENISER_CALL", 2)
    for part, other in zip(TokenIndices(TEXTS, transformer, CPU).read(np.arange(5)), whole, strict=True):
        assert torch.equal(part, other)


def image(imgid: int, *texts: str) -> Image:
    captions = [Caption(100 * imgid + k, imgid, text, tuple(text.split())) for k, text in enumerate(texts)]
    return Image(imgid, f"{imgid}.jpg", "train", tuple(captions))


@pytest.fixture
def pairs() -> Pairs:
    return Pairs([image(7, "a dog", "a cat", "a dog"), image(3, "dog a"), image(9, "a cat", "a a dog")])


def test_a_pair_is_a_caption_with_its_image_and_equal_words_share_a_text(pairs: Pairs) -> None:
    assert len(pairs) == 6
    assert pairs.image_indices.tolist() == [0, 0, 0, 1, 2, 2]
    assert pairs.image_ids.tolist() == [7, 3, 9]
    assert pairs.caption_image_ids.tolist() == [7, 7, 7, 3, 9, 9]
    assert pairs.caption_ids.tolist() == [700, 701, 702, 300, 900, 901]
    dog, cat, again, turned, other_cat, longer = pairs.text_indices.tolist()
    assert dog == again
    assert cat == other_cat
    assert len({dog, cat, turned, longer}) == 4
