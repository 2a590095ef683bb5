"""The functions against the commands: the same files, the same metrics, and results as frames, JSON and HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision

import vse
from tests.conftest import TINY_FEATURE
from tests.train.conftest import COMMAND, SETS
from tests.train.phrases.some_regions import Caches
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.features.cli import main as extract_main
from vse.train.cli import embed_main, search_main, train_main
from vse.train.use.embed import embed_split


def command(main: Callable[..., None], *arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


def arrays(n_images: int = 30, noise: float = 1.0) -> dict[str, np.ndarray]:
    """Vectors of images, and of two captions of each that are the image and noise."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(n_images, 8))
    captions = np.repeat(images, 2, axis=0) + noise * rng.normal(size=(2 * n_images, 8))
    return {
        "images": images / np.linalg.norm(images, axis=1, keepdims=True),
        "captions": captions / np.linalg.norm(captions, axis=1, keepdims=True),
        "image_ids": np.arange(n_images) * 3,
        "caption_ids": np.arange(2 * n_images) + 100,
        "caption_image_ids": np.repeat(np.arange(n_images) * 3, 2),
    }


def slow_r1(given: dict[str, np.ndarray]) -> float:
    """R@1 of text to image, by loops."""
    right = 0
    for caption, image_id in zip(given["captions"], given["caption_image_ids"], strict=True):
        scores = [float(np.float32(caption) @ np.float32(image)) for image in given["images"]]
        right += given["image_ids"][int(np.argmax(scores))] == image_id
    return 100 * right / len(given["captions"])


def test_arrays_are_evaluated_as_a_file_of_them_is(tmp_path: Path) -> None:
    given = arrays()
    result = vse.evaluate(**given, k=[20])
    file = write_embeddings(
        tmp_path / "e.h5",
        Embeddings(
            **{name: values.astype(np.float32) if values.ndim == 2 else values for name, values in given.items()},
            dataset="arrays",
            split="test",
            experiment="arrays",
        ),
    )
    command(eval_main, file, "--out", tmp_path / "r.json", "--k", "20")
    assert result.json["protocols"] == json.loads((tmp_path / "r.json").read_text())["protocols"]
    assert math.isclose(result.frame.loc[0, "t2i_r1"], slow_r1(given))
    assert result.frame.loc[0, "i2t_r1_low"] <= result.frame.loc[0, "i2t_r1"] <= result.frame.loc[0, "i2t_r1_high"]
    assert not list(tmp_path.glob("result*")), "without out nothing is written"


@pytest.mark.parametrize(
    "kind", [torch.from_numpy, lambda values: values.tolist(), lambda values: torch.tensor(values).half()]
)
def test_arrays_may_be_tensors_or_lists(kind: Callable[[np.ndarray], object]) -> None:
    given = {name: kind(values) if values.ndim == 2 else values for name, values in arrays(noise=0.2).items()}
    assert vse.evaluate(**given, bootstrap=0).frame.loc[0, "t2i_r1"] > 80  # type: ignore[arg-type]


def test_scores_and_counted_ids_do_as_well() -> None:
    given = arrays()
    scores = given["images"] @ given["captions"].T
    by_scores = vse.evaluate(scores=scores, caption_image_ids=np.repeat(np.arange(30), 2), bootstrap=0)
    assert math.isclose(by_scores.frame.loc[0, "t2i_r1"], slow_r1(given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"caption_image_ids": None}, "caption_image_ids are needed"),
        ({"captions": None}, "arrays: not a complete embeddings file, it lacks captions"),
        ({"captions": np.ones((60, 7))}, "arrays: .*7"),
        ({"images": np.ones(30)}, "images: an array of 2 axes is needed, not of shape"),
        ({"image_ids": np.arange(30) * 0.5}, "arrays: image_ids must be a 1-D integer array"),
        ({"image_ids": np.zeros(30, int)}, "arrays: duplicate image id 0"),
        ({"caption_image_ids": np.full(60, 7)}, "a caption belongs to image 7"),
        ({"images": np.full((30, 8), np.nan)}, "arrays: .*not finite"),
        ({"similarity": "cosin"}, "did you mean 'cosine'"),
        ({"iou": 0.5}, "iou is of phrase scores"),
        ({"ensemble": True}, "an ensemble is of several files"),
        ({"files": "e.h5"}, "files, or arrays .*: give one of them"),
    ],
)
@pytest.mark.usefixtures("shapes_unchecked")
def test_arrays_that_do_not_fit_are_one_line(change: dict[str, object], message: str) -> None:
    given = {name: values for name, values in {**arrays(), **change}.items() if values is not None}
    with pytest.raises(vse.UserError, match=message):
        vse.evaluate(**given)  # type: ignore[arg-type]


def test_an_evaluation_that_was_not_written_has_no_file() -> None:
    result = vse.evaluate(**arrays(), bootstrap=0)
    with pytest.raises(vse.UserError, match="was not written to a file; give evaluate"):
        vse.table("summary", result)


def test_a_written_evaluation_of_arrays_is_a_result_as_any_other() -> None:
    result = vse.evaluate(**arrays(), name="mine", out="mine.json")
    table = vse.table("summary", [result], out="mine.csv")
    pd.testing.assert_frame_equal(table.frame, result.frame)
    assert "mine" in repr(table)
    assert "\\toprule" in table.latex
    assert Path("mine.csv").is_file()
    assert table.json[0]["rsum"] == result.frame.loc[0, "rsum"]
    page = vse.report(result, "mine.html")
    assert "does not say where its embeddings lie" in page.html


def test_a_feature_is_extracted_as_the_command_does(few: Path) -> None:
    settings = {"model": "squeezenet1_1", "layer": "features.2", "grid": 2, "weights": "random", "resize": 32, "crop": 32}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command(extract_main, "cnn", "--dataset", few, "--feature", "fc7", *sets, "--out", "command.h5", "--shards", 2)
    features = vse.extract(vse.open_dataset(few), "fc7", sets=settings, out="function.h5", shards=2)
    assert np.array_equal(features[:], vse.open_features("command.h5")[:])
    alike = vse.extract(few, like=features, out="alike.h5", shards=1)
    assert np.array_equal(alike[:], features[:])


def test_an_option_that_an_extractor_lacks_is_refused(few: Path) -> None:
    with pytest.raises(vse.UserError, match=r"words: feature 'fc7' .* cnn, which has no such option"):
        vse.extract(few, "fc7", words="glove.txt")
    with pytest.raises(vse.UserError, match=r"skip_bad: feature 'tfidf' "):
        vse.extract(few, "tfidf", skip_bad=True)


def test_the_environment_s_folder_of_weights_is_read_where_the_extractor_has_one(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = torchvision.models.squeezenet1_1(weights=None)
    torch.save(network.state_dict(), tmp_path / "squeezenet1_1.pth")
    sets = {"model": "squeezenet1_1", "layer": "features.2", "weights": "pretrained", "resize": 32, "crop": 32}
    given = vse.extract(few, "fc7", sets=sets, out="given.h5", weights_dir=tmp_path)
    monkeypatch.setenv("VSE_WEIGHTS_DIR", str(tmp_path))
    assert np.array_equal(vse.extract(few, "fc7", sets=sets, out="again.h5")[:], given[:])
    assert vse.extract(few, "tfidf", out="t.h5", sets={"min_count": 1}).kind == "text"


def test_a_training_is_that_of_the_command(cache: Path) -> None:
    command(train_main, "--features", cache, "--out", "command", "--seed", 3, *COMMAND)
    run = vse.train(vse.open_features(cache), sets=SETS, seed=3, out="function")
    other = vse.Run("command")
    assert run.json["files"]["best.safetensors"] == other.json["files"]["best.safetensors"]
    assert run.settings == other.settings
    columns = [name for name in run.frame if name not in ("seconds", "pairs_per_s")]
    pd.testing.assert_frame_equal(run.frame[columns], other.frame[columns])
    again = vse.train(cache, sets=SETS, seed=3, out="function")
    assert again.json["made"] == run.json["made"], "a finished run is not trained again"
    assert run.json["made"]["command"].startswith("vse.train(")


def test_embeddings_are_arrays_with_ids(run: Path) -> None:
    embedded = vse.embed(run, out="function.h5")
    command(embed_main, run, "--out", "command.h5")
    other = vse.EmbeddedSplit("command.h5")
    for name in ("images", "captions", "image_ids", "caption_ids", "caption_image_ids"):
        assert np.array_equal(getattr(embedded, name), getattr(other, name))
    expected = embedded.images @ embedded.captions.T
    for direction in ("i2t", "t2i"):
        assert np.allclose(embedded.scores(direction), expected, atol=1e-6)
    with pytest.raises(vse.UserError, match="known are i2t and t2i"):
        embedded.scores("both")
    assert embedded.frame["image_id"].tolist() == embedded.caption_image_ids.tolist()
    assert embedded.json["embedded"]["command"].startswith("vse.embed(")
    result = vse.evaluate(embedded)
    by_arrays = vse.evaluate(
        images=embedded.images,
        captions=embedded.captions,
        image_ids=embedded.image_ids,
        caption_image_ids=embedded.caption_image_ids,
    )
    assert by_arrays.json["protocols"] == result.json["protocols"]


def test_embeddings_as_features_are_two_caches(run: Path) -> None:
    images, captions = vse.embed(run, as_features="features/mine")
    assert (images.kind, captions.kind) == ("image", "text")
    assert len(captions) == 5 * len(images)


def test_a_comparison_is_that_of_the_command(run: Path) -> None:
    one, two = (vse.embed(run, out=f"{name}.h5") for name in ("a", "b"))
    with pytest.raises(vse.UserError, match="same seed|given twice|of the same"):
        vse.evaluate([one, two])
    images = one.images
    noisy = images + 0.1 * np.random.default_rng(0).normal(size=images.shape).astype(np.float32)
    other = Embeddings(
        one.image_ids, one.caption_ids, one.caption_image_ids, "demo", "test", noisy, one.captions, experiment="other"
    )
    file = write_embeddings(Path("other.h5"), other)
    compared = vse.compare([one, file], bootstrap=1000, out="function.json")
    command(eval_main, "--compare", "a.h5", "other.h5", "--bootstrap", 1000, "--out", "command.json")
    assert compared.json["comparisons"] == json.loads(Path("command.json").read_text())["comparisons"]
    command(table_main, "significance", "function.json", "--out", "s.csv")
    assert np.allclose(compared.frame["difference"], pd.read_csv("s.csv")["difference"], atol=0.006)
    assert "rsum" in repr(compared)
    assert compared._repr_html_().count("<tr") > 5


def test_a_search_finds_what_the_command_prints(run: Path, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits = vse.search(run, "a red circle", k=3)
    command(search_main, run, "a red circle", "-k", 3)
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows = zip(hits.frame["rank"], hits.frame["score"], hits.frame["file"], strict=True)
    assert [[str(rank), f"{score:.4f}", file] for rank, score, file in rows] == printed
    assert hits._repr_html_().count("data:image/jpeg") == len(hits) == 3
    assert hits.json[0]["caption_id"] is None
    data = vse.open_dataset(demo)
    captions = vse.search(run, data.photo(60), k=2, html="page.html")
    texts = data.frame.set_index("caption_id")["caption"]
    assert captions.frame["caption"].tolist() == texts[captions.frame["caption_id"].tolist()].tolist()
    assert Path("page.html").is_file()


def test_a_phrase_is_found_in_a_photo_and_evaluated(phrase_run: Path, caches: Caches) -> None:
    embedded = vse.embed(phrase_run, out="phrases.h5")
    assert embedded.frame.columns.tolist() == ["phrase_id", "image_id", "caption_id", "types", "n_candidates"]
    with pytest.raises(vse.UserError, match="holds how phrases score boxes"):
        _ = embedded.images
    result = vse.evaluate(embedded, iou=0.4, bootstrap=0)
    assert result.json["protocols"]["phrase"]["iou"] == 0.4
    assert "R@1/5/10 at IoU 0.4" in repr(result)
    with pytest.raises(vse.UserError, match="holds phrase scores, and trec is not of these"):
        vse.evaluate(embedded, trec="t")


def test_a_report_shows_itself_in_a_notebook(run: Path) -> None:
    result = vse.evaluate(vse.embed(run, out="e.h5"), out="r.json")
    page = vse.report(result, "r.html", queries=2)
    assert page.html == Path("r.html").read_text(encoding="utf-8")
    assert page._repr_html_().startswith("<iframe")
    assert page._repr_html_().count("<") == 2, "its own tags are escaped"


def test_photos_with_a_table_are_imported(demo: Path) -> None:
    data = vse.open_dataset(demo)
    data.frame[["file", "caption"]].rename(columns={"file": "picture"}).to_csv("captions.csv", index=False)
    photos = demo.parent / "images"
    birds = vse.import_data(photos, "data/birds", captions="captions.csv", columns={"file": "picture"}, test=0.5, seed=1)
    assert birds.features == ()
    assert birds.dataset.name == "birds"
    assert len(birds.dataset) == 66
    assert birds.dataset.splits.loc["test", "n_images"] == 33
    with pytest.raises(vse.UserError, match="format tabel: unknown"):
        vse.import_data(photos, "data/other", format="tabel")


def test_everything_has_a_face_in_a_notebook(demo: Path, cache: Path, run: Path) -> None:
    result = vse.evaluate(**arrays(), bootstrap=0)
    for shown in (vse.open_dataset(demo), vse.open_features(cache), vse.Run(run), result):
        assert "<" in shown._repr_html_()
        assert repr(shown)


def test_names_of_data_are_escaped() -> None:
    result = vse.evaluate(**arrays(), name="<script>", bootstrap=0)
    assert "<script>" not in result._repr_html_()


def test_the_same_file_of_embeddings_is_what_the_plain_function_writes(run: Path, tmp_path: Path) -> None:
    plain = embed_split(run, tmp_path / "plain.h5")
    ours, theirs = vse.embed(run, "val", out="val.h5"), vse.EmbeddedSplit(plain)
    assert (ours.split, theirs.split) == ("val", "test")
    assert TINY_FEATURE.name in ours.json["features"]
