from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.features.tiny_text import MAX_TOKENS, OTHERS, add_tiny_clip, pooling_module, tiny_bert, with_modules
from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import Item, dataset_items
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge, verify_sources
from vse.features.extractors.text import TextExtractor, caption_reader
from vse.features.settings.texts import TextConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

Floats = NDArray[np.float32]
POOLINGS = ["own", "mean", "first", "tokens"]
TEXTS = [
    "A red circle on the GRASS.",
    "dog",
    "a blue square, a green circle",
    "the quick brown fox",
    "a dog on the grass",
    "Zwei Hunde",
]
LONG = "a " * 80  # more than the tiny encoders read


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT. Read only."""
    return tiny_bert(tmp_path_factory.mktemp("bert") / "tiny")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny OpenCLIP model, which the library knows by this name."""
    return add_tiny_clip(tmp_path_factory.mktemp("clip"))


def of_bert(folder: Path, **settings: Any) -> TextExtractor:
    return TextExtractor(TextConfig(name="x", model="tests/tiny", weights=str(folder), **settings))


def of_clip(name: str, **settings: Any) -> TextExtractor:
    return TextExtractor(TextConfig(name="x", model=name, weights="random", **settings))


@pytest.fixture(scope="module")
def both(bert: Path, clip: str) -> dict[str, list[TextExtractor]]:
    """The tiny encoders that there are for each pooling."""
    bert_s = {pooling: [of_bert(bert, pooling=pooling)] for pooling in POOLINGS}
    return bert_s | {pooling: [*bert_s[pooling], of_clip(clip, pooling=pooling)] for pooling in POOLINGS if pooling != "first"}


def items(texts: list[str]) -> list[Item]:
    return [Item(k, raw=text) for k, text in enumerate(texts)]


def vectors(extractor: TextExtractor, texts: list[str]) -> list[Floats]:
    """The vector of each text, or the vectors of its tokens."""
    found = extractor.encode_items(items(texts))
    if len(found) == 1:
        return list(found[0].numpy())
    return [states[mask].numpy() for states, mask in zip(*found, strict=True)]


def unit(rows: torch.Tensor) -> Floats:
    return (rows / rows.norm(dim=-1, keepdim=True)).numpy()


def slow_bert(folder: Path, text: str, pooling: str, longest: int = MAX_TOKENS, prompt: str = "") -> Floats:
    """One caption by itself: tokens that are cut by hand, then the network of transformers, then a loop over tokens."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    start, *words, end = tokenizer(prompt + text, verbose=False)["input_ids"]
    with torch.inference_mode():
        states = model(torch.tensor([[start, *words[: longest - 2], end]])).last_hidden_state[0]
    if pooling == "tokens":
        return unit(states)
    if pooling == "first":
        return unit(states[0])
    total = torch.zeros(states.shape[1])
    for state in states:
        total += state
    return unit(total / len(states))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_captions_of_bert_are_those_of_a_slow_loop(pooling: str, bert: Path) -> None:
    found = vectors(of_bert(bert, pooling=pooling), [*TEXTS, LONG])
    for text, vector in zip([*TEXTS, LONG], found, strict=True):
        np.testing.assert_allclose(vector, slow_bert(bert, text, pooling), atol=1e-5)


@pytest.mark.parametrize("pooling", ["own", "mean", "tokens"])
def test_captions_of_clip_are_those_of_a_slow_loop(pooling: str, clip: str) -> None:
    extractor = of_clip(clip, pooling=pooling)
    found = vectors(extractor, [*TEXTS, LONG])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.create_model(clip.rpartition("/")[2], pretrained=None).eval()
    states: list[torch.Tensor] = []
    model.ln_final.register_forward_hook(lambda _, __, output: states.append(output))
    for text, vector in zip([*TEXTS, LONG], found, strict=True):
        tokens = open_clip.get_tokenizer(clip.rpartition("/")[2])([text])
        with torch.inference_mode():
            whole = model.encode_text(tokens)[0]
        read = states.pop()[0][: int((tokens != 0).sum())]
        expected = {"own": whole, "tokens": read, "mean": sum(read) / len(read)}[pooling]
        np.testing.assert_allclose(vector, unit(expected), atol=1e-5)


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens", "mean_tokens"])
def test_own_pooling_is_what_the_folder_says(mode: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = with_modules(tiny_bert(tmp_path / "own"), pooling_module(mode))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(np.stack(vectors(of_bert(folder), TEXTS)), theirs, atol=1e-5)


def test_a_prompt_that_the_model_leaves_out_of_its_mean_is_left_out(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = with_modules(tiny_bert(tmp_path / "own"), pooling_module("mean_tokens", include_prompt=False))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, prompt="the dog: ", normalize_embeddings=True)
    ours = vectors(of_bert(folder, prompt="the dog: "), TEXTS)
    np.testing.assert_allclose(np.stack(ours), theirs, atol=1e-5)
    assert np.abs(np.stack(ours) - np.stack(vectors(of_bert(folder), TEXTS))).max() > 0.01


def test_a_model_s_own_prompt_is_taken_unless_another_is_given(tmp_path: Path) -> None:
    folder = with_modules(tiny_bert(tmp_path / "own"), pooling_module("mean_tokens"))
    said = {"prompts": {"query": "red: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    for prompt, read in ((None, "red: "), ("", ""), ("blue: ", "blue: ")):
        found = vectors(of_bert(folder, prompt=prompt), TEXTS)
        for text, vector in zip(TEXTS, found, strict=True):
            np.testing.assert_allclose(vector, slow_bert(folder, text, "mean", prompt=read), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "tokens"])
def test_a_prompt_stands_before_every_caption(pooling: str, bert: Path, clip: str) -> None:
    found = vectors(of_bert(bert, pooling=pooling, prompt="query: "), TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(vector, slow_bert(bert, text, pooling, prompt="query: "), atol=1e-5)
    with_prompt = vectors(of_clip(clip, pooling=pooling, prompt="a dog, "), TEXTS)
    for one, other in zip(with_prompt, vectors(of_clip(clip, pooling=pooling), [f"a dog, {t}" for t in TEXTS]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@given(
    order=st.permutations(range(len(TEXTS) + 1)), bound=st.sampled_from([1, 30, 64, 10_000]), pooling=st.sampled_from(POOLINGS)
)
def test_neither_order_nor_batches_nor_padding_change_a_vector(
    order: list[int], bound: int, pooling: str, both: dict[str, list[TextExtractor]]
) -> None:
    texts = [*TEXTS, LONG]
    for extractor in both[pooling]:
        extractor.config = extractor.config.model_copy(update={"batch_tokens": 10_000})
        together = vectors(extractor, texts)
        extractor.config = extractor.config.model_copy(update={"batch_tokens": bound})
        for k, vector in zip(order, vectors(extractor, [texts[k] for k in order]), strict=True):
            np.testing.assert_allclose(vector, together[k], atol=2e-6)


@pytest.mark.parametrize("longest", [5, 9, None])
def test_captions_longer_than_the_encoder_reads_are_cut_and_counted(longest: int | None, bert: Path, clip: str) -> None:
    for extractor, limit in (
        (of_bert(bert, pooling="tokens", max_length=longest), longest or MAX_TOKENS),
        (of_clip(clip, pooling="tokens", max_length=longest), longest or 20),
    ):
        exact = ("a " * (limit - 2)).strip()  # a token each, and two around them
        rows = extractor.extract(items(["a", exact, f"{exact} a", LONG]))
        assert rows.counts == {f"captions cut to {limit} tokens": 2}
        assert rows.offsets is not None
        assert np.diff(rows.offsets).tolist() == [3, limit, limit, limit]


def test_half_the_precision_costs_little(bert: Path, clip: str) -> None:
    for one, other in ((of_bert(bert), of_bert(bert, precision="bf16")), (of_clip(clip), of_clip(clip, precision="bf16"))):
        exact, rough = (np.stack(vectors(extractor, TEXTS)) for extractor in (one, other))
        assert not np.array_equal(exact, rough)
        assert (np.sum(exact * rough, axis=1) > 0.99).all()


def test_vectors_keep_their_length_if_they_are_not_to_be_normalised(bert: Path) -> None:
    plain = np.stack(vectors(of_bert(bert, normalize=False), TEXTS))
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 0.01).all()
    np.testing.assert_allclose(plain / lengths, np.stack(vectors(of_bert(bert), TEXTS)), atol=1e-6)


@pytest.mark.parametrize("pooling", ["own", "tokens"])
def test_a_cache_has_a_row_per_caption_in_any_number_of_shards(pooling: str, demo: Path, bert: Path, tmp_path: Path) -> None:
    captions = dataset_items(load_dataset_file(demo), "text", raw=True)
    extractor, caches = of_bert(bert, pooling=pooling), []
    for n_shards in (1, 3):
        out = tmp_path / str(n_shards) / "demo_x.h5"
        extract_shards(demo, extractor, out, n_shards)
        caches.append(verify_cache(merge(demo, out, n_shards)))
    rows = np.arange(len(captions))
    for cache in caches:
        assert (cache.kind, cache.row_kind) == ("text", extractor.config.row_kind)
        assert cache.ids.tolist() == [item.id for item in captions]
        assert verify_sources(cache) == "unchanged"
    for k in (0, 7, len(captions) - 1):
        expected = slow_bert(bert, captions[k].raw, "mean" if pooling == "own" else "tokens")
        for cache in caches:
            reader = FeatureReader(cache)
            if pooling == "own":
                found = reader.rows(rows)[k]
            else:
                sets = reader.sets(rows[k : k + 1])
                found = sets.features[sets.mask]
            np.testing.assert_allclose(found.astype(np.float32), expected, atol=1e-3)
    if pooling == "tokens":
        assert f"{len(captions)} captions with " in caches[0].describe()


def command(demo: Path, out: Path, folder: Path, *more: object) -> list[str]:
    sets = ["--set", "model=tests/tiny", "--set", f"weights={folder}"]
    return [str(a) for a in ("text", "--dataset", demo, "--feature", "minilm", "--out", out, "--shards", 3, *sets, *more)]


def run(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0


def test_the_command_says_how_many_captions_were_cut(
    demo: Path, bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "demo_minilm.h5"
    run(command(demo, out, bert, "--set", "max_length=40"))
    texts = [item.raw for item in dataset_items(load_dataset_file(demo), "text", raw=True)]
    n_cut = sum(len(tokens) > 40 for tokens in of_bert(bert).backbone.tokenize(texts)[0])
    assert 0 < n_cut < len(texts)
    assert open_cache(out).provenance["counts"] == {"captions cut to 40 tokens": n_cut}
    assert f"{out}: {n_cut} captions cut to 40 tokens" in caplog.text


def test_what_is_finished_is_kept_and_a_shard_that_is_missing_is_made_alone(
    demo: Path, bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vse")
    out = tmp_path / "demo_minilm.h5"
    run(command(demo, out, bert))
    first = open_cache(out)
    whole = FeatureReader(first).rows(np.arange(len(first.ids)))
    (tmp_path / "demo_minilm.shards" / "shard-00001-of-00003.h5").unlink()
    caplog.clear()
    run(command(demo, out, bert, "--set", "batch_tokens=64"))
    assert [f"shard-0000{k}-of-00003.h5: finished, kept" in caplog.text for k in range(3)] == [True, False, True]
    again = open_cache(out)
    assert again.key == first.key
    np.testing.assert_allclose(FeatureReader(again).rows(np.arange(len(again.ids))), whole, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "weights_sha256"),
        ({"words": OTHERS}, "tokenizer_sha256"),
        ({"layer_norm_eps": 1e-3}, "network_sha256"),
        ("pooling=first", "pooling: 'own' -> 'first'"),
        ("prompt=the", "prompt"),
        ("max_length=7", "max_length"),
    ],
    ids=str,
)
def test_shards_by_another_encoder_are_refused(
    change: dict[str, Any] | str, said: str, demo: Path, bert: Path, tmp_path: Path, fails: Callable[..., str]
) -> None:
    out = tmp_path / "demo_minilm.h5"
    run(command(demo, out, bert))
    if isinstance(change, dict):
        line = fails(main, *command(demo, out, tiny_bert(tmp_path / "other", **change)))
    else:
        line = fails(main, *command(demo, out, bert, "--set", change))
    assert "was made with other settings" in line
    assert said.replace("'", "") in line.replace("'", "")


def test_a_caption_that_is_written_otherwise_is_another_source(
    own_demo: Path, bert: Path, tmp_path: Path, edit: Callable[..., Path], fails: Callable[..., str]
) -> None:
    """Its words may be the same: the encoder reads capitals and full stops, too."""
    out = tmp_path / "demo_minilm.h5"
    run(command(own_demo, out, bert))

    def rewrite(content: Any) -> None:
        sentence = content["images"][0]["sentences"][0]
        sentence["raw"] = f"{sentence['raw']}!"

    edit(own_demo, rewrite)
    assert "was made from another caption" in fails(main, *command(own_demo, out, bert))
    assert "was made from another caption" in fails(main, "verify", out)


@pytest.mark.parametrize("pooling", ["own", "tokens"])
def test_the_encoder_of_a_cache_reads_other_captions(pooling: str, demo: Path, bert: Path, clip: str, tmp_path: Path) -> None:
    for extractor in (of_bert(bert, pooling=pooling, prompt="the "), of_clip(clip, pooling=pooling, seed=3)):
        out = tmp_path / extractor.config.model.replace("/", "_") / "demo_x.h5"
        extract_shards(demo, extractor, out, 2)
        again = caption_reader(open_cache(merge(demo, out, 2)), device="cpu").encode_items(items(TEXTS))
        for one, other in zip(again, extractor.encode_items(items(TEXTS)), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "other weights"),
        ({"words": OTHERS}, "another tokenizer"),
        ({"layer_norm_eps": 1e-3}, "network_sha256"),
        (None, "no folder with a text encoder"),
    ],
    ids=str,
)
def test_captions_are_read_by_no_other_encoder_than_that_of_the_cache(
    change: dict[str, Any] | None, said: str, demo: Path, tmp_path: Path
) -> None:
    folder = tiny_bert(tmp_path / "mine")
    extract_shards(demo, of_bert(folder), tmp_path / "demo_x.h5", 1)
    cache = open_cache(merge(demo, tmp_path / "demo_x.h5", 1))
    if change is None:
        folder.rename(tmp_path / "away")
    else:
        tiny_bert(folder, **change)
    with pytest.raises(UserError, match=said):
        caption_reader(cache)


def test_a_cache_of_another_data_set_is_made_like_one(demo: Path, few: Path, bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo_minilm.h5"
    run(command(demo, out, bert, "--set", "prompt=the "))
    run(["text", "--dataset", str(few), "--like", str(out), "--out", str(tmp_path / "few.h5"), "--shards", "1"])
    assert open_cache(tmp_path / "few.h5").extractor == open_cache(out).extractor
