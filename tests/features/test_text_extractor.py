from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from tests.features.conftest import Edit, Fails, extracted_cache, sets, succeed
from tests.features.tiny_text import MAX_TOKENS, OTHERS, pooling_module, tiny_bert, with_modules
from vse.features.cache.feature_cache import open_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import ExtractorInput, list_extractor_inputs
from vse.features.cli import extract_main as main
from vse.features.extraction import verify_inputs
from vse.features.extractors.text import TextExtractor, load_text_input_encoder
from vse.features.settings.captions import TextConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

Floats = NDArray[np.float32]
POOLINGS = ["own", "mean", "first", "tokens"]
TEXTS = ["A red circle on the GRASS.", "dog", "a blue square, a green circle", "the quick brown fox", "a dog on the grass"]
TEXTS += ["Zwei Hunde"]
LONG = "a " * 80  # more than the tiny encoders read


def of_bert(folder: Path, **settings: Any) -> TextExtractor:
    return TextExtractor(TextConfig(name="x", model="tests/tiny", weights=str(folder), **settings))


def of_clip(name: str, **settings: Any) -> TextExtractor:
    return TextExtractor(TextConfig(name="x", model=name, weights="random", **settings))


@pytest.fixture(scope="module")
def both(bert: Path, clip: str) -> dict[str, list[TextExtractor]]:
    bert_s = {pooling: [of_bert(bert, pooling=pooling)] for pooling in POOLINGS}
    return bert_s | {pooling: [*bert_s[pooling], of_clip(clip, pooling=pooling)] for pooling in POOLINGS if pooling != "first"}


OTHER_NETWORKS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "weights"),
    ({"words": OTHERS}, "tokenizer"),
    ({"layer_norm_eps": 1e-3}, "network"),
]


def items(texts: list[str]) -> list[ExtractorInput]:
    return [ExtractorInput(k, raw=text) for k, text in enumerate(texts)]


def vectors(extractor: TextExtractor, texts: list[str]) -> list[Floats]:
    found = extractor.encode_inputs(items(texts))
    if len(found) == 1:
        return list(found[0].numpy())
    return [states[mask].numpy() for states, mask in zip(*found, strict=True)]


def unit(rows: torch.Tensor) -> Floats:
    return (rows / rows.norm(dim=-1, keepdim=True)).numpy()


@cache
def pretrained(folder: Path) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def slow_bert(folder: Path, text: str, pooling: str, longest: int = MAX_TOKENS, prompt: str = "") -> Floats:
    """One caption by itself: tokens that are cut by hand, then the network of transformers, then a loop over tokens."""
    tokenizer, model = pretrained(folder)
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


@pytest.mark.parametrize("prompt", ["", "query: "])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_captions_of_bert_are_those_of_a_slow_loop(pooling: str, prompt: str, bert: Path) -> None:
    found = vectors(of_bert(bert, pooling=pooling, prompt=prompt), [*TEXTS, LONG])
    for text, vector in zip([*TEXTS, LONG], found, strict=True):
        np.testing.assert_allclose(vector, slow_bert(bert, text, pooling, prompt=prompt), atol=1e-5)


@pytest.mark.parametrize("pooling", ["own", "mean", "tokens"])
def test_captions_of_clip_are_those_of_a_slow_loop(pooling: str, clip: str) -> None:
    extractor = of_clip(clip, pooling=pooling)
    found = vectors(extractor, [*TEXTS, LONG])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.create_model(clip.rpartition("/")[2], pretrained=None).eval()
    tokenizer = open_clip.get_tokenizer(clip.rpartition("/")[2])
    states: list[torch.Tensor] = []
    model.ln_final.register_forward_hook(lambda _, __, output: states.append(output))
    for text, vector in zip([*TEXTS, LONG], found, strict=True):
        tokens = tokenizer([text])
        with torch.inference_mode():
            whole = model.encode_text(tokens)[0]
        read = states.pop()[0][: int((tokens != 0).sum())]
        expected = {"own": whole, "tokens": read, "mean": sum(read) / len(read)}[pooling]
        np.testing.assert_allclose(vector, unit(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "settings", "prompt"),
    [
        ("cls_token", {}, None),
        ("max_tokens", {}, None),
        ("mean_tokens", {}, "the dog: "),
        ("mean_tokens", {"include_prompt": False}, "the dog: "),
    ],
)
def test_own_pooling_is_what_the_folder_says(mode: str, settings: dict[str, Any], prompt: str | None, tmp_path: Path) -> None:
    folder = with_modules(tiny_bert(tmp_path / "own"), pooling_module(mode, **settings))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, prompt=prompt)
    lengths = np.linalg.norm(theirs, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 0.01).all()
    for normalize, expected in ((False, theirs), (True, theirs / lengths)):
        ours = vectors(of_bert(folder, prompt=prompt, normalize=normalize), TEXTS)
        np.testing.assert_allclose(np.stack(ours), expected, rtol=1e-5, atol=1e-5)


def test_a_model_s_own_prompt_is_taken_unless_another_is_given(tmp_path: Path) -> None:
    folder = with_modules(tiny_bert(tmp_path / "own"), pooling_module("mean_tokens"))
    said = {"prompts": {"query": "red: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    for prompt, read in ((None, "red: "), ("", ""), ("blue: ", "blue: ")):
        found = vectors(of_bert(folder, prompt=prompt), TEXTS)
        for text, vector in zip(TEXTS, found, strict=True):
            np.testing.assert_allclose(vector, slow_bert(folder, text, "mean", prompt=read), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "tokens"])
def test_a_prompt_stands_before_every_caption_of_clip(pooling: str, clip: str) -> None:
    with_prompt = vectors(of_clip(clip, pooling=pooling, prompt="a dog, "), TEXTS)
    for one, other in zip(with_prompt, vectors(of_clip(clip, pooling=pooling), [f"a dog, {t}" for t in TEXTS]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@given(
    order=st.permutations(range(len(TEXTS) + 1)), bound=st.sampled_from([1, 30, 64, 10_000]), pooling=st.sampled_from(POOLINGS)
)
def test_order_batches_and_padding_change_no_vector(
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


@pytest.mark.parametrize("pooling", ["own", "tokens"])
def test_a_cache_has_a_row_per_caption_in_any_number_of_shards(pooling: str, few: Path, bert: Path, tmp_path: Path) -> None:
    captions = list_extractor_inputs(load_dataset_file(few), "text", raw=True)
    extractor = of_bert(bert, pooling=pooling)
    for n_shards in (1, 3):
        cache = extracted_cache(few, extractor, tmp_path / str(n_shards) / "demo_x.h5", n_shards)
        assert (cache.kind, cache.row_kind) == ("text", extractor.config.row_kind)
        assert cache.ids.tolist() == [item.id for item in captions]
        assert verify_inputs(cache) == "unchanged"
        reader = FeatureReader(cache)
        for k in (0, 7, len(captions) - 1):
            if pooling == "own":
                found = reader.read_rows(np.arange(len(captions)))[k]
            else:
                tokens = reader.read_sets(np.asarray([k]))
                found = tokens.features[tokens.mask]
            expected = slow_bert(bert, captions[k].raw, "mean" if pooling == "own" else "tokens")
            np.testing.assert_allclose(found.astype(np.float32), expected, atol=1e-3)
    assert pooling == "own" or f"{len(captions)} captions with " in cache.describe()


def command(demo: Path, out: Path, folder: Path, *more: object) -> list[object]:
    options = ["--out", out, "--shards", 3, *sets("model=tests/tiny", f"weights={folder}"), *more]
    return ["text", "--dataset", demo, "--feature", "minilm", *options]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pooling", ["own", "tokens"])
def test_the_encoder_of_a_cache_reads_other_captions(pooling: str, few: Path, bert: Path, clip: str, tmp_path: Path) -> None:
    for extractor in (of_bert(bert, pooling=pooling, prompt="the "), of_clip(clip, pooling=pooling, seed=3)):
        out = tmp_path / extractor.config.model.replace("/", "_") / "demo_x.h5"
        again = load_text_input_encoder(extracted_cache(few, extractor, out, 2), device="cpu").encode_inputs(items(TEXTS))
        for one, other in zip(again, extractor.encode_inputs(items(TEXTS)), strict=True):
            assert torch.equal(one, other)


def test_shards_by_another_encoder_or_of_other_punctuation_are_refused(
    few: Path, bert: Path, tmp_path: Path, edit: Edit, fails: Fails
) -> None:
    own, out = Path(shutil.copytree(few.parent, tmp_path / "data")) / few.name, tmp_path / "demo_minilm.h5"
    succeed(main, *command(own, out, bert))
    for number, (change, said) in enumerate(OTHER_NETWORKS):
        line = fails(main, *command(own, out, tiny_bert(tmp_path / str(number), **change)))
        assert f"{said}_sha256" in line
        assert "was made with other settings" in line
    settings = {"pooling=first": "pooling: own -> first", "prompt=the": "prompt", "max_length=7": "max_length"}
    for setting, said in settings.items():
        assert said in fails(main, *command(own, out, bert, "--set", setting)).replace("'", "")
    edit(own, lambda content: content["images"][0]["sentences"][0].update(raw="A disc!"))
    assert "was made from another caption" in fails(main, *command(own, out, bert))
    assert "was made from another caption" in fails(main, "verify", out)


def test_captions_are_read_by_no_other_encoder_than_that_of_the_cache(few: Path, bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "mine"))
    cache = extracted_cache(few, of_bert(folder), tmp_path / "demo_x.h5")
    names = {"weights": "other weights", "tokenizer": "another tokenizer", "network": "network_sha256"}
    for change, said in OTHER_NETWORKS:
        tiny_bert(folder, **change)
        with pytest.raises(UserError, match=names[said]):
            load_text_input_encoder(cache)
    folder.rename(tmp_path / "away")
    with pytest.raises(UserError, match="no folder with a text encoder"):
        load_text_input_encoder(cache)


def test_a_cache_of_another_data_set_is_made_like_one(few: Path, drawn: Path, bert: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "demo_minilm.h5", tmp_path / "drawn.h5"
    succeed(main, *command(few, out, bert, "--set", "prompt=the "))
    succeed(main, "text", "--dataset", drawn, "--like", out, "--out", other, "--shards", "1")
    assert open_cache(other).extractor_identity == open_cache(out).extractor_identity
