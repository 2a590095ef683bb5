"""Features of phrases: a row for each different text, fitted on the phrases of the training captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer

from tests.features.conftest import Edit, Fails, extracted_cache
from tests.features.drawn_phrases import TEXTS, drawn_phrases, without_phrases
from vse.features.cache.feature_cache import FeatureCache, open_cache
from vse.features.cache.reader import FeatureReader, check_text_unit
from vse.features.cache.rows import ExtractorInput
from vse.features.cli import extract_main as main
from vse.features.extraction import extract_shards, verify_inputs
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder, load_encoder
from vse.features.extractors.hglmm import HglmmEncoder
from vse.features.extractors.text import TextExtractor, load_text_input_encoder
from vse.features.extractors.words import TfidfEncoder
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import HglmmConfig, MeanVectorConfig, TextConfig, TfidfConfig, select_phrase_words
from vse.pipeline.dataset.dataset import list_mentions, list_phrase_texts, load_dataset_file
from vse.pipeline.errors import UserError

SMALL: dict[str, Any] = {"trained_dim": 8, "trained_epochs": 2, "min_count": 1, "dtype": "float32", "of": "phrases"}
TFIDF = TfidfConfig(name="tfidf_phrases", min_count=1, dtype="float32", of="phrases")
MEAN = MeanVectorConfig(name="mean_vector_phrases", **SMALL)
HGLMM = HglmmConfig(name="hglmm_phrases", centres=3, iterations=3, pca=10, **SMALL)
FITTED = [TFIDF, MEAN, HGLMM]


def fitted_cache(dataset: Path, config: Any, out: Path, n_shards: int = 1) -> FeatureCache:
    return extracted_cache(dataset, CaptionExtractor(config, fit_encoder(dataset, config, encoder_path(out))), out, n_shards)


def encoded_by(bert: Path, **settings: Any) -> TextExtractor:
    return TextExtractor(TextConfig(name="x", model="tests/tiny", weights=str(bert), dtype="float32", **settings))


def training_phrases(dataset: Path) -> list[list[str]]:
    return [m.text.split() for m in list_mentions(load_dataset_file(dataset)) if m.image.split == "train"]


@pytest.mark.parametrize("config", FITTED, ids=lambda config: config.name)
def test_a_row_is_a_different_text_in_any_number_of_shards(config: Any, few: Path, tmp_path: Path) -> None:
    texts = list_phrase_texts(load_dataset_file(few))
    found = []
    for n_shards in (1, 3):
        cache = fitted_cache(few, config, tmp_path / str(n_shards) / f"demo_{config.name}.h5", n_shards)
        assert (cache.kind, cache.row_kind, cache.text_unit) == ("text", "vectors", "phrases")
        assert cache.ids.tolist() == list(range(len(texts)))
        assert cache.provenance["config"]["of"] == "phrases"
        assert cache.provenance["counts"] == {"phrases without a known word": 0}
        assert cache.describe().startswith(f"{len(texts)} phrase rows of ")
        assert verify_inputs(cache) == "unchanged"
        found.append(FeatureReader(cache).read_rows(cache.ids))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    reader = load_text_input_encoder(cache)
    (asked,) = reader.encode_inputs([ExtractorInput(0, tokens=tuple(texts[7].upper().split()))])
    np.testing.assert_allclose(asked[0].numpy(), found[0][7], atol=1e-6)


def test_rarity_is_counted_over_all_phrases_of_the_training_captions(demo: Path, tmp_path: Path) -> None:
    phrases = training_phrases(demo)
    plain = TfidfVectorizer(analyzer=lambda phrase: phrase).fit(phrases)
    cache = fitted_cache(demo, TFIDF, tmp_path / "demo_tfidf_phrases.h5")
    texts = list_phrase_texts(load_dataset_file(demo))
    np.testing.assert_allclose(
        FeatureReader(cache).read_rows(cache.ids), plain.transform([text.split() for text in texts]).toarray(), atol=1e-6
    )


def test_principal_components_are_those_of_the_different_training_phrases(demo: Path, tmp_path: Path) -> None:
    encoder = load_encoder(fit_encoder(demo, HGLMM, tmp_path / "e.safetensors"))
    assert isinstance(encoder, HglmmEncoder)
    different = [list(phrase) for phrase in dict.fromkeys(map(tuple, training_phrases(demo)))]
    assert len(different) < len(training_phrases(demo))
    (blocks,) = list(encoder.iter_normalized_fisher_vectors(encoder.projected_mixtures[0].mixture, different, 10_000))
    slow = PCA(n_components=10, svd_solver="full").fit(blocks.double().numpy())
    assert encoder.projected_mixtures[0].pca_axes is not None
    cosines = np.abs((encoder.projected_mixtures[0].pca_axes.double().numpy() * slow.components_).sum(1))
    assert (cosines[:5] > 0.999).all()


def test_word_vectors_are_trained_on_captions_as_without_phrases(demo: Path, tmp_path: Path) -> None:
    of_captions = MEAN.model_copy(update={"of": "captions"})
    one, other = (load_encoder(fit_encoder(demo, c, tmp_path / f"{c.of}.safetensors")) for c in (MEAN, of_captions))
    words = ["red", "circle", "large"]
    np.testing.assert_array_equal(one.encode([[word] for word in words]), other.encode([[word] for word in words]))


def test_stop_words_are_dropped_from_phrases_of_training_of_the_cache_and_of_a_search(drawn: Path, tmp_path: Path) -> None:
    config = TFIDF.model_copy(update={"stop_words": "drop"})
    cache = fitted_cache(drawn, config, tmp_path / "drawn_tfidf_phrases.h5")
    encoder = load_encoder(encoder_path(cache.path))
    assert isinstance(encoder, TfidfEncoder)
    assert encoder.words == ["balls", "beach", "empty", "man", "night", "two"]
    (asked,) = load_text_input_encoder(cache).encode_inputs([ExtractorInput(0, tokens=("The", "Man"))])
    np.testing.assert_array_equal(asked[0].numpy(), FeatureReader(cache).read_rows(np.asarray([0]))[0])
    assert cache.ids.tolist() == list(range(len(TEXTS)))
    with pytest.raises(UserError, match="config.stop_words: drop -> None"):
        fit_encoder(drawn, TFIDF, encoder_path(cache.path))


@pytest.mark.parametrize("stop_words", ["keep", "drop"])
def test_a_text_encoder_reads_phrases_as_their_words(drawn: Path, bert: Path, tmp_path: Path, stop_words: str) -> None:
    extractor = encoded_by(bert, of="phrases", stop_words=stop_words)
    cache = extracted_cache(drawn, extractor, tmp_path / "drawn_x.h5", 2)
    assert verify_inputs(cache) == "unchanged"
    read = TEXTS if stop_words == "keep" else ["man", "two balls", "night", "empty beach", "red hat"]
    (expected,) = encoded_by(bert).encode_inputs([ExtractorInput(0, raw=text) for text in read])
    np.testing.assert_allclose(FeatureReader(cache).read_rows(cache.ids), expected, atol=1e-6)
    (asked,) = load_text_input_encoder(cache).encode_inputs([ExtractorInput(0, tokens=("A", "MAN"), raw="A MAN!")])
    np.testing.assert_allclose(asked, expected[:1], atol=1e-6)


def test_phrases_that_changed_are_named(drawn: Path, tmp_path: Path, edit: Edit, fails: Fails) -> None:
    own, out = drawn_phrases(tmp_path / "data"), tmp_path / "drawn_tfidf_phrases.h5"
    fitted_cache(own, TFIDF, out, 2)
    edit(own, lambda content: content["images"][2]["sentences"][0]["tokens"].__setitem__(5, "cap"))
    extractor = CaptionExtractor(TFIDF, encoder_path(out))
    with pytest.raises(UserError, match="was made from another phrase 4: its SHA-256 differs; delete that shard"):
        extract_shards(own, extractor, out, 2)
    assert "was made from another phrase 4" in fails(main, "verify", out)
    edit(own, lambda content: content["images"][0]["sentences"][1]["tokens"].__setitem__(1, "boy"))
    with pytest.raises(UserError, match="training_phrases_sha256"):
        fit_encoder(own, TFIDF, encoder_path(out))


@pytest.mark.parametrize("feature", ["tfidf_phrases", "minilm_phrases"])
def test_a_data_set_without_phrases_is_named(feature: str, tmp_path: Path, bert: Path, fails: Fails) -> None:
    own = without_phrases(tmp_path / "data")
    sets = ["--set", "model=tests/tiny", "--set", f"weights={bert}"] if feature == "minilm_phrases" else []
    name = load_feature_preset(feature).extractor_name()
    line = fails(main, name, "--dataset", own, "--feature", feature, "--out", tmp_path / "x.h5", *sets)
    assert f"{own}: no " in line
    assert "phrases" in line


def test_what_reads_captions_refuses_phrases_and_the_other_way_round(drawn: Path, cache: Path, tmp_path: Path) -> None:
    phrases = fitted_cache(drawn, TFIDF, tmp_path / "drawn_tfidf_phrases.h5")
    captions = fitted_cache(drawn, TFIDF.model_copy(update={"of": "captions"}), tmp_path / "drawn_tfidf.h5")
    check_text_unit(phrases, "phrases")
    check_text_unit(captions, "captions")
    with pytest.raises(UserError, match="5 phrase rows of 8 float32; features of captions are needed.* of: captions"):
        check_text_unit(phrases, "captions")
    with pytest.raises(UserError, match="4 text rows of .* float32; features of phrases are needed.* of: phrases"):
        check_text_unit(captions, "phrases")
    with pytest.raises(UserError, match="66 image rows .* features of phrases are needed"):
        check_text_unit(open_cache(cache), "phrases")


def test_captions_keep_their_stop_words() -> None:
    with pytest.raises(UserError, match="stop_words: drop goes with of: phrases"):
        load_feature_preset("tfidf", sets=["stop_words=drop"])
    assert "of" not in load_feature_preset("tfidf").list_cache_key_settings()
    assert "stop_words" not in load_feature_preset("minilm").list_cache_key_settings()


def test_a_preset_of_phrases_or_truths_differs_from_its_other_one_in_that_alone() -> None:
    phrases = [(name, f"{name}_phrases", {"of": "phrases"}) for name in ("hglmm", "tfidf", "mean_vector", "minilm")]
    boxes = ("boxes", "boxes_resnet", "boxes_effnet", "boxes_effnet_map", "boxes_effnet_levels")
    for name, other, change in [*phrases, *((name, f"{name}_truth", {"boxes": "phrases"}) for name in boxes)]:
        for dataset in (None, "demo"):
            assert {**load_feature_preset(name, dataset).list_cache_key_settings(), **change} == load_feature_preset(
                other, dataset
            ).list_cache_key_settings()


@pytest.mark.parametrize(
    ("phrase", "kept", "content"),
    [
        ("A red hat", "a red hat", "red hat"),
        ("two of the dogs", "two of the dogs", "two dogs"),
        ("her own front yard", "her own front yard", "front yard"),
        ("Them", "them", "them"),
        ("each other", "each other", "each other"),
    ],
)
def test_a_phrase_is_read_in_lower_case_and_without_stop_words_if_it_has_others(phrase: str, kept: str, content: str) -> None:
    assert " ".join(select_phrase_words(phrase.split())) == kept
    assert " ".join(select_phrase_words(phrase.split(), drop_stop_words=True)) == content
