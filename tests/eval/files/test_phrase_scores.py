"""The file of phrase scores: written values are read unchanged, and each fault is refused in one line."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.eval.files.test_refusals import attribute, changed, lacking, replaced
from tests.eval.some_phrases import some_phrases
from vse.eval.files.phrase_scores import PhraseScores, is_phrase_score_file, read_phrase_scores, write_phrase_scores
from vse.pipeline.errors import UserError

N_PHRASES, N_CANDIDATES = 48, 48 * 9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_phrase_scores(tmp_path / "p.h5", some_phrases())


def same(first: PhraseScores, second: PhraseScores) -> None:
    for field in fields(first):
        if field.name != "source":
            np.testing.assert_equal(np.asarray(getattr(second, field.name)), np.asarray(getattr(first, field.name)))


@pytest.mark.parametrize(
    "run",
    [
        some_phrases(),
        replace(some_phrases(), experiment=None, seed=None),
        some_phrases(provenance='{"a": 1}', trained_on="another"),
        some_phrases(types=np.array(["bodyparts", "", "Möbel/日", "x\ny"] * 12)),
        some_phrases(scores=1 - 1e-12 * np.arange(N_CANDIDATES)),
        some_phrases(
            offsets=np.zeros(N_PHRASES + 1, np.int64), scores=np.zeros(0, np.float32), boxes=np.zeros((0, 4), np.float32)
        ),
    ],
    ids=["plain", "unnamed", "of other data", "types of all kinds", "double precision", "no candidate at all"],
)
def test_what_is_written_is_read(run: PhraseScores, tmp_path: Path) -> None:
    same(run, read_phrase_scores(write_phrase_scores(tmp_path / "p.h5", run)))


def test_the_sum_is_of_what_is_stored_as_the_documentation_says(tmp_path: Path) -> None:
    run = some_phrases()
    arrays = {name: np.asarray(getattr(run, name)) for name in ("phrase_ids", "image_ids", "caption_ids", "offsets", "scores")}
    arrays |= {"boxes": run.boxes.astype(np.float64) + 1 / 3, "truth": run.truth.astype(np.float64) + 1 / 3}
    sums = {
        name: f"{values.dtype.str} {' x '.join(map(str, values.shape))} {hashlib.sha256(values.tobytes()).hexdigest()}"
        for name, values in arrays.items()
    }
    texts = "".join(f"{text}\n" for text in run.types).encode()
    sums["types"] = f"|u1 {len(texts)} {hashlib.sha256(texts).hexdigest()}"
    said = {"dataset": "toy", "split": "test", "experiment": "phrases", "seed": 0, "provenance": "{}"}
    content = json.dumps({"arrays": sums, "attributes": said}, sort_keys=True, separators=(",", ":"))
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file.update(arrays)
        file["types"] = run.types.tolist()
        file.attrs.update(said, format="vse-phrase-scores", version=1)
        file.attrs["content_sha256"] = hashlib.sha256(content.encode()).hexdigest()
    read = read_phrase_scores(tmp_path / "p.h5")
    assert (read.truth.dtype, read.boxes.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(read.boxes, arrays["boxes"], rtol=1e-6)


def test_a_file_of_another_program_is_read_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with h5py.File(tmp_path / "mine.h5", "w") as content:
        content["phrase_ids"] = content["image_ids"] = content["caption_ids"] = [3, 4]
        content["offsets"], content["scores"] = [0, 1, 3], [0.5, 1, 2]
        content["boxes"] = [[0, 0, 5, 5], [1, 1, 4, 4], [2, 2, 2, 9]]
        content["truth"] = [[0, 0, 5, 5], [np.nan] * 4]
        content["types"] = np.array([b"people", b"scene"])
        content.attrs.update(format="vse-phrase-scores", version=1, dataset="mine", split="test")
    with caplog.at_level(logging.INFO):
        run = read_phrase_scores(tmp_path / "mine.h5")
    assert "has no content_sha256, so its content is not checked" in caplog.text
    assert run.true_box_mask.tolist() == [True, False]
    assert run.types.tolist() == ["people", "scene"]
    assert run.boxes[run.candidate_slice(1)].tolist() == [[1, 1, 4, 4], [2, 2, 2, 9]]


OFFSETS = np.arange(N_PHRASES + 1) * 9
SPOILT = {
    "no format": (lacking("format"), "not a file of phrase scores: it has no attribute format"),
    "a cache of features": (attribute("format", "vse-features"), "its attribute format is 'vse-features'"),
    "a later version": (attribute("version", 2), "version 2"),
    "no offsets": (lacking("offsets"), "it lacks offsets"),
    "no types, no truth": (lacking("types", "truth"), "it lacks truth, types"),
    "no data set": (lacking("dataset"), "it lacks the attribute dataset"),
    "scores that are a group": (lambda file: [lacking("scores")(file), file.create_group("scores")], "it lacks scores"),
    "scores that lie elsewhere": (replaced("scores", h5py.ExternalLink("x.h5", "scores")), "scores is a link"),
    "ids with fractions": (replaced("phrase_ids", np.arange(N_PHRASES) + 0.5), "phrase_ids must be a 1-D integer array"),
    "a phrase twice": (changed("phrase_ids", 1, 50), "duplicate phrase id 50"),
    "a caption of two images": (changed("image_ids", 1, 11), "phrases of caption 20 are of different images"),
    "scores in a matrix": (replaced("scores", np.zeros((48, 9))), "scores has shape (48, 9), expected (n_candidates,)"),
    "too few scores": (replaced("scores", np.zeros(5, np.float32)), "boxes has shape (432, 4), expected (5, 4)"),
    "a score that is no number": (changed("scores", 20, np.nan), "scores row 20, of phrase 52, is not finite"),
    "offsets of phrases alone": (replaced("offsets", OFFSETS[:-1]), "offsets has shape (48,), expected (49,)"),
    "offsets from 1": (changed("offsets", 0, 1), "offsets must rise from 0 to the number of scores, 432, and goes from 1"),
    "offsets that fall": (changed("offsets", 3, 5), "and falls after phrase row 2"),
    "boxes of width and height": (changed("boxes", 10, [50, 60, 20, 20]), "boxes row 10, of phrase 51, is not x1, y1, x2, y2"),
    "boxes of three numbers": (replaced("boxes", np.zeros((N_CANDIDATES, 3))), "boxes has shape (432, 3), expected (432, 4)"),
    "half a truth": (changed("truth", (4, 2), np.nan), "truth row 4, of phrase 54, is neither a box nor NaN"),
    "a truth without area": (changed("truth", 4, [1, 2, 1, 9]), "truth row 4, of phrase 54, is not x1, y1, x2, y2: x2 <= x1"),
    "types that are numbers": (replaced("types", np.arange(N_PHRASES)), "types must be texts"),
    "types that are not UTF-8": (replaced("types", np.array([b"\xff\xfe"] * N_PHRASES)), "types are not UTF-8"),
    "scores that were exchanged": (changed("scores", 3, 9.0), "content_sha256"),
    "another data set": (attribute("dataset", "other"), "content_sha256"),
    "a sum that is none": (attribute("content_sha256", 5), "content_sha256"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_malformed_file_is_refused_in_one_line(kind: str, file: Path) -> None:
    spoil, reason = SPOILT[kind]
    with h5py.File(file, "a") as content:
        spoil(content)
    with pytest.raises(UserError) as error:
        read_phrase_scores(file)
    message = str(error.value)
    assert message.startswith(f"{file}: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04" * 100], ids=["empty", "head alone", "archive"])
def test_what_is_no_hdf5_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.h5").write_bytes(content)
    for path, reason in (
        ("p.h5", "not a readable HDF5 file of phrase scores"),
        ("none.h5", "no such file"),
        (".", "is a folder"),
    ):
        assert not is_phrase_score_file(tmp_path / path)
        with pytest.raises(UserError, match=reason):
            read_phrase_scores(tmp_path / path)


def test_a_file_that_is_cut_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(0, len(whole) - 8, 1009):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError, match="p.h5: "):
            read_phrase_scores(file)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"phrase_ids": np.zeros(N_PHRASES, np.int64)}, "duplicate phrase id 0"), ({"n_images": 0}, "no phrases")],
)
def test_a_writer_s_own_fault_is_no_user_error(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        write_phrase_scores(tmp_path / "p.h5", some_phrases(**changes))
    assert not list(tmp_path.iterdir())
