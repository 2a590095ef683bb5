from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.eval.evaluating import Fails, result_of, succeeds, write_result
from tests.eval.protocols.test_evaluate import made, made_order
from tests.eval.slow_ranks import slow_metrics_of_lists, slow_order_scores, slow_ranks
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.files.results import read_result
from vse.eval.options import AllEvaluateOptions
from vse.eval.protocols.ensemble import build_ensemble, read_members_per_seed
from vse.eval.ranking.metrics import Ranks, compute_metrics
from vse.eval.tables.summary import build_summary
from vse.pipeline.errors import UserError


def average(files: list[Path]) -> Embeddings:
    [members] = read_members_per_seed(files)
    return build_ensemble(members)


def dense_scores(run: Embeddings) -> np.ndarray:
    if run.scores is not None:
        return np.asarray(run.scores[:])
    if run.similarity == "order":
        return slow_order_scores(run.images, run.captions)
    return run.images.astype(np.float64) @ run.captions.T.astype(np.float64)


def slow_metrics(scores: np.ndarray, run: Embeddings) -> dict[str, Any]:
    return compute_metrics(Ranks(*map(np.array, slow_ranks(scores, run.image_of_caption().tolist()))))


def check(found: dict[str, Any], scores: np.ndarray, run: Embeddings) -> None:
    """Check a result against a dense matrix of scores."""
    slow = slow_metrics(scores, run)
    for direction, of_lists in slow_metrics_of_lists(scores, scores, run.image_of_caption().tolist()).items():
        assert found["protocols"]["full"][direction] == pytest.approx(slow[direction] | of_lists)


@pytest.mark.parametrize(("make", "n_members"), [(made, 3), (made_order, 2)])
def test_an_ensemble_ranks_by_the_mean_of_the_score_matrices(
    make: Callable[..., Embeddings], n_members: int, tmp_path: Path
) -> None:
    members = [make(seed=k, noise=2.0) for k in range(n_members)]  # of the same split, one with vectors of another size
    members[0] = replace(members[0], images=members[0].images[:, :12], captions=members[0].captions[:, :12])
    files = [write_embeddings(tmp_path / f"{k}.h5", member) for k, member in enumerate(members)]
    mean = np.mean([dense_scores(member) for member in members], axis=0)
    check(result_of(files, ensemble=True), mean, members[0])
    np.testing.assert_allclose(dense_scores(average(files)), mean, atol=1e-6)


def test_an_ensemble_is_no_row_of_its_members_and_called_by_their_labels(tmp_path: Path) -> None:
    notes = [json.dumps({"config": {"label": label}}) for label in ("t-i AVG", "i-t LSE")]
    runs = [made(experiment="vsepp", provenance=notes[0]), made(seed=1, experiment="vse0", provenance=notes[1])]
    files = [write_embeddings(tmp_path / f"{k}.h5", run) for k, run in enumerate(runs)]
    result = result_of(files, ensemble=True)
    assert result["experiment"] == "ensemble of 2 (vsepp, vse0)"
    assert [noted["file"] for noted in result["provenance"]["embeddings"]] == ["0.h5", "1.h5"]
    assert "rows" not in result["provenance"]["config"]
    assert build_summary([tmp_path / "0.json"])["method"].unique().tolist() == ["t-i AVG + i-t LSE"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a file of an experiment and a seed; the preset ``duo`` is an ensemble of ``vsepp`` and ``vse0``.

    ``twice`` is one of two seeds of ``vsepp``.
    """
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "duo.yaml").write_text("title: Both\nseeds: [0, 1]\nensemble_of: [vsepp, vse0]\n")
    (tmp_path / "experiments" / "twice.yaml").write_text("seeds: [0, 1]\nensemble_of: [vsepp]\n")
    monkeypatch.setenv("VSE_PRESETS", str(tmp_path))

    def write(experiment: str, seed: int | None, name: str = "", **changes: Any) -> Path:
        run = made(seed=10 * (seed or 0) + len(experiment), noise=2.0, **changes)
        path = tmp_path / f"{name or experiment}-{seed}.h5"
        return write_embeddings(path, replace(run, experiment=experiment, seed=seed))

    return write


@pytest.mark.parametrize("preset", [[], ["--experiment", "duo"]])
def test_seed_s_of_an_ensemble_is_made_of_seed_s_of_every_member(
    preset: list[str], write: Callable[..., Path], tmp_path: Path
) -> None:
    files = {seed: [write(experiment, seed) for experiment in ("vsepp", "vse0")] for seed in (3, 1)}
    alone = [result_of(members, ensemble=True) for members in files.values()]
    shuffled = [files[3][1], files[3][0], files[1][0], files[1][1]]
    succeeds(eval_main, *shuffled, "--ensemble", *preset, "--out", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["seeds"] == [3, 1]
    for direction in ("i2t", "t2i"):
        for name, metric in result["protocols"]["full"][direction].items():
            each = [one["protocols"]["full"][direction][name] for one in alone]
            assert metric == {"mean": pytest.approx(np.mean(each)), "std": pytest.approx(np.std(each, ddof=1))}
    order = ["vsepp", "vse0"] if preset else ["vse0", "vsepp"]
    members = [(experiment, seed) for seed in (3, 1) for experiment in order]
    assert [(member["experiment"], member["seed"]) for member in result["ensemble"]] == members
    assert [file["file"] for file in result["provenance"]["embeddings"]] == [f"{name}-{seed}.h5" for name, seed in members]


def test_a_preset_names_the_ensemble_and_its_title_and_what_was_changed_in_a_member(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    noted = {"features": {"fc7": "aa"}, "changed_settings": ["loss.margin: 0.2 -> 0.1"], "config": {"label": "mine"}}
    files = [write("vsepp", 0, provenance=json.dumps(noted)), write("vse0", 0, provenance='{"features": {"effnet": "bb"}}')]
    path = write_result(files, tmp_path / "r.json", options=AllEvaluateOptions(ensemble=True, experiment="duo"))
    result = read_result(path)
    assert (result.experiment, result.seeds) == ("duo", [0])
    assert result.provenance["config"]["ensemble_of"] == ["vsepp", "vse0"]
    assert result.provenance["features"] == {"fc7": "aa", "effnet": "bb"}
    row = build_summary([path]).iloc[0]
    assert (row["experiment"], row["method"]) == ("duo[margin=0.1]", "Both[margin=0.1]")
    assert (row["feature"], row["settings"]) == ("fc7 + effnet", "vsepp.loss.margin: 0.2 -> 0.1")


def test_seeds_of_one_experiment_are_members_and_so_are_single_files_of_any_seed(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    seeds = [write("vsepp", seed) for seed in (0, 1, 2)]
    mixed = [seeds[0], write("vse0", 5), write("order0", None)]
    for files in (seeds, mixed):
        assert [[path for path, _ in members] for members in read_members_per_seed(files)] == [files]
    options = AllEvaluateOptions(bootstrap=0, ensemble=True, experiment="twice")
    result = read_result(write_result(seeds[:2], tmp_path / "r.json", options=options))
    assert (result.experiment, [member.seed for member in result.ensemble]) == ("twice", [0, 1])
    check(json.loads((tmp_path / "r.json").read_text()), dense_scores(average(seeds[:2])), average(seeds[:2]))


def test_what_is_no_ensemble_of_a_preset_or_lacks_a_seed_is_named(
    write: Callable[..., Path], tmp_path: Path, fails: Fails
) -> None:
    out = tmp_path / "r.json"
    a, b = ([write(experiment, seed) for seed in (0, 1)] for experiment in ("vsepp", "vse0"))
    other, twin = write("order0", 0), write("vse0", 1, name="again")
    f8k = [write(experiment, 2, dataset="f8k") for experiment in ("vsepp", "vse0")]
    odd = write("odd", 1, n_images=31)
    order = write_embeddings(tmp_path / "order.h5", made_order(seed=1))
    pairs = write_embeddings(tmp_path / "pairs.h5", made(images=None, captions=None, scores=np.zeros((30, 150), np.float32)))
    for files, preset, reason in (
        ([*a, b[0]], None, "no file of vse0 seed 1"),
        ([*a, *b, other], None, "no file of order0 seed 1"),
        ([*a, *b, twin], None, "again-1.h5 and .*vse0-1.h5 are both vse0 seed 1"),
        ([write("vsepp", None), *b], None, "no file of vse0 without a seed"),
        (a, "duo", "no file of vse0 seed 0"),
        ([a[0], b[1]], "duo", "no file of vse0 seed 0"),
        ([a[0], other], "duo", "order0-0.h5: .* order0 .* duo, which has vsepp and vse0"),
        ([a[0], b[0], *f8k], None, "vsepp-2.h5 has dataset 'f8k'"),
        (a[:1], None, "at least two members"),
        ([a[0], a[0]], None, "counts every member once"),
        ([a[0], order], None, "order.h5 has similarity 'order', "),
        ([a[0], pairs], None, "cannot be averaged: one holds scores, the other embeddings"),
        ([a[0], odd], None, "differ in image_ids"),
        ([a[0], b[0]], "vsepp", "the experiment vsepp is not an ensemble"),
        ([a[0], b[0]], "dou", r"unknown experiment 'dou' \(did you mean 'duo'"),
    ):
        options = ["--experiment", preset] if preset else []
        line = fails(eval_main, *files, "--ensemble", *options, "--out", out)
        assert re.search(reason, line), line
    assert "needs --ensemble" in fails(eval_main, *a, "--experiment", "duo", "--out", out)
    assert not out.exists()


# An image-sentence model with a phrase model (Eq. 8 of the two-branch paper).


def by_phrases(run: Embeddings, seed: int = 0, signal: float = 1.0, **changes: Any) -> Embeddings:
    """Scores of the same images and captions by phrases: noise, and more for the right image."""
    n_images, n_captions = len(run.image_ids), len(run.caption_ids)
    scores = np.random.default_rng(seed).normal(size=(n_images, n_captions)).astype(np.float32) - 4
    scores[run.image_of_caption(), np.arange(n_captions)] += signal
    counts = {"n_phrases": np.full(n_captions, 2), "n_regions": np.full(n_images, 36)}
    named = {"similarity": "euclidean", "experiment": "phrases", "seed": seed}
    return replace(run, **{"images": None, "captions": None, "scores": scores, **counts, **named, **changes})


def slow_combination(run: Embeddings, phrases: Embeddings, alpha: float) -> np.ndarray:
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


@pytest.mark.parametrize("make", [made, made_order])
def test_what_has_no_phrases_or_no_regions_is_left_to_the_other_model(make: Callable[..., Embeddings], tmp_path: Path) -> None:
    run = make(noise=2.0)
    phrases = by_phrases(run)
    phrases.n_phrases[[3, 70, 71]], phrases.n_regions[5] = 0, 0
    files = write_both(tmp_path, run, phrases)
    found = result_of(files, ensemble=True, alpha=0.4)
    check(found, slow_combination(run, phrases, 0.4), run)
    assert found["combination"] == {"alpha": 0.4, "n_captions_without_phrases": 3, "n_images_without_regions": 1}
    assert result_of(files, ensemble=True, alpha=0)["protocols"] == result_of(files[:1])["protocols"]


def test_the_share_of_phrases_is_the_best_by_validation_over_seeds(tmp_path: Path) -> None:
    files = []
    for seed in (0, 1):
        for split, noise in (("test", 3.0), ("val", 2.0)):  # other pairs, as those of another split
            run = made(noise=noise, seed=seed, n_images=40)
            written = write_both(tmp_path / str(seed), run, by_phrases(run, seed), split)
            files += written if split == "test" else []
    found = result_of(files, ensemble=True)
    sums = {}
    for alpha in [k / 10 for k in range(11)]:
        of_seeds = []
        for seed in (0, 1):
            run, phrases = (read_embeddings(tmp_path / str(seed) / name) for name in ("val.h5", "val_sentences.h5"))
            of_seeds.append(slow_metrics(slow_combination(run, phrases, alpha), run)["rsum"])
        sums[f"{alpha:g}"] = np.mean(of_seeds)
    assert found["combination"]["rsum_val"] == pytest.approx(sums)
    best = max(sums, key=lambda alpha: sums[alpha])
    assert f"{found['combination']['alpha']:g}" == best not in ("0", "1")
    assert found["seeds"] == [0, 1]
    write_both(tmp_path / "1", replace(run, experiment="vse0"), by_phrases(run, 1), "val")
    with pytest.raises(UserError, match=r"val\.h5: .* of the model of .*test\.h5"):
        result_of(files, ensemble=True)


def test_a_saved_ensemble_is_evaluated_as_it_was(tmp_path: Path) -> None:
    run, out = made(noise=2.0), tmp_path / "r.json"
    files, saved = write_both(tmp_path, run, by_phrases(run)), tmp_path / "both.h5"
    succeeds(eval_main, *files, "--ensemble", "--alpha", "0.3", "--bootstrap", "0", "--save", saved, "--out", out)
    assert result_of([saved])["protocols"] == json.loads(out.read_text())["protocols"]
    succeeds(eval_main, saved, files[0], "--compare", "--bootstrap", "200", "--out", tmp_path / "c.json")
    runs = [made(seed=seed + 9 * k, experiment=name) for seed in (0, 1) for k, name in enumerate(("vsepp", "vse0"))]
    files = [write_embeddings(tmp_path / f"{k}.h5", replace(run, seed=k // 2)) for k, run in enumerate(runs)]
    together = result_of(files, ensemble=True, save=saved)["protocols"]
    assert result_of([tmp_path / f"both-{seed}.h5" for seed in (0, 1)])["protocols"] == together


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("test sentences --ensemble", "val.h5: no such file, and alpha is chosen by it: write it with vse-embed"),
        ("test sentences --ensemble --alpha 1.5", "'--alpha': 1.5"),
        ("test other --ensemble --alpha 0.5", "--alpha is the share of phrases, and no file holds scores"),
        ("test other sentences --ensemble", "2 image-sentence models and 1 phrase models"),
        ("sentences --alpha 0.5", "needs --ensemble"),
        ("test --save x.h5", "needs --ensemble"),
        ("test short --ensemble --alpha 0.5", "differ in image_ids; files that are evaluated together must have the same"),
        ("test sentences --ensemble --alpha 0 --save test", "test.h5"),
    ],
)
def test_what_cannot_be_combined_is_a_line(arguments: str, message: str, tmp_path: Path, fails: Fails) -> None:
    run = made(noise=2.0)
    test, sentences = write_both(tmp_path, run, by_phrases(run))
    other = write_embeddings(tmp_path / "other.h5", made(seed=3, experiment="vse0"))
    short = write_embeddings(tmp_path / "short.h5", by_phrases(made(n_images=20)))
    files, before = {"test": test, "sentences": sentences, "other": other, "short": short}, test.read_bytes()
    assert message in fails(eval_main, *(files.get(word, word) for word in arguments.split()))
    assert test.read_bytes() == before


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
    with pytest.raises(UserError, match=message):
        read_embeddings(path)
