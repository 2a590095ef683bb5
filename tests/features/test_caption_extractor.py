from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import TfidfVectorizer

from vse.features.cache.feature_cache import open_cache, verify_cache
from vse.features.cache.reader import FeatureReader
from vse.features.cache.rows import dataset_items
from vse.features.cli import main
from vse.features.extraction import extract_shards, merge
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder, load_encoder
from vse.features.extractors.hglmm import HglmmEncoder, fit_principal_components
from vse.features.extractors.words import TfidfEncoder, WordVectors
from vse.features.settings import load_feature
from vse.features.settings.texts import HglmmConfig, MeanVectorConfig, TfidfConfig
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
    """A fitted HGLMM encoder of the demo. Read only."""
    return fit_encoder(demo, HGLMM, tmp_path_factory.mktemp("encoder") / "demo_hglmm.encoder.safetensors")


def training(demo: Path) -> list[list[str]]:
    return [list(c.tokens) for image in load_dataset_file(demo).split("train") for c in image.captions]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_a_caption_feature_has_a_row_per_caption_in_any_number_of_shards(config: Any, demo: Path, tmp_path: Path) -> None:
    found = []
    for n_shards in (1, 4):
        out = tmp_path / f"{n_shards}" / f"demo_{config.name}.h5"
        extractor = CaptionExtractor(config, fit_encoder(demo, config, encoder_path(out)))
        extract_shards(demo, extractor, out, n_shards)
        cache = verify_cache(merge(demo, out, n_shards))
        assert cache.kind == "text"
        assert cache.ids.tolist() == [item.id for item in dataset_items(load_dataset_file(demo), "text")]
        found.append(FeatureReader(cache).rows(np.arange(len(cache.ids))))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_tfidf_is_scikit_learn_s_on_the_training_captions(demo: Path, tmp_path: Path) -> None:
    captions = training(demo)
    plain = TfidfVectorizer(analyzer=lambda caption: caption, min_df=2).fit(captions)
    encoder = load_encoder(fit_encoder(demo, TFIDF, tmp_path / "e.safetensors"))
    others = [list(c.tokens) for image in load_dataset_file(demo).split("test") for c in image.captions]
    np.testing.assert_array_equal(encoder.encode(others), plain.transform(others).toarray().astype(np.float32))


def test_the_mean_vector_is_a_mean() -> None:
    from vse.features.extractors.words import MeanVectorEncoder

    encoder = MeanVectorEncoder(WordVectors(("a", "b"), np.array([[3, 0], [1, 4]], np.float32)))
    found = encoder.encode([["a", "b"], ["b", "x"], ["x"]])
    expected = torch.tensor([[2.0, 2.0], [1.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected))


def test_principal_components_are_scikit_learn_s(demo: Path, fitted: Path) -> None:
    encoder = load_encoder(fitted)
    assert isinstance(encoder, HglmmEncoder)
    mixture, captions = encoder.parts[0].mixture, training(demo)
    vectors = torch.cat(list(encoder.fisher_blocks(mixture, captions, 1000))).double().numpy()
    assert vectors.shape == (len(captions), 2 * 3 * 8)
    plain = PCA(10, svd_solver="full").fit(vectors)
    centre, components = fit_principal_components(encoder, mixture, captions, 10, chunk=37)
    np.testing.assert_allclose(centre, plain.mean_, atol=1e-5)
    alike = np.abs(np.sum(components.numpy() * plain.components_, axis=1))
    assert (alike[:5] > 0.999).all(), "the axes, but for their sign"
    test = [list(c.tokens) for image in load_dataset_file(demo).split("test") for c in image.captions]
    lengths = np.linalg.norm(encoder.encode(test).numpy(), axis=1)
    whole = torch.cat(list(encoder.fisher_blocks(mixture, test, 9))).double().numpy()
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


def test_each_mixture_is_of_its_kind(demo: Path, tmp_path: Path) -> None:
    config = HGLMM.model_copy(update={"mixtures": ["hybrid", "laplacian", "gaussian"]})
    encoder = load_encoder(fit_encoder(demo, config, tmp_path / "e.safetensors"))
    assert isinstance(encoder, HglmmEncoder)
    hybrid, laplacian, gaussian = (part.mixture.laplacian for part in encoder.parts)
    assert hybrid.any()
    assert not hybrid.all()
    assert laplacian.all()
    assert not gaussian.any()


def test_a_single_hybrid_mixture_has_the_settings_and_the_names_that_it_had_before_there_were_others(fitted: Path) -> None:
    assert "mixtures" not in HGLMM.content()
    assert GMM_HGLMM.content()["mixtures"] == ["gaussian", "hybrid"]
    encoder = load_encoder(fitted)
    parameters = ("priors", "median", "deviation", "mean", "variance", "laplacian")
    names = {"words", "vectors", "scale", "normalized", "unmixing", "centre", "components"}
    assert encoder.tensors().keys() == names | {f"mixture.{parameter}" for parameter in parameters}


def test_an_encoder_is_built_again_from_its_tensors(demo: Path, fitted: Path, tmp_path: Path) -> None:
    for file in (fitted, fit_encoder(demo, GMM_HGLMM, tmp_path / "e.safetensors")):
        encoder = load_encoder(file)
        again = type(encoder).from_tensors(encoder.tensors(), torch.device("cpu"))
        assert again.dim == encoder.dim == 10
        for name, tensor in again.tensors().items():
            torch.testing.assert_close(tensor, encoder.tensors()[name], rtol=0, atol=0)
        torch.testing.assert_close(again.encode(training(demo)), encoder.encode(training(demo)), rtol=0, atol=0)


def test_gmm_hglmm_has_as_many_numbers_as_hglmm() -> None:
    for dataset in (None, "demo"):
        one, two = load_feature("hglmm", dataset), load_feature("gmm_hglmm", dataset)
        assert isinstance(one, HglmmConfig)
        assert isinstance(two, HglmmConfig)
        assert (one.mixtures, two.mixtures) == (["hybrid"], ["gaussian", "hybrid"])
        assert one.pca == 2 * two.pca


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "mixtures: List should have at least 1 item"),
        ("[hybrid, gaussian, hybrid]", "mixtures hybrid, gaussian, hybrid"),
        ("[gausian]", "mixtures.0: Input should be 'hybrid', 'gaussian' or 'laplacian'"),
        ("gaussian", "mixtures: Input should be a valid list"),
    ],
)
def test_wrong_mixtures_are_named(value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_feature("hglmm", sets=[f"mixtures={value}"])


def test_only_training_captions_are_fitted_to(own_demo: Path, tmp_path: Path, edit: Callable[..., Path]) -> None:
    before = load_encoder(fit_encoder(own_demo, TFIDF, tmp_path / "a.safetensors"))

    def change(content: Any) -> None:
        for image in content["images"]:
            if image["split"] != "train":
                for sentence in image["sentences"]:
                    sentence.update(tokens=["zebra", "zebra"], phrases=[])

    after = load_encoder(fit_encoder(edit(own_demo, change), TFIDF, tmp_path / "b.safetensors"))
    assert isinstance(before, TfidfEncoder)
    assert isinstance(after, TfidfEncoder)
    assert before.words == after.words
    assert "zebra" not in after.words
    np.testing.assert_array_equal(before.idf, after.idf)


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_a_caption_without_a_known_word_is_zeros_counted_and_reported(
    config: Any, own_demo: Path, tmp_path: Path, edit: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    def change(content: Any) -> None:
        content["images"][-1]["sentences"][0].update(tokens=["qwrtz", "zrtwq"], phrases=[])

    edit(own_demo, change)
    out = tmp_path / f"demo_{config.name}.h5"
    extractor = CaptionExtractor(config, fit_encoder(own_demo, config, encoder_path(out)))
    extract_shards(own_demo, extractor, out, 2)
    cache = open_cache(merge(own_demo, out, 2))
    caption = load_dataset_file(own_demo).images[-1].captions[0]
    reader = FeatureReader(cache)
    assert not reader.rows(reader.positions([caption.sentid])).any()
    assert cache.provenance["counts"] == {"captions without a known word": 1}
    assert "1 captions without a known word" in caplog.text


def test_a_saved_encoder_gives_the_same_vectors_of_new_captions(demo: Path, fitted: Path) -> None:
    captions = [["a", "red", "disc"], ["a", "a", "a"], [], ["unheard"]]
    one, two = load_encoder(fitted).encode(captions), load_encoder(fitted).encode(captions)
    assert one.shape == (4, 10)
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not one[2:].any()
    assert one[:2].any(dim=1).all()


def test_the_order_of_words_does_not_matter(fitted: Path) -> None:
    encoder = load_encoder(fitted)
    one, other = encoder.encode([["red", "disc", "on", "grass"], ["grass", "on", "disc", "red"]])
    torch.testing.assert_close(one, other)


def test_a_fit_is_kept_and_one_of_other_settings_is_refused(demo: Path, fitted: Path) -> None:
    before = fitted.stat().st_mtime_ns
    assert fit_encoder(demo, HGLMM, fitted) == fitted
    assert fitted.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="config.centres: 3 -> 4"):
        fit_encoder(demo, HGLMM.model_copy(update={"centres": 4}), fitted)
    with pytest.raises(UserError, match="config.mixtures: None -> .'gaussian', 'hybrid'."):
        fit_encoder(demo, HGLMM.model_copy(update={"mixtures": ["gaussian", "hybrid"]}), fitted)


def test_a_fit_with_other_words_or_captions_is_refused(
    demo: Path, own_demo: Path, fitted: Path, tmp_path: Path, edit: Callable[..., Path]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("a 1 2\nred 2 1\n")
    with pytest.raises(UserError, match="words_sha256: None -> "):
        fit_encoder(demo, HGLMM, fitted, words=words)
    edit(own_demo, lambda content: content["images"][0]["sentences"][0]["tokens"].append("indeed"))
    with pytest.raises(UserError, match="training_captions_sha256"):
        fit_encoder(own_demo, HGLMM, fitted)


@pytest.mark.parametrize("place", [0.3, 0.9, 0.999])
def test_an_encoder_with_a_flipped_byte_is_made_again_alone(place: float, demo: Path, fitted: Path, tmp_path: Path) -> None:
    own = tmp_path / "e.safetensors"
    content = bytearray(fitted.read_bytes())
    content[int(len(content) * place)] ^= 1
    own.write_bytes(content)
    with pytest.raises(UserError, match="or its bytes changed; fit it again with vse-extract fit"):
        load_encoder(own)
    assert fit_encoder(demo, HGLMM, own).read_bytes() == fitted.read_bytes()


def test_too_few_words_for_a_mixture_are_said(demo: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("a 1 2 3\nred 2 1 1\n")
    with pytest.raises(UserError, match="2 words .* too few for a mixture"):
        fit_encoder(demo, HGLMM, tmp_path / "e.safetensors", words=words)


def test_words_of_another_language_are_said(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    words = tmp_path / "words.txt"
    words.write_text("chien 1 2\nrouge 2 1\n")
    line = fails(main, "mean_vector", "--dataset", demo, "--out", tmp_path / "x.h5", "--words", words)
    assert "no word of the captions has a vector" in line
    assert "no such file" in fails(main, "mean_vector", "--dataset", demo, "--out", tmp_path / "x.h5", "--words", "gone")


def test_the_commands_fit_extract_and_verify(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo_tfidf.h5"
    for arguments in (["fit", "--feature", "tfidf"], ["tfidf", "--shards", "2"]):
        with pytest.raises(SystemExit) as stop:
            main([arguments[0], "--dataset", str(demo), "--out", str(out), *arguments[1:]])
        assert stop.value.code == 0
    with pytest.raises(SystemExit):
        main(["verify", str(out)])
    assert "330 text rows" in capsys.readouterr().out


def test_a_single_shard_needs_a_fit_of_the_same_settings(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    """Jobs on many machines must not each fit an encoder of their own."""
    command = ["tfidf", "--dataset", demo, "--out", tmp_path / "demo_tfidf.h5", "--shards", "2", "--shard", "1"]
    assert "no such encoder" in fails(main, *command)
    fit_encoder(demo, TFIDF, encoder_path(tmp_path / "demo_tfidf.h5"))
    assert "config.min_count: 2 -> 4" in fails(main, *command, "--set", "dtype=float32")
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in [*command, "--set", "dtype=float32", "--set", "min_count=2"]])
    assert stop.value.code == 0


def test_a_feature_is_made_by_its_own_command(demo: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    line = fails(main, "tfidf", "--dataset", demo, "--feature", "fc7", "--out", tmp_path / "x.h5")
    assert "vse-extract cnn, not by vse-extract tfidf" in line
    assert "has no encoder to fit" in fails(main, "fit", "--dataset", demo, "--feature", "fc7", "--out", tmp_path / "x.h5")
