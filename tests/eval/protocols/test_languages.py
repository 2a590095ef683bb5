"""Captions in several languages: the evaluation of one language, and retrieval between two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.eval.evaluating import Fails, result_of, succeeds
from vse.eval.cli import eval_main, table_main
from vse.eval.files.embeddings import Embeddings, read_embeddings, write_embeddings
from vse.eval.report.report import write_report

LANGUAGES = ("en", "de", "fr")


def made(seed: int, n_images: int = 12, lacking: int = 3) -> Embeddings:
    """Embeddings with one to three captions in each language for each image; some images have no German caption."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, (n_images, len(LANGUAGES)))
    counts[:lacking, 1] = 0
    image_of = np.concatenate([np.repeat(np.arange(n_images), of_language) for of_language in counts.T])
    language = np.repeat(np.arange(len(LANGUAGES)), counts.sum(0))
    order = rng.permutation(len(image_of))
    images = rng.standard_normal((n_images, 5)).astype(np.float32)
    captions = (images[image_of[order]] + rng.standard_normal((len(order), 5))).astype(np.float32)
    return Embeddings(
        image_ids=100 + np.arange(n_images),
        caption_ids=1000 + np.arange(len(order)),
        caption_image_ids=100 + image_of[order],
        dataset="toy",
        split="test",
        images=images / np.linalg.norm(images, axis=1, keepdims=True),
        captions=captions / np.linalg.norm(captions, axis=1, keepdims=True),
        experiment="e",
        caption_languages=language[order],
        languages=",".join(LANGUAGES),
    )


def ranks_by_hand(run: Embeddings, query_language: str, answer_language: str) -> list[int]:
    """The rank of the best right caption for each caption of a language, on images with captions in all languages."""
    assert run.captions is not None
    assert run.caption_languages is not None
    names = [LANGUAGES[index] for index in run.caption_languages]
    of_image: dict[int, set[str]] = {}
    for image, name in zip(run.caption_image_ids.tolist(), names, strict=True):
        of_image.setdefault(image, set()).add(name)
    complete = [image for image, there in of_image.items() if len(there) == len(LANGUAGES)]
    ranks = []
    for q, query_image in enumerate(run.caption_image_ids):
        if names[q] != query_language or query_image not in complete:
            continue
        scores: dict[bool, list[float]] = {True: [], False: []}
        for a, answer_image in enumerate(run.caption_image_ids):
            if names[a] == answer_language and answer_image in complete:
                scores[bool(answer_image == query_image)].append(float(run.captions[q] @ run.captions[a]))
        ranks.append(sum(score >= max(scores[True]) for score in scores[False]))
    return ranks


@given(seed=st.integers(0, 1000))
def test_captions_of_one_language_find_those_of_another(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    run = made(seed)
    file = write_embeddings(tmp_path_factory.mktemp("pairs") / "test.h5", run)
    protocols = result_of([file], pairs=["en:de"])["protocols"]
    assert list(protocols) == ["en:de", "de:en"]
    for name, metrics in protocols.items():
        ranks = np.asarray(ranks_by_hand(run, *name.split(":")))
        for k in (1, 5, 10):
            assert metrics["t2t"][f"r{k}"] == pytest.approx(100 * (ranks < k).mean())
        assert metrics["t2t"]["meanr"] == pytest.approx(ranks.mean() + 1)


def test_one_language_is_evaluated_as_if_the_file_had_no_other(tmp_path: Path) -> None:
    run = made(0)
    assert run.caption_languages is not None
    whole = write_embeddings(tmp_path / "test.h5", run)
    complete = run.image_ids[3:]  # the first three have no German caption
    rows = (run.caption_languages == 1) & np.isin(run.caption_image_ids, complete)
    alone = replace(run.select(np.arange(3, 12), np.flatnonzero(rows)), caption_languages=None, languages=None)
    by_hand = result_of([write_embeddings(tmp_path / "alone.h5", alone)])
    result = result_of([whole], language="de")
    assert result["protocols"] == by_hand["protocols"]
    assert (result["n_images"], result["n_captions"]) == (9, rows.sum())
    assert result["language"] == "de"
    english = result_of([whole], language="en")
    assert english["split_identity"] == result["split_identity"]  # on the same images


def test_pairs_of_shuffled_captions_are_found_by_chance(tmp_path: Path) -> None:
    run = made(0, n_images=200, lacking=0)
    assert run.captions is not None
    shuffled = replace(run, captions=np.random.default_rng(0).permutation(run.captions))
    metrics = result_of([write_embeddings(tmp_path / "test.h5", shuffled)], pairs=["en:fr"])["protocols"]["en:fr"]["t2t"]
    assert metrics["r10"] == pytest.approx(100 * 10 / 200, abs=3)


def test_all_captions_are_evaluated_together_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_embeddings(tmp_path / "test.h5", made(0))
    result = result_of([file])
    assert result["n_images"] == 12
    assert "captions in en, de, fr are evaluated together" in caplog.text


def test_the_language_is_in_printed_lines_tables_comparisons_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_embeddings(tmp_path / "test.h5", made(0))
    results = []
    for language in ("en", "de"):
        results.append(tmp_path / f"{language}.json")
        succeeds(eval_main, file, "--language", language, "--out", results[-1], "--bootstrap", 100)
    assert "e (de) full" in capsys.readouterr().err
    succeeds(table_main, "summary", *results, "--out", tmp_path / "table.csv")
    table = (tmp_path / "table.csv").read_text()
    assert "e (en)" in table
    assert "e (de)" in table
    other = write_embeddings(tmp_path / "other.h5", replace(made(0), experiment="other"))
    given = ["--language", "de", "--bootstrap", 100, "--out"]
    succeeds(eval_main, "--compare", file, other, *given, tmp_path / "compared.json")
    assert json.loads((tmp_path / "compared.json").read_text())["n_images"] == 9
    succeeds(eval_main, other, *given, tmp_path / "other.json")
    succeeds(table_main, "compare", results[1], tmp_path / "other.json", "--out", tmp_path / "all.csv")
    assert "(de)" in (tmp_path / "all.csv").read_text()
    report = write_report([results[1]], tmp_path / "report.html").read_text()
    assert "Language of the captions" in report
    succeeds(eval_main, file, "--pairs", "en:de", "--out", tmp_path / "pairs.json", "--bootstrap", 100)
    assert "en:de: t2t R@1/5/10" in capsys.readouterr().err
    succeeds(table_main, "summary", tmp_path / "pairs.json", "--out", tmp_path / "pairs.csv")
    assert "de:en" in (tmp_path / "pairs.csv").read_text()
    write_report([tmp_path / "pairs.json"], tmp_path / "pairs.html")


def test_arrays_of_other_programs_have_languages(tmp_path: Path) -> None:
    run = made(0)
    folder = tmp_path / "arrays"
    folder.mkdir()
    assert run.caption_languages is not None
    np.save(folder / "images.npy", run.images)
    np.save(folder / "captions.npy", run.captions)
    rows = zip(run.caption_ids, run.caption_image_ids - 100, run.caption_languages, strict=True)
    lines = [f"{caption},{image},{LANGUAGES[language]}" for caption, image, language in rows]
    (folder / "captions.csv").write_text("\n".join(["caption_id,image_id,language", *lines]) + "\n")
    of_file = result_of([write_embeddings(tmp_path / "test.h5", run)], language="fr")["protocols"]
    assert result_of([folder], language="fr")["protocols"] == of_file
    (folder / "captions.csv").write_text("\n".join(["caption_id,image_id,language", *lines[:-1], "1,2,"]) + "\n")
    with pytest.raises(Exception, match=f"row {len(lines)}: has no language"):
        read_embeddings(folder)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--language", "it"], "no caption in the language 'it'"),
        (["--pairs", "en"], "give two languages"),
        (["--pairs", "en:en"], "names a language twice"),
        (["--pairs", "en:it"], "no caption in the language 'it'"),
        (["--pairs", "en:de", "--language", "de"], "leave one of the options out"),
        (["--language", "de", "--correct", "csls"], "--correct has a bank of all languages"),
    ],
)
def test_wrong_languages_are_one_line(tmp_path: Path, fails: Fails, options: list[Any], fault: str) -> None:
    file = write_embeddings(tmp_path / "test.h5", made(0))
    assert fault in fails(eval_main, file, *options)


def test_files_without_languages_or_with_wrong_ones_are_refused(tmp_path: Path, fails: Fails) -> None:
    run = made(0)
    assert run.caption_languages is not None
    none = write_embeddings(tmp_path / "none.h5", replace(run, caption_languages=None, languages=None))
    assert "does not have the languages of its captions" in fails(eval_main, none, "--language", "de")
    for changes, fault in (
        ({"languages": None}, "lacks the attribute languages"),
        ({"caption_languages": None}, "lacks caption_languages"),
        ({"languages": "en,de,f"}, "'f' is not a tag"),
        ({"languages": "en,de"}, "not .* numbers from 0 to 1"),
    ):
        wrong = write_embeddings(tmp_path / "wrong.h5", replace(run, **changes))
        with pytest.raises(Exception, match=fault):
            read_embeddings(wrong)
