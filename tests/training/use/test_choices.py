"""From a data set with marked phrases to a report of choices: the commands that a user types."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.conftest import done, experiment
from vse.cli import data_main
from vse.eval.cli import eval_main
from vse.eval.files.embeddings import read_embeddings
from vse.pipeline.dataset.choices import read_choices
from vse.training.cli import embed_main, report_main
from vse.training.training import train


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["cosine", "scan"])
def test_a_run_chooses_between_swapped_captions(cache: Path, positions: Path, demo: Path, tmp_path: Path, form: str) -> None:
    scan = [
        "model.similarity={name: scan, attention: t2i, aggregation: avg}",
        "model.caption_encoder={name: gru, states: all}",
    ]
    run = train(*((cache, experiment()) if form == "cosine" else (positions, experiment(*scan))), out=tmp_path / "run")
    done(data_main, "swap-phrases", demo, "--out", tmp_path / "swapped")
    done(embed_main, run, "--captions", tmp_path / "swapped/dataset.json", "--out", tmp_path / "test.h5")
    choices = tmp_path / "swapped/choices.json"
    done(eval_main, tmp_path / "test.h5", "--choices", choices, "--bootstrap", 100, "--out", tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())["protocols"]
    embeddings, (content, _) = read_embeddings(tmp_path / "test.h5"), read_choices(choices)
    scores = embeddings.images @ embeddings.captions.T if form == "cosine" else embeddings.scores[:]
    images, captions = embeddings.image_ids.tolist(), embeddings.caption_ids.tolist()
    hits = []
    for one in content.choices:
        right, wrong = (scores[images.index(one.imgid), captions.index(sentid)] for sentid in one.sentids)
        hits.append(right > wrong)
    assert found["choices"]["i2t"]["r1"] == pytest.approx(100 * np.mean(hits))
    assert set(found) <= {"choices", "choices-same_type", "choices-other_type"}
    done(report_main, tmp_path / "result.json", "--out", tmp_path / "page.html", "--queries", 3)
    page = (tmp_path / "page.html").read_text()
    assert page.count('<p class="right">') == min(3, sum(hits)) + min(3, len(hits) - sum(hits))
    assert "without the image" in page
