"""Right answers that people judged: files of judgements, and metrics as pytrec_eval, scipy and slow code compute them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval

from tests.eval.evaluating import Fails, result_of, succeeds
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import Embeddings, write_embeddings
from vse.eval.report.report import write_report

N_IMAGES, N_CAPTIONS = 30, 45  # the captions 0 to 29 are the first ones of the images, the others second ones
DIRECTIONS = ("i2t", "t2i")
Grades = dict[tuple[int, int], int]  # the grade of an image and a caption


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def embeddings(rng: np.random.Generator, noise: float = 1.0) -> Embeddings:
    images = unit_rows(rng.standard_normal((N_IMAGES, 6)).astype(np.float32))
    image_of = np.concatenate([np.arange(30), rng.permutation(30)[:15]])
    captions = unit_rows(images[image_of] + noise * rng.standard_normal((N_CAPTIONS, 6)).astype(np.float32))
    ids = {"image_ids": 100 + np.arange(N_IMAGES), "caption_ids": 1000 + np.arange(N_CAPTIONS)}
    return Embeddings(
        **ids, caption_image_ids=100 + image_of, dataset="toy", split="test", images=images, captions=captions, experiment="e"
    )


def random_grades(rng: np.random.Generator, n: int = 200) -> Grades:
    pairs = zip(rng.integers(0, N_IMAGES, n).tolist(), rng.integers(0, N_CAPTIONS, n).tolist(), strict=True)
    return {pair: int(grade) for pair, grade in zip(pairs, rng.integers(0, 4, n), strict=True)}


def write_qrels(path: Path, grades: Grades) -> Path:
    path.write_text("".join(f"image-{100 + i} 0 caption-{1000 + c} {grade}\n" for (i, c), grade in grades.items()))
    return path


def judged(tmp_path: Path, run: Embeddings, grades: Grades, **options: Any) -> dict[str, Any]:
    file = write_embeddings(tmp_path / "test.h5", run)
    qrels = write_qrels(tmp_path / "some.qrels", grades)
    protocol: dict[str, Any] = result_of([file], "full", qrels=qrels, **options)["protocols"]["judged-qrels"]
    return protocol


def scores_of(run: Embeddings) -> np.ndarray:
    assert run.images is not None
    assert run.captions is not None
    return run.images @ run.captions.T


def with_own_pairs(run: Embeddings, grades: Grades) -> tuple[Grades, list[int], list[int]]:
    """Return the grades with those of own pairs in the pool, and the rows of the pool's images and captions."""
    images, captions = (sorted({pair[k] for pair in grades}) for k in (0, 1))
    own = {(int(run.caption_image_ids[c]) - 100, c): max(grades.values()) for c in captions}
    return {**{pair: grade for pair, grade in own.items() if pair[0] in images}, **grades}, images, captions


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
def test_pytrec_eval_measures_the_same(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    run, grades = embeddings(rng), random_grades(rng)
    protocol = judged(tmp_path, run, grades)
    graded, images, captions = with_own_pairs(run, grades)
    scores = scores_of(run)
    for direction in DIRECTIONS:
        qrels: dict[str, dict[str, int]] = {}
        answers: dict[str, dict[str, float]] = {}
        for image in images:
            for caption in captions:
                query, answer = (str(image), str(caption)) if direction == "i2t" else (str(caption), str(image))
                answers.setdefault(query, {})[answer] = float(scores[image, caption])
                if (image, caption) in graded:
                    qrels.setdefault(query, {})[answer] = graded[image, caption]
        answered = {query for query, of_query in qrels.items() if max(of_query.values()) >= 1}
        evaluator = pytrec_eval.RelevanceEvaluator(
            {query: qrels[query] for query in answered}, {"P_1", "Rprec", "ndcg_cut_10", "bpref"}
        )
        by_query = evaluator.evaluate({query: answers[query] for query in answered}).values()
        assert protocol["n_queries"][direction] == len(answered)
        for ours, theirs in (("r1", "P_1"), ("rprecision", "Rprec"), ("ndcg10", "ndcg_cut_10"), ("bpref", "bpref")):
            expected = 100 * np.mean([of_query[theirs] for of_query in by_query])
            assert protocol[direction][ours] == pytest.approx(expected), (direction, ours)


@pytest.mark.parametrize("seed", range(3))
def test_the_other_metrics_are_those_of_slow_code(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    run, grades = embeddings(rng), random_grades(rng)
    protocol = judged(tmp_path, run, grades)
    graded, images, captions = with_own_pairs(run, grades)
    scores = scores_of(run)
    values: dict[str, list[float]] = {"map_at_r": [], "judged10": [], "r1_own": []}
    for caption in captions:
        order = sorted(images, key=lambda image: -scores[image, caption])
        right = [graded.get((image, caption), 0) >= 1 for image in order]
        if any(right):
            n_right = sum(right)
            precisions = [sum(right[: k + 1]) / (k + 1) for k in range(n_right) if right[k]]
            values["map_at_r"].append(100 * sum(precisions) / n_right)
            values["judged10"].append(10 * sum((image, caption) in graded for image in order[:10]))
            values["r1_own"].append(100 * (run.caption_image_ids[caption] == 100 + order[0]))
    for name, expected in values.items():
        assert protocol["t2i"][name] == pytest.approx(np.mean(expected)), name


def test_tau_counts_pairs_that_scores_and_ratings_order_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    run, grades = embeddings(rng), random_grades(rng)
    found = judged(tmp_path, run, grades)["pairs"]
    scores = scores_of(run)
    foreign = [(i, c) for i, c in grades if run.caption_image_ids[c] != 100 + i]
    x, y = np.array([scores[pair] for pair in foreign]), np.array([grades[pair] for pair in foreign])
    alike = unlike = tied_x = tied_y = 0
    for a in range(len(x)):
        for b in range(a):
            sign = np.sign(x[a] - x[b]) * np.sign(y[a] - y[b])
            alike, unlike = alike + (sign > 0), unlike + (sign < 0)
            tied_x, tied_y = tied_x + (x[a] == x[b] and y[a] != y[b]), tied_y + (y[a] == y[b] and x[a] != x[b])
    n, m = len(x), len(np.unique(y))
    both = alike + unlike
    assert found["tau_b"] == pytest.approx(100 * (alike - unlike) / np.sqrt((both + tied_x) * (both + tied_y)))
    assert found["tau_c"] == pytest.approx(100 * 2 * m * (alike - unlike) / (n**2 * (m - 1)))


def test_an_own_pair_is_right_unless_people_said_otherwise(tmp_path: Path) -> None:
    run = embeddings(np.random.default_rng(0), noise=0.01)
    nobody_right = {(i, (i + 1) % N_IMAGES): 0 for i in range(N_IMAGES)}
    assert judged(tmp_path, run, nobody_right)["t2i"]["r1"] == 100
    with_verdict = {**nobody_right, **{(i, i): 0 for i in range(10)}}
    protocol = judged(tmp_path, run, with_verdict)
    assert protocol["n_queries"] == {"i2t": 20, "t2i": 20}, "ten queries have no right answer"


def test_judgements_on_shuffled_captions_are_at_chance(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    run = embeddings(rng, noise=0.5)
    shuffled = run.select(np.arange(N_IMAGES), np.arange(N_CAPTIONS))
    assert run.captions is not None
    values = []
    for _ in range(40):
        object.__setattr__(shuffled, "captions", run.captions[rng.permutation(N_CAPTIONS)])
        values.append(judged(tmp_path, shuffled, {(i, i): 1 for i in range(N_IMAGES)})["i2t"]["r1"])
    assert np.mean(values) == pytest.approx(100 / 30, abs=1.5)


PHOTOS = {"a.jpg": 100, "b.jpg": 101, "c.jpg": 102}


def write_flickr(tmp_path: Path, expert: str, order: tuple[int, ...] = (0, 1, 2)) -> tuple[Path, Path, Path]:
    """Write embeddings, a file of experts, and the data set that has the names of the photographs. Each has one caption.

    The vector of caption k is that of image ``order[k]``.
    """
    rng = np.random.default_rng(0)
    images = unit_rows(rng.standard_normal((3, 4)).astype(np.float32))
    ids = {"image_ids": np.arange(100, 103), "caption_ids": np.arange(1000, 1003), "caption_image_ids": np.arange(100, 103)}
    run = Embeddings(**ids, dataset="toy", split="test", images=images, captions=images[list(order)], experiment="e")
    entries = [
        {
            "imgid": imgid,
            "filename": name,
            "split": "test",
            "sentids": [imgid + 900],
            "sentences": [{"sentid": imgid + 900, "imgid": imgid, "raw": "a gull", "tokens": ["a", "gull"]}],
        }
        for name, imgid in PHOTOS.items()
    ]
    dataset, judgements = tmp_path / "dataset.json", tmp_path / "ExpertAnnotations.txt"
    dataset.write_text(json.dumps({"dataset": "toy", "images": entries}))
    judgements.write_text(expert)
    return write_embeddings(tmp_path / "test.h5", run), judgements, dataset


def test_the_files_of_flickr8k_name_photographs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The experts accept a foreign pair with a mean of 3 or more."""
    lines = "a.jpg\tb.jpg#0\t3\t3\t3\nb.jpg\tc.jpg#0\t2\t3\t3\nc.jpg\ta.jpg#0\t1\t1\t2\nx.jpg\ta.jpg#0\t1\t1\t1\n"
    file, expert, dataset = write_flickr(tmp_path, lines)
    succeeds(eval_main, file, "--judgements", f"expert={expert}", "--dataset", dataset, "--out", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["judgements"]["judged-expert"] == {
        "file": "ExpertAnnotations.txt",
        "sha256": result["judgements"]["judged-expert"]["sha256"],
        "pairs": 3,
        "right_pairs": 1,
        "unknown_pairs": 1,
        "unreadable_lines": 0,
    }
    assert "1 of 4 pairs are not of this split, e.g. x.jpg and a.jpg#0" in caplog.text
    assert result["protocols"]["judged-expert"]["i2t"]["r1_own"] == 100
    assert set(result["protocols"]["judged-expert"]["ci95"]["pairs"]) == {"tau_b", "tau_c"}


def test_a_crowd_accepts_a_pair_with_half_of_its_votes(tmp_path: Path) -> None:
    lines = "a.jpg\tb.jpg#0\t0.5\t2\t2\nb.jpg\tc.jpg#0\t0.333\t1\t2\n"
    file, crowd, dataset = write_flickr(tmp_path, lines)
    result = result_of([file], judgements=[f"crowd={crowd}"], dataset=dataset)
    assert result["judgements"]["judged-crowd"]["right_pairs"] == 1


@pytest.mark.parametrize(
    ("expert", "options", "message"),
    [
        ("a.jpg b.jpg#0 3 3 3\n", ("--judgements", "expert={expert}"), "a.jpg; their data set is needed: --dataset"),
        ("a.jpg b.jpg#0 3 3 9\n", ("--judgements", "expert={expert}"), "line 1 is not a judgement (image, caption and three"),
        ("a.jpg b.jpg#0 3 3\n", ("--judgements", "expert={expert}"), "line 1 is not a judgement"),
        (
            "image-1 0 caption-1 1\n",
            ("--qrels", "{expert}"),
            "none of its 1 pairs has an image and a caption of the split 'test'",
        ),
        ("", ("--judgements", "experts={expert}"), "did you mean 'expert'"),
        ("", ("--judgements", "{expert}"), "KIND=FILE is needed"),
        ("", ("--qrels", "{expert}", "--judgements", "qrels={expert}"), "two files of the kind qrels"),
        ("", ("--dataset", "{expert}"), "--dataset is for names in --judgements"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, fails: Fails, expert: str, options: tuple[str, ...], message: str) -> None:
    file, path, _ = write_flickr(tmp_path, expert)
    assert message in fails(eval_main, file, *(option.format(expert=path) for option in options))


def test_a_comparison_tests_the_judged_metrics_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    qrels = write_qrels(tmp_path / "some.qrels", random_grades(rng))
    files = []
    for name, noise in (("good", 0.3), ("bad", 3.0)):
        run = embeddings(np.random.default_rng(1), noise)
        object.__setattr__(run, "experiment", name)
        files.append(write_embeddings(tmp_path / f"{name}.h5", run))
    out = tmp_path / "both.json"
    succeeds(eval_main, *files, "--compare", "--qrels", qrels, "--bootstrap", 200, "--out", out)
    compared = json.loads(out.read_text())["comparisons"]["judged-qrels"]
    assert compared["i2t"]["r1"]["difference"] > 0


def test_a_report_displays_errors_that_people_accept(tmp_path: Path) -> None:
    """The caption of b comes first for a, which people accept, and that of a for b, which they do not."""
    file, expert, dataset = write_flickr(tmp_path, "a.jpg b.jpg#0 4 3 3\nb.jpg a.jpg#0 1 1 2\n", order=(1, 0, 2))
    result = tmp_path / "result.json"
    succeeds(eval_main, file, "--judgements", f"expert={expert}", "--dataset", dataset, "--out", result)
    page = write_report([result], tmp_path / "report.html", data=dataset).read_text(encoding="utf-8")
    assert "Accepted by people" in page
    assert page.count("of 4</p>") == 1
    assert "experts: 4, 3, 3 of 4" in page
    expert.write_text("a.jpg b.jpg#0 4 4 4\n")
    page = write_report([result], tmp_path / "report.html", data=dataset).read_text(encoding="utf-8")
    assert "ExpertAnnotations.txt have changed since the evaluation" in page
    expert.unlink()
    page = write_report([result], tmp_path / "report.html", data=dataset).read_text(encoding="utf-8")
    assert "ExpertAnnotations.txt cannot be read" in page
