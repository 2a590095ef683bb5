"""An image-sentence model with a phrase model (Eq. 8 of the two-branch paper), against dense matrices and hand-made cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import write_result
from tests.eval.protocols.test_evaluate import made, made_order
from tests.eval.slow_ranks import slow_metrics_of_lists, slow_order_scores, slow_ranks
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.options import EvaluationOptions
from vse.eval.protocols.ensemble import combine_scores
from vse.eval.ranking.metrics import metrics
from vse.eval.ranking.ranks import Ranks


def by_phrases(run: Embeddings, seed: int = 0, signal: float = 1.0, **changes: Any) -> Embeddings:
    """Scores of the same images and captions by phrases: noise, and more for the right image."""
    scores = np.random.default_rng(seed).normal(size=(len(run.image_ids), len(run.caption_ids))).astype(np.float32) - 4
    scores[run.image_of_caption(), np.arange(len(run.caption_ids))] += signal
    values = replace(
        run,
        images=None,
        captions=None,
        scores=scores,
        n_phrases=np.full(len(run.caption_ids), 2),
        n_regions=np.full(len(run.image_ids), 36),
        similarity="euclidean",
        experiment="phrases",
        seed=seed,
    )
    return replace(values, **changes)


def slow_combination(run: Embeddings, phrases: Embeddings, alpha: float) -> np.ndarray:
    assert run.captions is not None
    if run.similarity == "order":
        nearness = slow_order_scores(run.images, run.captions)
    else:
        nearness = -np.linalg.norm(run.images[:, None].astype(np.float64) - run.captions, axis=2)
    found = nearness.copy()
    for image, caption in np.ndindex(*found.shape):
        if phrases.n_regions[image] and phrases.n_phrases[caption]:
            found[image, caption] = (1 - alpha) * nearness[image, caption] + alpha * phrases.scores[image, caption]
    return found


def write_both(folder: Path, run: Embeddings, phrases: Embeddings, split: str = "test") -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [
        write_embeddings(folder / f"{split}.h5", replace(run, split=split)),
        write_embeddings(folder / f"{split}_sentences.h5", replace(phrases, split=split)),
    ]


def run_eval(*arguments: str | Path) -> int | str | None:
    """The exit status of vse-eval."""
    with pytest.raises(SystemExit) as ended:
        eval_main([*map(str, arguments)])
    return ended.value.code


@pytest.mark.parametrize("make", [made, made_order])
def test_distances_are_added_by_their_shares(make: Any) -> None:
    run = make(noise=2.0)
    phrases = by_phrases(run)
    files = Path("a.h5"), Path("b.h5")
    found = combine_scores((files[0], run), (files[1], phrases), 0.3)
    np.testing.assert_allclose(found.scores[:], slow_combination(run, phrases, 0.3), atol=1e-5)


def test_what_has_no_phrases_or_no_regions_is_left_to_the_other_model(tmp_path: Path) -> None:
    run = made(noise=2.0)
    phrases = by_phrases(run)
    phrases.n_phrases[[3, 70, 71]], phrases.n_regions[5] = 0, 0
    files = write_both(tmp_path, run, phrases)
    found = json.loads(
        write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True, alpha=0.4, bootstrap=0)).read_text()
    )
    scores, image_of_caption = slow_combination(run, phrases, 0.4), run.image_of_caption().tolist()
    slow = metrics(Ranks(*map(np.array, slow_ranks(scores, image_of_caption))))
    for direction, of_lists in slow_metrics_of_lists(scores, scores, image_of_caption).items():
        assert found["protocols"]["full"][direction] == pytest.approx(slow[direction] | of_lists)
    assert found["combination"] == {"alpha": 0.4, "n_captions_without_phrases": 3, "n_images_without_regions": 1}


def test_without_phrases_the_ranks_are_those_of_the_embeddings(tmp_path: Path) -> None:
    run = made(noise=2.0)
    files = write_both(tmp_path, run, by_phrases(run))
    together = json.loads(
        write_result(files, tmp_path / "0.json", options=EvaluationOptions(ensemble=True, alpha=0, bootstrap=0)).read_text()
    )
    alone = json.loads(write_result(files[:1], tmp_path / "1.json", options=EvaluationOptions(bootstrap=0)).read_text())
    assert together["protocols"] == alone["protocols"]


def test_the_share_of_phrases_is_the_best_by_validation_over_seeds(tmp_path: Path) -> None:
    files = []
    for seed in (0, 1):
        for split, noise in (("test", 3.0), ("val", 2.0)):  # other pairs, as those of another split
            run = made(noise=noise, seed=seed, n_images=40)
            phrases = by_phrases(run, seed)
            written = write_both(tmp_path / str(seed), run, phrases, split)
            files += written if split == "test" else []
    found = json.loads(
        write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True, bootstrap=0)).read_text()
    )
    sums = {}
    for alpha in [k / 10 for k in range(11)]:
        of_seeds = []
        for seed in (0, 1):
            run, phrases = (read_embeddings(tmp_path / str(seed) / name) for name in ("val.h5", "val_sentences.h5"))
            scores = slow_combination(run, phrases, alpha)
            of_seeds.append(metrics(Ranks(*map(np.array, slow_ranks(scores, run.image_of_caption().tolist()))))["rsum"])
        sums[f"{alpha:g}"] = np.mean(of_seeds)
    assert found["combination"]["rsum_val"] == pytest.approx(sums)
    best = max(sums, key=lambda alpha: sums[alpha])
    assert f"{found['combination']['alpha']:g}" == best
    assert best not in ("0", "1")
    assert found["seeds"] == [0, 1]


def test_a_saved_ensemble_is_evaluated_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(noise=2.0)
    files = write_both(tmp_path, run, by_phrases(run))
    saved = tmp_path / "both.h5"
    arguments = [*files, "--ensemble", "--alpha", "0.3", "--bootstrap", "0"]
    assert run_eval(*arguments, "--save", saved, "--out", tmp_path / "r.json") == 0
    assert "share of phrases (alpha) 0.3, as given; 0 captions without phrases, 0 images" in capsys.readouterr().err
    again = json.loads(write_result([saved], tmp_path / "again.json", options=EvaluationOptions(bootstrap=0)).read_text())
    assert again["protocols"] == json.loads((tmp_path / "r.json").read_text())["protocols"]
    assert run_eval(saved, files[0], "--compare", "--bootstrap", "200", "--out", tmp_path / "c.json") == 0


def test_seeds_are_saved_one_by_one(tmp_path: Path) -> None:
    runs = [(made(seed=seed), made(seed=seed + 9, experiment="vse0")) for seed in (0, 1)]
    files = [write_embeddings(tmp_path / f"{k}.h5", run) for k, run in enumerate(run for pair in runs for run in pair)]
    for k, path in enumerate(files):
        write_embeddings(path, replace(read_embeddings(path), seed=k // 2))
    write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True, bootstrap=0, save=tmp_path / "both.h5"))
    result = json.loads((tmp_path / "r.json").read_text())
    again = write_result(
        [tmp_path / f"both-{seed}.h5" for seed in (0, 1)], tmp_path / "again.json", options=EvaluationOptions(bootstrap=0)
    )
    assert json.loads(again.read_text())["protocols"] == result["protocols"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{test}", "{sentences}", "--ensemble"], "val.h5: no such file, and alpha is chosen by it: write it with vse-embed"),
        (["{test}", "{sentences}", "--ensemble", "--alpha", "1.5"], "--alpha 1.5"),
        (["{test}", "{other}", "--ensemble", "--alpha", "0.5"], "--alpha is the share of phrases, and no file holds scores"),
        (["{test}", "{other}", "{sentences}", "--ensemble"], "2 image-sentence models and 1 phrase models"),
        (["{sentences}", "--alpha", "0.5"], "needs --ensemble"),
        (["{test}", "--save", "x.h5"], "needs --ensemble"),
        (
            ["{test}", "{short}", "--ensemble", "--alpha", "0.5"],
            "differ in image_ids; files that are evaluated together must have the same",
        ),
        (["{test}", "{sentences}", "--ensemble", "--alpha", "0", "--save", "{test}"], "test.h5"),
    ],
)
def test_what_cannot_be_combined_is_a_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(noise=2.0)
    test, sentences = write_both(tmp_path, run, by_phrases(run))
    short = made(n_images=20)
    files = {
        "{test}": test,
        "{sentences}": sentences,
        "{other}": write_embeddings(tmp_path / "other.h5", made(seed=3, experiment="vse0")),
        "{short}": write_embeddings(tmp_path / "short.h5", by_phrases(short)),
    }
    before = test.read_bytes()
    assert run_eval(*(files.get(argument, argument) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert message in said.replace("\n", " ")
    assert said.count("\n") == 1
    assert test.read_bytes() == before


def test_a_file_of_the_validation_split_must_be_of_the_same_model(tmp_path: Path) -> None:
    run = made(noise=2.0)
    files = write_both(tmp_path, run, by_phrases(run))
    write_both(tmp_path, replace(run, experiment="vse0"), by_phrases(run), "val")
    with pytest.raises(Exception, match=r"val\.h5: .* of the model of .*test\.h5"):
        write_result(files, tmp_path / "r.json", options=EvaluationOptions(ensemble=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_phrases": np.zeros(3, np.int64)}, "n_phrases are not 150 numbers from 0 on"),
        ({"n_regions": -np.ones(30, np.int64)}, "n_regions are not 30 numbers from 0 on"),
        ({"n_regions": None}, "lacks n_regions"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_embeddings(tmp_path / "s.h5", by_phrases(made(), **changes))
    with pytest.raises(Exception, match=message):
        read_embeddings(path)
