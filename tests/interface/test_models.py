"""Models that are fitted to arrays: the trainer without files, the arrays that it accepts, and errors with the right call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn.base
import torch

import vse

WIDTHS = {"name": "branch", "widths": [4]}
CCA = {"model.image_encoder": WIDTHS, "model.caption_encoder": WIDTHS, "solver.regularization": [0.01, 0.1]}
WORDS = {"train.epochs": 2, "train.min_count": 1, "model.dim": 4, "model.word_dim": 4, "train.batch_size": 16}
COLOURS, SHAPES = ("red", "green", "blue", "grey"), ("circle", "square", "line", "star", "cross")
STOPPING_LOSS = """
import signal

calls = []


def stop(scores, positives, negatives, margin):
    if len(scores) > 8 and not calls:  # a batch of the training, not the small one of the check
        calls.append(1)
        signal.raise_signal(signal.SIGINT)
    return (scores * negatives).sum()
"""
pytestmark = pytest.mark.usefixtures("shapes_unchecked")


# 20 shapes in colours, as vectors, with two captions each: vectors of another length, and texts.
RANDOM = np.random.default_rng(0)
HIDDEN, ROWS = RANDOM.normal(size=(20, 6)), np.repeat(np.arange(20), 2)
X = HIDDEN @ RANDOM.normal(size=(6, 12)) + 0.1 * RANDOM.normal(size=(20, 12))
Y = HIDDEN[ROWS] @ RANDOM.normal(size=(6, 8)) + 0.1 * RANDOM.normal(size=(40, 8))
TEXTS = [f"{start} {colour} {shape}" for colour in COLOURS for shape in SHAPES for start in ("a", "the small")]


def fit(**changes: Any) -> vse.Model:
    given = {"images": X, "captions": Y, "image_of_caption": ROWS, "experiment": "cca", "sets": CCA}
    return vse.fit(**{**given, **changes})


def fit_words(**changes: Any) -> vse.Model:
    return fit(**{"captions": TEXTS, "experiment": "vsepp", "sets": WORDS, **changes})


@pytest.fixture(scope="module")
def model() -> vse.Model:
    return fit()


@pytest.fixture(scope="module")
def reader() -> vse.Model:
    return fit_words()


def test_it_is_the_model_that_the_trainer_makes_of_the_same_files(model: vse.Model, reader: vse.Model) -> None:
    for fitted, experiment, sets, captions in (
        (model, "cca", CCA, Path("mine/data/arrays_captions.h5")),
        (reader, "vsepp", WORDS, None),
    ):
        fitted.save("mine")
        inputs = vse.TrainInputs(caption_features=captions)
        trained = vse.train("mine/data/arrays_images.h5", experiment, sets=sets, inputs=inputs, out=f"runs/{experiment}")
        assert trained.json["files"]["best.safetensors"] == fitted.json["files"]["best.safetensors"]
        assert trained.settings == fitted.settings
        assert fitted.frame["rsum"].max() == fitted.json["best_rsum"]
        assert ").fit(<ndarray 20 x 12>, " in fitted.json["made"]["command"]


def test_nothing_is_written_before_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fitted = fit()
    fitted.search(Y[0])
    fitted.encode_images(X)
    vse.evaluate(fitted, X, Y, ROWS).compare(vse.evaluate(Y[::2], Y, ROWS))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("feature", [None, "tfidf"])
def test_a_saved_model_is_loaded_as_it_was(feature: str | None) -> None:
    fitted = fit_words() if feature is None else fit(captions=TEXTS, sets={**CCA, "caption_feature": feature})
    assert fitted.save("runs/mine") == Path("runs/mine")
    fitted.save("runs/mine")
    Path("runs").rename("moved")
    loaded = vse.load("moved/mine")
    assert np.array_equal(loaded.encode_images(X), fitted.encode_images(X))
    assert np.array_equal(loaded.encode_captions(TEXTS), fitted.encode_captions(TEXTS))
    assert vse.evaluate(loaded, X, TEXTS, ROWS).metrics == vse.evaluate(fitted, X, TEXTS, ROWS).metrics
    for query in ("a red star", "the small grey line"):
        pd.testing.assert_frame_equal(loaded.search(query, 5).frame, fitted.search(query, 5).frame)


def test_save_replaces_only_a_run(model: vse.Model) -> None:
    Path("mine").mkdir()
    Path("mine/run.json").write_text("[1]")
    with pytest.raises(vse.UserError, match="folder: mine/run.json: .*force"):
        model.save("mine")
    model.save("mine", force=True)
    assert vse.load("mine").json == model.json


def test_a_stopped_training_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Path("stop.py").write_text(STOPPING_LOSS)
    sets = {**WORDS, "loss.name": "stop.py:stop", "warmup.epochs": 0, "train.batch_size": 64}
    with pytest.raises(vse.Interrupted, match="fit was stopped, and nothing of it is kept"):
        fit_words(sets=sets)
    assert [path.name for path in tmp_path.iterdir()] == ["stop.py"]


def test_the_best_epoch_is_chosen_on_a_seeded_tenth_of_the_images_or_on_given_data() -> None:
    def validation_images(fitted: vse.Model) -> list[int]:
        fitted.save("mine")
        return vse.open_dataset("mine/data/dataset.json").image_ids("val").tolist()

    first, again, other = (validation_images(fit(seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 2
    given = fit(images=X[:15], captions=Y[:30], image_of_caption=ROWS[:30], validation=(X[15:], Y[30:], ROWS[30:] - 15))
    assert validation_images(given) == [15, 16, 17, 18, 19]
    assert given.search(Y[36], k=1).frame["image_id"].tolist() == [18]


KINDS: dict[str, Callable[[np.ndarray], object]] = {
    "float64": lambda array: array,
    "float16": lambda array: array.astype(np.float16),
    "lists": lambda array: array.tolist(),
    "tensor": torch.from_numpy,
    "learned tensor": lambda array: torch.tensor(array, requires_grad=True),
    "bfloat16": lambda array: torch.tensor(array).bfloat16(),
    "tensors": lambda array: list(torch.tensor(array)),
    "vectors": list,
    "frame": pd.DataFrame,
    "column": lambda array: pd.DataFrame({"vector": array.tolist()})["vector"],
    "sparse": scipy.sparse.csr_matrix,
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_may_be_of_many_kinds(kind: str, model: vse.Model) -> None:
    given = KINDS[kind](X)
    embedded = model.encode_images(given)
    assert embedded.shape == (20, 4)
    assert np.allclose(embedded, model.encode_images(X), atol=0.05)
    rows = {"lists": ROWS.tolist(), "tensor": torch.from_numpy(ROWS), "frame": pd.Series(ROWS)}.get(kind, ROWS)
    metrics = vse.evaluate(model, given, KINDS[kind](Y), image_of_caption=rows, bootstrap=0).metrics
    assert metrics["full"]["rsum"] == pytest.approx(
        vse.evaluate(model, X, Y, ROWS, bootstrap=0).metrics["full"]["rsum"], abs=20
    )


NOT_FINITE = np.where(np.arange(20)[:, None] == 3, np.nan, X)
WRONG: list[tuple[dict[str, object], str]] = [
    ({"images": "features/demo_fc7.h5"}, "images='features/demo_fc7.h5': an array is needed, .*numpy.load.*vse.train"),
    ({"images": [f"{k}.jpg" for k in range(20)]}, "images=.*: vectors are needed, .*photo_features.*vse.extract"),
    ({"images": None}, "images=None: an array of vectors is needed"),
    ({"images": {"a": X}}, "images=.*: an array of vectors is needed"),
    ({"images": iter(X)}, r"images=.*pass list\(...\) of it"),
    ({"images": X[0]}, r"images: an array of shape \(12,\), .*numpy.stack.*VECTOR\[None\]"),
    ({"images": np.zeros((20, 3, 8, 8))}, r"images: an array of shape \(20, 3, 8, 8\), .*vse.extract"),
    ({"images": [[1.0, 2.0], [3.0]]}, "images=.*the rows are not vectors of the same length"),
    ({"images": X + 1j}, "images=<ndarray 20 x 12>: an array of real numbers is needed, not of complex128"),
    ({"images": NOT_FINITE}, "images: row 3 is not finite .*numpy.nan_to_num"),
    ({"images": X * 1e40}, "images: row 0 is not finite in float32"),
    ({"images": X[:0]}, "images: an empty array"),
    (
        {"images": pd.DataFrame({"file": ["a"] * 20, "x": 1.0})},
        r"images: the column 'file' has no numbers; .*frame\[COLUMNS\]",
    ),
    ({"images": X[:1], "captions": Y[:1], "image_of_caption": None}, "images: 1 image with captions; at least 2"),
    ({"captions": TEXTS, "sets": {**CCA, "caption_feature": None}}, "captions: texts, but .*text_features.*tfidf"),
    ({"captions": "a dog"}, r"captions='a dog': a list is needed; pass \['a dog'\]"),
    ({"captions": [["a dog", "dogs"]] * 20}, r"captions: a list of lists; .*for text in texts\], and image_of_caption="),
    ({"captions": [*TEXTS[:39], float("nan")]}, "captions: row 39 is nan, and not a text"),
    ({"captions": [*TEXTS[:39], " "]}, "captions: row 39 is empty"),
    ({"captions": [*TEXTS[:39], "?!"], "sets": {"caption_feature": "tfidf"}}, r"captions: row 39 is '\?!', which has no word"),
    ({"image_of_caption": None}, r"image_of_caption=None: 40 captions for 20 images; .*numpy.repeat\(numpy.arange\(20\), 2\)"),
    ({"image_of_caption": ROWS[:39]}, "image_of_caption: 39 numbers for 40 captions"),
    ({"image_of_caption": ROWS + 391895}, "image_of_caption: 391895 is not a row of the 20 images; .*get_indexer"),
    ({"image_of_caption": ROWS + 0.5}, "image_of_caption=.*: one whole number for each caption"),
    ({"image_of_caption": ROWS[:, None]}, "image_of_caption=.*: one whole number for each caption"),
    ({"validation": X}, r"validation=.*: a tuple \(images, captions, image_of_caption\)"),
    ({"validation": (X, TEXTS, ROWS)}, "validation: captions: texts, but the training has an array"),
    ({"validation": (X, Y)}, "validation: image_of_caption=None: 40 captions"),
    ({"files": ["a.jpg"]}, "files: 1 paths for 20 images"),
    ({"experiment": "ccaa"}, "did you mean 'cca'"),
    ({"experiment": "vsepp_ft", "sets": None}, "experiment='vsepp_ft': starts from another run, .*vse.train"),
    ({"experiment": "vsepp_rc_pictures", "sets": None}, "reads the files of photos, .*vse.train"),
    ({"sets": {"solver.regularization": [-1]}}, "solver.regularization"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_an_error_says_what_to_pass_instead(changes: dict[str, object], message: str) -> None:
    with pytest.raises(vse.UserError, match=f"^[^/]*{message}") as refusal:
        fit(**changes)
    assert "\n" not in str(refusal.value)


def test_a_model_refuses_what_it_cannot_read(model: vse.Model, reader: vse.Model) -> None:
    for call, message in (
        (lambda: model.encode_captions(["a dog"]), r"captions=\['a dog'\]: texts, but .*vectors \(n, 8\).*text_features"),
        (lambda: model.encode_images(["a.jpg"]), r"images=\['a.jpg'\]: paths, but .*vectors \(n, 12\).*photo_features"),
        (lambda: model.encode_images(Y), r"images: an array of shape \(40, 8\), but .*\(n, 12\)"),
        (lambda: reader.encode_captions(Y), "captions: an array, but the model reads captions as texts"),
        (lambda: reader.encode_captions([]), r"captions=\[\]: at least one text or vector"),
        (lambda: reader.search(["a red star", "a line"]), "query=.*: a single text, path or vector"),
        (lambda: model.search(Y[0], by="text"), "by='text': .*'caption' or an 'image'"),
        (lambda: model.search(X[0]), r"query: an array of shape \(1, 12\), but .*\(n, 8\); .*by='caption'"),
        (lambda: model.search(Y), r"query: an array of shape \(1, 40, 8\), but"),
        (lambda: vse.Model().encode_images(X), r"Model\(\) is not fitted; call its method fit"),
        (lambda: vse.evaluate(model), r"for arrays call vse.evaluate\(model, images, captions\)"),
        (lambda: vse.evaluate(X, Y, ROWS), r"have no cosines; fit a model to both, vse.fit"),
        (lambda: vse.evaluate(X, TEXTS, ROWS), r"no model is given to encode them; call vse.evaluate\(model"),
        (lambda: vse.evaluate("e.h5", X), "images=.*: the first argument has embeddings already"),
    ):
        with pytest.raises(vse.UserError, match=message):
            call()


def test_an_evaluation_ranks_the_arrays_as_a_loop_does(model: vse.Model) -> None:
    embedded = model.encode_images(X), model.encode_captions(Y)
    for result, images, captions in (
        (vse.evaluate(model, X, Y, image_of_caption=ROWS), *embedded),
        (vse.evaluate(model, images=X, captions=Y, image_of_caption=ROWS), *embedded),
        (vse.evaluate(3 * Y[::2], Y, image_of_caption=ROWS), Y[::2], Y),
        (vse.evaluate(Y[::2], Y, ROWS), Y[::2], Y),
        (vse.evaluate(images=Y[::2], captions=Y, image_of_caption=ROWS), Y[::2], Y),
        (vse.evaluate(Y[::2], captions=Y, image_of_caption=ROWS, protocol="full"), Y[::2], Y),
    ):
        images, captions = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (images, captions))
        best = [max(range(20), key=lambda row: float(images[row] @ caption)) for caption in captions]
        assert result.metrics["full"]["t2i"]["r1"] == pytest.approx(100 * np.mean(np.asarray(best) == ROWS))
    fitted, raw = vse.evaluate(model, X, Y, ROWS), vse.evaluate(Y[::2], Y, ROWS)
    compared = fitted.compare(raw, bootstrap=100).frame
    rsum = compared[compared["metric"] == "rsum"]["difference"].iloc[0]
    assert rsum == pytest.approx(fitted.metrics["full"]["rsum"] - raw.metrics["full"]["rsum"])


def test_captions_in_any_order_are_joined_by_their_rows() -> None:
    order = np.random.default_rng(1).permutation(40)
    shuffled = fit(captions=Y[order], image_of_caption=ROWS[order])
    assert vse.evaluate(shuffled, X, Y[order], ROWS[order], bootstrap=0).metrics["full"]["t2i"]["r1"] > 80
    hit = shuffled.search(X[7], k=1, by="image").frame.iloc[0]
    assert hit["image_id"] == 7
    assert ROWS[order][hit["caption_id"]] == 7


def test_sets_of_vectors_are_compared_pair_by_pair() -> None:
    regions = np.stack([X, X + 1, X - 1], axis=1)
    sets = {**WORDS, "model.dim": 8, "train.epochs": 1}
    fitted = fit_words(images=regions, experiment="scan_t2i_avg", sets=sets)
    assert [one.shape for one in fitted.encode_images(regions[:2])] == [(3, 8), (3, 8)]
    scores = vse.evaluate(fitted, regions, TEXTS, ROWS, bootstrap=0)
    assert scores.metrics["full"]["rsum"] >= 0
    best = fitted.search(TEXTS[5], k=20).frame
    assert sorted(best["image_id"]) == list(range(20))
    with pytest.raises(vse.UserError, match=r"images: an array of shape \(20, 12\), but .*\(n, n_vectors, 12\)"):
        fitted.encode_images(X)


def test_batches_and_lengths_do_not_change_the_directions(reader: vse.Model, capsys: pytest.CaptureFixture[str]) -> None:
    whole = reader.encode_captions(TEXTS)
    assert np.allclose(reader.encode_captions(TEXTS, batch_size=3), whole, atol=1e-6)
    assert np.allclose(reader.encode_captions(TEXTS[0]), whole[0], atol=1e-6)
    assert capsys.readouterr().err == ""
    plain = fit(sets={**CCA, "model.normalize_image": False}).encode_images(X)
    unit = fit(sets={**CCA, "model.normalize_image": False}).encode_images(
        X, normalize_embeddings=True, show_progress_bar=True
    )
    assert np.allclose(np.linalg.norm(unit, axis=1), 1)
    assert np.allclose(unit * np.linalg.norm(plain, axis=1, keepdims=True), plain, atol=1e-6)


def test_functions_read_texts_and_photos(demo: Path) -> None:
    data = vse.open_dataset(demo)
    photos, captions = [str(data.photo(k)) for k in range(20)], list(data.frame["caption"][:20])
    number = {path: k for k, path in enumerate(photos)} | {text: k for k, text in enumerate(captions)}
    model = vse.Model(
        "cca",
        sets=CCA,
        photo_features=lambda paths: X[[number[path] for path in paths]],
        text_features=lambda texts: torch.from_numpy(Y[::2][[number[text] for text in texts]]),
    )
    assert model.fit(photos, captions) is model
    assert np.array_equal(model.encode_images([Path(photos[3])]), model.encode_images(X[3:4]))
    assert np.array_equal(model.encode_captions(captions[3]), model.encode_captions(Y[6:7])[0])
    assert vse.evaluate(model, photos, captions).metrics == vse.evaluate(model, X, Y[::2]).metrics
    found = model.search(captions[4], k=3)
    assert found.frame["file"].tolist() == [photos[row] for row in found.frame["image_id"]]
    assert found._repr_html_().count("data:image/jpeg") == 3
    assert set(model.search(photos[4], k=3).frame["caption"]) <= set(captions)
    with pytest.raises(vse.UserError, match="text_features: returned 1 vectors for 2 inputs"):
        vse.Model("cca", text_features=lambda texts: Y[:1]).fit(X[:2], ["a", "b"])


def test_results_are_displayed_as_photos_or_as_texts(reader: vse.Model, demo: Path) -> None:
    data = vse.open_dataset(demo)
    with_photos = fit_words(files=[data.photo(k) for k in range(20)])
    assert with_photos.search("a red star", k=2)._repr_html_().count("data:image/jpeg") == 2
    texts = reader.search("a red star", k=2)
    assert "<img" not in texts._repr_html_()
    assert all(text in texts._repr_html_() for text in texts.frame["caption"])
    assert "not fitted" in vse.Model()._repr_html_()
    assert "rsum" in reader._repr_html_()


def test_it_follows_scikit_learn(model: vse.Model) -> None:
    unfitted = vse.Model("cca", sets=CCA, seed=np.int64(3), text_features=len)
    copy = sklearn.base.clone(unfitted)
    assert copy.get_params() == unfitted.get_params()
    assert repr(copy.set_params(seed=0, text_features=None)) == f"Model(experiment='cca', sets={CCA})"
    with pytest.raises(vse.UserError, match="did you mean 'seed'"):
        copy.set_params(sed=1)
    with pytest.raises(vse.UserError, match="seed=-1: a whole number from 0 on"):
        copy.set_params(seed=-1)
    assert np.array_equal(sklearn.base.clone(model).fit(X, Y, ROWS).encode_images(X), model.encode_images(X))
    for one in (unfitted, model):
        with pytest.raises(vse.UserError, match=r'cannot be pickled; call model.save\("FOLDER"\)'):
            pickle.dumps(one)
