"""``vse-eval --choices``: one right caption among a few for each image, against a loop and cases that are made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.eval.evaluating import Fails, result_of, succeeds, write_result
from tests.eval.protocols.test_evaluate import made
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.options import AllEvaluateOptions
from vse.pipeline.dataset.choices import CaptionChoice, write_choices

N_IMAGES, N_EACH = 40, 4


def choices_of(run: Embeddings, seed: int = 0) -> list[CaptionChoice]:
    """For each image a choice of two and one of three of its captions, at random."""
    rng = np.random.default_rng(seed)
    made_choices = []
    for image in run.image_ids.tolist():
        own = run.caption_ids[run.caption_image_ids == image]
        for kind, size in (("pair", 2), ("three", 3)):
            ids = rng.permutation(own)[:size].tolist()
            scores = rng.random(size).tolist()
            made_choices.append(
                CaptionChoice(imgid=image, sentids=ids, right=int(rng.integers(size)), kind=kind, text_scores=scores)
            )
    return made_choices


@pytest.fixture
def run() -> Embeddings:
    return made(n_images=N_IMAGES, n_each=N_EACH, noise=1.5)


def write(folder: Path, run: Embeddings, choices: Sequence[CaptionChoice]) -> tuple[Path, Path]:
    return write_embeddings(folder / "test.h5", run), write_choices(folder, run.dataset, "made for a test", list(choices))


def slow_rates(run: Embeddings, choices: Sequence[CaptionChoice]) -> dict[str, float]:
    """Score by score, in float64."""
    images = dict(zip(run.image_ids.tolist(), run.images.astype(np.float64), strict=True))
    captions = dict(zip(run.caption_ids.tolist(), run.captions.astype(np.float64), strict=True))
    mean = run.images.astype(np.float64).mean(0)
    hits: dict[str, list[float]] = {"r1": [], "text_alone": [], "text_model": [], "chance": []}
    for one in choices:
        for name, image in (("r1", images[one.imgid]), ("text_alone", mean)):
            scores = [float(image @ captions[sentid]) for sentid in one.sentids]
            hits[name].append(100.0 * (scores.index(max(scores)) == one.right))
        hits["text_model"].append(100.0 * (max(one.text_scores) == one.text_scores[one.right]))
        hits["chance"].append(100 / len(one.sentids))
    return {name: float(np.mean(values)) for name, values in hits.items()}


def test_all_rates_are_those_of_a_loop(tmp_path: Path, run: Embeddings) -> None:
    choices = choices_of(run)
    file, listed = write(tmp_path, run, choices)
    found = result_of([file], choices=listed, bootstrap=200)
    assert set(found["protocols"]) == {"choices", "choices-pair", "choices-three"}
    for protocol, some in (
        ("choices", choices),
        ("choices-pair", [one for one in choices if one.kind == "pair"]),
        ("choices-three", [one for one in choices if one.kind == "three"]),
    ):
        rates = found["protocols"][protocol]
        assert rates["i2t"] == pytest.approx(slow_rates(run, some)), protocol
        low, high = rates["ci95"]["i2t"]["r1"]
        assert low < rates["i2t"]["r1"] < high
        assert found["choices"][protocol]["choices"] == len(some)


@pytest.mark.parametrize("directions", [False, True])
def test_scores_of_pairs_and_arrays_give_the_same_rates(tmp_path: Path, run: Embeddings, directions: bool) -> None:
    file, listed = write(tmp_path, run, choices_of(run))
    expected = result_of([file], choices=listed)["protocols"]
    i2t = run.images @ run.captions.T
    scores = {"scores_i2t": i2t, "scores_t2i": -i2t} if directions else {"scores": i2t}
    of_pairs = write_embeddings(tmp_path / "pairs.h5", replace(run, images=None, captions=None, **scores))
    assert result_of([of_pairs], choices=listed)["protocols"] == expected
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name in ("image_ids", "caption_ids", "caption_image_ids", "images", "captions"):
        np.save(folder / f"{name}.npy", getattr(run, name))
    (folder / "about.json").write_text(json.dumps({"dataset": "demo"}))
    assert result_of([folder], choices=listed)["protocols"] == expected


def test_random_vectors_are_at_chance_and_ties_are_wrong(tmp_path: Path, run: Embeddings) -> None:
    many = made(n_images=1000, n_each=4, noise=1.5)
    shuffled = replace(many, images=np.random.default_rng(1).permutation(many.images))
    file, listed = write(tmp_path, shuffled, choices_of(many))
    rates = result_of([file], choices=listed)["protocols"]["choices-pair"]["i2t"]
    assert rates["r1"] == pytest.approx(rates["chance"], abs=4)
    equal = replace(run, captions=np.ones_like(run.captions) / 4)
    file, listed = write(tmp_path, equal, choices_of(run))
    assert result_of([file], choices=listed)["protocols"]["choices"]["i2t"]["r1"] == 0


def test_a_group_is_right_if_both_images_and_both_captions_are(tmp_path: Path) -> None:
    """Three groups of Winoground: all right, only the captions right, and nothing right."""
    wanted = {  # scores of (image 0, caption 0), (image 0, caption 1), (image 1, caption 1), (image 1, caption 0)
        0: (0.9, 0.1, 0.8, 0.2),
        1: (0.9, 0.8, 0.3, 0.2),
        2: (0.1, 0.9, 0.2, 0.8),
    }
    scores = np.zeros((6, 12), np.float32)
    choices = []
    for group, (right0, wrong0, right1, wrong1) in wanted.items():
        for place, (right, wrong) in enumerate(((right0, wrong0), (right1, wrong1))):
            image = 2 * group + place
            scores[image, [2 * image, 2 * image + 1]] = right, wrong
            choices.append(CaptionChoice(imgid=image, sentids=[2 * image, 2 * image + 1], group=group))
    run = Embeddings(np.arange(6), np.arange(12), np.arange(12) // 2, "demo", "test", scores=scores)
    file, listed = write(tmp_path, run, choices)
    rates = result_of([file], choices=listed)["protocols"]["choices"]["i2t"]
    assert [rates[name] for name in ("text_score", "image_score", "group_score")] == pytest.approx([200 / 3, 100 / 3, 100 / 3])
    assert rates["r1"] == pytest.approx(400 / 6)


def test_tables_comparisons_and_reports_have_the_choices(
    tmp_path: Path, run: Embeddings, capsys: pytest.CaptureFixture[str]
) -> None:
    file, listed = write(tmp_path, run, choices_of(run))
    noisy = write_embeddings(tmp_path / "noisy.h5", replace(made(N_IMAGES, N_EACH, noise=9.0), experiment="noisy"))
    result = write_result([file], tmp_path / "result.json", options=AllEvaluateOptions(bootstrap=0, choices=listed))
    succeeds(table_main, "summary", result, "--out", tmp_path / "summary.csv")
    table = pd.read_csv(tmp_path / "summary.csv").set_index("protocol")
    assert table.loc["choices", "i2t_r1"] == pytest.approx(slow_rates(run, choices_of(run))["r1"])
    assert table.loc["choices-pair", "i2t_chance"] == 50
    capsys.readouterr()
    succeeds(eval_main, file, "--choices", listed, "--bootstrap", 0)
    assert "without the image" in capsys.readouterr().out
    succeeds(eval_main, file, noisy, "--compare", "--choices", listed, "--out", tmp_path / "versus.json")
    difference = json.loads((tmp_path / "versus.json").read_text())["comparisons"]["choices"]["i2t"]["r1"]
    assert difference["difference"] == pytest.approx(
        slow_rates(run, choices_of(run))["r1"] - slow_rates(made(N_IMAGES, N_EACH, noise=9.0), choices_of(run))["r1"]
    )


def test_choices_of_other_images_are_left_out(tmp_path: Path, run: Embeddings, caplog: pytest.LogCaptureFixture) -> None:
    choices = choices_of(run)
    file, listed = write(
        tmp_path, run, [*choices, CaptionChoice(imgid=1, sentids=[0, 1]), CaptionChoice(imgid=0, sentids=[0, 10**6])]
    )
    assert result_of([file], choices=listed)["choices"]["choices"]["choices"] == len(choices)
    assert "2 of 82 choices are not of this split" in caplog.text


def other(**changes: Any) -> dict[str, Any]:
    content = {
        "format": "vse-choices",
        "version": 1,
        "dataset": "demo",
        "origin": "?",
        "choices": [{"imgid": 0, "sentids": [0, 1]}],
    }
    return content | changes


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (other(choices=[]), (), "not a file of choices (choices"),
        (other(choices=[{"imgid": 0, "sentids": [3]}]), (), "not a file of choices (choices: 0: sentids"),
        (other(choices=[{"imgid": 0, "sentids": [0, 1], "right": 2}]), (), "right is 2, but there are 2 captions"),
        (other(dataset="shapes"), (), "holds choices of 'shapes', but the embeddings are of 'demo'"),
        (other(choices=[{"imgid": 1, "sentids": [0, 1]}]), (), "none of its 1 choices has its image and its captions"),
        (other(), ("--language", "de"), "--choices evaluates only the choices: leave --language out"),
        (other(), ("--compress", "int8"), "leave --compress out"),
        (other(), ("--trec", "trec"), "leave --trec out"),
        (other(), ("--index", "Flat"), "leave --index out"),
        (other(), ("--protocol", "full"), "--choices evaluates only the choices"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, run: Embeddings, fails: Fails, content: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    file = write_embeddings(tmp_path / "test.h5", run)
    (tmp_path / "choices.json").write_text(json.dumps(content))
    assert message in fails(eval_main, file, "--choices", tmp_path / "choices.json", *options)
