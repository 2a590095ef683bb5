"""A correction that is stored with a run, and used by searches, indexes, packed models and the server."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.training.conftest import Capture, Fails, done, experiment, printed
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.eval.protocols.correction import correct_scores, read_bank_scores
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.cli import embed_main, search_main
from vse.training.options import TrainOptions
from vse.training.share.pack import pack
from vse.training.training import train

METHOD = "inverted-softmax:beta=20"


@pytest.fixture(scope="module")
def corrected(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a stored correction. Read only."""
    run = train(cache, experiment("loss.name=sum"), out=tmp_path_factory.mktemp("corrected") / "run")
    done(embed_main, run, "--correct", METHOD)
    return run


def expected_ids(run: Path, caption: int) -> list[int]:
    """The images for a caption of the test split, ordered by the scores that vse-eval --correct computes."""
    test = read_embeddings(run / "test.h5")
    result = correct_scores(test, read_bank_scores(run / "test.h5", test, "train"), "inverted-softmax", {"beta": 20.0})
    assert result.vectors is not None
    images, captions = result.vectors
    return [int(test.image_ids[row]) for row in np.argsort(-(images @ captions[caption]), kind="stable")]


def found_ids(capsys: Capture, demo: Path, *arguments: object) -> list[int]:
    lines, _ = printed(capsys, *arguments, "-k", 12)
    ids = {image.file: image.imgid for image in load_dataset_file(demo).images}
    return [ids[Path(line[2]).name] for line in lines]


def test_a_search_ranks_as_the_corrected_evaluation(corrected: Path, demo: Path, capsys: Capture) -> None:
    caption = load_dataset_file(demo).split("test")[3].captions[0]
    number = read_embeddings(corrected / "test.h5").caption_ids.tolist().index(caption.sentid)
    expected = expected_ids(corrected, number)
    assert found_ids(capsys, demo, corrected, caption.raw) == expected
    plain = Path(shutil.copytree(corrected, corrected.parent / "plain"))
    (plain / "correction.safetensors").unlink()
    assert found_ids(capsys, demo, plain, caption.raw) != expected


@pytest.mark.parametrize("kind", ["Flat", "HNSW8"])
def test_an_index_holds_the_corrected_vectors(corrected: Path, demo: Path, capsys: Capture, tmp_path: Path, kind: str) -> None:
    caption = load_dataset_file(demo).split("test")[3].captions[0]
    without_index = found_ids(capsys, demo, corrected, caption.raw)
    index = ["--index", tmp_path / "x.faiss", "--index-type", kind]
    assert found_ids(capsys, demo, corrected, caption.raw, *index) == without_index
    assert found_ids(capsys, demo, corrected, caption.raw, *index) == without_index  # now it is read


def test_an_index_without_the_correction_is_refused(
    corrected: Path, demo: Path, tmp_path: Path, fails: Fails, capsys: Capture
) -> None:
    plain = Path(shutil.copytree(corrected, tmp_path / "plain"))
    (plain / "correction.safetensors").unlink()
    printed(capsys, plain, "a red circle", "--index", tmp_path / "x.faiss")
    shutil.copy(corrected / "correction.safetensors", plain)
    assert "built from something else" in fails(search_main, plain, "a red circle", "--index", tmp_path / "x.faiss")


def test_photos_find_captions_and_packed_models_have_the_correction(
    corrected: Path, demo: Path, capsys: Capture, tmp_path: Path
) -> None:
    dataset = load_dataset_file(demo)
    photo = dataset.image_path(dataset.split("test")[2])
    lines, _ = printed(capsys, corrected, photo, "-k", 3)
    assert len(lines) == 3
    pack(corrected, tmp_path / "packed")
    assert (tmp_path / "packed" / "correction.safetensors").is_file()
    (tmp_path / "photos").mkdir()
    for image in dataset.split("test"):
        shutil.copy(dataset.image_path(image), tmp_path / "photos")
    text = dataset.split("test")[3].captions[0].raw
    packed, _ = printed(capsys, tmp_path / "packed", text, "--images", tmp_path / "photos", "-k", 12)
    own, _ = printed(capsys, corrected, text, "-k", 12)
    np.testing.assert_allclose([float(line[1]) for line in packed], [float(line[1]) for line in own], atol=2e-3)


def test_parameters_are_selected_on_the_validation_split(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(cache, experiment("train.epochs=1", "train.decay_after=1"), out=tmp_path / "run")
    done(embed_main, run, "--correct", "csls")
    assert "searches are corrected by csls, {'k': " in caplog.text


def test_the_bank_is_that_of_the_weights_and_not_of_an_older_training(cache: Path, tmp_path: Path, fails: Fails) -> None:
    run = train(cache, experiment("loss.name=sum"), out=tmp_path / "run")
    done(embed_main, run, "--correct", METHOD)
    train(cache, experiment("loss.name=max"), out=run, options=TrainOptions(overwrite=True))
    done(embed_main, run)
    assert "trained again" in fails(eval_main, run / "test.h5", "--correct", METHOD)
    done(embed_main, run, "--correct", METHOD)
    done(embed_main, run, "--split", "train", "--out", tmp_path / "train.h5")
    images = read_embeddings(tmp_path / "train.h5").images
    stored = safetensors.numpy.load_file(run / "correction.safetensors")["images"]
    np.testing.assert_allclose(stored, images, atol=1e-3)


def test_models_of_other_similarities_are_refused_before_anything_is_embedded(
    cache: Path, tmp_path: Path, fails: Fails
) -> None:
    run = train(cache, experiment("model.similarity=order"), out=tmp_path / "run")
    assert "compared by inner products" in fails(embed_main, run, "--correct", METHOD)
    assert not (run / "test.h5").exists()


def test_damaged_or_foreign_corrections_are_refused(corrected: Path, cache: Path, tmp_path: Path, fails: Fails) -> None:
    assert "name another method" in fails(embed_main, corrected, "--correct", "qb-norm")
    assert "leave it out" in fails(embed_main, corrected, "--correct", "csls", "--last-epoch")
    other = train(cache, experiment("train.epochs=1", "train.decay_after=1"), out=tmp_path / "other")
    shutil.copy(corrected / "correction.safetensors", other)
    assert "was stored for other weights" in fails(search_main, other, "a red circle")
    content = (corrected / "correction.safetensors").read_bytes()
    for damaged in (content[:100], b"\0" * 50, content[: len(content) // 2]):
        (other / "correction.safetensors").write_bytes(damaged)
        assert "a correction; store it again" in fails(search_main, other, "a red circle")
    train(cache, experiment("train.epochs=2", "train.decay_after=1"), out=tmp_path / "third")
    order = train(cache, experiment("model.similarity=order", "train.epochs=1", "train.decay_after=1"), out=tmp_path / "order")
    assert "compared by inner products" in fails(embed_main, order, "--correct", "csls")
