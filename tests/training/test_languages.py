"""Training and testing on captions in several languages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.conftest import COMMAND, Fails, assert_same, done, experiment, weights
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import parse_provenance, read_embeddings
from vse.features.extraction import extract_shards, merge_feature
from vse.features.extractors.captions import CaptionExtractor, encoder_path, fit_encoder
from vse.features.settings.captions import TfidfConfig
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.pipeline.imports.added_captions import add_captions
from vse.training.cli import embed_main, train_main
from vse.training.experiment import load_experiment
from vse.training.options import TrainInputs
from vse.training.training import train


@pytest.fixture(scope="module")
def german(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a second language: each caption spelled backwards. Read only."""
    folder = tmp_path_factory.mktemp("languages")
    captions = {
        image.file: [" ".join(word[::-1] for word in caption.tokens) for caption in image.captions]
        for image in load_dataset_file(demo).images
    }
    (folder / "de.json").write_text(json.dumps(captions))
    return add_captions(demo, folder / "de.json", "de", out=folder / "data" / "demo_de")


def trained(cache: Path, dataset: Path | None, out: Path, *sets: str) -> Path:
    return train(cache, experiment(*sets), out=out, inputs=TrainInputs(captions=dataset))


def test_one_language_trains_the_same_model_as_a_data_set_of_this_language(
    run: Path, cache: Path, german: Path, tmp_path: Path
) -> None:
    """The features of the images are those of the original data set."""
    assert_same(weights(run), weights(trained(cache, german, tmp_path / "en", "train.languages=[en]")))
    both = trained(cache, german, tmp_path / "both", "train.epochs=1")
    listed = trained(cache, german, tmp_path / "listed", "train.languages=[de,en]", "train.epochs=1")
    assert_same(weights(both), weights(listed))
    n_pairs = [json.loads((folder / "run.json").read_text())["n_train_pairs"] for folder in (run, both)]
    assert n_pairs == [240, 480]


def test_the_option_sets_the_languages_and_the_test_embeddings_have_all(
    cache: Path, german: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["--features", cache, "--captions", german, *COMMAND, "--languages", "en", "--out", tmp_path / "run"]
    done(train_main, *given)
    done(embed_main, tmp_path / "run")
    embeddings = read_embeddings(tmp_path / "run" / "test.h5")
    assert embeddings.dataset == "demo_de"
    assert embeddings.languages == "en,de"
    assert embeddings.caption_languages is not None
    assert embeddings.caption_languages.tolist() == ([0] * 5 + [1] * 5) * 12
    for language in ("en", "de"):
        done(eval_main, tmp_path / "run" / "test.h5", "--language", language, "--out", tmp_path / f"{language}.json")
    rsums = [json.loads((tmp_path / f"{one}.json").read_text())["protocols"]["full"]["rsum"] for one in ("en", "de")]
    assert rsums[0] > rsums[1]
    unknown = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert any("% ) in captions in de" in line.replace("%)", "% )") for line in unknown)  # the share is named
    counts = parse_provenance(embeddings)["unknown_words"]
    assert counts["words"] > counts["of"] / 3  # nearly all German words


def test_captions_that_the_cache_lacks_are_encoded(demo: Path, cache: Path, german: Path, tfidf: Path, tmp_path: Path) -> None:
    """A run on the English data set is tested in German: its caption encoder encodes the German captions."""
    sets = ["model.caption_encoder=linear", "caption_feature=tfidf"]
    english = train(cache, experiment(*sets), out=tmp_path / "run")
    done(embed_main, english, "--captions", german)
    embeddings = read_embeddings(english / "demo_de_test.h5")
    assert len(embeddings.caption_ids) == 120
    own = read_embeddings(done_embed(english))
    assert embeddings.captions is not None
    assert own.captions is not None
    is_english = np.isin(embeddings.caption_ids, own.caption_ids)
    np.testing.assert_allclose(embeddings.captions[is_english], own.captions, atol=1e-5)


def done_embed(run: Path) -> Path:
    done(embed_main, run)
    return run / "test.h5"


def test_the_caption_cache_of_the_data_set_comes_before_that_of_its_parent(
    cache: Path, german: Path, tfidf: Path, tmp_path: Path
) -> None:
    """Without ``--caption-features``: features/demo_de_tfidf.h5 next to features/demo_tfidf.h5."""
    config, out = TfidfConfig(name="tfidf", min_count=2), cache.with_name("demo_de_tfidf.h5")
    extract_shards(german, CaptionExtractor(config, fit_encoder(german, config, encoder_path(out))), out, 1)
    merge_feature(german, out, 1)
    sets = ["--set", "model.caption_encoder=linear", "--set", "caption_feature=tfidf", "--out", tmp_path / "run"]
    done(train_main, "--features", cache, "--captions", german, *COMMAND, *sets)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["caption_features"]["path"].endswith("demo_de_tfidf.h5")
    done(embed_main, tmp_path / "run")
    out.unlink()


def test_wrong_languages_are_one_line(cache: Path, german: Path, tmp_path: Path, fails: Fails) -> None:
    given = ["--features", cache, "--captions", german, *COMMAND, "--out", tmp_path / "run", "--languages"]
    assert "did you mean 'de'" in fails(train_main, *given, "dee") or "'dee'" in fails(train_main, *given, "dee")
    assert "names a language twice" in fails(train_main, *given, "de,de")
    assert "not a language" in fails(train_main, *given, "German!")
    assert "its captions name no language" in fails(
        train_main, "--features", cache, *COMMAND, "--out", tmp_path / "run", "--languages", "en"
    )
    assert load_experiment("vsepp").train.languages == []
