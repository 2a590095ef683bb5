from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer

from tests.features.conftest import Edit, Fails, extracted_cache, succeed
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import list_extractor_inputs
from vse.features.cli import extract_main as main
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder, load_encoder
from vse.features.extractors.hglmm import HglmmEncoder, fit_principal_components
from vse.features.extractors.words import MeanVectorEncoder, TfidfEncoder, WordVectors
from vse.features.settings import load_feature_preset
from vse.features.settings.captions import HglmmConfig, MeanVectorConfig, TfidfConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.errors import UserError

SMALL: dict[str, Any] = {"trained_dim": 8, "trained_epochs": 2, "min_count": 1}
HGLMM = HglmmConfig(name="hglmm", centres=3, iterations=3, pca=10, dtype="float32", **SMALL)
GMM_HGLMM = HGLMM.model_copy(update={"name": "gmm_hglmm", "mixtures": ["gaussian", "hybrid"], "pca": 5})
MEAN = MeanVectorConfig(name="mean_vector", dtype="float32", **SMALL)
TFIDF = TfidfConfig(name="tfidf", min_count=2, dtype="float32")
ALL = [TFIDF, MEAN, HGLMM, GMM_HGLMM]


@pytest.fixture(scope="module")
def fitted(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_encoder(demo, HGLMM, tmp_path_factory.mktemp("encoder") / "demo_hglmm.encoder.safetensors")


def training(demo: Path) -> list[list[str]]:
    return [list(c.tokens) for image in load_dataset_file(demo).split("train") for c in image.captions]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_a_caption_feature_has_a_row_per_caption_in_any_number_of_shards(config: Any, few: Path, tmp_path: Path) -> None:
    found = []
    for n_shards in (1, 4):
        out = tmp_path / f"{n_shards}" / f"demo_{config.name}.h5"
        extractor = CaptionExtractor(config, fit_encoder(few, config, encoder_path(out)))
        cache = extracted_cache(few, extractor, out, n_shards)
        assert cache.kind == "text"
        assert cache.ids.tolist() == [item.id for item in list_extractor_inputs(load_dataset_file(few), "text")]
        found.append(FeatureReader(cache).read_rows(np.arange(len(cache.ids))))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_tfidf_is_scikit_learn_s_on_the_training_captions(demo: Path, tmp_path: Path) -> None:
    captions = training(demo)
    plain = TfidfVectorizer(analyzer=lambda caption: caption, min_df=2).fit(captions)
    encoder = load_encoder(fit_encoder(demo, TFIDF, tmp_path / "e.safetensors"))
    others = [list(c.tokens) for image in load_dataset_file(demo).split("test") for c in image.captions]
    np.testing.assert_array_equal(encoder.encode(others), plain.transform(others).toarray().astype(np.float32))


def test_the_mean_vector_is_a_mean() -> None:
    encoder = MeanVectorEncoder(WordVectors(("a", "b"), np.array([[3, 0], [1, 4]], np.float32)))
    found = encoder.encode([["a", "b"], ["b", "x"], ["x"]])
    expected = torch.tensor([[2.0, 2.0], [1.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected))


def test_principal_components_are_scikit_learn_s(demo: Path, fitted: Path) -> None:
    encoder = load_encoder(fitted)
    assert isinstance(encoder, HglmmEncoder)
    mixture, captions = encoder.projected_mixtures[0].mixture, training(demo)
    vectors = torch.cat(list(encoder.iter_normalized_fisher_vectors(mixture, captions, 1000))).double().numpy()
    assert vectors.shape == (len(captions), 2 * 3 * 8)
    plain = PCA(10, svd_solver="full").fit(vectors)
    centre, components = fit_principal_components(encoder, mixture, captions, 10, chunk=37)
    np.testing.assert_allclose(centre, plain.mean_, atol=1e-5)
    alike = np.abs(np.sum(components.numpy() * plain.components_, axis=1))
    assert (alike[:5] > 0.999).all(), "the axes, but for their sign"
    test = [list(c.tokens) for image in load_dataset_file(demo).split("test") for c in image.captions]
    lengths = np.linalg.norm(encoder.encode(test).numpy(), axis=1)
    whole = torch.cat(list(encoder.iter_normalized_fisher_vectors(mixture, test, 9))).double().numpy()
    np.testing.assert_allclose(lengths, np.linalg.norm(plain.transform(whole), axis=1), rtol=0.02)


@pytest.mark.parametrize("changes", [{"pca": 10}, {"pca": None}, {"pca": 10, "normalize": True, "pca_captions": 50}], ids=str)
def test_mixtures_stand_side_by_side(changes: dict[str, Any], demo: Path, tmp_path: Path) -> None:
    captions = [*training(demo)[:30], ["unheard"]]

    def encoded(mixtures: list[str]) -> torch.Tensor:
        config = HGLMM.model_copy(update={"mixtures": mixtures, **changes})
        encoder = load_encoder(fit_encoder(demo, config, tmp_path / f"{'-'.join(mixtures)}.safetensors"))
        found = encoder.encode(captions)
        assert found.shape == (31, encoder.dim)
        return found

    one, other = encoded(["laplacian"]), encoded(["hybrid"])
    assert not torch.equal(one, other)
    torch.testing.assert_close(encoded(["laplacian", "hybrid"]), torch.cat([one, other], dim=1), rtol=0, atol=0)


def test_an_encoder_is_built_again_from_its_tensors(demo: Path, fitted: Path, tmp_path: Path) -> None:
    parameters = ("priors", "median", "deviation", "mean", "variance", "laplacian")
    names = {"words", "vectors", "scale", "normalized", "unmixing", "centre", "components"}
    assert load_encoder(fitted).tensors().keys() == names | {f"mixture.{name}" for name in parameters}, "as files have them"
    for file in (fitted, fit_encoder(demo, GMM_HGLMM, tmp_path / "e.safetensors")):
        encoder = load_encoder(file)
        again = type(encoder).from_tensors(encoder.tensors(), torch.device("cpu"))
        assert again.dim == encoder.dim == 10
        for name, tensor in again.tensors().items():
            torch.testing.assert_close(tensor, encoder.tensors()[name], rtol=0, atol=0)
        torch.testing.assert_close(again.encode(training(demo)), encoder.encode(training(demo)), rtol=0, atol=0)


def test_only_training_captions_are_fitted_to(own_demo: Path, tmp_path: Path, edit: Edit) -> None:
    before = load_encoder(fit_encoder(own_demo, TFIDF, tmp_path / "a.safetensors"))

    def change(content: Any) -> None:
        for image in content["images"]:
            if image["split"] != "train":
                for sentence in image["sentences"]:
                    sentence.update(tokens=["zebra", "zebra"], phrases=[])

    after = load_encoder(fit_encoder(edit(own_demo, change), TFIDF, tmp_path / "b.safetensors"))
    assert isinstance(before, TfidfEncoder) and isinstance(after, TfidfEncoder)  # noqa: PT018
    assert before.words == after.words
    assert "zebra" not in after.words
    np.testing.assert_array_equal(before.idf, after.idf)


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_a_caption_without_known_words_is_zeros(
    config: Any, few: Path, tmp_path: Path, edit: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    def change(content: Any) -> None:
        content["images"][-1]["sentences"][0].update(tokens=["qwrtz", "zrtwq"], phrases=[])

    own, out = edit(Path(shutil.copy(few, tmp_path)), change), tmp_path / f"demo_{config.name}.h5"
    extractor = CaptionExtractor(config, fit_encoder(own, config, encoder_path(out)))
    cache = extracted_cache(own, extractor, out, 2)
    caption = load_dataset_file(own).images[-1].captions[0]
    reader = FeatureReader(cache)
    assert not reader.read_rows(reader.find_rows([caption.sentid])).any()
    assert cache.provenance["counts"] == {"captions without a known word": 1}
    assert "1 captions without a known word" in caplog.text


def test_a_fit_is_kept_and_another_one_is_refused(
    demo: Path, own_demo: Path, fitted: Path, tmp_path: Path, edit: Edit
) -> None:
    before = fitted.stat().st_mtime_ns
    assert fit_encoder(demo, HGLMM, fitted) == fitted
    assert fitted.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="config.centres: 3 -> 4"):
        fit_encoder(demo, HGLMM.model_copy(update={"centres": 4}), fitted)
    with pytest.raises(UserError, match="config.mixtures: None -> .'gaussian', 'hybrid'."):
        fit_encoder(demo, HGLMM.model_copy(update={"mixtures": ["gaussian", "hybrid"]}), fitted)
    words = tmp_path / "words.txt"
    words.write_text("a 1 2\nred 2 1\n")
    with pytest.raises(UserError, match="words_sha256: None -> "):
        fit_encoder(demo, HGLMM, fitted, word_file=words)
    edit(own_demo, lambda content: content["images"][0]["sentences"][0]["tokens"].append("indeed"))
    with pytest.raises(UserError, match="training_captions_sha256"):
        fit_encoder(own_demo, HGLMM, fitted)


def test_an_encoder_with_a_flipped_byte_is_made_again_alone(demo: Path, fitted: Path, tmp_path: Path) -> None:
    own = tmp_path / "e.safetensors"
    for place in (0.3, 0.9, 0.999):
        content = bytearray(fitted.read_bytes())
        content[int(len(content) * place)] ^= 1
        own.write_bytes(content)
        with pytest.raises(UserError, match="or its bytes changed; fit it again with vse-extract fit"):
            load_encoder(own)
    assert fit_encoder(demo, HGLMM, own).read_bytes() == fitted.read_bytes()


def test_word_vectors_and_mixtures_that_do_not_fit_are_said(demo: Path, tmp_path: Path, fails: Fails) -> None:
    words, command = tmp_path / "words.txt", ["mean_vector", "--dataset", demo, "--out", tmp_path / "x.h5", "--words"]
    words.write_text("chien 1 2\nrouge 2 1\n")
    assert "no word of the captions has a vector" in fails(main, *command, words)
    assert "no such file" in fails(main, *command, "gone")
    words.write_text("a 1 2 3\nred 2 1 1\n")
    with pytest.raises(UserError, match="2 words .* too few for a mixture"):
        fit_encoder(demo, HGLMM, tmp_path / "e.safetensors", word_file=words)
    with pytest.raises(UserError, match="mixtures hybrid, gaussian, hybrid"):
        load_feature_preset("hglmm", sets=["mixtures=[hybrid, gaussian, hybrid]"])


def test_a_command_needs_its_own_feature_and_a_single_shard_a_fit_of_its_settings(
    demo: Path, tmp_path: Path, fails: Fails
) -> None:
    command = ["tfidf", "--dataset", demo, "--out", tmp_path / "demo_tfidf.h5", "--shards", "2", "--shard", "1"]
    assert "no such encoder" in fails(main, *command)
    fit_encoder(demo, TFIDF, encoder_path(tmp_path / "demo_tfidf.h5"))
    assert "config.min_count: 2 -> 4" in fails(main, *command, "--set", "dtype=float32")
    succeed(main, *command, "--set", "dtype=float32", "--set", "min_count=2")
    line = fails(main, "tfidf", "--dataset", demo, "--feature", "fc7", "--out", tmp_path / "x.h5")
    assert "vse-extract cnn, not by vse-extract tfidf" in line
    assert "has no encoder to fit" in fails(main, "fit", "--dataset", demo, "--feature", "fc7", "--out", tmp_path / "x.h5")
